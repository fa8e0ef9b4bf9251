"""Specification of a run, as every node is told it alike."""

import json
import secrets
from dataclasses import dataclass, field

from millrace.swarm.pieces import Catalogue
from millrace.swarm.protocol import VERSION
from millrace.swarm.settings import PrewarmSettings

VOTES_NEEDED = 2
"""Number of votes that decide on a piece of which nothing says what it is."""


@dataclass(frozen=True, slots=True)
class RunSecrets:
    """Name and key of a run.

    Attributes:
        name: Name of the run.
        key: Key that nodes sign their requests to each other with.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))


def list_unproven(catalogue: Catalogue) -> list[int]:
    """Return the pieces with a part of which nothing says what it is."""
    return [
        number
        for number, piece in enumerate(catalogue.pieces)
        if any(s.size and not catalogue.files[s.file].digest for s in piece)
    ]


def read_authorities(settings: PrewarmSettings) -> str | None:
    """Return the certificate authorities of the stores, PEM; None where they state none."""
    files = [spec.ca_file for spec in settings.stores.values() if spec.ca_file]
    return "\n".join(file.read_text() for file in files) or None


def serialize_plan(
    settings: PrewarmSettings, catalogue: Catalogue, sources: list[str], key: bytes
) -> bytes:
    """Return the body that starts a run on a node, made once: it may be large.

    Args:
        settings: Settings of the run.
        catalogue: Files of the run.
        sources: Signed URL, or path in a folder, of each file.
        key: Key of the run.
    """
    limits = settings.limits
    return json.dumps(
        {
            "version": VERSION,
            "catalogue": catalogue.to_json(),
            "sources": sources,
            "key": key.hex(),
            "check": settings.check,
            "slots": limits.node_store + limits.down + 4,
            "ca": read_authorities(settings),
            "unpacked": {
                "bytes": settings.unpacked_bytes,
                "members": settings.unpacked_members,
            },
        }
    ).encode()
