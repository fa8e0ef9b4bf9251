"""Digests of the blocks of a checkpoint's files: partial loads, damage, lists that do not fit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from blake3 import blake3
from pydantic import ByteSize

from millrace import digest, errors
from millrace.checkpoints import (
    RetentionSettings,
    Saver,
    SaveSettings,
    apply_retention,
    contents,
    load,
    load_into,
    plan_retention,
    saving,
    verify,
)
from millrace.checkpoints.destinations import StoreDestination, copy_checkpoint
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.digest import BLOCK_SIZE, Bytes, combine_blocks, count_blocks, hash_blocks
from millrace.keys.checkpoints import CheckpointKeys, find_block_list_key
from millrace.schemas.checkpoint import Checkpoint, Part
from millrace.storage import (
    Store,
    delete,
    list_objects,
    open_store,
    put,
    read,
    read_and_hash,
)
from tests.oracle import judge_checkpoints
from tests.stores import make_spec, open_folder

KEYS = CheckpointKeys("runs/one")
SETTINGS = SaveSettings(part_bytes=ByteSize(32 << 20))
ROWS = 4096  # of 4 KiB each


def state_of(seed: int) -> dict[str, object]:
    """A state whose first file has 16 MiB of one tensor, and little else."""
    dice = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(ROWS, 1024, generator=dice), "b": torch.randn(100, generator=dice)}


def save(store: Store, step: int = 1, seed: int = 1) -> Checkpoint:
    with Saver(store, KEYS.job, SETTINGS) as saver:
        return saver.save(state_of(seed), step=step).result()


def get_large_part(checkpoint: Checkpoint) -> Part:
    return max(checkpoint.parts, key=lambda part: part.size)


def list_key(part: Part) -> str:
    return KEYS.make_block_list_key(part.step, part.digest)


@pytest.fixture(params=["local", "rgw"])
def store(request: pytest.FixtureRequest) -> Store:
    """A folder and RGW: files of many blocks are slow in stand-ins that are written in Python."""
    return open_store(make_spec(request.param, request))


class ByteCount:
    """Count of bytes. A call returns the bytes since the last call."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # threads append

    def add(self, size: int) -> None:
        self._sizes.append(size)

    def __call__(self) -> int:
        total = sum(self._sizes)
        self._sizes.clear()
        return total


@pytest.fixture
def count_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the bytes of files that are read."""
    count = ByteCount()

    def read_counted(store, key, buffers, **more):
        count.add(sum(map(len, buffers)))
        return read_and_hash(store, key, buffers, **more)

    monkeypatch.setattr(contents, "read_and_hash", read_counted)
    return count


@pytest.fixture
def count_hashed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the bytes that BLAKE3 hashes, without the digests of blocks that make a root."""
    count = ByteCount()

    class CountedHash:
        def __init__(self, data: Bytes = b"", **options: str) -> None:
            self._hash, self._is_root = blake3(data, **options), bool(options)
            self._count(data)

        def _count(self, data: Bytes) -> None:
            if not self._is_root:
                count.add(memoryview(data).nbytes)

        def update(self, data: Bytes) -> None:
            self._hash.update(data)
            self._count(data)

        def digest(self) -> bytes:
            return self._hash.digest()

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    monkeypatch.setattr(digest, "blake3", CountedHash)
    return count


def test_each_large_file_has_the_digests_of_its_blocks(store) -> None:
    checkpoint = save(store)
    for part in checkpoint.parts:
        body = read(store, KEYS.make_part_key(part.step, part.digest), max_size=part.size)
        if part.size > BLOCK_SIZE:
            assert read(store, list_key(part), max_size=1 << 20) == hash_blocks(body)
            key = KEYS.make_part_key(part.step, part.digest)
            assert find_block_list_key(key) == list_key(part)
    lists = [stat.key for stat in list_objects(store, KEYS.prefix) if KEYS.is_block_list(stat.key)]
    assert lists == [list_key(part) for part in checkpoint.parts if part.size > BLOCK_SIZE]


def test_savers_of_the_same_step_leave_a_list_for_each_large_file_and_no_other(folder) -> None:
    with ThreadPoolExecutor(3) as pool:
        roots = {found.root for found in pool.map(lambda _: save(folder), range(3))}
    assert len(roots) == 1
    assert judge_checkpoints(open_folder(folder), KEYS.job, is_cleaned=True) == []


def test_a_saver_that_goes_on_after_a_kill_leaves_no_file_without_its_list(
    folder, monkeypatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "create", die)  # between the list of a file and the file
        with pytest.raises(KeyboardInterrupt):
            save(folder)
    left = [stat.key for stat in list_objects(folder, KEYS.prefix)]
    assert left
    assert all(map(KEYS.is_block_list, left))
    save(folder)
    assert judge_checkpoints(open_folder(folder), KEYS.job, is_cleaned=True) == []


