"""Scripts that a person can start from."""
