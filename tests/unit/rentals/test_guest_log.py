"""Reports of a rented machine are complete, also after outages and lost answers of the store."""

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