def test_rows_are_read_and_verified_by_block(store, count_read) -> None:
    save(store)
    expected = state_of(1)["w"]
    count_read()
    found = load(store, KEYS.job, only=lambda name: name == "w", rows={"w": (1000, 1100)})
    assert torch.equal(found.state["w"], expected[1000:1100])
    # 100 rows have 400 KiB, in one block or two; the skeleton is in another.
    assert count_read() <= 4 * BLOCK_SIZE


def test_a_whole_load_reads_each_byte_once(folder, count_read) -> None:
    checkpoint = save(folder)
    count_read()
    state = {"w": torch.empty(ROWS, 1024), "b": torch.empty(100)}
    load_into(state, folder, KEYS.job)
    assert torch.equal(state["w"], state_of(1)["w"])
    assert count_read() == sum(part.size for part in checkpoint.parts)


@pytest.mark.parametrize("kind", ["flipped", "shorter", "longer", "empty", "another", "missing"])
def test_without_a_list_that_fits_whole_files_are_read(folder, count_read, kind) -> None:
    part = get_large_part(save(folder))
    other = get_large_part(save(folder, step=2, seed=2))
    blocks = read(folder, list_key(part), max_size=1 << 20)
    wrong = {
        "flipped": bytes([blocks[0] ^ 1]) + blocks[1:], "shorter": blocks[:-32],
        "longer": blocks + bytes(32), "empty": b"",
        "another": read(folder, list_key(other), max_size=1 << 20),
    }  # fmt: skip
    if kind == "missing":
        delete(folder, [list_key(part)])
    else:
        put(folder, list_key(part), wrong[kind])
    count_read()
    found = load(folder, KEYS.job, step=1, rows={"w": (0, 10)}, only=lambda name: name == "w")
    assert torch.equal(found.state["w"], state_of(1)["w"][:10])
    assert count_read() >= part.size


@pytest.mark.parametrize("row", [10, 2000, ROWS - 1])
def test_damage_is_found_in_the_blocks_that_are_read_and_named(folder, tmp_path, row) -> None:
    checkpoint = save(folder)
    part = get_large_part(checkpoint)
    path = tmp_path / KEYS.make_part_key(part.step, part.digest)
    at = row * 4096 + 200
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)
    number = at // BLOCK_SIZE
    (damage,) = verify(folder, checkpoint).values()
    assert f"differs in MiB {number}, counted from 0" in damage
    first = number * 256
    with pytest.raises(errors.CorruptError):
        load(folder, KEYS.job, step=1, rows={"w": (first, first + 200)})
    away = (first + 2048) % ROWS  # no byte of these rows is damaged
    found = load(
        folder, KEYS.job, step=1, only=lambda name: name == "w", rows={"w": (away, away + 9)}
    )
    assert torch.equal(found.state["w"], state_of(1)["w"][away : away + 9])


def test_lists_are_removed_with_their_files_and_no_sooner(folder) -> None:
    stray = KEYS.make_block_list_key(1, combine_blocks(hash_blocks(b"no file")))
    put(folder, stray, bytes(64))
    parts = {step: get_large_part(save(folder, step, seed=step)) for step in (1, 2, 3)}
    rules = RetentionSettings(last=1, grace=timedelta(0))
    apply_retention(folder, plan_retention(folder, KEYS.job, rules))
    left = {stat.key for stat in list_objects(folder, KEYS.prefix)}
    assert list_key(parts[3]) in left
    assert judge_checkpoints(open_folder(folder), KEYS.job, is_cleaned=True) == []
    assert not left & {list_key(parts[1]), list_key(parts[2]), stray}


def test_a_file_of_an_earlier_step_keeps_its_list(folder, count_read) -> None:
    settings = SaveSettings(part_bytes=ByteSize(32 << 20), refer=True)
    with Saver(folder, KEYS.job, settings) as saver:
        saver.save(state_of(1), step=1).result()
        part = get_large_part(saver.save(state_of(1), step=2).result())
    assert part.step == 1
    rules = RetentionSettings(last=1, grace=timedelta(0))
    apply_retention(folder, plan_retention(folder, KEYS.job, rules))
    assert judge_checkpoints(open_folder(folder), KEYS.job, is_cleaned=True) == []
    count_read()
    load(folder, KEYS.job, step=2, only=lambda name: name == "w", rows={"w": (0, 10)})
    assert count_read() < part.size


