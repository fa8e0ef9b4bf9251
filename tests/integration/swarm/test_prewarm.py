"""Files put on every node, by agents that are processes of their own, from a store that counts."""

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import tarfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import obstore
import pytest
import zstandard
from pydantic import SecretStr, ValidationError

from benchmarks.rig.store import Fault, FaultKind, Store
from millrace import errors
from millrace.progress import Event
from millrace.storage import StoreSpec, fetch_stored_sha256, open_store
from millrace.swarm import (
    CacheCheck,
    Host,
    Hosts,
    LimitSettings,
    PrewarmSettings,
    Request,
    Unpacking,
    preview,
    prewarm,
    tls,
)
from millrace.swarm import agent as agents
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.driving import agent_client, driver_reader, stragglers
from millrace.swarm.progress_events import (
    FileMismatched,
    NodeLost,
    NodeUntrusted,
    PrewarmProgressed,
)
from millrace.swarm.protocol import (
    AUTH_HEADER,
    MAX_CLOCK_SKEW,
    ConnectionPool,
    Endpoint,
    HttpStatusError,
    sign,
)
from millrace.swarm.targets import Targets
from tests.support.swarm.swarms import (
    KEY,
    LIE,
    TRICKLE,
    Agent,
    Heard,
    make_failed,
    make_forging,
    make_settings,
    make_spec,
    read_files,
    running,
    start_agent,
    stop,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.start(tmp_path_factory.mktemp("objects")) as store:
        yield store


@pytest.fixture(autouse=True)
def fresh(store: Store) -> None:
    store.reset()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Agent]]:
    with running(tmp_path, 3) as agents:
        yield agents


def fill(store: Store, prefix: str) -> dict[str, bytes]:
    """Objects of all sizes below a prefix; what a node must then have."""
    sizes = {"large.bin": 9 * MIB + 17, "even.bin": 2 * MIB, "empty": 0, "sub/one": 1}
    sizes |= {f"sub/small-{i:03d}.txt": 700 * i for i in range(60)}
    contents = {
        name: hashlib.shake_256(f"{prefix}{name}".encode()).digest(size)
        for name, size in sizes.items()
    }
    for name, body in contents.items():
        store.put(f"{prefix}/{name}", body)
    store.reset()
    return contents


def below(prefix: str) -> dict[str, object]:
    return {"requests": [Request(prefix=prefix)]}


def test_every_node_gets_every_file_and_each_byte_leaves_the_store_once(store, nodes):
    contents = fill(store, "once")
    report = prewarm(make_settings(store, nodes, **below("once")))
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert all(node.ready for node in report.nodes)
    size = sum(map(len, contents.values()))
    assert report.store_bytes == store.counts().bytes == size == report.size
    assert sum(node.from_peers for node in report.nodes) == 2 * size


def test_a_second_run_reads_nothing(store, nodes):
    contents = fill(store, "twice")
    settings = make_settings(store, nodes, **below("twice"))
    prewarm(settings)
    store.reset()
    report = prewarm(settings)
    assert store.counts().bytes == report.store_bytes == 0
    assert [node.cached for node in report.nodes] == [report.size] * 3
    assert read_files(nodes[0].root) == contents


def test_a_node_that_comes_new_is_served_by_the_others(store, nodes, tmp_path):
    fill(store, "new")
    prewarm(make_settings(store, nodes[:2], **below("new")))
    store.reset()
    prewarm(make_settings(store, nodes, **below("new")))
    assert store.counts().bytes == 0
    assert read_files(nodes[2].root) == read_files(nodes[0].root)


@pytest.mark.parametrize("check", CacheCheck)
def test_a_damaged_cache_is_seen_and_only_what_is_damaged_is_fetched(store, nodes, check):
    contents = fill(store, f"damaged-{check}")
    settings = make_settings(store, nodes, check=check, **below(f"damaged-{check}"))
    prewarm(settings)
    file = nodes[1].root / "even.bin"  # of 8 pieces: also a sample of 8 looks at each
    with file.open("r+b") as opened:
        opened.seek(MIB)
        opened.write(bytes([contents["even.bin"][MIB] ^ 1]))
    report = prewarm(settings)
    assert read_files(nodes[1].root) == contents
    moved = [node.from_peers + node.from_store for node in report.nodes]
    assert moved == [0, 256 * 1024, 0]


@pytest.mark.parametrize("known", [False, True], ids=["unverified", "sha256"])
@pytest.mark.parametrize("change", ["record", "bytes", "copy"])
def test_a_file_that_is_not_the_one_that_was_verified_is_hashed_again(store, nodes, known, change):
    """One of 144 segments is damaged, of which a sample would look at 8."""
    contents = fill(store, "stale")
    body = contents["large.bin"]
    request = Request(
        key="stale/large.bin",
        destination="large.bin",
        sha256=hashlib.sha256(body).hexdigest() if known else None,
    )
    settings = make_settings(store, nodes[:1], requests=[request], piece_size=64 * 1024)
    prewarm(settings)
    file, record = nodes[0].root / "large.bin", nodes[0].root / ".millrace" / "files.jsonl"
    stat = file.stat()
    if change == "copy":  # as a restored backup is
        shutil.copy2(file, nodes[0].root / "other")
        (nodes[0].root / "other").rename(file)
    with file.open("r+b") as opened:
        opened.seek(5 * MIB)
        opened.write(bytes([body[5 * MIB] ^ 1]))
    if change != "bytes":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if change == "record":
        record.write_text(record.read_text().replace(str(stat.st_mtime_ns), "1"))
    report = prewarm(settings)
    assert report.nodes[0].from_store == 64 * 1024
    assert file.read_bytes() == body
    assert prewarm(settings).nodes[0].cached == len(body)


def test_a_digest_that_comes_later_is_held_against_all_bytes(store, nodes):
    fill(store, "later")
    request = Request(key="later/large.bin")
    prewarm(make_settings(store, nodes, requests=[request]))
    request = request.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(errors.CorruptError, match="does not have its digest"):
        prewarm(make_settings(store, nodes, requests=[request]))


def test_a_cache_of_another_content_is_replaced(store, nodes):
    fill(store, "newer")
    settings = make_settings(store, nodes, **below("newer"))
    prewarm(settings)
    store.put("newer/even.bin", b"shorter now")
    prewarm(settings)
    assert {read_files(node.root)["even.bin"] for node in nodes} == {b"shorter now"}


def test_what_we_did_not_make_is_never_touched(store, nodes):
    contents = fill(store, "mine")
    mine = nodes[0].root / "even.bin"
    mine.write_bytes(b"mine")
    report = prewarm(make_settings(store, nodes, **below("mine")))
    lost = report.nodes[0]
    assert not lost.ready
    assert "Millrace did not make it" in lost.why
    assert mine.read_bytes() == b"mine"
    assert read_files(nodes[1].root) == read_files(nodes[2].root) == contents


def test_a_node_that_dies_costs_only_itself(store, nodes):
    contents = fill(store, "dies")
    heard = Heard(0.3, nodes[1].kill)
    report = prewarm(make_settings(store, nodes, **below("dies")), progress=heard)
    if heard.find(NodeLost):
        assert [node.ready for node in report.nodes] == [True, False, True]
        assert "no longer answers" in report.nodes[1].why or "orders" in report.nodes[1].why
    assert read_files(nodes[0].root) == read_files(nodes[2].root) == contents


