"""Reports of a rented machine are complete, also after outages and lost answers of the store."""

import math
import os
from pathlib import Path

import pytest

from millrace import errors
from millrace.rentals.guest import machine
from millrace.rentals.messages import (
    LOG_CHUNK_BYTES,
    GuestConfig,
    GuestFiles,
    MachineHeartbeat,
    ProgramExit,
)
from millrace.storage import Store, StoreSpec, create, list_objects, open_store, put, read


class LossyStore:
    """Functions that upload a chunk, and lose answers or whole requests."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults

    def create(self, store: Store, key: str, data: bytes) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault != "request":
            create(store, key, data)
        if fault:
            raise errors.UnavailableError(f"the {fault} was lost")


@pytest.mark.parametrize("faults", [["answer"], ["request"], ["request", "answer"], ["answer"] * 3])
@pytest.mark.parametrize("size", [100, LOG_CHUNK_BYTES - 1])
def test_lines_after_a_lost_answer_are_uploaded(
    faults: list[str], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "store").as_uri()
    config = GuestConfig(store=StoreSpec(url=url), prefix="m/", command=("true",))
    guest = machine.GuestProgram(config, tmp_path)
    store = LossyStore(list(faults))
    monkeypatch.setattr(machine, "create", store.create)
    lines = [b"A" * size, b"Traceback: the reason\n", b"C" * (2 * LOG_CHUNK_BYTES), b"end\n"]
    with (tmp_path / "output").open("w+b") as output:
        for line in lines:
            output.write(line)
            output.flush()
            guest._upload_log_chunk(output)
        while guest._upload_log_chunk(output):
            pass
        assert os.fstat(output.fileno()).st_size == sum(map(len, lines))
    assert store.faults == []
    stored = sorted(one.key for one in list_objects(guest._store, "m/log/"))
    sizes = [len(read(guest._store, key)) for key in stored]
    assert max(sizes) <= LOG_CHUNK_BYTES
    assert b"".join(read(guest._store, key) for key in stored) == b"".join(lines)


def test_an_exit_is_reported_after_an_outage_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = StoreSpec(url=(tmp_path / "store").as_uri())
    store, log = open_store(spec), LossyStore(["request"] * 2)
    put(store, "m/files.json", GuestFiles(texts={}).model_dump_json().encode())
    tries: list[str] = []

    def put_after_outage(store: Store, key: str, data: bytes) -> None:
        tries.append(key.removeprefix("m/"))
        if tries.count("ended.json") < 3 and tries[-1] == "ended.json":
            raise errors.UnavailableError("the store does not answer")
        put(store, key, data)

    monkeypatch.setattr(machine, "create", log.create)
    monkeypatch.setattr(machine, "put", put_after_outage)
    config = GuestConfig(store=spec, prefix="m/", command=("no-program",), heartbeat_interval=0.001)
    assert machine.GuestProgram(config, tmp_path).run() == 127
    assert ProgramExit.model_validate_json(read(store, "m/ended.json")).code == 127
    assert MachineHeartbeat.model_validate_json(read(store, "m/beat.json")).number == 3
    assert tries == ["beat.json", *["ended.json", "beat.json"] * 2, "ended.json"]
    (chunk,) = list_objects(store, "m/log/")
    assert read(store, chunk.key).startswith(b"no-program: ")


def make_guest(folder: Path, **more: float) -> machine.GuestProgram:
    spec = StoreSpec(url=(folder / "store").as_uri())
    config = GuestConfig(store=spec, prefix="m/", command=("true",), **more)
    return machine.GuestProgram(config, folder)


@pytest.mark.parametrize(("due", "counts"), [(math.inf, [20, 25, 25]), (0.0, [1, 2, 3])])
def test_a_heartbeat_brings_many_chunks_of_the_log_until_the_next_is_due(
    tmp_path: Path, due: float, counts: list[int]
) -> None:
    guest = make_guest(tmp_path)
    with (tmp_path / "output").open("w+b") as output:
        output.write(b"x" * (24 * LOG_CHUNK_BYTES + 100))
        output.flush()
        for number, count in enumerate(counts, start=1):
            guest._send_heartbeat(output, due)
            heartbeat = MachineHeartbeat.model_validate_json(read(guest._store, "m/beat.json"))
            assert heartbeat.number == number
            assert len(list(list_objects(guest._store, "m/log/"))) == count


def test_heartbeats_go_on_while_the_rest_of_a_long_log_is_uploaded(tmp_path: Path) -> None:
    guest = make_guest(tmp_path, heartbeat_interval=1e-9)  # each is due after one chunk
    with (tmp_path / "output").open("w+b") as output:
        output.write(b"x" * (5 * LOG_CHUNK_BYTES))
        output.flush()
        guest._report_exit(ProgramExit(code=0), output)
    assert len(list(list_objects(guest._store, "m/log/"))) == 5
    assert MachineHeartbeat.model_validate_json(read(guest._store, "m/beat.json")).number == 2
    assert ProgramExit.model_validate_json(read(guest._store, "m/ended.json")).code == 0
