"""Prefect's own standard for blocks."""

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite

from blocks import Bucket, CleaningRules, HuggingFaceCredentials, VastCredentials

KINDS = [Bucket, CleaningRules, VastCredentials, HuggingFaceCredentials]


@pytest.mark.parametrize("block", KINDS)
class TestStandard(BlockStandardTestSuite):
    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    def test_has_a_valid_image(self, block: type[Block]) -> None:
        """A logo would have to be on the web: Prefect takes no `data:` URL and no path."""
        assert block._logo_url is None


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