def test_a_run_that_was_broken_off_goes_on_where_it_was(store, nodes):
    class EnoughError(Exception):
        pass

    def stop_here() -> None:
        raise EnoughError

    contents = fill(store, "broken-off")
    settings = make_settings(store, nodes, **below("broken-off"))
    store.order(Fault(FaultKind.STALL, key="broken-off/large.bin", offset=9 * MIB, seconds=60))
    with pytest.raises(EnoughError):
        prewarm(settings, progress=Heard(0.9, stop_here))
    assert "large.bin" not in read_files(nodes[0].root)
    first = store.counts().bytes
    store.reset()
    report = prewarm(settings)
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert min(node.cached for node in report.nodes) > 0.5 * report.size
    assert first + store.counts().bytes < 1.5 * report.size


def test_an_agent_that_was_killed_goes_on_from_its_journal(store, nodes, tmp_path):
    contents = fill(store, "journal")
    settings = make_settings(store, nodes[:1], **below("journal"))
    store.order(Fault(FaultKind.STALL, key="journal/large.bin", offset=9 * MIB, seconds=60))
    with pytest.raises(errors.WorkerError, match=r"no longer answers|orders"):
        prewarm(settings, progress=Heard(0.7, nodes[0].kill))
    stop(nodes[0])
    nodes[0] = start_agent("n0", nodes[0].root)
    store.reset()
    report = prewarm(make_settings(store, nodes[:1], **below("journal")))
    assert read_files(nodes[0].root) == contents
    assert report.nodes[0].cached > 0.5 * report.size


def broken_off(store: Store, agent: Agent, prefix: str, **more: object) -> int:
    """Run until only the end of one object, which stalls, is missing; bytes that left the store."""

    class EnoughError(Exception):
        pass

    def stop_at_last_file(event: Event) -> None:
        if not isinstance(event, PrewarmProgressed) or event.present < 0.9 * event.total:
            return
        if event.total and len(set(partial_files(agent.root)) - before) <= 1:
            raise EnoughError

    before = set(partial_files(agent.root))
    key = f"{prefix}/large.bin"
    store.order(Fault(FaultKind.STALL, key=key, offset=9 * MIB, seconds=60, times=None))
    settings = make_settings(store, [agent], **(below(prefix) | more))
    with pytest.raises(EnoughError):
        prewarm(settings, progress=stop_at_last_file)
    read = store.counts().bytes
    store.reset()
    return read


@pytest.mark.parametrize("change", ["an object more", "another destination", "larger pieces"])
def test_pieces_are_known_by_object_and_range(store, nodes, change):
    contents = fill(store, "ranges")
    read = broken_off(store, nodes[0], "ranges")
    request, piece_size = Request(prefix="ranges"), 256 * 1024
    if change == "an object more":
        store.put("more", contents["even.bin"])
    elif change == "another destination":
        request = Request(prefix="ranges", destination="moved")
        contents = {f"moved/{name}": body for name, body in contents.items()}
    else:
        piece_size = 512 * 1024
    requests = [request]
    if change == "an object more":
        requests.insert(0, Request(key="more"))
        contents["more"] = contents["even.bin"]
    settings = make_settings(store, nodes[:1], requests=requests, piece_size=piece_size)
    report = prewarm(settings)
    assert report.nodes[0].ready
    assert {name: read_files(nodes[0].root)[name] for name in contents} == contents
    again = 2 * piece_size  # what was on its way
    if change == "another destination":  # files that were whole have a name there already
        again += sum(len(body) for name, body in contents.items() if "large" not in name)
    assert read + store.counts().bytes <= report.size + again
    assert partial_files(nodes[0].root) == []


def partial_files(root: Path) -> list[Path]:
    return sorted(root.rglob(".*.part"))


def test_interrupted_requests_that_alternate_keep_each_others_pieces(store, nodes):
    contents = {prefix: fill(store, prefix) for prefix in ("one", "two")}
    read = 0
    for prefix in ("one", "two", "one", "two"):
        request = Request(prefix=prefix, destination=prefix)
        read += broken_off(store, nodes[0], prefix, requests=[request])
    assert len(partial_files(nodes[0].root)) == 2
    for prefix in ("one", "two"):
        request = Request(prefix=prefix, destination=prefix)
        prewarm(make_settings(store, nodes[:1], requests=[request]))
    read += store.counts().bytes
    root = nodes[0].root
    assert {prefix: read_files(root / prefix) for prefix in contents} == contents
    size = sum(len(body) for each in contents.values() for body in each.values())
    assert read <= size + 6 * 2 * 256 * 1024  # what was on its way, each time
    assert partial_files(root) == []
    assert not (root / ".millrace" / "partial.jsonl").exists()


@pytest.mark.parametrize("size", [180 * MIB, 30 * MIB])
def test_pieces_of_another_request_are_kept_while_the_disk_has_room(store, nodes, size):
    fill(store, "early")
    root = nodes[0].root
    with mounted(root, 256 * MIB):
        broken_off(store, nodes[0], "early")
        (left,) = partial_files(root)
        store.generate("late", size)
        assert (
            prewarm(make_settings(store, nodes[:1], requests=[Request(key="late")])).nodes[0].ready
        )
        assert partial_files(root) == ([left] if size == 30 * MIB else [])
        assert (root / ".millrace" / "partial.jsonl").exists() == (size == 30 * MIB)


@pytest.mark.parametrize("why", ["replaced", "old"])
def test_what_no_request_needs_any_more_is_removed(store, nodes, why):
    contents = fill(store, f"left-{why}")
    broken_off(store, nodes[0], f"left-{why}")
    root = nodes[0].root
    (left,) = partial_files(root)
    store.put("other", b"other")
    requests = [Request(key="other")]
    if why == "replaced":
        store.put("left-replaced/large.bin", b"another content")
        requests.append(Request(prefix="left-replaced"))
    else:
        week_ago = time.time() - 7 * 24 * 3600 - 1
        os.utime(left, (week_ago, week_ago))
    mine = root / ".0123456789abcdef.part"
    mine.write_text("not ours, whatever its name")
    prewarm(make_settings(store, nodes[:1], requests=requests))
    assert partial_files(root) == [mine]
    assert not (root / ".millrace" / "partial.jsonl").exists()
    found = read_files(root)
    assert {name: found[name] for name in ("even.bin", "other")} == {
        "even.bin": contents["even.bin"],
        "other": b"other",
    }


