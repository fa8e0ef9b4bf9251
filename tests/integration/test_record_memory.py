"""The memory that reading the largest records takes, in a process with a limit."""

import re
import subprocess
import sys

import pytest

_DECODE = """
import resource
import sys
from millrace import errors
from millrace.records import decode_record
from millrace.schemas.checkpoint import Checkpoint

HEAD = (
    b'{"kind":"checkpoint","version":3,"nonce":"x","record":{"job":"j","step":1,"run":"",'
    b'"saved":"2026-01-01T00:00:00Z","root":"r","parts":[],'
)
POSITION = b'"notes":{},"tensors":{},"position":{"a":[', b"0]}}}"
TENSOR = b'"notes":{},"position":{},"tensors":{"a":{"dtype":"F32",'
begin, item, end = {
    "lists": (POSITION[0], b"[],", POSITION[1]),
    "fewer lists": (POSITION[0], b"[]%s," % (b" " * 31), POSITION[1]),
    "dicts": (POSITION[0], b'{"a":0},', POSITION[1]),
    "fewer dicts": (POSITION[0], b'{"a":0}%s,' % (b" " * 26), POSITION[1]),
    "numbers": (POSITION[0], b"999,", POSITION[1]),
    "texts": (POSITION[0], b'"ab",', POSITION[1]),
    "fewer texts": (POSITION[0], b'"ab"%s,' % (b" " * 8), POSITION[1]),
    "nesting": (b'"notes":{},"tensors":{},"position":', b"[", b""),
    "notes": (b'"position":{},"tensors":{},"notes":{"a":[', b"{},", b"0]}}}"),
    "tensors": (b'"notes":{},"position":{},"tensors":{', b'"%07x":0%s,', b'"":0}}}'),
    "fields": (b'"notes":{},"position":{},"tensors":{},', b'"%07x":0%s,', b'"":0}}'),
    "boxes": (TENSOR + b'"shape":[],"chunks":[', b"{}%s," % (b" " * 31), b"0]}}}}"),
    "shape": (TENSOR + b'"chunks":[],"shape":[', b'"ab"%s,' % (b" " * 8), b"0]}}}}"),
}[sys.argv[1]]
room = Checkpoint.record_bytes - len(HEAD + begin + end)
if item.startswith(b'"%'):
    items = b"".join(item % (number, b" " * 9) for number in range(room // 21))
else:
    items = item * (room // len(item))
body = b"".join((HEAD, begin, items, b" " * (room - len(items)), end))
assert len(body) == Checkpoint.record_bytes
del items
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[2]),) * 2)
try:
    decode_record("there", Checkpoint, body)
    print("accepted")
except errors.CorruptError as error:
    print(error)
"""

_TOO_MANY, _WRONG = "there has [0-9,]+ (JSON objects|colons|commas)", "there is not a record"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("lists", _TOO_MANY),
        ("fewer lists", "accepted"),
        pytest.param("dicts", _TOO_MANY, marks=pytest.mark.soak),
        pytest.param("fewer dicts", "accepted", marks=pytest.mark.soak),
        pytest.param("numbers", _TOO_MANY, marks=pytest.mark.soak),
        pytest.param("texts", _TOO_MANY, marks=pytest.mark.soak),
        pytest.param("fewer texts", "accepted", marks=pytest.mark.soak),
        ("nesting", _TOO_MANY),
        pytest.param("notes", _TOO_MANY, marks=pytest.mark.soak),
        ("tensors", _WRONG),
        pytest.param("fields", _WRONG, marks=pytest.mark.soak),
        pytest.param("boxes", _WRONG, marks=pytest.mark.soak),
        pytest.param("shape", _WRONG, marks=pytest.mark.soak),
    ],
)
def test_no_metadata_of_64_mib_takes_more_than_1_5_gib_when_it_is_read(content, what):
    command = [sys.executable, "-c", _DECODE, content, str(3 << 29)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.match(what, done.stdout)
