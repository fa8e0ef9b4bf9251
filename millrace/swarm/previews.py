"""Preview of a run: its files and their destinations."""

from dataclasses import dataclass

from millrace import cluster, errors
from millrace.storage import open_store
from millrace.swarm.resolving import resolve_requests
from millrace.swarm.settings import PrewarmSettings, RayNodes


@dataclass(frozen=True, slots=True)
class Preview:
    """Files that a run would put on every node.

    Attributes:
        files: Destination, bytes and origin of each file.
        size: Bytes of all files.
        pieces: Number of pieces.
        piece_size: Bytes of a piece at most.
        unverified: Number of files without a digest.
        refusals: Reasons for which `prewarm` would refuse to run on this machine.
    """

    files: tuple[tuple[str, int, str], ...]
    size: int
    pieces: int
    piece_size: int
    unverified: int
    refusals: tuple[str, ...]


def preview(settings: PrewarmSettings) -> Preview:
    """Return the files that a run would copy. Read only names, sizes and digests from the store.

    A Ray cluster is contacted, to check that it answers. Hosts are not contacted, since they may
    start later.

    Raises:
        NotFoundError, ConfigurationError: As for `prewarm`.
    """
    stores = {name: open_store(spec) for name, spec in settings.stores.items()}
    catalogue = resolve_requests(settings, stores).catalogue
    refusals: list[str] = []
    if isinstance(settings.nodes, RayNodes):
        try:
            cluster.check_reachable(settings.nodes.address)
        except errors.ConfigurationError as error:
            refusals.append(str(error))
    return Preview(
        files=tuple((file.path, file.size, file.origin) for file in catalogue.files),
        size=catalogue.size,
        pieces=len(catalogue.pieces),
        piece_size=catalogue.piece_size,
        unverified=sum(not file.digest for file in catalogue.files),
        refusals=tuple(refusals),
    )
