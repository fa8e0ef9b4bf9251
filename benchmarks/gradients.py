"""Gradients compressed, decompressed and merged: Millrace, the same in torch, and memory's rate.

Run it with ``python -m benchmarks.gradients [--quick] [--device cuda] [--json FILE]``. 64 of 4096
values are sent, at two bits each. With ``--device`` the tensors that are encoded, and those that
are decoded into, are there; the bytes are always in the processor's memory.

- ``gauss``, ``student`` (of three degrees of freedom), ``laplace`` and ``real``: ``ratio_fp32``,
  how many times smaller than float32 the object in the store is, by its listing; ``rel_l2``, the
  error of the values that were sent over their norm. ``real`` is the gradient of a transformer that
  has learned from text (Python's own library) for a while. What torch sends is the bytes of its
  tensors.
- ``encode``, ``decode``: GB/s of float32, without a transform and with the DCT.
- ``merge``: 20 workers' gradients into one, by the mean over those that sent each value, dense at
  the end; GB/s of the float32 that they stand for. And the peak memory of the process that merges
  20 gradients of a model of 124 million parameters, beside what 20 dense ones are.
- ``update``: a window of 20 workers that send independent gradients of a model of 63 million
  parameters. ``of_payloads`` is the size of the update in the store over that of the workers'
  objects together; ``merge_cpu_s`` is the processor time of the aggregator, from the checked
  gradients to the committed link, and ``follow_cpu_s`` that of a late worker, from the link to
  weights with its digest. Both include the digests of the weights.

``floor`` is memory's own rate: a sum over the tensor for encoding, a fill for decoding, a fill of
the merged tensor for merging. Medians of interleaved runs.
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
    Codec,
    Decoder,
    ExpectedGradient,
    GatheredWindow,
    GatherWindow,
    GradientEncoder,
    MergeRule,
    MergeSettings,
    Payload,
    RunSettings,
    Transform,
    aggregate,
    catch_up,
    check_payload,
    commit_first_link,
    copy_state,
    encode_payload,
    merge,
)
from millrace.gradients.codec.merged_chunks import make_dense
from millrace.gradients.codec.payload import Shapes
from millrace.gradients.codec.tensors import decode_values, unpack_tensor
from millrace.gradients.codec.transform import forward
from millrace.keys.gradients import GradientKeys
from millrace.storage import list_objects, open_store, put

CODEC = Codec()
WORKERS = 20
SYSTEMS = ("millrace", "torch", "floor")
STILL = 0.3  # seconds until the threads of what ran before no longer spin
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
class Bench:
    """All that is measured.

    Attributes:
        quick: Less data, one run of each.
        device: Where tensors are that are encoded, or decoded into.
        results: What was measured.
    """

    quick: bool
    device: str = "cpu"
    results: Results = field(default_factory=lambda: Results("gradients"))

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 5

    def sizes(self) -> None:
        """Measure how small, and how near."""
        side = 512 if self.quick else 2048
        for name, tensors in (*drawn(side), ("real", real(steps=2 if self.quick else 60))):
            whole = sum(tensor.numel() for tensor in tensors.values()) * 4
            self.results.add(name, "millrace", "ratio_fp32", whole / stored(tensors))
            self.results.add(name, "millrace", "rel_l2", off(tensors))
            if name != "real":  # whose sides are no multiples of 64, which torch's way needs
                sent = torch_codec.encode(tensors["w"], None)
                self.results.add(name, "torch", "ratio_fp32", whole / sent.size)
                self.results.add(name, "torch", "rel_l2", torch_off(tensors["w"], sent))

    def speeds(self) -> None:
        """Measure how quick."""
        side = 1024 if self.quick else 4096
        tensor = next(drawn(side))[1]["w"].to(self.device)
        for transform in Transform:
            dct = torch_codec.basis().to(self.device) if transform is Transform.DCT else None
            codec = Codec(transform=transform)
            encoder, decoder = GradientEncoder(codec), Decoder(codec)
            ready = torch.empty(side, side, device=self.device)
            body = encoder.encode(tensor)
            sent = torch_codec.encode(tensor, dct)
            suffix = "" if transform is Transform.NONE else ", dct"
            self._timed(
                f"encode{suffix}",
                tensor.nbytes,
                {
                    "millrace": lambda encoder=encoder: encoder.encode(tensor),
                    "torch": lambda dct=dct: torch_codec.encode(tensor, dct),
                    "floor": tensor.sum,
                },
            )
            self._timed(
                f"decode{suffix}",
                tensor.nbytes,
                {
                    "millrace": lambda body=body, decoder=decoder, ready=ready: decoder.decode(
                        body, (side, side), out=ready
                    ),
                    "torch": lambda sent=sent, dct=dct: torch_codec.decode(sent, dct),
                    "floor": ready.zero_,
                },
            )

    def merges(self) -> None:
        """Twenty into one."""
        side = 512 if self.quick else 2048
        shape = (side, side)
        dice = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=dice) for _ in range(WORKERS)]
        names = [f"w{n:02d}" for n in range(WORKERS)]
        payloads = {
            name: payload_of({"w": tensor}, name)
            for name, tensor in zip(names, tensors, strict=True)
        }
        sent = [torch_codec.encode(tensor, None) for tensor in tensors]
        how, out = MergeSettings(rule=MergeRule.SENDERS), np.empty(side * side, np.float32)

        def ours() -> None:
            for _, runs in merge(payloads, how, threads=2):
                make_dense(runs, shape, out)

        self._timed(
            "merge",
            WORKERS * tensors[0].nbytes,
            {
                "millrace": ours,
                "torch": lambda: torch_codec.merge(sent),
                "floor": lambda: out.fill(0.0),
            },
        )
        if not self.quick:
            self._memory()

    def _memory(self) -> None:
        dice = torch.Generator().manual_seed(0)
        tensors = {name: torch.randn(shape, generator=dice) for name, shape in GPT2.items()}
        with tempfile.NamedTemporaryFile(prefix="millrace-bench-") as file:
            file.write(object_of(tensors, "w")[0])
            file.flush()
            run = measure_process(merge_of_a_model, file.name)
        dense = WORKERS * sum(tensor.nbytes for tensor in tensors.values())
        self.results.add("merge, 124M", "millrace", "peak_rss_MB", run.peak_rss / 1e6)
        self.results.add("merge, 124M", "20 dense", "peak_rss_MB", dense / 1e6)

    def updates(self) -> None:
        """Measure the update of a window, its merge, and who follows."""
        side, count = (512, 2) if self.quick else (2048, 15)
        small = {"w0": (64, 64)}
        self._update(small, _draw_payloads(small), keep=False)  # compiled
        shapes = {f"w{n:02d}": (side, side) for n in range(count)}
        payloads = _draw_payloads(shapes)
        for _ in range(self.repeats):
            self._update(shapes, payloads, keep=True)

    def _update(self, shapes: Shapes, payloads: dict[str, Payload], *, keep: bool) -> None:
        settings = RunSettings(run="run")
        now = datetime.now(UTC)
        size = sum(payload.size for payload in payloads.values())
        gathered = GatheredWindow(payloads, {}, (), size, 0.0)
        window = GatherWindow(settings.gradients, 1, 0, CODEC, shapes, opens=now, closes=now)
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            store = open_store(Path(folder).as_uri())
            before = commit_first_link(
                store, settings.chain, ChainStart(run="run", job="job", step=0, root="", state="")
            )
            step = ChainStep(before, 1, settings.outer, settings.merge)
            state, late = (
                copy_state({name: np.zeros(shape) for name, shape in shapes.items()})
                for _ in range(2)
            )
            began = time.process_time()
            link = aggregate(store, window, gathered, step, state)
            merged = time.process_time()
            assert catch_up(store, settings.chain, late) == link
            followed = time.process_time()
        if keep:
            self.results.add("update", "millrace", "of_payloads", link.size / size)
            self.results.add("update", "millrace", "merge_cpu_s", merged - began)
            self.results.add("update", "millrace", "follow_cpu_s", followed - merged)

    def _timed(self, work: str, size: int, systems: dict[str, Callable[[], object]]) -> None:
        for run in systems.values():
            run()  # compiled, and its memory taken
        for repeat in range(self.repeats):
            for system in rotate_systems(SYSTEMS, repeat):
                time.sleep(STILL)
                best = median(seconds(systems[system]) for _ in range(3))
                self.results.add(work, system, "GB/s", size / best / 1e9)


def seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():  # whose work goes on behind the call
        torch.cuda.synchronize()
    return time.perf_counter() - began


def drawn(side: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Draw a matrix of each distribution."""
    dice = np.random.default_rng(0)
    shape = (side, side)
    for name, values in (
        ("gauss", dice.standard_normal(shape)),
        ("student", dice.standard_t(3, shape)),
        ("laplace", dice.laplace(size=shape)),
    ):
        yield name, {"w": torch.from_numpy(values.astype(np.float32))}


