"""Keys of a run's pseudo-gradients, and of the objects that its aggregator commits."""

import re
from dataclasses import dataclass

from millrace.digest import get_hex
from millrace.errors import ConfigurationError
from millrace.keys.checkpoints import RESERVED_IN_JOBS
from millrace.keys.names import NAME_PATTERN, check_name

GATHERS = "gathers"
"""Folder of all objects of a run's aggregator. The name is that of Templar's buckets."""
RESERVED_WORKERS = frozenset({*RESERVED_IN_JOBS, GATHERS, "epochs"})
"""Folders of a run or a job. No worker may have such a name."""
WORKER_KEY = re.compile(
    rf"(?P<scope>{NAME_PATTERN})/(?P<uid>[^/]+)/(?P<what>gradient|start_window|registration)-(?P<number>[0-9]{{9,18}})"
    r"-(?P=uid)-v(?P<version>[A-Za-z0-9][A-Za-z0-9._-]*)\.(?P<ending>safetensors|pt|json)"
)
"""Key of an object of any worker, by which `classify_key` recognises it."""
CHAIN_KEY = re.compile(
    rf"(?P<scope>{NAME_PATTERN})/{GATHERS}/(?P<version>{NAME_PATTERN})/"
    r"(?:(?P<step>[0-9]{9,18})-[0-9a-f]{64}\.(?:safetensors|npz)|chain/(?P<window>[0-9]{9,18})\.json"
    r"|windows/(?P<opening>[0-9]{9,18})\.json|scores/(?P<scores>[0-9]{9,18})\.json)"
)
"""Key of an object of any chain, by which `classify_key` recognises it.

Earlier versions wrote updates as ``.npz``.
"""


@dataclass(frozen=True, slots=True)
class GradientKeys:
    """Keys of the pseudo-gradients of one run.

    Attributes:
        run: Name of the run: a prefix below the store's URL.
        version: Version of the workers' program. Gradients of other versions are ignored.
    """

    run: str
    version: str

    def __post_init__(self) -> None:
        for what, name in (("The run's name", self.run), ("The version", self.version)):
            if check_name(name, what=what) != name:
                raise ConfigurationError(
                    f"{what} {name!r} begins or ends with '/': leave those slashes out."
                )

    def make_worker_prefix(self, uid: str) -> str:
        """Return the prefix of all objects of a worker. Its credentials allow writes only there."""
        checked = check_name(uid, what="The worker's name")
        if "/" in uid or checked in RESERVED_WORKERS:
            raise ConfigurationError(
                f"The worker's name {uid!r} has a '/' in it, or is reserved "
                f"({', '.join(sorted(RESERVED_WORKERS))}): choose another name."
            )
        return f"{self.run}/{uid}/"

    def make_gradient_key(self, uid: str, window: int) -> str:
        """Return the key of a worker's gradient of a window.

        `parse` also accepts ``.pt``, the ending of files that `torch.save` wrote.
        """
        return (
            f"{self.make_worker_prefix(uid)}gradient-{window:09d}-{uid}-v{self.version}.safetensors"
        )

    def make_start_window_key(self, uid: str, window: int) -> str:
        """Return the key of the report with which a worker begins a window."""
        return f"{self.make_worker_prefix(uid)}start_window-{window:09d}-{uid}-v{self.version}.json"

    def make_registration_prefix(self, uid: str) -> str:
        """Return the prefix of the registrations of a worker, of all versions."""
        return f"{self.make_worker_prefix(uid)}registration-"

    def make_registration_key(self, uid: str, number: int) -> str:
        """Return the key of a registration of a worker: created once."""
        return f"{self.make_registration_prefix(uid)}{number:09d}-{uid}-v{self.version}.json"

    def parse(self, key: str) -> tuple[str, int] | None:
        """Return the worker and the window of a gradient's key; None for other keys."""
        return self._parse_name(key, "gradient", r"(safetensors|pt)")

    def parse_start_window(self, key: str) -> tuple[str, int] | None:
        """Return the worker and the window of such a report's key; None for other keys."""
        return self._parse_name(key, "start_window", "json")

    def parse_registration(self, key: str) -> tuple[str, int] | None:
        """Return the worker and the number of a registration's key; None for other keys."""
        return self._parse_name(key, "registration", "json")

    def _parse_name(self, key: str, what: str, ending: str) -> tuple[str, int] | None:
        pattern = (
            re.escape(self.run)
            + rf"/(?P<uid>[^/]+)/{what}-(?P<window>[0-9]{{9,18}})-(?P=uid)-v"
            + re.escape(self.version)
            + rf"\.{ending}"
        )
        match = re.fullmatch(pattern, key)
        if match is None or match["window"] != f"{int(match['window']):09d}":
            return None  # with more zeros, one window would have many names
        return match["uid"], int(match["window"])


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """Keys of the objects that the aggregator of one run commits.

    Attributes:
        run: Name of the run.
        version: Version of the workers' program.
    """

    run: str
    version: str

    @property
    def job(self) -> str:
        """Name of the job of the aggregator's checkpoints, and prefix of all its objects."""
        return f"{self.run}/{GATHERS}/{self.version}"

    @property
    def prefix(self) -> str:
        """Prefix of the job."""
        return f"{self.job}/"

    @property
    def links(self) -> str:
        """Prefix of the links."""
        return f"{self.prefix}chain/"

    def make_link_key(self, window: int) -> str:
        """Return the key of a window's link: created once.

        The link of window 0 names a checkpoint.
        """
        return f"{self.links}{window:09d}.json"

    def parse_link(self, key: str) -> int | None:
        """Return the window whose link has this key; None for other keys."""
        return _parse_window(key, self.links)

    def make_opening_key(self, window: int) -> str:
        """Return the key of the opening of a window, which has its options."""
        return f"{self.prefix}windows/{window:09d}.json"

    @property
    def scores(self) -> str:
        """Prefix of the scores."""
        return f"{self.prefix}scores/"

    def make_scores_key(self, window: int) -> str:
        """Return the key of the scores after a window: created once."""
        return f"{self.scores}{window:09d}.json"

    def parse_scores(self, key: str) -> int | None:
        """Return the window whose scores have this key; None for other keys."""
        return _parse_window(key, self.scores)

    def make_update_key(self, step: int, digest: str) -> str:
        """Return the key of an update, from its step and the digest of its bytes."""
        return f"{self.prefix}{step:09d}-{get_hex(digest)}.safetensors"


def _parse_window(key: str, folder: str) -> int | None:
    """Return the window in the key of a record in a folder; None for other keys."""
    match = re.fullmatch(re.escape(folder) + r"([0-9]{9,18})\.json", key)
    return int(match[1]) if match and match[1] == f"{int(match[1]):09d}" else None
