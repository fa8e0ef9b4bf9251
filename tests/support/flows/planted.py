"""Secrets that are planted, and the search for them in what runs leave behind."""

import base64
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from millrace.testing.key import Key
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer


def list_forms(secret: str) -> dict[str, str]:
    """Return the forms in which a secret may be in a text, by their names."""
    found = {
        "plain": secret,
        "URL-encoded": quote(secret, safe=""),
        "URL-encoded, slashes kept": quote(secret),
        "form-encoded": quote_plus(secret),
        "JSON": json.dumps(secret)[1:-1],
    }
    for before in range(3):
        # Whatever stands before it in the encoded text, one of three alignments holds.
        padded = b"\0" * before + secret.encode()
        whole = len(padded) // 3 * 3
        first = (before + 2) // 3 * 4
        found[f"base64 at {before}"] = base64.b64encode(padded[:whole]).decode()[first:]
        found[f"base64url at {before}"] = base64.urlsafe_b64encode(padded[:whole]).decode()[first:]
    return found


def find_leaks(places: Mapping[str, str], planted: Mapping[str, str]) -> list[str]:
    """Return a line for each planted secret that a text has in any form, without the secret."""
    return [
        f"{name} in {place}, {form}"
        for name, secret in planted.items()
        for form, text in list_forms(secret).items()
        for place, content in places.items()
        if text in content
    ]


def read_server_leaves(server: PrefectServer) -> Iterator[tuple[str, str]]:
    """Everything that the server keeps, but for its table of blocks, which is encrypted."""
    for number, (table, value) in enumerate(server.read_tables()):
        if table != "block_document":
            yield f"table {table} #{number}", value
    yield "the server's own log", server.log.read_text(errors="replace")


def read_run_leaves(server: PrefectServer, run: Any) -> Iterator[tuple[str, str]]:
    """Return the API's description of a run."""
    found = server.read_flow_run(run)
    yield "the run", found.model_dump_json()
    yield "its parameters", json.dumps(found.parameters)
    yield "its log", server.read_logs(run)
    yield "its artifacts", json.dumps(server.read_artifacts(run), default=str)


@dataclass
class Planted:
    """Keys that really open RGW, and the names of their secrets."""

    source: Key
    destination: Key
    wrong: Key

    @property
    def secrets(self) -> dict[str, str]:
        return {
            "the source's secret": self.source.secret_access_key,
            "the destination's secret": self.destination.secret_access_key,
            "a secret that is refused": self.wrong.secret_access_key,
        }


@pytest.fixture(scope="module")
def planted(rgw: RGW) -> Planted:
    """Keys whose secrets change when they are encoded, and one that is refused."""
    keys = [
        Key(name, f"pl/nt+ed={secrets.token_urlsafe(16)}&%\"'")
        for name in ("planted-source", "planted-destination")
    ]
    for key in keys:
        rgw._admin(
            "key", "create", "--uid=full", "--key-type=s3",
            f"--access-key={key.access_key_id}", f"--secret-key={key.secret_access_key}",
        )  # fmt: skip
    wrong = Key(keys[1].access_key_id, "wr/ong+" + secrets.token_urlsafe(24))
    return Planted(*keys, wrong)
