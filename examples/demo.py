"""The whole chain on one machine: datasets, rented machines, a model trained, all released.

The text is Python's own standard library, the store is a folder, the runs stand in a Prefect server
of its own. The machines are rented from a stand-in of Vast.ai's API, which runs each as processes
of this machine: it answers, bills and keeps the books as the provider does. Nothing leaves this
machine, and nothing of it is left running.
"""

import argparse
import fcntl
import logging
import os
import re
import shutil
import sys
import sysconfig
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.campaigns import CampaignSummary
    from millrace.testing.prefect_server import PrefectServerProcess
    from millrace.testing.vast import VastServer

HOME = Path(".millrace/demo").absolute()
STORE = HOME / "store"
UI_PORT = 4200
DATASET = "python-stdlib"
EPOCHS = 2


@dataclass(frozen=True)
class Size:
    """Size of the demo's training.

    Attributes:
        machines: Number of machines, each with a worker.
        windows: Number of windows of each epoch.
        steps: Number of steps of each window.
    """

    machines: int = 4
    windows: int = 5
    steps: int = 25


@contextmanager
def lock_folder() -> Iterator[None]:
    """Keep other demos out of the demo's folder. The system ends the lock of a killed demo."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"Another demo runs in {HOME}: wait until it has ended, or stop it.")
        yield


def start_prefect_server(port: int = 0) -> "PrefectServerProcess":
    """Start a Prefect server with its database in the demo's folder, for this process to use."""
    from millrace.testing.prefect_server import PrefectServerProcess

    try:
        server = PrefectServerProcess(HOME / "prefect", port=port)
    except RuntimeError as error:
        sys.exit(str(error))
    os.environ |= server.environment
    return server


@contextmanager
def cloud() -> Iterator["VastServer"]:
    """Run a provider of machines, with an account that is saved as the block ``demo``."""
    from pydantic import SecretStr

    from blocks import VastCredentials
    from millrace.testing.vast import VastServer

    for gone in ("_rentals", "_machines"):  # of another cloud, which went with all that it had
        shutil.rmtree(STORE / gone, ignore_errors=True)
    with VastServer.start(HOME / "cloud") as server:
        packages = sysconfig.get_path("purelib")  # what the image has: machines fetch nothing
        key = server.reset(real=True, rate=1.0, strict=False, image=packages)
        VastCredentials(api_key=SecretStr(key), server_url=server.url).save("demo", overwrite=True)
        yield server


def plan_of(name: str, size: Size) -> dict[str, Any]:
    """Return the plan: as `millrace campaign` reads it from a file, too."""
    from millrace.testing.repository import snapshot

    return {
        "name": name,
        "bucket": STORE.as_uri(),
        "data": {
            "dataset": DATASET,
            "source": {
                "url": Path(sysconfig.get_path("stdlib")).as_uri(),
                "kind": "files",
                "include": ["*.py", "*.txt"],
                "exclude": ["site-packages/*"],
            },
            "sharding": {"shard_bytes": "4MiB", "partition_bytes": "8MiB", "holdout": 0.05},
        },
        "training": {
            "command": ["python", "-m", "examples.tiny_lm.train"],
            "initial_weights": {"job": f"{name}/first", "tensors": "model."},
            "workers": size.machines,
            "machines": {
                "request": {"max_hourly": 2.0, "max_total": 5.0, "disk": "10GB"},
                "vast": "demo",
                "repo_url": snapshot(HOME / "repository").as_uri(),
                "timeouts": {"poll_interval": "PT2S", "heartbeat_timeout": "PT1M"},
            },
            "epochs": EPOCHS,
            "windows_per_epoch": size.windows,
            "run": {
                "codec": {"k": 112},
                "residual_factor": 0.95,
                "outer": {"lr": 1.9},
                "steps": size.steps,
                "window_length": "PT10M",
                "gather": {"quorum": 2, "poll_interval": "PT0.3S"},
            },
        },
        "publish": {"job": f"{name}/final", "bucket": STORE.as_uri()},
    }


def make_two_formats() -> None:
    """Shard parquet as WebDataset and as tokens, read both back, and say so."""
    from examples import two_formats

    source = HOME / "parquet"
    two_formats.write_parquet(source / "modules.parquet", Path(sysconfig.get_path("stdlib")))
    two_formats.shard(STORE, source)
    try:
        print(two_formats.compare(STORE, source), flush=True)
    except ValueError as error:
        sys.exit(str(error))


