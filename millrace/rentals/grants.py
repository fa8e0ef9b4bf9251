"""Locations that a machine may use, and its temporary credentials for them.

R2 and S3 give credentials that last until the machine's deadline, also if the machine is released
before. Tokens of Google end within an hour, so `GoogleTokenRenewer` writes new ones into objects
which the machine reads by signed URLs. Only the machine has the key that these objects are
encrypted with, and its owner, who derives it.
"""

import base64
import hmac
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from pydantic import SecretStr

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.rentals.ledger import Attempt
from millrace.rentals.settings import RentalSettings, VastAccount
from millrace.storage import (
    Backend,
    Right,
    Store,
    StoreSpec,
    open_scoped_store,
    open_store,
    put,
    sign_url,
)
from millrace.storage.google_tokens import AccessToken, TokenSource, seal_token

_RENEWAL_INTERVAL = 15 * 60.0  # seconds; tokens last an hour
_RETRY_INTERVAL = 60.0  # seconds after a failure
_PUT_TIMEOUT = timedelta(seconds=30)

_log = logging.getLogger(__name__)


class GrantKind(StrEnum):
    """Purpose of a machine's credentials."""

    REPORTS = "reports"
    """The machine's own folder."""
    READ = "read"
    WRITE = "write"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class MachineGrant:
    """Prefixes of a store that a machine may use.

    Attributes:
        store: Store, with credentials of the owner.
        prefixes: Prefixes below the URL of the store.
        access: Right of the machine.
    """

    store: Store
    prefixes: tuple[str, ...]
    access: Right

    @property
    def needs_token(self) -> bool:
        """True if the machine gets tokens that the owner renews."""
        return self.store.location.backend is Backend.GS


def list_grants(
    store: Store, settings: RentalSettings, attempt: Attempt
) -> dict[GrantKind, MachineGrant]:
    """Return the locations that a machine may use.

    Args:
        store: Store of the ledger.
        settings: Settings of the rental.
        attempt: Attempt to rent the machine.

    Raises:
        ConfigurationError: The source is a whole bucket, or cannot be opened.
    """
    machine = RentalKeys(settings.name).make_machine_prefix(attempt.number)
    grants = {GrantKind.REPORTS: MachineGrant(store, (machine,), Right.WRITE)}
    for kind, access in ((GrantKind.READ, Right.READ), (GrantKind.WRITE, Right.WRITE)):
        prefixes = tuple(
            expand_slot(grant.prefix, attempt.intent.slot, settings.machines)
            for grant in settings.storage_grants
            if grant.access is access
        )
        if prefixes:
            grants[kind] = MachineGrant(store, prefixes, access)
    if settings.source is not None and _needs_credentials(settings.source):
        grants[GrantKind.SOURCE] = _make_source_grant(settings.source)
    return grants


def _needs_credentials(source: StoreSpec) -> bool:
    return source.credentials is not None or source.url.startswith("gs://")


def _make_source_grant(source: StoreSpec) -> MachineGrant:
    """Return the grant of a rental's source that is in a bucket.

    Raises:
        ConfigurationError: The source is a whole bucket.
    """
    store = open_store(source, make_folder=False)
    prefix = store.location.prefix
    if not prefix:
        raise errors.ConfigurationError(
            f"The source {store.url} is a whole bucket, and rented machines get credentials for a "
            "prefix only: move the files below a prefix."
        )
    root = source.model_copy(update={"url": store.bucket_url})
    return MachineGrant(open_store(root, make_folder=False), (f"{prefix}/",), Right.READ)


def scope_grants(
    ledger: Store, settings: RentalSettings, attempt: Attempt, ttl: timedelta
) -> dict[GrantKind, StoreSpec]:
    """Return the stores of a machine's grants, each with temporary credentials.

    Args:
        ledger: Store of the ledger.
        settings: Settings of the rental.
        attempt: Attempt to rent the machine.
        ttl: Lifetime of the credentials.

    Raises:
        ConfigurationError: A store cannot grant a machine access.
        DeniedError: STS refuses the request.
    """
    key = derive_token_key(settings.account, settings.name, attempt.number)
    keys = MachineKeys(RentalKeys(settings.name).make_machine_prefix(attempt.number))
    scoped: dict[GrantKind, StoreSpec] = {}
    for kind, grant in list_grants(ledger, settings, attempt).items():
        if grant.needs_token:
            url = sign_object_url(ledger, keys.make_token_key(kind), ttl, Right.READ)
            spec = grant.store.spec
            _refuse_options(grant.store, has_options=bool(spec.ca_file))
            source = TokenSource(url=SecretStr(url), key=key)
            scoped[kind] = StoreSpec(url=spec.url, endpoint=spec.endpoint, google_token=source)
        else:
            scoped[kind] = _scope_store(grant, ttl, settings.role_arn)
    return scoped


