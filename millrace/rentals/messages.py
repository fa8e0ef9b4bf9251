"""Messages between an owner and its rented machines: the order one way, reports the other.

A machine is not trusted: what it reports is bounded, checked, and means nothing to anybody else.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from millrace import errors
from millrace.storage import Credentials, StoreSpec

PIECE = 64 << 10
"""Bytes of what is printed that are told at a time; no report is larger."""
ORDER = "MILLRACE_ORDER"
_MOST = 1 << 50  # bytes that a machine can have moved


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Setup(_Report):
    """Report on the installation of a machine.

    Attributes:
        state: ``fetching``, ``installing``, ``starting`` or ``failed``.
        said: What it is about; the end of what was printed if it failed.
    """

    state: Literal["fetching", "installing", "starting", "failed"]
    said: str = Field(default="", max_length=PIECE)


class Beat(_Report):
    """Heartbeat of a machine whose program runs.

    Attributes:
        number: How often this was said.
        received: Bytes.
        sent: Bytes.
    """

    number: int = Field(ge=0)
    received: int = Field(default=0, ge=0, le=_MOST)
    sent: int = Field(default=0, ge=0, le=_MOST)


class ProgramEnd(_Report):
    """Report on how a program ended.

    Attributes:
        code: Its exit code.
        seconds: How long it ran.
    """

    code: int = Field(ge=-(1 << 31), lt=1 << 31)
    seconds: float = Field(default=0.0, ge=0)


FILES_BYTES = 16 << 20
"""Largest size of the text files beside a program, in bytes, as they are stored."""


class GuestFiles(BaseModel):
    """Files that are written beside a program, before it is run.

    Attributes:
        texts: By paths below the folder of the clone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: dict[str, str]


class GuestOrder(BaseModel):
    """Order to a machine. It holds credentials: scoped ones, that end with the rental.

    Attributes:
        store: Where the machine may write its own folder only.
        prefix: That folder.
        command: What is run.
        environment: Further variables.
        beat: Seconds between two signs of life.
        read: The store, through what may read the parts that the program was given to read.
        write: Likewise of those that it may write too.
        node_key: What an agent of the swarm is asked with, should the program be one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec
    prefix: str
    command: tuple[str, ...]
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    beat: float = Field(default=10.0, gt=0)
    read: StoreSpec | None = None
    write: StoreSpec | None = None
    node_key: SecretStr | None = None

    def encode(self) -> str:
        """As a variable of the environment: letters and digits only."""
        data = self.model_dump(mode="json", exclude={"store", "read", "write", "node_key"})
        for name, spec in (("store", self.store), ("read", self.read), ("write", self.write)):
            data[name] = spec.reveal() if spec else None
        data["node_key"] = self.node_key.get_secret_value() if self.node_key else None
        return base64.b64encode(orjson.dumps(data)).decode()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "GuestOrder":
        """Read the order of a machine from its environment.

        Raises:
            ConfigurationError: There is none, or it is none.
        """
        try:
            return cls.model_validate_json(base64.b64decode(environ[ORDER]))
        except (KeyError, ValidationError, binascii.Error) as error:
            raise errors.ConfigurationError(
                f"{ORDER} is missing, or no order: this runs in machines that Millrace has rented."
            ) from error


def environment_of(environ: Mapping[str, str], order: GuestOrder) -> dict[str, str]:
    """Return the environment of a machine's program: the store as AWS's tools know it.

    ``AWS_*`` are of the credentials that may write, if there are some, else of those that read;
    ``MILLRACE_STORE`` is its URL; ``MILLRACE_READ_ACCESS_KEY_ID`` and so on, and
    ``MILLRACE_WRITE_…``, are the two apart. ``MILLRACE_NODE_KEY`` is there if it listens on a port.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith("MILLRACE_") and name != "CONTAINER_API_KEY"
    }
    found: dict[str, str] = {**kept, "MILLRACE_STORE": order.store.url, **order.environment}
    either = order.write or order.read
    for prefix, spec in (
        ("MILLRACE_READ", order.read), ("MILLRACE_WRITE", order.write), ("AWS", either),
    ):  # fmt: skip
        if spec is not None and spec.credentials is not None:
            found |= named(prefix, spec.credentials)
    if either is not None and either.endpoint:
        found["AWS_ENDPOINT_URL"] = either.endpoint
    if either is not None and either.region:
        found["AWS_REGION"] = either.region
    if order.node_key is not None:
        found["MILLRACE_NODE_KEY"] = order.node_key.get_secret_value()
    return found


def named(prefix: str, credentials: Credentials) -> dict[str, str]:
    """Credentials as variables of an environment, by what their names begin with."""
    token = credentials.session_token
    return {
        f"{prefix}_ACCESS_KEY_ID": credentials.access_key_id,
        f"{prefix}_SECRET_ACCESS_KEY": credentials.secret_access_key.get_secret_value(),
        f"{prefix}_SESSION_TOKEN": token.get_secret_value() if token else "",
    }
