"""Compare how a model learns from compressed gradients and from whole ones.

Run it with ``python -m benchmarks.convergence [--quick] [--json FILE] [--plot FILE.svg]``. Eight
workers train a small transformer on text (Python's own library), each on its own part, some steps a
window. Then either their changes are averaged whole (``dense``), or each is encoded, put into a
store, gathered, merged, committed to a chain and applied from it (``millrace``: 112 of 4096 values
at two bits, with error feedback; no tensor is sent otherwise). The tokens are the same; the outer
step of ``millrace`` is longer, for what the feedback forgets. ``loss`` is that on text which nobody
has seen, at the end; ``times_smaller`` the bytes of all whole changes over those of all objects,
listed from the store.
"""

import math
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.common import Results, parse_options, print_table
from benchmarks.corpus import read_text
from benchmarks.losses import plot_losses
from millrace.gradients import (
    Codec,
    GatherSettings,
    OuterKind,
    OuterOptimizer,
    Participant,
    RunSettings,
    Sender,
    begin_run,
    merge_windows,
    select_weights,
)
from millrace.storage import list_objects, open_store

WORKERS, ROWS, LENGTH, RATE = 8, 4, 64, 2e-3
SETTINGS = RunSettings(
    run="run",
    codec=Codec(k=112),
    decay=0.95,
    outer=OuterOptimizer(kind=OuterKind.SGD, lr=1.9),
    gather=GatherSettings(quorum=WORKERS, poll_interval=timedelta(milliseconds=10)),
    steps=5,
)


class Model(torch.nn.Module):
    """A transformer that guesses the next character."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.embed, self.place = torch.nn.Embedding(128, 128), torch.nn.Embedding(LENGTH, 128)
        self.body = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = torch.nn.Linear(128, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(rows.shape[1])
        x = self.embed(rows) + self.place(torch.arange(rows.shape[1]))
        return self.head(self.body(x, mask=mask, is_causal=True))


class Training:
    """Eight workers with their text, the same for both ways.

    Args:
        seed: Of the weights and of the order of the text.
        steps: Of each in a window.
        windows: After which the rate has fallen to nothing, along a cosine.
    """

    def __init__(self, seed: int, steps: int, windows: int) -> None:
        torch.set_num_threads(1)  # another run has the other processor
        torch.manual_seed(seed)
        self._steps, self._windows = steps, windows
        self._done = [0] * WORKERS
        self.first = Model()
        whole = torch.tensor(list(read_text()[:4_000_000].encode("ascii", "replace")))
        self.unseen, seen = whole[:200_000], whole[200_000:]
        self.parts = seen.chunk(WORKERS)
        self.dice = [torch.Generator().manual_seed(100 * seed + n) for n in range(WORKERS)]
        self.inner: list[torch.optim.Optimizer | None] = [None] * WORKERS

    def train(self, model: Model, worker: int) -> None:
        """One worker's steps in a window; its optimizer remembers from window to window."""
        state = self.inner[worker]
        optimizer = torch.optim.AdamW(model.parameters())
        if state is not None:
            optimizer.load_state_dict(state.state_dict())
        share = self._done[worker] / self._windows
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * share)) / 2
        self._done[worker] += 1
        for _ in range(self._steps):
            rows = drawn(self.parts[worker], ROWS, self.dice[worker])
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
        self.inner[worker] = optimizer

    def loss(self, model: Model) -> float:
        """On text that nobody has seen."""
        dice = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return sum(loss_of(model, drawn(self.unseen, 64, dice)).item() for _ in range(4)) / 4


def drawn(words: torch.Tensor, rows: int, dice: torch.Generator) -> torch.Tensor:
    """Rows of text from anywhere in it."""
    starts = torch.randint(0, len(words) - LENGTH - 1, (rows,), generator=dice)
    return torch.stack([words[at : at + LENGTH + 1] for at in starts])


