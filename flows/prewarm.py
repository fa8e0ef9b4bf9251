"""Put the same files on every node of a cluster."""

from pathlib import Path, PurePosixPath
from typing import Any

from prefect import flow
from prefect.blocks.system import Secret
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from blocks import VastCredentials
from millrace.errors import ConfigurationError
from millrace.storage import Right
from millrace.swarm import (
    CacheCheck,
    Host,
    Hosts,
    PrewarmOptions,
    PrewarmReport,
    PrewarmSettings,
    RayNodes,
    Request,
    Unpacking,
)
from tasks.forms import draw_form
from tasks.locations import BucketLocation, InputLocation, NodeFolder, check_right
from tasks.renting import find_node_hosts
from tasks.warming import report_nodes, warm_nodes


class FilesRequest(InputLocation):
    """Files to put on every node: an object, a dataset, a checkpoint, or all below a prefix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str | None = Field(
        default=None,
        description="Key of one object, below the location; by default all objects there.",
    )
    dataset: str | None = Field(
        default=None,
        description="Or a dataset below the location: the shards that its manifest names. Each "
        "shard is verified by its digest in the manifest.",
    )
    checkpoint: str | None = Field(
        default=None,
        description="Or a job below the location: all files of its newest checkpoint, each "
        "verified by its digest.",
    )
    step: int | None = Field(
        default=None, ge=0, description="Step of the checkpoint; by default the newest."
    )
    destination: str | None = Field(
        default=None,
        description="Path below the root: of the file, or without a key of the folder. By default "
        "the key, the keys of the shards or of the checkpoint, or the root itself.",
    )
    unpack: Unpacking | None = Field(
        default=None,
        description="With a key: unpack the archive while it arrives. `auto` goes by its name, "
        "then by its content. `gz` and `zst` are for one compressed file.",
    )
    into: str | None = Field(
        title="Folder of the archive",
        default=None,
        description="Folder below the root that the archive is unpacked into; by default the "
        "destination without its ending.",
    )
    mode: int = Field(
        title="Permission bits",
        default=0o644,
        ge=0,
        le=0o777,
        description="Permission bits of the files, as a decimal number: 420 is `rw-r--r--`.",
    )
    owner: tuple[int, int] | None = Field(
        default=None,
        description="User id and group id of the files: `[1000, 1000]`. Needs root on the nodes.",
    )
    check: CacheCheck | None = Field(
        title="Check of present files",
        default=None,
        description="Check of files of this request from an earlier run; by default that of the "
        "options.",
    )
    sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="With a key: expected SHA-256 of the object, if the store does not keep it.",
    )

    @field_validator("key", "dataset", "checkpoint", "destination", "into", "sha256", mode="before")
    @classmethod
    def _drop_empty(cls, text: object) -> object:
        """Take an empty field of a form for one that is not given."""
        return None if text == "" else text

    def make_request(self, store: str) -> Request:
        """Return the engine's request."""
        return Request(
            store=store,
            key=self.key,
            prefix="" if self.key is self.dataset is self.checkpoint is None else None,
            dataset=self.dataset,
            checkpoint=self.checkpoint,
            step=self.step,
            destination=self.destination,
            unpack=self.unpack,
            into=self.into,
            mode=self.mode,
            owner=self.owner,
            check=self.check,
            sha256=self.sha256,
        )


class AgentHosts(BaseModel):
    """Machines on which `millrace swarm node` runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: list[Host] = Field(min_length=1, description="Machines with an agent.")
    # Bare: Prefect takes Secret[str] for a block type of its own.
    node_key: Secret = Field(  # pyright: ignore[reportMissingTypeArgument, reportUnknownVariableType]
        description="A Secret block with the key of all machines (MILLRACE_NODE_KEY)."
    )

    def find_hosts(self) -> Hosts:
        """Return the engine's settings of the nodes.

        Raises:
            ConfigurationError: The key is no text.
        """
        text: object = self.node_key.value.get_secret_value()
        key: object = self.node_key.get()  # of a text that is JSON, its value
        if not isinstance(key, str):
            key = text  # such as a key of digits only
        if not isinstance(key, str):
            raise ConfigurationError(
                "The Secret block of `node_key` has a value that is no text: save the key of the "
                "machines as a text."
            )
        return Hosts(hosts=tuple(self.hosts), key=SecretStr(key))


class RentedMachines(BaseModel):
    """Rented machines on which `millrace campaign worker` or `millrace swarm node` runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rental: str = Field(description="Name of the rental.")
    bucket: BucketLocation = Field(
        description="The Millrace Bucket block of the ledger of rentals, or its name."
    )
    vast: VastCredentials | str = Field(
        default="vast", description="The Vast.ai Credentials block that pays, or its name."
    )

    def find_hosts(self) -> Hosts:
        """Return the engine's settings of the nodes."""
        return find_node_hosts(self.rental, self.bucket, self.vast)


def make_run_name() -> str:
    """Return the name of the current run: it names the first files, and counts the other ones."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    requests = [
        each if isinstance(each, FilesRequest) else FilesRequest.model_construct(**each)
        for each in parameters.get("files") or []
    ]
    names = [
        each.dataset
        or each.checkpoint
        or each.key
        or each.prefix
        or PurePosixPath(each.url or "").name
        for each in requests
    ]
    first = names[0] if names else ""
    more = f"-and-{len(names) - 1}-more" if len(names) > 1 else ""
    return f"prewarm-{first}{more}" if first else f"prewarm{more}"


@draw_form
@flow(name="prewarm", flow_run_name=make_run_name)
def prewarm(
    files: list[FilesRequest],
    root: NodeFolder | None = None,
    cluster: RayNodes | AgentHosts | RentedMachines = RayNodes(),  # noqa: B008 - frozen
    options: PrewarmOptions | None = None,
) -> PrewarmReport:
    """Put the same files on every node of a cluster, reading each byte from the store once.

    The nodes copy the files from each other. Only an object of which nothing has a digest is read
    twice, by two nodes, which must agree. A run that was stopped fetches only missing pieces
    when it is started again. The Prefect worker must reach the machines. For a Ray cluster, the
    worker runs on a machine of the cluster.

    Args:
        files: Files to put on every node.
        root: Folder on every node of a Ray cluster; `$NAME` is replaced from the environment of the
            node. Rented machines and hosts with an agent have their own folders.
        cluster: Machines: those of a Ray cluster, rented ones, or hosts with an agent.
        options: Checks, limits and timeouts.
    """
    if not files:
        raise ConfigurationError("Name at least one location that files come from.")
    if root is None and isinstance(cluster, RayNodes):
        raise ConfigurationError("Name `root`: the folder on the nodes of the Ray cluster.")
    settings = PrewarmSettings(
        requests=tuple(each.make_request(str(i)) for i, each in enumerate(files)),
        stores={str(i): each.make_spec() for i, each in enumerate(files)},
        mirrors={str(i): each.make_mirror_specs() for i, each in enumerate(files)},
        root=None if root is None else Path(root),
        nodes=cluster if isinstance(cluster, RayNodes) else cluster.find_hosts(),
        **(options or PrewarmOptions()).model_dump(),
    )
    for each in files:
        check_right(each.location, Right.READ, each.prefix)
    warmed = warm_nodes(settings)
    report_nodes(warmed)
    return warmed.report
