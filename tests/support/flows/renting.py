"""An account at the stand-in of Vast.ai, and what is rented with it."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from blocks import VastCredentials
from millrace.testing.vast import VastServer
from tests.prefect_server import PrefectServer

RENT = {
    "request": {"max_hourly": 2.0, "max_total": 10.0},
    "program": {"repo_url": "https://example.org/x", "command": ["true"]},
    "timeouts": {"poll_interval": "PT0.2S"},
}


@pytest.fixture
def payer(prefect_api: PrefectServer, vast: VastServer) -> Iterator[dict[str, Any]]:
    """A block of an account at the stand-in, whose time goes quickly; what refers to it."""
    key = vast.reset(rate=100.0, strict=False)
    VastCredentials(api_key=SecretStr(key), server_url=vast.url).save("payer", overwrite=True)
    yield {"$ref": {"block_document_slug": "vast-credentials/payer"}}
    vast.reset()
    VastCredentials.delete("payer")
