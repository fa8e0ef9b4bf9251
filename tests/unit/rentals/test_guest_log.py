"""The log of a rented machine has each byte once, also after a lost answer of the store."""

import os
from pathlib import Path

import pytest

from millrace import errors
from millrace.rentals.guest import machine
from millrace.rentals.messages import LOG_CHUNK_BYTES, GuestConfig
from millrace.storage import Store, StoreSpec, create, list_objects, read


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
