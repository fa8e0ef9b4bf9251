"""The engine's work on rented machines: what each is sent, and what it may reach."""

from pathlib import PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from millrace import errors
from millrace.datasets import PipelineSettings
from millrace.rentals import Account, OfferRequest, Program, Reach, RentSettings
from millrace.storage import Right, StoreSpec, open_store

_FILE = "millrace-run.yaml"


class CodeRepository(BaseModel):
    """Repository that rented machines install."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo_url: str = Field(
        description="A public repository: a Python project that has, or requires, Millrace."
    )
    repo_ref: str = Field(default="main", description="A branch, a tag or a commit of it.")
    extras: tuple[str, ...] = Field(
        default=(), description="Extras of the project to install, such as `gradients`."
    )
    image: str = Field(
        default=Program.model_fields["image"].default,
        description="A Docker image with python3 (3.11 or newer), its venv, and git.",
    )


class VastSection(CodeRepository):
    """The part `vast` of a settings file: where `millrace run --use-vast` works."""

    account: Account
    request: OfferRequest
    machines: int = Field(default=1, ge=1, le=256, description="They share the work.")
    role_arn: str | None = Field(
        default=None, description="ARN of the role whose credentials machines get (S3 only)."
    )


class WithVast(BaseModel):
    """A settings file, as far as renting goes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vast: VastSection


def sharding(config: PipelineSettings, section: VastSection) -> RentSettings:
    """Return the rental of machines that shard a dataset.

    They share it, and resume where others stopped.

    Args:
        config: The dataset. Its source has to lie below the same store as its shards: what a
            machine is given reaches no other.
        section: What is rented.

    Raises:
        ConfigurationError: The source lies elsewhere.
    """
    source = _below(config.store, config.source.store)
    reach = (Reach(prefix=f"{source}/"), Reach(prefix=f"{config.dataset}/", right=Right.WRITE))
    sent = config.model_dump(
        mode="json", exclude={"store": True, "source": set(StoreSpec.model_fields)}
    )
    sent["store"] = place_of(config.store, Right.WRITE)
    sent["source"] |= place_of(config.store, Right.READ, source)
    return RentSettings(
        name=f"shard/{config.dataset}",
        store=config.store,
        account=section.account,
        request=section.request,
        program=Program(
            repo_url=section.repo_url,
            repo_ref=section.repo_ref,
            extras=section.extras,
            image=section.image,
            command=("millrace", "run", _FILE),
            files={_FILE: yaml.safe_dump(sent)},
        ),
        count=section.machines,
        reach=reach,
        role_arn=section.role_arn,
    )


def place_of(store: StoreSpec, right: Right, below: str = "") -> dict[str, Any]:
    """Return a part of a store, as the settings that a machine is sent name it.

    Args:
        store: Which.
        right: With which credentials: the machine finds them in its environment.
        below: The part; by default all.
    """
    url = "${MILLRACE_STORE}" + (f"/{below}" if below else "")
    place: dict[str, Any] = store.model_dump(
        mode="json", include={"endpoint", "region"}, exclude_none=True
    )
    if store.credentials is not None:
        prefix = f"MILLRACE_{right.upper()}"
        place["credentials"] = {
            "access_key_id": f"${{{prefix}_ACCESS_KEY_ID}}",
            "secret_access_key": f"${{{prefix}_SECRET_ACCESS_KEY}}",
            "session_token": f"${{{prefix}_SESSION_TOKEN:-}}",  # empty where there is none
        }
    return {"url": url, **place}


def _below(store: StoreSpec, source: StoreSpec) -> str:
    """Return the source's path below the store."""
    here, there = open_store(store, make_folder=False), open_store(source, make_folder=False)
    if there.url.startswith(f"{here.url}/") and here.endpoint == there.endpoint:
        return str(PurePosixPath(there.url.removeprefix(f"{here.url}/")))
    raise errors.ConfigurationError(
        f"The source {there.url} does not lie below {here.url}, and rented machines are given "
        "credentials for that only: bring it there, or shard it without --use-vast."
    )
