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

from millrace.settings import Duration, Size
from millrace.storage import StoreSpec
from millrace.swarm.archives.unpack import Unpacking
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import MAX_PIECE_SIZE, check_relative_path


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Settings):
    """Files to copy: an object, all below a prefix, or those of a dataset or a checkpoint."""

    key: str | None = Field(default=None, description="Key of one object, below the store's URL.")
    prefix: str | None = Field(
        default=None, description="Or a folder: all objects below it; empty for the whole store."
    )
    dataset: str | None = Field(
        default=None,
        description="Or a dataset: the shards that its manifest names. Each shard is verified by "
        "its digest in the manifest.",
    )
    checkpoint: str | None = Field(
        default=None,
        description="Or a job: all files of its newest checkpoint, each verified by its digest. "
        "By default, the checkpoint can be loaded from the root as from a store.",
    )
    step: int | None = Field(
        default=None, ge=0, description="Step of the checkpoint; by default the newest."
    )
    destination: str | None = Field(
        default=None,
        description="Path below the root: of the file, or for several files of the folder. By "
        "default the keys of the objects, or for a prefix the root itself.",
    )
    store: str = Field(
        default="", description="Name of the store in `stores`, if there are several."
    )
    unpack: Unpacking | None = Field(
        default=None,
        description="Unpack the archive while it arrives. `auto` goes by its name, then by its "
        "content. `gz` and `zst` are for one compressed file.",
    )
    into: str | None = Field(
        default=None,
        description="Folder below the root that the archive is unpacked into; by default the "
        "destination without its ending.",
    )
    mode: int = Field(
        default=0o644,
        ge=0,
        le=0o777,
        description="Permission bits of the files, as a decimal number: 420 is `rw-r--r--`.",
    )
    owner: tuple[int, int] | None = Field(
        default=None, description="User id and group id of the files. Needs root."
    )
    check: CacheCheck | None = Field(
        title="Check of present files",
        default=None,
        description="Check of files of this request from an earlier run; by default that of all "
        "requests.",
    )
    sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="Expected SHA-256 of the object, if the store does not keep it.",
    )

    @field_validator("destination", "into")
    @classmethod
    def _check_below_root(cls, value: str | None) -> str | None:
        return check_relative_path(value) if value else value

    @model_validator(mode="after")
    def _check_one_selector(self) -> "Request":
        selectors = (self.key, self.prefix, self.dataset, self.checkpoint)
        if sum(one is not None for one in selectors) != 1:
            raise ValueError("A request must name one of key, prefix, dataset and checkpoint.")
        if self.step is not None and self.checkpoint is None:
            raise ValueError("`step` needs a `checkpoint`: name the job that the step is of.")
        if self.key is None and (self.unpack or self.sha256):
            raise ValueError("`unpack` and `sha256` need a `key`: request the object by its key.")
        return self


class LimitSettings(_Settings):
    """Limits on concurrent work."""

    store_reads: int = Field(
        title="Reads from the store",
        default=64,
        ge=1,
        description="Largest number of concurrent reads from the store, by all nodes together.",
    )
    store_reads_per_node: int = Field(
        title="Reads from the store per node",
        default=8,
        ge=1,
        le=64,
        description="Largest number of concurrent reads from the store by one node. The node "
        "makes fewer if more are not faster.",
    )
    downloads_per_node: int = Field(
        title="Downloads per node",
        default=8,
        ge=1,
        le=64,
        description="Number of pieces that a node fetches from other nodes at once.",
    )
    uploads_per_node: int = Field(
        title="Uploads per node",
        default=8,
        ge=1,
        le=64,
        description="Number of pieces that a node sends to other nodes at once.",
    )
    stall_timeout: Duration = Field(
        default=timedelta(seconds=60),
        gt=timedelta(0),
        description="Longest time without a byte for a node, once half of the nodes are ready. "
        "The run then ends without the node. A slow node is waited for, down to 100 "
        "kB/s and a hundredth of the rate of the others.",
    )
    direct_reads: bool = Field(
        title="Read the store if it is faster",
        default=True,
        description="Let nodes read pieces from the store that other nodes have, if this is at "
        "least twice as fast. Turn it off if traffic out of the store is expensive.",
    )


class RayNodes(_Settings):
    """All living nodes of a Ray cluster. The run starts an agent on each."""

    kind: Literal["ray"] = Field(default="ray", description="Kind of the nodes.")
    address: str | None = Field(
        default=None,
        description="Address of the Ray cluster; by default the current one or `RAY_ADDRESS`.",
    )
    zone_label: str = Field(
        default="",
        description="Label of the Ray nodes that names their zone or rack. Each piece enters a "
        "zone once.",
    )
    keep: bool = Field(
        title="Keep the agents",
        default=False,
        description="Keep the agents running after the run, for the next run.",
    )


