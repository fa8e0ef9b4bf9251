"""Train a model while some of its workers send wrong gradients.

Run it with ``python -m benchmarks.byzantine [--quick] [--json FILE] [--plot FILE.svg]``. Sixteen
workers train a small model to predict the next character of text (Python's standard library). Their
changes of the weights are encoded, put into a store, gathered, checked, merged by a rule, committed
to a chain, and applied from it. Three or seven of the workers attack:

- ``flipped``: their change, multiplied by -1000;
- ``constant``: a change with one large value;
- ``delayed``: their change of nine windows before, with a current header;
- ``nan``: a gradient with NaN as its magnitudes.

``loss`` is the loss on held-out text at the end. It is compared with the loss of sixteen honest
workers and the plain mean (``clean``). ``plain mean`` is the mean without the clipping of norms,
which is not robust.
"""

import math
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Results, parse_options, print_table
from benchmarks.corpus import read_text
from benchmarks.losses import plot_losses
from millrace.gradients import (
    ChainStart,
    Codec,
    ErrorFeedback,
    GatherSettings,
    GradientEncoder,
    MergeRule,
    MergeSettings,
    RunSettings,
    Sender,
    WeightState,
    commit_first_link,
    encode_gradient,
    merge_windows,
    select_weights,
)
from millrace.gradients.codec.chunks import make_chunks
from millrace.gradients.codec.tensors import pack_tensor, select_values
from millrace.storage import open_store, put

WORKERS, STEPS, ROWS, CONTEXT, RATE = 16, 5, 64, 3, 1.0
CODEC = Codec(k=256, bits=4)
DIVERGED = 2.0
"""Ratio of the last loss to the first one, above which a training has diverged."""
Change = Mapping[str, torch.Tensor]


class ByzantineModel(torch.nn.Module):
    """Model that predicts a character from the three before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(128, 16)
        self.inner, self.head = torch.nn.Linear(16 * CONTEXT, 128), torch.nn.Linear(128, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.inner(self.embed(rows).flatten(1))))


class ByzantineTraining:
    """Training of sixteen workers with their parts of the text.

    Attributes:
        initial: Model with the initial weights.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.initial = ByzantineModel()
        whole = torch.tensor(list(read_text()[:2_000_000].encode("ascii", "replace")))
        whole = whole.clamp(max=127)
        self._held_out, seen = whole[:100_000], whole[100_000:]
        self._parts = seen.chunk(WORKERS)
        self._generators = [torch.Generator().manual_seed(n) for n in range(WORKERS)]

    def compute_change(self, state: WeightState, worker: int) -> dict[str, torch.Tensor]:
        """Train in a window, and return the weights before it minus the weights after it."""
        model = self.make_model(state)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            _compute_loss(model, self._parts[worker], ROWS, self._generators[worker]).backward()
            optimizer.step()
        after = dict(model.named_parameters())
        return {name: weight - after[name].detach() for name, weight in before.items()}

    def make_model(self, state: WeightState) -> ByzantineModel:
        """Return a model with the weights of a state."""
        model = deepcopy(self.initial)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.from_numpy(state.weights[name]))
        return model

    def compute_loss(self, state: WeightState) -> float:
        """Return the loss on held-out text."""
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            return _compute_loss(self.make_model(state), self._held_out, 4096, generator).item()


def _compute_loss(
    model: ByzantineModel, words: torch.Tensor, rows: int, generator: torch.Generator
) -> torch.Tensor:
    """Return the cross entropy of random rows of text."""
    starts = torch.randint(0, len(words) - CONTEXT - 1, (rows,), generator=generator)
    batch = words[starts[:, None] + torch.arange(CONTEXT + 1)]
    return torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])


def flip_change(change: Change, _: deque[Change]) -> Change:
    """Return the change multiplied by -1000."""
    return {name: -1000.0 * each for name, each in change.items()}


def make_constant_change(change: Change, _: deque[Change]) -> Change:
    """Return a change with one large value."""
    return {name: torch.full_like(each, 10.0) for name, each in change.items()}


def delay_change(_: Change, previous: deque[Change]) -> Change:
    """Return the oldest of the last ten changes."""
    return previous[0]


ATTACKS: dict[str, Callable[[Change, deque[Change]], Change] | None] = {
    "flipped": flip_change,
    "constant": make_constant_change,
    "delayed": delay_change,
    "nan": None,
}


