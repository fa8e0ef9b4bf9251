"""Compress, decompress and merge gradients: Millrace, a codec in PyTorch and a lower bound.

Run it with ``python -m benchmarks.gradients [--quick] [--device cuda] [--json FILE]``. 64 of 4096
values are sent with two bits each. ``--device`` is the device of the tensors that are encoded and
of the decoded tensors. The compressed bytes are always in host memory.

- ``gauss``, ``student`` (three degrees of freedom), ``laplace`` and ``real`` are distributions.
  ``ratio_fp32`` is the size of the float32 values divided by the size of the object in the store.
  ``rel_l2`` is the norm of the error of the sent values divided by their norm. ``real`` is the
  gradient of a transformer after some training on text (Python's standard library). The size of a
  gradient in PyTorch is that of its tensors.
- ``encode`` and ``decode`` are in GB/s of float32, without a transform and with the DCT.
- ``merge`` merges the gradients of 20 workers into one dense tensor. Each value is the mean over
  the workers that sent it. The unit is GB/s of the float32 values of all workers.
- ``merge, 124M`` is the peak memory of a process that merges 20 gradients of a model with 124
  million parameters. It is compared with the size of 20 dense gradients.
- ``update`` is a window of 20 workers that send independent gradients of a model with 63 million
  parameters. ``of_gradients`` is the size of the update in the store divided by the total size of
  the workers' objects. ``merge_cpu_s`` is the CPU time of the aggregator from the checked gradients
  to the committed link. ``follow_cpu_s`` is the CPU time of a late worker from the link to the
  updated weights. Both include the digests of the weights.

The lower bound (``floor``) is the rate of the memory: a sum over the tensor for encoding, and a
fill of the result for decoding and merging. The systems alternate, and the figures are medians.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks import torch_codec
from benchmarks.common import Results, measure_process, parse_options, print_table, rotate_systems
from benchmarks.corpus import read_text
from millrace.gradients import (
    ChainStart,
    ChainStep,
    CheckedGradient,
    Codec,
    Decoder,
    ExpectedGradient,
    GatherOutcome,
    GatherWindow,
    GradientEncoder,
    MergeRule,
    MergeSettings,
    RunSettings,
    Transform,
    catch_up,
    check_gradient,
    commit_first_link,
    copy_state,
    encode_gradient,
    merge,
    merge_window,
)
from millrace.gradients.codec.gradient_object import Shapes
from millrace.gradients.codec.merged_chunks import make_dense
from millrace.gradients.codec.tensors import decode_values, unpack_tensor
from millrace.gradients.codec.transform import forward
from millrace.keys.gradients import GradientKeys
from millrace.storage import list_objects, open_store, put

CODEC = Codec()
WORKERS = 20
SYSTEMS = ("millrace", "torch", "floor")
PAUSE = 0.3  # seconds until the threads of the previous system have stopped spinning
GPT2 = {
    "wte": (50257, 768),
    "wpe": (1024, 768),
    **{f"h.{n}.attn": (768, 2304) for n in range(12)},
    **{f"h.{n}.proj": (768, 768) for n in range(12)},
    **{f"h.{n}.up": (768, 3072) for n in range(12)},
    **{f"h.{n}.down": (3072, 768) for n in range(12)},
    **{f"h.{n}.bias": (768 * 13,) for n in range(12)},
}


@dataclass(slots=True)
class GradientsBench:
    """One invocation of the benchmark.

    Attributes:
        quick: Whether to use less data and one run of each system.
        device: Device of the tensors that are encoded, and of the decoded tensors.
        results: Results of the runs.
    """

    quick: bool
    device: str = "cpu"
    results: Results = field(default_factory=lambda: Results("gradients"))

    @property
    def repeats(self) -> int:
        """Number of runs of each system."""
        return 1 if self.quick else 5

    def measure_sizes(self) -> None:
        """Measure the compression ratios and the errors."""
        side = 512 if self.quick else 2048
        for name, tensors in (
            *draw_tensors(side),
            ("real", compute_real_gradient(steps=2 if self.quick else 60)),
        ):
            whole = sum(tensor.numel() for tensor in tensors.values()) * 4
            self.results.add(name, "millrace", "ratio_fp32", whole / measure_stored_size(tensors))
            self.results.add(name, "millrace", "rel_l2", compute_error(tensors))
            if name != "real":  # its sides are not multiples of 64, as PyTorch's codec requires
                sent = torch_codec.encode(tensors["w"], None)
                self.results.add(name, "torch", "ratio_fp32", whole / sent.size)
                self.results.add(name, "torch", "rel_l2", compute_torch_error(tensors["w"], sent))

    def measure_speeds(self) -> None:
        """Measure the speeds of encoding and decoding."""
        side = 1024 if self.quick else 4096
        tensor = next(draw_tensors(side))[1]["w"].to(self.device)
        for transform in Transform:
            dct = (
                torch_codec.make_dct_basis().to(self.device) if transform is Transform.DCT else None
            )
            codec = Codec(transform=transform)
            encoder, decoder = GradientEncoder(codec), Decoder(codec)
            out = torch.empty(side, side, device=self.device)
            body = encoder.encode(tensor)
            sent = torch_codec.encode(tensor, dct)
            suffix = "" if transform is Transform.NONE else ", dct"
            self._time_systems(
                f"encode{suffix}",
                tensor.nbytes,
                {
                    "millrace": lambda encoder=encoder: encoder.encode(tensor),
                    "torch": lambda dct=dct: torch_codec.encode(tensor, dct),
                    "floor": tensor.sum,
                },
            )
            self._time_systems(
                f"decode{suffix}",
                tensor.nbytes,
                {
                    "millrace": lambda body=body, decoder=decoder, out=out: decoder.decode(
                        body, (side, side), out=out
                    ),
                    "torch": lambda sent=sent, dct=dct: torch_codec.decode(sent, dct),
                    "floor": out.zero_,
                },
            )

    def measure_merges(self) -> None:
        """Measure the speed and the memory of a merge of 20 gradients."""
        side = 512 if self.quick else 2048
        shape = (side, side)
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator) for _ in range(WORKERS)]
        names = [f"w{n:02d}" for n in range(WORKERS)]
        gradients = {
            name: make_gradient({"w": tensor}, name)
            for name, tensor in zip(names, tensors, strict=True)
        }
        sent = [torch_codec.encode(tensor, None) for tensor in tensors]
        settings, out = MergeSettings(rule=MergeRule.SENDERS), np.empty(side * side, np.float32)

        def merge_dense() -> None:
            for _, runs in merge(gradients, settings, threads=2):
                make_dense(runs, shape, out)

        self._time_systems(
            "merge",
            WORKERS * tensors[0].nbytes,
            {
                "millrace": merge_dense,
                "torch": lambda: torch_codec.merge(sent),
                "floor": lambda: out.fill(0.0),
            },
        )
        if not self.quick:
            self._measure_memory()

    def _measure_memory(self) -> None:
        """Measure the peak memory of a merge of a whole model."""
        generator = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in GPT2.items()}
        with tempfile.NamedTemporaryFile(prefix="millrace-bench-") as file:
            file.write(encode_object(tensors, "w")[0])
            file.flush()
            run = measure_process(merge_model, file.name)
        dense = WORKERS * sum(tensor.nbytes for tensor in tensors.values())
        self.results.add("merge, 124M", "millrace", "peak_rss_MB", run.peak_rss / 1e6)
        self.results.add("merge, 124M", "20 dense", "peak_rss_MB", dense / 1e6)

    def measure_updates(self) -> None:
        """Measure the size of an update, its merge, and its application by a late worker."""
        side, count = (512, 2) if self.quick else (2048, 15)
        small = {"w0": (64, 64)}
        self._measure_update(small, _draw_gradients(small), keep=False)  # compiles the kernels
        shapes = {f"w{n:02d}": (side, side) for n in range(count)}
        gradients = _draw_gradients(shapes)
        for _ in range(self.repeats):
            self._measure_update(shapes, gradients, keep=True)

    def _measure_update(
        self, shapes: Shapes, gradients: dict[str, CheckedGradient], *, keep: bool
    ) -> None:
        """Measure the update of one window. Without ``keep``, no results are added."""
        settings = RunSettings(run="run")
        now = datetime.now(UTC)
        size = sum(gradient.size for gradient in gradients.values())
        written = dict.fromkeys(gradients, now)
        gathered = GatherOutcome(gradients, {}, (), size, 0.0, written)
        window = GatherWindow(settings.gradient_keys, 1, 0, CODEC, shapes, opens=now, closes=now)
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            store = open_store(Path(folder).as_uri())
            before = commit_first_link(
                store,
                settings.chain_keys,
                ChainStart(run="run", job="job", step=0, root="", state=""),
            )
            step = ChainStep(before, 1, settings.outer, settings.merge)
            state, late = (
                copy_state({name: np.zeros(shape) for name, shape in shapes.items()})
                for _ in range(2)
            )
            began = time.process_time()
            link = merge_window(store, window, gathered, step, state)
            merged = time.process_time()
            assert catch_up(store, settings.chain_keys, late) == link
            followed = time.process_time()
        if keep:
            self.results.add("update", "millrace", "of_gradients", link.size / size)
            self.results.add("update", "millrace", "merge_cpu_s", merged - began)
            self.results.add("update", "millrace", "follow_cpu_s", followed - merged)

    def _time_systems(self, work: str, size: int, systems: dict[str, Callable[[], object]]) -> None:
        """Measure the speed of each system over work on so many bytes."""
        for run in systems.values():
            run()  # compiles the kernels and allocates memory
        for repeat in range(self.repeats):
            for system in rotate_systems(SYSTEMS, repeat):
                time.sleep(PAUSE)
                best = median(time_call(systems[system]) for _ in range(3))
                self.results.add(work, system, "GB/s", size / best / 1e9)


def time_call(call: Callable[[], object]) -> float:
    """Call a function, and return its wall time in seconds."""
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():  # kernels run after the call returns
        torch.cuda.synchronize()
    return time.perf_counter() - began


def draw_tensors(side: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield a random square matrix of each distribution."""
    generator = np.random.default_rng(0)
    shape = (side, side)
    for name, values in (
        ("gauss", generator.standard_normal(shape)),
        ("student", generator.standard_t(3, shape)),
        ("laplace", generator.laplace(size=shape)),
    ):
        yield name, {"w": torch.from_numpy(values.astype(np.float32))}


