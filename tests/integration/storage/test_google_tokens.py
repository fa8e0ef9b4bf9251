"""Tokens of Google with fewer rights, on a stand-in that checks tokens and signatures."""

import base64
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.storage import (
    Right,
    Store,
    StoreSpec,
    delete,
    delete_one,
    list_objects,
    open_store,
    put,
    read,
    sign_url,
)
from millrace.storage.google_credentials import make_scoped_token
from millrace.storage.google_tokens import AccessToken, TokenReader, TokenSource, seal_token
from millrace.testing.gcs import GCSServer

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GCSServer]:
    """A Cloud Storage that asks for tokens."""
    with GCSServer.start(tmp_path_factory.mktemp("google")) as server:
        yield server


@pytest.fixture(scope="module")
def account(google: GCSServer) -> str:
    """Key of a service account."""
    return google.create_service_account()


@pytest.fixture
def owned(google: GCSServer, account: str) -> Store:
    """A part of the bucket, opened with the key."""
    return open_store(
        StoreSpec(
            url=f"gs://bucket/{secrets.token_hex(4)}",
            endpoint=google.endpoint,
            options={"service_account_key": SecretStr(account)},
            retry_timeout=timedelta(seconds=5),
        )
    )


def make_cipher_key() -> SecretStr:
    return SecretStr(base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())


def publish(owned: Store, prefixes: list[str], access: Right, name: str = "token") -> TokenSource:
    """Publish a token as the owner does."""
    key = make_cipher_key()
    put(owned, name, seal_token(make_scoped_token(owned, prefixes, access=access), key))
    return TokenSource(url=SecretStr(sign_url(owned, name, HOUR)), key=key)


def open_with(owned: Store, source: TokenSource, url: str = "") -> Store:
    """Open the same part of the bucket as somebody who has only the token."""
    return open_store(
        StoreSpec(
            url=url or owned.url,
            endpoint=owned.spec.endpoint,
            google_token=source,
            retry_timeout=timedelta(seconds=2),
        )
    )


@pytest.mark.parametrize("prefix", ["data/", "it's/\\odd/", "ünï/"])
def test_a_token_is_for_its_prefixes_and_its_right(owned: Store, prefix: str) -> None:
    put(owned, f"{prefix}x", b"bytes")
    put(owned, "beside", b"other")
    reader = open_with(owned, publish(owned, [prefix], Right.READ))
    assert read(reader, f"{prefix}x", max_size=10) == b"bytes"
    assert [one.key for one in list_objects(reader, prefix)] == [f"{prefix}x"]
    writer = open_with(owned, publish(owned, ["other/", prefix], Right.WRITE))
    put(writer, f"{prefix}y", b"more")
    put(writer, f"{prefix}y", b"again")
    put(writer, "other/z", b"z")
    delete(writer, [f"{prefix}x"])
    assert [one.key for one in list_objects(writer, prefix)] == [f"{prefix}y"]
    above = open_with(owned, publish(owned, [prefix], Right.WRITE), "gs://bucket")
    for refused in (
        lambda: put(reader, f"{prefix}x", b""),
        lambda: read(reader, "beside", max_size=10),
        lambda: list(list_objects(reader)),
        lambda: put(writer, "beside", b""),
        lambda: delete_one(writer, "beside"),
        lambda: read(writer, "token", max_size=10_000),
        lambda: put(above, f"{prefix}x", b""),
        lambda: list(list_objects(above)),
    ):
        with pytest.raises(errors.DeniedError):
            refused()
    assert read(owned, "beside", max_size=10) == b"other"


def test_a_published_token_is_encrypted_and_the_next_one_is_read_before_its_end(
    owned: Store, google: GCSServer
) -> None:
    put(owned, "data/x", b"bytes")
    google.configure_tokens(lifetime=300)  # less than the margin: each request looks for the next
    source = publish(owned, ["data/"], Right.READ)
    assert b"ya29" not in read(owned, "token", max_size=10_000)
    store = open_with(owned, source)
    assert read(store, "data/x", max_size=10) == b"bytes"
    google.configure_tokens(revoke=True)
    with pytest.raises(errors.DeniedError):
        read(store, "data/x", max_size=10)
    token = make_scoped_token(owned, ["data/"])
    put(owned, "token", seal_token(token, source.key))
    assert read(store, "data/x", max_size=10) == b"bytes"
    delete(owned, ["token"])
    assert read(store, "data/x", max_size=10) == b"bytes"  # the last one has not ended
    with pytest.raises(errors.UnavailableError, match=r"no valid access token of Google \(.*404"):
        read(open_with(owned, source), "data/x", max_size=10)


def test_a_token_that_was_there_late_is_read_by_the_same_request(
    owned: Store, google: GCSServer
) -> None:
    put(owned, "data/x", b"bytes")
    source = publish(owned, ["data/"], Right.READ)
    token = read(owned, "token", max_size=10_000)
    delete(owned, ["token"])
    asked: list[int] = []

    def look(_: float) -> None:
        asked.append(1)
        put(owned, "token", token)

    store = open_with(owned, source)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("millrace.storage.retry.time.sleep", look)
        assert read(store, "data/x", max_size=10) == b"bytes"
    assert asked


def test_a_token_lasts_no_longer_than_it_says(owned: Store) -> None:
    now = datetime.now(UTC)
    key = make_cipher_key()
    put(owned, "token", seal_token(AccessToken(SecretStr("secret"), now + HOUR), key))
    source = TokenSource(url=SecretStr(sign_url(owned, "token", HOUR)), key=key)
    times = iter([now, now + timedelta(minutes=59), now + timedelta(minutes=61)])
    provider = TokenReader(source, lambda: next(times))
    assert provider() == {"token": "secret", "expires_at": now + timedelta(minutes=50)}
    assert provider()["expires_at"] == now + timedelta(minutes=59)  # asked again at once
    with pytest.raises(errors.UnavailableError, match="it has ended"):
        provider()
    stranger = TokenReader(source.model_copy(update={"key": make_cipher_key()}))
    with pytest.raises(errors.UnavailableError, match="encrypted with another key"):
        stranger()
    with pytest.raises(errors.ConfigurationError, match="not one of Fernet"):
        TokenReader(source.model_copy(update={"key": SecretStr("short")}))


def test_a_token_that_cannot_be_made_is_a_sentence(
    owned: Store, google: GCSServer, account: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.ConfigurationError, match="takes 1 to 10 prefixes, and not 11"):
        make_scoped_token(owned, [f"{number}/" for number in range(11)])
    stranger = GCSServer.start(tmp_path / "stranger")
    with stranger:
        unknown = stranger.create_service_account("two@project.example")
    for key, kind, said in (
        (unknown.replace(stranger.endpoint, google.endpoint), errors.DeniedError, "refuses"),
        (account.replace(google.endpoint, "http://127.0.0.1:9"), errors.UnavailableError, "again"),
        ("{", errors.ConfigurationError, "cannot be read"),
    ):
        spec = owned.spec.model_copy(update={"options": {"service_account_key": SecretStr(key)}})
        try:
            store = open_store(spec)
        except errors.ConfigurationError:
            continue  # obstore has read it
        with pytest.raises(kind, match=said):
            make_scoped_token(store, ["data/"])
    with pytest.raises(errors.ConfigurationError, match="at most 7 days"):
        sign_url(owned, "token", timedelta(days=8))