def test_a_folder_that_was_being_unpacked_is_removed(store, nodes):
    body = tarred({"a": os.urandom(2 * MIB), "b": os.urandom(MIB)}, "w")
    store.put("half.tar", body)
    store.put("other", b"other")
    request = Request(key="half.tar", unpack=Unpacking.TAR)
    settings = make_settings(store, nodes[:1], requests=[request])
    store.order(Fault(FaultKind.STALL, key="half.tar", offset=len(body) - 100, times=None))
    with pytest.raises(errors.WorkerError, match=r"no longer answers|orders"):
        prewarm(settings, progress=Heard(0.7, nodes[0].kill))
    stop(nodes[0])
    root = nodes[0].root
    assert list(root.glob(".*.unpacking"))
    nodes[0] = start_agent("n0", root)
    store.reset()
    left = {path.name for path in partial_files(root)}
    prewarm(make_settings(store, nodes[:1], requests=[Request(key="other")]))
    assert {path.name for path in root.iterdir()} == {".millrace", "other"} | left


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.DENY, times=2),
        Fault(FaultKind.ERROR, times=None, share=0.3, seed=1),
        Fault(FaultKind.TRUNCATE, times=6),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_store_that_fails_for_a_while_is_asked_again(store, nodes, fault):
    contents = fill(store, f"fails-{fault.kind}")
    store.order(fault)
    report = prewarm(make_settings(store, nodes, **below(f"fails-{fault.kind}")))
    assert [node.why for node in report.nodes] == [""] * 3
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    fired = store.counts().fired[fault.kind]
    assert fired >= 2
    # Of two sources the slower is not heard any more when all is there: so of a fault without end.
    unheard = len(nodes) if fault.times is None else 0
    assert sum(node.failures for node in report.nodes) >= fired - unheard


def test_a_store_that_keeps_refusing_is_said(store, nodes):
    fill(store, "refuses")
    store.order(Fault(FaultKind.DENY, key="refuses/large.bin", times=None))
    store_timeout = timedelta(seconds=1)
    with pytest.raises(errors.DeniedError, match=r"refuses/large\.bin could not be read"):
        prewarm(make_settings(store, nodes, store_timeout=store_timeout, **below("refuses")))


def test_a_wrong_read_of_an_object_with_a_digest_is_found_and_read_again(store, nodes):
    contents = fill(store, "flip")
    body = contents["large.bin"]
    request = Request(key="flip/large.bin", sha256=hashlib.sha256(body).hexdigest())
    store.order(Fault(FaultKind.FLIP, key="flip/large.bin", offset=5 * MIB))
    heard = Heard()
    report = prewarm(make_settings(store, nodes, requests=[request]), progress=heard)
    assert [read_files(node.root) for node in nodes] == [{"flip/large.bin": body}] * 3
    assert store.counts().fired == {"flip": 1}
    assert heard.find(FileMismatched)
    assert report.unverified == 0


def test_a_digest_that_the_store_keeps_is_what_an_object_must_be(store, nodes):
    body = os.urandom(2 * MIB)
    origin = open_store(make_spec(store))
    obstore.put(store.client(checksum_algorithm="SHA256"), "kept", body)
    store.put("not-kept", b"other")
    assert fetch_stored_sha256(origin, "kept") == f"sha256:{hashlib.sha256(body).hexdigest()}"
    assert fetch_stored_sha256(origin, "not-kept") == fetch_stored_sha256(origin, "not-there") == ""
    store.order(Fault(FaultKind.FLIP, key="kept", offset=MIB))
    heard = Heard()
    requests = [Request(key="kept"), Request(key="not-kept")]
    report = prewarm(make_settings(store, nodes, requests=requests), progress=heard)
    assert [read_files(node.root)["kept"] for node in nodes] == [body] * 3
    assert [event.origin for event in heard.find(FileMismatched)] == ["s3://rig/kept"]
    assert report.unverified == 0  # the ETag of the other one is its MD5


def test_an_object_that_is_not_what_its_digest_says_gets_no_final_name(store, nodes):
    fill(store, "wrong")
    request = Request(key="wrong/even.bin", sha256="0" * 64)
    with pytest.raises(errors.CorruptError, match="does not have its digest"):
        prewarm(make_settings(store, nodes, requests=[request]))
    assert [read_files(node.root) for node in nodes] == [{}] * 3


def test_an_object_that_is_replaced_meanwhile_stops_the_run(store, nodes):
    contents = fill(store, "replaced")
    replaced = b"x" * len(contents["large.bin"])
    store.order(Fault(FaultKind.STALL, key="replaced/even.bin", offset=0, seconds=1))
    heard = Heard(0.0, lambda: store.put("replaced/large.bin", replaced))
    one_at_a_time = LimitSettings(store=1)  # the first is stalled, large.bin comes after it
    with pytest.raises(errors.ChangedError, match=r"replaced/large\.bin was replaced"):
        prewarm(
            make_settings(store, nodes, limits=one_at_a_time, **below("replaced")), progress=heard
        )
    for node in nodes:
        assert "large.bin" not in read_files(node.root)


def test_the_same_object_to_two_destinations_is_fetched_once(store, nodes):
    contents = fill(store, "links")
    requests = [
        Request(key="links/large.bin", destination="a/model.bin"),
        Request(key="links/large.bin", destination="b/model.bin"),
    ]
    report = prewarm(make_settings(store, nodes, requests=requests))
    body = contents["large.bin"]
    assert read_files(nodes[0].root) == {"a/model.bin": body, "b/model.bin": body}
    assert store.counts().bytes == report.size == len(body)


def test_an_object_that_is_asked_for_in_two_ways_is_refused(store, nodes):
    fill(store, "ways")
    requests = [
        Request(key="ways/even.bin", destination="a"),
        Request(key="ways/even.bin", destination="b", mode=0o600),
    ]
    with pytest.raises(errors.ConfigurationError, match="requested twice"):
        preview(make_settings(store, nodes, requests=requests))


def test_files_have_the_mode_that_was_asked_for(store, nodes):
    fill(store, "mode")
    wanted = {"even.bin": 0o640, "large.bin": 0o400, "empty": 0o644, "sub/one": 0o444}
    requests = [Request(key=f"mode/{name}", mode=mode) for name, mode in wanted.items()]
    prewarm(make_settings(store, nodes, requests=requests))
    for node in nodes:
        found = {name: (node.root / "mode" / name).stat().st_mode & 0o777 for name in wanted}
        assert found == wanted


