"""Faults of the store, and objects that change or do not have their digest."""

import hashlib
import os
from datetime import timedelta

import obstore
import pytest

from benchmarks.rig.store import FaultKind, RigFault
from millrace import errors
from millrace.storage import fetch_stored_sha256, open_store
from millrace.swarm import LimitSettings, Request, prewarm
from millrace.swarm.progress_events import FileMismatched
from tests.support.swarm.prewarms import MIB, below, fill
from tests.support.swarm.swarms import Heard, make_settings, make_spec, read_files


@pytest.mark.parametrize(
    "fault",
    [
        RigFault(FaultKind.DENY, times=2),
        RigFault(FaultKind.ERROR, times=None, share=0.3, seed=1),
        RigFault(FaultKind.TRUNCATE, times=6),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_store_that_fails_for_a_while_is_asked_again(store, nodes, fault):
    contents = fill(store, f"fails-{fault.kind}")
    store.inject_fault(fault)
    report = prewarm(make_settings(store, nodes, **below(f"fails-{fault.kind}")))
    assert [node.reason for node in report.nodes] == [""] * 3
    assert [read_files(node.root) for node in nodes] == [contents] * 3
    fired = store.read_counts().fired[fault.kind]
    assert fired >= 2
    # Of two sources the slower is not heard any more when all is there: so of a fault without end.
    unheard = len(nodes) if fault.times is None else 0
    assert sum(node.failures for node in report.nodes) >= fired - unheard


def test_a_store_that_keeps_refusing_is_said(store, nodes):
    fill(store, "refuses")
    store.inject_fault(RigFault(FaultKind.DENY, key="refuses/large.bin", times=None))
    store_timeout = timedelta(seconds=1)
    with pytest.raises(errors.DeniedError, match=r"refuses/large\.bin could not be read"):
        prewarm(make_settings(store, nodes, store_timeout=store_timeout, **below("refuses")))


def test_a_wrong_read_of_an_object_with_a_digest_is_found_and_read_again(store, nodes):
    contents = fill(store, "flip")
    body = contents["large.bin"]
    request = Request(key="flip/large.bin", sha256=hashlib.sha256(body).hexdigest())
    store.inject_fault(RigFault(FaultKind.FLIP, key="flip/large.bin", offset=5 * MIB))
    heard = Heard()
    report = prewarm(make_settings(store, nodes, requests=[request]), progress=heard)
    assert [read_files(node.root) for node in nodes] == [{"flip/large.bin": body}] * 3
    assert store.read_counts().fired == {"flip": 1}
    assert heard.find(FileMismatched)
    assert report.unverified == 0


def test_a_digest_that_the_store_keeps_is_what_an_object_must_be(store, nodes):
    body = os.urandom(2 * MIB)
    origin = open_store(make_spec(store))
    obstore.put(store.make_client(checksum_algorithm="SHA256"), "kept", body)
    store.put("not-kept", b"other")
    assert fetch_stored_sha256(origin, "kept") == f"sha256:{hashlib.sha256(body).hexdigest()}"
    assert fetch_stored_sha256(origin, "not-kept") == fetch_stored_sha256(origin, "not-there") == ""
    store.inject_fault(RigFault(FaultKind.FLIP, key="kept", offset=MIB))
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


def test_an_object_that_is_not_the_md5_of_its_etag_gets_no_final_name(store, nodes):
    contents = fill(store, "rotten")
    store.inject_fault(RigFault(FaultKind.FLIP, key="rotten/even.bin", offset=MIB, times=None))
    with pytest.raises(errors.CorruptError, match=r"rotten/even\.bin does not have the MD5"):
        prewarm(make_settings(store, nodes, **below("rotten")))
    for node in nodes:
        found = read_files(node.root)
        assert "even.bin" not in found
        assert found.items() <= contents.items()


def test_an_object_that_is_replaced_meanwhile_stops_the_run(store, nodes):
    contents = fill(store, "replaced")
    replaced = b"x" * len(contents["large.bin"])
    store.inject_fault(RigFault(FaultKind.STALL, key="replaced/even.bin", offset=0, seconds=1))
    heard = Heard(0.0, lambda: store.put("replaced/large.bin", replaced))
    one_at_a_time = LimitSettings(store_reads=1)  # the first is stalled, large.bin comes after it
    with pytest.raises(errors.ChangedError, match=r"replaced/large\.bin was replaced"):
        prewarm(
            make_settings(store, nodes, limits=one_at_a_time, **below("replaced")), progress=heard
        )
    for node in nodes:
        assert "large.bin" not in read_files(node.root)
