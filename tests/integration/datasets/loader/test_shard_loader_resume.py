"""Each sample of an epoch comes once, whatever the ranks, workers, kills and resumes.

A simulated job has ranks, each with worker processes whose batches a `DataLoader` takes in turn.
A kill loses what the workers had fetched and the trainer had not received.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.datasets.formats import FieldType
from millrace.datasets.loader.shard_loader import ShardLoader
from millrace.datasets.sample import Sample
from millrace.storage import open_store
from tests.oracle import Folder, judge_epoch
from tests.support.examples import scale_examples
from tests.support.shard_datasets import write_dataset

SIZES = (9, 1, 14, 20, 3, 11, 5)
TOTAL = sum(SIZES)
STREAMS = 12
State = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two datasets: texts, and tokens each of which is another number."""
    path = tmp_path_factory.mktemp("store")
    numbers, token = itertools.count(), itertools.count()
    texts, tokens = list[list[Sample]](), list[list[Sample]]()
    for size in SIZES:
        own = [next(numbers) for _ in range(size)]
        texts.append([Sample(f"k{n:03d}", {"txt": f"text {n}".encode()}, n) for n in own])
        documents = [[next(token) for _ in range(n % 6)] for n in own]
        tokens.append(
            [
                Sample(f"k{n}", {"tokens": np.array(one, "<u4").tobytes()}, n)
                for n, one in zip(own, documents, strict=True)
            ]
        )
    store = open_store(path.as_uri())
    write_dataset(store, "texts", ["webdataset", "mds"], {"txt": FieldType.STR}, texts)
    write_dataset(store, "tokens", ["tokens"], {"tokens": FieldType.UINT32_ARRAY}, tokens)
    return path


@dataclass
class Worker:
    """A worker process, and the state after each of its batches."""

    loader: ShardLoader
    batch: int
    received: int = 0
    states: list[State] = field(default_factory=list[State])
    batches: list[list[Any]] = field(default_factory=list[list[Any]])
    iterator: Iterator[Any] | None = None

    def fetch(self) -> bool:
        """Fetch a batch ahead of the trainer, and save the state after it."""
        if self.iterator is None:
            self.states = [save(self.loader)]
            self.iterator = iter(self.loader)
        found = list(itertools.islice(self.iterator, self.batch))
        if found:
            self.batches.append(found)
            self.states.append(save(self.loader))
        return bool(found)

    def give(self) -> list[Any]:
        """Give the trainer the next batch; nothing at the end of the epoch."""
        if len(self.batches) <= self.received and not self.fetch():
            return []
        self.received += 1
        return self.batches[self.received - 1]

    def read_state(self) -> State:
        return self.states[self.received] if self.states else save(self.loader)


def save(loader: ShardLoader) -> State:
    return json.loads(json.dumps(loader.state_dict()))


class Rank:
    """A rank, whose workers give their batches in turn."""

    def __init__(
        self, source: str, rank: int, plan: "Incarnation", state: Any, options: Mapping[str, Any]
    ) -> None:
        self.plan, self.batches = plan, 0
        self.workers: list[Worker] = []
        for number in range(max(1, plan.workers)):
            loader = ShardLoader(source, rank=rank, world_size=plan.world_size, **options)
            if state is not None:
                loader.load_state_dict(state)
            if plan.workers:
                loader.read_as_worker(number, plan.workers)
            self.workers.append(Worker(loader, plan.batch))
        self.turns = itertools.cycle(self.workers)
        self.ended: set[int] = set()

    def train(self, steps: int | None) -> Iterator[Any]:
        """Receive some batches, or those of the whole epoch."""
        while steps is None or self.batches < steps:
            if len(self.ended) == len(self.workers):
                return
            worker = next(self.turns)
            if id(worker) in self.ended:
                continue
            if self.plan.prefetch:
                worker.fetch()
            batch = worker.give()
            if not batch:
                self.ended.add(id(worker))
                continue
            self.batches += 1
            yield from batch

    def save(self) -> list[State]:
        return [worker.read_state() for worker in self.workers]


