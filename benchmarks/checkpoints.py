"""Save and load a checkpoint of 1 GiB: Millrace, its peers and a lower bound.

Run it with ``python -m benchmarks.checkpoints [--quick] [--json FILE]``. The stores are a folder,
and a Ceph RGW on the loopback interface. Each run is a new process, which creates its state before
the measurement. ``up`` is a save, and ``down`` is a load.

- ``millrace``: the first `Saver.save` of a process until its result, and `load`. Both hash every
  byte.
- ``in_place``: the same save with ``in_place=True``, which copies a few files at once.
- ``load_into``: `load_into` of Millrace, into tensors that the process has written before.
- ``torch-dcp``: ``torch.distributed.checkpoint`` with its file system writer, in RGW through s3fs.
- ``boto3``: ``safetensors`` to a local file and boto3's transfer manager; straight into a folder.
- ``floor``: obstore with the files of Millrace, from memory and with the same concurrency. Puts in
  RGW are hashed for S3's signature. The content of gets is discarded.

``held`` is the time that `Saver.save` blocks the training, from the second save on. Its ``floor``
is a copy of the tensors into memory that is already allocated. ``MB/s`` is the rate of these later
saves into a folder, until they are committed.

``race`` is the end of an epoch on links with a limited rate (`benchmarks.rig`): two members that
upload together, each with a link of 200 Mbit/s, and one member (``alone``). Its ``floor`` is the
time of the link of one member.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import (
    CpuTimer,
    Results,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from benchmarks.rig import DISK, GOODPUT, Rig, RigHost
from benchmarks.rig.store import RigStore
from benchmarks.server_cores import start_store

SAVING_SYSTEMS = ("millrace", "in_place", "torch-dcp", "boto3", "floor")
LOADING_SYSTEMS = ("millrace", "load_into", "torch-dcp", "boto3", "floor")
PLACES = ("folder", "RGW")
CAPACITY = 20 << 30  # size of the server's disk
MIB = 1 << 20
CONCURRENCY = 4
JOB = "job"
_MBIT = 200  # rate of a member's link


def make_state(size: int, seed: int) -> dict[str, Any]:
    """Return a state with random tensors of 16 MiB each, half of them bfloat16."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(size // (16 * MIB)):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        rows = 16 * MIB // 4096 // dtype.itemsize
        tensors[f"layers.{number}.weight"] = torch.randn(rows, 4096, generator=generator).to(dtype)
    return {"model": tensors}


def measure_save(system: str, place: dict[str, Any], size: int, step: int) -> dict[str, float]:
    """Save a state with a system, and return the figures."""
    state = make_state(size, step)
    prepare = SAVES[system]
    save = prepare(place, state, step)
    cpu, began = CpuTimer(), time.perf_counter()
    save()
    return make_figures(time.perf_counter() - began, cpu, size)


def measure_load(system: str, place: dict[str, Any], size: int, step: int) -> dict[str, float]:
    """Load the state that `measure_save` saved, check its values, and return the figures."""
    import torch

    load = LOADS[system](place, step)
    cpu, began = CpuTimer(), time.perf_counter()
    loaded = load()
    figures = make_figures(time.perf_counter() - began, cpu, size)
    if loaded is not None:
        expected = make_state(size, step)["model"]
        if not all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()):
            raise RuntimeError(f"{system} has loaded other values than it saved.")
    return figures


def measure_blocking(size: int) -> dict[str, float]:
    """Measure saves into a folder and how long they block, and a copy, alternately."""
    import torch

    from millrace.checkpoints import Saver
    from millrace.storage import StoreSpec, open_store

    state = make_state(size, 0)
    tensors = state["model"]
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        store = open_store(StoreSpec(url=Path(name).as_uri()))
        blocked: list[float] = []
        copied: list[float] = []
        saved: list[float] = []
        with Saver(store, JOB) as saver:
            for step in range(5):
                began = time.perf_counter()
                for key, tensor in tensors.items():
                    copies[key].copy_(tensor)
                copied.append(time.perf_counter() - began)
                began = time.perf_counter()
                saving = saver.save(state, step=step)
                blocked.append(saving.held.total_seconds())
                saving.result()
                saved.append(time.perf_counter() - began)
    return {
        "s": median(blocked[1:]),
        "first_s": blocked[0],
        "copy_s": median(copied[1:]),
        "MB/s": size / median(saved[1:]) / 1e6,
    }


