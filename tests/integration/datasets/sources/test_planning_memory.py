"""A source of many files is planned in at most 300 bytes of memory a file."""

import subprocess
import sys
import threading

import pytest

from benchmarks.endless import Endless

PLAN = """
import resource, sys
from millrace.datasets import PipelineSettings, plan_dataset

def plan(endpoint):
    store = {
        "url": "s3://bucket", "endpoint": endpoint,
        "credentials": {"access_key_id": "a", "secret_access_key": "s"},
    }
    made = plan_dataset(PipelineSettings.model_validate({
        "dataset": "d", "source": {"kind": "files", **store}, "store": store,
    }))
    return made.source.files, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

print(*plan(sys.argv[1]), *plan(sys.argv[2]))
"""


@pytest.mark.soak
def test_a_file_takes_at_most_300_bytes_while_it_is_planned():
    servers = [Endless(objects) for objects in (20_000, 120_000)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoints = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    planned = subprocess.run(
        [sys.executable, "-c", PLAN, *endpoints], capture_output=True, text=True, check=True
    )
    for server in servers:
        server.shutdown()
        server.server_close()
    few, before, many, after = map(int, planned.stdout.split())
    assert (few, many) == (20_000, 120_000)
    assert (after - before) / (many - few) <= 300
