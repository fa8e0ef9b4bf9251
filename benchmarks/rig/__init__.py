"""A rig: several hosts on one machine, each with its own network, processes and disk.

`hosts` creates the hosts. `store` serves objects from one of them, and counts requests and bytes.
`ray_nodes` starts a Ray cluster on them. The benchmark of the swarm and its fault tests use it.
"""

from benchmarks.rig.hosts import DISK, GOODPUT, Rig, RigError, RigHost, find_obstacle

__all__ = ["DISK", "GOODPUT", "Rig", "RigError", "RigHost", "find_obstacle"]
