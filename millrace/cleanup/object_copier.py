"""Copy single objects into another store, each with a proof that the copy is right."""

import threading
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import obstore

from millrace import errors
from millrace.cleanup.copy_result import CopyOutcome, CopyResult
from millrace.cleanup.copy_sides import CopySides, name_attributes, select_attributes
from millrace.cleanup.object_comparer import SOURCE_ETAG, ObjectComparer
from millrace.cleanup.part_senders import (
    PartSender,
    StorePartSender,
    UnprovenPartError,
    read_whole,
)
from millrace.storage import (
    Backend,
    Stat,
    Store,
    call_boto3,
    create,
    head,
    marks_folder,
    open_writer,
    stream,
)
from millrace.storage.etags import (
    EtagHasher,
    ParsedEtag,
    compute_etag,
    parse_etag,
)
from millrace.storage.file_writer import write_file
from millrace.storage.folders import check_file_key
from millrace.storage.multipart import MAX_PARTS, MIN_PART_SIZE, PartUpload
from millrace.storage.object_keys import find_segment_fault
from millrace.storage.retry import call_with_retries
from millrace.storage.signed import can_sign, copy_with_signature
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
        self._sides = CopySides.open(source, destination)
        self._comparer = ObjectComparer(self._sides)
        self._can_copy_by_store = self._sides.share_endpoint
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
            if self._comparer.are_equal(stat, there):
                return CopyOutcome.EQUAL
            if not self._overwrite:
                return CopyOutcome.CONFLICT
        if self._dry_run:
            return CopyOutcome.MISSING
        try:
            is_proven = self._copy_unless_done(stat)
        except errors.ExistsError:  # written since the listing, maybe by a request of this copy
            written = self._sides.find_target(stat)
            if written is None:  # deleted again, or no object: a folder, say
                raise
            is_equal = self._comparer.are_equal(stat, written)
            return CopyOutcome.COPIED if is_equal else CopyOutcome.CONFLICT
        if not is_proven and not self._comparer.is_right_copy(stat):
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
            written = self._sides.find_target(stat)
            if written is not None and self._comparer.are_equal(stat, written):
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
                **self._sides.name(self._destination, stat),
                CopySource=self._sides.name(self._source, stat),
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
                found = call_boto3(destination, stat.key, copy, client=self._sides.client)
        except errors.ChangedError:  # the source has another ETag, or the copy is there
            self._check_absent(stat)
            raise
        self._count(by_store=stat.size)
        return parsed is None or parse_etag(destination, found) == parsed

    def _copy_whole(self, stat: Stat, parsed: ParsedEtag | None) -> bool:
        """Copy an object with its attributes through memory, by two requests."""
        is_readable = self._sides.source_client is not None or marks_folder(stat)
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
        names = {**self._sides.name(self._source, stat), "IfMatch": stat.etag or ""}
        found: Any = (
            call_boto3(
                self._source,
                stat.key,
                lambda s3: read_whole(s3, names),
                client=self._sides.source_client,
            )
            if self._sides.source_client is not None
            else {"Body": b""}  # the mark of a folder in GCS
        )
        body = found["Body"]
        absent: Any = {} if self._overwrite else {"IfNoneMatch": "*"}
        try:
            written = call_boto3(
                self._destination,
                stat.key,
                lambda s3: s3.put_object(
                    **self._sides.name(self._destination, stat),
                    Body=body,
                    **absent,
                    **select_attributes(found),
                ),
                client=self._sides.client,
            )
        except errors.ChangedError as error:
            where = self._destination.make_url(stat.key)
            raise errors.ExistsError(f"{where} already exists.") from error
        expected = parsed or (compute_etag(body), 0)
        return parse_etag(self._destination, written["ETag"]) == expected

    def _copy_in_parts(self, stat: Stat, parsed: ParsedEtag | None, *, by_store: bool) -> bool:
        """Copy a large object in the parts of its source if they fit, otherwise in own parts."""
        size, is_told = self._sides.find_part_size(self._source, stat, parsed[1] if parsed else 0)
        largest = _MAX_SERVER_COPY if by_store else _MAX_PART_IN_MEMORY
        smallest = MIN_PART_SIZE if size < stat.size else 1
        is_likely = is_told or by_store or stat.size <= _MAX_TRIAL
        with self._large:
            headers = self._sides.fetch_headers(stat)
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
                noted = {**headers.get("Metadata", {}), SOURCE_ETAG: stat.etag or ""}
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
        client = self._sides.source_client if is_odd else None
        upload = PartUpload(
            self._destination,
            stat.key,
            stat.size,
            size,
            StorePartSender(self._sides.name(self._source, stat), stat)
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
            attributes=name_attributes(headers),
        ) as writer:
            self._write_blocks(stat, writer)
            self._check_absent(stat)
        found = parse_etag(self._destination, head(self._destination, stat.key).etag)
        return found is not None and found[0] == etag

    def _copy_as_stream(self, stat: Stat, parsed: ParsedEtag | None) -> bool:
        """Copy an object into a folder, or into a store that does not speak S3."""
        part_size, _ = self._sides.find_part_size(self._source, stat, parsed[1] if parsed else 0)
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
        if not self._overwrite and self._sides.find_target(stat) is not None:
            raise errors.ExistsError(f"{self._destination.make_url(stat.key)} already exists.")

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

    def _count(self, *, by_store: int = 0, reused: int = 0) -> None:
        with self._lock:
            self._result.by_store += by_store
            self._result.reused += reused
