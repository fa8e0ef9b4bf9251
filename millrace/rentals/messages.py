"""Messages between an owner and its rented machines: configuration and reports.

The owner sends a configuration to each machine, and each machine sends reports. Machines are not
trusted. Each report has a bounded size, is checked, and describes its own machine only.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from millrace import errors
from millrace.rentals.access_variables import make_access_variables
from millrace.storage import StoreSpec

LOG_CHUNK_BYTES = 64 << 10
"""Size of a chunk of the program's log, in bytes. No report is larger."""
CONFIG_VARIABLE = "MILLRACE_CONFIG"
SLOT_VARIABLE = "MILLRACE_SLOT"
"""Variable that tells a program the number of its machine."""
_MAX_TRAFFIC_BYTES = 1 << 50  # largest count of transferred bytes that is accepted


class _GuestMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SetupReport(_GuestMessage):
    """Report on the installation of a machine.

    Attributes:
        state: ``fetching``, ``installing``, ``starting`` or ``failed``.
        detail: Commit that is installed; if the installation failed, the end of its output.
    """

    state: Literal["fetching", "installing", "starting", "failed"]
    detail: str = Field(default="", max_length=LOG_CHUNK_BYTES)


class MachineHeartbeat(_GuestMessage):
    """Heartbeat of a machine whose program runs.

    Attributes:
        number: Number of the heartbeat, from 1 on.
        received: Bytes that the machine has received.
        sent: Bytes that the machine has sent.
    """

    number: int = Field(ge=0)
    received: int = Field(default=0, ge=0, le=_MAX_TRAFFIC_BYTES)
    sent: int = Field(default=0, ge=0, le=_MAX_TRAFFIC_BYTES)


class ProgramExit(_GuestMessage):
    """Report on how a program ended.

    Attributes:
        code: Exit code of the program.
        seconds: Time that the program ran.
    """

    code: int = Field(ge=-(1 << 31), lt=1 << 31)
    seconds: float = Field(default=0.0, ge=0)


MAX_FILES_BYTES = 16 << 20
"""Largest size of a program's text files, in bytes, as stored."""


class GuestFiles(BaseModel):
    """Files that a machine writes before it runs its program.

    Attributes:
        texts: Contents by paths below the folder of the clone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: dict[str, str]


class GuestConfig(BaseModel):
    """Configuration of a machine. Its credentials are scoped, and expire at its deadline.

    Attributes:
        store: Store with credentials for the machine's own folder.
        prefix: Prefix of that folder.
        command: Command of the program.
        environment: Further variables of the program.
        heartbeat_interval: Seconds between two heartbeats.
        read_store: Store with credentials for the prefixes that the program may read.
        write_store: Store with credentials for the prefixes that the program may write.
        source: Another location that the program may read, with its credentials.
        node_key: Key of the swarm's agent, if the program runs one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec
    prefix: str
    command: tuple[str, ...]
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    heartbeat_interval: float = Field(default=10.0, gt=0)
    read_store: StoreSpec | None = None
    write_store: StoreSpec | None = None
    source: StoreSpec | None = None
    node_key: SecretStr | None = None

    def encode(self) -> str:
        """Encode the configuration as the value of an environment variable, in Base64."""
        data = self.model_dump(
            mode="json", exclude={"store", "read_store", "write_store", "source", "node_key"}
        )
        for name, spec in (
            ("store", self.store),
            ("read_store", self.read_store),
            ("write_store", self.write_store),
            ("source", self.source),
        ):
            data[name] = spec.reveal_secrets() if spec else None
        data["node_key"] = self.node_key.get_secret_value() if self.node_key else None
        return base64.b64encode(orjson.dumps(data)).decode()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "GuestConfig":
        """Read the configuration of a machine from its environment.

        Raises:
            ConfigurationError: The variable is missing or invalid.
        """
        try:
            return cls.model_validate_json(base64.b64decode(environ[CONFIG_VARIABLE]))
        except (KeyError, ValidationError, binascii.Error) as error:
            raise errors.ConfigurationError(
                f"The variable {CONFIG_VARIABLE} is missing or invalid: run this command "
                "only on a machine that Millrace has rented."
            ) from error


def make_program_environment(environ: Mapping[str, str], config: GuestConfig) -> dict[str, str]:
    """Return the environment of a machine's program.

    ``MILLRACE_STORE`` is the store's URL. ``MILLRACE_READ_ACCESS_KEY_ID`` and the other variables
    with this prefix hold the read credentials, as `make_access_variables` names them.
    ``MILLRACE_WRITE_…`` hold the write credentials.
    ``AWS_*`` repeat the write credentials; without write credentials, the read credentials.
    ``MILLRACE_SOURCE_…`` hold the credentials of another location, and ``MILLRACE_SOURCE_OPTION_0``
    and so on hold its options, in the order of their names.
    ``MILLRACE_NODE_KEY`` is set if the program listens on a port. The owner adds ``MILLRACE_SLOT``,
    the number of the machine, to the program's own variables.
    """
    inherited = {
        name: value
        for name, value in environ.items()
        if not name.startswith("MILLRACE_") and name != "CONTAINER_API_KEY"
    }
    variables: dict[str, str] = {
        **inherited,
        "MILLRACE_STORE": config.store.url,
        **config.environment,
    }
    default_spec = config.write_store or config.read_store
    for prefix, spec in (
        ("MILLRACE_READ", config.read_store),
        ("MILLRACE_WRITE", config.write_store),
        ("MILLRACE_SOURCE", config.source),
    ):
        if spec is not None:
            variables |= make_access_variables(spec, prefix)
    if default_spec is not None and default_spec.credentials is not None:
        variables |= make_access_variables(default_spec, "AWS")
    if default_spec is not None and default_spec.endpoint:
        variables["AWS_ENDPOINT_URL"] = default_spec.endpoint
    if default_spec is not None and default_spec.region:
        variables["AWS_REGION"] = default_spec.region
    if config.node_key is not None:
        variables["MILLRACE_NODE_KEY"] = config.node_key.get_secret_value()
    return variables