def test_a_folder_is_a_store_too(nodes, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.bin").write_bytes(os.urandom(3 * MIB))
    (source / "b ü.txt").write_text("b")
    prewarm(make_settings(StoreSpec(url=source.as_uri()), nodes))
    assert read_files(nodes[2].root) == read_files(source)


def test_a_preview_starts_nothing(store, nodes):
    contents = fill(store, "preview")
    seen = preview(make_settings(store, nodes, **below("preview")))
    assert {path for path, _, _ in seen.files} == set(contents)
    assert store.counts().bytes == 0


def test_a_prefix_is_a_folder_and_keys_cannot_lead_out(store, nodes):
    store.put("pfx/a", b"a")
    store.put("pfx-other", b"b")
    prewarm(make_settings(store, nodes, requests=[Request(prefix="pfx", destination="in")]))
    assert read_files(nodes[0].root) == {"in/a": b"a"}
    for destination in ("/etc/x", "../x", "a/../../x", "a//b", "."):
        with pytest.raises(errors.ConfigurationError, match="below the root"):
            Request(key="pfx/a", destination=destination)


@pytest.mark.parametrize("key", [".millrace/files.jsonl", ".Millrace/lock", ".MILLRACE"])
def test_a_nodes_own_records_are_no_destination(store, key):
    """Neither of an object of a bucket, nor of what is unpacked."""

    def look(request: dict[str, object]) -> None:
        values = {"requests": [request], "stores": {"s": make_spec(store)}, "root": Path("/unused")}
        preview(PrewarmSettings.model_validate(values))

    folder = key.partition("/")[0]
    store.put(f"own/{key}", b"{}")
    store.put(f"{folder}.tar", tarred({"files.jsonl": b"{}"}, "w"))
    for request in (
        {"prefix": "own"},
        {"key": f"own/{key}", "destination": key},
        {"key": f"{folder}.tar", "unpack": Unpacking.AUTO},
        {"key": f"{folder}.tar", "destination": "a", "unpack": Unpacking.TAR, "into": key},
    ):
        with pytest.raises(errors.ConfigurationError, match="cannot be a destination"):
            look(request)


def test_a_file_that_is_not_whole_yet_is_no_destination():
    names = Targets(Path("/root"), build_catalogue([File("a", 1, "e", "s3://b/a")])).by_file
    with pytest.raises(errors.ConfigurationError, match="cannot be a destination"):
        Request(key="x", destination=names[0].partial.name)


def test_too_few_nodes_are_an_error_that_says_why(store, nodes):
    fill(store, "few")
    nodes[0].kill()
    nodes[1].kill()
    start_timeout = timedelta(seconds=1)
    with pytest.raises(errors.WorkerError, match=r"2 of 3 nodes are lost.*cannot be reached"):
        prewarm(make_settings(store, nodes, start_timeout=start_timeout, **below("few")))


def tarred(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def test_an_archive_is_unpacked_and_kept_and_known_again(store, nodes):
    members = {"a.txt": b"a", "b/c.bin": os.urandom(2 * MIB)}
    store.put("archives/data.tar.gz", tarred(members))
    request = Request(key="archives/data.tar.gz", unpack=Unpacking.AUTO, mode=0o600)
    settings = make_settings(store, nodes, requests=[request])
    assert [node.why for node in prewarm(settings).nodes] == [""] * 3
    wanted = {f"archives/data/{name}": body for name, body in members.items()}
    for node in nodes:
        found = read_files(node.root)
        assert found.pop("archives/data.tar.gz")
        assert found == wanted
        assert (node.root / "archives/data/a.txt").stat().st_mode & 0o777 == 0o600
    store.reset()
    assert all(node.ready for node in prewarm(settings).nodes)
    assert store.counts().bytes < 1000  # its head tells what kind it is


def test_an_unpacked_folder_is_mended_and_replaced_while_all_of_it_is_ours(store, nodes):
    def wanted(name: str) -> dict[str, bytes]:
        return {"d/a.txt": name.encode(), "d/b/c.txt": b"c", "d.tar": tarred(members(name), "w")}

    def members(name: str) -> dict[str, bytes]:
        return {"a.txt": name.encode(), "b/c.txt": b"c"}

    settings = make_settings(
        store, nodes[:1], requests=[Request(key="d.tar", unpack=Unpacking.AUTO)], min_node_share=1.0
    )
    root = nodes[0].root
    store.put("d.tar", tarred(members("old"), "w"))
    prewarm(settings)
    (root / "d/mine.txt").write_text("mine")
    prewarm(settings)  # what lies beside its members does no harm
    (root / "d/mine.txt").unlink()
    (root / "d/b/c.txt").unlink()
    prewarm(settings)
    assert read_files(root) == wanted("old")
    shutil.rmtree(root / "d")
    (root / "d").mkdir()
    prewarm(settings)
    assert read_files(root) == wanted("old")
    store.put("d.tar", tarred(members("new"), "w"))
    prewarm(settings)
    assert read_files(root) == wanted("new")
    assert not list(root.glob(".*.replaced"))


@pytest.mark.parametrize("change", ["added", "changed"])
def test_an_unpacked_folder_that_is_not_all_ours_is_not_replaced(store, nodes, change):
    store.put("d.tar", tarred({"a.txt": b"a", "b.txt": b"b"}, "w"))
    request = Request(key="d.tar", unpack=Unpacking.AUTO, into="in/here")
    settings = make_settings(store, nodes[:1], requests=[request], min_node_share=1.0)
    prewarm(settings)
    mine = nodes[0].root / "in/here" / ("mine.txt" if change == "added" else "a.txt")
    mine.write_text("mine")
    store.put("d.tar", tarred({"a.txt": b"new"}, "w"))
    with pytest.raises(errors.WorkerError, match=f"did not unpack .*{mine.name}"):
        prewarm(settings)
    assert mine.read_text() == "mine"
    assert (nodes[0].root / "in/here/b.txt").read_bytes() == b"b"


def test_a_zip_is_unpacked_when_it_is_whole(store, nodes):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as opened:
        opened.writestr("x/y.txt", "y" * 1000)
    store.put("archives/data.zip", out.getvalue())
    request = Request(key="archives/data.zip", unpack=Unpacking.ZIP, into="unpacked/here")
    report = prewarm(make_settings(store, nodes, requests=[request]))
    assert [node.why for node in report.nodes] == [""] * 3
    assert read_files(nodes[1].root)["unpacked/here/x/y.txt"] == b"y" * 1000


def hostile_archives() -> dict[str, bytes]:
    """Each would write outside its folder, or fill the disk."""
    found = {
        "traversal": tarred({"ok": b"", "../../escaped": b"x"}),
        "absolute": tarred({"/tmp/millrace-escaped": b"x"}),
        "bomb": tarred({"zeros": bytes(20 * MIB)}),
    }
    kinds = {
        "link": (tarfile.SYMTYPE, "../../../etc"),
        "hardlink": (tarfile.LNKTYPE, "/etc/passwd"),
        "device": (tarfile.CHRTYPE, ""),
    }
    for name, (kind, target) in kinds.items():
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            info = tarfile.TarInfo("member")
            info.type, info.linkname = kind, target
            tar.addfile(info)
        found[name] = out.getvalue()
    return found


@pytest.mark.parametrize("kind", ["traversal", "absolute", "bomb", "link", "hardlink", "device"])
def test_a_hostile_archive_leaves_nothing_behind(store, nodes, kind):
    store.put(f"{kind}.tar", hostile_archives()[kind])
    method = Unpacking.TAR_GZ if kind in {"traversal", "absolute", "bomb"} else Unpacking.TAR
    request = Request(key=f"{kind}.tar", unpack=method, into="into")
    settings = make_settings(store, nodes[:1], requests=[request], unpacked_bytes=10 * MIB)
    with pytest.raises(errors.WorkerError, match=r"archive|member"):
        prewarm(settings)
    root = nodes[0].root
    assert not (root / "into").exists()
    assert set(read_files(root.parent)) <= {f"n0/{kind}.tar"}
    assert not list(root.glob(".*.unpacking"))
    assert not Path("/tmp/millrace-escaped").exists()


def test_a_node_that_has_failed_takes_part_in_the_next_run_at_once(store, nodes):
    store.put("damaged.tar", b"no archive" * 100)
    contents = fill(store, "next")
    request = Request(key="damaged.tar", unpack=Unpacking.TAR, into="into")
    with pytest.raises(errors.WorkerError, match="was not unpacked"):
        prewarm(make_settings(store, nodes[:1], requests=[request]))
    report = prewarm(make_settings(store, nodes[:1], **below("next")))
    assert report.startup < 5.0
    assert contents.items() <= read_files(nodes[0].root).items()


@pytest.mark.parametrize(
    ("key", "into", "wanted"),
    [
        ("g/words.json.gz", None, "g/words.json"),
        ("g/words.json.gz", "in", "in/words.json"),
        ("g/words.json.zst", None, "g/words.json"),
    ],
)
def test_a_compressed_file_that_is_no_archive_becomes_one_file(store, nodes, key, into, wanted):
    body = os.urandom(MIB) + bytes(MIB)
    packed = gzip.compress(body) if key.endswith("gz") else zstandard.compress(body)
    store.put(key, packed)
    request = Request(key=key, unpack=Unpacking.AUTO, into=into, mode=0o600)
    settings = make_settings(store, nodes[:1], requests=[request])
    root = nodes[0].root
    for _ in range(2):  # the second time it is known again
        assert prewarm(settings).nodes[0].ready
        assert read_files(root) == {key: packed, wanted: body}
        assert (root / wanted).stat().st_mode & 0o777 == 0o600
    store.put(key, gzip.compress(b"new") if key.endswith("gz") else zstandard.compress(b"new"))
    prewarm(settings)
    assert read_files(root)[wanted] == b"new"
    (root / wanted).write_bytes(b"mine")
    store.put(key, packed)
    with pytest.raises(errors.WorkerError, match="Millrace did not unpack"):
        prewarm(settings)
    assert (root / wanted).read_bytes() == b"mine"


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [("cut", "is cut off"), ("flipped", "is damaged"), ("bomb", "holds more than")],
)
def test_a_damaged_compressed_file_costs_only_itself(store, nodes, ending, damage, says):
    def packed(body: bytes) -> bytes:
        if ending == "gz":
            return gzip.compress(body)
        return zstandard.ZstdCompressor(write_checksum=True).compress(body)

    contents = fill(store, "with")
    key, body = f"words.txt.{ending}", secrets.token_bytes(MIB)
    bad = bytearray(packed(bytes(20 * MIB) if damage == "bomb" else body))
    if damage == "cut":
        del bad[-3:]
    elif damage == "flipped":
        bad[-3] ^= 1
    store.put(key, bytes(bad))
    archive = Request(key=key, unpack=Unpacking.AUTO)
    requests = [archive, Request(prefix="with")]
    settings = make_settings(store, nodes[:1], requests=requests, unpacked_bytes=10 * MIB)
    with pytest.raises(errors.WorkerError, match=says):
        prewarm(settings)
    root = nodes[0].root
    assert read_files(root) == contents | {key: bytes(bad)}
    assert not list(root.glob(".*.unpacking"))
    # The agent would wait 15 s for the driver that failed; the test of a full disk has it do so.
    stop(nodes[0])
    nodes[0] = start_agent(nodes[0].name, root)
    settings = make_settings(store, nodes[:1], requests=requests, unpacked_bytes=10 * MIB)
    good = packed(body)
    store.put(key, good)
    assert prewarm(settings).nodes[0].ready
    assert read_files(root) == contents | {key: good, "words.txt": body}


def test_a_tar_is_known_by_its_content_where_its_name_says_gz(store, nodes):
    store.put("a.gz", tarred({"x": b"x"}))
    request = Request(key="a.gz", unpack=Unpacking.AUTO)
    assert prewarm(make_settings(store, nodes[:1], requests=[request])).nodes[0].ready
    assert read_files(nodes[0].root)["a/x"] == b"x"


def test_a_bad_archive_costs_only_itself(store, nodes):
    """Also where it comes first, and is known to be bad before the rest has begun."""
    contents = fill(store, "behind")
    store.put("first.tar", os.urandom(2000))
    archive = Request(key="first.tar", unpack=Unpacking.TAR)
    settings = make_settings(store, nodes, requests=[archive, Request(prefix="behind")])
    slow = Fault(FaultKind.STALL, key="behind/large.bin", offset=0, seconds=2)
    store.order(slow)
    with pytest.raises(errors.WorkerError, match=r"first\.tar was not unpacked.*no tar"):
        prewarm(settings)
    for node in nodes:
        found = read_files(node.root)
        assert found.pop("first.tar")
        assert found == contents


@pytest.mark.parametrize("key", ["bomb.tar.gz", "bomb.gz"])
def test_an_archive_that_is_larger_than_the_disk_leaves_the_node_as_it_was(store, nodes, key):
    contents = fill(store, "beside")
    zeros = bytes(160 * MIB)
    store.put(key, tarred({"zeros": zeros}) if "tar" in key else gzip.compress(zeros, 1))
    archive = Request(key=key, unpack=Unpacking.AUTO)
    root = nodes[0].root
    with mounted(root, 128 * MIB):
        settings = make_settings(store, nodes[:1], requests=[archive, Request(prefix="beside")])
        with pytest.raises(errors.WorkerError, match="does not fit on the disk"):
            prewarm(settings)
        found = read_files(root)
        assert found.pop(key)
        assert found == contents
        assert shutil.disk_usage(root).free > 64 * MIB
        assert prewarm(make_settings(store, nodes[:1], **below("beside"))).nodes[0].ready


def test_requests_that_nobody_signed_are_refused(store, nodes):
    endpoint = agent_at(nodes[0].url)
    ours, others = KEY.encode(), b"another key, long enough"
    for key in (others, None):
        for method, path in (
            ("PUT", "/runs/x"),
            ("POST", "/runs/x/orders"),
            ("GET", "/runs/x/events?after=0"),
            ("DELETE", "/runs/x"),
        ):
            assert refusal(endpoint, key, method, path) == 403
    assert refusal(endpoint, ours, "GET", "/runs/x/events?after=0") == 404
    for path in ("/", "/etc/passwd", "/runs", "/runs/x/pieces/../../../etc/passwd"):
        assert refusal(endpoint, ours, "GET", path) in {403, 404}


def test_a_signature_is_for_one_request_and_for_a_while(nodes):
    endpoint, key = agent_at(nodes[0].url), KEY.encode()
    path, to = "/runs/x/events?after=0", endpoint.identity
    old = sign(key, "GET", path, to=to, now=time.time() - 2 * MAX_CLOCK_SKEW)
    assert refusal(endpoint, None, "GET", path, {AUTH_HEADER: old}) == 403
    other = sign(key, "GET", "/runs/y/events?after=0", to=to)
    assert refusal(endpoint, None, "GET", path, {AUTH_HEADER: other}) == 403
    changed = sign(key, "POST", "/runs/x/orders", b"[]", to=to)
    assert refusal(endpoint, None, "POST", "/runs/x/orders", {AUTH_HEADER: changed}, b"[1]") == 403


def test_nothing_is_read_of_a_body_that_nobody_has_signed(nodes):
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    other = sign(secrets.token_bytes(16), "PUT", "/runs/x", b"", to="")
    for header, status in (
        ("", b"403"),
        (f"{AUTH_HEADER}: {other}\r\n", b"403"),
        (f"{AUTH_HEADER}: {time.time()}:0:0\r\n", b"403"),
        (f"{AUTH_HEADER}: {time.time()}:0:0:0\r\n", b"403"),
        (f"{AUTH_HEADER}: {time.time()}:0:é:é\r\n", b"400"),
    ):
        head = f"PUT /runs/x HTTP/1.1\r\n{header}Content-Length: {200 * MIB}\r\n\r\n"
        with socket.create_connection((endpoint.host, endpoint.port), timeout=30) as raw:
            raw.sendall(head.encode("latin-1"))  # and no byte of the body
            with raw.makefile("rb") as answer:
                assert answer.readline().split()[1] == status
                answer.read()  # it hangs up


def test_who_is_refused_while_sending_much_hears_why(nodes):
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    assert refusal(endpoint, secrets.token_bytes(16), "PUT", "/runs/x", body=bytes(20 * MIB)) == 403


def test_a_signature_is_for_one_agent(nodes):
    ours, others = (agent_at(node.url) for node in nodes[:2])
    path = "/runs/x/events?after=0"
    signed = {AUTH_HEADER: sign(KEY.encode(), "GET", path, to=others.identity)}
    assert refusal(others, None, "GET", path, signed) == 404  # accepted: there is no such run
    assert refusal(ours, None, "GET", path, signed) == 403


def test_who_is_refused_hears_whether_it_is_the_key_or_the_clock(nodes):
    endpoint, path = agent_at(nodes[0].url), "/runs/x/events?after=0"
    late = sign(
        KEY.encode(), "GET", path, to=endpoint.identity, now=time.time() - 2 * MAX_CLOCK_SKEW
    )
    said = answer_of(endpoint, "GET", path, {AUTH_HEADER: late})
    assert "the key is right, but the clocks of driver and agent differ by 600 s" in str(said)
    other = sign(b"another key, long enough", "GET", path, to=endpoint.identity)
    assert "signed with another key" in str(answer_of(endpoint, "GET", path, {AUTH_HEADER: other}))
    assert "not signed" in str(answer_of(endpoint, "GET", path, {}))


def test_the_report_of_a_run_with_the_wrong_key_names_the_key(store, nodes):
    fill(store, "key")
    settings = make_settings(store, nodes, **below("key"))
    wrong = settings.nodes.model_copy(update={"key": SecretStr("another key, long enough")})
    with pytest.raises(errors.WorkerError, match="signed with another key"):
        prewarm(settings.model_copy(update={"nodes": wrong}))


def test_two_addresses_of_one_agent_are_one_node(store, nodes):
    fill(store, "twins")
    twin = nodes[0].url.replace("127.0.0.1", "localhost")
    settings = make_settings(store, nodes[:2], **below("twins"))
    hosts = Hosts(hosts=(*settings.nodes.hosts, Host(url=twin, name="twin")), key=SecretStr(KEY))
    report = prewarm(settings.model_copy(update={"nodes": hosts}))
    assert sum(node.ready for node in report.nodes) == 2
    assert len(report.nodes) == 3
    assert any("leads to the agent of" in node.why for node in report.nodes)


def test_a_second_driver_is_refused_while_the_first_one_works(store, nodes):
    contents = fill(store, "second")
    settings = make_settings(store, nodes, **below("second"))
    refused: list[str] = []

    def come() -> None:
        with pytest.raises(errors.WorkerError) as error:
            prewarm(settings.model_copy(update={"start_timeout": timedelta(seconds=1)}))
        refused.append(str(error.value))

    report = prewarm(settings, progress=Heard(0.05, come))
    assert [node.ready for node in report.nodes] == [True] * 3
    assert read_files(nodes[2].root) == contents
    assert "another run uses this node, since 2" in refused[0]


def test_a_missing_host_does_not_hold_up_the_others(store, nodes):
    fill(store, "missing")
    settings = make_settings(store, nodes, **below("missing"))
    stop(nodes[2])
    report = prewarm(settings.model_copy(update={"start_timeout": timedelta(minutes=5)}))
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert report.seconds < settings.start_timeout.total_seconds()


def replaced_by_slow(node: Agent, pause: float, stops_after: float) -> Agent:
    """The same node with an agent that receives slowly."""
    stop(node)
    code = TRICKLE.format(pause=pause, stops_after=stops_after)
    return start_agent(node.name, node.root, port=int(node.url.rpartition(":")[2]), code=code)


def test_a_slow_node_that_goes_on_receiving_is_waited_for(store, nodes, monkeypatch):
    monkeypatch.setattr(
        stragglers, "_FINISH_FACTOR", 0.0
    )  # it counts for nodes that have every piece
    store.put("steady/object", hashlib.shake_256(b"steady").digest(MIB))
    nodes[2] = replaced_by_slow(nodes[2], pause=0.3, stops_after=float("1e9"))
    limits = LimitSettings(stall_timeout=timedelta(seconds=3))  # a piece takes longer
    report = prewarm(make_settings(store, nodes, limits=limits, **below("steady")))
    assert [node.why for node in report.nodes] == [""] * 3
    assert report.nodes[2].ready


def test_a_node_that_receives_nothing_any_more_is_given_up(store, nodes):
    store.put("stalled/object", hashlib.shake_256(b"stalled").digest(MIB))
    nodes[2] = replaced_by_slow(nodes[2], pause=0.0, stops_after=2)
    limits = LimitSettings(stall_timeout=timedelta(seconds=2))
    try:
        report = prewarm(make_settings(store, nodes, limits=limits, **below("stalled")))
    finally:
        nodes[2].kill()
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert "received no byte for" in report.nodes[2].why


def test_a_node_that_is_frozen_before_its_start_is_noticed(store, nodes, monkeypatch):
    monkeypatch.setattr(agent_client, "_ANSWER_TIMEOUT", 1.0)
    fill(store, "frozen")
    nodes[2].process.send_signal(signal.SIGSTOP)
    try:
        settings = make_settings(store, nodes, **below("frozen"))
        report = prewarm(settings.model_copy(update={"start_timeout": timedelta(minutes=5)}))
    finally:
        nodes[2].kill()
    assert [node.ready for node in report.nodes] == [True, True, False]
    assert report.seconds < 300


class Freezing(BaseHTTPRequestHandler):
    """An agent that answers until a run is to start, and then nothing any more."""

    frozen = threading.Event()
    thawed = threading.Event()

    def do_GET(self) -> None:
        if self.frozen.is_set():
            self.thawed.wait()
            return
        nonce = self.path.partition("nonce=")[2]
        proof = tls.prove(KEY.encode(), nonce, "freezing", "")
        body = json.dumps({"identity": "freezing", "proof": proof}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.frozen.set()
        self.thawed.wait()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_node_that_freezes_while_it_looks_at_what_it_has_is_noticed(store, nodes, monkeypatch):
    monkeypatch.setattr(agent_client, "_ANSWER_TIMEOUT", 1.0)
    contents = fill(store, "freezes")
    with ThreadingHTTPServer(("127.0.0.1", 0), Freezing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hosts = [agent.host for agent in nodes[:2]]
        hosts.append(Host(url=f"http://127.0.0.1:{server.server_port}", name="freezes"))
        settings = make_settings(
            store, nodes, nodes=Hosts(hosts=tuple(hosts), key=SecretStr(KEY)), **below("freezes")
        )
        try:
            report = prewarm(settings.model_copy(update={"start_timeout": timedelta(minutes=5)}))
        finally:
            Freezing.thawed.set()
            server.shutdown()
    ready = {node.name: node.ready for node in report.nodes}
    assert ready == {"n0": True, "n1": True, "freezes": False}
    assert "did not answer for" in next(n.why for n in report.nodes if n.name == "freezes")
    assert read_files(nodes[1].root) == contents


@pytest.mark.parametrize("url", ["127.0.0.1:7000", "http://127.0.0.1:99999", "https://a:1", "a"])
def test_an_address_that_is_none_is_a_sentence(url):
    with pytest.raises(ValidationError, match="is no agent's address"):
        Host(url=url)


def test_hosts_are_named_once():
    for hosts, what in (
        (("http://a:7000", "http://A:7000/"), "address http://a:7000"),
        (("http://a", "http://a:80"), "address http://a:80"),
    ):
        with pytest.raises(ValidationError, match=f"two hosts have the {what}"):
            Hosts(hosts=tuple(Host(url=url) for url in hosts), key=SecretStr(KEY))
    with pytest.raises(ValidationError, match="two hosts have the name a"):
        Hosts(hosts=(Host(url="http://x:1", name="a"), Host(url="http://x:2", name="a")), key=KEY)


def test_an_agent_listens_on_ipv6(store, nodes, tmp_path):
    contents = fill(store, "six")
    agent = agents.Agent(tmp_path / "six", KEY.encode(), host="::1")
    agent.start()
    try:
        host = Host(url=f"http://[::1]:{agent.port}")
        settings = make_settings(store, nodes, **below("six"))
        hosts = Hosts(hosts=(*settings.nodes.hosts, host), key=SecretStr(KEY))
        report = prewarm(settings.model_copy(update={"nodes": hosts}))
        assert [node.ready for node in report.nodes] == [True] * 4
    finally:
        agent.close()
    assert read_files(tmp_path / "six") == contents


def test_an_agent_that_cannot_listen_says_where(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            errors.ConfigurationError, match=f"cannot listen at 127.0.0.1, port {port}"
        ):
            agents.Agent(tmp_path, b"key", host="127.0.0.1", port=port)


HALF_SENT = b"POST /runs/x/orders HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n\r\n"


@contextmanager
def connecting(endpoint: Endpoint) -> Iterator[None]:
    """Open connections that send half of an unsigned request, one after another, meanwhile."""
    held: deque[socket.socket] = deque()
    ended = threading.Event()

    def connect() -> None:
        while not ended.wait(0.005):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((endpoint.host, endpoint.port), timeout=1))
                held[-1].sendall(HALF_SENT)
            if len(held) > 900:
                held.popleft().close()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        time.sleep(3)
        yield
    finally:
        ended.set()
        thread.join()
        for each in held:
            each.close()


def test_unsigned_requests_that_do_not_end_do_not_keep_the_agent_from_a_run(store, nodes):
    contents = fill(store, "half")
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    stop(nodes[0])
    nodes[0] = start_with_few_files(nodes[0].root, endpoint.port)
    with connecting(endpoint):
        report = prewarm(make_settings(store, nodes, **below("half")))
    assert [node.ready for node in report.nodes] == [True] * 3
    assert read_files(nodes[0].root) == contents


def start_with_few_files(root: Path, port: int) -> Any:
    """Start an agent that may open 256 files."""
    few = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, few[1]))  # the agent inherits it
    try:
        return start_agent("n0", root, port=port)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, few)


