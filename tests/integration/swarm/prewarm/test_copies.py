"""Files on every node: what is requested, and where it goes."""

import hashlib
import os
from pathlib import Path

import pytest

from benchmarks.rig.store import RigStore
from millrace import errors
from millrace.storage import StoreSpec
from millrace.swarm import (
    LimitSettings,
    PrewarmSettings,
    Request,
    Unpacking,
    preview,
    prewarm,
)
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.targets import Targets
from tests.support.swarm.prewarms import MIB, below, fill, tarred
from tests.support.swarm.swarms import describe_transfers, make_settings, make_spec, read_files


def test_every_node_gets_every_file_and_each_byte_leaves_the_store_once(store, nodes):
    contents = fill(store, "once")
    report = prewarm(make_settings(store, nodes, **below("once")))
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    assert all(node.ready for node in report.nodes)
    size = sum(map(len, contents.values()))
    assert report.store_bytes == size == report.size, describe_transfers(report)
    assert store.read_counts().bytes == size, describe_transfers(report)
    assert sum(node.from_peers for node in report.nodes) == 2 * size


def test_pieces_of_64_mib_are_copied(store, nodes):
    body = os.urandom(1 << 20) * 70
    store.put("pieces/large.bin", body)
    # Of two concurrent reads, one may be late on a busy machine, and is then made again.
    limits = LimitSettings(store_reads=1, direct_reads=False)
    settings = make_settings(
        store, nodes[:2], piece_size=64 * MIB, limits=limits, **below("pieces")
    )
    report = prewarm(settings)
    assert all(read_files(node.root) == {"large.bin": body} for node in nodes[:2])
    transfers = describe_transfers(report)
    assert report.store_bytes == store.read_counts().bytes == len(body), transfers
    assert sum(node.from_peers for node in report.nodes) == len(body), transfers


def test_a_second_run_reads_nothing(store, nodes):
    contents = fill(store, "twice")
    settings = make_settings(store, nodes, **below("twice"))
    prewarm(settings)
    store.reset()
    report = prewarm(settings)
    assert store.read_counts().bytes == report.store_bytes == 0
    assert [node.cached for node in report.nodes] == [report.size] * 3
    assert read_files(nodes[0].root) == contents


def test_a_node_that_comes_new_is_served_by_the_others(store, nodes, tmp_path):
    fill(store, "new")
    prewarm(make_settings(store, nodes[:2], **below("new")))
    store.reset()
    prewarm(make_settings(store, nodes, **below("new")))
    assert store.read_counts().bytes == 0
    assert read_files(nodes[2].root) == read_files(nodes[0].root)


def test_the_same_object_to_two_destinations_is_fetched_once(store, nodes):
    contents = fill(store, "links")
    requests = [
        Request(key="links/large.bin", destination="a/model.bin"),
        Request(key="links/large.bin", destination="b/model.bin"),
    ]
    report = prewarm(make_settings(store, nodes, requests=requests))
    body = contents["large.bin"]
    assert read_files(nodes[0].root) == {"a/model.bin": body, "b/model.bin": body}
    assert store.read_counts().bytes == report.size == len(body)


LINKED = [Request(key="changing/large.bin", destination=name) for name in ("a.bin", "b/b.bin")]


def change(store, number: int) -> bytes:
    """Put another content under the same key."""
    body = hashlib.shake_256(f"{number}".encode()).digest(5 * MIB + number)
    store.put("changing/large.bin", body)
    return body


def test_all_destinations_of_an_object_get_its_new_content(store, nodes):
    for number in range(3):
        body = change(store, number)
        report = prewarm(make_settings(store, nodes, requests=LINKED))
        assert [read_files(node.root) for node in nodes] == [{"a.bin": body, "b/b.bin": body}] * 3
    for requests in (LINKED[1:], LINKED[::-1], LINKED[:1], LINKED):
        report = prewarm(make_settings(store, nodes, requests=requests))
        assert [node.cached for node in report.nodes] == [len(body)] * 3
    body = change(store, 3)
    prewarm(make_settings(store, nodes, requests=LINKED[1:]))
    assert read_files(nodes[0].root)["b/b.bin"] == body
    prewarm(make_settings(store, nodes, requests=LINKED))
    assert [read_files(node.root) for node in nodes] == [{"a.bin": body, "b/b.bin": body}] * 3


def test_a_destination_that_was_removed_comes_back(store, nodes):
    body = change(store, 0)
    for name in ("a.bin", "b/b.bin"):
        prewarm(make_settings(store, nodes[:1], requests=LINKED))
        (nodes[0].root / name).unlink()
        prewarm(make_settings(store, nodes[:1], requests=LINKED))
        assert read_files(nodes[0].root) == {"a.bin": body, "b/b.bin": body}


def test_a_file_of_somebody_at_a_further_destination_is_refused_before_anything_is_replaced(
    store, nodes
):
    first = change(store, 0)
    prewarm(make_settings(store, nodes[:1], requests=LINKED[:1]))
    (nodes[0].root / "b").mkdir()
    (nodes[0].root / "b/b.bin").write_bytes(b"mine")
    change(store, 1)
    with pytest.raises(errors.WorkerError, match=r"b\.bin exists, and Millrace did not make it"):
        prewarm(make_settings(store, nodes[:1], requests=LINKED))
    assert read_files(nodes[0].root) == {"a.bin": first, "b/b.bin": b"mine"}


def test_an_object_that_is_asked_for_in_two_ways_is_refused(store, nodes):
    fill(store, "ways")
    requests = [
        Request(key="ways/even.bin", destination="a"),
        Request(key="ways/even.bin", destination="b", mode=0o600),
    ]
    with pytest.raises(errors.ConfigurationError, match="requested twice"):
        preview(make_settings(store, nodes, requests=requests))


@pytest.mark.parametrize("bodies", [(b"one", b"two!"), (b"same", b"same")])
def test_buckets_of_two_servers_with_one_name_are_two_stores(store, nodes, tmp_path, bodies):
    with RigStore.start(tmp_path / "other") as other:
        stores = {"one": store, "two": other}
        for each, body in zip(stores.values(), bodies, strict=True):
            each.put("model.bin", body)
        requests = [Request(key="model.bin", store=name, destination=name) for name in stores]
        settings = make_settings(store, nodes[:1], requests=requests)
        specs = {name: make_spec(each) for name, each in stores.items()}
        settings = settings.model_copy(update={"stores": specs})
        found = preview(settings).files
        assert prewarm(settings).nodes[0].ready
    assert [path for path, _, _ in found] == ["one", "two"]
    assert len({origin for _, _, origin in found}) == 2
    assert read_files(nodes[0].root) == dict(zip(stores, bodies, strict=True))


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
    assert store.read_counts().bytes == 0


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
