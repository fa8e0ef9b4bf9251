"""The guide to rented machines, block by block."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.rentals import RentalSettings
from millrace.settings import load_settings
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until
from tests.support.guides import follow

HOUR = 3600.0


def test_every_block_of_the_guide_to_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vast: VastServer
) -> None:
    key = vast.reset(rate=100.0, strict=False, program=HOUR)
    store, folder = tmp_path / "store", tmp_path / "machines"
    store.mkdir()
    pair = (
        '{access_key_id: "${R2_DATASET_WRITE_ACCESS_KEY_ID}", '
        'secret_access_key: "${R2_DATASET_WRITE_SECRET_ACCESS_KEY}"}'
    )
    values = {
        f"r2://0123456789abcdef0123456789abcdef/dataset, credentials: {pair}": store.as_uri(),
        '"${VAST_API_KEY}"': f'"${{VAST_API_KEY}}", server_url: {vast.url}',
    }
    environment = {"VAST_API_KEY": key}
    with follow("machines", folder, monkeypatch, values=values, environment=environment) as guide:
        more = {"machines: 2": "machines: 2\ntimeouts: {poll_interval: 0.5s}"}
        path = guide.write("rent.yaml", more)
        assert load_settings(path, RentalSettings, environment).machines == 2
        detach = "millrace machine rent rent.yaml --detach"
        rename = "sed -i 's/^name: wiki/name: wiki-2/' rent.yaml"
        chosen = {detach: f"{detach}; {rename}; {detach}", "release wiki": "release wiki-2"}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(guide.run, chosen, answer="y")
            wait_until(lambda: running.done() or has_machines(vast, 2), "two machines that run")
            vast.advance(HOUR)  # the programs of `wiki` end; those of `wiki-2` run on
            shown = running.result()
    assert "RTX 4090" in shown
    assert shown.count("released (done: the program ended with exit code 0)") == 2
    assert "All is released. It has cost about $" in shown
    assert "All programs of wiki have ended: no machine is rented." in shown
    assert "wiki-2/1 runs at 127.0.0.1." in shown
    assert "Rented: 2 machines" in shown
    assert "Released: 2 machines of wiki-2" in shown
    assert "Released: 0 machines. Stay: 0." in shown
    assert vast.list_alive() == []


def has_machines(vast: VastServer, count: int) -> bool:
    """Decide whether so many machines run."""
    return sum(one["running"] is not None for one in vast.list_alive()) == count
