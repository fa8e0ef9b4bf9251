"""Machines use Google Cloud Storage by tokens that end soon, which their owner renews."""

import base64
import json
import sys
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from millrace import errors
from millrace.campaigns.worker import make_worker_environment
from millrace.datasets import PipelineSettings, shard_dataset
from millrace.rentals import (
    OfferRequest,
    Program,
    Rental,
    RentalSettings,
    RentalTimeouts,
    StorageGrant,
    VastAccount,
    describe_granted,
    grants,
    make_store_settings,
)
from millrace.rentals.grants import publish_tokens
from millrace.rented_sharding import VastSettings, make_sharding_rental
from millrace.settings import load_settings
from millrace.storage import Right, StoreSpec, exists, open_store, put, read
from millrace.testing.gcs import GCSServer
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until
from tests.support.rentals.parts import HOUR, START, make_attempt, receive_program

PROGRAM = Program(repo_url="https://example.org/x", command=("true",))
COPIES = """
import time
from pathlib import Path
from millrace.errors import MillraceError
from millrace.settings import load_settings
from millrace.storage import StoreSpec, open_store, put, read

reader, writer = (
    open_store(load_settings(Path(f"{name}.yaml"), StoreSpec)) for name in ("read", "write")
)
for name in ("first", "second"):
    while True:
        try:
            put(writer, f"out/0/{name}", read(reader, f"in/{name}", max_size=100))
            break
        except MillraceError as error:
            print(error, flush=True)
            time.sleep(0.2)
"""


@pytest.fixture
def google(tmp_path: Path) -> Iterator[GCSServer]:
    """A Cloud Storage that asks for tokens once it has a service account."""
    with GCSServer.start(tmp_path / "google") as server:
        yield server


@pytest.fixture
def spec(google: GCSServer) -> StoreSpec:
    """A part of the bucket, with the key of a service account."""
    return StoreSpec(
        url="gs://bucket/below",
        endpoint=google.endpoint,
        options={"service_account_key": SecretStr(google.create_service_account())},
    )


def make_rental(
    spec: StoreSpec, program: Program, *, key: str = "key", server_url: str | None = None
) -> RentalSettings:
    return RentalSettings(
        name="fleet",
        store=spec,
        account=VastAccount(api_key=SecretStr(key), server_url=server_url),
        request=OfferRequest(max_hourly=2.0, max_total=5.0, max_lifetime=timedelta(hours=1)),
        timeouts=RentalTimeouts(poll_interval=timedelta(seconds=1)),
        storage_grants=(
            StorageGrant(prefix="in/"),
            StorageGrant(prefix="out/{slot}/", access=Right.WRITE),
        ),
        program=program,
    )


