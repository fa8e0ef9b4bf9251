"""Records: models that are committed to a store once, and never changed afterwards.

`commit_once` is one create-if-absent PUT, the only primitive of coordination that all supported
stores have. The body has a nonce. After a lost answer, the nonce shows whose record is stored.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from millrace import errors
from millrace.digest import DigestError, compute_digest, dump_canonical_json
from millrace.storage import Stat, Store, create, list_objects, read

_CONCURRENCY = 32
_MAX_NAMED = 3  # damaged records in an error
# Parsed, an object or an array of two bytes takes up to 240 bytes, a key of four bytes 100, and
# another value of two bytes up to 100. Metadata of many tensors has 37 bytes per object or array,
# 25 per colon, and 21 per comma. A plan of a million partitions has 22 bytes per colon.
_BYTES_PER_CONTAINER = 32
_BYTES_PER_COLON = 20
_BYTES_PER_COMMA = 12
_MAX_DEPTH = 100  # of nested dicts and lists
_MAX_ERRORS = 1000  # refused values that are looked at for the reason
_BATCH_SIZE = 1000  # values of a dict, and items of a record that are encoded at once
_BATCH_BYTES = 256 << 10  # bytes of the items of a record that are decoded at once
_NONCE = re.compile(rb'\{"kind":"[^"]*","nonce":"([0-9a-f]*)"')

JsonInt = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""Integer that can be encoded again. In a record of others, a text may have more digits."""


def check_depth(value: dict[str, Any]) -> dict[str, Any]:
    """Return a dict that is not nested too deeply to be encoded.

    Raises:
        ValueError: Dicts and lists are nested in more than 100 others.
    """
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        values: Iterator[Any] = chain.from_iterable(
            cast("dict[str, Any]", each).values() if isinstance(each, dict) else each
            for each in level
        )
        level = [item for item in values if isinstance(item, (dict, list, tuple))]
        if not level:
            return value
    raise ValueError(f"dicts and lists are nested in more than {_MAX_DEPTH} others")


JsonObject = Annotated[dict[str, Any], AfterValidator(check_depth)]
"""Dict of any JSON values, with a limit of its depth."""