@dataclass(frozen=True)
class Incarnation:
    """A job between two kills.

    Attributes:
        world_size: Number of ranks.
        workers: Number of workers; 0 reads in the rank itself.
        batch: Samples of a batch.
        steps: Batches that each rank receives before the kill.
        prefetch: Whether workers fetch ahead.
    """

    world_size: int
    workers: int
    batch: int
    steps: int
    prefetch: bool


INCARNATIONS = st.lists(
    st.builds(
        Incarnation,
        world_size=st.sampled_from([1, 2, 3, 4, 6]),
        workers=st.integers(0, 3),
        batch=st.integers(1, 5),
        steps=st.integers(0, 6),
        prefetch=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def run(
    source: str, plans: list[Incarnation], options: Mapping[str, Any], *, all_states: bool
) -> list[Any]:
    """Run the incarnations, the last one to the end of the epoch, and return what was received."""
    return run_each(source, plans, options, all_states=all_states)[0]


def run_each(
    source: str, plans: list[Incarnation], options: Mapping[str, Any], *, all_states: bool
) -> tuple[list[Any], int]:
    """Run the incarnations, and also return the number of the one in which the epoch ended."""
    received: list[Any] = []
    state: Any = None
    for number, plan in enumerate(plans):
        ranks = [Rank(source, rank, plan, state, options) for rank in range(plan.world_size)]
        if ranks[0].workers[0].loader.epoch:
            return received, number - 1  # the epoch ended before the kill
        steps = None if plan is plans[-1] else plan.steps
        for rank in ranks:
            received += rank.train(steps)
        saved = ranks if all_states else ranks[:1]
        state = [one for rank in saved for one in rank.save()]
    return received, len(plans) - 1


def get_pairs(samples: list[Any]) -> list[tuple[str, str]]:
    return [(sample["__key__"], sample["txt"]) for sample in samples]


@settings(max_examples=scale_examples(100))
@given(plans=INCARNATIONS, seed=st.integers(0, 5), window=st.integers(1, 6), one=st.booleans())
def test_each_sample_is_received_once(
    folder: Path, plans: list[Incarnation], seed: int, window: int, one: bool
) -> None:
    options = {
        "seed": seed, "streams": STREAMS, "shuffle_window": window, "remainder": "keep",
        "format": "webdataset" if one else "mds",
    }  # fmt: skip
    received = run(f"{folder}/texts", plans, options, all_states=True)
    verdict = judge_epoch(Folder(folder), "texts", get_pairs(received))
    assert verdict.is_correct, verdict


@settings(max_examples=scale_examples(100))
@given(plans=INCARNATIONS, seed=st.integers(0, 5), rule=st.sampled_from(["drop", "pad"]))
def test_ranks_end_together_and_one_rank_knows_the_state_of_all(
    folder: Path, plans: list[Incarnation], seed: int, rule: str
) -> None:
    options = {"seed": seed, "streams": STREAMS, "shuffle_window": 2, "remainder": rule}
    received, ended = run_each(f"{folder}/texts", plans, options, all_states=False)
    verdict = judge_epoch(Folder(folder), "texts", get_pairs(received))
    assert not verdict.problems
    last = plans[ended].world_size
    # Streams that workers left at different places make the ranks that follow less equal.
    bound = last - 1 + sum(plan.batch * last for plan in plans[:ended] if plan.workers > 1)
    if rule == "drop":
        assert verdict.duplicated == 0
        assert verdict.lost <= bound
    else:
        assert verdict.lost == 0
        assert verdict.duplicated <= bound
    assert (
        len(received) % last
        == sum(plan.batch * plan.steps * plan.world_size for plan in plans[:-1]) % last
        or len(plans) > 1
    )


@settings(max_examples=scale_examples(60))
@given(plans=INCARNATIONS, window=st.integers(1, 6))
def test_outputs_of_a_transform_are_received_once(
    folder: Path, plans: list[Incarnation], window: int
) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        number = int(sample["txt"].removeprefix("text "))
        if number % 3 == 0:
            return None
        if number % 3 == 1:
            return {"made": f"{number}"}
        return [{"made": f"{number}/{part}"} for part in range(number % 5)]

    options = {"streams": STREAMS, "shuffle_window": window, "transform": transform}
    received = run(f"{folder}/texts", plans, options, all_states=True)
    expected = Counter[str]()
    for number in range(TOTAL):
        if number % 3 == 1:
            expected[f"{number}"] += 1
        elif number % 3 == 2:
            expected.update(f"{number}/{part}" for part in range(number % 5))
    assert Counter(sample["made"] for sample in received) == expected


@settings(max_examples=scale_examples(60))
@given(plans=INCARNATIONS, length=st.integers(1, 9))
def test_packed_tokens_are_received_once(
    folder: Path, plans: list[Incarnation], length: int
) -> None:
    options = {"streams": STREAMS, "shuffle_window": 3, "pack": length}
    received = run(f"{folder}/tokens", plans, options, all_states=True)
    assert all(len(sample["tokens"]) == length for sample in received)
    tokens = Counter(int(token) for sample in received for token in sample["tokens"])
    total = sum(number % 6 for number in range(TOTAL))
    assert tokens.keys() <= set(range(total))
    assert set(tokens.values()) <= {1}
    assert total - tokens.total() <= STREAMS * (length - 1)


@settings(max_examples=scale_examples(60))
@given(
    count=st.integers(0, TOTAL),
    seed=st.integers(0, 5),
    window=st.integers(1, 9),
    case=st.sampled_from(["plain", "transform", "pack"]),
)
def test_a_state_gives_the_same_samples_each_time_it_is_loaded(
    folder: Path, count: int, seed: int, window: int, case: str
) -> None:
    options: dict[str, Any] = {"seed": seed, "streams": 4, "shuffle_window": window}
    name = "texts"
    if case == "transform":
        options["transform"] = lambda sample: [sample] * (len(sample["txt"]) % 3)
    elif case == "pack":
        name, options["pack"] = "tokens", 5
    loader = ShardLoader(f"{folder}/{name}", **options)
    iterator = iter(loader)
    first = [describe(sample) for sample in itertools.islice(iterator, count)]
    state = save(loader)
    rest = [describe(sample) for sample in iterator]
    for _ in range(2):
        again = ShardLoader(f"{folder}/{name}", **options)
        again.load_state_dict(state)
        if rest:
            assert save(again) == state
        assert [describe(sample) for sample in again] == rest or not rest
    whole = ShardLoader(f"{folder}/{name}", **options)
    assert [describe(sample) for sample in whole] == first + rest


def describe(sample: Mapping[str, Any]) -> Any:
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in sample.items()
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_order_of_all_ranks_together_is_that_of_one(folder: Path, world_size: int) -> None:
    options: dict[str, Any] = {
        "seed": 1,
        "streams": STREAMS,
        "shuffle_window": 3,
        "remainder": "keep",
    }
    alone = get_pairs(list(ShardLoader(f"{folder}/texts", **options)))
    ranks = [
        get_pairs(list(ShardLoader(f"{folder}/texts", rank=n, world_size=world_size, **options)))
        for n in range(world_size)
    ]
    together = [one for row in itertools.zip_longest(*ranks) for one in row if one]
    assert together == alone


def test_each_epoch_has_an_order_of_its_own(folder: Path) -> None:
    loader = ShardLoader(f"{folder}/texts", streams=4, shuffle_window=3)
    epochs = [get_pairs(list(loader)) for _ in range(3)]
    assert loader.epoch == 3
    assert len({tuple(one) for one in epochs}) == 3
    for number in (2, 0, 1):
        loader.set_epoch(number)
        assert get_pairs(list(loader)) == epochs[number]


def test_an_iteration_goes_on_where_the_last_one_stopped(folder: Path) -> None:
    loader = ShardLoader(f"{folder}/texts", streams=4, shuffle_window=3)
    first = get_pairs(list(itertools.islice(loader, 20)))
    loader.set_epoch(0)
    assert sorted(first + get_pairs(list(loader))) == sorted(
        get_pairs(list(ShardLoader(f"{folder}/texts", streams=4, shuffle_window=3)))
    )
