"""Transform that calls a Python function, of an installed module or of the bytes of a file."""

import importlib
import inspect
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from millrace.datasets.sample import Row, Sample, explain_result
from millrace.datasets.transforms.base import make_bad_row
from millrace.datasets.transforms.fields import (
    KEY,
    NO_TYPES,
    BadFieldError,
    decode_fields,
    encode_fields,
    make_part_key,
)
from millrace.digest import compute_digest, get_hex
from millrace.errors import ConfigurationError, WorkerError

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")  # differs between two runs
_MAX_REASON = 300  # characters


class _StderrPrinting:
    """Context in which `print` writes to stderr, as it does in a worker process.

    The result of a command goes to stdout. Several threads may be in the context: the first one
    replaces `sys.stdout`, and the last one restores it.
    """

    def __init__(self) -> None:
        self._lock, self._threads, self._stdout = threading.Lock(), 0, sys.stdout

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._stdout, sys.stdout = sys.stdout, sys.stderr
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                sys.stdout = self._stdout


_prints_to_stderr = _StderrPrinting()


class FunctionTransform:
    """Transform that calls a function with each sample.

    The function gets a dict of the fields and of ``__key__``, and returns a dict, an iterable of
    dicts, or None. Each dict is encoded before the next is taken, so a generator may yield one dict
    again and again. A function with a second required argument gets a `random.Random` whose seed is
    made of the dataset's seed, the number of the step and the sample's key. The results of one call
    are held in memory.

    Args:
        function: The function.
        name: Name of the function, for messages.
        seed: Seed of the dataset.
        types: Declared types of the fields that it takes and returns, by their names.
        step: Number of the transform in its chain.

    Raises:
        ConfigurationError: The function cannot be called with one or two arguments.
    """

    batch_rows = 1

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        seed: int | None,
        types: Mapping[str, str] = NO_TYPES,
        step: int = 0,
    ) -> None:
        self._function, self._name, self._types = function, name, types
        self._seed = f"{seed or 0}/{step}"
        self._takes_random = _count_arguments(function, name) > 1
        self._handlers = _signal_handlers.find_of_program()

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        """Return the samples that the function makes of each sample.

        Raises:
            WorkerError: The function ran out of memory.
        """
        return [self._apply_to_one(sample) for sample in samples]

    def _apply_to_one(self, sample: Sample) -> list[Row]:
        try:
            values = decode_fields(sample, self._types)
        except BadFieldError as error:
            return [make_bad_row(sample, str(error))]
        try:
            with _prints_to_stderr:
                return self._call(values, sample)
        except MemoryError as error:  # no fault of the sample
            raise WorkerError(
                f"{self._name} ran out of memory at the sample {sample.key}. Lower `workers`, or "
                "use a machine with more memory, and run it again: the run continues."
            ) from error
        except BaseException as error:  # also `sys.exit`, and a panic of Rust
            if is_interruption(error, self._handlers):
                raise
            return [make_bad_row(sample, f"{self._name} raised {format_last_line(error)}")]

    def _call(self, values: dict[str, Any], sample: Sample) -> list[Row]:
        """Call the function, and return what it makes of a sample.

        The result is read here, so that an error of a mapping is an error of the function.
        """
        arguments = [random.Random(f"{self._seed}/{sample.key}")] if self._takes_random else []
        made: Any = self._function(values, *arguments)
        if made is None:
            return []
        if isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable):
            return [self._make_row(sample, cast("object", made), None)]
        parts = cast("Iterable[Any]", made)
        return [self._make_row(sample, part, number) for number, part in enumerate(parts)]

    def _make_row(self, sample: Sample, made: object, number: int | None) -> Row:
        if not isinstance(made, Mapping):
            return make_bad_row(sample, explain_result(self._name, made, number))
        values = dict(cast("Mapping[Any, Any]", made).items())
        key = values.get(KEY, sample.key)
        if not isinstance(key, str) or key != sample.key:
            reason = f"{self._name} changed {KEY}, which is made by Millrace: leave it as it is"
            return make_bad_row(sample, reason)
        try:
            fields = encode_fields(values, self._types, sample.fields)
        except BadFieldError as error:
            return make_bad_row(sample, f"{self._name}: {error}")
        return Sample(make_part_key(sample.key, number), fields, sample.next_cursor)


