"""A rig: real hosts on one machine, each with its own network, processes and disk.

`hosts` makes them, `store` serves objects in one of them and counts, `ray_nodes` starts a Ray
cluster over them. The benchmark of the swarm and its fault matrix run on it.
"""

from benchmarks.rig.hosts import DISK, GOODPUT, Host, Rig, RigError, missing

__all__ = ["DISK", "GOODPUT", "Host", "Rig", "RigError", "missing"]
