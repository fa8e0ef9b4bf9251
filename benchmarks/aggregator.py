"""An aggregator's memory and time for one window: 20 workers, models up to a billion parameters.

The first process writes the bucket (a folder): the weights of the run, and a gradient of each
worker. Each measured process is an aggregator after a restart. It loads the weights, reads the
gradients, merges and applies them, commits the link, and saves a checkpoint. It is the only system.

``merge, GB/s`` counts the float32 values that the gradients stand for. ``update over gradients`` is
the size of the merged update over that of all gradients.

The peaks of memory include the libraries. Dense gradients of 20 workers, in float32, would take 20
times the memory of the weights.

The part ``ray`` has the weights on three nodes of a Ray cluster. Each is a host of a rig, and all
share the folder. It measures a few layers of a model of 8 billion parameters. All work is done
tensor by tensor, so CPU time and memory of the whole model are computed by its number of layers.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Results, measure_process, parse_options, print_table
from benchmarks.rig import Rig, RigError
from benchmarks.rig.ray_nodes import RigRayNodes
from benchmarks.swarm_peers.memory import PeakMemory, is_ray_worker
from millrace.gradients import (
    ChainStep,
    CheckedGradient,
    Codec,
    GatherOutcome,
    GatherWindow,
    GradientEncoder,
    RunSettings,
    WeightState,
    begin_run,
    encode_gradient,
    merge_window,
)
from millrace.gradients.backends.local import allocate_locally
from millrace.gradients.backends.sharded_weights import AllocateWeights
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.merging.links import read_link
from millrace.gradients.weights import load_newest_weights
from millrace.storage import head, open_store, put

CODEC = Codec()
SETTINGS = RunSettings(run="run")
WORKERS = 20
STAGES = ("load", "read", "merge", "save")
RAY_NODES, RAY_WIDTH = 3, 4096
RAY_LAYERS = (3, 6)  # each node has as many values of them as the others
RAY_TOTAL = 40  # layers of a model of 8 billion parameters
MODELS = {"124M": (768, 18), "303M": (1024, 24), "1B": (2048, 20)}
"""Width and number of the layers of each model. Embeddings are left out."""


def make_shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a transformer: 12 times the squared width a layer."""
    return {
        name: shape
        for layer in range(layers)
        for name, shape in (
            (f"layers.{layer:02d}.attention", (width, 3 * width)),
            (f"layers.{layer:02d}.projection", (width, width)),
            (f"layers.{layer:02d}.up", (width, 4 * width)),
            (f"layers.{layer:02d}.down", (4 * width, width)),
        )
    }


def make_window(shapes: Shapes) -> GatherWindow:
    """Return the first window of the run."""
    now = datetime.now(UTC)
    return GatherWindow(SETTINGS.gradient_keys, 1, 0, CODEC, shapes, opens=now, closes=now)


