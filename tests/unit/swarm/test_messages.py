"""Messages of the swarm: their JSON, the check of what agents send, and other versions."""

import json

import pytest

from millrace.errors import ConfigurationError
from millrace.swarm import messages, protocol
from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.driving import run_setup
from millrace.swarm.driving.run_setup import encode_run_spec, make_run_spec
from millrace.swarm.event_checker import EventChecker, ProtocolError
from millrace.swarm.messages import (
    EVENT_TYPES,
    AddPeer,
    BytesReceived,
    DigestMismatch,
    DropPiece,
    FetchPiece,
    FilesReady,
    FileUnusable,
    NodeFailed,
    PieceDropped,
    PieceFailed,
    PieceRedundant,
    PieceWritten,
    ReadRetried,
    VoidDigest,
    compute_commitment,
    decode_order,
    encode_message,
)
from millrace.swarm.protocol import Endpoint, ProtocolVersionError
from millrace.swarm.run_spec import RunSpec, decode_start_body, encode_start_body
from millrace.swarm.settings import PrewarmSettings

DIGEST = f"blake3:{0:064x}"
ORDERS = (
    FetchPiece(3, "node-b", compute_commitment(DIGEST)),
    FetchPiece(3, "", "", turn=1),
    DropPiece(3),
    VoidDigest(1),
    AddPeer("node-b", Endpoint("https", "10.0.0.2", 7000, "node-b", "0" * 64)),
)
EVENTS = (
    BytesReceived(5),
    PieceWritten(0, "", DIGEST, 10),
    PieceRedundant(1, "node-b", 0),
    PieceDropped(1, [0]),
    PieceFailed(1, "node-b", "wrong bytes", is_wrong=True),
    PieceFailed(0, "", "gone", 404),
    ReadRetried("a reset connection"),
    FilesReady([0]),
    FileUnusable(0, "no tar"),
    DigestMismatch(0, DIGEST),
    NodeFailed("the disk is full"),
)
CHECKER = EventChecker([10, 20], 1, {"node-b"})


def as_json(message):
    """Send a message through JSON."""
    return json.loads(json.dumps(encode_message(message)))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_is_read_as_it_was_sent(order):
    assert decode_order(as_json(order)) == order


def test_events_are_read_as_they_were_sent():
    assert CHECKER.read_events([as_json(event) for event in EVENTS]) == list(EVENTS)
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())


@pytest.mark.parametrize(
    ("event", "change"),
    [
        (PieceWritten(0, "", DIGEST, 10), {"size": 9}),
        (PieceWritten(0, "", DIGEST, 10), {"size": True}),
        (PieceWritten(0, "", DIGEST, 10), {"piece": 2}),
        (PieceWritten(0, "", DIGEST, 10), {"source": "node-c"}),
        (PieceWritten(0, "", DIGEST, 10), {"digest": "x"}),
        (PieceWritten(0, "", DIGEST, 10), {"digest": "0" * 64}),
        (PieceRedundant(0, "", 10), {"size": 9}),
        (PieceFailed(0, "", "gone"), {"is_wrong": True}),
        (PieceFailed(0, "", "gone"), {"is_wrong": 1}),
        (PieceFailed(0, "", "gone"), {"reason": 7}),
        (PieceDropped(0, [0]), {"piece": 2}),
        (PieceDropped(0, [0]), {"files": [1]}),
        (FilesReady([0]), {"files": [1]}),
        (NodeFailed("full"), {"type": "fetch-piece"}),
        (NodeFailed("full"), {"type": ["node-failed"]}),
    ],
)
def test_an_event_that_no_agent_sends_is_refused(event, change):
    with pytest.raises(ProtocolError):
        CHECKER.read_events([as_json(event) | change])


def test_a_node_may_find_its_own_read_wrong_only_if_the_digest_is_known():
    event = PieceFailed(1, "", "wrong bytes", is_wrong=True)
    checker = EventChecker([10, 20], 1, {"node-b"}, known={1})
    assert checker.read_events([as_json(event)]) == [event]
    with pytest.raises(ProtocolError, match="whose digest is not known"):
        checker.read_events([as_json(event) | {"piece": 0}])


def make_body() -> bytes:
    """Make the body that starts a run."""
    settings = PrewarmSettings.model_validate(
        {
            "stores": {"s": {"url": "memory://x"}},
            "requests": [{"store": "s", "key": "a"}],
            "root": "/srv",
            "check": CacheCheck.SAMPLED,
        }
    )
    catalogue = build_catalogue([File("a", 1, "e", "s3://b/a")])
    spec = make_run_spec(settings, catalogue, ["url"], b"key").encode()
    return b"".join(encode_start_body({}, spec))


def test_more_files_than_an_agent_accepts_in_a_request_are_refused_before_the_run(monkeypatch):
    catalogue = build_catalogue([File(f"{n}", 1, "e", f"s3://b/{n}") for n in range(100)])
    spec = RunSpec(catalogue, ["url"] * 100, b"key", CacheCheck.SAMPLED, 1, None, UnpackLimits())
    assert encode_run_spec(spec) == spec.encode()
    longest = len(spec.encode()) - 1
    monkeypatch.setattr(run_setup, "MAX_BODY_SIZE", longest + run_setup._ADDRESSES_SIZE)
    with pytest.raises(ConfigurationError, match=r"The 100 files are too many .* about 99"):
        encode_run_spec(spec)


def test_a_node_refuses_a_driver_of_another_version(monkeypatch):
    spec, agents = decode_start_body(make_body())
    assert (spec.sources, spec.key, agents) == (["url"], b"key", {})
    monkeypatch.setattr("millrace.swarm.run_spec.VERSION", protocol.VERSION + 1)
    body = make_body()
    monkeypatch.undo()
    refused = f"driver speaks version {protocol.VERSION + 1} .* and this Millrace version"
    with pytest.raises(ProtocolVersionError, match=refused):
        decode_start_body(body)


def test_the_version_of_another_side_may_be_anything():
    for stated in (None, "2", [1], True, 1.0):
        assert "no version that can be read" in str(ProtocolVersionError(stated, "agent"))
    assert messages.Endpoint is Endpoint  # agents import one class of addresses
