"""Put the same files on every node of a cluster."""

from pathlib import Path
from typing import cast

from prefect import flow
from prefect.blocks.system import Secret
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from blocks import VastCredentials
from millrace.errors import ConfigurationError
from millrace.storage import Right
from millrace.swarm import (
    CacheCheck,
    Host,
    Hosts,
    LimitSettings,
    PrewarmReport,
    PrewarmSettings,
    RayNodes,
    Request,
    Unpacking,
)
from tasks.places import BucketLocation, InputLocation, NodeFolder, check_right
from tasks.renting import nodes_of
from tasks.warming import report_nodes, warm_nodes


class FilesRequest(InputLocation):
    """Files to put on every node: an object, the shards of a dataset, or all below a prefix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str | None = Field(
        default=None, description="One object, below the place. Left out: everything there."
    )
    dataset: str | None = Field(
        default=None,
        description="Or a dataset below the place: the shards that its manifest names, verified by "
        "their digests, and nothing else.",
    )
    destination: str | None = Field(
        default=None,
        description="The file, or without a key the folder, below the root. Left out: the key, the "
        "keys of the shards, or the root itself.",
    )
    unpack: Unpacking | None = Field(
        default=None, description="With a key: unpack it while it arrives; auto goes by its name."
    )
    into: str | None = Field(
        default=None, description="The folder that it is unpacked into, below the root."
    )
    mode: int = Field(default=0o644, ge=0, le=0o777, description="Permission bits, as a number.")
    sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="With a key: what the object must be, where you know it better than the store.",
    )

    def request(self, store: str) -> Request:
        """Return the engine's request."""
        return Request(
            store=store,
            key=self.key,
            prefix="" if self.key is None and self.dataset is None else None,
            dataset=self.dataset,
            destination=self.destination,
            unpack=self.unpack,
            into=self.into,
            mode=self.mode,
            sha256=self.sha256,
        )


class Machines(BaseModel):
    """Machines on which `millrace node` runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: list[Host] = Field(min_length=1, description="The machines.")
    # Bare: Prefect takes Secret[str] for a block type of its own.
    key: Secret = Field(  # pyright: ignore[reportMissingTypeArgument, reportUnknownVariableType]
        description="A Secret block: the key that all of them were given (MILLRACE_NODE_KEY)."
    )

    def nodes(self) -> Hosts:
        """Return the engine's settings of the nodes."""
        return Hosts(hosts=tuple(self.hosts), key=SecretStr(cast("str", self.key.get())))


class RentedMachines(BaseModel):
    """Machines that are rented, and run `millrace work` or `millrace node` on port 70000."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rental: str = Field(description="Its name.")
    bucket: BucketLocation = Field(
        description="The Millrace Bucket block, or its name, where the rental is written down."
    )
    vast: VastCredentials | str = Field(
        default="vast", description="The Vast.ai Credentials block that pays, or its name."
    )

    def nodes(self) -> Hosts:
        """Return the engine's settings of the nodes."""
        return nodes_of(self.rental, self.bucket, self.vast)


class Care(BaseModel):
    """Limits and checks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: CacheCheck = Field(
        default=CacheCheck.SAMPLED,
        description="Check of files from an earlier run: by sampled digests, or by all.",
    )
    least: float = Field(
        default=0.5, gt=0.0, le=1.0, description="The share of the nodes that must live."
    )
    limits: LimitSettings = Field(
        default=LimitSettings(), description="Limits on what goes on at once."
    )


@flow(name="prewarm", flow_run_name="prewarm")
def prewarm(
    files: list[FilesRequest],
    root: NodeFolder,
    cluster: RayNodes | Machines | RentedMachines = RayNodes(),  # noqa: B008 - frozen
    care: Care = Care(),  # noqa: B008 - frozen
) -> PrewarmReport:
    """Put the same files on every node of a cluster, each byte out of the store once.

    The rest goes from node to node. A run that was stopped fetches only what is missing when it
    is started again. The worker must reach the machines; a Ray cluster, from a machine of it.

    Args:
        files: Files to put on every node.
        root: The folder on every node; `$NAME` is filled in from the node's own environment.
        cluster: Machines: a Ray cluster's, rented ones, or hosts with an agent.
        care: Checks, and limits on what goes on at once.
    """
    if not files:
        raise ConfigurationError("Name at least one place that files come from.")
    settings = PrewarmSettings(
        requests=tuple(each.request(str(i)) for i, each in enumerate(files)),
        stores={str(i): each.store() for i, each in enumerate(files)},
        root=Path(root),
        nodes=cluster if isinstance(cluster, RayNodes) else cluster.nodes(),
        check=care.check,
        least=care.least,
        limits=care.limits,
    )
    for each in files:
        check_right(each.place, Right.READ, each.prefix)
    warmed = warm_nodes(settings)
    report_nodes(warmed)
    return warmed.report