def make_figures(seconds: float, cpu: CpuTimer, size: int) -> dict[str, float]:
    """Return the figures of one run by metric."""
    return {"s": seconds, "MB/s": size / seconds / 1e6, "cpu_s": cpu.read()}


def _open_store(place: dict[str, Any]) -> Any:
    """Open the store of a place."""
    from millrace.storage import StoreSpec, open_store

    return open_store(StoreSpec.model_validate(place["spec"]))


def _prepare_millrace_save(
    place: dict[str, Any], state: dict[str, Any], step: int, *, in_place: bool = False
) -> Callable[[], object]:
    """Return a function that saves a state with Millrace."""
    from millrace.checkpoints import Saver

    saver = Saver(_open_store(place), f"{JOB}-in-place" if in_place else JOB)
    return lambda: saver.save(state, step=step, in_place=in_place).result()


def _prepare_millrace_load(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    """Return a function that loads a state with Millrace."""
    from millrace.checkpoints import load

    store = _open_store(place)
    return lambda: load(store, JOB, step=step).state["model"]


def _prepare_load_into(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    """Return a function that loads a state with Millrace into tensors that exist."""
    from millrace.checkpoints import load_into

    state = make_state(place["size"], step + 1)

    def run() -> dict[str, Any]:
        load_into(state, _open_store(place), JOB, step=step)
        return state["model"]

    return run


def _list_files(place: dict[str, Any], step: int) -> list[str]:
    """Return the keys of the files that Millrace saved."""
    from millrace.keys.checkpoints import CheckpointKeys
    from millrace.storage import list_objects

    return [
        stat.key
        for stat in list_objects(_open_store(place), CheckpointKeys(JOB).make_parts_prefix(step))
    ]


def _prepare_floor_save(
    place: dict[str, Any], state: dict[str, Any], step: int
) -> Callable[[], object]:
    """Return a function that puts the bytes of Millrace's files with obstore."""
    import obstore

    from millrace.storage import read

    store = _open_store(place)
    bodies = {
        f"floor/{step}/{i}": read(store, key) for i, key in enumerate(_list_files(place, step))
    }

    def run() -> None:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            put = obstore.put
            list(
                pool.map(lambda key: put(store.raw, key, bodies[key], use_multipart=False), bodies)
            )

    return run


def _prepare_floor_load(place: dict[str, Any], step: int) -> Callable[[], None]:
    """Return a function that gets the bytes of Millrace's files with obstore."""
    import obstore

    store, keys = _open_store(place), _list_files(place, step)

    def run() -> None:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(lambda key: len(obstore.get(store.raw, key).bytes()), keys))

    return run


def _make_dcp_storage(place: dict[str, Any], step: int, kind: str) -> Any:
    """Return a reader (``r``) or a writer (``w``) of ``torch.distributed.checkpoint``."""
    if place["name"] == "folder":
        from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

        folder = f"{place['folder']}/dcp-{step}"
        return (
            FileSystemReader(folder)
            if kind == "r"
            else FileSystemWriter(folder, thread_count=CONCURRENCY)
        )
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec

    url, options = f"s3://{place['bucket']}/dcp-{step}", place["s3fs"]
    if kind == "r":
        return fsspec.FsspecReader(url, **options)
    return fsspec.FsspecWriter(url, thread_count=CONCURRENCY, **options)


def _prepare_dcp_save(
    place: dict[str, Any], state: dict[str, Any], step: int
) -> Callable[[], object]:
    """Return a function that saves a state with ``torch.distributed.checkpoint``."""
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = _make_dcp_storage(place, step, "w")
    return lambda: save(state["model"], storage_writer=writer, no_dist=True)


def _prepare_dcp_load(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    """Return a function that loads a state with ``torch.distributed.checkpoint``."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _make_dcp_storage(place, step, "r")
    tensors = {
        name: torch.empty_like(tensor)
        for name, tensor in make_state(place["size"], step)["model"].items()
    }

    def run() -> dict[str, Any]:
        load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return run


def _prepare_boto3_save(
    place: dict[str, Any], state: dict[str, Any], step: int
) -> Callable[[], object]:
    """Return a function that saves a state with safetensors and boto3."""
    from safetensors.torch import save_file

    from millrace.storage import make_boto3_client

    if place["name"] == "folder":  # without boto3
        return lambda: save_file(state["model"], f"{place['folder']}/boto3-{step}")
    local = Path(place["scratch"]) / f"{step}.safetensors"
    client = make_boto3_client(_open_store(place))

    def run() -> None:
        save_file(state["model"], local)
        client.upload_file(str(local), place["bucket"], f"boto3-{step}")
        local.unlink()

    return run


def _prepare_boto3_load(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    """Return a function that loads a state with boto3 and safetensors."""
    from safetensors.torch import load_file

    from millrace.storage import make_boto3_client

    if place["name"] == "folder":
        return lambda: _copy_tensors(load_file(f"{place['folder']}/boto3-{step}"))
    client, local = (
        make_boto3_client(_open_store(place)),
        Path(place["scratch"]) / f"{step}.safetensors",
    )

    def run() -> dict[str, Any]:
        client.download_file(place["bucket"], f"boto3-{step}", str(local))
        tensors = _copy_tensors(load_file(local))
        local.unlink()
        return tensors

    return run


def _copy_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors of `load_file`, which are read from the file when they are first used."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


SAVES: dict[str, Callable[[dict[str, Any], dict[str, Any], int], Callable[[], object]]] = {
    "millrace": _prepare_millrace_save,
    "in_place": partial(_prepare_millrace_save, in_place=True),
    "torch-dcp": _prepare_dcp_save,
    "boto3": _prepare_boto3_save,
    "floor": _prepare_floor_save,
}
LOADS: dict[str, Callable[[dict[str, Any], int], Callable[[], Any]]] = {
    "millrace": _prepare_millrace_load,
    "load_into": _prepare_load_into,
    "torch-dcp": _prepare_dcp_load,
    "boto3": _prepare_boto3_load,
    "floor": _prepare_floor_load,
}


def run_place(results: Results, place: dict[str, Any], *, repeats: int) -> None:
    """Save and load with each system, alternately."""
    size = place["size"]
    for repeat in range(repeats):
        # The lower bound needs the files of Millrace, so it saves last.
        saves = sorted(rotate_systems(SAVING_SYSTEMS, repeat), key=lambda system: system == "floor")
        for work, run, order in (
            ("up", measure_save, saves),
            ("down", measure_load, rotate_systems(LOADING_SYSTEMS, repeat)),
        ):
            for system in order:
                measurement = measure_process(run, system, place, size, repeat)
                for metric, value in measurement.figures.items():
                    results.add(f"{work}, {place['name']}", system, metric, value)
                peak = measurement.peak_rss / 1e6
                results.add(f"{work}, {place['name']}", system, "peak_rss_MB", peak)


_SAVE = """
import sys
from benchmarks.checkpoints import make_state
from millrace.checkpoints import Saver
from millrace.storage import open_store
with Saver(open_store(sys.argv[1]), "trained") as saver:
    saver.save(make_state(int(sys.argv[2]), 0), step=0).result()
"""


def measure_race(members: int, size: int) -> float:
    """End an epoch with so many members on a rig, and return the time of the last in seconds."""
    with (
        Rig.start(
            nodes=2, rate_mbit=_MBIT, store_mbit=5 * _MBIT, disk_bytes=3 * size + 256 * MIB
        ) as rig,
        RigStore.start(DISK / "objects", rig.store) as store,
    ):
        nodes = rig.nodes[:members]
        source = (DISK / "saved").as_uri()
        for host in nodes:
            host.run([sys.executable, "-c", _SAVE, source, str(size)], timeout=300)
        settings = {
            "store": store.make_settings(),
            "job": JOB,
            "epoch": 0,
            "source": {"url": source, "job": "trained"},
            "members": members,
            "seed": 0,
        }
        running = [_start_member(host, settings) for host in nodes]
        outputs = [process.communicate(timeout=300)[0] for process in running]
        assert not any(process.returncode for process in running), outputs
        return max(float(re.findall(r"in ([0-9.]+) s", text)[0]) for text in outputs)


def _start_member(host: RigHost, settings: dict[str, Any]) -> "subprocess.Popen[str]":
    """Start a member of the race on a host."""
    path = DISK / "cooldown.yaml"  # YAML includes JSON
    host.call(path.write_text, json.dumps(settings))
    command = [
        sys.executable,
        "-c",
        "from millrace.cli import main; main()",
        "checkpoint",
        "cooldown",
    ]
    return host.popen(
        [*command, str(path), "--member", host.name], stdout=subprocess.PIPE, text=True
    )


def run_races(results: Results, *, size: int, repeats: int) -> None:
    """Measure a race of one member and one of two members, alternately."""
    for _ in range(repeats):
        results.add("race", "alone", "s", measure_race(1, size))
        results.add("race", "millrace", "s", measure_race(2, size))
    results.add("race", "floor", "s", size / (_MBIT * 1e6 / 8 * GOODPUT))


def report(results: Results) -> None:
    """Print the figures, and their ratios to the lower bounds."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for work in (f"{name}, {place}" for place in PLACES for name in ("up", "down")):
        for system in LOADING_SYSTEMS if work.startswith("down") else SAVING_SYSTEMS:
            seconds = values[work, system, "s"]
            cells = [f"{values[work, system, metric].value:.2f}" for metric in ("s", "cpu_s")]
            cells += [
                f"{values[work, system, metric].value:.0f}" for metric in ("MB/s", "peak_rss_MB")
            ]
            ratio = results.compute_ratio(work, system, "floor", "s")
            lines.append([work, system, *cells, f"{ratio:.2f}x", str(seconds.n)])
    print_table(["work", "system", "s", "cpu_s", "MB/s", "peak_rss_MB", "/floor", "n"], lines)
    later, first = values["held", "millrace", "s"], values["held", "millrace", "first_s"]
    ratio = results.compute_ratio("held", "millrace", "floor", "s")
    print(
        f"\nA save blocks the training for {later.value:.3f} s, {ratio:.2f}x a copy. The first "
        f"save, which allocates its memory, blocks it for {first.value:.3f} s. Later saves into a "
        f"folder run at {values['held', 'millrace', 'MB/s'].value:.0f} MB/s."
    )
    two, one, floor = (
        values["race", system, "s"].value for system in ("millrace", "alone", "floor")
    )
    print(
        f"Two members end an epoch in {two:.1f} s, one member in {one:.1f} s: "
        f"{one / two:.2f}x as fast (the link of one member takes {floor:.1f} s)."
    )


def main() -> int:
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("checkpoints", __doc__)
    results = Results("checkpoints")
    size, repeats = (128 * MIB, 1) if options.quick else (1024 * MIB, 3)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        for subfolder in ("store", "scratch"):
            (folder / subfolder).mkdir()
        for _ in range(repeats):
            figures = measure_process(measure_blocking, size).figures
            results.add("held", "millrace", "s", figures["s"])
            results.add("held", "millrace", "first_s", figures["first_s"])
            results.add("held", "millrace", "MB/s", figures["MB/s"])
            results.add("held", "floor", "s", figures["copy_s"])
        run_races(results, size=size // 2, repeats=repeats)
        place: dict[str, Any] = {"size": size, "scratch": str(folder / "scratch")}
        path = str(folder / "store")
        local = {"name": "folder", "folder": path, "spec": {"url": Path(path).as_uri()}}
        run_place(results, place | local, repeats=repeats)
        shutil.rmtree(path)
        with start_store(folder / "rgw", capacity=CAPACITY) as rgw:
            rgw.create_bucket("checkpoints")
            key = rgw.full
            credentials = {
                "access_key_id": key.access_key_id,
                "secret_access_key": key.secret_access_key,
            }
            remote = {
                "name": "RGW",
                "bucket": "checkpoints",
                "spec": {
                    "url": "s3://checkpoints",
                    "endpoint": rgw.endpoint,
                    "credentials": credentials,
                },
                "s3fs": {
                    "key": key.access_key_id,
                    "secret": key.secret_access_key,
                    "endpoint_url": rgw.endpoint,
                },
            }
            run_place(results, place | remote, repeats=repeats)
    report(results)
    results.save(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