def test_a_machine_works_on_while_its_owner_renews_its_tokens(
    google: GCSServer,
    spec: StoreSpec,
    vast: VastServer,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = sysconfig.get_path("purelib")
    key = vast.reset(real=True, rate=1.0, strict=False, image=packages)
    google.configure_tokens(lifetime=300)  # short of the margin, so a machine looks each time
    monkeypatch.setattr(grants, "_RENEWAL_INTERVAL", 0.5)
    granted = describe_granted(spec)
    files = {
        f"{right}.yaml": yaml.safe_dump(make_store_settings(granted, right)) for right in Right
    }
    program = Program(
        repo_url=repository.as_uri(),
        command=("python", "copies.py"),
        files={"copies.py": COPIES, **files},
    )
    settings = make_rental(spec, program, key=key, server_url=vast.url)
    store = open_store(spec)
    put(store, "in/first", b"1")
    with Rental(settings) as rental:
        rental.wait_until_ready()
        (entry,) = vast.list_alive()
        wait_until(lambda: exists(store, "out/0/first") or None, "the first copy")
        google.configure_tokens(revoke=True)
        put(store, "in/second", b"2")
        rental.wait_until_done()
    vast.reset()
    assert read(store, "out/0/second") == b"2"

    environment = entry["body"]["env"]
    config = json.loads(base64.b64decode(environment["MILLRACE_CONFIG"]))
    assert "PRIVATE KEY" not in json.dumps(config)
    assert "PRIVATE KEY" not in json.dumps(environment)
    publish_tokens(store, settings, [make_attempt()])
    for name, own, others in (
        ("store", "_machines/fleet/000000/x", ["_machines/fleet/000001/x", "_rentals/x", "in/x"]),
        ("write_store", "out/0/x", ["out/1/x", "in/first", "_machines/fleet/000000/x"]),
        ("read_store", None, ["in/first", "out/0/x"]),
    ):
        its = open_store(StoreSpec.model_validate(config[name]))
        if own is not None:
            put(its, own, b"x")
        for other in others:
            with pytest.raises(errors.DeniedError):
                put(its, other, b"x")
    sealed = read(store, "_machines/fleet/000000/token-write.txt")
    assert b"ya29" not in sealed


def test_machines_that_nobody_renews_the_tokens_of_are_refused(spec: StoreSpec) -> None:
    settings = make_rental(spec, PROGRAM)
    with pytest.raises(errors.ConfigurationError, match="cannot be detached: keep this process"):
        Rental(settings, detached=True)


def test_machines_shard_a_prefix_of_one_bucket_into_another(
    spec: StoreSpec, google: GCSServer, tmp_path: Path
) -> None:
    google.create_bucket("raw")
    there = spec.model_copy(update={"url": "gs://raw"})
    put(open_store(there), "words/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    put(open_store(there), "secret.jsonl", b"{}")
    secret = {name: value.get_secret_value() for name, value in spec.options.items()}
    place = {"endpoint": google.endpoint, "options": secret}
    config = PipelineSettings.model_validate(
        {
            "dataset": "words",
            "source": {**place, "url": "gs://raw/words"},
            "store": {**place, "url": spec.url},
            "execution": {"workers": 0},
        }
    )
    vast = VastSettings.model_validate(
        {
            "account": {"api_key": "the account's"},
            "request": {"max_hourly": 1.0, "max_total": 5.0},
            "repo_url": "https://example.org/millrace",
        }
    )
    rent = make_sharding_rental(config, vast)
    attempt = make_attempt(deadline=START + HOUR)
    environment = receive_program(rent, tmp_path, attempt)
    publish_tokens(open_store(spec), rent, [attempt])
    assert "PRIVATE KEY" not in str(environment)
    received = load_settings(tmp_path / rent.program.command[-1], PipelineSettings, environment)
    assert shard_dataset(received).samples == 2
    beside = received.source.store.model_copy(update={"url": "gs://raw"})
    with pytest.raises(errors.DeniedError):
        read(open_store(beside), "secret.jsonl")
    with pytest.raises(errors.DeniedError):
        put(open_store(received.source.store), "b.jsonl", b"{}")
    whole = config.model_copy(
        update={"source": config.source.model_copy(update={"url": "gs://raw"})}
    )
    with pytest.raises(errors.ConfigurationError, match="gs://raw is a whole bucket"):
        receive_program(make_sharding_rental(whole, vast), tmp_path, attempt)


def test_local_workers_get_the_key_of_this_process(spec: StoreSpec, tmp_path: Path) -> None:
    path = tmp_path / "write.yaml"
    path.write_text(yaml.safe_dump(make_store_settings(spec, Right.WRITE)))
    assert "PRIVATE KEY" not in path.read_text()
    environment = make_worker_environment(spec, spec)
    put(open_store(load_settings(path, StoreSpec, environment)), "x", b"x")
    assert read(open_store(spec), "x") == b"x"


def test_without_the_library_of_google_a_rental_says_what_to_install(
    spec: StoreSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "millrace.storage.google_credentials", None)
    settings = make_rental(spec, PROGRAM)
    with pytest.raises(errors.ConfigurationError, match=r"pip install 'millrace\[gcs\]'"):
        publish_tokens(open_store(spec), settings, [make_attempt()])
