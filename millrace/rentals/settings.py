"""Settings of a rental."""

from datetime import timedelta
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from millrace.errors import ConfigurationError
from millrace.keys.rentals import MAX_ATTEMPTS, check_rental_name
from millrace.rentals.offers import OfferRequest
from millrace.rentals.vast.api import VastClient
from millrace.schemas.rental import MoneyLimits
from millrace.settings import AsWritten, Duration
from millrace.storage import Right, StoreSpec

_RESERVED_PREFIXES = (
    "MILLRACE_",
    "CONTAINER_",
    "AWS_",
    "VAST_",
)  # set by Millrace or by the provider

GrantPrefix = Annotated[str, StringConstraints(pattern=r"^[^/_].*/$")]

WorkFolder = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f]+$", max_length=1000)]


def check_offer_id(
    request: OfferRequest | None,
    count: int,
    *,
    count_name: str = "machines",
    request_name: str = "request",
) -> None:
    """Refuse to rent several machines from one offer.

    Args:
        request: Requirements of each machine; None if they are invalid.
        count: Number of machines.
        count_name: Name of the setting with this number.
        request_name: Name of the setting with the requirements.

    Raises:
        ValueError: The requirements name an offer, which has one machine, and there are several.
    """
    if request is not None and request.offer_id is not None and count > 1:
        raise ValueError(
            f"an offer is one machine: set {count_name} to 1, or remove offer_id from "
            f"{request_name}"
        )


class VastAccount(BaseModel):
    """Account at Vast.ai that pays for machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr = Field(description="API key of the account at Vast.ai.")
    server_url: str | None = Field(
        default=None, description="URL of another server of the Vast.ai API."
    )


def open_account(settings: VastAccount) -> VastClient:
    """Return a client of an account."""
    return VastClient(settings.api_key, settings.server_url)


class StorageGrant(BaseModel):
    """Access of each machine to a prefix of the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: GrantPrefix = Field(
        description="Folder below the store's URL, such as `wiki/`. `{slot}` stands for the "
        "machine's number."
    )
    access: Right = Field(
        default=Right.READ, description="Right of the machine. `write` includes `read`."
    )


class CodeRepository(BaseModel):
    """Repository that rented machines install."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo_url: str = Field(
        title="Repository URL",
        description="URL of a public repository: a Python project that contains or requires "
        "Millrace.",
    )
    repo_ref: str = Field(
        title="Branch, tag or commit",
        default="main",
        description="Branch, tag or commit of the repository.",
    )
    extras: tuple[str, ...] = Field(
        default=(), description="Extras of the project to install, such as `gradients`."
    )
    image: str = Field(
        default="pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime",
        description="Docker image with python3 (3.11 or newer), its module venv, and git.",
    )
    workdir: WorkFolder | None = Field(
        title="Work folder",
        default=None,
        description="Absolute path of the folder on a machine into which the repository is cloned, "
        "and in which the program runs; by default a folder below the home folder. The folder must "
        "be empty or missing.",
    )

    def make_program(
        self, command: tuple[str, ...], files: dict[str, str], *, ports: tuple[int, ...] = ()
    ) -> "Program":
        """Return a program that runs a command of the repository.

        Args:
            command: Command in the folder of the clone.
            files: Text files to write into that folder.
            ports: Ports that the program listens on.
        """
        return Program(
            repo_url=self.repo_url, repo_ref=self.repo_ref, extras=self.extras, image=self.image,
            workdir=self.workdir, command=command, files=files, ports=ports,
        )  # fmt: skip


class Program(CodeRepository):
    """Program of each machine: a repository that is installed, and a command."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description="Command in the folder of the clone, one word per item, such as "
        '`["millrace", "run", "settings.yaml"]`. `{slot}` stands for the number of the machine, '
        "and `{slots}` for the number of machines.",
    )
    files: Annotated[dict[str, str], AsWritten] = Field(
        default_factory=dict[str, str],
        description="Text files to write into the folder of the clone, such as settings. They "
        "arrive as written, with each `${NAME}`. Do not put secrets here.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Environment variables of the program. Do not put secrets here. "
        "`MILLRACE_SLOT` is the number of the machine.",
    )
    ports: tuple[int, ...] = Field(
        default=(),
        description="Ports that the program listens on. 70000 stands for a port that has the same "
        "number inside and outside of the container. The program finds this number in "
        "`VAST_TCP_PORT_70000`.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        reserved = [name for name in self.environment if name.startswith(_RESERVED_PREFIXES)]
        if reserved:
            raise ValueError(
                f"{', '.join(reserved)}: names with these prefixes are set by Millrace or Vast.ai"
            )
        wrong = [name for name in self.files if name.startswith("/") or ".." in name.split("/")]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: a path must be relative, and below the folder of the clone"
            )
        return self


