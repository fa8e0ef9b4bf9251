"""Reader for files of ``torch.save`` that hold a dict of texts and tensors of bytes.

No code of the file is executed. torch's loader is not used, since even with ``weights_only`` it
trusts the lengths of storages in the file. This reader follows the pickle opcode by opcode, and
refuses opcodes that such a dict does not need.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

_END, _END_SIGNATURE = struct.Struct("<10xHI4xH"), b"PK\x05\x06"
_LARGER = struct.Struct("<32xQQ8x")  # record of archives above 4 GiB
_LOCATOR_SIZE, _LOCATOR_SIGNATURE = 20, b"PK\x06\x07"
_ENTRY_MOST = 1024  # bytes of an entry: its header, its name and torch's padding
_OTHERS = 16  # files besides the tensors
_REBUILD, _BYTES, _ORDERED = (
    "torch._utils _rebuild_tensor_v2",
    "torch ByteStorage",
    "collections OrderedDict",
)


class FormatError(Exception):
    """A file is not one of ``torch.save``, or has other content."""


class _WrongError(ValueError):
    """A file has a fault that this module found. Its text has no words of the file."""


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class _StorageSlice:
    storage: _Storage
    begin: int
    size: int


def read_texts_and_tensors(
    body: bytes, *, most: int, head: int
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the texts and the tensors of a dict that ``torch.save`` wrote.

    Args:
        body: Bytes of the file.
        most: Largest number of tensors.
        head: Largest size of the pickle in bytes.

    Raises:
        FormatError: The file has another format or content.
    """
    _check_directory(body, most)
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return _read(archive, most, head, len(body))
    except _WrongError as error:
        raise FormatError(str(error)) from error
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
    ) as error:  # any error of the zip and pickle readers; their text may come from the file
        raise FormatError("it is not an archive with a pickle, or it is damaged") from error


def _check_directory(body: bytes, most: int) -> None:
    """Check the size of the archive's directory before Python's reader parses it.

    The size is in a record at the end of the file. A larger record before it may replace it, and
    Python's reader uses that record then.

    Raises:
        _WrongError: The directory is missing, or has too many entries.
    """
    end = len(body) - _END.size
    if end < 0 or not body.startswith(_END_SIGNATURE, end):
        raise FormatError("it is not an archive, or it is damaged")
    entries, size, comment = _END.unpack_from(body, end)
    larger = end - _LOCATOR_SIZE - _LARGER.size
    if larger >= 0 and body.startswith(_LOCATOR_SIGNATURE, end - _LOCATOR_SIZE):
        entries, size = _LARGER.unpack_from(body, larger)
    if comment or entries > most + _OTHERS or size > entries * _ENTRY_MOST:
        raise FormatError("it has more files in it than tensors")


def _read(
    archive: zipfile.ZipFile, most: int, head: int, whole: int
) -> tuple[dict[str, str], dict[str, bytes]]:
    root = archive.namelist()[0].partition("/")[0]
    found = _run_pickle(_read_stored(archive, f"{root}/data.pkl", head))
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    pieces = {name: value for name, value in found.items() if isinstance(value, _StorageSlice)}
    if len(texts) + len(pieces) != len(found) or len(pieces) > most:
        raise _WrongError("it has values other than texts and tensors of bytes")
    if len({piece.storage.key for piece in pieces.values()}) != len(pieces):
        raise _WrongError("two tensors share a storage")
    if sum(piece.storage.size for piece in pieces.values()) > whole:  # if files overlap
        raise _WrongError("its storages are longer than the file")
    tensors: dict[str, bytes] = {}
    for name, piece in pieces.items():
        size = piece.storage.size
        content = _read_stored(archive, f"{root}/data/{piece.storage.key}", size)
        if len(content) != size:
            raise _WrongError("a storage is shorter than its declared length")
        tensors[name] = content[piece.begin : piece.begin + piece.size]
    return texts, tensors


def _read_stored(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > most:
        raise _WrongError("a file in it is too long")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _WrongError("a file in it is compressed")
    return archive.read(info)


def _run_pickle(pickle: bytes) -> dict[str, Any]:
    """Return the dict that a pickle builds."""
    machine = _Machine()
    for opcode, arg, _ in pickletools.genops(pickle):
        if opcode.name == "STOP":
            break
        if opcode.name not in _DONE:
            raise _WrongError(f"it has an opcode that no tensor needs ({opcode.name})")
        _DONE[opcode.name](machine, arg)
    (found,) = machine.stack
    if not isinstance(found, dict):
        raise _WrongError("it is not a dict")
    return cast("dict[str, Any]", found)


class _Machine:
    """Interpreter for the opcodes that a dict of texts and tensors needs."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        if isinstance(value, str):
            value.encode()  # refuses lone surrogates, which a pickle can hold
        self.stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def keep(self, slot: int) -> None:
        self._memo[slot] = self.stack[-1]

    def fetch(self, slot: int) -> None:
        self.stack.append(self._memo[slot])

    def make_tuple(self, count: int | None) -> None:
        """Replace the last values, or those since the mark, by a tuple of them."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        self.stack[at:] = [tuple(self.stack[at:])]

    def load_storage(self) -> None:
        self.stack.append(_parse_storage(self.stack.pop()))

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(_make_tensor(self.stack.pop(), args))

    def set_items(self, count: int | None) -> None:
        """Add pairs to the dict below them: the last two values, or those since the mark."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        into, pairs = self.stack[at - 1], self.stack[at:]
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(name, str):  # the hash of another value could take very long
                raise _WrongError("a name is not a text")
            into[name] = value
        del self.stack[at:]


_Do = Callable[[_Machine, Any], None]

_DONE: dict[str, _Do] = {
    "PROTO": lambda machine, _: None,
    "MARK": lambda machine, _: machine.mark(),
    "GLOBAL": lambda machine, name: machine.push(_Name(name)),
    "BINPERSID": lambda machine, _: machine.load_storage(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "NEWFALSE": lambda machine, _: machine.push(value=False),
    "NEWTRUE": lambda machine, _: machine.push(value=True),
    "NONE": lambda machine, _: machine.push(None),
    "TUPLE": lambda machine, _: machine.make_tuple(None),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "SETITEM": lambda machine, _: machine.set_items(2),
    "SETITEMS": lambda machine, _: machine.set_items(None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.keep),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.fetch),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), _Machine.push
    ),
}
"""Action for each known opcode. Any other opcode is refused."""


def _parse_storage(said: Any) -> _Storage:
    kind, of, key, _, size = said
    if (
        (kind, of) != ("storage", _Name(_BYTES))
        or not isinstance(key, str)
        or type(size) is not int
    ):
        raise _WrongError("a storage is not of bytes")
    return _Storage(key, size)


def _make_tensor(what: Any, args: Any) -> Any:
    if what == _Name(_ORDERED) and args == ():
        return None  # hooks: always an empty dict
    if what != _Name(_REBUILD):
        raise _WrongError("it builds values other than tensors")
    storage, begin, size, stride, *_ = args
    if not isinstance(storage, _Storage) or len(size) != 1 or len(stride) != 1:
        raise _WrongError("a tensor is not a vector of bytes")
    (length,), (step,) = size, stride
    if any(type(one) is not int for one in (begin, length, step)) or step != 1:
        raise _WrongError("a tensor is not a vector of bytes")
    if not 0 <= begin <= begin + length <= storage.size:
        raise _WrongError("a tensor exceeds its storage")
    return _StorageSlice(storage, begin, length)
