"""Generate hostile objects from a seed: names, records and sizes that no program of ours writes."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from random import Random
from typing import Any

LONGEST = 1024  # bytes of a key, prefix included: S3's limit
GIB = 1 << 30
YEAR = timedelta(days=365)
MARKUP = (
    "](https://evil.example/a) ![](https://evil.example/b.png) <img src=x onerror=alert(1)> "
    "| a | b |\n|---|---|\n# heading\n```\n<script>alert(2)</script> \x1b[2J\u202e"
)


class Kind(StrEnum):
    """Kinds of hostile objects."""

    EMPTY_SEGMENT = "name with //"
    DOTS = "name with .."
    CONTROL = "name with control characters"
    LONG = "name of 1,024 bytes"
    SCRIPT = "name in another script"
    MARKUP_NAME = "name of Markdown"
    NEAR = "name almost of ours"
    FOLDER = "name that ends in a slash"
    CUT = "record cut"
    HUGE = "record above its limit"
    OTHER_KIND = "record of another kind"
    LATER = "record of a later version"
    TYPES = "record with wrong types"
    DEEP = "record of deep JSON"
    MARKUP = "record with Markdown and HTML"
    AHEAD = "record a year ahead"
    BEHIND = "record a year behind"
    GHOST = "record of a ghost"
    NOISE = "random bytes"
    EMPTY = "object of 0 bytes"
    GIANT = "object of 5 GiB by listing"
    MESSAGE = "message of a lying node"
    CHAIN = "forged link or update"


CONTROLS = ("\x01", "\x1b[2J", "\n", "\r\n", "\t", "\x7f", "\x0b")
"""Control characters of names."""
CONTROLS_OF_RGW = ("\n", "\r\n", "\t", "\x7f")
"""Those of which XML 1.0 has a form. Where a name has another, RGW (Ceph 16.2) answers 500 to some
listings of objects, and from then on to every listing of the bucket's unfinished uploads."""
NAMES = (
    Kind.EMPTY_SEGMENT, Kind.DOTS, Kind.CONTROL, Kind.LONG, Kind.SCRIPT, Kind.MARKUP_NAME,
    Kind.NEAR, Kind.FOLDER,
)  # fmt: skip
LITTER = (Kind.EMPTY_SEGMENT, Kind.DOTS, Kind.CONTROL, Kind.FOLDER)
"""Names that no key of ours can have, wherever they stand."""
RECORDS = tuple(kind for kind in Kind if kind not in {*NAMES, Kind.MESSAGE, Kind.CHAIN})
OBJECTS = (*NAMES, *RECORDS)
UNREADABLE = frozenset({Kind.CUT, Kind.DEEP, Kind.NOISE, Kind.EMPTY, Kind.GIANT})
"""Records that no reader can take for right."""


@dataclass(frozen=True, slots=True)
class Junk:
    """A hostile object.

    Attributes:
        kind: Kind of the object.
        key: Key below the site's URL.
        body: Bytes that are written.
        size: Size that the store's listing and headers claim; None for the true one.
        shift: Time by which the store's listing lies about the object's age.
    """

    kind: Kind
    key: str
    body: bytes
    size: int | None = None
    shift: timedelta = timedelta(0)


def hostile_name(
    kind: Kind, folder: str, leaf: str, room: int, dice: Random, controls: Sequence[str] = CONTROLS
) -> str:
    """Return a key below a folder (empty, or with a slash at its end).

    Args:
        kind: One of `NAMES`.
        folder: Folder that the principal may write below.
        leaf: Name of an object of ours, which a hostile name may resemble.
        room: Most bytes of the key.
        dice: Source of chance.
        controls: Control characters that the store can have in names.
    """
    match kind:
        case Kind.EMPTY_SEGMENT:
            name = dice.choice([f"/{leaf}", f"a//{leaf}", f"//{leaf}", "a///", "/"])
        case Kind.DOTS:
            name = dice.choice([f"../{leaf}", f"a/../{leaf}", "./x", "..", "a/./b", "../../../etc"])
        case Kind.CONTROL:
            drawn = dice.randrange(len(CONTROLS))  # the same draws for every store
            odd = CONTROLS[drawn]
            odd = odd if odd in controls else controls[drawn % len(controls)]
            name = dice.choice([f"{odd}{leaf}", f"{leaf}{odd}", f"a{odd}/{leaf}"])
        case Kind.LONG:
            name = "x" * (room - len(folder.encode()) - len(leaf.encode()) - 1) + f"/{leaf}"
        case Kind.SCRIPT:
            script = dice.choice(["مرحبا", "模型", "модель", "🧨", "e\u0301", "\u202egpj", "ß"])
            name = dice.choice([f"{script}/{leaf}", f"{script}{leaf}", f"{leaf}{script}"])
        case Kind.MARKUP_NAME:
            name = dice.choice(["<b>", "![](x)", "a|b|c", "`x`", "[x](y)", "&lt;"]) + leaf
        case Kind.NEAR:
            name = dice.choice([
                leaf.upper(), f"{leaf}.json", f"{leaf}~", f".{leaf}", f"{leaf} ", f"x/{leaf}",
                re.sub(r"[0-9]", "\u0663", leaf), re.sub(r"[0-9]+", "9" * 40, leaf), leaf[:-1],
            ])  # fmt: skip
        case _:
            name = f"{leaf}/"
    return f"{folder}{name}"


