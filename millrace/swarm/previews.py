"""Preview of a run: what it would put where, without starting anything."""

from dataclasses import dataclass

from millrace import cluster, errors
from millrace.storage import open_store
from millrace.swarm.catalogue import resolve_requests
from millrace.swarm.settings import PrewarmSettings, RayNodes


@dataclass(frozen=True, slots=True)
class Preview:
    """Files that a run would put on every node.

    Attributes:
        files: Destination, bytes and origin of each.
        size: Bytes in all.
        pieces: How many pieces they travel in.
        piece_size: Bytes of a piece at most.
        unverified: Files of which nothing says what they should be.
        refusals: Why `prewarm` will refuse on this machine, in sentences; empty if it will not.
    """

    files: tuple[tuple[str, int, str], ...]
    size: int
    pieces: int
    piece_size: int
    unverified: int
    refusals: tuple[str, ...]


def preview(settings: PrewarmSettings) -> Preview:
    """Return what a run would put where. Asks the store for names and sizes; starts nothing.

    Whether a Ray cluster can be reached is checked; hosts may come later, and are not.

    Raises:
        NotFoundError, ConfigurationError: As `prewarm` does.
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
