"""Specification of a run: the body of the request that starts a run."""

import json

import pytest

from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.protocol import VERSION, Endpoint
from millrace.swarm.run_spec import RunSpec, decode_start_body, encode_start_body

SPEC = RunSpec(
    catalogue=build_catalogue([File("a", 1, "e", "s3://b/a", f"blake3:{0:064x}")]),
    sources=["https://b/a?signature"],
    key=b"key",
    check=CacheCheck.FULL,
    slots=20,
    ca=None,
    unpack_limits=UnpackLimits(bytes=10, members=2),
    mirrors={0: ["https://c/a?signature"]},
)
AGENTS = {"node-b": Endpoint("https", "10.0.0.2", 7000, "node-b", "f" * 64)}


def test_a_node_decodes_what_the_driver_has_encoded():
    assert decode_start_body(b"".join(encode_start_body(AGENTS, SPEC.encode()))) == (SPEC, AGENTS)


def test_all_nodes_share_one_encoded_specification():
    spec = SPEC.encode()
    assert all(encode_start_body(agents, spec)[1] is spec for agents in ({}, AGENTS))


def test_the_fields_of_the_body_are_those_of_version_seven():
    agents, spec = map(json.loads, encode_start_body(AGENTS, SPEC.encode()))
    assert VERSION == 7
    assert agents == {
        "node-b": {
            "scheme": "https",
            "host": "10.0.0.2",
            "port": 7000,
            "identity": "node-b",
            "fingerprint": "f" * 64,
        }
    }
    row = ["a", 1, "e", "s3://b/a", f"blake3:{0:064x}", 0o644, None, [], "", "", ""]
    assert spec == {
        "version": 7,
        "catalogue": {"piece_size": 1 << 20, "files": [row]},
        "sources": ["https://b/a?signature"],
        "key": b"key".hex(),
        "check": "full",
        "slots": 20,
        "ca": None,
        "unpacked": {"bytes": 10, "members": 2},
        "mirrors": {"0": ["https://c/a?signature"]},
    }


@pytest.mark.parametrize("body", [b"", b"{}", b"{}\n", b"{}\n{"])
def test_another_body_is_refused(body):
    with pytest.raises(ValueError, match="Expecting"):
        decode_start_body(body)