def run(size: Size) -> None:
    """Run a campaign, or go on with one that was stopped; then say what came of it."""
    from examples.tiny_lm.begin import begin
    from flows.campaign import run_campaign
    from flows.campaign_plan import CampaignPlan
    from millrace.storage import open_store

    number = 1
    while (HOME / f"tiny-{number}.svg").exists():
        number += 1
    name = f"tiny-{number}"
    began = time.monotonic()
    weights = begin(open_store(STORE.as_uri()), f"{name}/first")
    print(f"The campaign {name}: {weights:,} weights, {size.machines} machines.", flush=True)
    with cloud() as server:
        found = run_campaign(CampaignPlan.model_validate(plan_of(name, size)))
        books, alive = server.list_machines(), server.list_alive()
    tell(found, size, time.monotonic() - began)
    validate_batches(name, size)
    billed = sum(one["cost"] for one in books)
    print(f"  the provider's books: {len(books)} machines rented, ${billed:.4f} billed,")
    print(f"  {len(alive)} left")
    (HOME / f"{name}.svg").write_bytes(picture_of(name))
    if alive or found.windows != EPOCHS * size.windows:
        sys.exit("That should have been none left, and all windows.")


def tell(found: "CampaignSummary", size: Size, seconds: float) -> None:
    """Tell the result, and where it is."""
    losses = [found.losses[window] for window in sorted(found.losses)]
    print(f"\n{found.name}, in {timedelta(seconds=round(seconds))}:")
    print(f"  {DATASET}: {found.samples} samples in {found.shards} shards")
    print(f"  {found.windows} windows, {found.step} steps of each of {size.machines} workers")
    print(f"  loss {losses[0]:.3f} to {losses[-1]:.3f}, on text that the model was not trained on")
    sent, dense = found.sent_bytes / 1e6, found.dense_bytes / 1e6
    print(
        f"  {found.gradients} gradients of {sent:.1f} MB, instead of {dense:.1f} MB: "
        f"{dense / sent:.0f} times smaller"
    )
    for epoch, step in found.epoch_steps.items():
        print(f"  epoch {epoch} ended with the checkpoint of step {step}")
    for folder in (f"{found.name}/model/checkpoints", f"{found.name}/final/checkpoints"):
        for path in sorted((STORE / folder).glob("*/metadata.json")):
            print(f"  {path.relative_to(Path.cwd())}")
    print(f"  {(HOME / f'{found.name}.svg').relative_to(Path.cwd())}: the loss over the windows")
    print(f"  {found.deleted_objects} objects deleted")


def validate_batches(name: str, size: Size) -> None:
    """Load the batches of all merged gradients again, and compare them with the reports."""
    from examples.tiny_lm.train import BATCH_FILES
    from millrace.campaigns.worker import WindowLoader
    from millrace.gradients import RunSettings, iterate_links
    from millrace.keys.campaigns import CampaignKeys
    from millrace.storage import open_store

    keys = CampaignKeys(name)
    run = RunSettings(run=keys.run, steps=size.steps)
    loaders = {
        keys.make_uid(number): WindowLoader(
            STORE.as_uri(), DATASET, run=run.name, number=number, workers=size.machines,
            batch_size=BATCH_FILES, steps=size.steps, decode=False,
        )
        for number in range(size.machines)
    }  # fmt: skip
    gradients = 0
    for link in iterate_links(open_store(STORE.as_uri()), run.chain_keys):
        for uid, worker in link.taken.items():
            batches = loaders[uid].load(link.window)
            for _ in batches:
                pass
            if batches.digest != worker.samples:
                sys.exit(f"{uid} has trained on other samples in window {link.window}.")
            gradients += 1
    print(f"  a validator has loaded the same batches as the workers of all {gradients} gradients")


def picture_of(name: str) -> bytes:
    """Return the plot in the campaign's report, as the Prefect server has it."""
    from prefect import get_client

    from tasks.formatting import make_artifact_key

    with get_client(sync_client=True) as client:
        reports = [
            one for one in client.read_artifacts() if one.key == make_artifact_key("campaign", name)
        ]
    found = re.search(r"base64,([^)]+)\)", str(reports[0].data))
    assert found
    return b64decode(found[1])


def main() -> None:
    """Run the campaign, or show what was run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ui", action="store_true", help="only serve the UI, on port 4200")
    for name, meaning in {
        "machines": "number of machines",
        "windows": "number of windows of each epoch",
        "steps": "number of steps of each window",
    }.items():
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name), help=meaning)
    arguments = parser.parse_args()
    if arguments.ui:
        with start_prefect_server(UI_PORT):
            print(f"The demo's runs: http://127.0.0.1:{UI_PORT}/runs (Ctrl-C ends it)", flush=True)
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                return
    with lock_folder(), start_prefect_server():
        STORE.mkdir(parents=True, exist_ok=True)
        make_two_formats()
        run(Size(arguments.machines, arguments.windows, arguments.steps))
        for handler in logging.getLogger("prefect.flow_runs").handlers:
            handler.flush()  # while the server is there that the run's lines are sent to
    print("\nSee the runs, their reports and plots: make ui")
    print(f"See what a bucket alone tells: .venv/bin/millrace status {STORE.as_uri()}")


if __name__ == "__main__":
    main()