class Host(_Settings):
    """A machine on which `millrace swarm node` runs."""

    url: str = Field(
        description="URL of the machine's agent: `http://host:port`. The connection is encrypted, "
        "except on loopback."
    )
    name: str = Field(
        default="",
        validate_default=True,
        description="Name of the machine in the report; by default `host:port`.",
    )
    zone: str = Field(
        default="", description="Zone or rack of the machine. Each piece enters a zone once."
    )
    key: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="MILLRACE_NODE_KEY of this machine, if it has a key of its own.",
    )

    @field_validator("name")
    @classmethod
    def _fill_name(cls, value: str, info: ValidationInfo) -> str:
        return value or urlsplit(str(info.data.get("url", ""))).netloc

    @field_validator("url")
    @classmethod
    def _normalise_url(cls, value: str) -> str:
        """Return the URL in a canonical form, so that equal addresses are equal texts."""
        try:
            url = urlsplit(value)
            port = url.port or 80
        except ValueError as error:
            raise ValueError(f"{value!r} is no agent's address: {error}") from None
        if url.scheme != "http" or not url.hostname or url.path.strip("/") or url.query:
            raise ValueError(f"{value!r} is no agent's address: write http://host:port")
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        return f"http://{host}:{port}"


class Hosts(_Settings):
    """Machines on which `millrace swarm node` runs, and their secret."""

    kind: Literal["hosts"] = Field(default="hosts", description="Kind of the nodes.")
    hosts: tuple[Host, ...] = Field(min_length=1, description="Machines with an agent.")
    key: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="MILLRACE_NODE_KEY of the machines that have no key of their own.",
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


class PrewarmOptions(_Settings):
    """Checks, limits and timeouts of a prewarm."""

    check: CacheCheck = Field(
        title="Check of present files",
        default=CacheCheck.SAMPLED,
        description="Check of files from an earlier run: by the digests of all bytes (`full`), of "
        "some of them (`sampled`), or by size, times and inode alone (`stat`). A file that was "
        "touched since is always read wholly.",
    )
    piece_size: Size | None = Field(
        default=None,
        ge=64 * 1024,
        le=MAX_PIECE_SIZE,
        description="Size of a piece, at most 64 MiB; by default 1 to 4 MiB, by the amount of "
        "data. A node keeps each piece in memory that it fetches: up to 20 at once, with the "
        "default limits.",
    )
    limits: LimitSettings = Field(default=LimitSettings(), description="Limits on concurrent work.")
    min_node_share: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Least share of the nodes that must live. With fewer nodes, the run fails.",
    )
    start_timeout: Duration = Field(
        default=timedelta(minutes=2),
        description="Longest wait for hosts to answer, and for nodes to check their own files. "
        "Then the run begins without them; they may still join until the other nodes are ready.",
    )
    store_timeout: Duration = Field(
        default=timedelta(minutes=2),
        description="Longest time that reads from the store may keep failing.",
    )
    unpacked_bytes: Size = Field(
        default=ByteSize(1 << 40), description="Largest size of the unpacked content of an archive."
    )
    unpacked_members: int = Field(
        default=1_000_000, ge=1, description="Largest number of files in an archive."
    )


class PrewarmSettings(PrewarmOptions):
    """Files to put on every node of a cluster."""

    requests: tuple[Request, ...] = Field(min_length=1, description="Files to put on every node.")
    stores: dict[str, StoreSpec] = Field(
        min_length=1, description="Stores by the names that requests use."
    )
    mirrors: dict[str, list[StoreSpec]] = Field(
        default_factory=dict[str, list[StoreSpec]],
        description="Mirrors by the names of their stores. Nodes read an object also from mirrors "
        "where it has the same ETag. The store itself must answer when the run starts.",
    )
    root: Path | None = Field(
        default=None,
        description="Folder on every node of a Ray cluster. Nothing is written outside of it. "
        "Agents of hosts have their own folders.",
    )
    nodes: Annotated[RayNodes | Hosts, Field(discriminator="kind")] = Field(
        default=RayNodes(), description="Nodes of the cluster."
    )

    @model_validator(mode="after")
    def _check_mirrors(self) -> "PrewarmSettings":
        if unknown := self.mirrors.keys() - self.stores.keys():
            raise ValueError(
                f"mirrors of {min(unknown)!r} are named, which is none of the stores: "
                f"{', '.join(sorted(self.stores))}"
            )
        return self

    @model_validator(mode="after")
    def _check_root(self) -> "PrewarmSettings":
        if self.root is None and isinstance(self.nodes, RayNodes):
            raise ValueError("root is missing: name the folder on the nodes of the Ray cluster")
        if self.root is not None and not str(self.root).startswith(("/", "~", "$")):
            raise ValueError(
                f"root {self.root} is a relative path, and nodes run in folders of their own: "
                "write an absolute path, or begin with $NAME"
            )
        return self
