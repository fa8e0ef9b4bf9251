"""Parts of all commands: errors, exit codes, options, questions, JSON, and templates."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from millrace import errors
from millrace.formatting import MAX_LENGTH, clean_text, format_count, format_size
from millrace.terminal import echo, echo_text, print_json, reserve_stdout

if TYPE_CHECKING:
    from millrace.deletion import DeletionResult
    from millrace.storage import ObjectFailure, StoreSpec

AnyFunction = Callable[..., Any]
_SHOWN_FAILURES = 20
_MAX_DURATION = timedelta(weeks=5000)  # as of the ages in settings: no time is before the year 1
_SETTINGS_SUFFIXES = {".yaml", ".yml", ".toml"}


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command.

    Attributes:
        data: Value that `--json` prints: records, dataclasses, and plain values.
        exit_code: Exit code of the process.
    """

    data: object
    exit_code: int = 0


class _DurationOption(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not in all versions
    """A duration with its unit, such as 90s or 24h."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        from pydantic import TypeAdapter, ValidationError

        from millrace.settings import Duration, parse_duration

        try:
            found = TypeAdapter[timedelta](Duration).validate_python(parse_duration(value))
        except ValidationError:
            self.fail(f"{value!r} is not a duration of ISO 8601: write PT20M, or 20m.", param, ctx)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        if found < timedelta(0):
            self.fail(f"{value!r} is negative: write a duration such as 20m.", param, ctx)
        if found > _MAX_DURATION:
            self.fail(f"{value!r} is too long a duration: write at most 5000w.", param, ctx)
        return found


class _SizeOption(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not in all versions
    """A number of bytes with its unit, such as 80GB or 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from millrace.settings import parse_size

        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class NounGroup(click.Group):
    """Group of commands. Its help keeps the lines of the examples, and whole sentences."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = _keep_lines(self.help)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each command, in as many lines as it needs."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, command.get_short_help_str(limit=1000))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _keep_lines(text: str | None) -> str | None:
    r"""Replace the two characters ``\b`` of a raw docstring by click's marker against wrapping."""
    return text and text.replace("\\b\n", "\b\n")


DURATION = _DurationOption()
SIZE = _SizeOption()


def handle_errors(command: Callable[..., int | None]) -> Callable[..., None]:
    """Run a command at a terminal: print an error of Millrace as a sentence, and exit.

    Exit codes: that of the command, 1 for a failure, 2 for wrong input, 130 for Ctrl-C, SIGTERM or
    SIGHUP.
    """

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        _end_on_signals()
        try:
            code = command(*args, **options)
            if sys.stdout is not None:  # it is None if it was closed before the start
                sys.stdout.flush()
        except errors.ConfigurationError as error:
            echo_text(f"millrace: {error}", err=True)
            sys.exit(2)
        except errors.MillraceError as error:
            echo_text(f"millrace: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            echo_text("\nStopped. Run it again: it goes on where it was.", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE or _can_print():
                raise
            echo(f"millrace: the output could not be written: {error.strerror}.", err=True)
            sys.exit(1)
        sys.exit(code or 0)

    run.__doc__ = _keep_lines(command.__doc__)
    return run


def print_result(command: Callable[..., CommandResult]) -> Callable[..., None]:
    """Run a command at a terminal, as `handle_errors` does, and add the option `--json`.

    With `--json`, standard output has the result as JSON, and standard error has all other text.
    """

    @wraps(command)
    def run(*args: Any, as_json: bool, **options: Any) -> int:
        with reserve_stdout(as_json):
            result = command(*args, **options)
        if as_json:
            print_json(result.data)
        return result.exit_code

    option = click.option(
        "--json", "as_json", is_flag=True, help="Print the result as JSON, for programs."
    )
    return option(handle_errors(run))


def take_location(default: str, metavar: str) -> Callable[[AnyFunction], AnyFunction]:
    """Return a decorator that adds a location to a command, which may be a settings file.

    A settings file is named as the argument, or with `--config FILE`.

    Args:
        default: Name of the file that is read by default.
        metavar: Kinds of locations, for the help, such as `[FILE|URL]`.
    """

    def decorate(command: AnyFunction) -> AnyFunction:
        @wraps(command)
        def run(*args: Any, location: str | None, config: str | None, **options: Any) -> Any:
            given = [one for one in (location, config) if one is not None]
            if len(given) > 1:
                raise click.UsageError("Name the settings file once: as FILE, or with --config.")
            if "" in given:
                raise click.UsageError("The name of the settings file is empty.")
            return command(*args, location=given[0] if given else default, **options)

        option = click.option(
            "--config",
            metavar="FILE",
            type=click.Path(),
            help=f"Settings file; the same as FILE.  [default: {default}]",
        )
        argument = click.argument("location", metavar=metavar, required=False, type=click.Path())
        return argument(option(run))

    return decorate


def take_settings_file(default: str) -> Callable[[AnyFunction], AnyFunction]:
    """Return a decorator that adds a settings file, as FILE or `--config FILE`, to a command.

    Args:
        default: Name of the file that is read by default.
    """

    def decorate(command: AnyFunction) -> AnyFunction:
        @take_location(default, "[FILE]")
        @wraps(command)
        def run(*args: Any, location: str, **options: Any) -> Any:
            return command(*args, settings=Path(location), **options)

        return run

    return decorate


def add_yes_option(command: AnyFunction) -> AnyFunction:
    """Add the option `--yes`, which skips the question of `confirm`."""
    return click.option("--yes", "-y", is_flag=True, help="Continue without asking.")(command)


def confirm(question: str, *, yes: bool) -> bool:
    """Ask a question on standard error; return whether the answer is yes.

    Args:
        question: Text of the question.
        yes: Whether the question is skipped, and the answer is yes.

    Raises:
        ConfigurationError: Standard input has no answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    if yes:
        return True
    try:
        if click.confirm(question, err=True):
            return True
    except click.Abort as error:
        raise_interrupt(error)
        raise errors.ConfigurationError(
            "Nothing was done, since the question has no answer. Add --yes to skip the question."
        ) from None
    echo("Nothing was done.", err=True)
    return False


def raise_interrupt(error: click.Abort) -> None:
    """Raise the interrupt by which a question was ended; do nothing at the end of the input.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    if isinstance(error.__context__, KeyboardInterrupt):
        raise KeyboardInterrupt from None


def write_template(path: Path, text: str) -> None:
    """Write a settings file to start from.

    Raises:
        ConfigurationError: A file of this name exists, or the file cannot be written, or its name
            is not that of a YAML file.
    """
    if path.suffix.lower() not in {".yaml", ".yml"}:
        raise errors.ConfigurationError(f"{path}: write a name that ends in .yaml.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise errors.ConfigurationError(
            f"{path} is already there. Move it away, or name another file."
        ) from None
    except OSError as error:
        raise errors.ConfigurationError(f"{path} cannot be written: {error.strerror}.") from None


def show_failures(failures: "Sequence[ObjectFailure]") -> None:
    """Show the first objects or uploads that a command failed for, with the reasons."""
    for failure in failures[:_SHOWN_FAILURES]:
        echo(f"{clean_text(failure.key)}: {clean_text(failure.reason, 2 * MAX_LENGTH)}", err=True)
    if len(failures) > _SHOWN_FAILURES:
        echo(f"and {len(failures) - _SHOWN_FAILURES} more", err=True)


def show_deletion(done: "DeletionResult", *, seconds: float | None = None) -> int:
    """Show the result of a deletion, and return the exit code."""
    show_failures(done.failures)
    if done.has_given_up:
        echo("Too many objects could not be deleted, so the others were not tried.", err=True)
    for reason, count in sorted(done.skipped.items()):
        echo(f"{count} stay: {reason}")
    deleted = f"{format_count(done.deleted_objects, 'object')}, {format_size(done.deleted_bytes)}"
    duration = f", in {seconds:.1f} s" if seconds is not None else ""
    missing = f"; {done.missing} were gone already" if done.missing else ""
    failed = f"; {len(done.failures)} could not be deleted" if done.failures else ""
    echo(f"Deleted {deleted}{duration}{missing}{failed}.")
    return 1 if done.failures else 0


def read_store(location: str) -> "StoreSpec":
    """Return the store of a URL, a folder, or a settings file."""
    from millrace.cleanup.rules import StoreOnlySettings
    from millrace.settings import load_settings
    from millrace.storage import StoreSpec

    if is_store_location(location):
        return StoreSpec(url=location)
    return load_settings(Path(location), StoreOnlySettings).store


def is_store_location(location: str) -> bool:
    """Decide whether a location is a URL or the path of a folder, not of a settings file."""
    path = Path(location)
    return "://" in location or path.is_dir() or path.suffix.lower() not in _SETTINGS_SUFFIXES


def _end_on_signals() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, unless the process ignores or handles them itself."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in (
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGHUP, _handle_closed_terminal),
    ):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


def _handle_closed_terminal(number: int, frame: object) -> NoReturn:
    """Raise `KeyboardInterrupt`, once: the shell and the kernel may both send SIGHUP."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _can_print() -> bool:
    """Print an empty line; return whether that succeeds. On failure, close standard output."""
    try:
        print(flush=True)
    except OSError:
        # Otherwise the interpreter would write the rest at its end, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
