"""Block with the token of a Hugging Face account."""

from typing import Any, ClassVar

from prefect.blocks.core import Block
from pydantic import Field, SecretStr


class HuggingFaceCredentials(Block):
    """A token of a Hugging Face account, for datasets and models that ask for one.

    Example:
        Hand the token to a library:
        ```python
        from blocks import HuggingFaceCredentials

        hub = HuggingFaceCredentials.load("BLOCK_NAME")
        token = hub.token.get_secret_value()
        ```
    """

    _block_type_name = "Hugging Face Credentials"
    _block_type_slug = "hugging-face-credentials"
    _documentation_url: ClassVar[Any] = "https://huggingface.co/docs/hub/security-tokens"
    _description = "A token of a Hugging Face account, for datasets and models that ask for one."
    _code_example = """
from blocks import HuggingFaceCredentials

hub = HuggingFaceCredentials.load("BLOCK_NAME")
token = hub.token.get_secret_value()
"""

    token: SecretStr = Field(description="A token that may read what is needed.")
    endpoint: str | None = Field(
        default=None, description="Another address of the Hub, such as a mirror's."
    )
