"""Collective operations of the ranks of one worker, whose model FSDP may shard.

An error on one rank is raised on all of them. Otherwise the other ranks would wait in the next
collective forever. Ranks exchange bytes and JSON as tensors.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import orjson
import torch
import torch.distributed

from millrace import errors
from millrace.checkpoints.tensor_shards import find_local_shard

T = TypeVar("T")
distributed: Any = torch.distributed


class RankGroup:
    """Group of the ranks of a worker.

    Every rank makes a group, and calls the same methods in the same order.

    Args:
        group: Process group of the ranks; by default there is one rank.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.world = 0, 1
        if group is not None:
            self.rank, self.world = distributed.get_rank(group), distributed.get_world_size(group)
            gpu = "nccl" in distributed.get_backend(group)
            self._device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"

    def run_on_each(self, call: Callable[[], T]) -> T:
        """Call a function on every rank, and return the result of this rank.

        Raises:
            MillraceError: The function failed on any rank.
        """
        return self._exchange_results(call, lambda _: None)[0]

    def gather_results(self, call: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results of all ranks, as JSON."""
        mine, others = self._exchange_results(call, lambda value: value)
        return [orjson.loads(said)["value"] for said in others] if others else [mine]

    def run_on_first(self, call: Callable[[], T]) -> T:
        """Call a function on the first rank only, and return its result on all ranks, as JSON."""
        none: Callable[[], Any] = lambda: None  # noqa: E731
        return self.gather_results(call if self.rank == 0 else none)[0]

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks on the first rank, and an empty list on the others."""
        if self._group is None:
            return [mine]
        sizes = self._exchange_sizes(mine)
        sent = self._pad(mine, max(sizes))
        room = [torch.empty_like(sent) for _ in sizes] if self.rank == 0 else None
        distributed.gather(sent, room, group=self._group, group_dst=0)
        return [_to_bytes(one, size) for one, size in zip(room or [], sizes, strict=False)]

    def broadcast(self, whole: torch.Tensor | None, into: torch.Tensor, owner: int) -> None:
        """Copy the values of a tensor from one rank to the tensors or shards of all ranks.

        Args:
            whole: Whole tensor in float32 on the owner; None on the other ranks.
            into: Tensor or DTensor to overwrite.
            owner: Rank with the values.
        """
        if self._group is not None:
            shape, device = tuple(into.shape), self._device
            sent = (
                torch.empty(shape, dtype=torch.float32, device=device)
                if whole is None
                else whole.to(device)
            )
            distributed.broadcast(sent, group=self._group, group_src=owner)
            whole = sent
        assert whole is not None
        shard = find_local_shard("", into)
        ends = zip(shard.start, shard.local.shape, strict=True)
        shard.local.copy_(whole[tuple(slice(start, start + size) for start, size in ends)])

    # -- exchanges

    def _exchange_results(
        self, call: Callable[[], T], of: Callable[[T], Any]
    ) -> tuple[T, list[bytes]]:
        """Call a function, and exchange its results or errors between all ranks.

        Args:
            call: Function to call.
            of: Function that returns the part of a result to exchange.

        Returns:
            Result of this rank, and the JSON of all ranks.
        """
        if self._group is None:
            return call(), []
        made: list[T] = []
        failed: BaseException | None = None
        try:
            made.append(call())
            said = orjson.dumps({"value": of(made[0])})
        except BaseException as error:  # noqa: BLE001 - raised after the exchange
            failed, said = error, orjson.dumps(_describe_error(self.rank, error))
        found = self._gather_to_all(said)
        try:
            for rank, one in enumerate(map(orjson.loads, found)):
                if "error" in one:  # all ranks raise the first error
                    if rank == self.rank and failed is not None:
                        raise failed
                    raise getattr(errors, one["error"])(one["sentence"]) from failed
        finally:
            failed = None  # its traceback would keep this frame and the group alive
        return made[0], found

    def _gather_to_all(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks on every rank."""
        sizes = self._exchange_sizes(mine)
        sent = self._pad(mine, max(sizes))
        room = [torch.empty_like(sent) for _ in sizes]
        distributed.all_gather(room, sent, group=self._group)
        return [_to_bytes(one, size) for one, size in zip(room, sizes, strict=True)]

    def _exchange_sizes(self, mine: bytes) -> list[int]:
        size = torch.tensor([len(mine)], dtype=torch.int64, device=self._device)
        room = [torch.empty_like(size) for _ in range(self.world)]
        distributed.all_gather(room, size, group=self._group)
        return [int(one.item()) for one in room]

    def _pad(self, mine: bytes, size: int) -> torch.Tensor:
        sent = torch.zeros(max(1, size), dtype=torch.uint8)
        if mine:
            sent[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return sent.to(self._device)


def _to_bytes(tensor: torch.Tensor, size: int) -> bytes:
    return tensor[:size].cpu().numpy().tobytes()


def _describe_error(rank: int, error: BaseException) -> dict[str, str]:
    """Return the name of an error's nearest class in `millrace.errors`, and its message."""
    if not isinstance(error, errors.MillraceError):
        sentence = f"Rank {rank} of this worker: {errors.format_error(error)}"
        return {"error": errors.WorkerError.__name__, "sentence": sentence}
    kind = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
    return {"error": kind.__name__, "sentence": str(error)}
