"""Prove what each credential can do: all that its role needs, and nothing else.

Each operation is done, on objects with a nonce in their names that are removed again; asking for
permissions would be faster, and proves less. What is not known is no yes.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace import errors
from millrace.keys import audit_probe_key
from millrace.settings import Duration
from millrace.storage import (
    Answer,
    Backend,
    Credentials,
    Right,
    Store,
    StoreSpec,
    answer_of,
    create,
    delete_one,
    exists,
    head,
    list_objects,
    open_store,
    open_writer,
    put,
    read,
    with_boto3,
)
from millrace.storage.clients import full_key

_BODY, _OTHER = b"audit", b"audited"
_SILENT = {Answer.NOT_FOUND, Answer.THROTTLED, Answer.UNREACHABLE}
_REACHED_WITHIN = timedelta(seconds=5)


class Operation(StrEnum):
    """Operation that credentials are tried with."""

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


READING = frozenset({Operation.LIST, Operation.GET, Operation.HEAD})
"""What credentials to read are for; those to write are for the rest too, but for the last two."""
_NOBODY = frozenset({Operation.OTHER_BUCKET, Operation.OUTSIDE})


class AccessVerdict(StrEnum):
    """Verdict on an operation."""

    RIGHT = "right"
    LACKING = "lacking"  # it cannot do what it must
    EXCESS = "excess"  # it can do what it must not
    UNPROVEN = "unproven"  # nobody knows, which is no yes


class AuditedRole(BaseModel):
    """A place, and who may do what there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec = Field(
        description="Location of the bucket; its own credentials are not used."
    )
    scope: str = Field(
        default="",
        description="The prefix below it that the credentials are for; left out, all of it.",
    )
    read: Credentials | None = Field(
        default=None, description="Credentials that are to read there."
    )
    write: Credentials | None = Field(
        default=None, description="Credentials that are to write there."
    )


class AuditSettings(BaseModel):
    """Settings of an audit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    roles: dict[str, AuditedRole] = Field(min_length=1, description="Roles by their names.")
    patience: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="Longest time that each request is tried.",
    )
    ending: Duration = Field(
        default=timedelta(days=1),
        description="Warn of temporary credentials that end sooner than this.",
    )

    @model_validator(mode="after")
    def _has_credentials(self) -> Self:
        if not any(role.read or role.write for role in self.roles.values()):
            raise ValueError("no role has credentials: give some to read, or to write")
        return self


class Finding(BaseModel):
    """Result of one operation.

    Attributes:
        role: Whose credentials.
        right: Which of them.
        operation: What was tried.
        expected: `Answer.ALLOWED` or `Answer.DENIED`.
        seen: What the store said.
        verdict: What is made of it.
        sentence: What the store said, in a sentence; empty where it did as expected.
    """

    model_config = ConfigDict(frozen=True)

    role: str
    right: Right
    operation: Operation
    expected: Answer
    seen: Answer
    verdict: AccessVerdict
    sentence: str = ""


class AuditReport(BaseModel):
    """Result of an audit.

    Attributes:
        findings: Of every role, credential and operation.
        notes: What else a person should know.
    """

    model_config = ConfigDict(frozen=True)

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """Findings that are not as they should be, or are not known."""
        return tuple(one for one in self.findings if one.verdict is not AccessVerdict.RIGHT)

    @property
    def proven(self) -> bool:
        """True if every credential can do what it must, and nothing else."""
        return bool(self.findings) and not self.wrong

    @property
    def exit_code(self) -> int:
        """Exit code of `millrace audit`: the gravest finding's.

        0 proven; 20 somebody can do what he must not; 21 a store does not do what it says; 22
        credentials are refused wholly, 23 in part; 24 no such bucket; 25 it does not answer; 26 it
        asks to come later; 27 unproven for another reason.
        """
        if self.proven:
            return 0
        wrong = self.wrong
        seen = {one.seen for one in wrong}
        graver = (
            any(one.verdict is AccessVerdict.EXCESS for one in wrong),
            Answer.WRONG in seen,
            any(self._refused(one) for one in wrong),
            any(one.verdict is AccessVerdict.LACKING for one in wrong),
            Answer.NOT_FOUND in seen,
            Answer.UNREACHABLE in seen,
            Answer.THROTTLED in seen,
        )
        return 20 + (graver.index(True) if True in graver else len(graver))

    def _refused(self, one: Finding) -> bool:
        """Tell whether the store refuses the credentials altogether."""
        its = [each for each in self.findings if (each.role, each.right) == (one.role, one.right)]
        return all(each.seen is not Answer.ALLOWED for each in its) and (
            one.seen is Answer.DENIED and one.operation is Operation.LIST
        )


def audit(settings: AuditSettings) -> AuditReport:
    """Try every operation with every credential, and leave nothing behind.

    Args:
        settings: What is audited.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    dead: dict[_Endpoint, str] = {}
    for name, role in settings.roles.items():
        notes += _notes(name, role, settings.ending)
        for right, credentials in ((Right.READ, role.read), (Right.WRITE, role.write)):
            if credentials is not None:
                trial = _Trial(settings, name, right, dead)
                findings += trial.findings()
                notes += trial.left
    return AuditReport(findings=tuple(findings), notes=tuple(notes))


