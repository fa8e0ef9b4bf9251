"""A run with honest workers and attackers, merged without a clock: the material of scorers."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import torch

from millrace.gradients import (
    ChainLink,
    ChainStep,
    Codec,
    ErrorFeedback,
    GatherOutcome,
    GatherWindow,
    MergeSettings,
    OuterOptimizer,
    WeightState,
    begin_run,
    check_gradient,
    copy_state,
    decode,
    encode,
    encode_gradient,
    merge_window,
    read_link,
)
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.schemas.chain import ExcludedWorker
from millrace.schemas.gradient import ExclusionReason
from millrace.storage import Store

SIZE = 64  # of a square matrix: one chunk of values
SHAPES = {"a": (SIZE, SIZE)}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
Weights = Mapping[str, torch.Tensor]


@dataclass
class ScoredRun:
    """A run of a model of one matrix, whose workers have own pages in each window.

    Attributes:
        store: Bucket of the aggregator.
        workers: Names of the workers.
        attacks: Attacks of some: ``noise`` sends random values; ``copy`` sends the indices of
            another worker with other values, later; ``skip`` trains on pages that are not its own.
        seed: Seed of the whole run.
    """

    store: Store
    workers: Sequence[str]
    attacks: Mapping[str, str] = field(default_factory=dict[str, str])
    seed: int = 0
    codec: Codec = field(default_factory=lambda: Codec(k=256, bits=4))
    merge: MergeSettings = field(default_factory=MergeSettings)
    keys: ChainKeys = field(default_factory=lambda: ChainKeys("runs/one", "1"))

    def __post_init__(self) -> None:
        """Begin the run."""
        self.state = copy_state({"a": 0.05 * self._draw("initial")})
        self.first = {name: values.copy() for name, values in self.state.weights.items()}
        begin_run(self.store, self.keys, self.state)
        self._feedback = {uid: ErrorFeedback(self.codec) for uid in self.workers}
        self.window = 0

    def compute_loss(self, weights: Weights, window: int, uid: str | None) -> float:
        """Return the loss on pages: a `ComputeLoss`."""
        with torch.no_grad():
            return self._compute_loss(weights["a"], *self._draw_pages(uid or "", window)).item()

    def merge_windows(self, count: int) -> Iterator[ChainLink]:
        """Merge further windows."""
        for _ in range(count):
            self.window += 1
            sent = self.make_gradients(self.state, self.window)
            yield self.merge_gradients(sent)

    def merge_gradients(
        self,
        sent: Mapping[str, bytes],
        excluded: Mapping[str, ExclusionReason] = MappingProxyType({}),
    ) -> ChainLink:
        """Merge the gradients of a window. A copy was uploaded last."""
        opens = BEGIN + timedelta(hours=self.window)
        gather_window = GatherWindow(
            keys=GradientKeys(self.keys.run, self.keys.version), number=self.window,
            base=self.window - 1, codec=self.codec, shapes=SHAPES, opens=opens,
            closes=opens + timedelta(minutes=1),
        )  # fmt: skip
        taken = {
            uid: check_gradient(encode_gradient(
                {"a": body}, SHAPES, self.codec, run=self.keys.run, uid=uid, window=self.window,
                base=self.window - 1,
            ), gather_window.make_expected(uid))
            for uid, body in sent.items()
        }  # fmt: skip
        is_copy = {uid: self.attacks.get(uid) == "copy" for uid in taken}
        written = {uid: opens + timedelta(seconds=is_copy[uid]) for uid in taken}
        gathered = GatherOutcome(
            taken,
            {uid: ExcludedWorker(reason=reason, sentence="") for uid, reason in excluded.items()},
            (),
            sum(one.size for one in taken.values()),
            0.0,
            written,
        )
        before = read_link(self.store, self.keys, self.window - 1)
        step = ChainStep(before, self.window, OuterOptimizer(), self.merge)
        return merge_window(self.store, gather_window, gathered, step, self.state)

    def make_gradients(self, state: WeightState, window: int) -> dict[str, bytes]:
        """Return the compressed changes of all workers."""
        before = torch.from_numpy(state.weights["a"])  # pyright: ignore[reportUnknownMemberType]
        sent: dict[str, bytes] = {}
        for uid in sorted(self.workers, key=lambda uid: self.attacks.get(uid) == "copy"):
            match self.attacks.get(uid):
                case "noise":
                    change = 0.02 * self._draw("noise", uid, window)
                case "copy":
                    honest = [one for one in self.workers if one not in self.attacks]
                    victim = decode(sent[honest[window % len(honest)]], SHAPES["a"], self.codec)
                    other = 0.05 * victim.abs().mean() * self._draw("copy", uid, window)
                    sent[uid] = encode(0.9 * victim + (victim != 0) * other, self.codec)
                    continue
                case attack:
                    whose = f"not {uid}" if attack == "skip" else uid
                    change = before - self._train(before, whose, window)
            sent[uid] = self._feedback[uid].compress("a", change)
        return sent

    def _train(self, before: torch.Tensor, whose: str, window: int) -> torch.Tensor:
        weights = before.clone().requires_grad_()
        optimizer = torch.optim.SGD([weights], lr=3.0)
        pages = self._draw_pages(whose, window)
        for _ in range(8):
            optimizer.zero_grad()
            self._compute_loss(weights, *pages).backward()
            optimizer.step()
        return weights.detach()

    def _draw_pages(self, whose: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = 32 if whose else 256
        pages = self._draw("pages", whose, window, rows=rows)
        noise = self._draw("noise of pages", whose, window, rows=rows)
        return pages, torch.tanh(pages @ self._draw("truth") / SIZE**0.5) + 0.5 * noise

    def _compute_loss(
        self, weights: torch.Tensor, pages: torch.Tensor, expected: torch.Tensor
    ) -> torch.Tensor:
        return torch.nn.functional.mse_loss(torch.tanh(pages @ weights), expected)

    def _draw(self, *what: str | int, rows: int = SIZE) -> torch.Tensor:
        name = hashlib.sha256(repr((self.seed, what)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(name[:4], "big"))
        return torch.randn(rows, SIZE, generator=generator)
