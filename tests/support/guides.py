"""A guide of docs/: every code block is executed, those of each language in their order."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.testing.process import REPOSITORY
from tests.support.shell import Shell, prepend_path

GUIDES = REPOSITORY / "docs/guides"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.

    Attributes:
        language: Language after the opening fence.
        text: Text between the fences.
        line: Number of the line of the opening fence.
    """

    language: str
    text: str
    line: int


def read_blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page, from top to bottom."""
    text = page.read_text()
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 1)
        for found in _BLOCK.finditer(text)
    ]


@dataclass
class Guide:
    """A reader of a guide, who has executed some of its blocks.

    Attributes:
        page: File of the guide.
        folder: Folder in which the commands run.
        values: Text of the guide that a reader replaces, to the reader's own. All blocks get them.
        environment: Variables that a reader sets before.
    """

    page: Path
    folder: Path
    values: Mapping[str, str]
    environment: dict[str, str]
    _left: list[Block] = field(default_factory=list[Block])
    _replaced: set[str] = field(default_factory=set[str])
    _shells: list[Shell] = field(default_factory=list[Shell])
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self, values: Mapping[str, str] | None = None, *, answer: str = "") -> str:
        """Run the next block of commands, and return what they print.

        Args:
            values: Text of this block that a reader replaces.
            answer: Answer to each question that the commands ask.
        """
        return self._run(_remove_prompts(self._take("console", values)), answer)

    def type(
        self, command: str, values: Mapping[str, str] | None = None, *, answer: str = ""
    ) -> str:
        """Run a command that the guide names elsewhere than in a block of commands."""
        assert command in self.page.read_text(), command
        return self._run(self._replace(command, values), answer)

    def serve(self, *machines: Mapping[str, str]) -> list[Shell]:
        """Start the next block of commands on several machines, which serve until the end."""
        scripts = self._take_each("console", machines)
        return [self._start(_remove_prompts(script)) for script in scripts]

    def execute(self, names: dict[str, Any], values: Mapping[str, str] | None = None) -> None:
        """Execute the next block of Python, where ``names`` are defined, and define its own."""
        self.execute_each([names], [values or {}])[0]()

    def execute_each(
        self, names: Sequence[dict[str, Any]], values: Sequence[Mapping[str, str]]
    ) -> "list[_Code]":
        """Return the next block of Python, once for each of several processes or threads."""
        line = self._find_next("python").line
        return [
            _Code(self.page, line, text, own)
            for text, own in zip(self._take_each("python", values), names, strict=True)
        ]

    def read_python(self, values: Mapping[str, str] | None = None) -> str:
        """Return the text of the next block of Python, for a script that contains it."""
        return self._take("python", values)

    def write(
        self, name: str, values: Mapping[str, str] | None = None, *, update: bool = False
    ) -> Path:
        """Write the next block of settings into a file.

        Args:
            name: Name of the file. The block or the text before it names the file, too.
            values: Text of this block that a reader replaces.
            update: The block replaces only some settings of the file.
        """
        line = self._find_next("yaml").line
        before = self.page.read_text().splitlines()[max(0, line - 6) : line + 1]
        assert name in " ".join(before), f"line {line} does not name {name}"
        path, text = self.folder / name, self._take("yaml", values)
        if update:
            settings = yaml.safe_load(path.read_text()) | yaml.safe_load(text)
            text = yaml.safe_dump(settings)
        path.write_text(text)
        return path

    def check(self) -> None:
        """Check that no block was left out, and that each value was in its place."""
        left = [f"{self.page.name}:{block.line}" for block in self._left]
        assert left == [], "these blocks were not executed"
        assert set(self.values) == self._replaced, "these are not in the guide"

    def stop(self) -> None:
        """End all that serves."""
        for shell in self._shells:
            shell.end()

    def _run(self, script: str, answer: str) -> str:
        answers = f"exec < <(yes {answer})\n" if answer else ""
        shell = self._start(answers + script)
        assert shell.wait() == 0, f"{script}\n{shell.output}"
        return shell.output

    def _start(self, script: str) -> Shell:
        log = self.folder.parent / f"{self.page.stem}-{next(self._numbers)}.log"
        shell = Shell(script, self.folder, self.environment, log)
        self._shells.append(shell)
        return shell

    def _take(self, language: str, values: Mapping[str, str] | None) -> str:
        return self._take_each(language, [values or {}])[0]

    def _take_each(self, language: str, each: Sequence[Mapping[str, str]]) -> list[str]:
        block = self._find_next(language)
        self._left.remove(block)
        return [self._replace(block.text, values) for values in each]

    def _find_next(self, language: str) -> Block:
        found = [block for block in self._left if block.language == language]
        assert found, f"{self.page.name} has no further block of {language}"
        return found[0]

    def _replace(self, text: str, values: Mapping[str, str] | None) -> str:
        for written, meant in (values or {}).items():
            assert written in text, f"{written!r} is not in:\n{text}"
            text = text.replace(written, meant)
        for written, meant in self.values.items():
            if written in text:
                self._replaced.add(written)
                text = text.replace(written, meant)
        return text


@dataclass(frozen=True, slots=True)
class _Code:
    """A block of Python, and the names that it finds."""

    page: Path
    line: int
    text: str
    names: dict[str, Any]

    def __call__(self) -> None:
        """Execute it; an error has the lines of the page."""
        code = compile("\n" * self.line + self.text, str(self.page), "exec")
        exec(code, self.names)


@contextmanager
def follow(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    values: Mapping[str, str],
    environment: Mapping[str, str],
) -> Iterator[Guide]:
    """Follow a guide with this process's environment of Python; at its end, no block is left.

    Args:
        name: Name of the guide.
        folder: Folder for the commands. It is made.
        monkeypatch: Sets the variables for the blocks of Python.
        values: Text that a reader replaces.
        environment: Variables that a reader sets.
    """
    folder.mkdir()
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    page = GUIDES / f"{name}.md"
    variables = {"PATH": prepend_path(), "PYTHONPATH": str(REPOSITORY), **environment}
    guide = Guide(page, folder, values, variables, read_blocks(page))
    try:
        yield guide
    finally:
        guide.stop()
    guide.check()


def _remove_prompts(commands: str) -> str:
    lines = commands.splitlines()
    assert all(line.startswith("$ ") for line in lines), commands
    return "\n".join(line.removeprefix("$ ") for line in lines)
