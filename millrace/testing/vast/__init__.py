"""Stand-in of Vast.ai: the part of its HTTP API that renting uses, with billing.

The server is a separate process that outlives its clients, and has its own clock. Tests read from
it which machines still run and what was billed. The answers are modelled on observed answers of the
API: paths, strings for values, null fields, pages, statuses and bodies of errors, and 429 for
requests below an interval. Faults are injected by a seed, and counted.

A rented machine is either simulated or real. A simulated machine writes the reports of a rented
machine into its folder. The onstart of a real machine runs as a process of this computer, in its
own folder and with a clean environment. Only the simulated machines depend on Millrace, by their
reports.
"""

from millrace.testing.vast.client import StandInClock, VastServer
from millrace.testing.vast.faults import FAULTS, LISTS
from millrace.testing.vast.world import World

__all__ = ["FAULTS", "LISTS", "StandInClock", "VastServer", "World"]
