"""Prove that each credential has the rights that its role needs, and no other rights.

Each operation is tried on objects with a nonce in their names, which are deleted afterwards. A
query of permissions is faster, and proves less. An unknown outcome is not a proof.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from millrace import errors
from millrace.audit.outcomes import RequestOutcome, classify_error
from millrace.keys.probes import make_audit_probe_key
from millrace.settings import Duration
from millrace.storage import (
    Backend,
    Credentials,
    Right,
    Store,
    StoreSpec,
    call_boto3,
    create,
    delete_one,
    exists,
    head,
    list_objects,
    open_store,
    open_writer,
    put,
    read,
)
from millrace.storage.clients import make_full_key
from millrace.storage.signed import describe_body_check

_BODY, _OTHER = b"audit", b"audited"
_LARGE_BODY = bytes(256 << 10)  # shows which checksum of an upload the store checks
_UNAVAILABLE_OUTCOMES = {
    RequestOutcome.NOT_FOUND,
    RequestOutcome.THROTTLED,
    RequestOutcome.UNREACHABLE,
}
_ENDPOINT_TIMEOUT = timedelta(seconds=5)


class Operation(StrEnum):
    """Operation that an audit tries with credentials."""

    LIST = "list"
    GET = "get"
    HEAD = "head"
    PUT = "put"
    OVERWRITE = "overwrite"
    CREATE = "create if absent"
    MULTIPART = "multipart"
    ABORT = "abort"
    DELETE = "delete"
    OTHER_BUCKET = "other bucket"
    OUTSIDE = "outside the prefix"


READ_OPERATIONS = frozenset({Operation.LIST, Operation.GET, Operation.HEAD})
"""Operations that credentials to read may do."""
_FORBIDDEN_OPERATIONS = frozenset({Operation.OTHER_BUCKET, Operation.OUTSIDE})
"""Operations that no credentials may do. Credentials to write may do all others."""


class AccessVerdict(StrEnum):
    """Verdict on an operation."""

    CORRECT = "correct"
    INSUFFICIENT = "insufficient"  # a required operation is refused
    EXCESSIVE = "excessive"  # a forbidden operation is allowed
    UNPROVEN = "unproven"  # the outcome is unknown


class AuditedRole(BaseModel):
    """Store of a role, and the credentials of the role."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec = Field(
        description="Location of the bucket. Its own credentials are not used."
    )
    prefix: str = Field(
        default="",
        description="Prefix in the store that the credentials are for; by default the whole store.",
    )
    read_credentials: Credentials | None = Field(
        default=None, description="Credentials that may read in the store."
    )
    write_credentials: Credentials | None = Field(
        default=None, description="Credentials that may read and write in the store."
    )

    @field_validator("prefix")
    @classmethod
    def _strip_slashes(cls, prefix: str) -> str:
        return prefix.strip("/")

    @field_validator("read_credentials", "write_credentials")
    @classmethod
    def _check_end(cls, credentials: Credentials | None) -> Credentials | None:
        end = credentials.expires_at if credentials else None
        if end is not None and end.tzinfo is None:
            raise ValueError(f"expires_at needs a time zone: write {end.isoformat()}Z for UTC")
        return credentials

    @model_validator(mode="after")
    def _takes_key_pairs(self) -> Self:
        takes_pairs = self.store.url.startswith(("s3://", "r2://"))
        if (self.read_credentials or self.write_credentials) and not takes_pairs:
            raise ValueError(
                "only key pairs of s3:// and r2:// are audited: leave out the credentials"
            )
        return self


