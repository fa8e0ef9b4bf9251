"""Resolve requests: look up the objects in the stores, with their sizes, ETags and digests."""

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from millrace import errors
from millrace.checkpoints.find import read_checkpoint, read_newest
from millrace.dataset_ledger import read_manifest
from millrace.digest import Algorithm, compute_digest, make_local_etag
from millrace.keys.checkpoints import CheckpointKeys, parse_part_digest
from millrace.keys.datasets import DatasetKeys
from millrace.records import fetch
from millrace.schemas.checkpoint import Checkpoint
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.storage import (
    Backend,
    Stat,
    Store,
    fetch_stored_sha256,
    head,
    is_etag_md5,
    list_objects,
    read,
    read_range,
    sign_url,
)
from millrace.storage.etags import parse_etag
from millrace.storage.retry import call_with_retries
from millrace.storage.signed import head_with_signature, shows_md5
from millrace.swarm.archives.unpack import (
    HEAD_SIZE,
    SINGLE_FILE_METHODS,
    Unpacking,
    detect,
    detect_by_name,
)
from millrace.swarm.catalogue import Catalogue, File, build_catalogue, check_relative_path
from millrace.swarm.settings import PrewarmSettings, Request

_CONCURRENCY = 16
_MD5_SAMPLES = 4  # objects of a store whose ETags are compared with the MD5s of their bytes


@dataclass(frozen=True, slots=True)
class ResolvedCatalogue:
    """A catalogue, and the object of each file.

    Attributes:
        catalogue: Files for every node.
        objects: Store and key of each file, by the number of the file.
        manifests: Manifest of the dataset of each file that is a shard, by the number of the file.
    """

    catalogue: Catalogue
    objects: tuple[tuple[Store, str], ...]
    manifests: Mapping[int, Manifest]

    def make_sources(self, ttl: timedelta) -> list[str]:
        """Return a signed URL for each file, or its path if the store is a folder.

        Args:
            ttl: Validity of the URLs.
        """
        return [
            str(Path(store.location.bucket) / key)
            if store.location.backend is Backend.FILE
            else sign_url(store, key, ttl)
            for store, key in self.objects
        ]

    def is_etag_md5(self, number: int) -> bool:
        """Decide by the headers of an object whether its ETag is the MD5 of its bytes.

        Args:
            number: File whose digest is an MD5, so that its store signs requests.

        Raises:
            NotFoundError: The object was removed.
            DeniedError, UnavailableError: The store refuses, or does not answer.
        """
        store, key = self.objects[number]
        head = partial(head_with_signature, store, key)
        return shows_md5(call_with_retries(store, key, head, is_fork_safe=True))


@dataclass(frozen=True, slots=True)
class _FoundObject:
    """An object that a request names.

    Attributes:
        file: File of the catalogue.
        store: Store of the object.
        key: Key of the object.
        manifest: Manifest of the dataset that the object is a shard of.
    """

    file: File
    store: Store
    key: str
    manifest: Manifest | None = None


def resolve_requests(settings: PrewarmSettings, stores: Mapping[str, Store]) -> ResolvedCatalogue:
    """Look up the objects of all requests, several at once.

    An object that is requested twice becomes one file with two destinations.

    Raises:
        NotFoundError: An object does not exist, or a prefix has no objects.
        ConfigurationError: A destination leads out of the root, or two files have the same one.
    """
    for request in settings.requests:
        _select_store(request, stores)

    def look_up(request: Request) -> list[_FoundObject]:
        return list(_resolve_request(request, stores))

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="catalogue") as pool:
        answers = pool.map(look_up, settings.requests)
        files: dict[tuple[str, str], File] = {}  # by the server and URL of the object
        objects: dict[tuple[str, str], _FoundObject] = {}
        for found in (item for answer in answers for item in answer):
            file, server = found.file, found.store.bucket_id[0]
            first = files.get((server, file.origin))
            if first is None:
                files[server, file.origin], objects[server, file.origin] = file, found
            elif replace(first, path=file.path, links=()) != file:
                raise errors.ConfigurationError(
                    f"{file.origin} is requested twice, with different mode, owner, digest, "
                    "unpacking or check. It is one file with two names: request both with the same "
                    "values."
                )
            elif file.path not in {first.path, *first.links}:
                files[server, file.origin] = replace(first, links=(*first.links, file.path))
    stored = [(found.store, found.key) for found in objects.values()]
    verified = _drop_false_md5(_name_servers(files), stored)
    manifests = {
        number: found.manifest
        for number, found in enumerate(objects.values())
        if found.manifest is not None
    }
    catalogue = build_catalogue(verified, settings.piece_size)
    return ResolvedCatalogue(catalogue, tuple(stored), manifests)


def _name_servers(files: Mapping[tuple[str, str], File]) -> list[File]:
    """Add the server to origins that several servers have: nodes know an object by its origin."""
    counts = Counter(origin for _, origin in files)
    return [
        replace(file, origin=f"{origin} at {server}") if counts[origin] > 1 else file
        for (server, origin), file in files.items()
    ]


