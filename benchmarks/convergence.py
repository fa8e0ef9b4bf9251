"""Compare training with compressed gradients and training with whole gradients.

Run it with ``python -m benchmarks.convergence [--quick] [--json FILE] [--plot FILE.svg]``. Eight
workers train a small transformer on text (Python's standard library), each with its own part of the
text, and with several steps per window. The change of a worker is the difference of its weights in
a window.

- ``dense``: the changes are averaged.
- ``millrace``: each change is encoded, put into a store, gathered, merged, committed to a chain and
  applied from it. 112 of 4096 values are sent with two bits, with error feedback. All tensors are
  compressed. The outer learning rate is higher, since the residuals decay.

Both see the same tokens. ``loss`` is the loss on held-out text at the end. ``times_smaller`` is the
size of all whole changes divided by the size of all objects in the store.
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
    residual_factor=0.95,
    outer=OuterOptimizer(kind=OuterKind.SGD, lr=1.9),
    gather=GatherSettings(quorum=WORKERS, poll_interval=timedelta(milliseconds=10)),
    steps=5,
)


class ConvergenceModel(torch.nn.Module):
    """Transformer that predicts the next character."""

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


class ConvergenceTraining:
    """Training of eight workers with their parts of the text, the same for both systems.

    Attributes:
        initial: Model with the initial weights.
        held_out: Tokens of the held-out text.
        parts: Tokens of each worker.
        generators: Random generator of each worker.
        optimizers: Inner optimizer of each worker, or None before its first window.

    Args:
        seed: Seed of the weights and of the order of the text.
        steps: Number of steps of a worker in a window.
        windows: Number of windows, over which the learning rate falls to zero along a cosine.
    """

    def __init__(self, seed: int, steps: int, windows: int) -> None:
        torch.set_num_threads(1)  # two runs share two processors
        torch.manual_seed(seed)
        self._steps, self._windows = steps, windows
        self._done = [0] * WORKERS
        self.initial = ConvergenceModel()
        whole = torch.tensor(list(read_text()[:4_000_000].encode("ascii", "replace")))
        self.held_out, seen = whole[:200_000], whole[200_000:]
        self.parts = seen.chunk(WORKERS)
        self.generators = [torch.Generator().manual_seed(100 * seed + n) for n in range(WORKERS)]
        self.optimizers: list[torch.optim.Optimizer | None] = [None] * WORKERS

    def train(self, model: ConvergenceModel, worker: int) -> None:
        """Train a model with the steps of one worker in a window. The optimizer keeps its state."""
        previous = self.optimizers[worker]
        optimizer = torch.optim.AdamW(model.parameters())
        if previous is not None:
            optimizer.load_state_dict(previous.state_dict())
        progress = self._done[worker] / self._windows
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * progress)) / 2
        self._done[worker] += 1
        for _ in range(self._steps):
            rows = draw_rows(self.parts[worker], ROWS, self.generators[worker])
            optimizer.zero_grad()
            compute_loss(model, rows).backward()
            optimizer.step()
        self.optimizers[worker] = optimizer

    def compute_loss(self, model: ConvergenceModel) -> float:
        """Return the loss on held-out text."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return (
                sum(
                    compute_loss(model, draw_rows(self.held_out, 64, generator)).item()
                    for _ in range(4)
                )
                / 4
            )


def draw_rows(words: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows of text from random positions: (rows, 65)."""
    starts = torch.randint(0, len(words) - LENGTH - 1, (rows,), generator=generator)
    return torch.stack([words[at : at + LENGTH + 1] for at in starts])


def compute_loss(model: ConvergenceModel, rows: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the next characters."""
    predictions = model(rows[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(predictions, rows[:, 1:].flatten())


def train_dense(seed: int, windows: int) -> list[float]:
    """Train with the average of the whole changes, and return the loss after each window."""
    training = ConvergenceTraining(seed, SETTINGS.steps, windows)
    model = deepcopy(training.initial)
    losses = [training.compute_loss(model)]
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
        losses.append(training.compute_loss(model))
    return losses


def train_compressed(
    seed: int, windows: int, settings: RunSettings = SETTINGS
) -> tuple[list[float], float]:
    """Train through a store, and return the loss after each window and the compression ratio."""
    training = ConvergenceTraining(seed, settings.steps, windows)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        begin_run(store, settings.chain_keys, select_weights(training.initial))
        models = [deepcopy(training.initial) for _ in range(WORKERS)]
        participants = [
            Participant.join(settings, str(n), store, store, threads=1) for n in range(WORKERS)
        ]
        workers = [Sender(str(n), store) for n in range(WORKERS)]
        merged = merge_windows(
            store, settings, workers, select_weights(training.initial), until=windows
        )
        losses = [training.compute_loss(training.initial)]
        for _ in range(windows):
            for number, (participant, model) in enumerate(zip(participants, models, strict=True)):
                training.train(model, number)
                participant.submit(model)
            next(merged)
            for participant, model in zip(participants, models, strict=True):
                participant.receive(model)
            losses.append(training.compute_loss(models[0]))
        stats = [
            stat for stat in list_objects(store, "run/") if settings.gradient_keys.parse(stat.key)
        ]
        sent = sum(stat.size for stat in stats)
    whole = sum(weight.numel() for weight in training.initial.parameters()) * 4 * WORKERS * windows
    return losses, whole / sent


def main() -> int:
    """Run the benchmark, print the table, and write the requested files."""
    options = parse_options("convergence", __doc__, plot=True)
    windows, seeds = (4, 1) if options.quick else (200, 3)
    results = Results("convergence")
    curves: dict[str, list[list[float]]] = {"whole changes": [], "1/100 of them": []}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        dense = [pool.submit(train_dense, seed, windows) for seed in range(seeds)]
        compressed = [pool.submit(train_compressed, seed, windows) for seed in range(seeds)]
        for seed, (one, other) in enumerate(zip(dense, compressed, strict=True)):
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
    results.save(options.file)
    if options.plot:
        caption = f"windows of {SETTINGS.steps} steps of {WORKERS} workers"
        plot_losses(curves, options.plot, caption)
    return 0


if __name__ == "__main__":
    sys.exit(main())
