"""URL of a repository of the Hub. It is parsed without the Hub's library."""

from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from millrace import errors
from millrace.settings import Duration


class HubSpec(BaseModel):
    """Repository of the Hub, and the account's token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str = Field(description="The repository, as `owner/name`. It must exist.")
    revision: str = Field(default="main", description="The branch.")
    token: SecretStr | None = Field(
        default=None, description="A token; left out, the environment's HF_TOKEN."
    )
    endpoint: str | None = Field(
        default=None, description="Another address of the Hub; left out, HF_ENDPOINT or its own."
    )
    retry_timeout: Duration = Field(
        default=timedelta(minutes=2),
        description="Longest time that a request is retried before its error is raised.",
    )

    @classmethod
    def parse(cls, url: str) -> "HubSpec":
        """Parse ``hf://owner/name`` or ``hf://owner/name@branch``.

        Raises:
            ConfigurationError: It is neither.
        """
        repo, _, revision = url.removeprefix("hf://").partition("@")
        if not url.startswith("hf://") or repo.count("/") != 1 or not all(repo.split("/")):
            raise errors.ConfigurationError(
                f"{url!r} names no repository: write hf://owner/name, or hf://owner/name@branch."
            )
        return cls(repo=repo, revision=revision or "main")