def test_a_copy_has_the_lists(folder, store) -> None:
    checkpoint = save(folder)
    copied = copy_checkpoint(
        StoreDestination(folder), checkpoint, StoreDestination(store), "copies/one"
    )
    part = get_large_part(copied)
    key = CheckpointKeys("copies/one").make_block_list_key(part.step, part.digest)
    assert combine_blocks(read(store, key, max_size=1 << 20)) == part.digest


FLIPPED = 5 * BLOCK_SIZE + 100


def flip(body: bytes) -> bytes:
    return body[:FLIPPED] + bytes([body[FLIPPED] ^ 1]) + body[FLIPPED + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda body: flip(body)[:-BLOCK_SIZE] + bytes(BLOCK_SIZE),
        lambda body: body[:FLIPPED],
        lambda body: body + b"more",
        lambda body: b"",
    ],
    ids=["flipped", "in two places", "shorter", "longer", "empty"],
)
def test_of_a_damaged_file_in_a_folder_only_damaged_blocks_are_read_again(
    store, tmp_path, count_read, damage
) -> None:
    checkpoint = save(store)
    part = get_large_part(checkpoint)
    there = StoreDestination(open_store((tmp_path / "copy").as_uri()))
    copied = copy_checkpoint(StoreDestination(store), checkpoint, there, KEYS.job)
    path = tmp_path / "copy" / KEYS.make_part_key(part.step, part.digest)
    body = path.read_bytes()
    damaged = damage(body)
    path.write_bytes(damaged)
    blocks = [slice(at, min(at + BLOCK_SIZE, part.size)) for at in range(0, part.size, BLOCK_SIZE)]
    differing = [block for block in blocks if damaged[block] != body[block]]
    count_read()
    copy_checkpoint(StoreDestination(store), checkpoint, there, KEYS.job)
    assert count_read() == sum(block.stop - block.start for block in differing)
    assert path.read_bytes() == body
    assert not verify(there.store, copied)


@pytest.mark.parametrize("kind", ["missing", "of another file"])
def test_without_a_list_a_damaged_file_in_a_folder_is_read_whole_again(
    folder, tmp_path, count_read, kind
) -> None:
    checkpoint = save(folder)
    part = get_large_part(checkpoint)
    there = StoreDestination(open_store((tmp_path / "copy").as_uri()))
    copied = copy_checkpoint(StoreDestination(folder), checkpoint, there, KEYS.job)
    path = tmp_path / "copy" / KEYS.make_part_key(part.step, part.digest)
    path.write_bytes(flip(path.read_bytes()))
    if kind == "missing":
        delete(folder, [list_key(part)])
    else:
        put(folder, list_key(part), bytes(32 * count_blocks(part.size)))
    count_read()
    copy_checkpoint(StoreDestination(folder), checkpoint, there, KEYS.job)
    assert count_read() == part.size
    assert not verify(there.store, copied)


def test_a_block_that_is_damaged_in_both_places_is_not_copied(folder, tmp_path) -> None:
    checkpoint = save(folder)
    part = get_large_part(checkpoint)
    there = StoreDestination(open_store((tmp_path / "copy").as_uri()))
    copy_checkpoint(StoreDestination(folder), checkpoint, there, KEYS.job)
    for place in (tmp_path, tmp_path / "copy"):
        path = place / KEYS.make_part_key(part.step, part.digest)
        path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(errors.CorruptError, match="not the bytes that were saved"):
        copy_checkpoint(StoreDestination(folder), checkpoint, there, KEYS.job)


def test_a_copy_hashes_each_byte_once(folder, store, count_hashed) -> None:
    checkpoint = save(folder)
    assert checkpoint.size > 16 << 20
    count_hashed()
    copied = copy_checkpoint(
        StoreDestination(folder), checkpoint, StoreDestination(store), "copies/one"
    )
    # The rest is metadata.
    assert checkpoint.size <= count_hashed() < checkpoint.size + BLOCK_SIZE
    assert not verify(store, copied)
    assert count_hashed() >= checkpoint.size


def test_a_state_is_hashed_once_before_several_members_save_it(folder, count_hashed) -> None:
    checkpoint = save(folder, step=1)
    count_hashed()
    content = (
        SnapshotBuffers().snapshot(StateShards(state_of(1)), SETTINGS.part_bytes).make_content(1)
    )
    StoreDestination(folder).write_copy(checkpoint, content, "copies/one")
    assert checkpoint.size <= count_hashed() < checkpoint.size + BLOCK_SIZE
    part = get_large_part(checkpoint)
    key = CheckpointKeys("copies/one").make_block_list_key(1, part.digest)
    assert combine_blocks(read(folder, key, max_size=1 << 20)) == part.digest
