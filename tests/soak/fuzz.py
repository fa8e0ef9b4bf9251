"""Fuzz the parsers of gradients and updates with atheris: ``python -m tests.soak.fuzz RUNS SEED``.

Each input must be refused or read correctly. Inputs are random bytes, valid files with some bytes
replaced, and valid files whose tensors have random bytes. Gradients are files of safetensors or of
torch. A crash, a run of ten seconds, or a gigabyte of memory ends the process with an error. So
does a parser that refuses its valid file, or all inputs of many. The last line has the counts.
"""

import sys
from collections import Counter
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
MANY = 1000  # inputs, of which each parser accepts some
INPUTS, ACCEPTED = Counter[str](), Counter[str]()  # by parser


def check_valid() -> None:
    """Check that each parser accepts its valid file."""
    assert UPDATE.check(UPDATE.body)
    for body, is_torch in ((VALID, False), (TORCH, True)):
        assert check_gradient_file(body, {}, is_torch=is_torch)


def count_inputs(runs: int) -> Any:
    """Return a function that checks an input, and prints the counts at the last one."""

    def check(data: bytes) -> None:
        check_input(data)
        if INPUTS.total() == runs:  # the fuzzer ends the process
            counts = (f"{name} {INPUTS[name]}, accepted {ACCEPTED[name]}" for name in INPUTS)
            print("fuzzed", *counts, sep="; ", flush=True)
            assert runs < MANY or all(ACCEPTED[name] for name in INPUTS)

    return check


def check_input(data: bytes) -> None:
    """Check an update or a gradient that is made from the bytes of the fuzzer."""
    provider = cast("Any", atheris).FuzzedDataProvider(data)
    if provider.ConsumeIntInRange(0, 2) == 0:
        name, is_accepted = "updates", check_update(provider, len(data))
    else:
        name, is_accepted = fuzz_gradient(provider, data)
    INPUTS[name] += 1
    ACCEPTED[name] += is_accepted


def check_update(provider: Any, size: int) -> bool:
    """Make an update, check that it is refused or merged correctly, and return whether it is."""
    kind = provider.ConsumeIntInRange(0, 2)
    if kind == 0:
        body = provider.ConsumeBytes(size)
    elif kind == 1:
        body = replace_bytes(UPDATE.body, provider)
    else:
        name = provider.PickValueInList(sorted(UPDATE.tensors))
        piece = replace_bytes(UPDATE.tensors[name], provider)
        body = encode_byte_tensors({**UPDATE.tensors, name: piece})
    return UPDATE.check(body)


def replace_bytes(original: bytes, provider: Any) -> bytes:
    """Return bytes of which up to 64 are replaced."""
    start = provider.ConsumeIntInRange(0, len(original))
    replacement = provider.ConsumeBytes(64)
    return original[:start] + replacement + original[start + len(replacement) :]


def fuzz_gradient(provider: Any, data: bytes) -> tuple[str, bool]:
    """Make a gradient and check it. Return the name of its parser, and whether it is accepted."""
    kind, is_torch = provider.ConsumeIntInRange(0, 2), provider.ConsumeBool()
    changeable: dict[str, object] = {"tokens": 0, "samples": ""}  # no digest covers them
    if kind == 0:
        body = provider.ConsumeBytes(len(data))
    elif kind == 1:
        body = replace_bytes(TORCH if is_torch else VALID, provider)
    else:  # a header for a random tensor
        name = provider.PickValueInList(sorted(SHAPES))
        body = made(bodies={**PARTS, name: provider.ConsumeBytes(len(data))})
        body = as_torch(body) if is_torch else body
        changeable |= {"body": HEADER.body, "digest": HEADER.digest}
    is_accepted = check_gradient_file(body, changeable, is_torch=is_torch)
    return "gradients of torch" if is_torch else "gradients of safetensors", is_accepted


def check_gradient_file(body: bytes, changeable: dict[str, object], *, is_torch: bool) -> bool:
    """Write a gradient, check that it is refused or read completely, and return whether it is.

    Args:
        body: Bytes of the gradient.
        changeable: Fields of the header that may differ, with their values in the valid file.
        is_torch: Whether it is a file of torch.
    """
    key = KEYS.make_gradient_key("7", 3)
    key = key.replace(".safetensors", ".pt") if is_torch else key
    put(STORE, key, body)
    try:
        found = read_gradient(STORE, head(STORE, key), EXPECTED)
    except GradientError:
        return False
    assert set(found.tensors) == set(SHAPES)
    assert found.header.model_copy(update=changeable) == HEADER
    return True


def main() -> None:
    runs, seed = sys.argv[1:]
    limits = ["-timeout=10", "-rss_limit_mb=1024", "-max_len=4096", "-verbosity=0"]
    check_valid()
    check = count_inputs(int(runs))
    atheris.Setup([sys.argv[0], f"-runs={runs}", f"-seed={seed}", *limits], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
