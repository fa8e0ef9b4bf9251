"""Digests: blocks, roots, algorithms."""

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from millrace.digest import (
    BLOCK_SIZE,
    Algorithm,
    BlockHasher,
    Digest,
    check_blocks,
    combine_blocks,
    compute_digest,
    compute_stream_digest,
    count_blocks,
    describe_blocks,
    find_differing_blocks,
    get_hex,
    group_blocks,
    hash_blocks,
    list_block_digests,
    make_hasher,
)
from millrace.errors import CorruptError

SIZES = [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 17]


def make_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def cut(data: bytes, seed: int) -> Iterator[bytes]:
    """Cut bytes into parts of random sizes, some of them empty."""
    order, at = random.Random(seed), 0
    while at < len(data):
        size = order.choice([0, 1, 1000, 100_000, BLOCK_SIZE, 2 * BLOCK_SIZE + 5])
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_is_what_its_definition_says(size: int) -> None:
    data = make_bytes(size)
    blocks = [data[at : at + BLOCK_SIZE] for at in range(0, size or 1, BLOCK_SIZE)]
    digests = [blake3(block).digest() for block in blocks]
    assert list_block_digests(hash_blocks(data)) == digests
    assert len(digests) == count_blocks(size)
    if len(digests) == 1:
        expected = blake3(data).hexdigest()
    else:
        context = "millrace 2026-11-25 digests of blocks of 1 MiB"
        expected = blake3(b"".join(digests), derive_key_context=context).hexdigest()
    assert compute_digest(data) == combine_blocks(b"".join(digests)) == f"blake3:{expected}"


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_has_the_digest_of_its_bytes_however_it_is_cut(size: int) -> None:
    data = make_bytes(size)
    for seed in range(5):
        hasher = BlockHasher()
        for part in cut(data, seed):
            hasher.update(part)
        assert (hasher.size, hasher.blocks) == (size, hash_blocks(data))
        assert hasher.compute() == compute_digest(data)
        assert compute_stream_digest(cut(data, seed)) == (compute_digest(data), size)


@pytest.mark.parametrize("shape", [(0, 3), (5,), (700, 1000), (3, 0)])
def test_an_array_has_the_digest_of_its_bytes(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype("<f4")
    hasher = BlockHasher()
    hasher.update(array.data)
    assert hasher.size == array.nbytes
    assert hasher.compute() == compute_digest(array.data) == compute_digest(array.tobytes())


def test_the_digests_of_blocks_are_not_the_bytes_of_another_object() -> None:
    blocks = hash_blocks(make_bytes(3 * BLOCK_SIZE))
    assert compute_digest(blocks) != combine_blocks(blocks)


@pytest.mark.parametrize("size", SIZES)
def test_a_list_of_block_digests_is_accepted_by_its_root_only(size: int) -> None:
    data = make_bytes(size)
    blocks, digest = hash_blocks(data), compute_digest(data)
    assert check_blocks(blocks, digest, size) == blocks
    for at in range(len(blocks)):
        damaged = bytearray(blocks)
        damaged[at] ^= 1
        with pytest.raises(CorruptError, match=f"has the root blake3:.*, not {digest}"):
            check_blocks(bytes(damaged), digest, size)


def test_a_list_of_block_digests_is_refused_for_another_number_of_blocks() -> None:
    data = make_bytes(3 * BLOCK_SIZE)
    blocks, digest = hash_blocks(data), compute_digest(data)
    for other in (b"", blocks[:-1], blocks[:-32], blocks + b"x", blocks + blocks[:32]):
        with pytest.raises(CorruptError, match="3,145,728 bytes have 3 blocks, whose list has 96"):
            check_blocks(other, digest, len(data))
    for size in (2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1):
        with pytest.raises(CorruptError, match="The list of block digests has 96 bytes"):
            check_blocks(blocks, digest, size)
    # The joined digests are bytes themselves, and one block as such: their own list is another one.
    with pytest.raises(CorruptError, match="has the root"):
        check_blocks(hash_blocks(blocks), digest, len(blocks))


def test_blocks_that_differ_are_found_and_named_by_their_mib() -> None:
    data = make_bytes(5 * BLOCK_SIZE + 7)
    expected = hash_blocks(data)
    damaged = bytearray(data)
    for at in (0, BLOCK_SIZE, 3 * BLOCK_SIZE - 1, len(data) - 1):
        damaged[at] ^= 1
    assert find_differing_blocks(hash_blocks(damaged), expected) == [0, 1, 2, 5]
    assert find_differing_blocks(hash_blocks(data), expected) == []
    assert find_differing_blocks(hash_blocks(data[: 4 * BLOCK_SIZE]), expected) == [4, 5]
    assert find_differing_blocks(hash_blocks(data + bytes(BLOCK_SIZE)), expected) == [5]
    assert find_differing_blocks(b"", expected) == list(range(6))
    assert group_blocks([0, 1, 2, 5]) == [range(3), range(5, 6)]
    assert group_blocks(range(7), 3) == [range(3), range(3, 6), range(6, 7)]
    assert group_blocks([]) == []
    assert describe_blocks([0, 1, 2, 5]) == "MiB 0-2, 5"
    assert describe_blocks(range(0, 24, 2)) == "MiB 0, 2, 4, 6, 8, 10, 12, 14 and 4 more"


def test_every_flipped_bit_changes_the_digest_and_that_of_one_block() -> None:
    data, order = make_bytes(2 * BLOCK_SIZE + 100), random.Random(3)
    digest, blocks = compute_digest(data), list_block_digests(hash_blocks(data))
    for at in [0, BLOCK_SIZE - 1, BLOCK_SIZE, len(data) - 1, *order.sample(range(len(data)), 20)]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << order.randrange(8)
        assert compute_digest(damaged) != digest
        found = list_block_digests(hash_blocks(damaged))
        differ = [n for n, block in enumerate(blocks) if found[n] != block]
        assert differ == [at // BLOCK_SIZE]


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_digests_of_others_are_computed_and_compared(algorithm: Algorithm) -> None:
    data = make_bytes(BLOCK_SIZE + 1)
    digest, size = compute_stream_digest([data[:5], data[5:]], algorithm)
    assert (digest, size) == compute_stream_digest([data], algorithm)
    assert compute_stream_digest([data, b"x"], algorithm)[0] != digest
    if algorithm is not Algorithm.BLAKE3:
        assert get_hex(digest) == hashlib.new(algorithm, data).hexdigest()
    hasher = make_hasher(algorithm)
    hasher.update(memoryview(data))
    assert hasher.compute() == digest


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0" * 64, "has no algorithm: it is a SHA-256 of an earlier version"),
        ("crc32:00000000", "is not a digest: write an algorithm (blake3, sha256, md5)"),
        ("blake3:", "write 64 digits"),
        ("blake3:" + "0" * 63 + "G", "write 64 digits, 0-9 and a-f"),
        ("sha256:" + "0" * 65, "write 64 digits"),
        ("md5:" + "0" * 64, "write 32 digits"),
        ("", "is not a digest"),
    ],
)
def test_a_text_that_is_no_digest_is_refused_with_what_to_write(text: str, what: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(Digest).validate_python(text)
    assert what in str(refusal.value)
