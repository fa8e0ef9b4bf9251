"""Vast.ai's HTTP API, as much of it as renting takes: a process of its own, that keeps the books.

It outlives its clients, has a clock of its own, and is the judge of what was left and billed. What
it answers is what the API was seen to answer: paths, strings for values, fields that are null,
pages, statuses and bodies of errors, 429 below an interval. Faults are injected by a seed, and
counted. A rented machine is either made up, which then writes into the folder that it was given
what a real one would, or run for real: its onstart as a process of this machine, in a folder of
its own, with nothing of our environment.

It knows nothing of Millrace, but for the made up machines: what those write is what a rented
machine writes.
"""

from millrace.testing.vast.client import StandInClock, VastServer
from millrace.testing.vast.faults import FAULTS, LISTS
from millrace.testing.vast.world import World

__all__ = ["FAULTS", "LISTS", "StandInClock", "VastServer", "World"]
