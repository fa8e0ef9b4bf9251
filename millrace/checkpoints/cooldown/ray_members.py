"""Members on the nodes of a Ray cluster, each with the checkpoint on its own disk.

Ray sends the bucket's credentials to the nodes. Use credentials for the job's prefix only, and a
cluster with token authentication.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from millrace import cluster, errors
from millrace.checkpoints.cooldown.member import MemberSettings, end_epoch
from millrace.checkpoints.settings import OnTimeout

_RESULT_WAIT = 30.0  # seconds for the results of members after the block, also after the timeout


class RayMembers:
    """Members on the nodes of a cluster.

    Attributes:
        names: Names of the nodes that have the checkpoint.
        without: Sentence for each other node, with the reason.
    """

    def __init__(self, names: list[str], without: dict[str, str]) -> None:
        self.names, self.without = names, without
        self.faults: dict[str, str] = {}


@contextmanager
def run_members_on_ray(
    settings: MemberSettings, address: str | None, timeout: timedelta
) -> Generator[RayMembers]:
    """Start a member on every node that has the checkpoint, and wait for all at the end.

    A node that does not answer, for example since its disk stalls, holds up the others for
    ``join_timeout`` or half of the timeout, whichever is shorter. A member that has not ended by
    the timeout is stopped.

    Args:
        settings: Settings of all members. The source's URL may have variables of a node's
            environment (``file:///$SCRATCH/checkpoints``).
        address: Address of the cluster; None as for `cluster.connect`.
        timeout: Longest wait for all members, from the call on.

    Yields:
        The members. After the block, ``faults`` has the errors by node.

    Raises:
        ConfigurationError: There is no such cluster.
        NotFoundError: No node has the checkpoint.
    """
    with cluster.connect(address) as ray:
        nodes = {
            cluster.make_node_name(node): cluster.make_node_options(node)
            for node in cluster.list_living_nodes(ray)
        }
        began = time.monotonic()
        limit = timeout.total_seconds()
        asked = {
            name: ray.remote(_explain_missing).options(max_retries=0, **options).remote(settings)
            for name, options in nodes.items()
        }
        wait = min(limit / 2, settings.join_timeout.total_seconds())
        without = _await_results(ray, asked, wait)
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
        wait = max(_RESULT_WAIT, began + limit - time.monotonic())
        # An upload in the background has its own limit, which only counts time without progress.
        is_limited = settings.cooldown.on_timeout is not OnTimeout.BACKGROUND
        members.faults = _await_results(ray, running, wait if is_limited else None)


def _await_results(ray: Any, asked: dict[str, Any], wait: float | None) -> dict[str, str]:
    """Wait for the tasks of nodes, and return the reason of each failure, by node.

    Args:
        ray: Module ``ray``.
        asked: Task of each node.
        wait: Seconds after which the tasks that have not ended are stopped, and have failed; None
            to wait for their ends.
    """
    deadline = None if wait is None else time.monotonic() + wait
    failed: dict[str, str] = {}
    for name, one in asked.items():
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            why = str(ray.get(one, timeout=left))
        except ray.exceptions.GetTimeoutError:
            ray.cancel(one, force=True)
            why = (
                f"It did not answer in {wait:.0f} s. Look for a disk or a store that stalls there."
            )
        except Exception as error:  # noqa: BLE001 - a node that fails is a member less
            why = errors.format_error(error)
        if why:
            failed[name] = why
    return failed


def _expand_variables(settings: MemberSettings) -> MemberSettings:
    """Return the settings, with this node's variables expanded in the source's URL."""
    source = settings.source
    url = os.path.expandvars(source.url)
    return settings.model_copy(update={"source": source.model_copy(update={"url": url})})


def _explain_missing(settings: MemberSettings) -> str:
    """Return the reason why this node has no checkpoint; empty if it has one."""
    try:
        _expand_variables(settings).source.open()
    except errors.MillraceError as error:
        return str(error)
    return ""


def _end_epoch(settings: MemberSettings, name: str) -> str:
    """End the epoch as a member. The result is in the bucket, so the return value is empty."""
    end_epoch(_expand_variables(settings), name)
    return ""
