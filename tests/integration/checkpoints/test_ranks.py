"""Several ranks save one checkpoint together, and others load it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from millrace import errors
from millrace.checkpoints import (
    PendingSave,
    Ranks,
    RetentionSettings,
    Saver,
    SaveSettings,
    apply_retention,
    find_newest_verified,
    load,
    load_into,
    plan_retention,
    verify,
)
from millrace.checkpoints.tensor_shards import is_covered_once
from millrace.checkpoints.tree import flatten_state
from millrace.keys.checkpoints import CheckpointKeys
from millrace.schemas.checkpoint import Chunk
from millrace.storage import Store, delete, list_objects, open_store, put
from tests.ranks import run_ranks

KEYS = CheckpointKeys("job")
SMALL = SaveSettings(part_bytes=4096, ranks_within=timedelta(seconds=20))
SHORT = SMALL.model_copy(update={"ranks_within": timedelta(milliseconds=1)})


run = partial(run_ranks, "tests.integration.checkpoints.rank")


def test_a_model_sharded_by_fsdp_is_saved_and_loaded_by_another_number_of_ranks(tmp_path):
    saved = run(tmp_path, "save", 4)
    assert [code for code, _ in saved] == [0] * 4, saved
    assert len({text for _, text in saved}) == 1  # all know the same checkpoint
    store = open_store(tmp_path.as_uri())
    found = find_newest_verified(store, "job")
    assert found is not None
    assert found.position == {"sample": 5}

    whole = load_file(tmp_path / "whole.safetensors")
    assert len(whole) > 12  # the parameters, and AdamW's moments
    loaded = load(store, "job", rank=2)
    assert loaded.state["lr"] == 0.01
    assert loaded.own["seen"] == 20
    tensors = flatten_state(loaded.state)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())
    # On four ranks, two of which are replicas of the other two.
    assert {len(found.tensors[name].chunks) for name in whole if "weight" in name} == {1, 2}

    restored = run(tmp_path, "restore", 3)
    assert [code for code, _ in restored] == [0] * 3, restored
    again = load_file(tmp_path / "restored.safetensors")
    assert set(again) == set(whole)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_rows_that_tensor_parallelism_and_fsdp_cut_unevenly_are_saved_and_filled(tmp_path):
    ended = run(tmp_path, "uneven", 6)
    assert [code for code, _ in ended] == [0] * 6, ended
    loaded = load(open_store(tmp_path.as_uri()), "job").state
    whole = load_file(tmp_path / "whole.safetensors")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in whole.items()
    }


def test_of_a_rank_that_dies_the_others_hear_and_there_is_no_checkpoint(tmp_path):
    ended = run(tmp_path, "deadly", 4)
    assert [code for code, _ in ended] == [1, 1, 1, -9]
    assert all("Not all 4 ranks have saved their share of step 7" in text for _, text in ended[:3])
    assert find_newest_verified(open_store(tmp_path.as_uri()), "job") is None


def save(store: Store, rank: int, attempt: str = "a", world: int = 3, value: float = 1.0) -> str:
    """Save as one rank a state that all have, and something of its own."""
    settings = SMALL if world == 3 else SHORT
    with Saver(store, "job", settings, ranks=Ranks(rank, world, attempt)) as saver:
        state = {"w": torch.full((2000,), value), "lr": 0.1}
        return saver.save(state, step=1, own={"rank": rank}).result().root


def test_what_all_have_is_saved_once_and_what_each_has_alone_by_each(store):
    with ThreadPoolExecutor(3) as pool:
        roots = set(pool.map(lambda rank: save(store, rank), range(3)))
    assert len(roots) == 1
    found = load(store, "job", rank=1)
    assert found.own == {"rank": 1}
    assert found.state["lr"] == 0.1
    assert len(found.checkpoint.tensors["w"].chunks) == 2  # of the first rank, cut in two
    assert not verify(store, found.checkpoint)
    assert load(store, "job").own == {}
    assert load(store, "job", rank=9).own == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_ranks_without_anything_to_save_complete_the_checkpoint(folder, in_place):
    """Save as replicas of a whole model, of which the first rank saves everything."""

    def save_replica(rank: int) -> None:
        with Saver(folder, "job", SMALL, ranks=Ranks(rank, 3, "a")) as saver:
            for step in (1, 2):
                state = {"w": torch.full((2000,), float(step))}
                saver.save(state, step=step, in_place=in_place).result()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(save_replica, range(3)))
    assert load(folder, "job", step=1).state["w"].tolist() == [1.0] * 2000
    assert load(folder, "job").state["w"].tolist() == [2.0] * 2000


def test_ranks_that_have_other_layers_save_them_all(store):
    """Save as the stages of a pipeline: tensors of other ranks have no content here."""
    stages = [torch.full((1500,), float(n)) for n in range(3)]

    def save_stage(rank: int) -> None:
        layers = {
            str(n): layer if n == rank else torch.empty_like(layer, device="meta")
            for n, layer in enumerate(stages)
        }
        mine = f"layers.{rank}"
        with Saver(store, "job", SMALL, ranks=Ranks(rank, 3, "a")) as saver:
            saver.save({"layers": layers, "lr": 0.1}, step=1, mine=mine.__eq__).result()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(save_stage, range(3)))
    found = load(store, "job")
    assert found.state["lr"] == 0.1
    assert [found.state["layers"][str(n)].tolist() for n in range(3)] == [
        layer.tolist() for layer in stages
    ]
    assert not verify(store, found.checkpoint)
    with (
        Saver(store, "job", SMALL) as saver,
        pytest.raises(errors.ConfigurationError, match=r"layers\.0 is on the device meta"),
    ):
        saver.save({"layers": [torch.empty(2, device="meta")]}, step=2)


def test_shares_of_two_attempts_are_never_one_checkpoint(folder):
    with pytest.raises(errors.UnavailableError, match="Not all 2 ranks"):
        save(folder, 0, "first", world=2)
    with pytest.raises(errors.UnavailableError, match="Not all 2 ranks"):
        save(folder, 1, "second", world=2, value=2.0)
    assert find_newest_verified(folder, "job") is None


def test_the_same_attempt_cannot_say_two_things(folder):
    with pytest.raises(errors.UnavailableError):
        save(folder, 0, world=2)
    with pytest.raises(errors.ConflictError, match="differs in parts"):
        save(folder, 0, world=2, value=2.0)
    again = threading.Thread(target=save, args=(folder, 1), kwargs={"world": 2})
    again.start()
    again.join()
    assert find_newest_verified(folder, "job") is not None  # the first one's share was there


def test_shares_of_two_saves_of_a_step_are_never_one_checkpoint(folder):
    """Rank 1 fails at a step. Then both rewind, and come to the step with other weights."""

    def begin(saver: Saver, rank: int, value: float) -> PendingSave:
        state = {name: torch.full((8,), value) for name in ("0", "1")}
        return saver.save(state, step=1, mine=str(rank).__eq__)

    with (
        Saver(folder, "job", SHORT, ranks=Ranks(0, 2, "a")) as zero,
        Saver(folder, "job", SMALL, ranks=Ranks(1, 2, "a")) as one,
    ):
        with pytest.raises(errors.UnavailableError, match="Not all 2 ranks"):
            begin(zero, 0, 1.0).result()
        with pytest.raises(errors.ConfigurationError, match="position"):
            one.save({}, step=1, position={"at": float("nan")})
        with pytest.raises(errors.UnavailableError, match="Not all 2 ranks"):
            begin(zero, 0, 2.0).result()
        begin(one, 1, 2.0).result()
    found = load(folder, "job")
    assert {name: tensor[0].item() for name, tensor in found.state.items()} == {"0": 2.0, "1": 2.0}
    assert not verify(folder, found.checkpoint)


def test_shares_whose_files_are_gone_make_no_checkpoint(folder):
    """Retention deletes the files of a rank that waits for a slow one."""
    with pytest.raises(errors.UnavailableError, match="Not all 2 ranks"):
        save(folder, 0, world=2)
    delete(folder, [stat.key for stat in list_objects(folder, KEYS.make_parts_prefix(1))])
    with pytest.raises(errors.ChangedError, match="files of step 1 of job were deleted"):
        save(folder, 1, world=2)
    assert find_newest_verified(folder, "job") is None


def test_what_is_no_share_makes_no_rank_and_a_damaged_one_is_named(folder):
    put(folder, f"{KEYS.make_shares_prefix(1, 'a', 1)}notes.txt", b"no share")
    put(folder, KEYS.make_share_key(1, "a", 1, 7), b"of no rank")
    with pytest.raises(errors.UnavailableError, match="Not all 2 ranks"):
        save(folder, 0, world=2)
    put(folder, KEYS.make_share_key(1, "a", 1, 0), b"nonsense")
    with pytest.raises(errors.CorruptError, match=r"1 of 2 records .*shares/a\.1/000000\.json"):
        save(folder, 1, world=2)
    assert find_newest_verified(folder, "job") is None


def test_another_checkpoint_of_the_step_is_not_taken_for_ones_own(folder):
    save(folder, 0, "first", world=1)
    with pytest.raises(errors.ConflictError, match="another content"):
        save(folder, 0, "second", world=1, value=2.0)


def test_another_position_of_the_first_rank_is_a_conflict(folder):
    def save_at(rank: int, attempt: str, sample: int) -> None:
        with Saver(folder, "job", SMALL, ranks=Ranks(rank, 2, attempt)) as saver:
            saver.save({"lr": 0.1}, step=1, position={"sample": sample}).result()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: save_at(rank, "first", 7 + rank), range(2)))
    assert load(folder, "job").checkpoint.position == {"sample": 7}
    with pytest.raises(errors.ConflictError, match="differs in position:"):
        save_at(0, "second", 8)


def test_retention_removes_the_shares_and_keeps_the_checkpoint(folder):
    save(folder, 0, world=1)
    rules = RetentionSettings(grace=timedelta(microseconds=-1))
    plan = plan_retention(folder, "job", rules)
    assert [removal.key for removal in plan.removals] == [KEYS.make_share_key(1, "a", 1, 0)]
    assert not apply_retention(folder, plan).failures
    found = find_newest_verified(folder, "job")
    assert found is not None
    assert not list(list_objects(folder, KEYS.make_shares_prefix(1, "a", 1)))


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"w": torch.zeros(3)}, r"w is torch.float32 of the shape \[3\].*of \[2000\]"),
        ({"w": torch.zeros(2000, dtype=torch.int32)}, "w is torch.int32"),
        ({"other": torch.zeros(1)}, "has no other"),
    ],
)
def test_a_state_of_another_form_is_refused(folder, state, sentence):
    save(folder, 0, world=1)
    with pytest.raises(errors.ConfigurationError, match=sentence):
        load_into(state, folder, "job")


@pytest.mark.parametrize(("rank", "world", "attempt"), [(2, 2, "a"), (-1, 2, "a"), (0, 1, "a/b")])
def test_ranks_that_cannot_be_are_refused(rank, world, attempt):
    with pytest.raises(errors.ConfigurationError):
        Ranks(rank, world, attempt)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """A tensor cut in two again and again, wherever."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        low = tuple(at if n == axis else length for n, length in enumerate(size))
        high = tuple(length - at if n == axis else length for n, length in enumerate(size))
        moved = tuple(a + at if n == axis else a for n, a in enumerate(start))
        boxes += [(start, low), (moved, high)]
    chunks = [Chunk(part=0, name="", offset=0, start=start, shape=size) for start, size in boxes]
    return shape, draw(st.permutations(chunks))


@given(tiling=tilings(), data=st.data())
def test_a_tensor_is_whole_if_each_element_is_there_once(tiling, data):
    shape, chunks = tiling
    assert is_covered_once(shape, tuple(chunks))
    number = data.draw(st.integers(0, len(chunks) - 1))
    chosen = chunks[number]
    if 0 in chosen.shape:
        return
    assert not is_covered_once(shape, (*chunks, chosen))
    assert not is_covered_once(shape, tuple(chunks[:number] + chunks[number + 1 :]))
    moved = chosen.model_copy(update={"start": (chosen.start[0] + 1, *chosen.start[1:])})
    assert not is_covered_once(shape, (*chunks[:number], moved, *chunks[number + 1 :]))