def _drop_false_md5(files: list[File], objects: list[tuple[Store, str]]) -> list[File]:
    """Remove MD5s taken from ETags, unless the ETags of a few objects of the store are MD5s."""
    asked: dict[tuple[str, str], list[tuple[Store, str]]] = {}
    for file, (store, key) in zip(files, objects, strict=True):
        if file.has_md5:
            asked.setdefault(_identify(store), []).append((store, key))
    trusted: set[tuple[str, str]] = set()
    for identity, found in asked.items():
        step = max(1, len(found) // _MD5_SAMPLES)
        if all(is_etag_md5(store, key) for store, key in found[::step][:_MD5_SAMPLES]):
            trusted.add(identity)
    return [
        file if _identify(store) in trusted or not file.has_md5 else replace(file, digest="")
        for file, (store, _) in zip(files, objects, strict=True)
    ]


def _identify(store: Store) -> tuple[str, str]:
    """Return the server and URL of a store. Buckets of several servers may have one name."""
    return store.bucket_id[0], store.url


def _select_store(request: Request, stores: Mapping[str, Store]) -> Store:
    if not request.store and len(stores) == 1:
        return next(iter(stores.values()))
    if request.store not in stores:
        raise errors.ConfigurationError(
            f"The request for {_get_name(request)} names the store {request.store!r}: write one of "
            f"{', '.join(sorted(stores))}."
        )
    return stores[request.store]


def _get_name(request: Request) -> str:
    return request.key or request.dataset or request.checkpoint or request.prefix or "all objects"


def _resolve_request(request: Request, stores: Mapping[str, Store]) -> Iterator[_FoundObject]:
    store = _select_store(request, stores)
    if request.key is not None:
        stat = head(store, request.key)
        destination = request.destination or request.key
        file = _make_file(request, store, stat, destination)
        manifest = None
        if not request.sha256:
            known, manifest = _find_digests(store, {stat.key: stat.size}).get(stat.key, ("", None))
            known = known or fetch_stored_sha256(store, stat.key)
            file = replace(file, digest=known or file.digest)
        file = _add_unpacking(request, store, stat, file)
        yield _FoundObject(file, store, stat.key, manifest)
        return
    if request.dataset is not None:
        yield from _resolve_shards(request, request.dataset, store)
        return
    if request.checkpoint is not None:
        yield from _resolve_checkpoint(request, request.checkpoint, store)
        return
    folder = (request.prefix or "").strip("/")
    below = f"{folder}/" if folder else ""
    stats = [stat for stat in list_objects(store, below) if not stat.key.endswith("/")]
    if not stats:
        raise errors.NotFoundError(
            f"There is no object below {store.make_url(below)}: check the prefix."
        )
    known = _find_digests(store, {stat.key: stat.size for stat in stats})
    for stat in sorted(stats, key=lambda stat: stat.key):
        inside = stat.key.removeprefix(below)
        destination = f"{request.destination}/{inside}" if request.destination else inside
        file = _make_file(request, store, stat, destination)
        digest, manifest = known.get(stat.key, (file.digest, None))
        yield _FoundObject(replace(file, digest=digest), store, stat.key, manifest)


def _resolve_shards(request: Request, dataset: str, store: Store) -> Iterator[_FoundObject]:
    """Yield the shards that the manifest of a dataset names.

    Raises:
        NotFoundError: The dataset is not complete, or a shard is missing.
        ConfigurationError: The manifest is that of a dataset with another name.
        CorruptError: A shard has another size.
    """
    keys = DatasetKeys(dataset)
    manifest = read_manifest(store, keys)
    stats = {stat.key: stat for stat in list_objects(store, f"{dataset}/shards/")}
    for shard in manifest.shards:
        stat = stats.get(shard.key)
        if stat is None:
            raise errors.NotFoundError(
                f"{store.make_url(shard.key)} is missing, and the manifest of {dataset} names it: "
                "run `millrace verify`."
            )
        _check_shard_size(store, dataset, shard, stat.size)
        found = _make_known_object(request, store, stat, f"{dataset}/", shard.digest)
        yield replace(found, manifest=manifest)


def _resolve_checkpoint(request: Request, job: str, store: Store) -> Iterator[_FoundObject]:
    """Yield the metadata and the files of a checkpoint, with their digests.

    Raises:
        NotFoundError: The job has no checkpoint of the step, or a file is missing.
        CorruptError: The metadata is damaged, or a file has another size.
    """
    keys = CheckpointKeys(job)
    if request.step is None:
        found = read_newest(store, job)
    else:
        found = read_checkpoint(store, job, request.step)
    if found is None:
        raise errors.NotFoundError(
            f"{store.make_url(job)} has no checkpoint: save one, or correct the name of the job."
        )
    metadata = keys.make_metadata_key(found.step)
    body = read(store, metadata, max_size=Checkpoint.record_bytes)
    wanted = {metadata: (len(body), compute_digest(body))}
    for part in found.parts:
        wanted[keys.make_part_key(part.step, part.digest)] = part.size, part.digest
    folders = {
        keys.make_folder_prefix(step) for step in (found.step, *(p.step for p in found.parts))
    }
    stats = {stat.key: stat for folder in folders for stat in list_objects(store, folder)}
    for key, (size, digest) in wanted.items():
        stat = stats.get(key)
        if stat is None:
            raise errors.NotFoundError(
                f"{store.make_url(key)} is missing, and step {found.step} of {job} has it: run "
                "`millrace checkpoint verify`, or request another step."
            )
        if stat.size != size:
            raise errors.CorruptError(
                f"{store.make_url(key)} has {stat.size} bytes, and {size} by the metadata of step "
                f"{found.step}: run `millrace checkpoint verify`, or request another step."
            )
        yield _make_known_object(request, store, stat, keys.prefix, digest)


def _make_known_object(
    request: Request, store: Store, stat: Stat, prefix: str, digest: str
) -> _FoundObject:
    """Return an object whose digest is known. A folder of the request replaces its prefix."""
    inside = stat.key.removeprefix(prefix)
    destination = f"{request.destination}/{inside}" if request.destination else stat.key
    file = _make_file(request, store, stat, destination)
    return _FoundObject(replace(file, digest=digest), store, stat.key)


def _make_file(request: Request, store: Store, stat: Stat, destination: str) -> File:
    md5 = digest = ""
    if store.location.backend is Backend.FILE:
        etag = make_local_etag((Path(store.location.bucket) / stat.key).stat())
    elif stat.etag:
        etag, parsed = stat.etag, parse_etag(store, stat.etag)
        md5 = parsed[0] if parsed is not None and not parsed[1] else ""
    else:
        raise errors.ConfigurationError(
            f"{store.make_url(stat.key)} has no ETag, so a change would not be noticed: copy it "
            "to a store with ETags."
        )
    if request.sha256:
        digest = f"{Algorithm.SHA256}:{request.sha256}"
    elif md5:
        digest = f"{Algorithm.MD5}:{md5}"
    return File(
        path=check_relative_path(destination),
        size=stat.size,
        etag=etag,
        origin=store.make_url(stat.key),
        digest=digest,
        mode=request.mode,
        owner=request.owner,
        check=request.check or "",
    )


def _add_unpacking(request: Request, store: Store, stat: Stat, file: File) -> File:
    if request.unpack is None:
        return file
    method = request.unpack
    if method is Unpacking.AUTO:
        if not stat.size:
            raise errors.ConfigurationError(
                f"{file.origin} is empty, and no archive: upload it again, or leave `unpack` out."
            )
        method = detect_by_name(stat.key) or detect(
            stat.key, read_range(store, stat.key, 0, HEAD_SIZE, etag=stat.etag)
        )
    into = request.into
    if into is None:
        into = _strip_ending(file.path)
    elif method in SINGLE_FILE_METHODS:  # one file, in the requested folder
        into = f"{into}/{_strip_ending(file.path.rpartition('/')[2])}"
    return replace(file, unpack=str(method), into=check_relative_path(into))


def _strip_ending(path: str) -> str:
    folder, _, name = path.rpartition("/")
    for ending in (".tar.gz", ".tar.zst", ".tgz", ".tzst", ".tar", ".zip", ".gz", ".zst"):
        if name.lower().endswith(ending) and len(name) > len(ending):
            name = name[: -len(ending)]
            break
    else:
        name = f"{name}.unpacked"
    return f"{folder}/{name}" if folder else name


def _find_digests(store: Store, sizes: Mapping[str, int]) -> dict[str, tuple[str, Manifest | None]]:
    """Return the digests of objects by their keys, with the manifests of the datasets of shards.

    The digests of shards are in manifests. The key of a part of a checkpoint has its digest.

    Raises:
        CorruptError: A shard has another size than its manifest states.
    """
    known: dict[str, tuple[str, Manifest | None]] = {
        key: (digest, None) for key in sizes if (digest := parse_part_digest(key))
    }
    datasets = {key.partition("/shards/")[0] for key in sizes if "/shards/" in key}
    for dataset in datasets:
        try:
            manifest = fetch(store, DatasetKeys(dataset).manifest, Manifest)
        except (errors.NotFoundError, errors.ConfigurationError, errors.CorruptError):
            continue  # the prefix is no dataset of Millrace, or the dataset is not complete
        for shard in manifest.shards:
            if shard.key in sizes:
                _check_shard_size(store, dataset, shard, sizes[shard.key])
                known[shard.key] = shard.digest, manifest
    return known


def _check_shard_size(store: Store, dataset: str, shard: ManifestShard, size: int) -> None:
    if size != shard.size:
        raise errors.CorruptError(
            f"{store.make_url(shard.key)} has {size} bytes, and {shard.size} by the "
            f"manifest of {dataset}: run `millrace verify`."
        )
