"""Records that are committed to a bucket."""
