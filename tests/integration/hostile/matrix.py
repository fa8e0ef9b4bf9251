"""Run flows over hostile sites from seeds, and judge each by the same flow undisturbed."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from millrace.testing.rgw import RGW
from tests.integration.hostile.flows import FLOWS
from tests.integration.hostile.junk import Kind
from tests.integration.hostile.lens import Lens
from tests.integration.hostile.site import Ended, Server, run_site

BUCKET = "hostile"
MOST_SENT = 128 << 20
"""Bytes that one answer may send of an object of 5 GiB before the reader is unbounded."""
OUT_OF_REACH = {"millrace machine offers"}  # it reads nothing that others may write
EXPECTED_CODES = {"millrace bucket audit": 20}  # one key may do everything
"""Exit codes of commands undisturbed; those of all others are 0."""
FACTOR = 3  # requests, beside those of an undisturbed run
EACH = 8  # requests for each hostile object: a person's command deletes some one by one


class UndisturbedError(Exception):
    """A flow fails where nobody disturbs it."""


@dataclass(frozen=True, slots=True)
class _Clean:
    """A flow undisturbed.

    Attributes:
        built: Objects that it begins with.
        genuine: Objects that are there at its end, and those at its begin.
        result: Its result.
        requests: Number of its requests.
    """

    built: dict[str, bytes]
    genuine: dict[str, bytes]
    result: Any
    requests: int


@dataclass
class Verdicts:
    """Results of all runs.

    Attributes:
        runs: Number of runs, by flow.
        stopped: Runs that ended with an error, hung, or took more memory than they may.
        misled: Runs with another result than undisturbed.
        late: Runs after which a machine was billed longer than it may be.
        unbounded: Runs that read an object, or asked the store, without a bound.
        spared: Runs beside which no hostile object was written.
        unnamed: Runs whose report does not say what is wrong with what a sender sent.
        held: Reports of which it was known what they must say of a sender, by flow.
        met: Hostile objects that were read, described or listed, by flow.
        read: Hostile objects that were read or described, by kind.
        listed: Hostile objects that a listing showed, by kind.
    """

    runs: Counter[str] = field(default_factory=Counter[str])
    stopped: list[str] = field(default_factory=list[str])
    misled: list[str] = field(default_factory=list[str])
    late: list[str] = field(default_factory=list[str])
    unbounded: list[str] = field(default_factory=list[str])
    spared: list[str] = field(default_factory=list[str])
    unnamed: list[str] = field(default_factory=list[str])
    held: Counter[str] = field(default_factory=Counter[str])
    met: Counter[str] = field(default_factory=Counter[str])
    read: Counter[Kind] = field(default_factory=Counter[Kind])
    listed: Counter[Kind] = field(default_factory=Counter[Kind])

    def __iadd__(self, other: "Verdicts") -> "Verdicts":
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            ours.update(theirs) if isinstance(ours, Counter) else ours.extend(theirs)
        return self

    @property
    def wrong(self) -> list[str]:
        """All that is wrong, a sentence each."""
        found = [self.stopped, self.misled, self.late, self.unbounded, self.spared, self.unnamed]
        return [line for lines in found for line in lines]

    def format_table(self) -> str:
        """Return the runs by flow, and the kinds of objects that were really read."""
        rows = [f"{'flow':<36}{'runs':>6}{'met':>8}{'held to a name':>18}"]
        rows += [
            f"{name:<36}{runs:>6}{self.met[name]:>8}{self.held[name]:>18}"
            for name, runs in self.runs.items()
        ]
        rows.append(f"\n{'hostile objects':<34}{'read':>8}{'listed':>8}")
        rows += [f"{kind:<34}{self.read[kind]:>8}{self.listed[kind]:>8}" for kind in Kind]
        return "\n".join(rows)

    def format_sentence(self) -> str:
        """Return the counts that decide."""
        return (
            f"hostile runs {self.runs.total()}: stopped {len(self.stopped)}, misled "
            f"{len(self.misled)}, billed late {len(self.late)}, unbounded {len(self.unbounded)}, "
            f"unnamed {len(self.unnamed)} of {self.held.total()}; hostile objects read "
            f"{self.read.total()}, listed {self.listed.total()}"
        )


class Matrix:
    """Flows over sites in one bucket of an RGW.

    Args:
        lens: The store that flows work on.
        server: The servers, as processes are told of them.
        folder: Folder for files of the runs.
    """

    def __init__(self, lens: Lens, server: Server, folder: Path) -> None:
        self._lens, self._server, self._folder = lens, server, folder
        self._clean: dict[str, _Clean] = {}
        self._lock = threading.Lock()
        self._locks = {name: threading.Lock() for name in FLOWS}
        self.verdicts = Verdicts()

    def run(self, name: str, seed: str) -> Verdicts:
        """Run a flow over a hostile site, judge it, and add the verdict to those of all runs."""
        clean = self._undisturbed(name)
        site = f"{name}-{seed}".replace(" ", "-")
        folder = self._folder / site
        ended = run_site(
            name, "act", self._server, site, folder,
            seed=f"{name} {seed}", genuine=clean.genuine, built=clean.built,
        )  # fmt: skip
        asked = self._lens.take(f"{site}/")
        shutil.rmtree(folder)
        where = f"{name} with seed {seed!r}"
        kinds = {f"{site}/{key}": Kind(kind) for kind, key in ended.junk}
        read = Counter(kinds[key] for key in asked.read if key in kinds)
        listed = Counter(kinds[key] for key in asked.listed if key in kinds)
        most = FACTOR * clean.requests + EACH * len(kinds)
        found = Verdicts(runs=Counter([name]), read=read, listed=listed)
        found.read.update(Kind(kind) for kind in ended.read)
        found.met[name] = found.read.total() + found.listed.total()
        said = [line[:300] for line in ended.said[-6:]]
        if ended.error:
            found.stopped.append(f"{where}: {ended.error}")
        elif ended.result != clean.result:
            found.misled.append(f"{where}: {_difference(clean.result, ended.result)}; {said}")
        if not (kinds or ended.error or name in OUT_OF_REACH):
            found.spared.append(f"{where}: no hostile object was written")
        if isinstance(ended.result, dict) and ended.result["late"]:
            found.late.append(f"{where}: {ended.result}")
        over = [f"{key}: {size}" for key, size in asked.sent.items() if size > MOST_SENT]
        if over or asked.requests > most:
            found.unbounded.append(
                f"{where}: {asked.requests} requests, {clean.requests} undisturbed; {over}"
            )
        if not ended.error:
            found.held[name] += len(ended.blamed)
            found.unnamed += [
                f"{where}: {words} are in no line of {said}" for words in silent(ended)
            ]
        with self._lock:
            self.verdicts += found
        return found

    def _undisturbed(self, name: str) -> _Clean:
        with self._locks[name]:
            if name not in self._clean:
                self._clean[name] = self._made(name)
            return self._clean[name]

    def _made(self, name: str) -> _Clean:
        site = f"{name}-build".replace(" ", "-")
        folder = self._folder / site
        _refuse(name, run_site(name, "build", self._server, site, folder))
        built = self._objects(site)
        site = f"{name}-clean".replace(" ", "-")
        ended = run_site(name, "act", self._server, site, folder, built=built)
        _refuse(name, ended)
        refuse_exit_code(name, ended.result)
        asked = self._lens.take(f"{site}/")
        genuine = self._objects(site) | built
        return _Clean(built, genuine, ended.result, asked.requests)

    def _objects(self, site: str) -> dict[str, bytes]:
        from tests.integration.hostile.site import Site

        return Site(self._server, site, self._folder).read_objects()


def silent(ended: Ended) -> list[list[str]]:
    """Return the words about senders that no line of a report has together."""
    return [
        words for words in ended.blamed
        if not any(all(word in line for word in words) for line in ended.said)
    ]  # fmt: skip


def _refuse(name: str, ended: Ended) -> None:
    if ended.error:
        raise UndisturbedError(f"{name} fails where nobody disturbs it: {ended.error}")


def refuse_exit_code(name: str, result: Any) -> None:
    """Refuse a command that fails undisturbed: each later failure would be the same result."""
    if not name.startswith("millrace "):
        return
    if name.startswith("millrace machine "):
        _, failures, _ = result["result"]  # exit codes other than expected
    else:
        failures = [] if result[0] == EXPECTED_CODES.get(name, 0) else [result[0]]
    if failures:
        raise UndisturbedError(f"{name} ends with {failures} where nobody disturbs it")


def _difference(clean: Any, found: Any) -> str:
    """Return where two results differ, cut."""
    if isinstance(clean, list) and isinstance(found, list) and len(clean) == len(found):
        for one, other in zip(clean, found, strict=True):
            if one != other:
                return _difference(one, other)
    if isinstance(clean, list) and isinstance(found, list):
        ours, theirs = ({json.dumps(each) for each in some} for some in (clean, found))
        return f"missing {sorted(ours - theirs)[:4]}, more {sorted(theirs - ours)[:4]}"
    return f"{json.dumps(clean)[:400]} became {json.dumps(found)[:400]}"


@contextmanager
def hostile_matrix(rgw: RGW, folder: Path) -> Iterator[Matrix]:
    """Start a lens before an RGW, and yield a matrix."""
    rgw.create_bucket(BUCKET)
    with ExitStack() as stack:
        lens = stack.enter_context(Lens.start(rgw.endpoint, BUCKET))
        key = rgw.full
        server = Server(
            rgw.endpoint, lens.endpoint, BUCKET, key.access_key_id, key.secret_access_key
        )
        yield Matrix(lens, server, folder)


def seeds(count: int, seed: int) -> Sequence[tuple[str, str]]:
    """Return so many flows with seeds, all flows in turn."""
    names = list(FLOWS)
    return [(names[number % len(names)], f"{seed}-{number}") for number in range(count)]
