"""The box of a DTensor's local shard has exactly the values that this process holds."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.checkpoints import Saver, load_into
from millrace.checkpoints.tensor_shards import find_local_shard
from millrace.errors import ConfigurationError
from millrace.storage import open_store


def cut(tensor: torch.Tensor, count: int, number: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, count)
    return chunks[number] if number < len(chunks) else tensor[:0]


def make_strided(whole: torch.Tensor, dp: int, tp: int, rank: int, *, factor: int) -> DTensor:
    """Distribute as FSDP2 does: it cuts the chunks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    local = cut(cut(whole, tp, rank % tp), dp, rank // tp)
    placements = [_StridedShard(0, split_factor=factor), Shard(0)]
    form = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **form)


@pytest.fixture
def join():
    """Join a process group of many ranks that none of the others joins."""

    def join_as(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield join_as
    dist.destroy_process_group()


# In the last two, torch's own list names boxes of the right size with other rows.
@pytest.mark.parametrize("layout", [(8, 2, 2), (7, 3, 2), (16, 4, 3), (27, 3, 4), (38, 4, 4)])
def test_shards_of_fsdp_with_tensor_parallelism_have_their_own_rows(join, layout):
    rows, dp, tp = layout
    whole = torch.arange(2.0 * rows).view(rows, 2)
    seen = torch.zeros(rows, dtype=torch.int64)
    for rank in range(dp * tp):
        join(rank, dp * tp)
        shard = find_local_shard("w", make_strided(whole, dp, tp, rank, factor=tp))
        box = slice(shard.start[0], shard.start[0] + len(shard.local))
        assert torch.equal(shard.local, whole[box]), rank
        seen[box] += 1
    assert seen.eq(1).all()


def test_a_layout_whose_rows_are_not_known_is_refused(join):
    join(0, 6)
    whole = torch.zeros(12, 2)
    with pytest.raises(ConfigurationError, match="redistribute it to Shard or Replicate"):
        find_local_shard("w", make_strided(whole, 2, 3, 0, factor=5))
    mesh = init_device_mesh("cpu", (6,))
    form = {"shape": whole.shape, "stride": whole.stride()}
    padded = DTensor.from_local(whole[:3], mesh, [Shard(0)], run_check=False, **form)
    with pytest.raises(ConfigurationError, match="redistribute it to Shard or Replicate"):
        find_local_shard("w", padded)


@pytest.mark.parametrize("world", [1, 2])
def test_the_ranks_of_a_model_have_to_name_the_step_that_they_load(join, tmp_path, world):
    """Each rank could find another newest checkpoint: one that another rank sees as damaged."""
    join(0, world)
    whole, store = torch.arange(8.0).view(4, 2), open_store(tmp_path.as_uri())
    with Saver(store, "job") as saver:
        saver.save({"lr": torch.ones(1), "w": whole}, step=3).result()
    local = torch.zeros(4 // world, 2)
    mesh = init_device_mesh("cpu", (world,))
    spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    state = {"lr": torch.zeros(1), "w": spread}
    if world > 1:
        with pytest.raises(ConfigurationError, match="'w' is distributed over several ranks"):
            load_into(state, store, "job")
        assert not local.any()
        load_into(state, store, "job", step=3)
    else:
        load_into(state, store, "job")
    assert torch.equal(local, whole[: len(local)])
