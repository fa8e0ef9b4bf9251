"""World that a test begins with."""

from dataclasses import dataclass, field


@dataclass
class World:
    """World that a test begins with.

    Attributes:
        seed: Of all that is drawn.
        machines: How many hosts there are.
        fates: What becomes of machines, and how likely each is.
        first: What becomes of the machine that costs least.
        faults: How likely each fault of a request is: see ``FAULTS``.
        program: Seconds that a made up program runs.
        rate: How fast the clock goes by itself: 0 only when it is told to.
        real: Whether machines are run for real.
        image: Where the packages are that a real machine's image has, for its Python to find.
        index: Whether a machine with such an image may fetch further packages from pip's index.
        credit: Dollars of the account; none left, and nothing can be rented.
        lag: Seconds after which a machine comes to be seen in the listing.
        late: The same for a machine whose create is ``lost, listed late``.
        strict: Whether requests below the interval are refused.
    """

    seed: int = 0
    machines: int = 12
    fates: dict[str, float] = field(default_factory=dict)
    first: str = ""
    faults: dict[str, float] = field(default_factory=dict)
    program: float = 1e9
    rate: float = 0.0
    real: bool = False
    image: str = ""
    index: bool = False
    credit: float = 100.0
    lag: float = 0.0
    late: float = 90.0
    strict: bool = True
