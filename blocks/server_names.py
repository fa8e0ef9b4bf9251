"""The names under which Prefect's server knows what we share."""

UPLOAD_LIMIT = "millrace-uploads"
WORK_POOL = "millrace"
TAG = "millrace"
