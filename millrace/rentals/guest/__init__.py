"""Files that run on a rented machine: installation, program, traffic counter and watchdog."""
