"""The main job on any machine: shard real text into a store, and read it back.

The text is Python's own standard library, the store is a folder, and the run stands in a Prefect
server of its own. Nothing leaves this machine, and nothing of it is left running.
"""

import argparse
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOME = Path(".millrace/demo").absolute()
STORE = HOME / "store"
UI_PORT = 4200
NAME = "python-stdlib"


@contextmanager
def prefect_server(port: int) -> Iterator[str]:
    """A Prefect server of our own, with its database in the demo's folder."""
    address = f"http://127.0.0.1:{port}"
    os.environ |= {
        "PREFECT_HOME": str(HOME / "prefect"),
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_UI_API_URL": f"{address}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    (HOME / "prefect").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start"]
    with (HOME / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"{address}/api/health", server)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Return when the server answers."""
    for _ in range(600):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"The Prefect server did not start; {HOME / 'server.log'} says why.")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shard() -> None:
    """Run the flow, then read its shards with webdataset itself."""
    from flows.shard_dataset import Source, shard_dataset
    from millrace.shards import CutSettings, RunSettings

    library = Path(sysconfig.get_path("stdlib"))
    report = shard_dataset(
        dataset=NAME,
        source=Source(
            url=library.as_uri(),
            kind="files",
            include=["*.py", "*.txt"],
            exclude=["site-packages/*"],
        ),
        destination=STORE.as_uri(),
        cut=CutSettings(shard_bytes=4 << 20, split_bytes=8 << 20, holdout=0.05),
        run=RunSettings(workers=2),
    )
    manifest = report.manifest
    made = f"made {report.made} shards now" if report.made else "found them all made before"
    print(f"\nThe dataset {NAME}, from {library}")
    print(
        f"  {report.samples} samples in {len(manifest.shards)} shards, "
        f"{manifest.size / 1e6:.1f} MB;"
    )
    print(
        f"  this run {made}, in {report.seconds:.1f} s ({rate(report.bytes_made, report.seconds)})"
    )
    for partition, samples in manifest.samples.items():
        print(f"  {partition}: {samples} samples")
    print(f"  quarantined: {manifest.quarantined}")
    print("\nIts objects:")
    keys = [shard.key for shard in manifest.shards]
    for key in [*keys, f"{NAME}/index.json", report.manifest_key]:
        path = STORE / key
        print(f"  {path.relative_to(Path.cwd())}  {path.stat().st_size} bytes")
    began = time.monotonic()
    samples, size = read_back([str(STORE / key) for key in keys])
    seconds = time.monotonic() - began
    print(f"\nwebdataset.WebDataset read {samples} samples back, {rate(size, seconds)}.")
    if samples != report.samples:
        sys.exit(f"That should have been {report.samples}.")


def read_back(paths: list[str]) -> tuple[int, int]:
    """Samples, and bytes of their fields, as webdataset sees them."""
    import webdataset

    samples = size = 0
    for sample in webdataset.WebDataset(paths, shardshuffle=False):
        samples += 1
        size += sum(len(field) for field in sample.values() if isinstance(field, bytes))
    return samples, size


def rate(size: float, seconds: float) -> str:
    """Bytes and seconds as MB/s."""
    return f"{size / seconds / 1e6:.0f} MB/s"


def main() -> None:
    """Shard, or show what was sharded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ui", action="store_true", help="only serve the UI, on port 4200")
    if parser.parse_args().ui:
        with prefect_server(UI_PORT) as address:
            print(f"The demo's runs: {address}/runs (Ctrl-C ends it)", flush=True)
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                return
    with prefect_server(free_port()):
        shard()
        for handler in logging.getLogger("prefect.flow_runs").handlers:
            handler.flush()  # while the server is there that the run's lines are sent to
    print("\nSee the run, its report and its plot: make ui")
    print(f"See what a bucket alone tells: .venv/bin/millrace status {STORE.as_uri()}")


if __name__ == "__main__":
    main()
