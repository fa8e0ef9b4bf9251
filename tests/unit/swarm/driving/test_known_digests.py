"""Digests of pieces that the driver knows before a run, compared with those of the bytes."""

import hashlib
import random
from pathlib import Path

import pytest
from pydantic import ByteSize, SecretStr

from millrace import errors
from millrace.keys.checkpoints import CheckpointKeys, parse_part_digest
from millrace.keys.datasets import DatasetKeys
from millrace.storage import Store, delete, open_store, put
from millrace.swarm import Host, Hosts, PrewarmSettings, Request, preview
from millrace.swarm.catalogue import combine_segment_blocks
from millrace.swarm.driving.known_digests import KnownDigests, find_known_digests
from millrace.swarm.piece_readers import hash_segments
from millrace.swarm.resolving import ResolvedCatalogue, resolve_requests
from tests.oracle import compute_blake3
from tests.support.swarm.datasets import MIB, hash_blocks, write_dataset

SIZES = (5 * MIB + 17, 4 * MIB, 2 * MIB + 1, MIB, 1000, 17)
SHARDS = {
    f"text/shards/webdataset/train/train-00000-{number:06d}.tar": random.Random(number).randbytes(
        size
    )
    for number, size in enumerate(SIZES)
}
BLOCKS = b"".join(map(hash_blocks, SHARDS.values()))
LIST = DatasetKeys("text").block_digests
HOSTS = Hosts(hosts=(Host(url="http://127.0.0.1:1"),), key=SecretStr("k" * 32))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A complete dataset with the digests of all blocks."""
    store = open_store(tmp_path.as_uri())
    write_dataset(store, "text", SHARDS)
    return store


def resolve(store: Store, *requests: Request, piece_size: int = MIB) -> ResolvedCatalogue:
    settings = PrewarmSettings(
        requests=requests or (Request(dataset="text"),),
        stores={"s": store.spec},
        root=Path("/"),
        nodes=HOSTS,
        piece_size=ByteSize(piece_size),
    )
    return resolve_requests(settings, {"s": store})


def read_pieces(store: Store, resolved: ResolvedCatalogue) -> dict[int, list[bytes]]:
    """Return the block digests of each segment of each piece, from the bytes in the store."""
    folder = Path(store.location.bucket)
    bodies = [(folder / key).read_bytes() for _, key in resolved.objects]
    found: dict[int, list[bytes]] = {}
    for number, piece in enumerate(resolved.catalogue.pieces):
        data = b"".join(bodies[s.file][s.start : s.start + s.size] for s in piece)
        found[number] = hash_segments(piece, memoryview(data))
    return found


@pytest.mark.parametrize("piece_size", [MIB, 2 * MIB, 4 * MIB])
@pytest.mark.parametrize("by", ["dataset", "prefix", "key"])
def test_the_digests_of_all_pieces_of_a_dataset_are_those_of_its_bytes(store, piece_size, by):
    requests = {
        "dataset": [Request(dataset="text")],
        "prefix": [Request(prefix="text/shards")],
        "key": [Request(key=next(iter(SHARDS)))],
    }[by]
    resolved = resolve(store, *requests, piece_size=piece_size)
    known = find_known_digests(resolved)
    parts = read_pieces(store, resolved)
    # A prefix also has the index of the shards, which may share a piece with small shards.
    files, pieces = resolved.catalogue.files, resolved.catalogue.pieces
    others = {number for number, file in enumerate(files) if file.path.endswith(".json")}
    mixed = {n for n, piece in enumerate(pieces) if others & {one.file for one in piece}}
    assert (len(others), len(mixed)) == ((1, 1) if by == "prefix" else (0, 0))
    assert known.pieces == {
        number: combine_segment_blocks(found)
        for number, found in parts.items()
        if number not in mixed
    }
    beside = {one.file for number in mixed for one in pieces[number]}
    assert known.files.keys() == set(range(len(files))) - beside
    first = min(known.files)
    whole = [p for p in range(len(parts)) if pieces[p][0].file == first]
    assert known.files[first] == combine_segment_blocks([part for p in whole for part in parts[p]])
    assert known.refused == ()


@pytest.mark.parametrize("by", ["dataset", "prefix", "key"])
def test_a_shard_of_another_size_than_the_manifest_states_is_refused(store, by):
    key = next(iter(SHARDS))
    put(store, key, SHARDS[key][:-1])
    name = {"dataset": "text", "prefix": "text/shards", "key": key}[by]
    stated = f"has {len(SHARDS[key]) - 1} bytes, and {len(SHARDS[key])} by the manifest of text"
    with pytest.raises(errors.CorruptError, match=stated):
        resolve(store, Request.model_validate({by: name}))


@pytest.mark.parametrize("piece_size", [100_000, MIB + 1])
def test_pieces_that_do_not_begin_with_a_block_are_not_known(store, piece_size):
    resolved = resolve(store, piece_size=piece_size)
    known = find_known_digests(resolved)
    parts = read_pieces(store, resolved)
    assert known.pieces == {
        number: combine_segment_blocks(parts[number])
        for number, piece in enumerate(resolved.catalogue.pieces)
        if all(segment.size == resolved.catalogue.files[segment.file].size for segment in piece)
    }
    assert 0 not in known.files
    assert known.refused == ()  # the digests of blocks are not needed


@pytest.mark.parametrize("change", ["flip", "cut", "longer", "missing", "swap"])
def test_digests_of_blocks_that_do_not_fit_their_shard_are_refused_and_named(store, change):
    path = Path(store.location.bucket) / LIST
    match change:
        case "flip":
            path.write_bytes(bytes([BLOCKS[0] ^ 1]) + BLOCKS[1:])
        case "cut":
            path.write_bytes(BLOCKS[:64])
        case "longer":
            path.write_bytes(BLOCKS + BLOCKS)
        case "swap":
            path.write_bytes(BLOCKS[32:64] + BLOCKS[:32] + BLOCKS[64:])
        case _:
            path.unlink()
    resolved = resolve(store)
    known = find_known_digests(resolved)
    (reason,) = known.refused
    assert reason.startswith(f"The block digests of {store.url.rstrip('/')}/text were not used: ")
    assert 0 not in known.pieces
    assert 0 not in known.files
    parts = read_pieces(store, resolved)
    for number, digest in known.pieces.items():
        assert digest == combine_segment_blocks(parts[number])


def test_a_piece_that_also_has_a_file_without_a_digest_is_not_known(store):
    put(store, "other/small", b"small")
    put(store, "other/empty", b"")
    key = next(key for key, body in SHARDS.items() if len(body) == 1000)
    together = [Request(key=key), Request(key="other/empty"), Request(key="other/small")]
    known = find_known_digests(resolve(store, *together[:2]))
    assert known.pieces.keys() == {0}
    assert known.files.keys() == {0, 1}
    assert find_known_digests(resolve(store, *together)) == KnownDigests()


def test_a_sha256_of_the_caller_stands_and_its_pieces_are_not_known(store):
    key, body = next(iter(SHARDS.items()))
    request = Request(key=key, sha256=hashlib.sha256(body).hexdigest())
    resolved = resolve(store, request)
    assert resolved.catalogue.files[0].digest == f"sha256:{request.sha256}"
    assert find_known_digests(resolved) == KnownDigests()


def test_a_part_of_a_checkpoint_has_the_digest_of_its_key(store):
    body = random.Random(1).randbytes(2 * MIB)
    keys = CheckpointKeys("runs/one")
    part = keys.make_part_key(7, compute_blake3(body))
    put(store, part, body)
    put(store, "runs/one/checkpoints/step_000000007/metadata.json", b"{}")
    for request in (Request(prefix="runs/one"), Request(key=part)):
        resolved = resolve(store, request, piece_size=4 * MIB)
        found = {file.path: file.digest for file in resolved.catalogue.files}
        assert compute_blake3(body) in found.values()
        assert sum(map(bool, found.values())) == 1
    assert find_known_digests(resolved).pieces == {0: compute_blake3(body)}
    settings = PrewarmSettings(
        requests=(Request(prefix="runs/one"),),
        stores={"s": store.spec},
        root=Path("/"),
        nodes=HOSTS,
    )
    assert preview(settings).unverified == 1


@pytest.mark.parametrize("change", ["none", "flip", "cut", "longer", "missing"])
def test_the_pieces_of_a_checkpoint_follow_from_lists_that_fit_its_files(store, change):
    keys = CheckpointKeys("runs/one")
    bodies = [random.Random(number).randbytes(3 * MIB + number) for number in range(2)]
    for body in bodies:
        digest = compute_blake3(body)
        put(store, keys.make_part_key(7, digest), body)
        put(store, keys.make_block_list_key(7, digest), hash_blocks(body))
    changed = keys.make_block_list_key(7, compute_blake3(bodies[0]))
    blocks = hash_blocks(bodies[0])
    if change == "missing":
        delete(store, [changed])
    else:
        wrong = {"flip": bytes([blocks[0] ^ 1]) + blocks[1:], "cut": blocks[:64]}
        put(store, changed, wrong.get(change, blocks * (2 if change == "longer" else 1)))
    resolved = resolve(store, Request(prefix="runs/one/checkpoints/step_000000007/parts"))
    known = find_known_digests(resolved)
    parts = read_pieces(store, resolved)
    expected = {number: combine_segment_blocks(found) for number, found in parts.items()}
    if change == "none":
        assert (known.pieces, known.refused) == (expected, ())
        assert known.files.keys() == {0, 1}
        return
    assert known.pieces.items() < expected.items()
    assert len(known.files) == 1
    (reason,) = known.refused
    assert reason.startswith("The block digests of 1 of 2 checkpoint files of ")


@pytest.mark.parametrize(
    "key",
    [
        f"job/checkpoints/step_000000007/{'0' * 64}.safetensors",
        f"job/checkpoints/step_000000007/parts/{'0' * 63}.safetensors",
        f"/checkpoints/step_000000007/parts/{'0' * 64}.safetensors",
        f"a/../b/checkpoints/step_000000007/parts/{'0' * 64}.safetensors",
        f"checkpoints/step_000000007/parts/{'0' * 64}.safetensors",
        f"job/checkpoints/step_000000007/parts/{'0' * 64}.safetensors.tmp",
    ],
)
def test_no_other_key_has_a_digest(key):
    assert parse_part_digest(key) == ""
