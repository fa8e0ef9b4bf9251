"""The names under which Prefect's server knows what we share."""

UPLOADS = "millrace-uploads"
POOL = "millrace"
TAG = "millrace"