def real(steps: int) -> dict[str, torch.Tensor]:
    """Return the gradient of a small transformer on text, after some steps."""
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
        guessed = model["head"](body(embed(rows[:, :-1]), mask=mask, is_causal=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(guessed.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def object_of(tensors: dict[str, torch.Tensor], uid: str) -> tuple[bytes, ExpectedGradient]:
    """Return the object that a worker puts into the bucket, and what is expected of it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    encoder = GradientEncoder(CODEC)
    bodies = {name: encoder.encode(tensor) for name, tensor in tensors.items()}
    said = {"run": "run", "uid": uid, "window": 1, "base": 0}
    body = encode_payload(bodies, shapes, CODEC, **said)  # pyright: ignore[reportArgumentType]
    return body, ExpectedGradient(**said, codec=CODEC, shapes=shapes)  # pyright: ignore[reportArgumentType]


def payload_of(tensors: dict[str, torch.Tensor], uid: str) -> Payload:
    """Return a worker's gradient, as it is after every check."""
    return check_payload(*object_of(tensors, uid))


def _draw_payloads(shapes: Shapes) -> dict[str, Payload]:
    """Return the gradients of workers that have nothing in common."""
    found: dict[str, Payload] = {}
    for number in range(WORKERS):
        dice = torch.Generator().manual_seed(number)
        tensors = {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}
        found[f"w{number:02d}"] = payload_of(tensors, f"w{number:02d}")
    return found


def stored(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of the object in a store, by its listing."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        put(
            store,
            GradientKeys("run", "1").make_gradient_key("one", 0),
            object_of(tensors, "one")[0],
        )
        return sum(stat.size for stat in list_objects(store, "run/"))


def off(tensors: dict[str, torch.Tensor]) -> float:
    """Return the error of the sent values, over their norm."""
    wrong = right = 0.0
    for tensor in tensors.values():
        shape = tuple(tensor.shape)
        values = forward(tensor.contiguous(), CODEC.transform).numpy()
        for run in unpack_tensor(GradientEncoder(CODEC).encode(tensor), shape, CODEC):
            chunks = run.chunks
            table = values[chunks.first : chunks.first + chunks.values].reshape(-1, chunks.size)
            true = np.take_along_axis(table, run.indices.astype(np.int64), axis=1)
            wrong += float(np.square(decode_values(run, CODEC) - true, dtype=np.float64).sum())
            right += float(np.square(true, dtype=np.float64).sum())
    return (wrong / right) ** 0.5


def torch_off(tensor: torch.Tensor, sent: torch_codec.Sent) -> float:
    """Return the same error of torch's codec."""
    found = torch_codec.decode(sent, None)
    places = torch.zeros_like(tensor, dtype=torch.bool).view(-1, torch_codec.CHUNK)
    places.scatter_(1, torch_codec.places_of(sent), True)  # noqa: FBT003 - torch's own
    chosen = places.view(tensor.shape)
    return float((found - tensor)[chosen].norm() / tensor[chosen].norm())


def merge_of_a_model(file: str) -> dict[str, float]:
    """Merge an object 20 times with itself, tensor by tensor; in a process of its own."""
    expected = ExpectedGradient(run="run", uid="w", window=1, base=0, codec=CODEC, shapes=GPT2)
    body = Path(file).read_bytes()
    payloads = {f"w{n:02d}": check_payload(body, expected) for n in range(WORKERS)}
    merged = 0
    for _, runs in merge(payloads, MergeSettings(rule=MergeRule.SENDERS), threads=2):
        merged += sum(run.values.size for run in runs)
    return {"values": float(merged)}


def report(results: Results) -> None:
    """Print the figures."""
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
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("gradients", __doc__, device=True)
    bench = Bench(asked.quick, asked.device)
    bench.sizes()
    bench.speeds()
    bench.merges()
    bench.updates()
    report(bench.results)
    bench.results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
