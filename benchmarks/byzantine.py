"""Train a model while some of its workers lie.

Run it with ``python -m benchmarks.byzantine [--quick] [--json FILE] [--plot FILE.svg]``. Sixteen
workers teach a small model to guess the next character of text (Python's own library), by way of a
store: encoded, gathered, checked, merged by a rule, committed to a chain, applied from it. Three or
seven of them lie:

- ``flipped``: the contrary of what they learnt, a thousand times over;
- ``constant``: one large number everywhere;
- ``delayed``: what they had learnt ten windows before, under the header of today;
- ``nan``: a gradient whose magnitudes are no numbers.

``loss`` is that on text which nobody has seen, at the end; it stands beside that of sixteen honest
workers merged by the plain mean (``clean``). ``plain mean`` is the mean without the clipping of
norms, as a warning.
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
    encode_payload,
    merge_windows,
    select_weights,
)
from millrace.gradients.codec.chunks import make_chunks
from millrace.gradients.codec.tensors import pack_tensor, select_values
from millrace.storage import open_store, put

WORKERS, STEPS, ROWS, CONTEXT, RATE = 16, 5, 64, 3, 1.0
CODEC = Codec(k=256, bits=4)
DIVERGED = 2.0
"""Times the loss at the beginning."""
Change = Mapping[str, torch.Tensor]


class Model(torch.nn.Module):
    """Guesses a character from the three before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(128, 16)
        self.inner, self.head = torch.nn.Linear(16 * CONTEXT, 128), torch.nn.Linear(128, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.inner(self.embed(rows).flatten(1))))


