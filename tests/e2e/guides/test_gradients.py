"""The guide to gradients, block by block: four workers, and an aggregator beside them."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.checkpoints import Saver, load
from millrace.gradients import AggregatorSettings, Participant, RunSettings, WorkerKey
from millrace.settings import load_settings
from millrace.storage import Store, exists, open_store, put
from tests.support.guides import follow
from tests.support.templar_gradients import write_payload

R2 = "r2://0123456789abcdef0123456789abcdef/"
WINDOWS = 2


def test_every_block_of_the_guide_to_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credentials: dict[str, str], bucket: str
) -> None:
    values = {
        R2: f"s3://{bucket}/",
        'window_length="PT20M"': f'window_length="PT20M", windows={WINDOWS}',
        "window_length: PT20M": f"window_length: PT20M, windows: {WINDOWS}",
        "file:///scratch": (tmp_path / "scratch").as_uri(),
    }
    with follow(
        "gradients", tmp_path / "gradients", monkeypatch, values=values, environment=credentials
    ) as guide:
        chain = open_store(f"s3://{bucket}/aggregates")
        mine = open_store(f"s3://{bucket}/gradients")
        workers = [make_worker(number, mine, chain) for number in range(1, 5)]
        names = [{"worker-3": f"worker-{number}"} for number in range(1, 5)]
        codes = guide.execute_each(workers, names)
        initial = workers[0]["model"].state_dict()
        with Saver(chain, "my-job") as saver:
            saver.save({"model": initial}, step=0)

        path = guide.write("aggregate.yaml")
        assert len(load_settings(path, AggregatorSettings, credentials).workers) == 4
        with ThreadPoolExecutor(4) as pool:
            training = [pool.submit(code) for code in codes]
            shown = guide.type("millrace gradient aggregate aggregate.yaml")
            for one in training:
                one.result()
        assert shown.count("4 taken, 0 excluded") == WINDOWS
        caught_up = guide.run()
        elastic = load_settings(guide.write("elastic.yaml"), AggregatorSettings, credentials).run
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(take_part, elastic, workers[0], guide.folder / "other.key")
            guide.type("millrace gradient aggregate elastic.yaml")
            joined.result()
        roster = guide.run()
        (guide.folder / "loss.py").write_text(guide.read_python())
        guide.write("score.yaml")
        scored = guide.run()
        fill_templar_bucket(open_store(f"s3://{bucket}/templar"))
        guide.write("import.yaml")
        imported = guide.type("millrace gradient import import.yaml")
    assert imported.count("2 taken, 0 excluded; at most 0.0% of a norm lost") == 4
    assert "runs/one is at step 60" in caught_up
    assert re.search(r"(?m)^[0-9a-f]{64}$", roster)
    assert re.search(r"runs/elastic, window 2:\n.*\nworker-9 +warming up +1 +1 ", roster)
    assert "window 2: 4 workers evaluated" in scored
    assert "runs/one, after window 2:" in scored
    found = load(open_store((tmp_path / "scratch/weights").as_uri()), "runs/one")
    for worker in workers:
        for name, tensor in worker["model"].state_dict().items():
            assert torch.equal(found.state["weights"][name], tensor)


def take_part(settings: RunSettings, found: dict[str, Any], key: Path) -> None:
    """Join the run whose workers register, as soon as it has begun, and take part to its end."""
    while not exists(found["chain"], settings.chain_keys.make_link_key(0)):
        threading.Event().wait(0.05)
    model, signer = torch.nn.Linear(64, 64), WorkerKey.load(key)
    participant = Participant.join(settings, "worker-9", found["mine"], found["chain"], key=signer)
    for _ in participant.iterate_windows():
        participant.load(model)
        found["train"](model)
        participant.submit(model)
        participant.receive(model)


def fill_templar_bucket(store: Store) -> None:
    """Write the gradients of two workers of v2.1.28, for four windows of the guide's model."""
    for window, uid in product(range(40, 44), (1, 7)):
        dice = torch.Generator().manual_seed(100 * window + uid)
        changes = {
            "weight": torch.randn(64, 64, generator=dice),
            "bias": torch.randn(64, generator=dice),
        }
        body = write_payload(changes, k=64, window=window).save()
        put(store, f"gradient-{window}-{uid}-v2.1.28.pt", body)


def make_worker(number: int, mine: object, chain: object) -> dict[str, Any]:
    """Return what the guide's worker finds: its model, its stores, and a step of its training."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    dice = torch.Generator().manual_seed(number)

    def train(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=dice), alpha=0.01)

    return {"model": model, "train": train, "mine": mine, "chain": chain}
