"""Name, key and specification of a new run, made from its settings."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace import errors
from millrace.formatting import format_size
from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.catalogue import Catalogue
from millrace.swarm.protocol import MAX_BODY_SIZE
from millrace.swarm.run_spec import RunSpec
from millrace.swarm.settings import PrewarmSettings

VOTES_NEEDED = 2
"""Number of equal votes that decide the digest of a piece, where a file of it has no digest."""

_ADDRESSES_SIZE = 16 << 20  # bytes for the addresses of the agents, which precede the files
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
    mirrors = (spec for specs in settings.mirrors.values() for spec in specs)
    specs = (*settings.stores.values(), *mirrors)
    files = [spec.ca_file for spec in specs if spec.ca_file]
    return "\n".join(file.read_text() for file in files) or None


def encode_run_spec(spec: RunSpec) -> bytes:
    """Return the encoded specification of a run, which each agent receives in one request.

    Raises:
        ConfigurationError: The files are too many for one request.
    """
    encoded, longest = spec.encode(), MAX_BODY_SIZE - _ADDRESSES_SIZE
    if len(encoded) > longest:
        count = len(spec.sources)
        raise errors.ConfigurationError(
            f"The {count:,} files are too many for one run: their list has "
            f"{format_size(len(encoded))}, and an agent accepts {format_size(longest)}, about "
            f"{count * longest // len(encoded):,} such files. Request them in several runs, or "
            "pack them into archives and set `unpack`."
        )
    return encoded


def make_run_spec(
    settings: PrewarmSettings,
    catalogue: Catalogue,
    sources: list[str],
    key: bytes,
    mirrors: Mapping[int, list[str]] | None = None,
) -> RunSpec:
    """Return the specification of a run.

    Args:
        settings: Settings of the run.
        catalogue: Files of the run.
        sources: Signed URL, or path in a folder, of each file.
        key: Key of the run.
        mirrors: Signed URLs of further copies, by the number of the file; None without any.
    """
    limits = settings.limits
    return RunSpec(
        catalogue=catalogue,
        sources=sources,
        key=key,
        check=settings.check,
        slots=limits.store_reads_per_node + limits.downloads_per_node + _FURTHER_SLOTS,
        ca=read_authorities(settings),
        unpack_limits=UnpackLimits(
            bytes=settings.unpacked_bytes, members=settings.unpacked_members
        ),
        mirrors=mirrors or {},
    )