def _notes(name: str, role: AuditedRole, ending: timedelta) -> Iterator[str]:
    both = [one for one in (role.read, role.write) if one is not None]
    if len(both) == 2 and both[0].access_key_id == both[1].access_key_id:
        yield f"{name}: the credentials to read and to write are one key."
    for right, one in ((Right.READ, role.read), (Right.WRITE, role.write)):
        if one is None:
            yield f"{name}: there are no credentials to {right}."
        elif one.expires is not None and one.expires - datetime.now(UTC) < ending:
            ended = one.expires < datetime.now(UTC)
            when = "ended" if ended else "end"
            yield f"{name}: the credentials to {right} {when} at {one.expires:%Y-%m-%d %H:%M} UTC."


_Endpoint = tuple[Backend, str | None, str]
"""Backend, endpoint and account of a store."""


@dataclass(slots=True)
class _Trial:
    """One credential, tried with everything.

    Attributes:
        settings: Of the audit.
        name: Of the role.
        right: Of the credential.
        dead: Endpoints that do not answer, each with why: shared by all trials of an audit.
        left: Notes on objects that could not be removed.
    """

    settings: AuditSettings
    name: str
    right: Right
    dead: dict[_Endpoint, str]
    left: list[str] = field(default_factory=list[str])

    def findings(self) -> Iterator[Finding]:
        """Yield the finding of each operation."""
        role = self.settings.roles[self.name]
        store = self._store(role, self.right)
        nonce = secrets.token_hex(8)
        names = ("planted", "put", "new", "parts")  # R2 takes one write a second to each
        keys = {name: audit_probe_key(role.scope, nonce, name) for name in names}
        planter = self._store(role, Right.WRITE) if role.write else None
        if why := self._unreachable(store, role):
            for operation in self._tried(store, planter, keys, planted=False):
                yield self._judged(operation, Answer.UNREACHABLE, why)
            return
        planted = planter is not None and self._planted(planter, keys["planted"])
        tried = self._tried(store, planter, keys, planted=planted)
        silent: tuple[Answer, str] | None = None
        try:
            for operation, attempt in tried.items():
                seen, sentence = silent or _seen(attempt)
                if operation is Operation.LIST and seen in _SILENT:
                    silent = seen, sentence  # it would say the same each time
                yield self._judged(operation, seen, sentence)
        finally:
            if planted or silent is None:  # else nothing of it can be there
                for key in keys.values():
                    self._remove(key, *((planter,) if planter else ()), store)

    def _store(self, role: AuditedRole, right: Right) -> Store:
        credentials = role.read if right is Right.READ else role.write
        return self._opened(role.store.model_copy(update={"credentials": credentials}))

    def _unreachable(self, store: Store, role: AuditedRole) -> str:
        """Return why the store's endpoint does not answer; empty if it does, whatever it says."""
        place = store.location
        endpoint = place.backend, store.endpoint, place.account
        if endpoint not in self.dead:
            patience = min(_REACHED_WITHIN, self.settings.patience)
            hurried = open_store(store.spec.model_copy(update={"patience": patience}))
            try:
                next(list_objects(hurried, _folder(role.scope)), None)
            except errors.MillraceError as error:
                if answer_of(error) is Answer.UNREACHABLE:
                    where = store.endpoint or store.url
                    self.dead[endpoint] = f"{where} does not answer: {errors.one_line(error)}"
        return self.dead.get(endpoint, "")

    def _opened(self, spec: StoreSpec) -> Store:
        return open_store(spec.model_copy(update={"patience": self.settings.patience}))

    def _planted(self, planter: Store, key: str) -> bool:
        try:
            put(planter, key, _BODY)
        except errors.MillraceError:
            return False
        return True

    def _tried(
        self, store: Store, planter: Store | None, keys: Mapping[str, str], *, planted: bool
    ) -> dict[Operation, Callable[[], object]]:
        role = self.settings.roles[self.name]

        def on_planted(call: Callable[[], object]) -> Callable[[], None]:
            def attempt() -> None:
                if not planted:
                    raise _SaidError(
                        Answer.UNKNOWN, "There is no object to try it on: none could be written."
                    )
                call()

            return attempt

        def get() -> None:
            if read(store, keys["planted"], largest=len(_OTHER)) != _BODY:
                raise _SaidError(Answer.WRONG, "It gives back something else than it was given.")

        def overwrite() -> None:
            put(store, keys["planted"], _OTHER)

        def remove() -> None:
            delete_one(store, keys["planted"])
            if exists(planter or store, keys["planted"]):
                raise _SaidError(Answer.WRONG, "It says that an object is deleted, and it is not.")

        found: dict[Operation, Callable[[], object]] = {
            Operation.LIST: lambda: next(list_objects(store, _folder(role.scope)), None),
            Operation.GET: on_planted(get),
            Operation.HEAD: on_planted(lambda: head(store, keys["planted"])),
            Operation.PUT: lambda: put(store, keys["put"], _BODY),
            Operation.OVERWRITE: on_planted(overwrite),
            Operation.CREATE: lambda: _created_once(store, keys["new"]),
            Operation.MULTIPART: lambda: _multipart(store, keys["parts"]),
        }
        if store.speaks_s3:
            found[Operation.ABORT] = lambda: _aborted(store, planter, keys["parts"])
        found[Operation.DELETE] = on_planted(remove)
        others = list(self._others(store))
        if others:
            found[Operation.OTHER_BUCKET] = lambda: self._reached(others)
        if role.scope or store.location.prefix:
            found[Operation.OUTSIDE] = lambda: self._reached([self._root(store)])
        return found

    def _others(self, store: Store) -> Iterator[Store]:
        """Try the buckets of other roles with these credentials."""
        known = {_bucket(store)}
        for role in self.settings.roles.values():
            update = {"credentials": store.spec.credentials}
            other = self._root(self._opened(role.store.model_copy(update=update)))
            if _bucket(other) not in known:
                known.add(_bucket(other))
                yield other

    def _root(self, store: Store) -> Store:
        """All of a store's bucket."""
        below = f"/{store.location.prefix}" if store.location.prefix else ""
        url = store.url.removesuffix(below)
        return self._opened(store.spec.model_copy(update={"url": url}))

    def _reached(self, stores: list[Store]) -> None:
        """Try to list and to write where nobody should; the first that says no is raised."""
        refused: errors.MillraceError | None = None
        for store in stores:
            key = audit_probe_key("", secrets.token_hex(8), "outside")
            for attempt in (
                lambda store=store, key=key: put(store, key, _BODY),
                lambda store=store: next(list_objects(store, ""), None),
            ):
                try:
                    attempt()
                except errors.MillraceError as error:
                    refused = refused or error
                else:
                    self._remove(key, store)
                    raise _SaidError(Answer.ALLOWED, f"It reaches {store.url}.")
        if refused is not None:
            raise refused

    def _judged(self, operation: Operation, seen: Answer, sentence: str) -> Finding:
        mine = operation in READING or (self.right is Right.WRITE and operation not in _NOBODY)
        expected = Answer.ALLOWED if mine else Answer.DENIED
        match seen:
            case _ if seen is expected:
                verdict, sentence = AccessVerdict.RIGHT, ""
            case Answer.ALLOWED:
                verdict = AccessVerdict.EXCESS
            case Answer.DENIED:
                verdict = AccessVerdict.LACKING
            case _:
                verdict = AccessVerdict.UNPROVEN
        return Finding(
            role=self.name,
            right=self.right,
            operation=operation,
            expected=expected,
            seen=seen,
            verdict=verdict,
            sentence=sentence,
        )

    def _remove(self, key: str, *stores: Store) -> None:
        """Remove what a trial may have left, by whoever can; say what stays."""
        for store in stores:
            with suppress(errors.MillraceError):
                delete_one(store, key)
                return
        for store in stores:
            with suppress(errors.MillraceError):
                if exists(store, key):
                    self.left.append(f"{store.url_of(key)} stays behind: delete it by hand.")
                return