class Teachers:
    """Sixteen workers with their text."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = Model()
        whole = torch.tensor(list(read_text()[:2_000_000].encode("ascii", "replace")))
        whole = whole.clamp(max=127)
        self._unseen, seen = whole[:100_000], whole[100_000:]
        self._parts = seen.chunk(WORKERS)
        self._dice = [torch.Generator().manual_seed(n) for n in range(WORKERS)]

    def change(self, state: WeightState, worker: int) -> dict[str, torch.Tensor]:
        """Return the change of a worker in a window: the weights before less those after."""
        model = self.model(state)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            _loss(model, self._parts[worker], ROWS, self._dice[worker]).backward()
            optimizer.step()
        after = dict(model.named_parameters())
        return {name: weight - after[name].detach() for name, weight in before.items()}

    def model(self, state: WeightState) -> Model:
        """Return a model with these weights."""
        model = deepcopy(self.first)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.from_numpy(state.weights[name]))
        return model

    def loss(self, state: WeightState) -> float:
        """On text that nobody has seen."""
        with torch.no_grad():
            dice = torch.Generator().manual_seed(0)
            return _loss(self.model(state), self._unseen, 4096, dice).item()


def _loss(model: Model, words: torch.Tensor, rows: int, dice: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(words) - CONTEXT - 1, (rows,), generator=dice)
    found = words[starts[:, None] + torch.arange(CONTEXT + 1)]
    return torch.nn.functional.cross_entropy(model(found[:, :-1]), found[:, -1])


def flipped(change: Change, _: deque[Change]) -> Change:
    """Return the contrary, a thousand times over."""
    return {name: -1000.0 * each for name, each in change.items()}


def constant(change: Change, _: deque[Change]) -> Change:
    """One large number everywhere."""
    return {name: torch.full_like(each, 10.0) for name, each in change.items()}


def delayed(_: Change, before: deque[Change]) -> Change:
    """Return the change of ten windows before."""
    return before[0]


LIES: dict[str, Callable[[Change, deque[Change]], Change] | None] = {
    "flipped": flipped,
    "constant": constant,
    "delayed": delayed,
    "nan": None,
}


def rules(faulty: int) -> dict[str, MergeSettings]:
    """Return the rules to try, told how many workers lie."""
    return {
        "plain mean": MergeSettings(rule=MergeRule.MEAN, clip=False),
        "clipped mean": MergeSettings(rule=MergeRule.MEAN, faulty=faulty),
        "centered clip": MergeSettings(rule=MergeRule.CENTERED_CLIP, faulty=faulty),
        "multi-krum": MergeSettings(rule=MergeRule.MULTI_KRUM, faulty=faulty),
    }


def learn(merge: MergeSettings, windows: int, faulty: int = 0, lie: str = "") -> list[float]:
    """Return the loss after each window; it ends early when the weights are not finite."""
    teachers = Teachers()
    settings = RunSettings(
        run="run",
        codec=CODEC,
        decay=0.95,
        merge=merge,
        gather=GatherSettings(poll_interval=timedelta(milliseconds=5)),
        steps=STEPS,
    )
    state = select_weights(teachers.first)
    shapes = {name: tensor.shape for name, tensor in state.weights.items()}
    kept = [ErrorFeedback(CODEC, decay=settings.decay) for _ in range(WORKERS)]
    before: list[deque[Change]] = [deque(maxlen=10) for _ in range(WORKERS)]
    encoder = GradientEncoder(CODEC, 1)

    def bodies(worker: int) -> dict[str, bytes]:
        change = teachers.change(state, worker)
        before[worker].append(change)
        if worker >= faulty:
            return {name: kept[worker].compress(name, each) for name, each in change.items()}
        if (how := LIES[lie]) is None:
            return {name: _no_numbers(each) for name, each in change.items()}
        told = how(change, before[worker])
        return {name: encoder.encode(each) for name, each in told.items()}

    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        commit_first_link(
            store, settings.chain, ChainStart(run="run", job="job", step=0, root="", state="")
        )
        workers = [Sender(f"w{n:02d}", store) for n in range(WORKERS)]
        merged = merge_windows(store, settings, workers, state, until=windows)
        losses = [teachers.loss(state)]
        for window in range(1, windows + 1):
            for number, worker in enumerate(workers):
                body = encode_payload(
                    bodies(number), shapes, CODEC, run="run", uid=worker.uid, window=window,
                    base=STEPS * (window - 1),
                )  # fmt: skip
                put(store, settings.gradients.make_gradient_key(worker.uid, window), body)
            next(merged)
            losses.append(teachers.loss(state))
            if not math.isfinite(losses[-1]) or losses[-1] > 100 * losses[0]:
                break
    return losses


def _no_numbers(change: torch.Tensor) -> bytes:
    """Return a tensor's bytes, its magnitudes replaced by NaN."""
    shape = tuple(change.shape)
    runs = select_values(change.numpy().reshape(-1), shape, CODEC)
    assert len(runs) == len(list(make_chunks(shape, CODEC)))
    bad = tuple(replace(run, high=np.full_like(run.high, 0x7FC0)) for run in runs)
    return pack_tensor(bad, CODEC)


def main() -> int:
    """Learn with every lie and rule, print the table, write the rows and the picture if asked."""
    asked = parse_options("byzantine", __doc__, plot=True)
    windows, lies = (5, ["flipped"]) if asked.quick else (100, list(LIES))
    torch.set_num_threads(1)
    results = Results("byzantine")
    clean = learn(rules(0)["plain mean"], windows)
    results.add("clean", "plain mean", "loss", clean[-1])
    curves: dict[str, list[list[float]]] = {"all honest": [clean]}
    lines: list[list[str]] = []
    for faulty in (3, 7):
        for lie in lies:
            for name, merge in rules(faulty).items():
                losses = learn(merge, windows, faulty, lie)
                end = losses[-1] if math.isfinite(losses[-1]) else math.inf
                results.add(f"{faulty} of 16 {lie}", name, "loss", end)
                if (faulty, lie) == (3, "flipped"):
                    curves[name] = [losses]
                verdict = "diverged" if end > DIVERGED * clean[0] else f"{end / clean[-1]:.3f}"
                lines.append([f"{faulty} of 16", lie, name, f"{end:.4g}", verdict])
                print(*lines[-1], flush=True)
    print(f"\nall honest: {clean[0]:.3f} to {clean[-1]:.3f} in {windows} windows\n")
    print_table(["faulty", "how", "rule", "loss", "over clean"], lines)
    results.save(asked.file)
    if asked.plot:
        plot_losses(
            curves, asked.plot, f"windows of {WORKERS} workers, 3 of whom flip and multiply"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
