"""Bytes that atheris finds, led by the branches that they reach: refused or right.

``python -m tests.soak.fuzz RUNS SEED``: gradients as they come, with some bytes in the place of
others, with a tensor's codes replaced under a right digest, and as files of torch's. A crash, a
hang of ten seconds, or more than a gigabyte of memory ends it with an error.
"""

import sys
from contextlib import suppress

import atheris

with atheris.instrument_imports(
    include=["millrace.gradients"], exclude=["millrace.gradients.codec.kernels"]
):
    from millrace.gradients import PayloadError, read_payload
from millrace.storage import head, open_store, put
from tests.unit.gradients.test_payload import EXPECTED, KEYS, SHAPES, as_torch, bodies, made

STORE = open_store("memory://fuzz")
PARTS, GOOD, TORCH = bodies(), made(), as_torch(made())


def once(data: bytes) -> None:
    """One object, written and read."""
    said = atheris.FuzzedDataProvider(data)
    kind, torch = said.ConsumeIntInRange(0, 2), said.ConsumeBool()
    if kind == 0:
        body = said.ConsumeBytes(len(data))
    elif kind == 1:
        origin = TORCH if torch else GOOD
        at = said.ConsumeIntInRange(0, len(origin))
        some = said.ConsumeBytes(64)
        body = origin[:at] + some + origin[at + len(some) :]
    else:
        name = said.PickValueInList(sorted(SHAPES))
        body = made(bodies={**PARTS, name: said.ConsumeBytes(len(data))})
        body = as_torch(body) if torch else body
    key = KEYS.gradient("7", 3)
    key = key.replace(".safetensors", ".pt") if torch else key
    put(STORE, key, body)
    with suppress(PayloadError):
        found = read_payload(STORE, head(STORE, key), EXPECTED)
        assert set(found.tensors) == set(SHAPES)


def main() -> None:
    runs, seed = sys.argv[1:]
    limits = ["-timeout=10", "-rss_limit_mb=1024", "-max_len=4096", "-verbosity=0"]
    atheris.Setup([sys.argv[0], f"-runs={runs}", f"-seed={seed}", *limits], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
