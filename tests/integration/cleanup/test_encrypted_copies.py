"""Copies into a bucket whose ETags are no MD5s: nothing is called equal that was not compared."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.cleanup import CopyOutcome, CopyResult, copy_objects, object_comparer, object_copier
from millrace.storage import Store, open_store
from tests.support.kms import KmsEndpoint
from tests.support.s3 import serve_s3

MIB = 1 << 20
LARGE = 2 * 16 * MIB + MIB


@pytest.fixture
def target() -> Iterator[KmsEndpoint]:
    with serve_s3(KmsEndpoint) as endpoint:
        yield endpoint


@pytest.fixture
def source(tmp_path: Path) -> Store:
    (tmp_path / "large").write_bytes(b"large" * (LARGE // 5))
    return open_store(tmp_path.as_uri())


def count(result: CopyResult) -> dict[CopyOutcome, int]:
    return {outcome: number for outcome, number in result.objects.items() if number}


@pytest.mark.parametrize("tells", [True, False])
def test_a_copy_that_was_damaged_is_never_equal_and_is_replaced(
    source: Store, target: KmsEndpoint, tells: bool
) -> None:
    target.tells, target.damaged = tells, 1
    there = target.open()
    done = copy_objects(source, there)
    assert "had other bytes" in done.failures[0].reason
    assert count(copy_objects(source, there)) == {CopyOutcome.CONFLICT: 1}
    assert count(copy_objects(source, there, overwrite=True)) == {CopyOutcome.COPIED: 1}
    assert target.objects["large"] == (b"large" * (LARGE // 5))
    assert count(copy_objects(source, there)) == {CopyOutcome.EQUAL: 1}
    assert target.uploads == {}


def test_a_copy_that_is_stopped_before_its_proof_is_compared_again(
    source: Store, target: KmsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.damaged = 1

    def stop(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(object_comparer.ObjectComparer, "is_right_copy", stop)
        with pytest.raises(KeyboardInterrupt):
            copy_objects(source, target.open())
    assert count(copy_objects(source, target.open())) == {CopyOutcome.CONFLICT: 1}


def test_a_note_that_an_encrypted_copy_has_proves_nothing(
    source: Store, target: KmsEndpoint
) -> None:
    """Earlier versions have written it before the proof."""
    copy_objects(source, target.open())
    body = target.objects["large"]
    target.objects["large"] = b"L" + body[1:]
    stat = object_copier.head(source, "large")
    target.metadata["large"] = {f"x-amz-meta-{object_comparer.SOURCE_ETAG}": stat.etag or ""}
    assert count(copy_objects(source, target.open())) == {CopyOutcome.CONFLICT: 1}
    assert count(copy_objects(source, target.open(), overwrite=True)) == {CopyOutcome.COPIED: 1}
    assert target.objects["large"] == body


@pytest.mark.parametrize("by_store", [True, False])
def test_objects_with_parts_are_copied_into_an_encrypted_bucket(
    target: KmsEndpoint, by_store: bool
) -> None:
    """The parts of the copy cannot have the ETag of the source."""
    with serve_s3(KmsEndpoint) as other:
        origin = target if by_store else other
        body = b"parts" * (3 * MIB)
        for key in ("from/large", "from//odd"):
            origin.objects[key], origin.parts[key] = body, [8 * MIB, 7 * MIB]
        here, there = (
            open_store(one.open().spec.model_copy(update={"url": f"s3://bucket/{path}"}))
            for one, path in ((origin, "from"), (target, "to"))
        )
        done = copy_objects(here, there)
        assert done.failures == []
        assert count(done) == {CopyOutcome.COPIED: 2}
        assert target.objects["to/large"] == target.objects["to//odd"] == body
        assert count(copy_objects(here, there)) == {CopyOutcome.EQUAL: 2}
        assert target.uploads == {}


def test_small_objects_of_encrypted_buckets_are_compared_by_their_bytes(
    target: KmsEndpoint,
) -> None:
    with serve_s3(KmsEndpoint) as origin:
        origin.objects = {"a": b"body", "b//c": b"odd", "empty": b"", "folder/": b""}
        assert count(copy_objects(origin.open(), target.open())) == {CopyOutcome.COPIED: 4}
        assert count(copy_objects(origin.open(), target.open())) == {CopyOutcome.EQUAL: 4}
        target.objects["a"] = b"BODY"
        done = copy_objects(origin.open(), target.open())
        assert (done.conflicts, done.objects[CopyOutcome.EQUAL]) == (["a"], 3)
