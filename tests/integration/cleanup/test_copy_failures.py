"""Objects that cannot be copied are named, and the others are copied, unless a store is down."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from millrace import errors
from millrace.cleanup import CopyOutcome, copy_objects
from millrace.storage import open_store
from tests.support.kms import KmsEndpoint
from tests.support.s3 import Refusal, serve_s3

BUDGET = timedelta(milliseconds=500)


@pytest.fixture
def source() -> Iterator[KmsEndpoint]:
    with serve_s3(KmsEndpoint) as endpoint:
        yield endpoint


def test_an_object_with_odd_metadata_fails_alone(source: KmsEndpoint, tmp_path: Path) -> None:
    source.objects = {"a": b"odd", "b": b"body", "c": b"body"}
    source.metadata["a"] = {"x-amz-meta-name": "ü".encode().decode("latin-1")}  # raw UTF-8
    done = copy_objects(source.open(), open_store(tmp_path.as_uri()))
    assert done.objects[CopyOutcome.COPIED] == 2
    assert [one.key for one in done.failures] == ["a"]
    assert "x-amz-meta-name of its metadata" in done.failures[0].reason


def test_an_object_without_an_answer_fails_alone(source: KmsEndpoint, tmp_path: Path) -> None:
    source.objects = {"a": b"lost", "b": b"body", "c": b"body"}
    source.refusals = [Refusal("", 500, "InternalError", times=1000, key="/a")]
    done = copy_objects(source.open(retry_timeout=BUDGET), open_store(tmp_path.as_uri()))
    assert done.objects[CopyOutcome.COPIED] == 2
    assert [one.key for one in done.failures] == ["a"]
    assert "given up after" in done.failures[0].reason


@pytest.mark.parametrize("objects", [2, 30])
def test_a_store_that_answers_for_no_object_ends_the_copy(
    source: KmsEndpoint, tmp_path: Path, objects: int
) -> None:
    source.objects = {f"{number}.lost": b"lost" for number in range(objects)}
    source.refusals = [Refusal("", 500, "InternalError", times=10_000, key=".lost")]
    with pytest.raises(errors.UnavailableError, match="given up after"):
        copy_objects(source.open(retry_timeout=BUDGET), open_store(tmp_path.as_uri()))
