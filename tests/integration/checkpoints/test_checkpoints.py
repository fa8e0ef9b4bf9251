"""Checkpoints saved, found, verified and loaded, on stores of every kind."""

import gc
import json
import subprocess
import threading
import weakref
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
from pydantic import ByteSize
from safetensors.torch import load_file

from millrace import errors
from millrace.checkpoints import (
    Saver,
    SaveSettings,
    VerifyDepth,
    find_jobs,
    find_newest,
    find_newest_verified,
    list_steps,
    load,
    load_into,
    read_checkpoint,
    verify,
)
from millrace.checkpoints.find import commit_checkpoint, compute_root, quarantine
from millrace.checkpoints.progress_events import CheckpointDamaged, PartStored
from millrace.checkpoints.tensor_copies import BytesCopy
from millrace.checkpoints.tree import SKELETON
from millrace.digest import compute_digest
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event
from millrace.records import fetch
from millrace.schemas.checkpoint import Checkpoint, Quarantine
from millrace.storage import (
    Store,
    StoreSpec,
    copy,
    delete,
    list_objects,
    open_store,
    put,
    read,
)
from tests.stores import make_spec

KEYS = CheckpointKeys("runs/one")
SMALL = SaveSettings(part_bytes=4096)  # so that a small model is in many files


