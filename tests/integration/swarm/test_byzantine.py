"""Agents that lie about what the store has: their bytes reach no other node."""

import hashlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.rig.store import RigStore
from millrace import errors
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, open_store
from millrace.swarm import LimitSettings, PrewarmReport, Request, prewarm
from millrace.swarm.driving import stragglers
from millrace.swarm.piece_readers import StoreReader
from millrace.swarm.progress_events import FileMismatched, NodeMisread
from tests.support.swarm.datasets import write_dataset
from tests.support.swarm.swarms import (
    CLAIM,
    DAWDLE,
    DRIP,
    FLIP,
    FLIP_ALWAYS,
    IMPATIENT,
    Agent,
    Heard,
    make_failed,
    make_forging,
    make_settings,
    make_spec,
    read_files,
    start_agent,
    stop,
)

MIB = 1 << 20
SIZES = {"large.bin": 5 * MIB + 17, "even.bin": 2 * MIB, "empty": 0, "sub/one": 1}
CONTENTS = {name: hashlib.shake_256(name.encode()).digest(size) for name, size in SIZES.items()}
ALL = [Request(prefix="data")]
SHARDS = {
    f"text/shards/webdataset/train/train-00000-{number:06d}.tar": hashlib.shake_256(
        bytes([number])
    ).digest(size)
    for number, size in enumerate((12 * MIB + 17, 4 * MIB, 17, 1000))
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigStore]:
    """A store whose ETags are MD5s, and that counts what it sends."""
    with RigStore.start(tmp_path_factory.mktemp("objects")) as store:
        for name, body in CONTENTS.items():
            store.put(f"data/{name}", body)
        yield store


