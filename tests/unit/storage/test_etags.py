"""ETags, compared with those that Ceph's rule makes of the same bytes."""

import hashlib
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from millrace.storage import Stat, Store, StoreSpec, open_store
from millrace.storage.etags import EtagHasher, combine_etags, find_part_size, parse_etag
from millrace.testing.credentials import make_credentials
from millrace.testing.key import Key

MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> Store:
    key = make_credentials(Key("id", "secret"))
    return open_store(StoreSpec(url="s3://bucket", endpoint="http://127.0.0.1:9", credentials=key))


@given(
    st.binary(max_size=200), st.integers(1, 60), st.lists(st.integers(1, 50), max_size=20)
)  # fmt: skip
def test_an_etag_is_that_of_the_parts_however_the_bytes_come(
    body: bytes, size: int, cuts: list[int]
) -> None:
    hasher, at = EtagHasher(size), 0
    for cut in [*cuts, len(body)]:
        hasher.update(body[at : at + cut])
        at += cut
    parts = [body[start : start + size] for start in range(0, max(1, len(body)), size)]
    joined = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
    wanted = hashlib.md5(joined, usedforsecurity=False).hexdigest()
    assert hasher.compute_etag() == f"{wanted}-{len(parts)}"
    whole = EtagHasher()
    whole.update(body)
    assert whole.compute_etag() == hashlib.md5(body, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize(
    ("etag", "parsed"),
    [
        ('"' + "a" * 32 + '"', ("a" * 32, 0)),
        ("0" * 32 + "-12", ("0" * 32 + "-12", 12)),
        ("0" * 32 + "-0", None),
        ("0" * 31, None),
        ("0" * 32 + "-x", None),
        ('W/"' + "0" * 32 + '"', None),
        (None, None),
    ],
)
def test_only_etags_of_md5s_are_parsed(
    store: Store, etag: str | None, parsed: tuple[str, int] | None
) -> None:
    assert parse_etag(store, etag) == parsed
    assert parse_etag(open_store("memory://etags"), etag) is None


def test_parts_whose_etags_are_no_md5s_have_no_common_etag() -> None:
    assert combine_etags(["zz"]) == ""


class Teller:
    """A client whose store tells the size of the first part, or refuses to."""

    def __init__(self, told: int) -> None:
        self._told = told

    def head_object(self, **_: Any) -> dict[str, int]:
        if not self._told:
            raise ClientError({"Error": {"Code": "NotImplemented"}}, "HeadObject")
        return {"ContentLength": self._told}


@pytest.mark.parametrize(
    ("size", "parts", "told", "found"),
    [
        (30 * MIB, 4, 9 * MIB, (9 * MIB, True)),
        (30 * MIB, 4, 30 * MIB, (8 * MIB, False)),  # a store that ignores the number
        (30 * MIB, 4, 0, (8 * MIB, False)),  # one that refuses it
        (30 * MIB, 4, 2 * MIB, (8 * MIB, False)),  # one that tells what cannot be
        (64 * MIB, 4, 0, (16 * MIB, False)),
        (100 * MIB + 1, 7, 0, (16 * MIB, False)),
        (299 * MIB, 43, 0, (7 * MIB, False)),
        (700 * MIB, 3, 0, (256 * MIB, False)),
        (21 * MIB, 1, 0, (21 * MIB, True)),
    ],
)
def test_the_size_of_parts_is_told_or_likely(
    store: Store, size: int, parts: int, told: int, found: tuple[int, bool]
) -> None:
    stat = Stat("key", size, None, datetime.now(UTC))
    assert find_part_size(store, stat, parts, cast("Any", Teller(told))) == found
