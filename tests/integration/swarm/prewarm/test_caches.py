"""Files of earlier runs on a node: recognised, mended, replaced or left alone."""

import hashlib
import os
import shutil

import pytest

from millrace import errors
from millrace.swarm import CacheCheck, Request, prewarm
from tests.support.swarm.prewarms import MIB, below, fill
from tests.support.swarm.swarms import make_settings, read_files


@pytest.mark.parametrize("check", CacheCheck)
def test_a_damaged_cache_is_seen_and_only_what_is_damaged_is_fetched(store, nodes, check):
    contents = fill(store, f"damaged-{check}")
    settings = make_settings(store, nodes, check=check, **below(f"damaged-{check}"))
    prewarm(settings)
    file = nodes[1].root / "even.bin"  # of 8 pieces: also a sample of 8 looks at each
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(MIB)
        opened.write(bytes([contents["even.bin"][MIB] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
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
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if change == "record":  # of the identity, which is in a line of its own
        lines = [line for line in record.read_text().splitlines() if '"etag"' in line]
        record.write_text("".join(f"{line}\n" for line in lines))
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
    assert "Millrace did not make it" in lost.reason
    assert mine.read_bytes() == b"mine"
    assert read_files(nodes[1].root) == read_files(nodes[2].root) == contents