class AuditSettings(BaseModel):
    """Settings of an audit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    roles: dict[str, AuditedRole] = Field(min_length=1, description="Roles by their names.")
    retry_timeout: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="Longest time that each request is retried.",
    )
    expiry_warning: Duration = Field(
        default=timedelta(days=1),
        description="Warn of temporary credentials that end sooner than this.",
    )

    @model_validator(mode="after")
    def _has_credentials(self) -> Self:
        if not any(role.read_credentials or role.write_credentials for role in self.roles.values()):
            raise ValueError("no role has credentials: give read_credentials or write_credentials")
        return self


class Finding(BaseModel):
    """Result of one operation.

    Attributes:
        role: Name of the role.
        right: Right of the credentials: to read, or to write.
        operation: Operation that was tried.
        expected: `RequestOutcome.ALLOWED` or `RequestOutcome.DENIED`.
        actual: Outcome of the request.
        verdict: Comparison of both outcomes.
        message: Answer of the store in a sentence; empty if the outcome is the expected outcome.
    """

    model_config = ConfigDict(frozen=True)

    role: str
    right: Right
    operation: Operation
    expected: RequestOutcome
    actual: RequestOutcome
    verdict: AccessVerdict
    message: str = ""


class AuditReport(BaseModel):
    """Result of an audit.

    Attributes:
        findings: Findings of every role, credential and operation.
        notes: Sentences about missing, shared or expiring credentials, checksums of uploads, and
            leftover objects.
    """

    model_config = ConfigDict(frozen=True)

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings whose outcome is unexpected or unknown."""
        return tuple(one for one in self.findings if one.verdict is not AccessVerdict.CORRECT)

    @property
    def is_proven(self) -> bool:
        """True if every credential has the rights that its role needs, and no other rights."""
        return bool(self.findings) and not self.failures

    @property
    def exit_code(self) -> int:
        """Exit code of `millrace bucket audit`, from the gravest finding.

        0 proven; 20 a forbidden operation is allowed; 21 a store returns wrong bytes or confirms
        an operation that was not done; 22 credentials are refused for all operations; 23
        credentials are refused for a required operation; 24 no such bucket; 25 the store does not
        answer; 26 the store is throttling; 27 unproven for another reason.
        """
        if self.is_proven:
            return 0
        failures = self.failures
        outcomes = {one.actual for one in failures}
        graver = (
            any(one.verdict is AccessVerdict.EXCESSIVE for one in failures),
            RequestOutcome.WRONG in outcomes,
            any(self._is_refused(one) for one in failures),
            any(one.verdict is AccessVerdict.INSUFFICIENT for one in failures),
            RequestOutcome.NOT_FOUND in outcomes,
            RequestOutcome.UNREACHABLE in outcomes,
            RequestOutcome.THROTTLED in outcomes,
        )
        return 20 + (graver.index(True) if True in graver else len(graver))

    def _is_refused(self, one: Finding) -> bool:
        """Decide whether the store refuses every operation of the credentials."""
        own = [each for each in self.findings if (each.role, each.right) == (one.role, one.right)]
        return all(each.actual is not RequestOutcome.ALLOWED for each in own) and (
            one.actual is RequestOutcome.DENIED and one.operation is Operation.LIST
        )