def validate_batches(value: Any, validate: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Validate a dict in batches, so that a dict of many wrong values has few errors.

    Args:
        value: Dict to validate.
        validate: Validator of the dict, from pydantic.
    """
    if not isinstance(value, dict) or len(cast("dict[Any, Any]", value)) <= _BATCH_SIZE:
        return validate(value)
    items = iter(cast("dict[Any, Any]", value).items())
    found: dict[str, Any] = {}
    while batch := dict(islice(items, _BATCH_SIZE)):
        found |= validate(batch)
    return found


def explain_excess(body: bytes, max_size: int) -> str:
    """Return how a JSON document exceeds the limits of its kind; empty if it does not.

    Parsed, small values take many times their size. So brackets, braces, colons and commas are
    counted in the bytes, texts included. One pass over the bytes for each.

    Args:
        body: JSON document.
        max_size: Largest size of the document in bytes. One object or array is allowed per 32 of
            these bytes, one colon per 20, and one comma per 12.
    """
    counts = (
        ("bytes", len(body), max_size),
        (
            "JSON objects and arrays",
            body.count(b"{") + body.count(b"["),
            max_size // _BYTES_PER_CONTAINER,
        ),
        ("colons", body.count(b":"), max_size // _BYTES_PER_COLON),
        ("commas", body.count(b","), max_size // _BYTES_PER_COMMA),
    )
    for name, count, limit in counts:
        if count > limit:
            return f"{count:,} {name} (at most {limit:,})"
    return ""


PART_CONFIG = ConfigDict(extra="forbid")
"""Configuration of the dataclasses within records, for parts of which a record has very many.

A dataclass with slots takes an eighth of the memory of a `RecordPart`, and is parsed four times as
fast."""


class RecordPart(BaseModel):
    """Base of the models within records. Instances are frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Record(RecordPart):
    """Base of models that are each committed under a key of their own.

    Attributes:
        record_kind: Stable name of the kind, unique and independent of the class's name. Readers
            refuse records of another kind.
        record_version: Version of the format. Readers refuse other versions.
        record_bytes: Largest stored size that readers accept, in bytes. Readers and writers also
            refuse more small values than `explain_excess` allows for this size.
        record_items: Name of the field with a tuple of very many objects; empty if there is none.
            These are encoded and decoded in batches, since they take many times their bytes.
    """

    record_kind: ClassVar[str]
    record_version: ClassVar[int] = 1
    record_bytes: ClassVar[int] = 1 << 20
    record_items: ClassVar[str] = ""


R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Commit(Generic[R]):
    """Record under a key after `commit_once`.

    Attributes:
        record: Stored record: the record of this call, or an earlier record of another process.
        mine: Whether this call committed the record.
    """

    record: R
    mine: bool


def commit_once(store: Store, key: str, record: R) -> Commit[R]:
    """Commit a record, unless the key has a record. One request if the key is free.

    Args:
        store: Store to write to.
        key: Key of the record, from `millrace.keys`.
        record: Record to commit.

    Returns:
        The stored record. Exactly one of several callers gets ``mine``, also after lost answers
        and repeated requests. The other callers compare the record with their own record.

    Raises:
        ConfigurationError: The record is larger, or has more values, than readers accept. Nothing
            was written.
        UnavailableError: The store does not answer. The record may be committed: call again.
    """
    nonce = secrets.token_hex(16)
    body = encode_record(record, nonce)
    if excess := explain_excess(body, record.record_bytes):
        raise errors.ConfigurationError(
            f"{store.make_url(key)} would have {excess}. Nothing was written, since readers refuse "
            f"such a {record.record_kind}: make it smaller."
        )
    try:
        create(store, key, body)
    except (errors.ExistsError, errors.UnavailableError) as error:
        try:
            there, its_nonce = _read_record(store, key, type(record))
        except (errors.NotFoundError, errors.UnavailableError):
            raise error from None
        return Commit(there, mine=its_nonce == nonce)
    return Commit(record, mine=True)


def commit_same(store: Store, key: str, record: R) -> Commit[R]:
    """Commit a record that every process with the same work would commit with the same content.

    Raises:
        ConflictError: Another record is stored. The message names the fields that differ.
    """
    commit = commit_once(store, key, record)
    if not commit.mine and commit.record != record:
        raise errors.ConflictError(
            f"{store.make_url(key)} was committed by another run, and differs in "
            f"{', '.join(list_differences(commit.record, record))}."
        )
    return commit


def list_differences(one: BaseModel, other: BaseModel) -> list[str]:
    """Return the names of the fields in which two records of one kind differ."""
    return [
        name for name in type(one).model_fields if getattr(one, name) != getattr(other, name, None)
    ]


def find_changes(old: BaseModel, new: BaseModel, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each field that differs, by its dotted path.

    Args:
        old: Old model.
        new: New model of the same class. Nested models are compared field by field.
        path: Prefix of the fields' paths.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name in type(old).model_fields:
        before, after, where = getattr(old, name), getattr(new, name), f"{path}{name}"
        if isinstance(before, BaseModel) and type(before) is type(after):
            found |= find_changes(before, after, f"{where}.")
        elif before != after:
            found[where] = before, after
    return found


def fetch(store: Store, key: str, kind: type[R]) -> R:
    """Return the record under a key.

    Raises:
        NotFoundError: There is no object under the key.
        CorruptError: The object is not a record of this kind and version.
    """
    return _read_record(store, key, kind)[0]


def is_stored(store: Store, key: str, record: Record) -> bool:
    """Decide whether the record under a key is equal to a given one.

    The bytes are compared first, so that most records are not parsed.

    Raises:
        NotFoundError: There is no object under the key.
        CorruptError: The object is not a record of this kind and version.
    """
    kind = type(record)
    body = read(store, key, max_size=kind.record_bytes)
    nonce = _NONCE.match(body)
    if nonce and _has_bytes(body, _iterate_stored(record, nonce[1].decode())):
        return True
    return decode_record(store.make_url(key), kind, body)[0] == record


def _has_bytes(body: bytes, chunks: Iterable[bytes]) -> bool:
    position = 0
    for chunk in chunks:
        if not body.startswith(chunk, position):
            return False
        position += len(chunk)
    return position == len(body)


def _read_record(store: Store, key: str, kind: type[R]) -> tuple[R, str]:
    return decode_record(store.make_url(key), kind, read(store, key, max_size=kind.record_bytes))


def iterate_records(
    store: Store,
    prefix: str,
    kind: type[R],
    *,
    wanted: Callable[[Stat], bool],
) -> Iterator[tuple[Stat, R | errors.CorruptError]]:
    """Yield the records whose keys start with a prefix, read 32 at a time, in the listing's order.

    A damaged record yields an error with the key of the record. A record that was deleted since
    the listing is skipped.

    Args:
        store: Store to list.
        prefix: Prefix of the records, from `millrace.keys`.
        kind: Class of the records.
        wanted: Function that selects the listed objects to read.
    """
    found = ((stat, stat.key, kind) for stat in list_objects(store, prefix) if wanted(stat))
    return read_records(store, found)


def digest_record(record: Record) -> str:
    """Return the digest of a record, by which the next one of a chain names it."""
    return compute_digest(dump_canonical_json(record.model_dump(mode="json")))


def list_numbers(store: Store, prefix: str, parse: Callable[[str], int | None]) -> list[int]:
    """Return the numbers of numbered objects below a prefix, in ascending order.

    Args:
        store: Store of the objects.
        prefix: Prefix of their keys.
        parse: Function that returns the number in a key; None for other keys.
    """
    # Otherwise, a key with a slash at its end would be listed like the one without.
    numbers = (parse(stat.key) for stat in list_objects(store, prefix, exact=True))
    return sorted(number for number in numbers if number is not None)


def read_records(
    store: Store, wanted: Iterable[tuple[T, str, type[R]]]
) -> Iterator[tuple[T, R | errors.CorruptError]]:
    """Yield records that are read 32 at a time, in their order.

    A damaged record yields an error with the key of the record. A missing record is skipped.

    Args:
        store: Store of the records.
        wanted: Label, key and class of each record.

    Yields:
        Label of the record, and the record or its error.
    """

    def read_pair(one: tuple[T, str, type[R]]) -> list[tuple[T, R | errors.CorruptError]]:
        label, key, kind = one
        try:
            return [(label, fetch(store, key, kind))]
        except errors.CorruptError as error:
            return [(label, error.with_traceback(None))]  # the frames would hold the bytes
        except errors.NotFoundError:
            return []

    remaining = iter(wanted)
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="records") as pool:
        while batch := list(islice(remaining, _CONCURRENCY * 8)):
            yield from chain.from_iterable(pool.map(read_pair, batch))


def require_intact(
    where: str, found: Iterable[tuple[object, R | errors.CorruptError]]
) -> Iterator[R]:
    """Yield the intact records of `read_records`. Then raise if a record is damaged.

    Args:
        where: URL of the prefix.
        found: Result of `read_records` or `iterate_records`.

    Raises:
        CorruptError: Records are damaged. The message has their number and the first three
            errors.
    """
    damaged: list[str] = []
    good = 0
    for _, record in found:
        if isinstance(record, errors.CorruptError):
            damaged.append(str(record))
        else:
            good += 1
            yield record
    if damaged:
        raise errors.CorruptError(
            f"{len(damaged)} of {good + len(damaged)} records below {where} cannot be read: "
            f"{' '.join(damaged[:_MAX_NAMED])}"
        )


def encode_record(record: Record, nonce: str) -> bytes:
    """Return the stored form of a record, which `decode_record` reads."""
    return b"".join(_iterate_stored(record, nonce))


def _iterate_stored(record: Record, nonce: str) -> Iterator[bytes]:
    """Yield the stored form of a record: canonical JSON, whose keys are sorted."""
    head = dump_canonical_json({"kind": record.record_kind, "nonce": nonce})
    yield head[:-1] + b',"record":'
    yield from iterate_canonical_json(record)
    yield b',"version":%d}' % record.record_version


def iterate_canonical_json(record: Record) -> Iterator[bytes]:
    """Yield the canonical JSON of a record's fields, with 1,000 of its `record_items` at a time."""
    name = record.record_items
    if not name:
        yield dump_canonical_json(record.model_dump(mode="json"))
        return
    others = record.model_dump(mode="json", exclude={name})
    before = dump_canonical_json({key: value for key, value in others.items() if key < name})
    after = dump_canonical_json({key: value for key, value in others.items() if key > name})
    head, items = b'{"%b":[' % name.encode(), getattr(record, name)
    yield (before[:-1] + b"," if before != b"{}" else b"{") + head[1:]
    for start in range(0, len(items), _BATCH_SIZE):
        part = record.model_copy(update={name: items[start : start + _BATCH_SIZE]})
        body = dump_canonical_json(part.model_dump(mode="json", include={name}))
        yield (b"," if start else b"") + body[len(head) : -len(b"]}")]
    yield b"]" + (b"," + after[1:] if after != b"{}" else b"}")


def _find_digest_error(error: Exception) -> str:
    """Return the sentence about a refused digest in a record; empty if none was refused."""
    if not isinstance(error, ValidationError) or error.error_count() > _MAX_ERRORS:
        return ""
    causes = (one.get("ctx", {}).get("error") for one in error.errors(include_url=False))
    return next((str(cause) for cause in causes if isinstance(cause, DigestError)), "")


def _has_only_unknown_fields(error: Exception) -> bool:
    """Tell whether a record was refused for nothing but fields that its class does not have."""
    if not isinstance(error, ValidationError) or error.error_count() > _MAX_ERRORS:
        return False
    kinds = {one["type"] for one in error.errors(include_url=False, include_input=False)}
    return kinds <= {"extra_forbidden", "unexpected_keyword_argument"}


def decode_record(where: str, kind: type[R], body: bytes) -> tuple[R, str]:
    """Return a record and its nonce.

    Args:
        where: URL that the bytes were read from, for error messages.
        kind: Class of the record.
        body: Bytes of the object.

    Raises:
        CorruptError: The bytes are not a record of this kind, or have more values than one.
        VersionError: Another version of Millrace wrote the record.
    """
    if excess := explain_excess(body, kind.record_bytes):
        raise errors.CorruptError(
            f"{where} has {excess}, more than a {kind.record_kind} of Millrace's. Look at the "
            "object before you delete it."
        )
    found = _parse_record(where, kind, body)
    if isinstance(found, errors.CorruptError):
        raise found
    return found


def _parse_record(where: str, kind: type[R], body: bytes) -> tuple[R, str] | errors.CorruptError:
    """Return a record and its nonce, or an error that holds nothing of the bytes.

    An error that was raised here would hold the parsed values, as long as the error is kept.
    """
    try:
        items, rest = _parse_items(kind, body)
        envelope = orjson.loads(rest)
        version, its_kind, nonce = envelope["version"], envelope["kind"], envelope["nonce"]
        if not (isinstance(version, int) and isinstance(its_kind, str) and isinstance(nonce, str)):
            raise TypeError("the envelope")  # noqa: TRY301 - answered as any other damage
        if version == kind.record_version and its_kind == kind.record_kind:
            if items:
                envelope["record"][kind.record_items][:0] = items
            return kind.model_validate(envelope["record"]), nonce
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        if reason := _find_digest_error(error):
            return errors.CorruptError(f"{where} cannot be used: {reason}")
        if _has_only_unknown_fields(error):
            return errors.VersionError(
                f"{where} holds a {kind.record_kind} with fields that this Millrace does not know: "
                "a later version wrote it. Read it with that version."
            )
        return errors.CorruptError(
            f"{where} is not a record of Millrace's: the object is damaged, or another program or "
            "a later version of Millrace wrote it. Look at the object before you delete it."
        )
    if its_kind != kind.record_kind:
        return errors.CorruptError(
            f"{where} holds a record of the kind {its_kind[:40]!r}, and should hold one of "
            f"the kind {kind.record_kind!r}. Another program, or another version of Millrace, "
            "wrote it."
        )
    return errors.VersionError(
        f"{where} holds a {kind.record_kind} of version {str(version)[:20]}. This Millrace reads "
        f"version {kind.record_version}. Read it with the version that wrote it."
    )


def _parse_items(kind: type[Record], body: bytes) -> tuple[list[Any], bytes]:
    """Return most of the `record_items` of a stored record, and the record without these.

    So there is only one batch of JSON objects at a time beside the items. The bytes are cut before
    the first key of an item. An unescaped quote is in no JSON text, so there is no such key in a
    text. If a cut is wrong, since an item has a list of such objects, a batch is not valid JSON.
    Then nothing is cut, as if the record had few items.
    """
    if not kind.record_items or len(body) <= _BATCH_BYTES:
        return [], body
    marker = b'"%b":[' % kind.record_items.encode()
    start = body.find(marker) + len(marker)
    key_end = body.find(b'":', start)
    if body.count(marker) != 1 or not body.startswith(b'{"', start) or key_end < 0:
        return [], body
    separator = b"}," + body[start : key_end + len(b'":')]
    position, items = start, list[Any]()
    try:
        while (cut := body.find(separator, position + _BATCH_BYTES)) >= 0:
            batch = orjson.loads(b"[" + body[position : cut + 1] + b"]")
            items += _make_items_adapter(kind).validate_python(batch)
            position = cut + len(b"},")
    except (orjson.JSONDecodeError, ValidationError):
        return [], body
    return items, body[:start] + body[position:]


@lru_cache
def _make_items_adapter(kind: type[Record]) -> TypeAdapter[Any]:
    return TypeAdapter(cast("Any", kind.model_fields[kind.record_items].annotation))