def _scope_store(grant: MachineGrant, ttl: timedelta, role_arn: str | None) -> StoreSpec:
    """Return the store of a grant with credentials for its prefixes."""
    store, spec = grant.store, grant.store.spec
    if store.location.backend is Backend.FILE:
        return StoreSpec(url=store.url)
    _refuse_options(store, has_options=bool(spec.options or spec.ca_file))
    credentials = open_scoped_store(
        store, grant.prefixes, ttl, access=grant.access, role_arn=role_arn
    ).spec.credentials
    return StoreSpec(
        url=spec.url, endpoint=spec.endpoint, region=spec.region, account_id=spec.account_id,
        credentials=credentials,
    )  # fmt: skip


def _refuse_options(store: Store, *, has_options: bool) -> None:
    if has_options:
        raise errors.ConfigurationError(
            f"{store.url} is opened with options or a ca_file, which rented machines do not "
            "receive: use a store that needs neither."
        )


def sign_object_url(store: Store, key: str, ttl: timedelta, access: Right) -> str:
    """Return a URL of an object for a machine; in a folder, that of its file."""
    if store.location.backend is Backend.FILE:
        return store.make_url(key)
    return sign_url(store, key, ttl, access=access)


def expand_slot(text: str, slot: int, slots: int) -> str:
    """Fill in the number of a machine's slot, and that of all slots."""
    return text.replace("{slot}", str(slot)).replace("{slots}", str(slots))


def derive_token_key(account: VastAccount, rental: str, attempt: int) -> SecretStr:
    """Return the key that the tokens of a machine are encrypted with.

    The key is derived from the account's API key, so that the next owner has the same one.

    Args:
        account: Account that pays.
        rental: Name of the rental.
        attempt: Number of the attempt.
    """
    key = account.api_key.get_secret_value().encode()
    digest = hmac.digest(key, f"tokens {attempt} of {rental}".encode(), "sha256")
    return SecretStr(base64.urlsafe_b64encode(digest).decode())


def publish_tokens(ledger: Store, settings: RentalSettings, attempts: Iterable[Attempt]) -> None:
    """Write new tokens of Google for machines. Nothing happens for machines that need none.

    Args:
        ledger: Store of the ledger.
        settings: Settings of the rental.
        attempts: Attempts to rent the machines.

    Raises:
        ConfigurationError: The extra ``gcs`` is not installed, or Google's credentials cannot be
            read.
        DeniedError: Google refuses the credentials.
        UnavailableError: Google or the store does not answer.
    """
    ledger = ledger.with_retry_timeout(_PUT_TIMEOUT)
    made: dict[tuple[str, tuple[str, ...], Right], AccessToken] = {}
    for attempt in attempts:
        keys = MachineKeys(RentalKeys(settings.name).make_machine_prefix(attempt.number))
        secret = derive_token_key(settings.account, settings.name, attempt.number)
        for kind, grant in list_grants(ledger, settings, attempt).items():
            if not grant.needs_token:
                continue
            what = (grant.store.url, grant.prefixes, grant.access)
            if what not in made:
                made[what] = _make_token(grant)
            put(ledger, keys.make_token_key(kind), seal_token(made[what], secret))


def _make_token(grant: MachineGrant) -> AccessToken:
    try:
        from millrace.storage.google_credentials import make_scoped_token  # noqa: PLC0415 - extra
    except ImportError:
        raise errors.ConfigurationError(
            f"Rented machines get tokens of Google for {grant.store.url}, which needs google-auth: "
            "pip install 'millrace[gcs]'."
        ) from None
    return make_scoped_token(grant.store, grant.prefixes, access=grant.access)


class GoogleTokenRenewer:
    """Thread that renews the tokens of all machines of a rental, if they have any.

    Args:
        ledger: Store of the ledger.
        settings: Settings of the rental.
        list_attempts: Function that returns the attempts whose machines may run.
    """

    def __init__(
        self,
        ledger: Store,
        settings: RentalSettings,
        list_attempts: Callable[[], Iterable[Attempt]],
    ) -> None:
        self._ledger, self._settings, self._list_attempts = ledger, settings, list_attempts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="google-tokens", daemon=True)

    def __enter__(self) -> "GoogleTokenRenewer":
        """Start the thread, if the machines have tokens."""
        if needs_tokens(self._settings):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_PUT_TIMEOUT.total_seconds())

    def renew(self) -> bool:
        """Write new tokens; return whether all machines have them. A failure is logged."""
        try:
            publish_tokens(self._ledger, self._settings, self._list_attempts())
        except errors.MillraceError as error:
            _log.warning(
                "The tokens of the machines of %s were not renewed, and end within an hour: %s",
                self._settings.name,
                errors.format_error(error),
            )
            return False
        return True

    def _run(self) -> None:
        interval = 0.0  # the machines of an earlier owner may have old tokens
        while not self._stop.wait(interval):
            interval = _RENEWAL_INTERVAL if self.renew() else _RETRY_INTERVAL


def needs_tokens(settings: RentalSettings) -> bool:
    """Decide whether the machines of a rental get tokens of Google."""
    stores = [settings.store] + ([settings.source] if settings.source else [])
    return any(one.url.startswith("gs://") for one in stores)
