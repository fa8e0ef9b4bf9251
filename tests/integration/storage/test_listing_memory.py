"""A million keys are listed in the memory of a page."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

PAGES, PAGE = 1000, 1000
ENTRY = (
    "<Contents><Key>k/{key:09d}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"e"</ETag><Size>1</Size></Contents>'
)


class Endless(BaseHTTPRequestHandler):
    """ListObjectsV2 of a bucket with a million keys."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        page = int(query.get("continuation-token", ["0"])[0])
        entries = "".join(ENTRY.format(key=page * PAGE + i) for i in range(PAGE))
        more = page + 1 < PAGES
        token = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if more else ""
        body = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
            "</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


COUNT = """
import resource, sys
from pydantic import SecretStr
from millrace.storage import Credentials, list_objects, open_store
credentials = Credentials(access_key_id="a", secret_access_key=SecretStr("s"))
store = open_store("s3://bucket", endpoint=sys.argv[1], credentials=credentials)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in list_objects(store))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.soak
def test_a_million_keys_are_listed_in_bounded_memory(endpoint):
    counted = subprocess.run(
        [sys.executable, "-c", COUNT, endpoint], capture_output=True, text=True, check=True
    )
    count, grown_mib = map(int, counted.stdout.split())
    assert count == PAGES * PAGE
    assert grown_mib < 64
