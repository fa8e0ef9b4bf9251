"""Peers of the swarm. `benchmarks.swarm_peers.run` runs them on a rig.

Each peer is a script of its own that is run in the rig's hosts, one of them by another Python:
nothing is imported here.
"""