def write_bucket(folder: str, width: int, layers: int) -> dict[str, float]:
    """Begin the run, and write a gradient of each worker with independent values."""
    store, shapes = open_store(Path(folder).as_uri()), make_shapes(width, layers)
    zeros = WeightState({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    begin_run(store, SETTINGS.chain_keys, zeros)
    del zeros
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4 * width * width + WORKERS * layers, generator=generator)
    encoder, window = GradientEncoder(CODEC), make_window(shapes)
    for number in range(WORKERS):
        bodies: dict[str, bytes] = {}
        for layer, (name, shape) in enumerate(shapes.items()):
            first = number * layers + layer // 4
            size = shape[0] * shape[1]
            bodies[name] = encoder.encode(values[first : first + size].view(shape))
        uid = f"w{number:02d}"
        body = encode_gradient(
            bodies, shapes, CODEC, run=window.keys.run, uid=uid, window=1, base=0
        )
        put(store, window.keys.make_gradient_key(uid, 1), body)
    return {}


def run_aggregator(folder: str, width: int, layers: int) -> dict[str, float]:
    """Merge the window with the weights in this process."""
    return merge_one_window(folder, width, layers, allocate_locally())


def merge_one_window(
    folder: str, width: int, layers: int, allocate: AllocateWeights
) -> dict[str, float]:
    """Merge the window as an aggregator does after a restart, and return seconds of each stage.

    Args:
        folder: Folder with the bucket.
        width: Width of the layers.
        layers: Number of the layers.
        allocate: Function that allocates the weights.
    """
    store, figures = open_store(Path(folder).as_uri()), dict[str, float]()
    with _time_stage(figures, "load"):
        weights, _ = load_newest_weights(store, SETTINGS.chain_keys, allocate)
    window = make_window(make_shapes(width, layers))
    weights.begin_window(window)
    gradients = dict[str, CheckedGradient]()
    with _time_stage(figures, "read"):
        for number in range(WORKERS):
            expected = window.make_expected(f"w{number:02d}")
            found = head(store, window.keys.make_gradient_key(expected.uid, 1))
            gradients[expected.uid] = weights.read_gradient(expected.uid, store, found, expected)
    size = sum(gradient.size for gradient in gradients.values())
    written = dict.fromkeys(gradients, datetime.now(UTC))
    gathered = GatherOutcome(gradients, {}, (), size, 0.0, written)
    step = ChainStep(
        read_link(store, SETTINGS.chain_keys, 0), SETTINGS.steps, SETTINGS.outer, SETTINGS.merge
    )
    with _time_stage(figures, "merge"):
        link = merge_window(store, window, gathered, step, weights)
    figures["update over gradients"] = link.size / size
    figures["peak before the save"] = _read_peak()
    with _time_stage(figures, "save"):
        weights.save(store, SETTINGS.chain_keys.job, step=SETTINGS.steps, window=1)
        weights.wait_for_save()
    weights.close()
    figures["peak"] = _read_peak()
    return figures


def run_on_ray(folder: str, layers: int) -> dict[str, float]:
    """Merge the window with the weights on the nodes of a rig, and return the figures."""
    with (
        Rig.start(nodes=RAY_NODES, rate_mbit=10_000, store_mbit=10_000) as rig,
        RigRayNodes.start(rig) as ray,
    ):
        command = [sys.executable, "-m", "benchmarks.ray_aggregator"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        used = rig.read_cpu_seconds()
        with (
            PeakMemory(rig, is_ray_worker) as memory,
            rig.nodes[0].popen(command, env=ray.environment, **pipes) as driver,
        ):
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(json.dumps([folder, RAY_WIDTH, layers, ray.address]) + "\n")
            driver.stdin.flush()
            line = driver.stdout.readline()
            spent = rig.read_cpu_seconds() - used
            driver.stdin.close()
        if driver.returncode or not line:
            raise RigError(f"The aggregator ended with exit code {driver.returncode}.")
    figures = json.loads(line)
    times = {f"{stage}, s": figures[f"{stage}, s"] for stage in STAGES}
    return {**times, "CPU s": spent, "peak of a node": memory.peak / 1e6}


def report_ray(results: Results) -> None:
    """Print the figures of the layers on Ray, and CPU time and memory of the whole model."""
    rows = {(row.work, row.metric): row for row in results.compute_rows()}
    metrics = [*(f"{stage}, s" for stage in STAGES), "CPU s", "peak of a node"]
    works = [f"{layers} layers on Ray" for layers in RAY_LAYERS]
    if (works[0], metrics[0]) not in rows:
        return
    lines = [
        [work, *(f"{rows[work, name].value:.1f}" for name in metrics), f"{rows[work, 'CPU s'].n}"]
        for work in works
        if (work, "CPU s") in rows
    ]
    if len(lines) == len(works):
        few, many = RAY_LAYERS
        cells = ["-" for _ in STAGES]  # the nodes share the processors of this machine
        for metric in metrics[len(STAGES) :]:
            low, high = (rows[work, metric].value for work in works)
            cells.append(f"{high + (high - low) / (many - few) * (RAY_TOTAL - many):.1f}")
        lines.append([f"{RAY_TOTAL} layers, computed", *cells, ""])
    print_table(["weights", *metrics, "n"], lines)


@contextmanager
def _time_stage(figures: dict[str, float], stage: str) -> Iterator[None]:
    began, cpu = time.perf_counter(), time.process_time()
    yield
    figures[f"{stage}, s"] = time.perf_counter() - began
    figures[f"{stage}, CPU s"] = time.process_time() - cpu


def _read_peak() -> float:
    """Return the largest resident set of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def report(results: Results) -> None:
    """Print the figures of each model."""
    values = {(row.work, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for model, (width, layers) in MODELS.items():
        if (model, "peak") in values:
            size = 4 * 12 * width * width * layers / 1e6
            speed = WORKERS * size / 1e3 / values[model, "merge, s"].value
            update = values[model, "update over gradients"].value
            cells = [f"{values[model, f'{stage}, CPU s'].value:.1f}" for stage in STAGES]
            cells += [f"{values[model, f'{stage}, s'].value:.1f}" for stage in STAGES]
            peaks = [
                f"{values[model, name].value:.0f}" for name in ("peak before the save", "peak")
            ]
            cells += [f"{speed:.1f}", f"{update:.3f}", str(values[model, "peak"].n)]
            lines.append([model, f"{size:.0f}", *peaks, *cells])
    stages = [*(f"{stage}, CPU s" for stage in STAGES), *(f"{stage}, s" for stage in STAGES)]
    stages += ["merge, GB/s", "update over gradients", "n"]
    print_table(["model", "weights, MB", "peak before the save", "peak, MB", *stages], lines)


def measure_ray(results: Results) -> None:
    """Measure both numbers of layers alternately, three times."""
    with ExitStack() as stack:
        folders = {
            # The hosts of a rig have their own /tmp and /dev/shm.
            layers: stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
            for layers in RAY_LAYERS
        }
        for layers, folder in folders.items():
            measure_process(write_bucket, folder, RAY_WIDTH, layers)
        for _ in range(3):
            for layers, folder in folders.items():
                with tempfile.TemporaryDirectory(dir="/var/tmp") as copy:
                    shutil.copytree(folder, copy, copy_function=os.link, dirs_exist_ok=True)
                    found = run_on_ray(copy, layers)
                for metric, value in found.items():
                    results.add(f"{layers} layers on Ray", "millrace", metric, value)


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("aggregator", __doc__, parts=[*MODELS, "ray"])
    results = Results("aggregator")
    for model in list(MODELS)[:1] if asked.quick else [m for m in asked.only if m in MODELS]:
        for _ in range(1 if asked.quick else 3):
            with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
                measure_process(write_bucket, folder, *MODELS[model])
                found = measure_process(run_aggregator, folder, *MODELS[model])
            for metric, value in found.figures.items():
                results.add(model, "millrace", metric, value)
    if "ray" in asked.only and not asked.quick:
        measure_ray(results)
    report(results)
    report_ray(results)
    results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