def _count_arguments(function: Callable[..., Any], name: str) -> int:
    """Return how many arguments a function requires, one or two."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C without a signature
        return 1
    positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    count = sum(p.default is p.empty for p in positional)
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if count > 2 or keywords or not (positional or takes_any):
        raise ConfigurationError(
            f"{name} cannot be called with a sample: write `def {name}(sample):` or "
            f"`def {name}(sample, rng):`, with defaults for other arguments."
        )
    return count


class _SignalHandlers:
    """The code of signal handlers, by which an exception of a handler is known.

    A function may have a time limit of its own: a handler that raises in the function, which may
    stay installed afterwards. Such an exception is one of the function. The handlers of the program
    that calls functions are those that no function has installed.
    """

    def __init__(self) -> None:
        self._of_functions: set[CodeType] = set()

    def find_of_program(self) -> set[CodeType]:
        """Return the code of the installed handlers that no function has installed."""
        return _find_handlers() - self._of_functions

    @contextmanager
    def watch(self) -> Generator[None]:
        """Note the handlers that code within the block installs."""
        before = _find_handlers()
        try:
            yield
        finally:
            self._of_functions |= _find_handlers() - before


_signal_handlers = _SignalHandlers()
watch_functions = _signal_handlers.watch


def _find_handlers() -> set[CodeType]:
    """Return the code of the signal handlers that are installed now."""
    handlers = (getattr(signal.getsignal(n), "__code__", None) for n in signal.valid_signals())
    return {code for code in handlers if code is not None}


def is_interruption(error: BaseException, handlers: set[CodeType] | None = None) -> bool:
    """Decide whether an exception is not of the code that it ended: of Ctrl-C, or of a handler.

    Args:
        error: The exception.
        handlers: Code of the signal handlers that were installed before the code ran; by default
            of those that are installed now and that no function has installed.
    """
    handlers = _signal_handlers.find_of_program() if handlers is None else handlers
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or any(f.f_code in handlers for f, _ in frames)


def format_last_line(error: BaseException) -> str:
    """Return the last line of a traceback, the same on every machine."""
    text = "".join(traceback.format_exception_only(type(error), error))
    line = " ".join(
        _ADDRESS.sub("0x...", text).encode("utf-8", "backslashreplace").decode().split()
    )
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."


def load_from_bytes(code: bytes, name: str, where: str) -> Callable[..., Any]:
    """Run the code of a file as a module, once in a process, and return a function of it.

    Args:
        code: Bytes of the file.
        name: Name of the function.
        where: Name of the file, for messages.

    Raises:
        ConfigurationError: The code cannot be run, or has no such function.
    """
    module_name = f"millrace_transform_{get_hex(compute_digest(code))[:16]}"
    module = sys.modules.get(module_name)
    if module is None:
        module = ModuleType(module_name)
        sys.modules[module_name] = module  # dataclasses and pickle look their module up
        handlers = _signal_handlers.find_of_program()
        try:
            with _prints_to_stderr, watch_functions():
                exec(compile(code, f"<{where}>", "exec"), module.__dict__)  # noqa: S102 - the user's
        except BaseException as error:
            del sys.modules[module_name]
            if is_interruption(error, handlers):
                raise
            raise ConfigurationError(
                f"{where} cannot be run: {format_last_line(error)}. Modules beside the file are "
                "not sent with it: install them as a package."
            ) from error
    return _get_function(module, name, where)


def load_installed(module_name: str, name: str) -> tuple[Callable[..., Any], str]:
    """Import a function of an installed module; return it with the digest of its code.

    The digest is that of the files of the module and of the module that defines the function. For
    the modules that the module imports, see `digest_package_imports`.

    Raises:
        ConfigurationError: The module cannot be imported, or has no such function or no file.
    """
    handlers = _signal_handlers.find_of_program()
    try:
        with _prints_to_stderr, watch_functions():
            module = importlib.import_module(module_name)
    except BaseException as error:
        if is_interruption(error, handlers):
            raise
        raise ConfigurationError(
            f"The module {module_name} cannot be imported: {format_last_line(error)}. Install it "
            "on every machine that works on the dataset, or write ./file.py:function."
        ) from error
    function = _get_function(module, name, module_name)
    home = sys.modules.get(getattr(function, "__module__", None) or module_name, module)
    files = dict.fromkeys(getattr(each, "__file__", None) for each in (module, home))
    try:
        code = [Path(file).read_bytes() for file in files if file]
    except OSError as error:
        raise ConfigurationError(
            f"The code of {module_name} cannot be read, so its changes would not be seen: {error}. "
            "Write the function into a file, and name ./file.py:function."
        ) from error
    if not code:
        raise ConfigurationError(
            f"{module_name} has no file, so its changes would not be seen: write the function into "
            "a file, and name ./file.py:function."
        )
    return function, compute_digest(b"\0".join(code))


def _get_function(module: ModuleType, name: str, where: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{where} has no function {name}: correct `function`.")
    return function