def test_idle_connections_do_not_keep_the_agent_from_a_run(store, nodes):
    contents = fill(store, "idle")
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    stop(nodes[0])
    nodes[0] = start_with_few_files(nodes[0].root, endpoint.port)
    idle = [
        socket.create_connection((endpoint.host, endpoint.port), timeout=30) for _ in range(300)
    ]
    try:
        report = prewarm(make_settings(store, nodes, **below("idle")))
        assert [node.ready for node in report.nodes] == [True] * 3
        assert read_files(nodes[0].root) == contents
    finally:
        for each in idle:
            each.close()


def agent_at(url: str) -> Endpoint:
    """The endpoint of an agent, with its identity, as a driver asks for it."""
    endpoint, _ = Endpoint.parse_url(url)
    with urlopen(f"{url}/agent", timeout=30) as answer:
        return replace(endpoint, identity=json.load(answer)["identity"])


def refusal(
    endpoint: Endpoint,
    key: bytes | None,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> int:
    """The status of an answer that is none."""
    signed = {AUTH_HEADER: sign(key, method, path, body, to=endpoint.identity)} if key else {}
    return answer_of(endpoint, method, path, signed | (headers or {}), body).status


def answer_of(
    endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> HttpStatusError:
    connections = ConnectionPool(10.0)
    try:
        with (
            pytest.raises(HttpStatusError) as refused,
            connections.request(endpoint, method, path, headers, body or None),
        ):
            pass
        return refused.value
    finally:
        connections.close()


def test_a_peer_that_gives_flipped_bits_is_caught_and_asked_no_more(store, nodes, tmp_path):
    contents = fill(store, "liar")
    stop(nodes.pop())
    liar = start_agent("liar", tmp_path / "liar", code=LIE)
    nodes.append(liar)
    heard = Heard()
    report = prewarm(make_settings(store, nodes, **below("liar")), progress=heard)
    assert [read_files(node.root) for node in nodes[:2]] == [contents] * 2
    assert heard.find(NodeUntrusted)
    assert [node.trusted for node in report.nodes] == [False, True, True]  # by their names


D = f"blake3:{0:064x}"
FORGED = [
    [{"type": "digest-mismatch", "file": 0, "digest": f"blake3:{n:064d}"} for n in range(3)],
    [{"type": "digest-mismatch", "file": number, "digest": D} for number in range(3)],
    [{}], ["x"], {"type": "piece-written"}, [None], 7, [{"type": []}], [{"type": "piece-written"}],
    [{"type": "piece-written", "piece": 10**6, "source": "", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": -1, "source": "", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": 0, "source": "", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": 0, "source": "nowhere", "digest": D, "size": 1}],
    [{"type": "piece-written", "piece": 0, "source": "", "digest": "x", "size": 1}],
    [{"type": "files-ready", "files": [99]}], [{"type": "files-ready", "files": 1}],
    [{"type": "digest-mismatch", "file": 99, "digest": D}],
    [make_failed(source="nowhere", reason="", is_wrong=True)],
    [make_failed(is_wrong=True)],
    [make_failed(reason=7, status="x")],
    [{"type": "file-unusable", "file": 99, "reason": "x"}],
    "[{'type': 'read-retried', 'reason': 'x' * (3 << 20)}]",
    [make_failed(status=500)] * 1100,
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED, ids=lambda forged: repr(forged)[:40])
def test_a_node_that_forges_what_it_tells_harms_only_itself(store, nodes, tmp_path, forged):
    contents = fill(store, "forged")
    sums = {f"forged/{name}": hashlib.sha256(body).hexdigest() for name, body in contents.items()}
    requests = [Request(key=key, sha256=sha256) for key, sha256 in sums.items()]
    stop(nodes.pop())
    nodes.append(start_agent("liar", tmp_path / "liar", code=make_forging(forged)))
    limits = {"stall_timeout": timedelta(seconds=10)}  # one of them lets a node do nothing more
    report = prewarm(
        make_settings(store, nodes, requests=requests, min_node_share=0.5, limits=limits)
    )
    whole = {f"forged/{name}": body for name, body in contents.items()}
    assert [read_files(node.root) for node in nodes[:2]] == [whole] * 2
    by_name = {node.name: node for node in report.nodes}
    assert [by_name[node.name].why for node in nodes[:2]] == ["", ""]
    malformed = forged not in (*FORGED[:2], FORGED[-1])
    assert ("no agent of this version" in by_name["liar"].why) is malformed


def test_reads_that_only_one_node_says_to_fail_are_made_by_the_driver_few_at_a_time(
    store, nodes, tmp_path, monkeypatch
):
    body = hashlib.shake_256(b"gone").digest(16 * MIB)
    store.put("gone/object", body)
    forged = [make_failed(p, reason="gone", status=404) for p in range(64)]
    stop(nodes.pop())
    nodes.append(start_agent("liar", tmp_path / "liar", code=make_forging(forged)))
    read: list[int] = []
    read_piece = driver_reader.RetryingReader.read
    monkeypatch.setattr(
        driver_reader.RetryingReader,
        "read",
        lambda self, number, into: read.append(number) or read_piece(self, number, into),
    )
    request = Request(key="gone/object", sha256=hashlib.sha256(body).hexdigest())
    report = prewarm(make_settings(store, nodes, requests=[request]))
    assert [node.ready for node in report.nodes] == [False, True, True]
    assert len(read) < 16


def test_a_node_cannot_put_what_does_not_print_into_an_error(store, nodes, tmp_path):
    fill(store, "odd")
    stop(nodes.pop())
    failed = '[{"type": "node-failed", "reason": "a\\\\ud800b\\\\u001b[2Jc"}]'
    fault = f"__import__('json').loads('{failed}')"
    nodes.append(start_agent("liar", tmp_path / "liar", code=make_forging(fault)))
    with pytest.raises(errors.WorkerError) as caught:
        prewarm(make_settings(store, nodes, min_node_share=1.0, **below("odd")))
    assert "a\ufffdb\ufffd[2Jc" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "refuses"),
    [("agent", "agent speaks version 3"), ("run_spec", "driver speaks version 2")],
)
def test_a_driver_and_an_agent_of_different_versions_refuse_each_other(
    store, nodes, tmp_path, module, refuses
):
    contents = fill(store, "versions")
    stop(nodes.pop())
    code = "import millrace.swarm.agent, millrace.swarm.run_spec, millrace.swarm.protocol as wire\n"
    code += f"wire.VERSION = millrace.swarm.{module}.VERSION = 3\n"
    nodes.append(start_agent("later", tmp_path / "later", code=code))
    report = prewarm(make_settings(store, nodes, min_node_share=0.5, **below("versions")))
    assert [read_files(node.root) for node in nodes[:2]] == [contents] * 2
    later = next(node for node in report.nodes if node.name == "later")
    assert refuses in later.why
    assert "install the same version of Millrace on the driver and on all nodes" in later.why


IDLE = """
import millrace.swarm.fetcher as fetcher
from millrace.swarm.messages import PieceRedundant

def fetch(self, order):
    self._emit(PieceRedundant(order.piece, order.source, 0))

fetcher.PieceFetcher._fetch = fetch
"""
"""Lets an agent answer each order that it has the piece already."""


@pytest.mark.parametrize("honest", [1, 2])
def test_a_node_that_fetches_nothing_is_given_up(store, nodes, tmp_path, honest):
    fill(store, "idle")
    idle = start_agent("idle", tmp_path / "idle", code=IDLE)
    limits = LimitSettings(stall_timeout=timedelta(seconds=1))
    try:
        report = prewarm(
            make_settings(store, [*nodes[:honest], idle], limits=limits, **below("idle"))
        )
    finally:
        stop(idle)
    assert {node.name: node.ready for node in report.nodes} == {
        "idle": False,
        **{node.name: True for node in nodes[:honest]},
    }


class Refusing(BaseHTTPRequestHandler):
    """An agent that refuses each run, with a reason that is none."""

    said = b""

    def do_GET(self) -> None:
        nonce = self.path.partition("nonce=")[2]
        proof = tls.prove(KEY.encode(), nonce, "refusing", "")
        self.answer(200, json.dumps({"identity": "refusing", "proof": proof}).encode())

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(403, self.said)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("said", [b'{"why": ""}', b'{"why": 0}', b'{"why": ["x"]}', b""])
def test_a_refusal_without_a_reason_costs_only_its_node(store, nodes, said, monkeypatch):
    fill(store, "refused")
    monkeypatch.setattr(Refusing, "said", said)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hosts = [nodes[0].host, Host(url=f"http://127.0.0.1:{server.server_port}", name="refuses")]
        settings = make_settings(
            store, nodes, nodes=Hosts(hosts=tuple(hosts), key=SecretStr(KEY)), **below("refused")
        )
        try:
            report = prewarm(settings)
        finally:
            server.shutdown()
    assert [node.ready for node in report.nodes] == [True, False]
    assert isinstance(report.nodes[1].why, str)
    assert report.nodes[1].why


HEAD = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"\r\nlonger than it says",
        HEAD + b"\r\nsho",
        HEAD.replace(b"4", b"5") + b"\r\nfive!",
        b"HTTP/1.1 206 Partial Content\r\n\r\nfour",
        b"HTTP/1.1 \xb2\xb2\xb2 ?\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfour",
        b"no HTTP at all\r\n\r\n",
        b"",
    ],
)
def test_an_answer_that_is_none_is_an_error_of_the_transfer(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        connections = ConnectionPool(5.0)
        endpoint = Endpoint("http", "127.0.0.1", server.getsockname()[1])
        with pytest.raises((OSError, http.client.HTTPException)):
            connections.read_into(endpoint, "/a", {}, memoryview(bytearray(4)))
        thread.join()
        connections.close()


def test_a_header_of_two_lines_is_not_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("http", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(ValueError, match="one line"):
            ConnectionPool(5.0).read_into(
                endpoint, "/a", {"A": "b\r\nC: d"}, memoryview(bytearray(1))
            )


def test_a_late_node_joins_a_run(store, nodes, tmp_path):
    contents = fill(store, "late")
    settings = make_settings(store, nodes, **below("late"))
    stop(nodes[2])
    port = int(nodes[2].url.rpartition(":")[2])
    store.order(Fault(FaultKind.STALL, key="late/large.bin", offset=0, times=None, seconds=6))

    def come() -> None:
        nodes[2] = start_agent("n2", nodes[2].root, port=port)

    report = prewarm(settings, progress=Heard(0.05, come))
    assert [node.ready for node in report.nodes] == [True] * 3
    assert read_files(nodes[2].root) == contents


def test_a_full_disk_fails_its_node_only(store, nodes):
    contents = fill(store, "full")
    small = nodes[0].root
    with mounted(small, 4 * MIB):
        report = prewarm(make_settings(store, nodes, **below("full")))
        assert "free" in report.nodes[0].why
    assert [node.ready for node in report.nodes] == [False, True, True]
    assert read_files(nodes[1].root) == contents


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