def state_of(seed: int) -> dict[str, object]:
    """A state with tensors of several types, one of them larger than a file."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "embed": torch.randn(300, 16, generator=dice),
            "half": torch.randn(64, 8, generator=dice).to(torch.bfloat16),
            "empty": torch.empty(0, 4),
            "scale": torch.randn((), generator=dice),
            "strided": torch.randn(20, 30, generator=dice).t(),
        },
        "optimizer": {"state": {0: {"step": 3, "m": torch.randn(500, generator=dice)}}, "lr": 1e-3},
    }


def save(store: Store, step: int, state: dict[str, object], **more: object) -> Checkpoint:
    with Saver(store, KEYS.job, SMALL) as saver:
        return saver.save(state, step=step, **more).result()  # pyright: ignore[reportArgumentType]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    return one == other


def parts_of(store: Store, step: int) -> list[str]:
    return [stat.key for stat in list_objects(store, KEYS.make_parts_prefix(step))]


def test_what_was_saved_is_loaded(store):
    state = state_of(1)
    position = {"shard": 7, "row": 10**12}
    saved = save(store, 5, state, position=position, run="r1", notes={"why": "a test"})
    found = load(store, KEYS.job)
    assert same(found.state, state)
    assert found.checkpoint == saved == find_newest_verified(store, KEYS.job)
    assert (saved.step, saved.run, saved.position) == (5, "r1", position)
    assert len(parts_of(store, 5)) == len(saved.parts) > 5
    assert verify(store, saved) == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_with_odd_strides_are_saved(folder, in_place):
    large = torch.arange(24.0).view(4, 6)
    state = {
        "one": large[:1, 0], "row": large[1:2], "part": large[2, 3:5], "turned": large.t(),
        "none": large[:0], "scalar": large[3, 2], "long": large[::2, :1],
    }  # fmt: skip
    with Saver(folder, "job") as saver:
        saver.save(state, step=1, in_place=in_place).result()
    found = load(folder, "job").state
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_any_reader_of_safetensors_reads_the_files(folder, tmp_path):
    saved = save(folder, 1, state_of(1))
    tensors: dict[str, torch.Tensor] = {}
    for part in saved.parts:
        tensors |= load_file(tmp_path / KEYS.make_part_key(1, part.digest))
    embed = torch.cat([tensors[c.name] for c in saved.tensors["model.embed"].chunks])
    assert len(saved.tensors["model.embed"].chunks) > 1
    assert torch.equal(embed, state_of(1)["model"]["embed"])  # pyright: ignore[reportIndexIssue]
    assert tensors["model.half"].dtype == torch.bfloat16


def test_the_newest_step_is_found_by_listing(store):
    for step in (9, 10, 100):
        save(store, step, state_of(step))
    put(store, f"{KEYS.make_folder_prefix(1000)}parts/half-written", b"")
    assert list_steps(store, KEYS.job) == [9, 10, 100, 1000]
    found = find_newest(store, KEYS.job)
    assert found is not None
    assert found.step == 100
    assert load(store, KEYS.job).checkpoint.step == 100
    assert load(store, KEYS.job, step=9).checkpoint.step == 9


def test_jobs_are_found_wherever_they_are(store):
    for job in ("one", "runs/two", "runs/deep/three"):
        with Saver(store, job, SMALL) as saver:
            saver.save({"w": torch.ones(1)}, step=1)
    put(store, "words/shards/webdataset/train/train-00000-000000.tar", b"")
    put(store, "checkpoints/no-job", b"")
    assert sorted(find_jobs(store)) == ["one", "runs/deep/three", "runs/two"]


def test_jobs_below_a_job_are_found_but_not_in_the_folders_of_its_members(folder):
    deep = "/".join("abcdefghijklmnop")  # as many folders as a name can have
    for job in (
        "lab", "lab/run1", "lab/run1/a/b", "lab/members/a", "lab/epochs/x", "x/members/y", deep
    ):  # fmt: skip
        put(folder, CheckpointKeys(job).make_metadata_key(1), b"")
    assert sorted(find_jobs(folder)) == [deep, "lab", "lab/run1", "lab/run1/a/b", "x/members/y"]
    assert list(find_jobs(folder, "lab/", deepest=1)) == ["lab/run1"]


def test_without_a_checkpoint_there_is_none(store):
    assert find_newest_verified(store, KEYS.job) is None
    with pytest.raises(errors.NotFoundError, match="no checkpoint"):
        load(store, KEYS.job)


def test_a_change_of_the_state_after_the_call_does_not_reach_the_files(folder):
    state = state_of(1)
    with Saver(folder, KEYS.job, SMALL) as saver:
        for step in range(5):
            saving = saver.save(state, step=step)
            for tensor in state["model"].values():  # pyright: ignore[reportAttributeAccessIssue]
                tensor.add_(1)
            state["optimizer"]["state"][0]["m"].zero_()  # pyright: ignore[reportIndexIssue]
            saving.result()
    assert same(load(folder, KEYS.job, step=0).state, state_of(1))
    m = load(folder, KEYS.job, step=4).state["optimizer"]["state"][0]["m"]
    assert not m.any()


def test_equal_states_are_equal_files_whoever_saves_them(store):
    first = save(store, 3, state_of(1))
    sent: list[int] = []

    def heard(event: Event) -> None:
        if isinstance(event, PartStored):
            sent.append(event.sent)

    delete(store, [KEYS.make_metadata_key(3)])  # as of a saver that was killed right before it
    with Saver(store, KEYS.job, SMALL, progress=heard) as saver:
        again = saver.save(state_of(1), step=3).result()
    assert again.root == first.root
    assert again.parts == first.parts
    assert len(sent) == len(first.parts)
    assert not any(sent)


def test_a_step_has_one_content(store):
    first = save(store, 3, state_of(1))
    assert save(store, 3, state_of(1)) == first
    with pytest.raises(errors.ConflictError, match="another content"):
        save(store, 3, state_of(2))
    assert same(load(store, KEYS.job).state, state_of(1))


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        ({"position": {"sample": 2}}, "in position:"),
        ({"notes": {"loss": "2"}}, "in notes:"),
        ({"position": {}, "notes": {}}, "in position and notes:"),
    ],
)
def test_equal_tensors_with_another_position_or_other_notes_are_a_conflict(store, other, differing):
    given = {"position": {"sample": 1}, "notes": {"loss": "1"}}
    first = save(store, 3, state_of(1), run="one", **given)
    assert save(store, 3, state_of(1), run="resumed", **given) == first
    with pytest.raises(errors.ConflictError, match=differing):
        save(store, 3, state_of(1), **given | other)
    assert load(store, KEYS.job).checkpoint == first


def test_files_whose_bytes_are_the_same_can_be_referred_to(store):
    state = state_of(1)
    settings = SMALL.model_copy(update={"refer": True})
    with Saver(store, KEYS.job, settings) as saver:
        saver.save(state, step=1).result()
        state["model"]["scale"].add_(1)  # pyright: ignore[reportIndexIssue]
        second = saver.save(state, step=2).result()
    assert 0 < len(parts_of(store, 2)) < len(second.parts)
    assert {part.step for part in second.parts} == {1, 2}
    assert same(load(store, KEYS.job, step=2).state, state)
    with Saver(store, KEYS.job, settings) as saver:  # another one looks up what it can refer to
        third = saver.save(state, step=3).result()
    assert parts_of(store, 3) == []
    assert {part.step for part in third.parts} == {1, 2}
    assert same(load(store, KEYS.job).state, state)


def test_a_part_of_a_state_is_read_from_its_files_only(folder, tmp_path):
    saved = save(folder, 1, state_of(1))
    needed = {c.part for c in saved.tensors["model.half"].chunks}
    needed |= {c.part for c in saved.tensors[SKELETON].chunks}
    for number, part in enumerate(saved.parts):
        if number not in needed:
            (tmp_path / KEYS.make_part_key(1, part.digest)).write_bytes(b"x" * part.size)
    found = load(folder, KEYS.job, step=1, only=lambda name: name == "model.half").state
    assert same(found["model"], {"half": state_of(1)["model"]["half"]})  # pyright: ignore[reportIndexIssue]
    assert found["optimizer"]["lr"] == 1e-3


@pytest.mark.parametrize("rows", [(0, 300), (63, 65), (100, 250), (299, 300), (7, 7)])
def test_rows_of_a_tensor(folder, rows):
    save(folder, 1, state_of(1))
    found = load(folder, KEYS.job, rows={"model.embed": rows}).state["model"]["embed"]
    assert torch.equal(found, state_of(1)["model"]["embed"][slice(*rows)])  # pyright: ignore[reportIndexIssue]


LARGE = SaveSettings(part_bytes=ByteSize(4 << 20))  # with tensors that are read in place


def large_state(seed: int) -> dict[str, object]:
    """A state with tensors of several types, larger than a block and some larger than a file."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "cut": torch.randn(3000, 512, generator=dice),
        "half": torch.randn(700, 1000, generator=dice).to(torch.bfloat16),
        "complex": torch.randn(300, 300, generator=dice, dtype=torch.complex64),
        "flags": torch.rand(100_000, generator=dice) > 0.5,
        "small": torch.randn(7, generator=dice),
        "strided": torch.randn(200, 300, generator=dice).t(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def save_large(store: Store, step: int, seed: int) -> Checkpoint:
    with Saver(store, KEYS.job, LARGE) as saver:
        return saver.save(large_state(seed), step=step).result()


def test_large_tensors_are_read_in_place(store):
    save_large(store, 1, 1)
    state = large_state(1)
    assert same(load(store, KEYS.job).state, state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}  # pyright: ignore[reportArgumentType, reportCallIssue]
    into["half"] = into["half"].t().contiguous().t()  # in another order than in the file
    into["cut"] = torch.nn.Parameter(into["cut"])
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    found = load_into(into, store, KEYS.job)
    assert same(found.state | {"cut": into["cut"].detach()}, state)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == places
    for rows in ((0, 3000), (10, 2990), (2047, 2049)):
        part = load(store, KEYS.job, rows={"cut": rows}).state["cut"]
        assert torch.equal(part, state["cut"][slice(*rows)])  # pyright: ignore[reportIndexIssue]
    wide = load(store, KEYS.job, dtype=torch.float64).state
    assert torch.equal(wide["half"], state["half"].to(torch.float64))  # pyright: ignore[reportAttributeAccessIssue]


def test_tensors_that_share_memory_are_filled_with_verified_bytes(folder):
    with Saver(folder, KEYS.job, LARGE) as saver:
        saver.save({"a": torch.zeros(1 << 18), "b": torch.ones(1 << 17)}, step=1).result()
    memory = torch.full((1 << 18,), 7.0)
    for _ in range(20):
        load_into({"a": memory, "b": memory[1 << 17 :]}, folder, KEYS.job)
        assert not memory[: 1 << 17].any()


@pytest.mark.parametrize("kind", ["flip", "flip in the header", "truncate", "longer", "missing"])
def test_damage_of_a_large_file_is_found_while_it_is_read_in_place(store, kind):
    save_large(store, 1, 1)
    saved = save_large(store, 2, 2)
    key = KEYS.make_part_key(2, saved.parts[0].digest)
    body = damage_of(kind, read(store, key))
    if body is None:
        delete(store, [key])
    else:
        put(store, key, body)
    into = {name: torch.zeros_like(tensor) for name, tensor in large_state(1).items()}  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(errors.CorruptError, match=r"not the bytes|missing"):
        load_into(into, store, KEYS.job, step=2)
    assert same(load_into(into, store, KEYS.job).state, large_state(1))


def move_box(store: Store, saved: Checkpoint, name: str, part: int, offset: int) -> None:
    """Commit a checkpoint anew with another position of a tensor's only box."""
    record = saved.tensors[name]
    chunk = record.chunks[0].model_copy(update={"part": part, "offset": offset})
    tensors = {**saved.tensors, name: record.model_copy(update={"chunks": (chunk,)})}
    root = compute_root(saved.parts, tensors)
    delete(store, [KEYS.make_metadata_key(saved.step)])
    commit_checkpoint(store, saved.model_copy(update={"tensors": tensors, "root": root}))


@pytest.mark.parametrize("offset", [-1, 1 << 40])
def test_a_box_outside_of_its_file_is_refused(folder, offset):
    saved = save(folder, 1, state_of(1))
    move_box(folder, saved, "model.half", saved.tensors["model.half"].chunks[0].part, offset)
    with pytest.raises(errors.CorruptError, match="not in the file that should hold it"):
        load(folder, KEYS.job, step=1)


@pytest.mark.parametrize("shift", [0, 4])
def test_boxes_with_bytes_in_common_are_refused(folder, shift):
    saved = save_large(folder, 1, 1)
    there = saved.tensors["cut"].chunks[0]
    move_box(folder, saved, "flags", there.part, there.offset + shift)
    with pytest.raises(errors.CorruptError, match="flags at the same bytes of a file"):
        load(folder, KEYS.job, step=1)


def test_the_upload_begins_while_later_files_are_copied(folder, monkeypatch):
    """The last file is copied only after the first file is in the store."""
    stored = threading.Event()
    run = BytesCopy.run

    def run_late(copy: BytesCopy) -> None:
        if copy.source.nbytes == 4004:
            assert stored.wait(30)
        run(copy)

    monkeypatch.setattr(BytesCopy, "run", run_late)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    state = {"first": torch.ones(1000), "last": torch.ones(1001)}
    with Saver(folder, KEYS.job, SMALL, progress=lambda _: stored.set()) as saver:
        saved = saver.save(state, step=1).result()
    assert [part.size > 4000 for part in saved.parts] == [True, True, False]
    assert same(load(folder, KEYS.job).state, state)


def test_a_save_in_place_stores_the_same_files_with_the_memory_of_a_few(store):
    settings = SMALL.model_copy(update={"uploads": 2})
    with Saver(store, "copied", settings) as copied, Saver(store, "in-place", settings) as in_place:
        for step in (1, 2):
            wanted = copied.save(state_of(step), step=step).result()
            state = state_of(step)
            save = in_place.save(state, step=step, in_place=True)
            save.wait_for_state()
            state["model"]["embed"].zero_()
            found = save.result()
            assert (found.parts, found.tensors) == (wanted.parts, wanted.tensors)
        assert len(found.parts) > 4
        assert in_place._memory.size <= 2 * max(part.size for part in found.parts)
        assert copied._memory.size >= sum(part.size for part in found.parts)
    assert not verify(store, found, check=VerifyDepth.DIGESTS)


def test_a_save_in_place_whose_upload_fails_no_longer_reads_the_state(folder, monkeypatch):
    def fail(*_args: object, **_options: object) -> None:
        raise errors.DeniedError("refused")

    monkeypatch.setattr("millrace.checkpoints.saving.create", fail)
    with Saver(folder, KEYS.job, SMALL) as saver:
        save = saver.save(state_of(1), step=1, in_place=True)
        save.wait_for_state()
        with pytest.raises(errors.DeniedError, match="refused"):
            save.result()
    assert find_newest(folder, KEYS.job) is None


def test_an_error_of_a_copy_ends_the_uploads_that_have_begun(folder, monkeypatch):
    run = BytesCopy.run

    def fail(copy: BytesCopy) -> None:
        if copy.source.nbytes == 4004:
            raise RuntimeError("CUDA error")
        run(copy)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    state = {"first": torch.ones(1000), "last": torch.ones(1001)}
    with Saver(folder, KEYS.job, SMALL) as saver:
        monkeypatch.setattr(BytesCopy, "run", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            saver.save(state, step=1)
        assert len(parts_of(folder, 1)) == 1
        monkeypatch.setattr(BytesCopy, "run", run)
        saver.save(state, step=1).result()
    assert same(load(folder, KEYS.job).state, state)


def test_rows_that_are_not_there_are_refused(folder):
    save(folder, 1, state_of(1))
    for name, rows in (("model.embed", (0, 301)), ("model.scale", (0, 1))):
        with pytest.raises(errors.ConfigurationError, match="are not in it"):
            load(folder, KEYS.job, rows={name: rows})
    with pytest.raises(errors.ConfigurationError, match=r"no such tensor.*'model\.embed'"):
        load(folder, KEYS.job, rows={"model.embedd": (0, 1)})


def damage_of(kind: str, body: bytes) -> bytes | None:
    match kind:
        case "flip":
            return (
                body[: len(body) // 2]
                + bytes([body[len(body) // 2] ^ 1])
                + body[len(body) // 2 + 1 :]
            )
        case "flip in the header":
            return body[:20] + bytes([body[20] ^ 1]) + body[21:]
        case "truncate":
            return body[:-1]
        case "longer":
            return body + b"\0"
        case _:
            return None


@pytest.mark.parametrize("kind", ["flip", "flip in the header", "truncate", "longer"])
def test_damage_is_found_moved_away_and_the_one_before_is_loaded(store, kind):
    save(store, 1, state_of(1))
    saved = save(store, 2, state_of(2))
    key = KEYS.make_part_key(2, saved.parts[1].digest)
    body = damage_of(kind, read(store, key))
    assert body is not None
    put(store, key, body)
    assert set(verify(store, saved)) == {saved.parts[1].digest}
    with pytest.raises(errors.CorruptError, match="not the bytes"):
        load(store, KEYS.job, step=2)
    heard: list[Event] = []
    assert same(load(store, KEYS.job, progress=heard.append).state, state_of(1))
    assert [(type(event), getattr(event, "step", 0)) for event in heard] == [(CheckpointDamaged, 2)]
    record = fetch(store, KEYS.make_quarantine_key(2, saved.root), Quarantine)
    assert record.checkpoint == saved
    assert read(store, KEYS.make_damaged_key(2, saved.parts[1].digest)) == body
    assert find_newest_verified(store, KEYS.job) == read_checkpoint(store, KEYS.job, 1)
    assert save(store, 2, state_of(2)).root == saved.root  # its step can be saved anew
    assert same(load(store, KEYS.job).state, state_of(2))


def test_a_copy_that_is_being_made_is_passed_over_and_stays(store):
    save(store, 1, state_of(1))
    saved = save(store, 2, state_of(2))
    key = KEYS.make_part_key(2, saved.parts[1].digest)
    whole = read(store, key)
    delete(store, [key])  # as of a copy that has the metadata, and not all files
    heard: list[Event] = []
    for _ in range(2):
        assert load(store, KEYS.job, progress=heard.append).checkpoint.step == 1
    assert [(type(event), getattr(event, "step", 0)) for event in heard] == [
        (CheckpointDamaged, 2)
    ] * 2
    assert not list(list_objects(store, KEYS.make_quarantine_prefix(2)))
    put(store, key, whole)
    assert load(store, KEYS.job).checkpoint == saved


def test_a_step_whose_checkpoint_lacks_a_file_can_be_saved_anew(store):
    saved = save(store, 2, state_of(2))
    key = KEYS.make_part_key(2, saved.parts[1].digest)
    delete(store, [key])
    assert save(store, 2, state_of(2)) == saved  # the same content stores the file again
    assert not verify(store, saved)
    delete(store, [key])
    again = save(store, 2, state_of(3))  # as of a training that continued from an older step
    assert same(load(store, KEYS.job).state, state_of(3))
    assert read_checkpoint(store, KEYS.job, 2) == again
    record = fetch(store, KEYS.make_quarantine_key(2, saved.root), Quarantine)
    assert record.checkpoint == saved
    assert [sentence.endswith("missing.") for sentence in record.damage] == [True]


def test_a_file_that_is_repaired_while_a_reader_reads_on_is_not_moved(store):
    save(store, 1, state_of(1))
    saved = save(store, 2, state_of(2))
    repaired, damaged = (KEYS.make_part_key(2, part.digest) for part in saved.parts[:2])
    wholes = [read(store, repaired), read(store, damaged)]

    def find(*mended: str) -> Checkpoint | None:
        for key in (repaired, damaged):
            put(store, key, b"x" * 100)

        def mend(event: Event) -> None:  # between the verification and the move
            assert isinstance(event, CheckpointDamaged)
            for key, whole in zip((repaired, damaged), wholes, strict=True):
                if key in mended:
                    put(store, key, whole)

        return find_newest_verified(store, KEYS.job, progress=mend)

    assert find(repaired, damaged) == saved == read_checkpoint(store, KEYS.job, 2)
    assert not list(list_objects(store, KEYS.make_quarantine_prefix(2)))
    assert find(repaired) == read_checkpoint(store, KEYS.job, 1)
    assert read(store, repaired) == wholes[0]
    moved = KEYS.make_damaged_key(2, saved.parts[1].digest)
    record = KEYS.make_quarantine_key(2, saved.root)
    there = {stat.key for stat in list_objects(store, KEYS.make_quarantine_prefix(2))}
    assert there == {moved, record}


def test_whoever_may_only_read_passes_over_what_is_damaged(request):
    store = open_store(make_spec("rgw", request))
    reader = open_store(make_spec("rgw", request, "read_only"))
    save(store, 1, state_of(1))
    saved = save(store, 2, state_of(2))
    put(store, KEYS.make_part_key(2, saved.parts[0].digest), b"x" * saved.parts[0].size)
    assert same(load(reader, KEYS.job).state, state_of(1))
    assert read_checkpoint(store, KEYS.job, 2) == saved


@pytest.mark.parametrize("at", [0, 7, 8, 100, -1])
def test_a_bit_flipped_anywhere_in_any_file_is_caught(folder, tmp_path, at):
    saved = save(folder, 1, state_of(1))
    for part in saved.parts:
        path = tmp_path / KEYS.make_part_key(1, part.digest)
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[min(at, len(whole) - 1)] ^= 1
        path.write_bytes(flipped)
        assert set(verify(folder, saved)) == {part.digest}
        path.write_bytes(whole)
    assert verify(folder, saved) == {}


def test_damage_is_seen_by_size_where_no_bytes_are_read(folder, tmp_path):
    saved = save(folder, 1, state_of(1))
    path = tmp_path / KEYS.make_part_key(1, saved.parts[0].digest)
    path.write_bytes(path.read_bytes()[:-1])
    assert " bytes, not " in verify(folder, saved, check=VerifyDepth.SIZES)[saved.parts[0].digest]


def test_a_job_that_is_named_from_a_folder_above_its_store_is_whole(tmp_path):
    below = open_store(str(tmp_path / "team"))
    save(below, 1, state_of(1))
    said = f"Open the URL of the folder team, and name the job {KEYS.job}."
    with pytest.raises(errors.CorruptError, match=said):
        load(open_store(str(tmp_path)), f"team/{KEYS.job}", step=1)


def test_a_job_that_is_named_from_a_folder_below_its_store_is_whole(tmp_path):
    save(open_store(str(tmp_path)), 1, state_of(1))
    above, _, name = KEYS.job.rpartition("/")
    said = f"Open the URL of {tmp_path.as_uri()}, and name the job {KEYS.job}\\."
    with pytest.raises(errors.CorruptError, match=said):
        load(open_store(str(tmp_path / above)), name, step=1)


def test_a_checkpoint_that_was_copied_to_another_step_is_refused(store):
    save(store, 1, state_of(1))
    copy(store, KEYS.make_metadata_key(1), KEYS.make_metadata_key(2))
    with pytest.raises(errors.CorruptError, match=r"at step 1\. Another program copied it"):
        load(store, KEYS.job, step=2)
    heard: list[Event] = []
    found = find_newest_verified(store, KEYS.job, progress=heard.append)
    assert found is not None
    assert found.step == 1
    assert isinstance(heard[0], CheckpointDamaged)
    assert "copied" in heard[0].damage


EDITS = {
    "position": lambda record: record["position"].update(row=8),
    "run": lambda record: record.update(run="another"),
    "notes": lambda record: record["notes"].update(why="no reason"),
    "saved": lambda record: record.update(saved="2020-01-01T00:00:00Z"),
    "a part's step": lambda record: record["parts"][0].update(step=0),
    "a tensor's place": lambda record: record["tensors"]["model.embed"]["chunks"][0].update(
        start=[1, 0]
    ),
    "the digest": lambda record: record.pop("digest"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_metadata_of_which_anything_was_edited_is_refused(folder, tmp_path, edit):
    save(folder, 1, state_of(1), position={"row": 7}, notes={"why": "a test"}, run="one")
    path = tmp_path / KEYS.make_metadata_key(1)
    record = json.loads(path.read_bytes())
    EDITS[edit](record["record"])
    path.write_bytes(json.dumps(record).encode())
    with pytest.raises(errors.CorruptError, match="was changed after its commit"):
        load(folder, KEYS.job, step=1)
    assert find_newest_verified(folder, KEYS.job) is None


@pytest.mark.parametrize("kind", ["flip", "truncate", "edited"])
@pytest.mark.parametrize("finder", ["load", "save"])
def test_damaged_metadata_is_passed_over_until_its_step_is_saved_anew(store, kind, finder):
    save(store, 1, state_of(1))
    key = KEYS.make_metadata_key(2)
    saved = save(store, 2, state_of(2), position={"row": 7})
    whole = read(store, key)
    body = whole.replace(b'"row":7', b'"row":8') if kind == "edited" else damage_of(kind, whole)
    assert body is not None
    put(store, key, body)
    if finder == "load":
        assert same(load(store, KEYS.job).state, state_of(1))
        assert read(store, key) == body  # a saver may be replacing it: it is not the reader's
    again = save(store, 2, state_of(2), position={"row": 7})
    assert again.root == saved.root
    assert load(store, KEYS.job).checkpoint == again
    record = fetch(store, KEYS.make_quarantine_key(2, compute_digest(body)), Quarantine)
    assert record.checkpoint is None
    assert record.damage
    assert read(store, KEYS.make_damaged_key(2, compute_digest(body))) == body


def test_a_reader_moves_nothing_of_a_step_that_was_saved_anew_meanwhile(store):
    first = save(store, 1, state_of(1))
    damaged = first.parts[1]
    whole = read(store, KEYS.make_part_key(1, damaged.digest))
    put(store, KEYS.make_part_key(1, damaged.digest), b"damaged")
    found = read_checkpoint(store, KEYS.job, 1)
    damage = verify(store, found)  # and then this reader is suspended

    quarantine(store, found, damage)  # by another reader
    again = save(store, 1, state_of(1), position={"row": 8})
    quarantine(store, found, damage)
    assert read_checkpoint(store, KEYS.job, 1) == again
    assert read(store, KEYS.make_part_key(1, damaged.digest)) == whole


def test_no_older_checkpoint_is_loaded_in_place_of_one_of_another_version(folder, tmp_path):
    save(folder, 1, state_of(1))
    save(folder, 2, state_of(2))
    path = tmp_path / KEYS.make_metadata_key(2)
    record = json.loads(path.read_bytes())
    record["version"] += 1
    path.write_bytes(json.dumps(record).encode())
    with pytest.raises(errors.VersionError, match="older checkpoint, name its step"):
        load(folder, KEYS.job)
    assert load(folder, KEYS.job, step=1).checkpoint.step == 1
    with pytest.raises(errors.VersionError, match="Read it with the version that wrote it"):
        save(folder, 2, state_of(2))
    assert json.loads(path.read_bytes()) == record


@pytest.mark.parametrize("kind", ["flip", "truncate", "longer"])
def test_a_file_that_was_left_behind_damaged_is_replaced(store, kind):
    saved = save(store, 1, state_of(1))
    key = KEYS.make_part_key(1, saved.parts[1].digest)
    body = damage_of(kind, read(store, key))
    assert body is not None
    put(store, key, body)
    delete(store, [KEYS.make_metadata_key(1)])  # as of a saver whose machine lost its power
    again = save(store, 1, state_of(1))
    assert verify(store, again) == {}
    assert same(load(store, KEYS.job, step=1).state, state_of(1))


@pytest.mark.parametrize("kind", ["flip", "truncate", "missing"])
def test_a_damaged_file_of_an_earlier_step_is_not_referred_to(store, kind):
    settings = SMALL.model_copy(update={"refer": True})
    saved = save(store, 1, state_of(1))
    key = KEYS.make_part_key(1, saved.parts[1].digest)
    body = damage_of(kind, read(store, key))
    if body is None:
        delete(store, [key])
    else:
        put(store, key, body)
    with Saver(store, KEYS.job, settings) as saver:
        second = saver.save(state_of(1), step=2).result()
    assert [part.step for part in second.parts].count(2) == 1
    assert verify(store, second) == {}


def test_a_file_that_was_moved_away_since_the_last_save_is_not_referred_to(store):
    state = state_of(1)
    with Saver(store, KEYS.job, SMALL.model_copy(update={"refer": True})) as saver:
        first = saver.save(state, step=1).result()
        key = KEYS.make_part_key(1, first.parts[1].digest)
        put(store, key, b"x" * first.parts[1].size)
        assert find_newest_verified(store, KEYS.job) is None  # a reader moves the file away
        second = saver.save(state, step=2).result()
        third = saver.save(state, step=3).result()
    assert [part.step for part in second.parts].count(2) == 1
    assert second.parts == third.parts
    assert verify(store, third) == {}
    assert same(load(store, KEYS.job).state, state)


def test_a_save_that_fails_is_heard_of(tmp_path):
    timeout = timedelta(seconds=0.1)
    folder = open_store(StoreSpec(url=tmp_path.as_uri(), retry_timeout=timeout))
    (tmp_path / "runs").write_text("a file where the folder should be")
    saver = Saver(folder, KEYS.job, SMALL)
    saver.save(state_of(1), step=1)
    with pytest.raises(errors.MillraceError):
        saver.save(state_of(1), step=2)
    (tmp_path / "runs").unlink()
    saver.save(state_of(1), step=3).result()
    saver.close()
    assert load(folder, KEYS.job).checkpoint.step == 3


@pytest.fixture
def blocked(tmp_path):
    """A folder in which no checkpoint of the job can be saved."""
    (tmp_path / "runs").write_text("a file where the folder should be")
    return open_store(StoreSpec(url=tmp_path.as_uri(), retry_timeout=timedelta(seconds=0.1)))


def test_an_error_that_no_call_has_raised_is_logged_once_when_the_save_is_dropped(blocked, caplog):
    def save_and_drop(step: int, *, ask: bool) -> None:
        dropped = threading.Event()
        saver = Saver(blocked, KEYS.job, SMALL)
        saving = saver.save(state_of(1), step=step)
        saver._finisher.shutdown()  # so that the save has ended
        weakref.finalize(saving, dropped.set)
        if ask:
            with pytest.raises(errors.MillraceError):
                saver.save(state_of(1), step=step + 1)
        del saver, saving
        gc.collect()
        assert dropped.wait(60)  # until the thread of the save lets go

    save_and_drop(7, ask=True)
    assert caplog.messages == []
    save_and_drop(9, ask=False)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("The checkpoint of step 9 was not saved: ")


def test_an_error_behind_that_of_the_block_is_logged_once(blocked, caplog):
    def fail() -> None:
        with Saver(blocked, KEYS.job, SMALL) as saver:
            saver.save(state_of(1), step=7)
            raise KeyError("of the training")

    with pytest.raises(KeyError, match="of the training"):
        fail()
    gc.collect()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("The checkpoint of step 7 was not saved: ")


def test_names_of_jobs_that_cannot_be_are_refused():
    for name in ("", "/a", "a/", "a b", "a/checkpoints/b"):
        with pytest.raises(errors.ConfigurationError, match="job"):
            CheckpointKeys(name)
    digest = "blake3:" + "a" * 64
    assert KEYS.parse_part(KEYS.make_part_key(12, digest)) == (12, digest)
    assert KEYS.parse_folder("step_000000012") == 12
    assert KEYS.parse_part(KEYS.make_metadata_key(12)) is KEYS.parse_folder("other") is None


def test_names_that_the_format_has_for_itself_or_that_meet_in_a_file_come_back(folder):
    state = {
        "__metadata__": torch.arange(3.0),
        "w": torch.arange(2048.0).view(64, 32),
        "w[0:32]": torch.arange(5.0),
        "w[32:64]": torch.arange(6.0),
    }
    save(folder, 1, state)
    assert same(load(folder, KEYS.job, step=1).state, state)


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ({"state": {"m": torch.eye(2).to_sparse()}}, r"optimizer\.state\.m"),
        ({"state": {"m": torch.empty(2, device="meta")}}, r"optimizer\.state\.m"),
        ({"state": {"m": torch.ones(2, dtype=torch.complex128)}}, r"optimizer\.state\.m"),
        ({"state": {"name": "\ud800"}}, r"optimizer\.state\.name"),
    ],
    ids=["sparse", "meta", "complex128", "surrogate"],
)
def test_what_cannot_be_loaded_again_is_refused_before_anything_is_sent(folder, bad, path):
    with (
        Saver(folder, KEYS.job, SMALL) as saver,
        pytest.raises(errors.ConfigurationError, match=path),
    ):
        saver.save({"model": torch.ones(3), "optimizer": bad}, step=1)
    assert list(list_objects(folder)) == []


def test_a_position_comes_back_as_it_was_given_or_is_refused_before_anything_is_sent(folder):
    saved = save(folder, 1, state_of(1), position={"row": np.int64(7), "at": np.float32(0.5)})
    assert saved.position == {"row": 7, "at": 0.5}
    assert load(folder, KEYS.job).checkpoint == saved
    for bad in ({"at": float("nan")}, {"rows": {1, 2}}, {7: 1}, {"name": "\ud800"}):
        with (
            Saver(folder, KEYS.job, SMALL) as saver,
            pytest.raises(errors.ConfigurationError, match="position"),
        ):
            saver.save(state_of(2), step=2, position=bad)
    assert parts_of(folder, 2) == []


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_no_listing_would_find_is_refused_before_anything_is_sent(folder, step):
    with pytest.raises(errors.ConfigurationError, match=f"Step {step} .* from 0 to 9{{18}}"):
        save(folder, step, state_of(1))
    assert list(list_objects(folder)) == []
    save(folder, 10**18 - 1, state_of(1))
    assert list_steps(folder, KEYS.job) == [10**18 - 1]


@pytest.fixture
def full(tmp_path):
    """A folder on a disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    try:
        yield open_store(folder.as_uri())
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_a_save_at_once_and_says_where_and_what_is_free(full, monkeypatch):
    def wait(_seconds: float) -> None:
        raise AssertionError("it is tried again")

    monkeypatch.setattr("millrace.storage.retry.time.sleep", wait)
    large = {"w": torch.randn(1 << 18)}
    with Saver(full, KEYS.job, SaveSettings(part_bytes=ByteSize(1 << 17))) as saver:
        saving = saver.save(large, step=1)
        with pytest.raises(errors.NoSpaceError, match=r"disk/runs/.* full: [\d,]+ bytes are free"):
            saving.result()
    delete(full, [stat.key for stat in list_objects(full)])
    save(full, 2, {"w": torch.ones(3)})
    assert find_newest_verified(full, KEYS.job) is not None


def test_on_a_full_disk_an_older_checkpoint_is_loaded(full, tmp_path):
    save(full, 1, state_of(1))
    saved = save(full, 2, state_of(2))
    with (tmp_path / "disk" / KEYS.make_part_key(2, saved.parts[0].digest)).open("r+b") as file:
        file.write(b"x")
    with (tmp_path / "disk" / "other").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    heard: list[Event] = []
    assert same(load(full, KEYS.job, progress=heard.append).state, state_of(1))
    assert [type(event) for event in heard] == [CheckpointDamaged]
    assert read_checkpoint(full, KEYS.job, 2) == saved


@pytest.mark.parametrize("given", ["both", "one"])
def test_tensors_whose_paths_are_the_same_are_not_exchanged(folder, given):
    """Their names depend on the order of the keys."""
    state = {"m": {"a.b": torch.full((2,), 1.0), "a": {"b": torch.full((2,), 2.0)}}}
    save(folder, 1, state)
    wanted = {"m": {"a": {"b": torch.zeros(2)}, "a.b": torch.zeros(2)}}
    if given == "one":
        del wanted["m"]["a.b"]
    with pytest.raises(errors.ConfigurationError, match=r"m\.a\.b.* is the path of two tensors"):
        load_into(wanted, folder, KEYS.job)
    assert same(load(folder, KEYS.job).state, state)


def test_floating_tensors_become_another_type_while_they_are_loaded(folder):
    state = {**state_of(1), "loader": {"table": np.arange(3.0)}, "count": torch.tensor([2**40])}
    save(folder, 1, state)
    found = load(folder, KEYS.job, dtype=torch.float16).state
    model, wanted = found["model"], state["model"]
    assert isinstance(wanted, dict)
    for name, tensor in wanted.items():
        assert model[name].dtype == torch.float16
        assert torch.equal(model[name], tensor.to(torch.float16))
    assert found["optimizer"]["state"][0]["m"].dtype == torch.float16
    assert torch.equal(found["count"], torch.tensor([2**40]))
    assert found["loader"]["table"].dtype == np.float64
    rows = load(folder, KEYS.job, dtype=torch.bfloat16, rows={"model.embed": (63, 65)}).state
    assert torch.equal(rows["model"]["embed"], wanted["embed"][63:65].to(torch.bfloat16))
    with pytest.raises(errors.ConfigurationError, match=r"cannot be converted to torch\.int64"):
        load(folder, KEYS.job, dtype=torch.int64)