def loss_of(model: Model, rows: torch.Tensor) -> torch.Tensor:
    guessed = model(rows[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(guessed, rows[:, 1:].flatten())


def dense(seed: int, windows: int) -> list[float]:
    """Return the loss after each window, with the changes averaged whole."""
    training = Training(seed, SETTINGS.steps, windows)
    model = deepcopy(training.first)
    losses = [training.loss(model)]
    for _ in range(windows):
        changes = [torch.zeros_like(weight) for weight in model.parameters()]
        for worker in range(WORKERS):
            own = deepcopy(model)
            training.train(own, worker)
            pairs = zip(changes, model.parameters(), own.parameters(), strict=True)
            for change, before, after in pairs:
                change.add_((before - after).detach() / WORKERS)
        with torch.no_grad():
            for weight, change in zip(model.parameters(), changes, strict=True):
                weight.sub_(change)
        losses.append(training.loss(model))
    return losses


def compressed(
    seed: int, windows: int, settings: RunSettings = SETTINGS
) -> tuple[list[float], float]:
    """Return the loss after each window, by way of a store, and the ratio of compression."""
    training = Training(seed, settings.steps, windows)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        begin_run(store, settings.chain, select_weights(training.first))
        models = [deepcopy(training.first) for _ in range(WORKERS)]
        everybody = [
            Participant.join(settings, str(n), store, store, threads=1) for n in range(WORKERS)
        ]
        workers = [Sender(str(n), store) for n in range(WORKERS)]
        merged = merge_windows(
            store, settings, workers, select_weights(training.first), until=windows
        )
        losses = [training.loss(training.first)]
        for _ in range(windows):
            for number, (participant, model) in enumerate(zip(everybody, models, strict=True)):
                training.train(model, number)
                participant.submit(model)
            next(merged)
            for participant, model in zip(everybody, models, strict=True):
                participant.apply(model)
            losses.append(training.loss(models[0]))
        keys = [stat for stat in list_objects(store, "run/") if settings.gradients.parse(stat.key)]
        sent = sum(stat.size for stat in keys)
    whole = sum(weight.numel() for weight in training.first.parameters()) * 4 * WORKERS * windows
    return losses, whole / sent


def main() -> int:
    """Train both ways, print the table, and write the rows and the picture if asked."""
    asked = parse_options("convergence", __doc__, plot=True)
    windows, seeds = (4, 1) if asked.quick else (200, 3)
    results = Results("convergence")
    curves: dict[str, list[list[float]]] = {"whole changes": [], "1/100 of them": []}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        wholes = [pool.submit(dense, seed, windows) for seed in range(seeds)]
        smalls = [pool.submit(compressed, seed, windows) for seed in range(seeds)]
        for seed, (one, other) in enumerate(zip(wholes, smalls, strict=True)):
            whole, (small, times) = one.result(), other.result()
            curves["whole changes"].append(whole)
            curves["1/100 of them"].append(small)
            results.add("training", "dense", "loss", whole[-1])
            results.add("training", "millrace", "loss", small[-1])
            results.add("training", "millrace", "times_smaller", times)
            ends = f"{whole[-1]:.4f} dense, {small[-1]:.4f} compressed, {times:.1f} times smaller"
            print(f"seed {seed}: {whole[0]:.3f} to {ends}", flush=True)
    ratio = results.compute_ratio("training", "millrace", "dense", "loss")
    lines = [
        [row.system, row.metric, f"{row.value:.4g}", str(row.n)] for row in results.compute_rows()
    ]
    print_table(["system", "metric", "median", "n"], lines)
    ends = (results.values["training", system, "loss"] for system in ("millrace", "dense"))
    worst = max(small / whole for small, whole in zip(*ends, strict=True))
    print(f"\nLoss over that of whole changes: {ratio:.4f} in the median, {worst:.4f} at worst.")
    results.save(asked.file)
    if asked.plot:
        what = f"windows of {SETTINGS.steps} steps of {WORKERS} workers"
        plot_losses(curves, asked.plot, what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
