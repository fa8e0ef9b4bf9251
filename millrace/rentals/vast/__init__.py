"""Access to Vast.ai through its own SDK: the API and its rented instances."""