def hostile_body(  # noqa: PLR0911 - one of each kind
    kind: Kind, body: bytes, others: Sequence[bytes], dice: Random
) -> bytes:
    """Return what a principal writes in the place of a record.

    Args:
        kind: One of `RECORDS`.
        body: Bytes of a genuine record or other object.
        others: Bytes of genuine records of any kind.
        dice: Source of chance.
    """
    match kind:
        case Kind.CUT:
            return body[: dice.randrange(len(body))] if body else b"{"
        case Kind.HUGE:
            return body[:-1] + b" " * (3 << 20) + body[-1:] if body else b" " * (3 << 20)
        case Kind.OTHER_KIND:
            return dice.choice(others) if others else b"{}"
        case Kind.LATER:
            return _changed(body, lambda record: {**record, "version": 1000})
        case Kind.TYPES:
            return _changed(body, lambda record: _retyped(record, dice))
        case Kind.DEEP:
            depth = dice.choice([2_000, 100_000])
            return dice.choice([b"[", b'{"record":']) * depth
        case Kind.MARKUP:
            return _changed(body, lambda record: _texts(record, lambda text: text + MARKUP))
        case Kind.AHEAD:
            return _changed(body, lambda record: _texts(record, lambda text: _moved(text, YEAR)))
        case Kind.BEHIND:
            return _changed(body, lambda record: _texts(record, lambda text: _moved(text, -YEAR)))
        case Kind.NOISE:
            return dice.randbytes(dice.choice([1, 8, 100, 5000]))
        case _:
            return b""