@pytest.fixture(params=["md5", "nothing"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, rig: RigStore) -> StoreSpec:
    """A store that says by its ETags what the objects are, or a folder, of which nothing does."""
    if request.param == "md5":
        return make_spec(rig)
    for name, body in CONTENTS.items():
        path = tmp_path / "folder" / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return StoreSpec(url=(tmp_path / "folder").as_uri())


@pytest.fixture
def start(tmp_path: Path) -> Iterator["Start"]:
    started = Start(tmp_path)
    yield started
    for agent in started.agents:
        stop(agent)


class Start:
    """Starts agents, of which some lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: list[Agent] = []

    def __call__(self, *codes: str) -> list[Agent]:
        for number, code in enumerate(codes):
            self.agents.append(start_agent(f"n{number}", self._folder / f"n{number}", code=code))
        return self.agents


@pytest.mark.parametrize(
    "codes",
    [(CLAIM, "", ""), ("", "", CLAIM), (FLIP, "", ""), ("", FLIP), ("", "", FLIP, FLIP)],
    ids=["claims-first", "claims-last", "flips-first", "flips-of-two", "two-flip-alike"],
)
def test_a_node_that_lies_about_the_store_gives_others_no_wrong_byte(spec, start, codes):
    nodes = start(*codes)
    heard = Heard()
    report = prewarm(make_settings(spec, nodes, requests=ALL, min_node_share=0.1), progress=heard)
    for node, code, seen in zip(nodes, codes, report.nodes, strict=True):
        if not code:
            assert (seen.reason, seen.ready, seen.trusted) == ("", True, True)
            assert read_files(node.root) == CONTENTS
        else:
            assert not (seen.ready and seen.trusted)
            assert set(read_files(node.root).items()) <= set(CONTENTS.items())


@pytest.mark.parametrize("code", [CLAIM, FLIP], ids=["claims", "flips"])
def test_a_node_that_lies_and_is_the_only_one_is_found_out(spec, start, code):
    nodes = start(code)
    limits = LimitSettings(stall_timeout=timedelta(seconds=3))
    with pytest.raises(
        errors.MillraceError,
        match=r"that the store does not have|reports a wrong digest|it was not ready \d s",
    ):
        prewarm(make_settings(spec, nodes, requests=ALL, limits=limits))


@pytest.fixture
def dataset(tmp_path: Path) -> StoreSpec:
    """A store with a dataset whose digests of blocks are known."""
    store = open_store((tmp_path / "store").as_uri())
    write_dataset(store, "text", SHARDS)
    return store.spec


def warm_shards(dataset: StoreSpec, nodes: list[Agent], heard: Heard) -> PrewarmReport:
    requests = [Request(dataset="text")]
    settings = make_settings(dataset, nodes, requests=requests, piece_size=MIB, min_node_share=0.1)
    return prewarm(settings, progress=heard)


@pytest.mark.parametrize(
    "codes",
    [(FLIP, ""), ("", FLIP), (FLIP_ALWAYS, ""), ("", "", FLIP), (FLIP, "", FLIP)],
    ids=["first-of-two", "last-of-two", "always", "one-of-three", "two-of-three"],
)
def test_where_digests_are_known_a_node_that_flips_bits_is_named_and_loses_only_itself(
    dataset, start, codes
):
    nodes, heard = start(*codes), Heard()
    report = warm_shards(dataset, nodes, heard)
    assert report.refused == ()
    assert {event.node for event in heard.find(NodeMisread)} == {
        node.name for node, code in zip(nodes, codes, strict=True) if code
    }
    assert heard.find(FileMismatched) == []  # no whole file was read again
    assert report.driver_bytes <= 17 * MIB
    for node, code, seen in zip(nodes, codes, report.nodes, strict=True):
        if code != FLIP_ALWAYS:  # a node that flips only its reads gets the bytes from others
            assert (seen.reason, seen.ready) == ("", True)
            assert read_files(node.root) == SHARDS
        else:
            assert "it reported bytes that the store does not have" in seen.reason
            assert set(read_files(node.root).items()) <= set(SHARDS.items())
        assert seen.trusted or code


@pytest.mark.parametrize("code", [CLAIM, FLIP], ids=["claims", "flips"])
def test_where_digests_are_known_a_node_alone_that_has_other_bytes_is_found_out(
    dataset, start, code
):
    with pytest.raises(errors.WorkerError, match="reported bytes that the store does not have"):
        warm_shards(dataset, start(code), Heard())


def test_digests_of_blocks_that_do_not_fit_are_refused_and_the_nodes_vote(dataset, start, tmp_path):
    path = tmp_path / "store" / DatasetKeys("text").block_digests
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    nodes, heard = start("", FLIP, ""), Heard()
    report = warm_shards(dataset, nodes, heard)
    assert len(report.refused) == 1
    assert "its digests do not fit 1 of 4 shards" in report.refused[0]
    for node, seen in zip(nodes, report.nodes, strict=True):
        if seen.name != "n1":
            assert (seen.reason, seen.ready, seen.trusted) == ("", True, True)
            assert read_files(node.root) == SHARDS


def test_a_shard_that_is_damaged_in_the_store_ends_the_run_at_its_first_wrong_piece(
    dataset, start, tmp_path
):
    path = tmp_path / "store" / next(iter(SHARDS))
    body = path.read_bytes()
    path.write_bytes(bytes([body[0] ^ 1]) + body[1:])
    nodes = start("", "")
    with pytest.raises(errors.CorruptError, match=r"000000\.tar does not have its digest"):
        warm_shards(dataset, nodes, Heard())
    for node in nodes:
        assert next(iter(SHARDS)) not in read_files(node.root)


@pytest.mark.parametrize("status", [404, 412, 503])
def test_a_node_that_says_that_an_object_is_gone_ends_no_run(spec, start, status):
    forged = [make_failed(piece, reason="gone", status=status) for piece in range(8)]
    nodes = start(make_forging(forged), "", "")
    limits = LimitSettings(stall_timeout=timedelta(seconds=10))
    report = prewarm(make_settings(spec, nodes, requests=ALL, min_node_share=0.5, limits=limits))
    assert [seen.ready for seen in report.nodes[1:]] == [True, True], report
    assert [read_files(node.root) for node in nodes[1:]] == [CONTENTS] * 2
    if status != 503:
        assert "it cannot read" in report.nodes[0].reason


def test_a_part_that_one_node_alone_has_read_is_said_to_be_unconfirmed(tmp_path, start):
    body = hashlib.shake_256(b"large").digest(20 * MIB)
    for name in ("large.bin", "small.bin"):
        (tmp_path / name).write_bytes(body if name == "large.bin" else b"small")
    store = StoreSpec(url=tmp_path.as_uri())
    requests = [Request(key="large.bin")]
    report = prewarm(make_settings(store, start(""), requests=requests))
    assert (report.unverified, report.unconfirmed) == (1, 1)
    report = prewarm(make_settings(store, start.agents, requests=[Request(key="small.bin")]))
    assert (report.unverified, report.unconfirmed) == (1, 0)  # the driver has read it


def test_an_object_of_which_nothing_says_what_it_is_leaves_the_store_twice(start, tmp_path):
    body = hashlib.shake_256(b"large").digest(20 * MIB)
    (tmp_path / "large.bin").write_bytes(body)
    store = StoreSpec(url=tmp_path.as_uri())
    report = prewarm(make_settings(store, start("", "", ""), requests=[Request(key="large.bin")]))
    assert (report.unverified, report.unconfirmed) == (1, 0)
    share = report.driver_bytes
    assert 15 * MIB < share <= 32 * MIB  # what no node has read before is read twice
    assert 2 * len(body) <= report.store_bytes <= 2 * len(body) + share
    assert [read_files(node.root) for node in start.agents] == [{"large.bin": body}] * 3


def test_one_wrong_read_of_the_driver_harms_no_node(start, tmp_path, monkeypatch):
    body = hashlib.shake_256(b"once").digest(MIB)
    (tmp_path / "once.bin").write_bytes(body)
    first, read = threading.Lock(), StoreReader.read_piece

    def flip_first(reader: StoreReader, number: int, into: memoryview) -> None:
        read(reader, number, into)
        if first.acquire(blocking=False):
            into[0] ^= 1

    monkeypatch.setattr(StoreReader, "read_piece", flip_first)  # nodes are other processes
    nodes, requests = start("", ""), [Request(key="once.bin")]
    report = prewarm(make_settings(StoreSpec(url=tmp_path.as_uri()), nodes, requests=requests))
    assert first.locked()
    assert [(node.reason, node.ready, node.trusted) for node in report.nodes] == [
        ("", True, True)
    ] * 2
    assert [read_files(node.root) for node in nodes] == [{"once.bin": body}] * 2
    assert sum(node.from_store for node in report.nodes) <= 2 * len(body)  # none drops its copy


@pytest.mark.soak
@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"type": "bytes-received", "total": 1}, "it was not ready"),
        ({"type": "files-ready", "files": []}, "it received no byte for"),
    ],
    ids=["received", "files"],
)
def test_a_node_that_says_for_ever_that_it_goes_on_is_waited_for_no_longer(
    spec, start, monkeypatch, event, why
):
    monkeypatch.setattr(stragglers, "_MIN_RATE", 1e12)
    nodes = start("", DAWDLE.format(event=event), "")
    limits = LimitSettings(stall_timeout=timedelta(seconds=2))
    report = prewarm(make_settings(spec, nodes, requests=ALL, limits=limits))
    assert [seen.ready for seen in report.nodes] == [True, False, True]
    assert why in report.nodes[1].reason
    assert [read_files(node.root) for node in (nodes[0], nodes[2])] == [CONTENTS] * 2


@pytest.mark.parametrize("others", [1, 2])
def test_a_node_that_gives_a_byte_at_a_time_holds_nobody_up(spec, start, others):
    giver = start("")[0]
    prewarm(make_settings(spec, [giver], requests=ALL))
    stop(giver)
    start.agents.clear()
    start(DRIP, *[IMPATIENT] * others)
    report = prewarm(make_settings(spec, start.agents, requests=ALL))
    assert [seen.reason for seen in report.nodes] == [""] * (1 + others)
    assert [read_files(node.root) for node in start.agents] == [CONTENTS] * (1 + others)
