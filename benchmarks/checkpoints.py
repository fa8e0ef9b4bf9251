"""A checkpoint of 1 GiB up and down, verified: Millrace, its peers, and the floor.

Run it with ``python -m benchmarks.checkpoints [--quick] [--json FILE]``. To a folder, and to a Ceph
RGW on loopback; each run in a process of its own, whose state is made before the clock starts.

- ``millrace``: a `Saver`'s save to its result, and `load`: every byte hashed both ways.
- ``torch-dcp``: ``torch.distributed.checkpoint`` with its file system writer, in RGW through s3fs.
- ``boto3``: ``safetensors`` to a local file, and boto3's transfer manager; to a folder a copy.
- ``floor``: obstore alone, of the same files that Millrace made, ready in memory, as many at once.
  It hashes what it puts in RGW, as S3's signature demands, and what it gets it throws away.

``held`` is how long the trainer waits for `Saver.save`, from the second save on, against a plain
copy of the tensors (``floor``) into memory that is there already.

``race`` is the end of an epoch on shaped links (`benchmarks.rig`): two members that upload, each
over a link of 200 Mbit/s, against one (``alone``); ``floor`` is what the one's link takes.
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
from benchmarks.rig import DISK, GOODPUT, Host, Rig
from benchmarks.rig.store import REGION, Store
from millrace.testing.rgw import RGW

SYSTEMS = ("millrace", "torch-dcp", "boto3", "floor")
PLACES = ("folder", "RGW")
CAPACITY = 20 << 30  # of the server's disk
MIB = 1 << 20
AT_ONCE = 4
JOB = "job"
_MBIT = 200  # of a member's link


def state_of(size: int, seed: int) -> dict[str, Any]:
    """Make a model of tensors of 16 MiB, half of them bfloat16."""
    import torch

    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(size // (16 * MIB)):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        rows = 16 * MIB // 4096 // dtype.itemsize
        tensors[f"layers.{number}.weight"] = torch.randn(rows, 4096, generator=dice).to(dtype)
    return {"model": tensors}


def up(system: str, place: dict[str, Any], size: int, step: int) -> dict[str, float]:
    """Save a state; seconds until it is there."""
    state = state_of(size, step)
    run = PUT[system]
    ready = run(place, state, step)
    cpu, began = CpuTimer(), time.perf_counter()
    ready()
    return figures(time.perf_counter() - began, cpu, size)


def down(system: str, place: dict[str, Any], size: int, step: int) -> dict[str, float]:
    """Load what `up` saved, and see that it is that."""
    import torch

    ready = GET[system](place, step)
    cpu, began = CpuTimer(), time.perf_counter()
    found = ready()
    seconds = figures(time.perf_counter() - began, cpu, size)
    if found is not None:
        due = state_of(size, step)["model"]
        if not all(torch.equal(found[name], tensor) for name, tensor in due.items()):
            raise RuntimeError(f"{system} has loaded something else.")
    return seconds


def held(size: int) -> dict[str, float]:
    """Time how long a save holds its caller, and how long a plain copy takes; in turn."""
    import torch

    from millrace.checkpoints import Saver
    from millrace.storage import StoreSpec, open_store

    state = state_of(size, 0)
    tensors = state["model"]
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        store = open_store(StoreSpec(url=Path(name).as_uri()))
        ours: list[float] = []
        plain: list[float] = []
        with Saver(store, JOB) as saver:
            for step in range(5):
                began = time.perf_counter()
                for key, tensor in tensors.items():
                    copies[key].copy_(tensor)
                plain.append(time.perf_counter() - began)
                saving = saver.save(state, step=step)
                ours.append(saving.held.total_seconds())
                saving.result()
    return {"s": median(ours[1:]), "first_s": ours[0], "copy_s": median(plain[1:])}


def figures(seconds: float, cpu: CpuTimer, size: int) -> dict[str, float]:
    """Return the figures of one run."""
    return {"s": seconds, "MB/s": size / seconds / 1e6, "cpu_s": cpu.read()}


def _store(place: dict[str, Any]) -> Any:
    from millrace.storage import StoreSpec, open_store

    return open_store(StoreSpec.model_validate(place["spec"]))


def _millrace_put(place: dict[str, Any], state: dict[str, Any], step: int) -> Callable[[], object]:
    from millrace.checkpoints import Saver

    saver = Saver(_store(place), JOB)
    return lambda: saver.save(state, step=step).result()


def _millrace_get(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    from millrace.checkpoints import load

    store = _store(place)
    return lambda: load(store, JOB, step=step).state["model"]


def _files(place: dict[str, Any], step: int) -> list[str]:
    from millrace.keys.checkpoints import CheckpointKeys
    from millrace.storage import list_objects

    return [
        stat.key
        for stat in list_objects(_store(place), CheckpointKeys(JOB).make_parts_prefix(step))
    ]


def _floor_put(place: dict[str, Any], state: dict[str, Any], step: int) -> Callable[[], object]:
    import obstore

    from millrace.storage import read

    store = _store(place)
    bodies = {f"floor/{step}/{i}": read(store, key) for i, key in enumerate(_files(place, step))}

    def run() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            put = obstore.put
            list(
                pool.map(lambda key: put(store.raw, key, bodies[key], use_multipart=False), bodies)
            )

    return run


def _floor_get(place: dict[str, Any], step: int) -> Callable[[], None]:
    import obstore

    store, keys = _store(place), _files(place, step)

    def run() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda key: len(obstore.get(store.raw, key).bytes()), keys))

    return run


def _dcp(place: dict[str, Any], step: int, kind: str) -> Any:
    if place["name"] == "folder":
        from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

        folder = f"{place['folder']}/dcp-{step}"
        return (
            FileSystemReader(folder)
            if kind == "r"
            else FileSystemWriter(folder, thread_count=AT_ONCE)
        )
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec

    where, more = f"s3://{place['bucket']}/dcp-{step}", place["s3fs"]
    if kind == "r":
        return fsspec.FsspecReader(where, **more)
    return fsspec.FsspecWriter(where, thread_count=AT_ONCE, **more)


def _dcp_put(place: dict[str, Any], state: dict[str, Any], step: int) -> Callable[[], object]:
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = _dcp(place, step, "w")
    return lambda: save(state["model"], storage_writer=writer, no_dist=True)


def _dcp_get(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _dcp(place, step, "r")
    wanted = {
        name: torch.empty_like(tensor)
        for name, tensor in state_of(place["size"], step)["model"].items()
    }

    def run() -> dict[str, Any]:
        load(wanted, storage_reader=reader, no_dist=True)
        return wanted

    return run


def _boto3_put(place: dict[str, Any], state: dict[str, Any], step: int) -> Callable[[], object]:
    from safetensors.torch import save_file

    local = Path(place["scratch"]) / f"{step}.safetensors"
    send = _sender(place, step)

    def run() -> None:
        save_file(state["model"], local)
        send(local)
        local.unlink()

    return run


def _sender(place: dict[str, Any], step: int) -> Callable[[Path], object]:
    if place["name"] == "folder":
        return lambda local: shutil.copyfile(local, f"{place['folder']}/boto3-{step}")
    from millrace.storage import make_boto3_client

    client = make_boto3_client(_store(place))
    return lambda local: client.upload_file(str(local), place["bucket"], f"boto3-{step}")


def _boto3_get(place: dict[str, Any], step: int) -> Callable[[], dict[str, Any]]:
    from safetensors.torch import load_file

    from millrace.storage import make_boto3_client

    if place["name"] == "folder":
        return lambda: _read_in(load_file(f"{place['folder']}/boto3-{step}"))
    client, local = make_boto3_client(_store(place)), Path(place["scratch"]) / f"{step}.safetensors"

    def run() -> dict[str, Any]:
        client.download_file(place["bucket"], f"boto3-{step}", str(local))
        found = _read_in(load_file(local))
        local.unlink()
        return found

    return run


def _read_in(tensors: dict[str, Any]) -> dict[str, Any]:
    """Read all of a view that `load_file` gave, of which nothing has been read yet."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


