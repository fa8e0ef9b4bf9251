"""Limits of the position, the notes and the numbers of a checkpoint's metadata."""

import pytest

from millrace import errors
from millrace.checkpoints.contents import MAX_JSON_SIZE, normalise_json
from millrace.digest import compute_digest, dump_canonical_json
from millrace.records import decode_record
from millrace.schemas.checkpoint import Checkpoint, Chunk, TensorRecord


def nest(depth):
    value = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"rows": [[]] * 200_000}, r"200,00\d JSON objects and arrays"),
        ({"rows": [0] * 1_000_000}, r"999,999 commas"),
        ({"text": "x" * (5 << 20)}, r"5,242,\d+ bytes"),
        (nest(101), "nested in more than 100"),
    ],
    ids=["lists", "numbers", "text", "depth"],
)
def test_a_position_that_readers_would_refuse_is_refused_with_its_limit(value, what):
    with pytest.raises(errors.ConfigurationError, match=f"The position of a checkpoint .*{what}"):
        normalise_json(value, "position")


def test_a_large_position_is_accepted():
    value = {"state": list(range(100_000)), "workers": [{"row": 1}] * 10_000, "deep": nest(99)}
    assert normalise_json(value, "position") == value


def test_readers_accept_the_largest_position_and_notes_with_the_most_tensors():
    name = "model.layers.100.mlp.experts.255.down_proj.weight".ljust(80, "x")
    chunk = Chunk(part=4_000, name=name, offset=60_000_000, start=(0, 0), shape=(4096, 4096))
    tensor = TensorRecord(dtype="BF16", shape=(4096, 4096), chunks=(chunk,))
    body = dump_canonical_json({name: tensor.model_dump(mode="json")})
    tensors = Checkpoint.record_bytes // len(body)
    rest = 20  # of the other fields
    for characters, bytes_per_value in (("[{", 32), (":", 20), (",", 12)):
        of_tensors = sum(body.count(one.encode()) for one in characters) * tensors
        of_both = 2 * (MAX_JSON_SIZE // bytes_per_value)
        assert of_tensors + of_both + rest <= Checkpoint.record_bytes // bytes_per_value


@pytest.mark.parametrize("size", ["99999999999999999999", "-9223372036854775809"])
def test_a_number_that_json_cannot_hold_is_refused_in_metadata(size):
    part = {"step": 1, "digest": compute_digest(b""), "size": size}
    record = {
        "job": "j", "step": 1, "run": "", "saved": "2026-01-01T00:00:00Z", "root": "r",
        "parts": [part], "tensors": {}, "position": {}, "notes": {},
    }  # fmt: skip
    whole = {"kind": "checkpoint", "version": 3, "nonce": "x", "record": record}
    with pytest.raises(errors.CorruptError, match="not a record"):
        decode_record("there", Checkpoint, dump_canonical_json(whole))