def compute_real_gradient(steps: int) -> dict[str, torch.Tensor]:
    """Return the gradient of a small transformer after so many training steps on text."""
    torch.manual_seed(0)
    words = torch.tensor(list(read_text()[:400_000].encode("ascii", "replace")))
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    embed, body = torch.nn.Embedding(128, 512), torch.nn.TransformerEncoder(layer, 6)
    model = torch.nn.ModuleDict({"embed": embed, "body": body, "head": torch.nn.Linear(512, 128)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
    for _ in range(steps):
        starts = torch.randint(0, len(words) - 65, (16,))
        rows = torch.stack([words[at : at + 65] for at in starts])
        predictions = model["head"](body(embed(rows[:, :-1]), mask=mask, is_causal=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            predictions.flatten(0, 1), rows[:, 1:].flatten()
        ).backward()
        optimizer.step()
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def encode_object(tensors: dict[str, torch.Tensor], uid: str) -> tuple[bytes, ExpectedGradient]:
    """Encode a worker's object, and return its bytes with the expected contents for its check."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    encoder = GradientEncoder(CODEC)
    bodies = {name: encoder.encode(tensor) for name, tensor in tensors.items()}
    fields = {"run": "run", "uid": uid, "window": 1, "base": 0}
    body = encode_gradient(bodies, shapes, CODEC, **fields)  # pyright: ignore[reportArgumentType]
    return body, ExpectedGradient(**fields, codec=CODEC, shapes=shapes)  # pyright: ignore[reportArgumentType]


def make_gradient(tensors: dict[str, torch.Tensor], uid: str) -> CheckedGradient:
    """Return a worker's gradient after all checks."""
    return check_gradient(*encode_object(tensors, uid))


def _draw_gradients(shapes: Shapes) -> dict[str, CheckedGradient]:
    """Return independent random gradients of all workers."""
    gradients: dict[str, CheckedGradient] = {}
    for number in range(WORKERS):
        generator = torch.Generator().manual_seed(number)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        gradients[f"w{number:02d}"] = make_gradient(tensors, f"w{number:02d}")
    return gradients


def measure_stored_size(tensors: dict[str, torch.Tensor]) -> int:
    """Put an object into a store, and return its size from a listing in bytes."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        put(
            store,
            GradientKeys("run", "1").make_gradient_key("one", 0),
            encode_object(tensors, "one")[0],
        )
        return sum(stat.size for stat in list_objects(store, "run/"))


def compute_error(tensors: dict[str, torch.Tensor]) -> float:
    """Return the norm of the error of the sent values divided by their norm."""
    error = norm = 0.0
    for tensor in tensors.values():
        shape = tuple(tensor.shape)
        values = forward(tensor.contiguous(), CODEC.transform).numpy()
        for run in unpack_tensor(GradientEncoder(CODEC).encode(tensor), shape, CODEC):
            chunks = run.chunks
            table = values[chunks.first : chunks.first + chunks.values].reshape(-1, chunks.size)
            exact = np.take_along_axis(table, run.indices.astype(np.int64), axis=1)
            error += float(np.square(decode_values(run, CODEC) - exact, dtype=np.float64).sum())
            norm += float(np.square(exact, dtype=np.float64).sum())
    return (error / norm) ** 0.5


def compute_torch_error(tensor: torch.Tensor, sent: torch_codec.CompressedTensor) -> float:
    """Return the error of `compute_error` for the codec in PyTorch."""
    decoded = torch_codec.decode(sent, None)
    mask = torch.zeros_like(tensor, dtype=torch.bool).view(-1, torch_codec.CHUNK)
    mask.scatter_(1, torch_codec.unpack_indices(sent), True)  # noqa: FBT003 - API of PyTorch
    selected = mask.view(tensor.shape)
    return float((decoded - tensor)[selected].norm() / tensor[selected].norm())


def merge_model(file: str) -> dict[str, float]:
    """Merge 20 copies of an object, tensor by tensor."""
    expected = ExpectedGradient(run="run", uid="w", window=1, base=0, codec=CODEC, shapes=GPT2)
    body = Path(file).read_bytes()
    gradients = {f"w{n:02d}": check_gradient(body, expected) for n in range(WORKERS)}
    merged = 0
    for _, runs in merge(gradients, MergeSettings(rule=MergeRule.SENDERS), threads=2):
        merged += sum(run.values.size for run in runs)
    return {"values": float(merged)}


def report(results: Results) -> None:
    """Print the figures, and their ratios to the codec in PyTorch and to the lower bound."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for (work, system, metric), row in values.items():
        ratios = ["", ""]
        if metric == "GB/s" and system != "floor":
            ratios[1] = f"{results.compute_ratio(work, system, 'floor', metric):.2f}x"
            if system == "millrace":
                ratios[0] = f"{results.compute_ratio(work, system, 'torch', metric):.2f}x"
        lines.append([work, system, metric, f"{row.value:.4g}", *ratios, str(row.n)])
    print_table(["work", "system", "metric", "", "/torch", "/floor", "n"], lines)


def main() -> int:
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("gradients", __doc__, device=True)
    bench = GradientsBench(options.quick, options.device)
    bench.measure_sizes()
    bench.measure_speeds()
    bench.measure_merges()
    bench.measure_updates()
    report(bench.results)
    bench.results.save(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