def _changed(body: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return a record in JSON with a change; of what is not JSON, a text."""
    try:
        record = json.loads(body)
    except ValueError:
        return json.dumps({"kind": "chain-link", "version": 1, "nonce": "", "record": {}}).encode()
    return json.dumps(change(record) if isinstance(record, dict) else record).encode()


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a record with all texts below ``record`` changed; its envelope stays."""
    match value:
        case {"record": record, "kind": _}:
            return {**value, "record": _texts(record, change)}
        case dict():
            return {name: _texts(each, change) for name, each in value.items()}
        case list():
            return [_texts(each, change) for each in value]
        case str():
            return change(value)
        case _:
            return value


def _moved(text: str, by: timedelta) -> str:
    try:
        return (datetime.fromisoformat(text) + by).isoformat()
    except ValueError:
        return text


def _retyped(record: dict[str, Any], dice: Random) -> dict[str, Any]:
    inner = record.get("record")
    fields = inner if isinstance(inner, dict) and inner else record
    if not fields:
        return {"x": dice.choice([None, 1, []])}
    name = dice.choice(sorted(fields))
    odd = dice.choice([None, [], {}, "x", -1, 1e308, 10**30, True, [[]], {"a": {"b": []}}, "\x00"])
    changed = {**fields, name: odd}
    return {**record, "record": changed} if fields is inner else changed


@dataclass(frozen=True, slots=True)
class Reach:
    """Objects that a principal may write.

    Attributes:
        prefixes: Prefixes that it may write below.
        spares: Keys below them that it leaves as they are.
        litter: Prefixes of ours where it may leave names that are nobody's.
        scopes: Folders of ours in whose place it may write beside: a whole run, job or dataset
            of junk.
        ghosts: Names of members whose records it may write with a name that no roster has.
    """

    prefixes: tuple[str, ...]
    spares: Callable[[str], bool] = lambda _: False
    litter: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    ghosts: tuple[str, ...] = ()


def make_junk(
    reach: Reach,
    genuine: Mapping[str, bytes],
    count: int,
    room: int,
    dice: Random,
    controls: Sequence[str] = CONTROLS,
) -> list[Junk]:
    """Return so many hostile objects, each of a kind that comes in turn, or only ghosts.

    Args:
        reach: Objects that the principal may write.
        genuine: Objects of a run that nobody disturbed, by their keys.
        count: Number of objects.
        room: Most bytes of a key.
        dice: Source of chance.
        controls: Control characters that the store can have in names.
    """
    made: dict[str, Junk] = {}
    kinds = list(OBJECTS)
    dice.shuffle(kinds)
    records = sorted(genuine)
    others = [genuine[key] for key in records if key.endswith(".json")]
    places = list(_places(reach, records, dice))
    ghosts = list(_ghosts(reach, records, dice))
    if ghosts and dice.random() < 0.5:
        kinds = [Kind.GHOST]  # other junk in the same places hides ghosts
    number = 0
    while len(made) < count and number < 20 * count:
        kind = kinds[number % len(kinds)]
        number += 1
        if kind in NAMES:
            folders = _folders(reach, records)
            if kind in LITTER:
                folders += reach.litter
            if not folders:
                continue
            folder = dice.choice(folders)
            leaf = dice.choice(records).rpartition("/")[2] if records else "x.json"
            key = hostile_name(kind, folder, leaf, room, dice, controls)
            one = Junk(kind, key, dice.choice([b"", b"x", b"{}", *others[:3]]))
        elif kind is Kind.GHOST:
            if not ghosts:
                continue
            key, origin, member, ghost = dice.choice(ghosts)
            one = Junk(kind, key, rename_member(genuine[origin], member, ghost))
        elif places:
            key, origin = dice.choice(places)
            one = _record(kind, key, genuine[origin], others, dice)
        elif reach.prefixes:
            folder = dice.choice(_folders(reach, records))
            one = _record(kind, f"{folder}x{number}.json", b"{}", others, dice)
        else:
            continue
        if len(one.key.encode()) <= room and not reach.spares(one.key) and one.key not in made:
            made[one.key] = one
    return list(made.values())


def name_ghost(member: str, dice: Random) -> str:
    """Return a name that no roster has, as long as that of a member: headers have fixed sizes."""
    return f"ghost-{dice.randrange(8)}".ljust(len(member), "x")


def rename_member(body: bytes, member: str, ghost: str) -> bytes:
    """Return a record of a member under another name."""
    return body.replace(member.encode(), ghost.encode())


def _record(kind: Kind, key: str, body: bytes, others: Sequence[bytes], dice: Random) -> Junk:
    size = 5 * GIB if kind is Kind.GIANT else None
    shift = {Kind.AHEAD: YEAR, Kind.BEHIND: -YEAR}.get(kind, timedelta(0))
    return Junk(kind, key, hostile_body(kind, body, others, dice), size, shift)


def _folders(reach: Reach, keys: Sequence[str]) -> list[str]:
    """Return the prefixes that a principal may write below, and the folders of ours there."""
    found = set(reach.prefixes)
    for key in keys:
        folder = key.rpartition("/")[0] + "/"
        if folder.startswith(reach.prefixes) and not reach.spares(f"{folder}x"):
            found.add(folder)
    return sorted(found)


def _places(reach: Reach, keys: Sequence[str], dice: Random) -> Iterator[tuple[str, str]]:
    """Yield keys for records, each with that of the genuine object."""
    for key in keys:
        if reach.prefixes:
            yield dice.choice(reach.prefixes) + key.rpartition("/")[2], key
        if key.startswith(reach.prefixes) and not reach.spares(key):
            yield key, key
            for run in re.finditer(r"[0-9]+", key):
                width = len(run.group())
                other = f"{(int(run.group()) + dice.choice([1, 2, 7])) % 10**width:0{width}d}"
                beside = key[: run.start()] + other + key[run.end() :]
                if beside.startswith(reach.prefixes) and beside not in keys:
                    yield beside, key
        for scope in reach.scopes:
            if key.startswith(scope):
                parent = scope[:-1].rpartition("/")[0]
                evil = f"evil-{dice.randrange(4)}/{key.removeprefix(scope)}"
                yield f"{parent}/{evil}" if parent else evil, key


def _ghosts(reach: Reach, keys: Sequence[str], dice: Random) -> Iterator[tuple[str, str, str, str]]:
    """Yield keys for records of ghosts, each with that of the genuine object, and both names.

    The name is in the key, or in the record only, which lies where the writer's own would. Ghosts
    stay: there is no end of their leases.
    """
    for key in keys:
        if key.endswith(".end"):
            continue
        for member in reach.ghosts:
            ghost = name_ghost(member, dice)
            pattern = rf"(?<=[/-]){re.escape(member)}(?=[/.-])"
            named = {re.sub(pattern, ghost, key)} - {key}
            for own in reach.prefixes:
                theirs = f"{own[:-1].rpartition('/')[0]}/{member}/"
                if key.startswith(theirs):
                    named.add(own + key.removeprefix(theirs))
                    named.add(own + re.sub(pattern, ghost, key.removeprefix(theirs)))
            for place in sorted(named):
                if place.startswith(reach.prefixes) and not reach.spares(place):
                    yield place, key, member, ghost
