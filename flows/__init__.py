"""What runs, in which order, with which parameters. One flow a file."""
