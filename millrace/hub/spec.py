"""Settings of a repository of the Hub, which do not need the Hub's library."""

import re
from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from millrace import errors
from millrace.formatting import shorten_url
from millrace.settings import Duration


class HubSpec(BaseModel):
    """Repository of the Hub, and the token of an account."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str = Field(description="Repository, as `owner/name`. It must exist.")
    revision: str = Field(default="main", description="Branch of the repository.")
    token: SecretStr | None = Field(
        default=None, description="Token of an account; by default that of HF_TOKEN."
    )
    endpoint: str | None = Field(
        default=None,
        description="URL of the Hub; by default HF_ENDPOINT, or the public Hub.",
    )
    retry_timeout: Duration = Field(
        default=timedelta(minutes=2),
        description="Longest time that a request is retried before its error is raised.",
    )

    @classmethod
    def parse(cls, url: str) -> "HubSpec":
        """Parse ``hf://owner/name`` or ``hf://owner/name@branch``.

        Raises:
            ConfigurationError: The URL has another form.
        """
        repo, _, revision = url.removeprefix("hf://").partition("@")
        is_plain = not re.search("[:?#]", repo) and not re.search("[?#]", revision)
        if not url.startswith("hf://") or not re.fullmatch("[^/]+/[^/]+", repo) or not is_plain:
            raise errors.ConfigurationError(
                f"{shorten_url(url)!r} names no repository: write hf://owner/name, or "
                "hf://owner/name@branch."
            )
        return cls(repo=repo, revision=revision or "main")
