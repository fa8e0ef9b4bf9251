"""Find the copies of a run's files in mirrors of their stores.

A copy is used if its ETag is equal. Other copies are not: nodes read pieces at once from several
locations, so a copy that differs could not be found before its bytes are in a file.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from millrace import errors
from millrace.formatting import format_count
from millrace.storage import Stat, Store, StoreSpec, head, list_objects, open_store, sign_url
from millrace.swarm.resolving import ResolvedCatalogue

logger = logging.getLogger(__name__)

_MAX_HEADS = 32  # files that are described one by one, and not by a listing
_TIMEOUT = timedelta(seconds=10)


def find_mirrors(
    mirrors: Mapping[str, Sequence[StoreSpec]],
    stores: Mapping[str, Store],
    resolved: ResolvedCatalogue,
    ttl: timedelta,
) -> dict[int, list[str]]:
    """Return signed URLs of equal copies, by the number of the file.

    A mirror that does not answer, or has other objects, is left out with a warning.

    Args:
        mirrors: Mirrors of the stores, by the names of the stores.
        stores: Stores by their names.
        resolved: Files of the run, and their objects.
        ttl: Validity of the URLs.
    """
    found: dict[int, list[str]] = {}
    for name, specs in mirrors.items():
        numbers = [
            number
            for number, (store, _) in enumerate(resolved.objects)
            if store is stores[name] and store.is_s3_compatible
        ]
        for spec in specs if numbers else ():
            for number, url in _find_copies(spec, numbers, resolved, ttl).items():
                found.setdefault(number, []).append(url)
    return found


def _find_copies(
    spec: StoreSpec, numbers: Sequence[int], resolved: ResolvedCatalogue, ttl: timedelta
) -> dict[int, str]:
    """Return signed URLs of the equal copies in one mirror, by the number of the file."""
    keys = {number: resolved.objects[number][1] for number in numbers}
    try:
        mirror = open_store(spec, retry_timeout=min(spec.retry_timeout, _TIMEOUT))
        if not mirror.is_s3_compatible:
            raise errors.ConfigurationError("It is no store of S3.")
        stats = _describe_objects(mirror, list(keys.values()))
    except errors.MillraceError as error:
        logger.warning("The mirror %s is not read: %s", spec.url, error)
        return {}
    copies: dict[int, str] = {}
    for number, key in keys.items():
        file, stat = resolved.catalogue.files[number], stats.get(key)
        if stat is not None and (stat.size, stat.etag) == (file.size, file.etag):
            copies[number] = sign_url(mirror, key, ttl)
    if len(copies) < len(keys):
        first = next(key for number, key in keys.items() if number not in copies)
        logger.warning(
            "The mirror %s has no equal copy of %s, such as %s: their ETags differ, or they are "
            "missing.", mirror.url, format_count(len(keys) - len(copies), "file"), first,
        )  # fmt: skip
    return copies


def _describe_objects(mirror: Store, keys: Sequence[str]) -> dict[str, Stat]:
    """Return the descriptions of those objects that there are, by their keys."""
    if len(keys) > _MAX_HEADS:
        ends = min(keys), max(keys)
        shared = next(
            (n for n, (a, b) in enumerate(zip(*ends, strict=False)) if a != b), len(ends[0])
        )
        folder = ends[0][:shared].rpartition("/")[0]
        wanted = set(keys)
        below = f"{folder}/" if folder else ""
        return {stat.key: stat for stat in list_objects(mirror, below) if stat.key in wanted}

    def describe(key: str) -> Stat | None:
        try:
            return head(mirror, key)
        except errors.NotFoundError:
            return None

    with ThreadPoolExecutor(8, thread_name_prefix="mirror-heads") as pool:
        return {stat.key: stat for stat in pool.map(describe, keys) if stat is not None}
