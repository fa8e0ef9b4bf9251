"""Bytes that atheris finds, led by the branches that they reach: refused or right.

``python -m tests.soak.fuzz RUNS SEED``: gradients as they come, with some bytes in the place of
others, with a tensor's codes replaced under a right digest, and as files of torch's; and updates of
a chain, likewise. A crash, a hang of ten seconds, or more than a gigabyte of memory ends it with an
error.
"""

import sys
from contextlib import suppress

import atheris

with atheris.instrument_imports(
    include=["millrace.gradients"], exclude=["millrace.gradients.codec.kernels"]
):
    from millrace.gradients import PayloadError, read_payload
    from millrace.gradients.codec.byte_tensors import encode_byte_tensors
from millrace.storage import head, open_store, put
from tests.unit.gradients.test_payload import EXPECTED, KEYS, SHAPES, as_torch, bodies, made
from tests.unit.gradients.test_updates import Fuzzed

STORE = open_store("memory://fuzz")
PARTS, GOOD, TORCH = bodies(), made(), as_torch(made())
UPDATE = Fuzzed()


def once(data: bytes) -> None:
    """One object, written and read."""
    said = atheris.FuzzedDataProvider(data)
    if said.ConsumeIntInRange(0, 2) == 0:
        once_update(said, len(data))
    else:
        once_gradient(said, data)


def once_update(said: atheris.FuzzedDataProvider, size: int) -> None:
    """One update, parsed and merged."""
    kind = said.ConsumeIntInRange(0, 2)
    if kind == 0:
        body = said.ConsumeBytes(size)
    elif kind == 1:
        body = replace_some(UPDATE.body, said)
    else:
        name = said.PickValueInList(sorted(UPDATE.tensors))
        piece = replace_some(UPDATE.tensors[name], said)
        body = encode_byte_tensors({**UPDATE.tensors, name: piece})
    UPDATE.check(body)


def replace_some(origin: bytes, said: atheris.FuzzedDataProvider) -> bytes:
    """Return bytes with others in the place of some of them."""
    at = said.ConsumeIntInRange(0, len(origin))
    some = said.ConsumeBytes(64)
    return origin[:at] + some + origin[at + len(some) :]


def once_gradient(said: atheris.FuzzedDataProvider, data: bytes) -> None:
    """One gradient, written and read."""
    kind, torch = said.ConsumeIntInRange(0, 2), said.ConsumeBool()
    if kind == 0:
        body = said.ConsumeBytes(len(data))
    elif kind == 1:
        body = replace_some(TORCH if torch else GOOD, said)
    else:
        name = said.PickValueInList(sorted(SHAPES))
        body = made(bodies={**PARTS, name: said.ConsumeBytes(len(data))})
        body = as_torch(body) if torch else body
    key = KEYS.make_gradient_key("7", 3)
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
