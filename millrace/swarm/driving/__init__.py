"""Parts of the driver: each owns one kind of state, and `millrace.swarm.driver` connects them."""
