"""Members on the nodes of a Ray cluster, each with the checkpoint on its own disk.

The bucket's credentials travel to the nodes over Ray: give some that are for the job's prefix, and
a cluster that asks for its token.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from millrace import cluster, errors
from millrace.checkpoints.cooldown.member import MemberSettings, end_epoch


class RayMembers:
    """Members that were started.

    Attributes:
        names: Of those that have a checkpoint.
        without: Why the other nodes are none.
    """

    def __init__(self, names: list[str], without: dict[str, str]) -> None:
        self.names, self.without = names, without
        self.faults: dict[str, str] = {}


@contextmanager
def run_members_on_ray(
    settings: MemberSettings, address: str | None = None
) -> Generator[RayMembers]:
    """Have every living node that has the checkpoint end the epoch; wait for them at the end.

    Args:
        settings: For all of them. The source's URL may name variables of a node's environment
            (``file:///$SCRATCH/checkpoints``).
        address: Of the cluster.

    Yields:
        The members. When the block has ended, ``faults`` has what went wrong on which node.

    Raises:
        ConfigurationError: There is no cluster.
        NotFoundError: No node has such a checkpoint.
    """
    with cluster.connect(address) as ray:
        nodes = {
            cluster.make_node_name(node): cluster.make_node_options(node)
            for node in cluster.list_living_nodes(ray)
        }
        asked = {
            name: ray.remote(_explain_missing).options(max_retries=0, **options).remote(settings)
            for name, options in nodes.items()
        }
        without = {name: why for name, one in asked.items() if (why := _await_result(ray, one))}
        names = [name for name in nodes if name not in without]
        if not names:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(without.items())[:5])
            raise errors.NotFoundError(f"No node has a checkpoint to end the epoch with: {reasons}")
        members = RayMembers(names, without)
        counted = settings.model_copy(update={"members": len(names)})
        running = {
            name: ray.remote(_end_epoch).options(max_retries=0, **nodes[name]).remote(counted, name)
            for name in names
        }
        try:
            yield members
        except BaseException:
            for one in running.values():
                ray.cancel(one, force=True)
            raise
        members.faults = {
            name: why for name, one in running.items() if (why := _await_result(ray, one))
        }


def _await_result(ray: Any, asked: Any) -> str:
    """Return the result of a task, or the reason why it failed."""
    try:
        return str(ray.get(asked))
    except Exception as error:  # noqa: BLE001 - a node that fails is a member less
        return errors.format_error(error)


def _expand_variables(settings: MemberSettings) -> MemberSettings:
    """Return the settings with the variables of this node filled into the source's URL."""
    source = settings.source
    url = os.path.expandvars(source.url)
    return settings.model_copy(update={"source": source.model_copy(update={"url": url})})


def _explain_missing(settings: MemberSettings) -> str:
    """Return the reason why there is no checkpoint on this node; empty if there is one."""
    try:
        _expand_variables(settings).source.open()
    except errors.MillraceError as error:
        return str(error)
    return ""


def _end_epoch(settings: MemberSettings, name: str) -> str:
    """End the epoch as a member; empty, as the bucket says what came of it."""
    end_epoch(_expand_variables(settings), name)
    return ""