class RentalTimeouts(BaseModel):
    """Time limits and retries of a rental."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    startup_timeout: Duration = Field(
        default=timedelta(minutes=20),
        gt=timedelta(0),
        description="Longest time for a machine to load its image and install the program.",
    )
    heartbeat_timeout: Duration = Field(
        default=timedelta(minutes=5),
        ge=timedelta(seconds=30),
        description="Longest time without a heartbeat. A machine that is silent for longer is "
        "replaced; a machine whose owner is silent for longer destroys itself.",
    )
    poll_interval: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="Interval at which the machines are checked.",
    )
    max_attempts: int = Field(
        default=5,
        ge=1,
        le=MAX_ATTEMPTS,
        description="Largest number of machines in a row for a slot on which the program does not "
        "start, or fails. The loss of a machine on which it runs resets the count.",
    )
    retry_failed: bool = Field(
        default=False,
        description="Run a failed program again on another machine, up to `max_attempts` machines. "
        "Otherwise a failure releases all machines.",
    )


class MachineSettings(BaseModel):
    """Machines to rent: their number, their requirements, their program, and limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request: OfferRequest = Field(
        description="Requirements of each machine, and its highest price."
    )
    program: Program = Field(description="Program that runs on each machine.")
    machines: int = Field(default=1, ge=1, le=256, description="Number of machines.")
    storage_grants: tuple[StorageGrant, ...] = Field(
        default=(), description="Prefixes of the store that the machines may use."
    )
    role_arn: str | None = Field(
        default=None,
        description="ARN of the role whose credentials machines get (S3 only). Its sessions must "
        "last as long as `max_lifetime`.",
    )
    timeouts: RentalTimeouts = Field(
        default=RentalTimeouts(), description="Time limits and retries."
    )

    @field_validator("machines")
    @classmethod
    def _check_offer(cls, machines: int, info: ValidationInfo) -> int:
        check_offer_id(info.data.get("request"), machines)
        return machines

    @property
    def effective_request(self) -> OfferRequest:
        """Requirements of each machine, with the number of ports that the program listens on."""
        ports = max(self.request.ports, len(self.program.ports))
        return self.request.model_copy(update={"ports": ports})


class LedgerSettings(BaseModel):
    """Store of the ledger, and the account. Other keys of a settings file are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    store: StoreSpec = Field(description="Store of the ledger of rentals.")
    account: VastAccount = Field(description="Account that pays for the machines.")

    def reveal_secrets(self) -> dict[str, Any]:
        """Return the settings as JSON data, with their secrets in the clear."""
        account = {
            "api_key": self.account.api_key.get_secret_value(),
            "server_url": self.account.server_url,
        }
        return {"store": self.store.reveal_secrets(), "account": account}


class RentalSettings(MachineSettings):
    """Settings of a rental: its machines, their program, and limits."""

    name: str = Field(
        description="Name of the rental. Another run with the same name continues the rental."
    )
    store: StoreSpec = Field(
        description="Store of the ledger and of the machines' data: R2, or S3 with `role_arn`. "
        "With a folder, for tests, the machines are local processes."
    )
    account: VastAccount = Field(description="Account that pays for the machines.")
    source: StoreSpec | None = Field(
        default=None,
        description="Another location that the machines may read. In a bucket they get temporary "
        "credentials for the prefix of its URL. Its options are sent as they are: whoever owns a "
        "machine can read them.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        try:
            return check_rental_name(name)
        except ConfigurationError as error:
            raise ValueError(str(error).rstrip(".")) from error

    @classmethod
    def make(cls, name: str, ledger: LedgerSettings, settings: MachineSettings) -> Self:
        """Return the settings of a rental.

        Args:
            name: Name of the rental.
            ledger: Store of the ledger, and the account.
            settings: Machines to rent.
        """
        return cls(name=name, store=ledger.store, account=ledger.account, **dict(settings))

    @property
    def limits(self) -> MoneyLimits:
        """Limits of what the machines may cost."""
        return self.request.make_limits(self.machines)

    @property
    def ledger(self) -> LedgerSettings:
        """Store of the ledger, and the account."""
        return LedgerSettings(store=self.store, account=self.account)
