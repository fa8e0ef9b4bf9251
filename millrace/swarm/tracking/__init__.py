"""Parts of the tracker: each owns one kind of state, and `millrace.swarm.tracker` connects them."""
