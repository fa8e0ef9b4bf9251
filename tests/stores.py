"""Stores of every kind, for tests that hold whatever is behind the URL."""

import secrets
from pathlib import Path

import pytest

from millrace.storage import Store, StoreSpec
from millrace.testing.credentials import make_credentials
from tests.oracle import Folder

ACCOUNT = "0123456789abcdef0123456789abcdef"


def open_folder(store: Store) -> Folder:
    """Open a store that is a folder for the oracle."""
    return Folder(Path(store.location.bucket))


def make_spec(kind: str, request: pytest.FixtureRequest, right: str = "full") -> StoreSpec:
    match kind:
        case "local":
            return StoreSpec(url=request.getfixturevalue("tmp_path").as_uri())
        case "memory":
            return StoreSpec(url=f"memory://{secrets.token_hex(8)}")
        case "rgw":
            server = request.getfixturevalue("rgw")
            return StoreSpec(
                url=f"s3://{request.getfixturevalue('bucket')}/below/here",
                endpoint=server.endpoint,
                credentials=make_credentials(getattr(server, right)),
            )
        case "r2":
            server, proxy = request.getfixturevalue("rgw"), request.getfixturevalue("r2")
            return StoreSpec(
                url=f"r2://{ACCOUNT}/{request.getfixturevalue('bucket')}/below/here",
                endpoint=proxy.endpoint,
                ca_file=proxy.ca_file,
                credentials=make_credentials(getattr(server, right)),
            )
        case "gcs":
            server = request.getfixturevalue("gcs")
            return StoreSpec(
                url=f"gs://bucket/{secrets.token_hex(8)}",
                endpoint=server.endpoint,
                options=server.make_store_config()["config"],
            )
        case _:
            raise AssertionError(kind)
