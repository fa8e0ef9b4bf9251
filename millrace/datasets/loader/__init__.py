"""Read datasets for training: from a bucket to pages of rows, and to batches."""
