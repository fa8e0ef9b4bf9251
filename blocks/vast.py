"""Block with the API key of a Vast.ai account."""

from typing import TYPE_CHECKING, Any, ClassVar

from prefect.blocks.abstract import CredentialsBlock
from pydantic import Field, SecretStr

from millrace.rentals.vast.api import make_sdk_client

if TYPE_CHECKING:
    from vastai import VastAI  # pyright: ignore[reportMissingTypeStubs]


class VastCredentials(CredentialsBlock):
    """The API key of a Vast.ai account, which rents and pays for machines.

    Example:
        Ask for offers:
        ```python
        from blocks import VastCredentials

        vast = VastCredentials.load("BLOCK_NAME")
        offers = vast.get_client().search_offers(query="gpu_name=RTX_4090")
        ```
    """

    _block_type_name = "Vast.ai Credentials"
    _block_type_slug = "vast-credentials"
    _documentation_url: ClassVar[Any] = "https://docs.vast.ai/"
    _description = "The API key of a Vast.ai account, which rents and pays for machines."
    _code_example = """
from blocks import VastCredentials

vast = VastCredentials.load("BLOCK_NAME")
offers = vast.get_client().search_offers(query="gpu_name=RTX_4090")
"""

    api_key: SecretStr = Field(title="API key", description="Key from the account's page of keys.")
    server_url: str | None = Field(
        default=None, title="Server URL", description="Another address of Vast's API."
    )

    def get_client(self, *_: Any, **__: Any) -> "VastAI":
        """Return a client of Vast's SDK with the API key.

        Raises:
            ConfigurationError: The SDK is not installed.
        """
        return make_sdk_client(self.api_key, self.server_url)
