"""Copy single objects into another store, each with a proof that the copy is right."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

import obstore

from millrace import errors
from millrace.cleanup.copy_result import CopyOutcome, CopyResult
from millrace.cleanup.part_senders import (
    PartSender,
    StorePartSender,
    UnprovenPartError,
    read_part,
    read_whole,
)
from millrace.digest import compute_stream_digest
from millrace.storage import (
    Backend,
    Stat,
    Store,
    call_boto3,
    create,
    head,
    make_boto3_client,
    marks_folder,
    open_writer,
    stream,
)
from millrace.storage.clients import make_full_key
from millrace.storage.etags import (
    EtagHasher,
    ParsedEtag,
    compute_etag,
    find_part_size,
    parse_etag,
)
from millrace.storage.file_writer import write_file
from millrace.storage.folders import check_file_key
from millrace.storage.multipart import MAX_PARTS, MIN_PART_SIZE, PartUpload
from millrace.storage.object_keys import find_segment_fault
from millrace.storage.retry import call_with_retries
from millrace.storage.signed import can_sign, copy_with_signature, shows_md5
from millrace.storage.writer import PART_SIZE, Writer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from obstore import Attributes, GetOptions, PutResult

_PART_CONCURRENCY = 4  # parts of an object that are copied at once
_SMALL = 32 << 20  # bytes of an object that is copied in one piece, if its source is one
_MAX_TRIAL = 1 << 30  # bytes of an object that is sent in parts of a likely size
_MAX_PART_IN_MEMORY = 64 << 20  # bytes of a part that this process sends
_MIB = 1 << 20
_MAX_LARGE = 4  # large objects that are copied at once
_MAX_SERVER_COPY = 5 << 30  # bytes that the store copies by one request: the limit of S3
_SOURCE_ETAG = "millrace-source-etag"
"""Metadata of a copy that is proven though its ETag differs from that of its source: the latter.