PUT: dict[str, Callable[[dict[str, Any], dict[str, Any], int], Callable[[], object]]] = {
    "millrace": _millrace_put,
    "torch-dcp": _dcp_put,
    "boto3": _boto3_put,
    "floor": _floor_put,
}
GET: dict[str, Callable[[dict[str, Any], int], Callable[[], Any]]] = {
    "millrace": _millrace_get,
    "torch-dcp": _dcp_get,
    "boto3": _boto3_get,
    "floor": _floor_get,
}


def run_place(results: Results, place: dict[str, Any], *, repeats: int) -> None:
    """Let each system save and load, in turn. The floor needs the files that Millrace makes."""
    size = place["size"]
    for repeat in range(repeats):
        ours_first = sorted(rotate_systems(SYSTEMS, repeat), key=lambda system: system == "floor")
        for work, run, order in (
            ("up", up, ours_first),
            ("down", down, rotate_systems(SYSTEMS, repeat)),
        ):
            for system in order:
                found = measure_process(run, system, place, size, repeat)
                for metric, value in found.figures.items():
                    results.add(f"{work}, {place['name']}", system, metric, value)
                results.add(f"{work}, {place['name']}", system, "peak_rss_MB", found.peak_rss / 1e6)


_SAVE = """
import sys
from benchmarks.checkpoints import state_of
from millrace.checkpoints import Saver
from millrace.storage import open_store
with Saver(open_store(sys.argv[1]), "trained") as saver:
    saver.save(state_of(int(sys.argv[2]), 0), step=0).result()
"""


