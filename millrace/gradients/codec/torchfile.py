"""Reader for files of ``torch.save``: text and tensors of bytes in a dict, read as data.

Nothing of the file is executed, and torch's own loader is not asked: also the one for weights only
believes a file how long its storages are. The pickle is followed opcode by opcode, and only those
that such a dict needs are known.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

_END, _END_SIGNATURE = struct.Struct("<10xHI4xH"), b"PK\x05\x06"
_LARGER = struct.Struct("<32xQQ8x")  # as of files of more than four gigabytes
_LOCATOR_SIZE, _LOCATOR_SIGNATURE = 20, b"PK\x06\x07"
_ENTRY_MOST = 1024  # bytes of an entry in it, its name and what torch pads it with
_OTHERS = 16  # files that are no tensors
_REBUILD, _BYTES, _ORDERED = (
    "torch._utils _rebuild_tensor_v2",
    "torch ByteStorage",
    "collections OrderedDict",
)


class FormatError(Exception):
    """A file that is none of torch's, or holds something else."""


class _WrongError(ValueError):
    """The same, in words of ours."""


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
        body: The file.
        most: How many tensors it has at most.
        head: Bytes of its pickle at most.

    Raises:
        FormatError: It is no such file.
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
    ) as error:  # whatever it can do to who reads zip files and pickles; their words are its
        raise FormatError("it is no archive with a pickle in it, or a broken one") from error


def _check_directory(body: bytes, most: int) -> None:
    """Bound what reading the archive's directory takes.

    It says at the end of the file how long it is, perhaps in a larger record before that too, and
    Python's reader takes that one then.
    """
    end = len(body) - _END.size
    if end < 0 or not body.startswith(_END_SIGNATURE, end):
        raise FormatError("it is no archive, or a broken one")
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
        raise _WrongError("it holds something else than texts and tensors of bytes")
    if len({piece.storage.key for piece in pieces.values()}) != len(pieces):
        raise _WrongError("two tensors are of one storage")
    if sum(piece.storage.size for piece in pieces.values()) > whole:  # as files that overlap
        raise _WrongError("its storages are longer than it is")
    tensors: dict[str, bytes] = {}
    for name, piece in pieces.items():
        size = piece.storage.size
        content = _read_stored(archive, f"{root}/data/{piece.storage.key}", size)
        if len(content) != size:
            raise _WrongError("a storage is shorter than it says")
        tensors[name] = content[piece.begin : piece.begin + piece.size]
    return texts, tensors


def _read_stored(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > most:
        raise _WrongError("a file in it is longer than it can be")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _WrongError("a file in it is compressed")
    return archive.read(info)


def _run_pickle(pickle: bytes) -> dict[str, Any]:
    """Return the dict that a pickle makes."""
    machine = _Machine()
    for opcode, arg, _ in pickletools.genops(pickle):
        if opcode.name == "STOP":
            break
        if opcode.name not in _DONE:
            raise _WrongError(f"it does something that no tensor needs ({opcode.name})")
        _DONE[opcode.name](machine, arg)
    (found,) = machine.stack
    if not isinstance(found, dict):
        raise _WrongError("it is no dict")
    return cast("dict[str, Any]", found)


class _Machine:
    """As much of what follows a pickle as such a dict needs."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        if isinstance(value, str):
            value.encode()  # a pickle can hold what no other format can
        self.stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def keep(self, place: int) -> None:
        self._memo[place] = self.stack[-1]

    def fetch(self, place: int) -> None:
        self.stack.append(self._memo[place])

    def tuple_of(self, count: int | None) -> None:
        """Make a tuple of the last values, or of those since the mark."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        self.stack[at:] = [tuple(self.stack[at:])]

    def storage(self) -> None:
        self.stack.append(_storage(self.stack.pop()))

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(_make_tensor(self.stack.pop(), args))

    def set_items(self, count: int | None) -> None:
        """Put the last two values, or those since the mark, into the dict before them."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        into, pairs = self.stack[at - 1], self.stack[at:]
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(name, str):  # which anything else could take for ever to hash
                raise _WrongError("a name is no text")
            into[name] = value
        del self.stack[at:]


_Do = Callable[[_Machine, Any], None]

_DONE: dict[str, _Do] = {
    "PROTO": lambda machine, _: None,
    "MARK": lambda machine, _: machine.mark(),
    "GLOBAL": lambda machine, name: machine.push(_Name(name)),
    "BINPERSID": lambda machine, _: machine.storage(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "NEWFALSE": lambda machine, _: machine.push(value=False),
    "NEWTRUE": lambda machine, _: machine.push(value=True),
    "NONE": lambda machine, _: machine.push(None),
    "TUPLE": lambda machine, _: machine.tuple_of(None),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "SETITEM": lambda machine, _: machine.set_items(2),
    "SETITEMS": lambda machine, _: machine.set_items(None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.keep),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.fetch),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), _Machine.push
    ),
}
"""What is done at each opcode; at any other the file is refused."""


def _storage(said: Any) -> _Storage:
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
        return None  # hooks, of which there are none
    if what != _Name(_REBUILD):
        raise _WrongError("it makes something else than tensors")
    storage, begin, size, stride, *_ = args
    if not isinstance(storage, _Storage) or len(size) != 1 or len(stride) != 1:
        raise _WrongError("a tensor is not a row of bytes")
    (length,), (step,) = size, stride
    if any(type(one) is not int for one in (begin, length, step)) or step != 1:
        raise _WrongError("a tensor is not a row of bytes")
    if not 0 <= begin <= begin + length <= storage.size:
        raise _WrongError("a tensor is not within its storage")
    return _StorageSlice(storage, begin, length)
