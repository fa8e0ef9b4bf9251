"""Settings of a prewarm."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from millrace.settings import Duration
from millrace.storage import StoreSpec
from millrace.swarm.archives.unpack import Unpacking
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.pieces import MAX_PIECE_SIZE, MIN_PIECE_SIZE, check_destination


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Settings):
    """An object, or every object below a prefix, and where it goes."""

    key: str | None = Field(default=None, description="The object's key, below the store's URL.")
    prefix: str | None = Field(
        default=None, description="Or: every object below this folder; empty takes the whole store."
    )
    dataset: str | None = Field(
        default=None,
        description="Or: the shards that the manifest of this dataset names, each verified by its "
        "digest there, and nothing else.",
    )
    destination: str | None = Field(
        default=None,
        description="The file, or for a prefix or a dataset the folder, below the root. Left out: "
        "the key, the keys of the shards, or the root itself.",
    )
    store: str = Field(default="", description="Name of the store, if there are several.")
    unpack: Unpacking | None = Field(
        default=None, description="Unpack it while it arrives: auto goes by name, then by content."
    )
    into: str | None = Field(
        default=None,
        description="The folder it is unpacked into, below the root. Left out: the destination "
        "without its ending.",
    )
    mode: int = Field(
        default=0o644, ge=0, le=0o777, description="Permission bits of the files, as a number."
    )
    owner: tuple[int, int] | None = Field(
        default=None, description="User and group id to give the files to; needs root."
    )
    sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="Digest of the object, if you know it better than the store.",
    )

    @field_validator("destination", "into")
    @classmethod
    def _check_below_root(cls, value: str | None) -> str | None:
        return check_destination(value) if value else value

    @model_validator(mode="after")
    def _check_one_selector(self) -> "Request":
        if sum(one is not None for one in (self.key, self.prefix, self.dataset)) != 1:
            raise ValueError("A request names a key, a prefix or a dataset: one of the three.")
        if self.key is None and (self.unpack or self.sha256):
            raise ValueError("unpack and sha256 are for a key: request the archive by its own.")
        return self


class LimitSettings(_Settings):
    """Limits on what goes on at once."""

    store: int = Field(default=64, ge=1, description="Reads from the store, of all nodes together.")
    node_store: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Reads from the store, a node, at most: fewer where more bring nothing.",
    )
    down: int = Field(default=8, ge=1, le=64, description="Pieces a node fetches from others.")
    up: int = Field(default=8, ge=1, le=64, description="Pieces a node gives to others.")
    stall_timeout: Duration = Field(
        default=timedelta(seconds=60),
        gt=timedelta(0),
        description="Longest time that a node may receive no byte, once half of the nodes are "
        "ready, before "
        "the run ends without it. A slow node that goes on receiving is waited for, down to "
        "100 kB/s and a hundredth of what the others receive.",
    )
    direct: bool = Field(
        default=True,
        description="Let nodes read from the store what others have, where it proves to give a "
        "node at least twice what the other nodes give it. Turn it off if bytes out of it are "
        "dear.",
    )


class RayNodes(_Settings):
    """The living nodes of a Ray cluster: each gets an agent."""

    kind: Literal["ray"] = "ray"
    address: str | None = Field(
        default=None,
        description="Address of the Ray cluster; left out, the one we are in or `RAY_ADDRESS`.",
    )
    zone_label: str = Field(
        default="", description="The node label that names its zone or rack: one copy a zone."
    )
    keep: bool = Field(default=False, description="Leave the agents running for the next time.")


class Host(_Settings):
    """A machine on which `millrace swarm node` runs."""

    url: str = Field(
        description="URL of its agent: http://host:port. Except for loopback, the "
        "connection is encrypted all the same."
    )
    name: str = Field(
        default="",
        validate_default=True,
        description="Its name in the report; left out, host:port.",
    )
    zone: str = Field(default="", description="Its zone or rack: one copy a zone, then local.")
    key: SecretStr | None = Field(
        default=None, min_length=16, description="MILLRACE_NODE_KEY, if it has one of its own."
    )

    @field_validator("name")
    @classmethod
    def _fill_name(cls, value: str, info: ValidationInfo) -> str:
        return value or urlsplit(str(info.data.get("url", ""))).netloc

    @field_validator("url")
    @classmethod
    def _normalise_url(cls, value: str) -> str:
        """Return the address in one form, so that two of one agent can be seen to be the same."""
        try:
            parts = urlsplit(value)
            port = parts.port or 80
        except ValueError as error:
            raise ValueError(f"{value!r} is no agent's address: {error}") from None
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{value!r} is no agent's address: write http://host:port")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"http://{host}:{port}"


class Hosts(_Settings):
    """Machines on which `millrace swarm node` runs, with the key that they were given."""

    kind: Literal["hosts"] = "hosts"
    hosts: tuple[Host, ...] = Field(min_length=1, description="The machines.")
    key: SecretStr | None = Field(
        default=None, min_length=16, description="MILLRACE_NODE_KEY of those that have no own."
    )

    @model_validator(mode="after")
    def _check_unique(self) -> "Hosts":
        urls = [host.url for host in self.hosts]
        names = [host.name for host in self.hosts]
        for what, found in (("address", urls), ("name", names)):
            twice = next((each for each in found if found.count(each) > 1), None)
            if twice is not None:
                raise ValueError(f"two hosts have the {what} {twice}: give each its own")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> "Hosts":
        without = [host.url for host in self.hosts if host.key is None and self.key is None]
        if without:
            raise ValueError(f"{without[0]} has no key: give MILLRACE_NODE_KEY of the agents")
        return self


class PrewarmSettings(_Settings):
    """Files to put on every node of a cluster."""

    requests: tuple[Request, ...] = Field(min_length=1, description="Files to put on every node.")
    stores: dict[str, StoreSpec] = Field(
        min_length=1, description="Stores by the names that requests use."
    )
    root: Path = Field(description="The folder on every node that nothing is written outside of.")
    nodes: Annotated[RayNodes | Hosts, Field(discriminator="kind")] = Field(
        default=RayNodes(), description="The machines."
    )
    check: CacheCheck = Field(
        default=CacheCheck.SAMPLED,
        description="Check of files from an earlier run: by sampled digests, or by all.",
    )
    piece_size: ByteSize | None = Field(
        default=None,
        ge=64 * 1024,
        le=MAX_PIECE_SIZE,
        description="1 to 4 MiB by the amount of data.",
    )
    limits: LimitSettings = Field(
        default=LimitSettings(), description="Limits on what goes on at once."
    )
    least: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="The share of the nodes that must live: with fewer the run fails.",
    )
    arrival: Duration = Field(
        default=timedelta(seconds=30),
        description="Longest time that nodes may look at what they have before the others begin "
        "without them, and how long hosts may take to come before the run ends without them.",
    )
    patience: Duration = Field(
        default=timedelta(minutes=2), description="Longest time that the store may keep failing."
    )
    unpacked_bytes: ByteSize = Field(
        default=ByteSize(1 << 40), description="Most bytes that one archive may unpack to."
    )
    unpacked_members: int = Field(default=1_000_000, ge=1, description="And how many files.")


assert MIN_PIECE_SIZE <= MAX_PIECE_SIZE
