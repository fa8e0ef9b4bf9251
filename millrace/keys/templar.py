"""Keys of Templar's objects, which are at the root of a bucket.

The names are those of v0.2.80 and v2.1.28. A window has no leading zeros. A worker's name is a
number, and the version is that of the worker's program. ``gathers/`` is from earlier versions.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from millrace.errors import ConfigurationError
from millrace.keys.gradients import GATHERS


class TemplarKind(StrEnum):
    """Kind of an object of Templar's, as its name begins."""

    GRADIENT = "gradient"
    DEBUG = "debug"  # two values of each parameter of a validator
    AGGREGATOR = "aggregator"  # what was merged in a window
    CHECKPOINT = "checkpoint"
    START_WINDOW = "start_window"  # the first window of a version
    PEERS = "peers"  # the workers from a window on
    GATHERS = GATHERS


_NUMBER = "0|[1-9][0-9]{0,17}"
_VERSION = "[A-Za-z0-9](?:[A-Za-z0-9._+]|-(?!v))*"
_KEY = re.compile(
    rf"(?P<of_worker>gradient|debug|checkpoint)-(?P<window>{_NUMBER})-(?P<uid>{_NUMBER})-v(?P<v1>{_VERSION})\.pt"
    rf"|aggregator-(?P<merged>{_NUMBER})-v(?P<v2>{_VERSION})\.pt"
    rf"|start_window_v(?P<v3>{_VERSION})\.json"
    rf"|peers_(?P<since>{_NUMBER})_v(?P<v4>{_VERSION})\.json"
    rf"|{GATHERS}/(?P<v5>{_VERSION})/(?P<rest>.+\.npz)"
)


@dataclass(frozen=True, slots=True)
class TemplarKey:
    """Parts of a key of Templar's.

    Attributes:
        kind: Kind of the object.
        version: Version of the worker's program, such as ``0.2.80``.
        window: Number of the window; -1 if the key has none.
        uid: Number of the worker; -1 if the key has none.
        rest: Path below the folder of the version, of `TemplarKind.GATHERS`; empty for others.
    """

    kind: TemplarKind
    version: str
    window: int = -1
    uid: int = -1
    rest: str = ""


def make_templar_key(parts: TemplarKey) -> str:
    """Return the key of an object of Templar's.

    Raises:
        ConfigurationError: The parts are not those of a key of this kind.
    """
    kind, version, window = parts.kind, parts.version, parts.window
    match kind:
        case TemplarKind.AGGREGATOR:
            key = f"{kind}-{window}-v{version}.pt"
        case TemplarKind.START_WINDOW:
            key = f"{kind}_v{version}.json"
        case TemplarKind.PEERS:
            key = f"{kind}_{window}_v{version}.json"
        case TemplarKind.GATHERS:
            key = f"{kind}/{version}/{parts.rest}"
        case _:
            key = f"{kind}-{window}-{parts.uid}-v{version}.pt"
    if parse_templar_key(key) != parts:
        raise ConfigurationError(
            f"Templar has no {kind} object of version {version!r}, window {window} and worker "
            f"{parts.uid}: give a version such as 0.2.80, and numbers that are not negative."
        )
    return key


def parse_templar_key(key: str) -> TemplarKey | None:
    """Return the parts of a key of Templar's; None for any other key."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    if kind := match["of_worker"]:
        return TemplarKey(TemplarKind(kind), match["v1"], int(match["window"]), int(match["uid"]))
    if version := match["v2"]:
        return TemplarKey(TemplarKind.AGGREGATOR, version, int(match["merged"]))
    if version := match["v3"]:
        return TemplarKey(TemplarKind.START_WINDOW, version)
    if version := match["v4"]:
        return TemplarKey(TemplarKind.PEERS, version, int(match["since"]))
    return TemplarKey(TemplarKind.GATHERS, match["v5"], rest=match["rest"])
