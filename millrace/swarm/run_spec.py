"""Specification of a run: the body of the request that starts the run on a node.

The body has two lines of JSON. The first line has the agents that have joined the run so far, so
the driver makes it for each node. The second line has the specification, which is the same for all
nodes and may be large, so the driver encodes it once. Agents import this module, so it imports
neither the settings nor a client of a store.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import Catalogue
from millrace.swarm.messages import encode_endpoint
from millrace.swarm.protocol import VERSION, Endpoint, ProtocolVersionError


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Files, keys and limits of a run.

    Attributes:
        catalogue: Files of the run, and their pieces.
        sources: Signed URL of each file, or its path in a folder, by the number of the file.
        key: Key that nodes sign their requests to each other with.
        check: Check of the files of earlier runs.
        slots: Number of orders that a node carries out at once.
        ca: Certificate authorities of the stores, PEM; None for those of the system.
        unpack_limits: Limits of one archive. Only its `bytes` and `members` are sent.
        mirrors: Signed URLs of further copies with the same ETag, by the number of the file.
    """

    catalogue: Catalogue
    sources: list[str]
    key: bytes
    check: CacheCheck
    slots: int
    ca: str | None
    unpack_limits: UnpackLimits
    mirrors: Mapping[int, list[str]] = field(default_factory=dict[int, list[str]])

    def encode(self) -> bytes:
        """Return the second line of the body."""
        return json.dumps(
            {
                "version": VERSION,
                "catalogue": self.catalogue.to_json(),
                "sources": self.sources,
                "key": self.key.hex(),
                "check": self.check,
                "slots": self.slots,
                "ca": self.ca,
                "unpacked": {
                    "bytes": self.unpack_limits.bytes,
                    "members": self.unpack_limits.members,
                },
                "mirrors": self.mirrors,
            }
        ).encode()


def encode_start_body(agents: Mapping[str, Endpoint], spec: bytes) -> tuple[bytes, bytes]:
    """Return the two lines of the body of the request that starts a run; the second is not copied.

    Args:
        agents: Endpoint of each agent that has joined, by the id of its node.
        spec: Encoded specification (`RunSpec.encode`).
    """
    known = {node: encode_endpoint(endpoint) for node, endpoint in agents.items()}
    return f"{json.dumps(known)}\n".encode(), spec


def decode_start_body(body: bytes) -> tuple[RunSpec, dict[str, Endpoint]]:
    """Return the specification of a run, and the endpoints of the agents that have joined.

    Raises:
        ValueError, KeyError: The body is not one of `encode_start_body`.
        ProtocolVersionError: The driver has another version of the protocol.
    """
    agents, _, spec = body.partition(b"\n")
    data = json.loads(spec)
    if data.get("version") != VERSION:
        raise ProtocolVersionError(data.get("version"), "driver")
    decoded = RunSpec(
        catalogue=Catalogue.from_json(data["catalogue"]),
        sources=data["sources"],
        key=bytes.fromhex(data["key"]),
        check=CacheCheck(data["check"]),
        slots=data["slots"],
        ca=data["ca"],
        unpack_limits=UnpackLimits(
            bytes=data["unpacked"]["bytes"], members=data["unpacked"]["members"]
        ),
        mirrors={int(number): urls for number, urls in data["mirrors"].items()},
    )
    return decoded, {node: Endpoint(**fields) for node, fields in json.loads(agents).items()}
