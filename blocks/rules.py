"""Block with cleaning rules, kept on the server under a name."""

from typing import Any, ClassVar

from prefect.blocks.core import Block
from pydantic import Field

from millrace.cleanup import Rule


class CleaningRules(Block):
    """Rules for what is deleted from a bucket, and what is never deleted.

    Example:
        Clean a bucket by the rules:
        ```python
        from blocks import CleaningRules
        from flows.clean_bucket import clean_bucket

        rules = CleaningRules.load("BLOCK_NAME")
        clean_bucket("gradients", rules)
        ```
    """

    _block_type_name = "Millrace Cleaning Rules"
    _block_type_slug = "millrace-cleaning-rules"
    _documentation_url: ClassVar[Any] = (
        "https://packaging.python.org/specifications/version-specifiers/"
    )
    _description = "Rules for what is deleted from a bucket, and what is never deleted."
    _code_example = """
from blocks import CleaningRules
from flows.clean_bucket import clean_bucket

rules = CleaningRules.load("BLOCK_NAME")
clean_bucket("gradients", rules)
"""

    rules: list[Rule] = Field(
        description="Rules for what is deleted. An object is deleted by the first rule whose "
        "conditions it all meets, unless a rule before keeps it."
    )
    pins: list[str] = Field(
        default_factory=list,
        description="Keys and folders that are never deleted, with all that is below them.",
    )
