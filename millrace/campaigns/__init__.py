"""Train on rented machines: from a dataset's source to published weights."""
