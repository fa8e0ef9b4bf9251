"""Keys of a run's pseudo-gradients, and of the objects that its aggregator commits."""

import re
from dataclasses import dataclass

from millrace.errors import ConfigurationError
from millrace.keys.checkpoints import RESERVED_IN_JOBS
from millrace.keys.names import check_name

GATHERS = "gathers"
RESERVED_WORKERS = frozenset({*RESERVED_IN_JOBS, GATHERS, "epochs"})


@dataclass(frozen=True, slots=True)
class GradientKeys:
    """The gradients of one run.

    Attributes:
        run: Its name: a prefix below the store's URL.
        version: Of what the workers run: those of another are not looked at.
    """

    run: str
    version: str

    def __post_init__(self) -> None:
        for what, name in (("The run's name", self.run), ("The version", self.version)):
            if check_name(name, what=what) != name:
                raise ConfigurationError(f"{what} {name!r} begins or ends with '/'.")

    def worker(self, uid: str) -> str:
        """Return the prefix of all that a worker writes: its credentials reach no other."""
        if "/" in check_name(uid, what="The worker's name") or uid in RESERVED_WORKERS:
            raise ConfigurationError(
                f"The worker's name {uid!r} has a '/' in it, or is one of "
                f"{', '.join(sorted(RESERVED_WORKERS))}, as folders of ours are: call it "
                f"otherwise."
            )
        return f"{self.run}/{uid}/"

    def gradient(self, uid: str, window: int) -> str:
        """Return a worker's gradient of a window; one of torch's own files ends in ``.pt``."""
        return f"{self.worker(uid)}gradient-{window:09d}-{uid}-v{self.version}.safetensors"

    def start_window(self, uid: str, window: int) -> str:
        """With which window a worker began."""
        return f"{self.worker(uid)}start_window-{window:09d}-{uid}-v{self.version}.json"

    def parse(self, key: str) -> tuple[str, int] | None:
        """Return the worker and the window of a gradient's key, or None if it is no gradient's."""
        return self._parse_name(key, "gradient", r"(safetensors|pt)")

    def parse_start_window(self, key: str) -> tuple[str, int] | None:
        """Likewise of what says with which window a worker began."""
        return self._parse_name(key, "start_window", "json")

    def _parse_name(self, key: str, what: str, ending: str) -> tuple[str, int] | None:
        pattern = (
            re.escape(self.run)
            + rf"/(?P<uid>[^/]+)/{what}-(?P<window>[0-9]{{9,}})-(?P=uid)-v"
            + re.escape(self.version)
            + rf"\.{ending}"
        )
        match = re.fullmatch(pattern, key)
        return (match["uid"], int(match["window"])) if match else None


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """Keys of the objects that the aggregator of one run commits.

    Attributes:
        run: Its name.
        version: Of what its workers run.
    """

    run: str
    version: str

    @property
    def job(self) -> str:
        """All that the aggregator writes is below it; its checkpoints are this job's."""
        return f"{self.run}/{GATHERS}/{self.version}"

    @property
    def prefix(self) -> str:
        """Prefix of the job."""
        return f"{self.job}/"

    @property
    def links(self) -> str:
        """Prefix of the links."""
        return f"{self.prefix}chain/"

    def link(self, window: int) -> str:
        """Return the key of a window's link: created once. That of window 0 names a checkpoint."""
        return f"{self.links}{window:09d}.json"

    def parse_link(self, key: str) -> int | None:
        """Return the window whose link has this key; None of another key."""
        match = re.fullmatch(re.escape(self.links) + r"([0-9]{9,18})\.json", key)
        return int(match[1]) if match and self.link(int(match[1])) == key else None

    def opening(self, window: int) -> str:
        """Return the key of the rules that a window was opened with: created once."""
        return f"{self.prefix}windows/{window:09d}.json"

    def update(self, step: int, sha256: str) -> str:
        """Return the key of a merged gradient, by its step and the digest of its bytes."""
        return f"{self.prefix}{step:09d}-{sha256}.npz"