class _SaidError(Exception):
    """Verdict that is already known, whatever the store has said."""

    def __init__(self, answer: Answer, sentence: str) -> None:
        super().__init__(sentence)
        self.answer = answer


def _seen(attempt: Callable[[], object]) -> tuple[Answer, str]:
    try:
        attempt()
    except _SaidError as said:
        return said.answer, str(said)
    except errors.MillraceError as error:
        return answer_of(error), str(error)
    return Answer.ALLOWED, "It is allowed."


def _created_once(store: Store, key: str) -> None:
    create(store, key, _BODY)
    try:
        create(store, key, _OTHER)
    except errors.ExistsError:
        return
    raise _SaidError(
        Answer.WRONG, "It creates an object that is there already: do not let two work on it."
    )


def _multipart(store: Store, key: str) -> None:
    if not store.speaks_s3:
        with open_writer(store, key) as writer:
            writer.write(_BODY)
        return
    upload = _asked(store, key, "create_multipart_upload")["UploadId"]
    try:
        part = _asked(store, key, "upload_part", UploadId=upload, PartNumber=1, Body=_BODY)
        parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
        _asked(store, key, "complete_multipart_upload", UploadId=upload, MultipartUpload=parts)
    except errors.MillraceError:
        with suppress(errors.MillraceError):
            _asked(store, key, "abort_multipart_upload", UploadId=upload)
        raise


def _aborted(store: Store, planter: Store | None, key: str) -> None:
    """Abort an upload that whoever may write has begun."""
    owner = planter or store
    try:
        upload = _asked(owner, key, "create_multipart_upload")["UploadId"]
    except errors.DeniedError as error:
        if owner is store:
            raise
        raise _SaidError(
            Answer.UNKNOWN, "There is no upload to try it on: none could be begun."
        ) from error
    try:
        _asked(store, key, "abort_multipart_upload", UploadId=upload)
    except errors.MillraceError:
        with suppress(errors.MillraceError):
            _asked(owner, key, "abort_multipart_upload", UploadId=upload)
        raise


def _asked(store: Store, key: str, method: str, **more: object) -> Any:
    """Return the answer of boto3 to a request about one object."""
    place = {"Bucket": store.location.bucket, "Key": full_key(store, key)}
    return with_boto3(store, key, lambda client: getattr(client, method)(**place, **more))


def _bucket(store: Store) -> tuple[Backend, str | None, str, str]:
    place = store.location
    return place.backend, store.endpoint, place.account, place.bucket


def _folder(scope: str) -> str:
    return f"{scope}/" if scope else ""