def race(members: int, size: int) -> float:
    """Let so many members end an epoch, on hosts of a rig; seconds until all know that it ended."""
    with (
        Rig.start(
            nodes=2, rate_mbit=_MBIT, store_mbit=5 * _MBIT, disk_bytes=3 * size + 256 * MIB
        ) as rig,
        Store.start(DISK / "objects", rig.store) as store,
    ):
        nodes = rig.nodes[:members]
        here = (DISK / "saved").as_uri()
        for host in nodes:
            host.run([sys.executable, "-c", _SAVE, here, str(size)], timeout=300)
        settings = {
            "store": {
                "url": f"s3://{store.bucket}",
                "endpoint": store.endpoint,
                "region": REGION,
                "credentials": {
                    "access_key_id": store.key.access_key_id,
                    "secret_access_key": store.key.secret_access_key,
                },
            },
            "job": JOB,
            "epoch": 0,
            "source": {"url": here, "job": "trained"},
            "members": members,
            "seed": 0,
        }
        running = [_member(host, settings) for host in nodes]
        said = [process.communicate(timeout=300)[0] for process in running]
        assert not any(process.returncode for process in running), said
        return max(float(re.findall(r"in ([0-9.]+) s", text)[0]) for text in said)


def _member(host: Host, settings: dict[str, Any]) -> "subprocess.Popen[str]":
    path = DISK / "cooldown.yaml"  # JSON is YAML
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
    """One member alone, and two, in turn."""
    for _ in range(repeats):
        results.add("race", "alone", "s", race(1, size))
        results.add("race", "millrace", "s", race(2, size))
    results.add("race", "floor", "s", size / (_MBIT * 1e6 / 8 * GOODPUT))


def report(results: Results) -> None:
    """Print the figures, and how many times the floor each takes."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for work in (f"{way}, {place}" for place in PLACES for way in ("up", "down")):
        for system in SYSTEMS:
            seconds = values[work, system, "s"]
            cells = [f"{values[work, system, metric].value:.2f}" for metric in ("s", "cpu_s")]
            cells += [
                f"{values[work, system, metric].value:.0f}" for metric in ("MB/s", "peak_rss_MB")
            ]
            ratio = results.compute_ratio(work, system, "floor", "s")
            lines.append([work, system, *cells, f"{ratio:.2f}x", str(seconds.n)])
    print_table(["work", "system", "s", "cpu_s", "MB/s", "peak_rss_MB", "/floor", "n"], lines)
    ours, first = values["held", "millrace", "s"], values["held", "millrace", "first_s"]
    ratio = results.compute_ratio("held", "millrace", "floor", "s")
    print(
        f"\nThe trainer is held for {ours.value:.3f} s, {ratio:.2f}x a plain copy; at the first "
        f"save, which takes its memory, for {first.value:.3f} s."
    )
    two, one, floor = (
        values["race", system, "s"].value for system in ("millrace", "alone", "floor")
    )
    print(
        f"Two members that race end an epoch in {two:.1f} s, one alone in {one:.1f} s: "
        f"{one / two:.2f}x as quick (the one's link takes {floor:.1f} s)."
    )


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("checkpoints", __doc__)
    results = Results("checkpoints")
    size, repeats = (128 * MIB, 1) if asked.quick else (1024 * MIB, 3)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        for below in ("store", "scratch"):
            (folder / below).mkdir()
        for _ in range(repeats):
            found = measure_process(held, size).figures
            results.add("held", "millrace", "s", found["s"])
            results.add("held", "millrace", "first_s", found["first_s"])
            results.add("held", "floor", "s", found["copy_s"])
        run_races(results, size=size // 2, repeats=repeats)
        place: dict[str, Any] = {"size": size, "scratch": str(folder / "scratch")}
        here = str(folder / "store")
        local = {"name": "folder", "folder": here, "spec": {"url": Path(here).as_uri()}}
        run_place(results, place | local, repeats=repeats)
        shutil.rmtree(here)
        with RGW.start(folder / "rgw", capacity=CAPACITY) as rgw:
            rgw.create_bucket("checkpoints")
            key = rgw.full
            pair = {
                "access_key_id": key.access_key_id,
                "secret_access_key": key.secret_access_key,
            }
            remote = {
                "name": "RGW",
                "bucket": "checkpoints",
                "spec": {
                    "url": "s3://checkpoints",
                    "endpoint": rgw.endpoint,
                    "credentials": pair,
                },
                "s3fs": {
                    "key": key.access_key_id,
                    "secret": key.secret_access_key,
                    "endpoint_url": rgw.endpoint,
                },
            }
            run_place(results, place | remote, repeats=repeats)
    report(results)
    results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
