"""Initial state of the server in a test."""

from dataclasses import dataclass, field


@dataclass
class World:
    """Hosts, account and behaviour of the server from a reset on.

    Attributes:
        seed: Seed of all random choices.
        machines: Number of hosts.
        fates: Probability of each fate of a machine. See `StandInInstance.fate`.
        first: Fate of the cheapest machine.
        faults: Probability of each fault of a request. See ``FAULTS``.
        program: Seconds that a simulated program runs.
        rate: Seconds of the clock per real second; 0 for a clock that only `advance` moves.
        real: Whether machines run as processes; by default they are simulated.
        image: Folder of the Python packages in the image of a real machine; empty for none.
        index: Whether a machine with such an image can download packages from pip's index.
        credit: Dollars of the account. Nothing can be rented without credit.
        lag: Seconds after its creation before a machine is listed.
        late: Value of `lag` for a machine whose creation had the fault ``lost, listed late``.
        strict: Whether requests below the interval are refused.
    """

    seed: int = 0
    machines: int = 12
    fates: dict[str, float] = field(default_factory=dict[str, float])
    first: str = ""
    faults: dict[str, float] = field(default_factory=dict[str, float])
    program: float = 1e9
    rate: float = 0.0
    real: bool = False
    image: str = ""
    index: bool = False
    credit: float = 100.0
    lag: float = 0.0
    late: float = 90.0
    strict: bool = True