def make_rules(faulty: int) -> dict[str, MergeSettings]:
    """Return the merge rules by name, with settings for so many faulty workers."""
    return {
        "plain mean": MergeSettings(rule=MergeRule.MEAN, clip=False),
        "clipped mean": MergeSettings(rule=MergeRule.MEAN, faulty=faulty),
        "centered clip": MergeSettings(rule=MergeRule.CENTERED_CLIP, faulty=faulty),
        "multi-krum": MergeSettings(rule=MergeRule.MULTI_KRUM, faulty=faulty),
    }


def train(merge: MergeSettings, windows: int, faulty: int = 0, attack: str = "") -> list[float]:
    """Train with an attack, and return the loss after each window.

    The training ends early if the loss is not finite, or 100 times the first one.

    Args:
        merge: Settings of the merge.
        windows: Number of windows.
        faulty: Number of workers that attack.
        attack: Name of the attack in `ATTACKS`.
    """
    training = ByzantineTraining()
    settings = RunSettings(
        run="run",
        codec=CODEC,
        residual_factor=0.95,
        merge=merge,
        gather=GatherSettings(poll_interval=timedelta(milliseconds=5)),
        steps=STEPS,
    )
    state = select_weights(training.initial)
    shapes = {name: tensor.shape for name, tensor in state.weights.items()}
    feedbacks = [
        ErrorFeedback(CODEC, residual_factor=settings.residual_factor) for _ in range(WORKERS)
    ]
    previous: list[deque[Change]] = [deque(maxlen=10) for _ in range(WORKERS)]
    encoder = GradientEncoder(CODEC, 1)

    def encode_change(worker: int) -> dict[str, bytes]:
        change = training.compute_change(state, worker)
        previous[worker].append(change)
        if worker >= faulty:
            return {name: feedbacks[worker].compress(name, each) for name, each in change.items()}
        if (forge := ATTACKS[attack]) is None:
            return {name: _encode_nan(each) for name, each in change.items()}
        forged = forge(change, previous[worker])
        return {name: encoder.encode(each) for name, each in forged.items()}

    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        commit_first_link(
            store, settings.chain_keys, ChainStart(run="run", job="job", step=0, root="", state="")
        )
        workers = [Sender(f"w{n:02d}", store) for n in range(WORKERS)]
        merged = merge_windows(store, settings, workers, state, until=windows)
        losses = [training.compute_loss(state)]
        for window in range(1, windows + 1):
            for number, worker in enumerate(workers):
                body = encode_gradient(
                    encode_change(number), shapes, CODEC, run="run", uid=worker.uid, window=window,
                    base=STEPS * (window - 1),
                )  # fmt: skip
                put(store, settings.gradient_keys.make_gradient_key(worker.uid, window), body)
            next(merged)
            losses.append(training.compute_loss(state))
            if not math.isfinite(losses[-1]) or losses[-1] > 100 * losses[0]:
                break
    return losses


def _encode_nan(change: torch.Tensor) -> bytes:
    """Encode a tensor with NaN as its magnitudes."""
    shape = tuple(change.shape)
    runs = select_values(change.numpy().reshape(-1), shape, CODEC)
    assert len(runs) == len(list(make_chunks(shape, CODEC)))
    forged = tuple(replace(run, high=np.full_like(run.high, 0x7FC0)) for run in runs)
    return pack_tensor(forged, CODEC)


def main() -> int:
    """Train with each attack and rule, print the table, and write the requested files."""
    options = parse_options("byzantine", __doc__, plot=True)
    windows, attacks = (5, ["flipped"]) if options.quick else (100, list(ATTACKS))
    torch.set_num_threads(1)
    results = Results("byzantine")
    clean = train(make_rules(0)["plain mean"], windows)
    results.add("clean", "plain mean", "loss", clean[-1])
    curves: dict[str, list[list[float]]] = {"all honest": [clean]}
    lines: list[list[str]] = []
    for faulty in (3, 7):
        for attack in attacks:
            for name, merge in make_rules(faulty).items():
                losses = train(merge, windows, faulty, attack)
                end = losses[-1] if math.isfinite(losses[-1]) else math.inf
                results.add(f"{faulty} of 16 {attack}", name, "loss", end)
                if (faulty, attack) == (3, "flipped"):
                    curves[name] = [losses]
                verdict = "diverged" if end > DIVERGED * clean[0] else f"{end / clean[-1]:.3f}"
                lines.append([f"{faulty} of 16", attack, name, f"{end:.4g}", verdict])
                print(*lines[-1], flush=True)
    print(f"\nall honest: {clean[0]:.3f} to {clean[-1]:.3f} in {windows} windows\n")
    print_table(["faulty", "how", "rule", "loss", "over clean"], lines)
    results.save(options.file)
    if options.plot:
        plot_losses(
            curves, options.plot, f"windows of {WORKERS} workers, 3 of whom flip and multiply"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
