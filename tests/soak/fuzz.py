"""Fuzz the parsers of gradients and updates with atheris: ``python -m tests.soak.fuzz RUNS SEED``.

Each input must be refused or read correctly. Inputs are random bytes, valid files with some bytes
replaced, and valid files whose tensors have random bytes. Gradients are files of safetensors or of
torch. A crash, a run of ten seconds, or a gigabyte of memory ends the process with an error.
"""

import sys
from contextlib import suppress
from typing import Any, cast

import atheris

with cast("Any", atheris).instrument_imports(
    include=["millrace.gradients"], exclude=["millrace.gradients.codec.kernels"]
):
    from millrace.gradients import GradientError, check_gradient, read_gradient
    from millrace.gradients.codec.byte_tensors import encode_byte_tensors
from millrace.storage import head, open_store, put
from tests.unit.gradients.test_gradient_object import EXPECTED, KEYS, SHAPES, as_torch, bodies, made
from tests.unit.gradients.test_updates import Fuzzed

STORE = open_store("memory://fuzz")
PARTS, VALID, TORCH = bodies(), made(), as_torch(made())
HEADER = check_gradient(VALID, EXPECTED).header
UPDATE = Fuzzed()


def check_input(data: bytes) -> None:
    """Check an update or a gradient that is made from the bytes of the fuzzer."""
    provider = cast("Any", atheris).FuzzedDataProvider(data)
    if provider.ConsumeIntInRange(0, 2) == 0:
        check_update(provider, len(data))
    else:
        fuzz_gradient(provider, data)


def check_update(provider: Any, size: int) -> None:
    """Make an update, and check that it is refused or merged correctly."""
    kind = provider.ConsumeIntInRange(0, 2)
    if kind == 0:
        body = provider.ConsumeBytes(size)
    elif kind == 1:
        body = replace_bytes(UPDATE.body, provider)
    else:
        name = provider.PickValueInList(sorted(UPDATE.tensors))
        piece = replace_bytes(UPDATE.tensors[name], provider)
        body = encode_byte_tensors({**UPDATE.tensors, name: piece})
    UPDATE.check(body)


def replace_bytes(original: bytes, provider: Any) -> bytes:
    """Return bytes of which up to 64 are replaced."""
    start = provider.ConsumeIntInRange(0, len(original))
    replacement = provider.ConsumeBytes(64)
    return original[:start] + replacement + original[start + len(replacement) :]


def fuzz_gradient(provider: Any, data: bytes) -> None:
    """Write a gradient, and check that it is refused or read completely."""
    kind, is_torch = provider.ConsumeIntInRange(0, 2), provider.ConsumeBool()
    if kind == 0:
        body = provider.ConsumeBytes(len(data))
    elif kind == 1:
        body = replace_bytes(TORCH if is_torch else VALID, provider)
    else:
        name = provider.PickValueInList(sorted(SHAPES))
        body = made(bodies={**PARTS, name: provider.ConsumeBytes(len(data))})
        body = as_torch(body) if is_torch else body
    key = KEYS.make_gradient_key("7", 3)
    key = key.replace(".safetensors", ".pt") if is_torch else key
    put(STORE, key, body)
    with suppress(GradientError):
        found = read_gradient(STORE, head(STORE, key), EXPECTED)
        assert set(found.tensors) == set(SHAPES)
        changeable: dict[str, object] = {"tokens": 0, "samples": ""}  # no digest covers them
        if kind == 2:  # a header for the random tensor
            changeable |= {"body": HEADER.body, "digest": HEADER.digest}
        assert found.header.model_copy(update=changeable) == HEADER


def main() -> None:
    runs, seed = sys.argv[1:]
    limits = ["-timeout=10", "-rss_limit_mb=1024", "-max_len=4096", "-verbosity=0"]
    atheris.Setup([sys.argv[0], f"-runs={runs}", f"-seed={seed}", *limits], check_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
