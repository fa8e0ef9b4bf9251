"""A prefix of a bucket that one run has for itself: what is put there, and what a flow makes of it.

Every run is a process of its own, forked from one that has imported all that it needs, with a
limit on its memory: a read without a bound ends the run.
"""

import json
import logging
import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from pydantic import SecretStr

from millrace.progress import Event
from millrace.storage import Credentials, Store, StoreSpec, open_store
from millrace.testing.key import Key, connect
from millrace.testing.process import ask
from tests.integration.hostile.junk import (
    CONTROLS_OF_RGW,
    GIB,
    LONGEST,
    RECORDS,
    UNREADABLE,
    Junk,
    Kind,
    Reach,
    hostile_body,
    make_junk,
    name_ghost,
    rename_member,
)
from tests.integration.hostile.lens import CONTROL

MEMORY = 2_500_000_000  # bytes that a run may take, beside what it has at its begin
HANGS = 300.0  # seconds after which a run is taken for one that hangs
_WRITERS = 16
_AGE = 3600.0  # seconds that the objects of ours are old: RGW tells whole seconds


@dataclass(frozen=True, slots=True)
class Server:
    """Servers that the runs share.

    Attributes:
        rgw: Address of RGW, where hostile objects are written.
        lens: Address of the store that counts requests, where flows work.
        bucket: Bucket of all runs.
        access_key_id: Key of its owner.
        secret_access_key: Secret of the key.
        vast: Address of the stand-in of Vast.ai; empty where no flow rents.
    """

    rgw: str
    lens: str
    bucket: str
    access_key_id: str
    secret_access_key: str
    vast: str = ""


