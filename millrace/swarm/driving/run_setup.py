"""Name, key and specification of a new run, made from its settings."""

import secrets
from dataclasses import dataclass, field

from millrace.swarm.catalogue import Catalogue
from millrace.swarm.run_spec import RunSpec
from millrace.swarm.settings import PrewarmSettings

VOTES_NEEDED = 2
"""Number of equal votes that decide the digest of a piece, where a file of it has no digest."""

_FURTHER_SLOTS = 4  # orders of a node beyond its reads and downloads, such as those ordered twice


@dataclass(frozen=True, slots=True)
class RunSecrets:
    """Name and key of a run.

    Attributes:
        name: Name of the run.
        key: Key that nodes sign their requests to each other with.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))


def read_authorities(settings: PrewarmSettings) -> str | None:
    """Return the certificate authorities of the stores, PEM; None if no store names any."""
    files = [spec.ca_file for spec in settings.stores.values() if spec.ca_file]
    return "\n".join(file.read_text() for file in files) or None


def make_run_spec(
    settings: PrewarmSettings, catalogue: Catalogue, sources: list[str], key: bytes
) -> RunSpec:
    """Return the specification of a run.

    Args:
        settings: Settings of the run.
        catalogue: Files of the run.
        sources: Signed URL, or path in a folder, of each file.
        key: Key of the run.
    """
    limits = settings.limits
    return RunSpec(
        catalogue=catalogue,
        sources=sources,
        key=key,
        check=settings.check,
        slots=limits.node_store + limits.down + _FURTHER_SLOTS,
        ca=read_authorities(settings),
        unpacked={"bytes": settings.unpacked_bytes, "members": settings.unpacked_members},
    )
