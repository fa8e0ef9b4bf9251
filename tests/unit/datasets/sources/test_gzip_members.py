"""Blocks within gzip files: those that are found are blocks, also in files made to mislead."""

import random
import zlib

import numpy as np
import pytest

from millrace.datasets.sources.decoder import DecoderState
from millrace.datasets.sources.gzip_members import _MAX_TRIED, GzipDecoder, _find_headers
from millrace.schemas.dataset import COMPRESSED_STEP

GZIP_HEADER = b"\x1f\x8b\x08" + bytes(7)
ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
EMPTY_STORED = b"\x00\x00\xff\xff"
WORDS = [f"{number:x}" for number in random.Random(5).choices(range(1 << 30), k=5000)]


def make_text(size: int) -> bytes:
    return " ".join(random.Random(size).choices(WORDS, k=size // 8)).encode()


def write_field(value: int, size: int) -> str:
    """Return the bits of a number, lowest first."""
    return "".join(str(value >> i & 1) for i in range(size))


def write_header(lengths: dict[int, int]) -> str:
    """Return the bits of the header of a block, for symbols and the lengths of their codes."""
    size_of = {symbol: 4 if symbol < 16 else 0 for symbol in ORDER}
    codes = [lengths.get(symbol, 0) for symbol in range(286)] + [1, 1] + [0] * 28
    return (
        "001" + write_field(29, 5) + write_field(29, 5) + write_field(15, 4)
        + "".join(write_field(size_of[symbol], 3) for symbol in ORDER)
        + "".join(f"{code:04b}" for code in codes)
    )  # fmt: skip


def pack(bits: str) -> bytes:
    return np.packbits(np.frombuffer(bits.encode(), np.uint8) - 48, bitorder="little").tobytes()


def end_member(blocks: bytes, content: bytes) -> bytes:
    checksum, size = zlib.crc32(content), len(content) & 0xFFFFFFFF
    return GZIP_HEADER + blocks + checksum.to_bytes(4, "little") + size.to_bytes(4, "little")


def read(body: bytes, state: DecoderState, interval: int = 1) -> tuple[bytes, list[DecoderState]]:
    """Return what follows from a state on, and the states that are found, by default everywhere."""
    decoder, at, parts, states = GzipDecoder(state, interval), state.position, [], []
    while at < len(body):
        end = (at // COMPRESSED_STEP + 1) * COMPRESSED_STEP
        parts += decoder.decode(at, body[at:end])
        if (found := decoder.take_state()) is not None:
            states.append(found)
        at = end
    decoder.finish()
    return b"".join(parts), states


def assert_states_continue(body: bytes, content: bytes) -> list[DecoderState]:
    found, states = read(body, DecoderState())
    assert found == content
    for number, state in enumerate(states):
        assert content.startswith(state.window, state.offset - len(state.window))
        interval = 2 * len(body) if number % 8 else 1  # a search for further states takes long
        assert read(body, state, interval)[0] == content[state.offset :]
    return states


def test_a_header_within_a_block_that_gives_the_same_bytes_is_no_block():
    """Both codes read the bits that follow as one run, up to a symbol: its end, or a letter."""
    repeats = {257 + i: 2 + i for i in range(13)}
    block = write_header({ord("x"): 1, 256: 15, 270: 15} | repeats)
    within = write_header({ord("x"): 1, ord("y"): 15, 256: 15} | repeats)
    # Every eighth bit is 0: no symbol of 15 bits is among them.
    filler = np.random.default_rng(3).integers(0, 2, 60_000, np.uint8)
    filler[::8] = 0
    run = "0" * (40 << 10) + (within + "".join(map(str, filler.tolist()))) * 80
    misleading = pack(block + run + "0" * 20 + "1" * 14 + "0" + "000") + EMPTY_STORED
    text = make_text(300_000)
    body = misleading + zlib.compress(text, wbits=-15)
    content = zlib.decompress(body, wbits=-15)
    assert content == b"x" * (len(content) - len(text)) + text
    assert len(_find_headers(body[: len(misleading)])) >= 80
    states = assert_states_continue(end_member(body, content), content)
    assert states
    assert all(state.position > len(misleading) for state in states)


@pytest.mark.parametrize("last", [False, True])
def test_a_header_within_stored_bytes_is_no_block_wherever_they_end(last):
    packed = zlib.compress(make_text(40_000), wbits=-15)
    bits = np.unpackbits(np.frombuffer(packed[:100], np.uint8), bitorder="little")
    blocks, contents, generator = [], [], random.Random(7)
    for size in [60_000, *range(12, 110), *range(12, 110)] * 2:
        # What looks like a header begins at any bit, and the bytes end soon after it.
        shifted = np.packbits(np.insert(bits, 0, [0] * generator.randrange(8)), bitorder="little")
        content = generator.randbytes(max(0, size - 100)) + shifted.tobytes()[:size]
        blocks.append(
            b"\0" + len(content).to_bytes(2, "little")
            + (len(content) ^ 0xFFFF).to_bytes(2, "little") + content
        )  # fmt: skip
        contents.append(content)
    end = zlib.compress(b"", wbits=-15)
    if last:
        blocks[-1], end = b"\1" + blocks[-1][1:], b""
    body = b"".join((*blocks, end))
    assert len(_find_headers(body)) > 100
    assert not assert_states_continue(end_member(body, b"".join(contents)), b"".join(contents))


@pytest.mark.parametrize("level", [1, 6, 9])
def test_most_blocks_of_a_text_are_found(level):
    content = make_text(1 << 20)
    states = assert_states_continue(
        end_member(zlib.compress(content, level, wbits=-15), content), content
    )
    assert len(states) >= 8
    assert len({state.bit for state in states}) > 3


def test_only_some_headers_are_tried(monkeypatch):
    """A file of headers costs no more than the file's size."""
    header = pack(write_header(dict.fromkeys(range(255), 8) | {256: 9, 257: 9}))[:12]
    content = header * 60_000
    assert len(_find_headers(header * 1000)) > 990
    blocks = zlib.compress(content, 0, wbits=-15)
    copies = 0

    class Counted:
        def __init__(self, inflater):
            self._inflater = inflater

        def __getattr__(self, name):
            return getattr(self._inflater, name)

        def copy(self):
            nonlocal copies
            copies += 1
            return Counted(self._inflater.copy())

    make = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda *args, **named: Counted(make(*args, **named)))
    body = end_member(blocks, content)
    assert read(body, DecoderState(), len(body) * 3 // 4) == (content, [])  # one search
    steps = len(body) // COMPRESSED_STEP + 1
    assert 2 * _MAX_TRIED <= copies <= 2 * _MAX_TRIED + steps
