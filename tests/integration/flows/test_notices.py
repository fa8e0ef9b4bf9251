"""Somebody hears of it when housekeeping fails."""

import json
import queue
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prefect.blocks.webhook import Webhook

from flows.clean_bucket import clean_bucket
from flows.cooldown import run_cooldown
from tests.prefect_server import PATIENCE, PrefectServer

SECRET = "of-the-webhook"


class Told(HTTPServer):
    """A webhook: what it was told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.said: queue.Queue[str] = queue.Queue()
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Told

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.said.put(json.loads(body)["text"])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webhook(deployed: PrefectServer, prefect_api: PrefectServer) -> Iterator[Told]:
    server = Told()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    with deployed.make_client() as client:
        for automation in client.read_automations_by_name("millrace-notices"):
            client.delete_automation(automation.id)
    Webhook.delete("millrace-notices")


def test_a_webhook_is_told_of_a_cleaning_that_failed(
    deployed: PrefectServer, prefect_api: PrefectServer, webhook: Told, tmp_path: Path
) -> None:
    environment = {"MILLRACE_NOTIFY_URL": webhook.url}
    for outcome in ("would be created", "created", "unchanged"):
        dry = ["--dry-run"] if outcome == "would be created" else []
        made = deployed.run("millrace", "setup", "--without-buckets", *dry, environment=environment)
        assert made.returncode == 0, made.stderr
        assert f"automation millrace-notices: {outcome}" in made.stdout
        assert SECRET not in made.stdout

    fine = tmp_path / "fine"
    fine.mkdir()
    for place in (fine, tmp_path / 'a "place" that is not there'):
        prefect_api.call(clean_bucket, bucket=place.as_uri(), related_buckets=[])
    told = [webhook.said.get(timeout=PATIENCE)]
    while not webhook.said.empty():  # Prefect may tell of one event twice
        told.append(webhook.said.get())
    for text in told:
        assert text.startswith("Millrace: clean-bucket (")
        assert "has failed." in text
        assert "not there" in text or "not%20there" in text
        assert "/runs/flow-run/" in text

    later = timedelta(seconds=1)
    prefect_api.call(run_cooldown, bucket=fine.as_uri(), job="job", epoch=0, timeout=later)
    text = webhook.said.get(timeout=PATIENCE)
    while text.startswith("Millrace: clean-bucket ("):  # told twice, and late
        text = webhook.said.get(timeout=PATIENCE)
    assert text.startswith("Millrace: cooldown (")
    assert "Epoch 0 of job has not ended" in text