It is written when the upload begins. So the upload is completed only if the store confirms the MD5
of each part, or has copied the parts by itself.
"""
_ATTRIBUTES = {
    "CacheControl": "Cache-Control",
    "ContentDisposition": "Content-Disposition",
    "ContentEncoding": "Content-Encoding",
    "ContentLanguage": "Content-Language",
    "ContentType": "Content-Type",
}
"""Attributes of an object that a copy has, as boto3 and obstore name them."""


class ObjectCopier:
    """Copier of single objects. Threads may share it.

    Args:
        source: Store of the objects.
        destination: Store to copy to.
        result: Result, in which bytes are counted that this process did not send.
        overwrite: Whether to replace objects at the destination that differ.
        dry_run: Whether to compare only, and copy nothing.
    """

    def __init__(
        self,
        source: Store,
        destination: Store,
        result: CopyResult,
        *,
        overwrite: bool,
        dry_run: bool,
    ) -> None:
        self._source, self._destination, self._result = source, destination, result
        self._overwrite, self._dry_run = overwrite, dry_run
        self._can_copy_by_store = _share_endpoint(source, destination)
        self._source_client, self._client = (
            make_boto3_client(one, max_attempts=1) if one.is_s3_compatible else None
            for one in (source, destination)
        )
        self._can_note = True  # until the destination answers with other ETags than MD5s
        self._large = threading.BoundedSemaphore(_MAX_LARGE)
        self._lock = threading.Lock()

    def copy(self, stat: Stat, there: Stat | None) -> CopyOutcome:
        """Copy one object, unless the destination has an object under its key.

        Args:
            stat: Object to copy.
            there: Object of the destination; None without one.

        Raises:
            ChangedError, NotFoundError: The object was replaced or deleted since the listing.
            ExistsError: The destination has something else under the key, such as a folder.
            ConfigurationError: The destination cannot have the key.
            CorruptError: The copy has other bytes.
        """
        self._check_key(stat.key)
        if there is not None:
            if self._are_equal(stat, there):
                return CopyOutcome.EQUAL
            if not self._overwrite:
                return CopyOutcome.CONFLICT
        if self._dry_run:
            return CopyOutcome.MISSING
        try:
            is_proven = self._copy_unless_done(stat)
        except errors.ExistsError:  # written since the listing, maybe by a request of this copy
            written = self._find_target(stat)
            if written is None:  # deleted again, or no object: a folder, say
                raise
            is_equal = self._are_equal(stat, written)
            return CopyOutcome.COPIED if is_equal else CopyOutcome.CONFLICT
        if not is_proven and not self._is_right_copy(stat):
            raise errors.CorruptError(
                f"{self._destination.make_url(stat.key)} had other bytes than "
                f"{self._source.make_url(stat.key)} after the copy: another process wrote it, or "
                "the store has damaged it. Copy it again, with --overwrite."
            )
        return CopyOutcome.COPIED

    def _copy_unless_done(self, stat: Stat) -> bool:
        """Copy an object; return whether the copy is proven.

        Another copy may use the parts of the same upload, and complete or abort the upload first.
        """
        try:
            return self._copy(stat)
        except (errors.NotFoundError, errors.UploadGoneError):
            written = self._find_target(stat)
            if written is not None and self._are_equal(stat, written):
                return True
        return self._copy(stat)

    def _check_key(self, key: str) -> None:
        """Check that the destination can have a key.

        Raises:
            ConfigurationError: It cannot.
        """
        if self._destination.is_s3_compatible:
            return
        if fault := find_segment_fault(key):
            raise errors.ConfigurationError(
                f"{self._destination.url} cannot have the key {key!r}: {fault}. Leave it out, or "
                "copy into a bucket."
            )
        if self._destination.location.backend is Backend.FILE:
            check_file_key(self._destination, key)

    def _are_equal(self, stat: Stat, there: Stat) -> bool:
        """Compare two objects by their ETags; read them if the ETags prove nothing."""
        if stat.size != there.size:
            return False
        mine = parse_etag(self._source, stat.etag)
        theirs = parse_etag(self._destination, there.etag)
        if not stat.size or (mine is not None and mine == theirs):
            return True
        are_whole = mine is not None and theirs is not None and not mine[1] and not theirs[1]
        if are_whole and self._have_md5s(stat):
            return False
        return self._is_noted_copy(stat, there) or self._have_equal_bytes(stat, there)

    def _have_md5s(self, stat: Stat) -> bool:
        """Decide whether the ETags of two whole objects are MD5s. Up to two requests."""
        both = (self._destination, self._source)
        headers = (self._describe(store, stat)["ResponseMetadata"]["HTTPHeaders"] for store in both)
        return all(map(shows_md5, headers))

    def _describe(self, store: Store, stat: Stat) -> Any:
        """Return the answer of boto3 to a HEAD of an object in one of the buckets. One request."""
        is_source = store is self._source
        names = self._name_source(stat) if is_source else self._name_target(stat)
        return call_boto3(
            store,
            stat.key,
            lambda s3: s3.head_object(**names),
            client=self._source_client if is_source else self._client,
        )

    def _is_right_copy(self, stat: Stat) -> bool:
        """Read an object and its copy, unless they are empty, and compare them."""
        written = self._find_target(stat)
        if written is None or written.size != stat.size:
            return False
        return not stat.size or self._have_equal_bytes(stat, written)

    def _is_noted_copy(self, stat: Stat, there: Stat) -> bool:
        """Decide by an object's metadata whether it is a proven copy. One request."""
        if self._client is None or stat.etag is None or stat.size < MIN_PART_SIZE:
            return False
        found = self._describe(self._destination, stat)
        if not shows_md5(found["ResponseMetadata"]["HTTPHeaders"]):
            return False  # the store did not confirm the MD5 of any part
        is_listed = found["ETag"].strip('"') == (there.etag or "").strip('"')
        return is_listed and found.get("Metadata", {}).get(_SOURCE_ETAG) == stat.etag

    def _have_equal_bytes(self, stat: Stat, there: Stat) -> bool:
        """Compare the bytes of two objects. A file is compared with the ETag of the other one."""
        mine, theirs = (self._source, stat), (self._destination, there)
        for (store, one), (other_store, other) in ((mine, theirs), (theirs, mine)):
            etag = parse_etag(other_store, other.etag)
            if store.location.backend is Backend.FILE and etag is not None:
                hasher = EtagHasher(self._find_part_size(other_store, other, etag[1])[0])
                for block in self._iterate_blocks(store, one):
                    hasher.update(block)
                if hasher.compute_etag() == etag[0]:
                    return True
        digests = {
            compute_stream_digest(self._iterate_blocks(store, one))[0]
            for store, one in (mine, theirs)
        }
        return len(digests) == 1

    def _iterate_blocks(self, store: Store, stat: Stat) -> Iterator[bytes]:
        """Yield the blocks of an object, also of one whose key obstore refuses."""
        client = self._source_client if store is self._source else self._client
        if client is None or not find_segment_fault(stat.key):
            yield from stream(store, stat.key, etag=stat.etag)
            return
        for start in range(0, stat.size, PART_SIZE):
            yield read_part(store, stat, start, min(start + PART_SIZE, stat.size), client)

    def _copy(self, stat: Stat) -> bool:
        """Copy an object; return whether its ETag proves the copy."""
        parsed = parse_etag(self._source, stat.etag)
        parts = 0 if parsed is None else parsed[1]
        if not self._destination.is_s3_compatible:
            return self._copy_as_stream(stat, parsed)
        if self._can_copy_by_store:
            try:
                if not parts and stat.size <= _MAX_SERVER_COPY:
                    return self._copy_by_store(stat, parsed)
                return self._copy_in_parts(stat, parsed, by_store=True)
            except errors.NotFoundError:  # Ceph decodes the name of a part's source twice
                pass
            except errors.DeniedError:  # the credentials may not read there, or not write here
                self._can_copy_by_store = False
        if not parts and stat.size <= _SMALL:
            return self._copy_whole(stat, parsed)
        return self._copy_in_parts(stat, parsed, by_store=False)

    def _copy_by_store(self, stat: Stat, parsed: ParsedEtag | None) -> bool:
        """Let the store copy an object with its attributes, by one request."""
        self._check_absent(stat)
        source, destination, etag = self._source, self._destination, stat.etag or ""
        # Other endpoints ignore or refuse the condition.
        has_condition = not self._overwrite and destination.endpoint is None
        absent: Any = {"IfNoneMatch": "*"} if has_condition else {}

        def copy(client: "S3Client") -> str:
            answer: Any = client.copy_object(
                **self._name_target(stat),
                CopySource=self._name_source(stat),
                CopySourceIfMatch=etag,
                **absent,
            )
            return answer["CopyObjectResult"]["ETag"]

        def copy_signed() -> str:
            return copy_with_signature(
                destination, stat.key, source, stat.key, etag, overwrite=self._overwrite
            )

        try:
            # This takes half of the processor time of boto3. urllib3 would change odd keys.
            if can_sign(destination) and not find_segment_fault(stat.key):
                found = call_with_retries(destination, stat.key, copy_signed)
            else:
                found = call_boto3(destination, stat.key, copy, client=self._client)
        except errors.ChangedError:  # the source has another ETag, or the copy is there
            self._check_absent(stat)
            raise
        self._count(by_store=stat.size)
        return parsed is None or parse_etag(destination, found) == parsed

    def _copy_whole(self, stat: Stat, parsed: ParsedEtag | None) -> bool:
        """Copy an object with its attributes through memory, by two requests."""
        is_readable = self._source_client is not None or marks_folder(stat)
        if find_segment_fault(stat.key) and is_readable:
            return self._copy_odd_key(stat, parsed)
        options: GetOptions = {} if stat.etag is None else {"if_match": stat.etag}

        def read() -> "tuple[memoryview, Attributes]":
            found = obstore.get(self._source.raw, stat.key, options=options)
            return memoryview(found.bytes()), found.attributes

        def write() -> "PutResult":
            return obstore.put(
                self._destination.raw,
                stat.key,
                data,
                attributes=attributes,
                mode="overwrite" if self._overwrite else "create",
                use_multipart=False,
            )

        data, attributes = call_with_retries(self._source, stat.key, read)
        put = call_with_retries(self._destination, stat.key, write)
        expected = parsed or (compute_etag(data), 0)
        return parse_etag(self._destination, put["e_tag"]) == expected

    def _copy_odd_key(self, stat: Stat, parsed: ParsedEtag | None) -> bool:
        """Copy a small object whose key obstore refuses, such as one with a slash at its end."""
        names = {**self._name_source(stat), "IfMatch": stat.etag or ""}
        found: Any = (
            call_boto3(
                self._source,
                stat.key,
                lambda s3: read_whole(s3, names),
                client=self._source_client,
            )
            if self._source_client is not None
            else {"Body": b""}  # the mark of a folder in GCS
        )
        body = found["Body"]
        absent: Any = {} if self._overwrite else {"IfNoneMatch": "*"}
        try:
            written = call_boto3(
                self._destination,
                stat.key,
                lambda s3: s3.put_object(
                    **self._name_target(stat), Body=body, **absent, **_select_attributes(found)
                ),
                client=self._client,
            )
        except errors.ChangedError as error:
            where = self._destination.make_url(stat.key)
            raise errors.ExistsError(f"{where} already exists.") from error
        expected = parsed or (compute_etag(body), 0)
        return parse_etag(self._destination, written["ETag"]) == expected

    def _copy_in_parts(self, stat: Stat, parsed: ParsedEtag | None, *, by_store: bool) -> bool:
        """Copy a large object in the parts of its source if they fit, otherwise in own parts."""
        size, is_told = self._find_part_size(self._source, stat, parsed[1] if parsed else 0)
        largest = _MAX_SERVER_COPY if by_store else _MAX_PART_IN_MEMORY
        smallest = MIN_PART_SIZE if size < stat.size else 1
        is_likely = is_told or by_store or stat.size <= _MAX_TRIAL
        with self._large:
            headers = self._fetch_headers(stat)
            is_exact = parsed is not None and is_likely and smallest <= size <= largest
            if parsed is not None and is_exact:
                try:
                    return self._send_parts(stat, size, headers, parsed[0], by_store=by_store)
                except errors.CorruptError:  # other parts, or ETags that are no MD5s (SSE-KMS)
                    pass
            # A store that has copied other parts than it told is not trusted.
            can_note = self._can_note and not (by_store and is_exact and is_told)
            own_size = max(PART_SIZE, -(-stat.size // (MAX_PARTS * _MIB)) * _MIB)
            if can_note:
                noted = {**headers.get("Metadata", {}), _SOURCE_ETAG: stat.etag or ""}
                try:
                    return self._send_parts(
                        stat,
                        own_size,
                        {**headers, "Metadata": noted},
                        by_store=by_store,
                        has_note=True,
                    )
                except UnprovenPartError:
                    self._can_note = False
            return self._send_parts(stat, own_size, headers, by_store=by_store)

    def _send_parts(
        self,
        stat: Stat,
        size: int,
        headers: Mapping[str, Any],
        etag: str = "",
        *,
        by_store: bool,
        has_note: bool = False,
    ) -> bool:
        """Copy an object by requests for single parts; return whether the copy is proven.

        Parts that a killed process has sent are not sent again, if their proof is possible.

        Args:
            stat: Object to copy.
            size: Bytes of a part.
            headers: Attributes of the copy.
            etag: ETag that the copy must have; empty if it gets another one than its source.
            by_store: Whether the store copies by itself.
            has_note: Whether the attributes say that the copy is proven.

        Raises:
            CorruptError: The parts do not have the ETag. No object was written.
            UnprovenPartError: The store did not confirm the MD5 of a part of a copy with the note.
                No object was written.
        """
        is_odd = bool(find_segment_fault(stat.key))  # obstore refuses it
        client = self._source_client if is_odd else None
        upload = PartUpload(
            self._destination,
            stat.key,
            stat.size,
            size,
            StorePartSender(self._name_source(stat), stat)
            if by_store
            else PartSender(self._source, stat, client, must_prove=has_note),
            etag=etag,
            headers=headers,
            overwrite=self._overwrite,
            concurrency=_PART_CONCURRENCY,
        )
        if etag and not by_store and not is_odd and not upload.find_right_parts():
            return self._stream_parts(stat, size, headers, etag)
        found = upload.run()
        self._count(by_store=stat.size if by_store else 0, reused=upload.reused_bytes)
        return has_note or (bool(etag) and found == etag)

    def _stream_parts(self, stat: Stat, size: int, headers: Mapping[str, Any], etag: str) -> bool:
        """Copy an object part by part as one stream, without boto3 for the bytes.

        If this process is killed, the next one finds the parts, and sends the others.
        """
        with open_writer(
            self._destination,
            stat.key,
            part_size=size,
            concurrency=_PART_CONCURRENCY,
            attributes=_name_attributes(headers),
        ) as writer:
            self._write_blocks(stat, writer)
            self._check_absent(stat)
        found = parse_etag(self._destination, head(self._destination, stat.key).etag)
        return found is not None and found[0] == etag

    def _copy_as_stream(self, stat: Stat, parsed: ParsedEtag | None) -> bool:
        """Copy an object into a folder, or into a store that does not speak S3."""
        part_size, _ = self._find_part_size(self._source, stat, parsed[1] if parsed else 0)
        hasher = EtagHasher(part_size)
        if self._destination.location.backend is Backend.FILE:
            with write_file(self._destination, stat.key, overwrite=self._overwrite) as file:
                self._write_blocks(stat, file, hasher)
            return parsed is not None and hasher.compute_etag() == parsed[0]
        if stat.size <= _SMALL and not self._overwrite:
            body = BytesIO()
            self._write_blocks(stat, body)
            create(self._destination, stat.key, body.getbuffer())
            return False
        with open_writer(self._destination, stat.key) as writer:
            self._write_blocks(stat, writer)
            self._check_absent(stat)
        return False

    def _check_absent(self, stat: Stat) -> None:
        """Look once more whether the destination has an object, unless it may be replaced.

        Raises:
            ExistsError: It has one.
        """
        if not self._overwrite and self._find_target(stat) is not None:
            raise errors.ExistsError(f"{self._destination.make_url(stat.key)} already exists.")

    def _find_target(self, stat: Stat) -> Stat | None:
        """Return the object of the destination under the key of an object; None without one."""
        with suppress(errors.NotFoundError):
            if self._client is None or not find_segment_fault(stat.key):
                return head(self._destination, stat.key)
            found = self._describe(self._destination, stat)
            return Stat(stat.key, found["ContentLength"], found["ETag"], found["LastModified"])
        return None

    def _write_blocks(self, stat: Stat, writer: Writer, hasher: EtagHasher | None = None) -> None:
        """Write the bytes of an object, and hash them.

        Raises:
            ChangedError: The object has another size than in the listing.
        """
        size = 0
        for block in stream(self._source, stat.key, etag=stat.etag):
            if hasher is not None:
                hasher.update(block)
            writer.write(block)
            size += len(block)
        if size != stat.size:
            raise errors.ChangedError(
                f"{self._source.make_url(stat.key)} has {size} bytes, and was listed with "
                f"{stat.size}: it was written meanwhile. Copy it again."
            )

    def _find_part_size(self, store: Store, stat: Stat, parts: int) -> tuple[int, bool]:
        """Return the size of an object's parts, 0 if it has none, and whether the store told it."""
        client = self._source_client if store is self._source else self._client
        return (
            (0, True) if not parts or client is None else find_part_size(store, stat, parts, client)
        )

    def _fetch_headers(self, stat: Stat) -> dict[str, Any]:
        """Return the attributes of an object of a bucket, as boto3 names them."""
        if self._source_client is None:
            return {}
        return _select_attributes(self._describe(self._source, stat))

    def _name_source(self, stat: Stat) -> Any:
        key = make_full_key(self._source, stat.key)
        return {"Bucket": self._source.location.bucket, "Key": key}

    def _name_target(self, stat: Stat) -> Any:
        key = make_full_key(self._destination, stat.key)
        return {"Bucket": self._destination.location.bucket, "Key": key}

    def _count(self, *, by_store: int = 0, reused: int = 0) -> None:
        with self._lock:
            self._result.by_store += by_store
            self._result.reused += reused


def _select_attributes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object from its description by boto3."""
    return {name: found[name] for name in (*_ATTRIBUTES, "Metadata") if found.get(name)}


def _name_attributes(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return attributes of an object as obstore names them."""
    named = {_ATTRIBUTES[name]: headers[name] for name in _ATTRIBUTES if name in headers}
    return named | headers.get("Metadata", {})


def _share_endpoint(source: Store, destination: Store) -> bool:
    """Decide whether a request to the destination can name an object of the source."""
    return (
        source.is_s3_compatible
        and destination.is_s3_compatible
        and source.endpoint == destination.endpoint
        and source.region == destination.region
    )
