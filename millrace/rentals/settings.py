"""Settings of a rental."""

from datetime import timedelta
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, model_validator

from millrace.rentals.offers import OfferRequest
from millrace.rentals.vast.api import Vast
from millrace.settings import Duration
from millrace.storage import Right, StoreSpec

_HOLD = ("MILLRACE_", "CONTAINER_", "AWS_", "VAST_")  # what we, or the provider, set in a machine

Prefix = Annotated[str, StringConstraints(pattern=r"^[^/_].*/$")]


class Account(BaseModel):
    """Account that pays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr = Field(description="Key from the account's page of keys at Vast.ai.")
    server_url: str | None = Field(default=None, description="Another address of Vast's API.")


def account(settings: Account) -> Vast:
    """Return the account that pays."""
    return Vast(settings.api_key, settings.server_url)


class Reach(BaseModel):
    """Rights of a machine in a part of the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: Prefix = Field(
        description="A folder below the store's URL, such as `wiki/`; `{slot}` is the machine's "
        "number."
    )
    right: Right = Field(default=Right.READ, description="`read`, or `write`: that is both.")


class Program(BaseModel):
    """Program of each machine: a repository, installed, and one of its commands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo_url: str = Field(description="Repository to clone: a public one that has Millrace.")
    repo_ref: str = Field(default="main", description="A branch, a tag or a commit of it.")
    extras: tuple[str, ...] = Field(
        default=(), description="Extras of the package to install, such as `gradients`."
    )
    command: tuple[str, ...] = Field(
        min_length=1,
        description="Command to run, such as `millrace run settings.yaml`, in the folder of the "
        "clone; `{slot}` is the machine's number, `{slots}` how many there are.",
    )
    files: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Text files to write beside it, such as settings; no secrets.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict[str, str], description="Variables for it; no secrets."
    )
    ports: tuple[int, ...] = Field(
        default=(),
        description="On which it listens. 70000 stands for one that is the same inside and out; "
        "the program finds it as `VAST_TCP_PORT_70000`.",
    )
    image: str = Field(
        default="pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime",
        description="A Docker image with python3 (3.11 or newer), its venv, and git.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        ours = [name for name in self.environment if name.startswith(_HOLD)]
        if ours:
            raise ValueError(f"{', '.join(ours)}: such variables are set by Millrace or Vast.ai")
        wrong = [name for name in self.files if name.startswith("/") or ".." in name.split("/")]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: files stand below the folder of the clone")
        return self


class Patience(BaseModel):
    """Times for which machines are waited for, and how often they are looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loading: Duration = Field(
        default=timedelta(minutes=20),
        gt=timedelta(0),
        description="Longest time for a machine to load its image, and to install.",
    )
    silence: Duration = Field(
        default=timedelta(minutes=5),
        ge=timedelta(seconds=30),
        description="Longest silence of a machine; and how long a machine waits "
        "for its owner, before it destroys itself.",
    )
    poll: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="Interval at which machines are looked at.",
    )
    tries: int = Field(
        default=5, ge=1, description="Machines that are rented, at most, in place of one."
    )
    retry_failed: bool = Field(
        default=False,
        description="Try a program that fails on another machine, as often as `tries` "
        "says; else all machines are given back.",
    )


class RentSettings(Patience):
    """Machines that are rented for one purpose, and given back."""

    name: str = Field(description="The rental's: whoever goes on with it calls it the same.")
    store: StoreSpec = Field(
        description="Store of the ledger, and of what machines read and write: R2, or S3 "
        "with role_arn. A folder only where the machines are processes of this one."
    )
    account: Account
    request: OfferRequest
    program: Program
    count: int = Field(default=1, ge=1, le=256, description="Number of machines.")
    reach: tuple[Reach, ...] = Field(
        default=(), description="The parts of the store that the machines may use."
    )
    role_arn: str | None = Field(
        default=None,
        description="ARN of the role whose credentials machines get (S3 only); its sessions have "
        "to "
        "last as long as max_lifetime.",
    )

    @property
    def wanted(self) -> OfferRequest:
        """Requirements of each machine, with as many open ports as the program listens on."""
        ports = max(self.request.ports, len(self.program.ports))
        return self.request.model_copy(update={"ports": ports})


class StandSettings(BaseModel):
    """Store of the ledger, and the account; the rest of a settings file does not matter."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    store: StoreSpec = Field(description="Store of the ledger of rentals.")
    account: Account