def audit(settings: AuditSettings) -> AuditReport:
    """Try every operation with every credential, and delete all objects of the audit.

    Args:
        settings: Roles to audit.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    unreachable_endpoints: dict[_Endpoint, str] = {}
    for name, role in settings.roles.items():
        notes += _iterate_notes(name, role, settings.expiry_warning)
        for right, credentials in (
            (Right.READ, role.read_credentials),
            (Right.WRITE, role.write_credentials),
        ):
            if credentials is not None:
                probe = _CredentialProbe(settings, name, right, unreachable_endpoints)
                findings += probe.iterate_findings()
                notes += probe.notes
    return AuditReport(findings=tuple(findings), notes=tuple(notes))


def _iterate_notes(name: str, role: AuditedRole, expiry_warning: timedelta) -> Iterator[str]:
    both = [one for one in (role.read_credentials, role.write_credentials) if one is not None]
    if len(both) == 2 and both[0].access_key_id == both[1].access_key_id:
        yield f"{name}: the credentials to read and to write are one key."
    for right, one in ((Right.READ, role.read_credentials), (Right.WRITE, role.write_credentials)):
        if one is None:
            yield f"{name}: there are no credentials to {right}."
        elif one.expires_at is not None and one.expires_at - datetime.now(UTC) < expiry_warning:
            ended = one.expires_at < datetime.now(UTC)
            when = f"{'ended' if ended else 'end'} at {one.expires_at:%Y-%m-%d %H:%M} UTC"
            yield f"{name}: the credentials to {right} {when}."


_Endpoint = tuple[Backend, str | None, str]
"""Backend, endpoint and account of a store."""


@dataclass(slots=True)
class _CredentialProbe:
    """Probe of one credential with every operation.

    Attributes:
        settings: Settings of the audit.
        role_name: Name of the role.
        right: Right of the credential.
        unreachable_endpoints: Reason why an endpoint does not answer, by the endpoint. All probes
            of an audit share these reasons.
        notes: Notes on the checks of the store, and on objects that could not be deleted.
    """

    settings: AuditSettings
    role_name: str
    right: Right
    unreachable_endpoints: dict[_Endpoint, str]
    notes: list[str] = field(default_factory=list[str])

    def iterate_findings(self) -> Iterator[Finding]:
        """Yield the finding of each operation."""
        role = self.settings.roles[self.role_name]
        store = self._open_role_store(role, self.right)
        nonce = secrets.token_hex(8)
        names = ("existing", "put", "new", "parts")  # R2 allows one write a second to a key
        keys = {name: make_audit_probe_key(role.prefix, nonce, name) for name in names}
        write_store = self._open_role_store(role, Right.WRITE) if role.write_credentials else None
        if why := self._explain_unreachable(store, role):
            for operation in self._make_attempts(store, write_store, keys, has_test_object=False):
                yield self._make_finding(operation, RequestOutcome.UNREACHABLE, why)
            return
        has_test_object = write_store is not None and self._try_create_test_object(
            write_store, keys["existing"]
        )
        attempts = self._make_attempts(store, write_store, keys, has_test_object=has_test_object)
        unavailable: tuple[RequestOutcome, str] | None = None
        try:
            for operation, attempt in attempts.items():
                outcome, message = unavailable or _observe_outcome(attempt)
                if operation is Operation.LIST and outcome in _UNAVAILABLE_OUTCOMES:
                    unavailable = outcome, message  # each further request would fail alike
                yield self._make_finding(operation, outcome, message)
        finally:
            if has_test_object or unavailable is None:
                for key in keys.values():
                    self._delete_test_object(key, *((write_store,) if write_store else ()), store)
            elif write_store is not None:  # the answer to the first write may be lost
                self._delete_test_object(keys["existing"], write_store)

    def _open_role_store(self, role: AuditedRole, right: Right) -> Store:
        credentials = role.read_credentials if right is Right.READ else role.write_credentials
        return self._open_store(role.store.model_copy(update={"credentials": credentials}))

    def _explain_unreachable(self, store: Store, role: AuditedRole) -> str:
        """Return the reason why the endpoint does not answer; empty after any answer."""
        location = store.location
        endpoint = location.backend, store.endpoint, location.account
        if endpoint not in self.unreachable_endpoints:
            timeout = min(_ENDPOINT_TIMEOUT, self.settings.retry_timeout)
            probe_store = open_store(store.spec.model_copy(update={"retry_timeout": timeout}))
            try:
                next(list_objects(probe_store, _make_folder_prefix(role.prefix)), None)
            except errors.MillraceError as error:
                if classify_error(error) is RequestOutcome.UNREACHABLE:
                    where = store.endpoint or store.url
                    self.unreachable_endpoints[endpoint] = (
                        f"{where} does not answer: {errors.format_error(error)}"
                    )
        return self.unreachable_endpoints.get(endpoint, "")

    def _open_store(self, spec: StoreSpec) -> Store:
        return open_store(spec.model_copy(update={"retry_timeout": self.settings.retry_timeout}))

    def _try_create_test_object(self, write_store: Store, key: str) -> bool:
        try:
            put(write_store, key, _BODY)
        except errors.MillraceError:
            return False
        return True

    def _make_attempts(
        self,
        store: Store,
        write_store: Store | None,
        keys: Mapping[str, str],
        *,
        has_test_object: bool,
    ) -> dict[Operation, Callable[[], object]]:
        role = self.settings.roles[self.role_name]

        def require_test_object(call: Callable[[], object]) -> Callable[[], None]:
            def attempt() -> None:
                if not has_test_object:
                    raise _KnownOutcomeError(
                        RequestOutcome.UNKNOWN,
                        "There is no object to try the operation on: none could be written.",
                    )
                call()

            return attempt

        def get_object() -> None:
            if read(store, keys["existing"], max_size=len(_OTHER)) != _BODY:
                raise _KnownOutcomeError(
                    RequestOutcome.WRONG, "The store returns other bytes than were written."
                )

        def overwrite_object() -> None:
            put(store, keys["existing"], _OTHER)

        def delete_object() -> None:
            delete_one(store, keys["existing"])
            if _exists_by_any(keys["existing"], *((write_store,) if write_store else ()), store):
                raise _KnownOutcomeError(
                    RequestOutcome.WRONG,
                    "The store confirms a deletion, and the object is still there.",
                )

        found: dict[Operation, Callable[[], object]] = {
            Operation.LIST: lambda: next(
                list_objects(store, _make_folder_prefix(role.prefix)), None
            ),
            Operation.GET: require_test_object(get_object),
            Operation.HEAD: require_test_object(lambda: head(store, keys["existing"])),
            Operation.PUT: lambda: self._put_object(store, keys["put"]),
            Operation.OVERWRITE: require_test_object(overwrite_object),
            Operation.CREATE: lambda: _check_create_once(store, keys["new"]),
            Operation.MULTIPART: lambda: _upload_multipart(store, keys["parts"]),
        }
        if store.is_s3_compatible:
            found[Operation.ABORT] = lambda: _abort_upload(store, write_store, keys["parts"])
        found[Operation.DELETE] = require_test_object(delete_object)
        for operation, areas in self._find_forbidden_areas(store, role).items():
            found[operation] = partial(self._attempt_access, areas)
        return found

    def _put_object(self, store: Store, key: str) -> None:
        """Write an object; with the right to write, note which checksum the store has checked."""
        if self.right is Right.READ:
            put(store, key, _BODY)
            return
        put(store, key, _LARGE_BODY)
        if check := describe_body_check(store):
            self.notes.append(f"{self.role_name}: {check}")

    def _find_forbidden_areas(
        self, store: Store, role: AuditedRole
    ) -> "dict[Operation, list[_ForbiddenArea]]":
        """Return the areas of other roles and the roots of all buckets, with these credentials.

        An area within the role's own area is not forbidden. A store that takes no key pair of S3
        has no forbidden areas, and is not tried.
        """
        if not store.is_s3_compatible:
            return {}
        areas = [_ForbiddenArea(self._open_bucket_root(store))]
        for other in self.settings.roles.values():
            if urlsplit(other.store.url).scheme not in {Backend.S3, Backend.R2}:
                continue
            there = self._open_store(
                other.store.model_copy(update={"credentials": store.spec.credentials})
            )
            owner = self._open_role_store(other, Right.WRITE) if other.write_credentials else None
            areas.append(_ForbiddenArea(there, other.prefix, owner))
            areas.append(_ForbiddenArea(self._open_bucket_root(there)))
        own_bucket, own_prefix = store.bucket_id, _ForbiddenArea(store, role.prefix).path
        found: dict[object, _ForbiddenArea] = {}
        for area in areas:
            bucket = area.store.bucket_id
            if bucket == own_bucket and area.path.startswith(own_prefix):
                continue
            known = found.get((bucket, area.path))
            if known is None or known.owner is None:
                found[bucket, area.path] = area
        outside = [one for one in found.values() if one.store.bucket_id == own_bucket]
        elsewhere = [one for one in found.values() if one.store.bucket_id != own_bucket]
        both = {Operation.OTHER_BUCKET: elsewhere, Operation.OUTSIDE: outside}
        return {operation: areas for operation, areas in both.items() if areas}

    def _open_bucket_root(self, store: Store) -> Store:
        """Return the store of the whole bucket."""
        return self._open_store(store.spec.model_copy(update={"url": store.bucket_url}))

    def _attempt_access(self, areas: "list[_ForbiddenArea]") -> None:
        """Write, list, delete and read in forbidden areas; raise the error of a refusal.

        A denial is raised only if all requests were denied: another error proves nothing.

        Raises:
            _KnownOutcomeError: A request succeeds, or cannot be tried.
        """
        refusals: list[Exception] = []
        for area in areas:
            key = make_audit_probe_key(area.prefix, secrets.token_hex(8), "outside")
            of_area: list[Exception] = []
            for attempt in self._iterate_forbidden_attempts(area, key, of_area):
                try:
                    attempt()
                except (errors.MillraceError, _KnownOutcomeError) as error:
                    of_area.append(error)
                else:
                    self._delete_test_object(
                        key, area.store, *((area.owner,) if area.owner else ())
                    )
                    raise _KnownOutcomeError(
                        RequestOutcome.ALLOWED, f"The credentials reach {area.url}."
                    )
            refusals += of_area
        unproven = (one for one in refusals if not isinstance(one, errors.DeniedError))
        if refusals:
            raise next(unproven, refusals[0])

    def _iterate_forbidden_attempts(
        self, area: "_ForbiddenArea", key: str, refusals: Sequence[Exception]
    ) -> Iterator[Callable[[], object]]:
        """Yield the requests that must be refused.

        Args:
            area: Area that must not be reached.
            key: Key of no object.
            refusals: Errors of the requests that were yielded before.
        """
        store = area.store
        yield lambda: put(store, key, _BODY)
        yield lambda: next(list_objects(store, _make_folder_prefix(area.prefix)), None)
        # Without a bucket, the deletion of a missing object succeeds, and proves nothing.
        if not any(isinstance(error, errors.NotFoundError) for error in refusals):
            yield lambda: delete_one(store, key)
        if area.owner is not None:
            yield lambda: self._read_object_of_owner(area)

    def _read_object_of_owner(self, area: "_ForbiddenArea") -> None:
        """Read an object that the owner of the area creates. Absent objects prove nothing."""
        assert area.owner is not None
        key = make_audit_probe_key(area.prefix, secrets.token_hex(8), "owned")
        try:
            if not self._try_create_test_object(area.owner, key):
                raise _KnownOutcomeError(
                    RequestOutcome.UNKNOWN,
                    f"Reading in {area.url} was not tried: its own credentials could not write "
                    "an object.",
                )
            read(area.store, key, max_size=len(_BODY))
        finally:
            self._delete_test_object(key, area.owner, area.store)

    def _make_finding(self, operation: Operation, actual: RequestOutcome, message: str) -> Finding:
        is_allowed = operation in READ_OPERATIONS or (
            self.right is Right.WRITE and operation not in _FORBIDDEN_OPERATIONS
        )
        expected = RequestOutcome.ALLOWED if is_allowed else RequestOutcome.DENIED
        match actual:
            case _ if actual is expected:
                verdict, message = AccessVerdict.CORRECT, ""
            case RequestOutcome.ALLOWED:
                verdict = AccessVerdict.EXCESSIVE
            case RequestOutcome.DENIED:
                verdict = AccessVerdict.INSUFFICIENT
            case _:
                verdict = AccessVerdict.UNPROVEN
        return Finding(
            role=self.role_name,
            right=self.right,
            operation=operation,
            expected=expected,
            actual=actual,
            verdict=verdict,
            message=message,
        )

    def _delete_test_object(self, key: str, *stores: Store) -> None:
        """Delete an object that the probe may have left, or note that the object stays."""
        for store in stores:
            with suppress(errors.MillraceError):
                delete_one(store, key)
                return
        url, is_unknown = stores[0].make_url(key), False
        for store in stores:
            try:
                if exists(store, key):
                    self.notes.append(f"{url} could not be deleted: delete it by hand.")
            except errors.MillraceError as error:
                is_unknown = is_unknown or isinstance(error, errors.UnavailableError)
            else:
                return
        if is_unknown:
            self.notes.append(
                f"{url} may remain, as the store does not answer: look for it later, and delete "
                "it by hand."
            )


@dataclass(frozen=True, slots=True)
class _ForbiddenArea:
    """Part of a bucket that the tried credentials must not reach.

    Attributes:
        store: Store, opened with the tried credentials.
        prefix: Prefix of the area in the store; empty for the whole store.
        owner: The same store with the write credentials of the area's role; None without them.
    """

    store: Store
    prefix: str = ""
    owner: Store | None = None

    @property
    def path(self) -> str:
        """Prefix of the area's keys in the bucket, with a slash at its end; empty for its root."""
        return _make_folder_prefix(make_full_key(self.store, self.prefix).strip("/"))

    @property
    def url(self) -> str:
        """URL of the area."""
        return self.store.make_url(self.prefix) if self.prefix else self.store.url