@dataclass
class Site:
    """A run's own prefix.

    Attributes:
        server: Servers that all runs share.
        name: Name of the prefix.
        folder: Folder for files of the run.
        reach: Objects that the principal may write; None where nobody disturbs the run.
        count: Number of hostile objects that are there at the begin.
        seed: Seed of all chance.
        genuine: Objects of an undisturbed run, by their keys: hostile ones resemble them.
        junk: Hostile objects that were written.
        said: Events, warnings and reasons that the flow has reported.
        blamed: Texts that one line of what it has told must have, each list of another line: the
            name of a sender, and what is wrong with what it sent.
        unread: Hostile files, and their time of access when they were written.
        read: Kinds of hostile files that were read.
    """

    server: Server
    name: str
    folder: Path
    reach: Reach | None = None
    count: int = 0
    seed: str = ""
    genuine: dict[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    junk: list[Junk] = field(default_factory=list[Junk])
    said: list[str] = field(default_factory=list[str])
    blamed: list[list[str]] = field(default_factory=list[list[str]])
    unread: dict[str, tuple[Kind, float]] = field(default_factory=dict[str, tuple[Kind, float]])
    read: list[Kind] = field(default_factory=list[Kind])

    def __post_init__(self) -> None:
        self.dice, self.built = Random(self.seed), frozenset[str]()
        key = Key(self.server.access_key_id, self.server.secret_access_key)
        self._client = connect(self.server.rgw, key)

    @property
    def prefix(self) -> str:
        """The prefix of the run's keys in the bucket."""
        return f"{self.name}/"

    def make_spec(self, below: str = "") -> StoreSpec:
        """Return the store of the site, or of a folder below it."""
        return StoreSpec(
            url=f"s3://{self.server.bucket}/{self.prefix}{below}".rstrip("/"),
            endpoint=self.server.lens,
            region="us-east-1",
            credentials=Credentials(
                access_key_id=self.server.access_key_id,
                secret_access_key=SecretStr(self.server.secret_access_key),
            ),
        )

    def open_store(self, below: str = "") -> Store:
        """Open the store of the site, or of a folder below it."""
        return open_store(self.make_spec(below))

    def hear(self, event: Event) -> None:
        """Remember an event."""
        self.said.append(" ".join([event.kind, *map(str, asdict(event).values())]))

    def blame(self, below: str, key: str, line: str) -> None:
        """Note that a line of the report must name an object, if junk stands there unreadable.

        Args:
            below: Folder of the site that the key is below.
            key: Key of a record.
            line: Beginning of the line.
        """
        if any(one.key == below + key and one.kind in UNREADABLE for one in self.junk):
            self.blamed.append([line, key])

    def list_everything(self) -> list[str]:
        """List all keys of the site, without Millrace."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.server.bucket, Prefix=self.prefix
        )
        found = (each["Key"] for page in pages for each in page.get("Contents", []))
        return [key.removeprefix(self.prefix) for key in found]

    def list_unwritten(self) -> list[str]:
        """List the keys that are there and no principal has written."""
        return self.find_genuine(self.list_everything())

    def find_genuine(self, keys: Iterable[str]) -> list[str]:
        """Return those of some keys that the run began with, or no principal has written."""
        theirs = {one.key for one in self.junk} - self.built
        return [key for key in keys if key not in theirs]

    def put(self, key: str, body: bytes) -> None:
        """Write an object, without Millrace."""
        self._client.put_object(Bucket=self.server.bucket, Key=self.prefix + key, Body=body)

    def begin_upload(self, key: str) -> None:
        """Begin an upload of several parts, and leave it."""
        self._client.create_multipart_upload(Bucket=self.server.bucket, Key=self.prefix + key)

    def list_uploads(self) -> list[str]:
        """List the keys of unfinished uploads."""
        found = self._client.list_multipart_uploads(Bucket=self.server.bucket, Prefix=self.prefix)
        return [each["Key"] for each in found.get("Uploads", [])]

    def look_at_files(self) -> None:
        """Note which hostile files were read, by their time of access (`relatime`)."""
        for path, (kind, accessed) in self.unread.items():
            if Path(path).exists() and Path(path).stat().st_atime != accessed:
                self.read.append(kind)

    def read_objects(self) -> dict[str, bytes]:
        """Read all objects of the site, without Millrace."""

        def read(key: str) -> bytes:
            found = self._client.get_object(Bucket=self.server.bucket, Key=self.prefix + key)
            return found["Body"].read()

        keys = self.list_everything()
        with ThreadPoolExecutor(_WRITERS) as pool:
            return dict(zip(keys, pool.map(read, keys), strict=True))

    def fill(self, built: dict[str, bytes]) -> None:
        """Write the objects that a run begins with, and hostile ones among them."""
        junk: list[Junk] = []
        self.built = frozenset(built)
        if self.reach is not None:
            room = LONGEST - len(self.prefix.encode())
            junk = make_junk(self.reach, self.genuine, self.count, room, self.dice, CONTROLS_OF_RGW)
        over = {one.key for one in junk}
        written = [(key, body) for key, body in built.items() if key not in over]
        self._write(written, junk)

    def strike(self, key: str, body: bytes, member: str) -> Junk | None:
        """Write a hostile object in the place of a genuine one; None in an undisturbed run.

        Args:
            key: Key of the object.
            body: Bytes of a genuine object.
            member: Name of the member that has written them.
        """
        if self.reach is None:
            return None
        kind = self.dice.choice(RECORDS)
        if kind is Kind.GHOST:
            one = Junk(kind, key, rename_member(body, member, name_ghost(member, self.dice)))
        else:
            others = [each for name, each in self.genuine.items() if name.endswith(".json")]
            size = 5 * GIB if kind is Kind.GIANT else None
            one = Junk(kind, key, hostile_body(kind, body, others, self.dice), size)
        self._write([], [one])
        return one

    def plant(self, junk: Sequence[Junk]) -> None:
        """Write hostile objects."""
        self._write([], junk)

    def _write(self, built: Sequence[tuple[str, bytes]], junk: Sequence[Junk]) -> None:
        self.junk += junk
        lies = [
            (self.prefix + one.key, one.size, one.shift.total_seconds())
            for one in junk
            if one.size is not None or one.shift
        ]
        lies += [(self.prefix + key, None, -_AGE) for key, _ in built]
        if lies:
            ask(f"{self.server.lens}{CONTROL}lie", lies)  # type: ignore[arg-type]
        whole = [*built, *((one.key, one.body) for one in junk)]
        self.dice.shuffle(whole)

        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(lambda one: self.put(*one), whole))


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow's engine call, or a command, and the principal that disturbs it.

    Attributes:
        name: Name of the flow or the command.
        principal: Row of the design's table of trust.
        build: Makes the objects that a run begins with.
        act: Calls the engine; its result, in JSON, must be that of an undisturbed run.
        reach: Objects that the principal may write.
        count: Number of hostile objects that are there at the begin.
    """

    name: str
    principal: str
    build: Callable[[Site], None]
    act: Callable[[Site], Any]
    reach: Reach
    count: int = 42


@dataclass
class Ended:
    """Result of a run.

    Attributes:
        result: Result of the flow.
        error: Error that it raised, with its traceback; or that the process died, or hung.
        said: Lines that the flow has reported.
        blamed: As of `Site`.
        junk: Kinds and keys of the hostile objects.
        read: Kinds of hostile files that were read.
    """

    result: Any = None
    error: str = ""
    said: list[str] = field(default_factory=list[str])
    blamed: list[list[str]] = field(default_factory=list[list[str]])
    junk: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    read: list[str] = field(default_factory=list[str])


class _Lines(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def run_site(
    flow: str,
    phase: str,
    server: Server,
    name: str,
    folder: Path,
    *,
    seed: str = "",
    genuine: dict[str, bytes] | None = None,
    built: dict[str, bytes] | None = None,
) -> Ended:
    """Build what a flow works on, or let it work, in a process of its own.

    Args:
        flow: Name of one of `flows.FLOWS`.
        phase: ``build`` or ``act``.
        server: Servers.
        name: Name of the site's prefix.
        folder: Folder for files of the run.
        seed: Seed of the hostile objects; empty for none.
        genuine: Objects of an undisturbed run.
        built: Objects that the site begins with.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.hostile.flows", "torch", "boto3"])
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "ended.json"
    told.unlink(missing_ok=True)
    process = context.Process(
        target=_child,
        args=(flow, phase, server, name, folder, seed, genuine or {}, built or {}, str(told)),
    )
    process.start()
    process.join(HANGS)
    if process.is_alive():
        process.kill()
        process.join()
        return Ended(error=f"it hangs for {HANGS:.0f} s")
    if not told.exists():
        return Ended(error=f"the process ended with {process.exitcode}")
    found = json.loads(told.read_bytes())
    return Ended(**found)


def _child(
    name: str,
    phase: str,
    server: Server,
    prefix: str,
    folder: Path,
    seed: str,
    genuine: dict[str, bytes],
    built: dict[str, bytes],
    told: str,
) -> None:
    from tests.integration.hostile.flows import FLOWS

    result, error = None, ""
    flow = FLOWS[name]
    site = Site(server, prefix, folder, flow.reach if seed else None, flow.count, seed, genuine)
    try:
        logging.getLogger("millrace").addHandler(_Lines(site.said))
        site.fill(built)
        ask(f"{server.lens}{CONTROL}take", site.prefix)  # type: ignore[arg-type]
        resource.setrlimit(resource.RLIMIT_AS, (_size() + MEMORY,) * 2)
        result = (flow.build if phase == "build" else flow.act)(site)
    except BaseException:  # noqa: BLE001 - told to the parent
        error = traceback.format_exc()
    junk = [(str(one.kind), one.key) for one in site.junk]
    whole = {
        "result": result, "error": error, "said": site.said, "blamed": site.blamed, "junk": junk,
        "read": site.read,
    }  # fmt: skip
    part = Path(f"{told}.part")
    part.write_text(json.dumps(whole))
    part.rename(told)
    os._exit(0)  # threads of what was called must not keep the process


def _size() -> int:
    """Return the bytes of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
