"""Overlaps of indices, beside a count of each pair."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

from millrace.gradients import Codec, ErrorFeedback, Support, decode, encode
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.codec.tensors import SparseChunks, unpack_tensor
from millrace.gradients.scoring.overlap import compute_overlaps, find_copies

CODEC = Codec(k=64, bits=4)
SHAPES = {"large": (200, 100), "small": (), "running_mean": (50,)}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_gradients(
    changes: dict[str, dict[str, torch.Tensor]], codec: Codec = CODEC, mask: Mask | None = None
) -> dict[str, dict[str, tuple[SparseChunks, ...]]]:
    return {
        uid: {
            name: unpack_tensor(
                ErrorFeedback(codec.select_for_tensor(name)).compress(name, tensor, mask),
                SHAPES[name], codec.select_for_tensor(name), 1, mask,
            )
            for name, tensor in sorted(tensors.items())
        }
        for uid, tensors in changes.items()
    }  # fmt: skip


def draw_changes(seed: int, workers: int, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    common = {name: torch.randn(SHAPES[name], generator=generator) for name in names}
    return {
        f"w{number}": {
            name: common[name] + number * torch.randn(SHAPES[name], generator=generator)
            for name in names
        }
        for number in range(workers)
    }


def list_places(tensors: dict[str, tuple[SparseChunks, ...]]) -> set[tuple[str, int, int, int]]:
    """List what a worker sent of the large tensor, one index after another."""
    return {
        ("large", group, row, int(index))
        for group, sparse in enumerate(tensors["large"])
        for row, indices in enumerate(sparse.indices)
        for index in indices
    }


def test_the_overlap_is_the_share_of_equal_indices_beyond_chance():
    gradients = make_gradients(draw_changes(0, 5, ["large"]))
    workers = sorted(gradients)
    found = compute_overlaps(gradients, workers, CODEC)
    sets = [list_places(gradients[uid]) for uid in workers]
    chance = gradients["w0"]["large"][0].chunks.k / gradients["w0"]["large"][0].chunks.size
    assert len(gradients["w0"]["large"]) == 1
    for one in range(5):
        for other in range(5):
            same = len(sets[one] & sets[other]) / len(sets[other]) if one != other else 0.0
            assert found[one, other] == pytest.approx(max(same - chance, 0.0) / (1 - chance))
    assert 0 < found[0, 1] < 1


@pytest.mark.parametrize("few", [1, 3, 12])
def test_an_early_upload_of_few_probable_values_makes_no_copies(few: int):
    changes = draw_changes(5, 3, ["large"])
    common = torch.stack([tensors["large"].abs() for tensors in changes.values()]).amin(0)
    probable = torch.zeros(SHAPES["large"]).flatten()
    probable[common.flatten().topk(few).indices] = 1.0
    changes["attacker"] = {"large": probable.reshape(SHAPES["large"])}
    workers = sorted(changes)
    gradients = make_gradients(changes)
    overlaps = compute_overlaps(gradients, workers, CODEC)
    assert overlaps[:, 0].max() > 0.6  # of the attacker's own indices
    written = {uid: NOW + timedelta(seconds=uid != "attacker") for uid in workers}
    assert not find_copies(overlaps, workers, written, 0.6)


@pytest.mark.parametrize("k", [1024, 2700, 4000])
def test_with_many_indices_only_copies_are_copies(k: int):
    codec = CODEC.model_copy(update={"k": k})
    changes = draw_changes(6, 4, ["large"])
    original = unpack_tensor(encode(changes["w3"]["large"], codec), SHAPES["large"], codec)
    gradients = make_gradients(changes, codec) | {"copy": {"large": original}}
    gradients["w3"] = {"large": original}
    workers = sorted(gradients)
    written = {uid: NOW + timedelta(seconds=uid == "copy") for uid in workers}
    copies = find_copies(compute_overlaps(gradients, workers, codec), workers, written, 0.6)
    assert {uid: (one.earlier, one.overlap) for uid, one in copies.items()} == {"copy": ("w3", 1.0)}


def test_a_copy_with_zeros_or_with_some_other_indices_is_a_copy():
    changes = draw_changes(7, 2, ["large"])
    original = encode(changes["w1"]["large"], CODEC)
    sent = decode(original, SHAPES["large"], CODEC)
    at = sent.flatten().nonzero().flatten()
    fewer, other = sent.flatten().clone(), sent.flatten().clone()
    fewer[at[::2]] = 0
    other[at[::4]] = 0
    other[(at[::4] + 1) % len(other)] = sent.abs().max()
    bodies = {
        "w1": original,
        "w2": encode(fewer.reshape(SHAPES["large"]), CODEC),
        "w3": encode(other.reshape(SHAPES["large"]), CODEC),
    }
    gradients = {
        uid: {"large": unpack_tensor(body, SHAPES["large"], CODEC)} for uid, body in bodies.items()
    }
    overlaps = compute_overlaps(gradients, sorted(gradients), CODEC)
    assert overlaps[0, 1] == 1.0
    assert 0.7 < overlaps[0, 2] < 0.8


def test_tensors_that_are_sent_whole_and_buffers_say_nothing():
    changes = draw_changes(1, 2, ["large", "small"])
    codec = CODEC.model_copy(update={"buffers": ("running_mean",)})
    for tensors in changes.values():
        tensors["running_mean"] = torch.ones(50)
    gradients = make_gradients(changes, codec)
    alone = {uid: {"large": tensors["large"]} for uid, tensors in gradients.items()}
    whole = compute_overlaps(gradients, ["w0", "w1"], codec)
    assert np.array_equal(whole, compute_overlaps(alone, ["w0", "w1"], codec))
    assert 0 < whole[0, 1] < 1


def test_indices_that_the_run_prescribes_say_nothing():
    codec = CODEC.model_copy(update={"support": Support.SHARED})
    gradients = make_gradients(draw_changes(2, 2, ["large"]), codec, Mask("runs/one", 1))
    assert not compute_overlaps(gradients, ["w0", "w1"], codec).any()


def test_other_values_at_the_same_indices_are_a_copy():
    changes = draw_changes(3, 3, ["large"])
    sent = encode(changes["w1"]["large"], CODEC)
    original = unpack_tensor(sent, SHAPES["large"], CODEC)
    gradients = make_gradients(changes)
    gradients["w1"] = {"large": original}
    gradients["w2"] = {"large": original}
    overlaps = compute_overlaps(gradients, ["w0", "w1", "w2"], CODEC)
    written = {"w0": NOW, "w1": NOW + timedelta(seconds=2), "w2": NOW + timedelta(seconds=1)}
    copies = find_copies(overlaps, ["w0", "w1", "w2"], written, 0.6)
    assert {uid: one.earlier for uid, one in copies.items()} == {"w1": "w2"}
    assert copies["w1"].overlap == 1.0
    same_time = dict.fromkeys(written, NOW)
    copies = find_copies(overlaps, ["w0", "w1", "w2"], same_time, 0.6)
    assert {uid: one.earlier for uid, one in copies.items()} == {"w2": "w1"}


def test_workers_that_change_few_values_are_no_copies_of_each_other():
    changes = draw_changes(4, 3, ["large"])
    generator = torch.Generator().manual_seed(4)
    for tensors in changes.values():
        tensors["large"][20:] = 0  # as a part of the model that is not trained
        tensors["large"][:20][torch.rand(20, 100, generator=generator) < 0.98] = 0
    gradients = make_gradients(changes)
    gradients["copy"] = gradients["w0"]
    workers = [*sorted(changes), "copy"]
    overlaps = compute_overlaps(gradients, workers, CODEC)
    assert overlaps[:3, :3].max() < 0.1
    assert overlaps[0, 3] == 1.0
    gradients["w1"] = make_gradients({"w1": {"large": torch.zeros(SHAPES["large"])}})["w1"]
    assert not compute_overlaps(gradients, workers, CODEC)[1].any()


def test_no_worker_has_no_overlap():
    assert compute_overlaps({}, [], CODEC).shape == (0, 0)
    assert find_copies(np.zeros((0, 0)), [], {}, 0.6) == {}