class _KnownOutcomeError(Exception):
    """The probe has decided the outcome, not an answer of the store."""

    def __init__(self, outcome: RequestOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def _observe_outcome(attempt: Callable[[], object]) -> tuple[RequestOutcome, str]:
    try:
        attempt()
    except _KnownOutcomeError as known:
        return known.outcome, str(known)
    except errors.MillraceError as error:
        return classify_error(error), str(error)
    return RequestOutcome.ALLOWED, "The operation is allowed."


def _exists_by_any(key: str, *stores: Store) -> bool:
    """Decide whether an object exists, with the first credentials that may find out.

    Raises:
        _KnownOutcomeError: No credentials may find out.
    """
    for store in stores:
        with suppress(errors.MillraceError):
            return exists(store, key)
    raise _KnownOutcomeError(
        RequestOutcome.UNKNOWN,
        "The store confirms a deletion, and no credentials may look whether the object is gone.",
    )


def _check_create_once(store: Store, key: str) -> None:
    # If the object exists, an earlier try has created it, and its answer was lost.
    with suppress(errors.ExistsError):
        create(store, key, _BODY)
    try:
        create(store, key, _OTHER)
    except errors.ExistsError:
        return
    raise _KnownOutcomeError(
        RequestOutcome.WRONG,
        "The store replaces an existing object in a create: do not share this store.",
    )


def _upload_multipart(store: Store, key: str) -> None:
    if not store.is_s3_compatible:
        with open_writer(store, key) as writer:
            writer.write(_BODY)
        return
    upload = _begin_upload(store, key)
    try:
        part = _call_object_method(
            store, key, "upload_part", UploadId=upload, PartNumber=1, Body=_BODY
        )
        parts = {"Parts": [{"ETag": _read_answer(part, "ETag"), "PartNumber": 1}]}
        _call_object_method(
            store, key, "complete_multipart_upload", UploadId=upload, MultipartUpload=parts
        )
    except (errors.MillraceError, _KnownOutcomeError):
        with suppress(errors.MillraceError):
            _call_object_method(store, key, "abort_multipart_upload", UploadId=upload)
        raise


def _begin_upload(store: Store, key: str) -> str:
    return _read_answer(_call_object_method(store, key, "create_multipart_upload"), "UploadId")


def _read_answer(answer: Any, name: str) -> str:
    """Return a value of an answer.

    Raises:
        _KnownOutcomeError: The answer does not have it.
    """
    if name not in answer:
        raise _KnownOutcomeError(
            RequestOutcome.WRONG,
            f"The store answers a request of a multipart upload without {name}: it is not "
            "compatible with S3.",
        )
    return answer[name]


def _abort_upload(store: Store, write_store: Store | None, key: str) -> None:
    """Abort an upload that the writing credentials began."""
    owner = write_store or store
    try:
        upload = _begin_upload(owner, key)
    except errors.DeniedError as error:
        if owner is store:
            raise
        raise _KnownOutcomeError(
            RequestOutcome.UNKNOWN, "The operation was not tried: no upload could be begun."
        ) from error
    try:
        _call_object_method(store, key, "abort_multipart_upload", UploadId=upload)
    except errors.MillraceError:
        with suppress(errors.MillraceError):
            _call_object_method(owner, key, "abort_multipart_upload", UploadId=upload)
        raise


def _call_object_method(store: Store, key: str, method: str, **more: object) -> Any:
    """Make a request for one object by boto3, and return the answer."""
    object_arguments = {"Bucket": store.location.bucket, "Key": make_full_key(store, key)}
    return call_boto3(
        store, key, lambda client: getattr(client, method)(**object_arguments, **more)
    )


def _make_folder_prefix(prefix: str) -> str:
    return f"{prefix}/" if prefix else ""
