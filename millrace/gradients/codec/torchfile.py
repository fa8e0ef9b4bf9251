"""Reader for files of ``torch.save`` that hold a dict of plain values and tensors.

No code of the file is executed. torch's loader is not used, since even with ``weights_only`` it
trusts the lengths of storages in the file. This reader follows the pickle opcode by opcode, and
refuses opcodes that such a dict does not need.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt

_END, _END_SIGNATURE = struct.Struct("<10xHI4xH"), b"PK\x05\x06"
_LARGER = struct.Struct("<32xQQ8x")  # record of archives above 4 GiB
_LOCATOR_SIZE, _LOCATOR_SIGNATURE = 20, b"PK\x06\x07"
_ENTRY_MOST = 1024  # bytes of an entry: its header, its name and torch's padding
_OTHERS = 16  # files besides the tensors
_DIMENSIONS, _LENGTH_MOST = 8, 1 << 48  # largest number of dimensions, and of values in one
_REBUILD, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_DTYPES_OF_STORAGES = {
    "torch ByteStorage": "uint8",
    "torch ShortStorage": "int16",
    "torch IntStorage": "int32",
    "torch LongStorage": "int64",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch FloatStorage": "float32",
}
_LAYOUTS = {
    "uint8": np.dtype("u1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # numpy has no such type
    "float32": np.dtype("<f4"),
}


class FormatError(Exception):
    """A file is not one of ``torch.save``, or has other content."""


class _WrongError(ValueError):
    """A file has a fault that this module found. Its text has no words of the file."""


@dataclass(frozen=True, slots=True)
class TorchName:
    """Name of a module and of its member, such as ``torch float32``. Nothing is imported."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorStorage:
    """Storage of a tensor, as its pickle declares it.

    Attributes:
        key: Name of its file in the archive.
        dtype: Type of the values, such as ``float32``.
        size: Number of values.
    """

    key: str
    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """Contiguous tensor in a file, whose values were not read.

    Attributes:
        storage: Storage of the values.
        begin: Index of the first value in the storage.
        shape: Lengths of the dimensions.
    """

    storage: TensorStorage
    begin: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Type of the values, such as ``float32``."""
        return self.storage.dtype

    @property
    def count(self) -> int:
        """Number of values."""
        return prod(self.shape)


class TorchFile:
    """Opened file of ``torch.save``. The memory for all tensors is at most the size of the file.

    Args:
        body: Bytes of the file.
        most: Largest number of tensors.
        head: Largest size of the pickle in bytes.
        form: Values that the file may hold; by default `PLAIN_VALUES`.

    Attributes:
        content: Dict that was saved. Its values are None, bools, integers, floats, texts,
            `TorchName`, `TensorInFile`, and lists, tuples and dicts of these. One list may be in
            several places, also within itself: limit the depth and the number of values.

    Raises:
        FormatError: The file has another format or content.
    """

    content: dict[str, Any]

    def __init__(
        self, body: bytes, *, most: int, head: int, form: "FileForm | None" = None
    ) -> None:
        form = form or PLAIN_VALUES
        _check_directory(body, most)
        self._rest = len(body)
        self._seen: set[str] = set()
        with _translate_errors():
            self._archive = zipfile.ZipFile(io.BytesIO(body))
            names = self._archive.namelist()
            self._root = names[0].partition("/")[0]
            order = f"{self._root}/byteorder"
            if order in names and _read_stored(self._archive, order, 16) != b"little":
                raise _WrongError("its values are not little-endian")
            pickle = _read_stored(self._archive, f"{self._root}/data.pkl", head)
            self.content = _run_pickle(pickle, form)

    def read(self, tensor: TensorInFile) -> npt.NDArray[Any]:
        """Return the values of a tensor. Each storage is read once.

        Values in bfloat16 are returned as their bits, in uint16.

        Raises:
            FormatError: The storage is missing or damaged, has another length, or was read before.
        """
        layout, storage = _LAYOUTS[tensor.dtype], tensor.storage
        size = storage.size * layout.itemsize
        with _translate_errors():
            if storage.key in self._seen:
                raise _WrongError("two tensors share a storage")
            self._seen.add(storage.key)
            self._rest -= size
            if self._rest < 0:  # if files overlap
                raise _WrongError("its storages are longer than the file")
            content = _read_stored(self._archive, f"{self._root}/data/{storage.key}", size)
            if len(content) != size:
                raise _WrongError("a storage is shorter than its declared length")
        begin = tensor.begin * layout.itemsize
        return np.frombuffer(content, layout, tensor.count, begin).reshape(tensor.shape)


def read_texts_and_tensors(
    body: bytes, *, most: int, head: int
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the texts and the tensors of bytes of a dict that ``torch.save`` wrote.

    Args:
        body: Bytes of the file.
        most: Largest number of tensors.
        head: Largest size of the pickle in bytes.

    Raises:
        FormatError: The file has another format or content.
    """
    file = TorchFile(body, most=most, head=head, form=TEXTS_AND_BYTES)
    texts = {name: value for name, value in file.content.items() if isinstance(value, str)}
    tensors = {
        name: value for name, value in file.content.items() if isinstance(value, TensorInFile)
    }
    if len(texts) + len(tensors) != len(file.content) or len(tensors) > most:
        raise FormatError("it has values other than texts and tensors of bytes")
    return texts, {name: file.read(tensor).tobytes() for name, tensor in tensors.items()}


@contextmanager
def _translate_errors() -> Generator[None]:
    try:
        yield
    except _WrongError as error:
        raise FormatError(str(error)) from error
    except (
        ArithmeticError,
        AttributeError,
        DeprecationWarning,  # of an escape sequence in a name, where warnings are errors
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


def _read_stored(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > most:
        raise _WrongError("a file in it is too long")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _WrongError("a file in it is compressed")
    return archive.read(info)


def _run_pickle(pickle: bytes, form: "FileForm") -> dict[str, Any]:
    """Return the dict that a pickle builds."""
    machine = _Machine(form)
    for opcode, arg, _ in pickletools.genops(pickle):
        if opcode.name == "STOP":
            break
        if opcode.name not in form.actions:
            raise _WrongError(f"it has an opcode that no tensor needs ({opcode.name})")
        form.actions[opcode.name](machine, arg)
    (found,) = machine.stack
    if not isinstance(found, dict):
        raise _WrongError("it is not a dict")
    return cast("dict[str, Any]", found)


class _Machine:
    """Interpreter for the opcodes that a dict of plain values and tensors needs."""

    def __init__(self, form: "FileForm") -> None:
        self._form = form
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
        self.stack.append(_parse_storage(self.stack.pop(), self._form))

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(_make_tensor(self.stack.pop(), args, self._form))

    def set_items(self, count: int | None) -> None:
        """Add pairs to the dict below them: the last two values, or those since the mark."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        into, pairs = self.stack[at - 1], self.stack[at:]
        if not isinstance(into, dict):
            raise _WrongError("it gives names to values outside of a dict")
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(name, str):  # the hash of another value could take very long
                raise _WrongError("a name is not a text")
            into[name] = value
        del self.stack[at:]

    def extend_list(self, count: int | None) -> None:
        """Add the last value, or those since the mark, to the list below them."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        into = self.stack[at - 1]
        if not isinstance(into, list):
            raise _WrongError("it adds values to something other than a list")
        cast("list[Any]", into).extend(self.stack[at:])
        del self.stack[at:]


_Do = Callable[[_Machine, Any], None]

_ACTIONS_FOR_TEXTS: dict[str, _Do] = {
    "PROTO": lambda machine, _: None,
    "MARK": lambda machine, _: machine.mark(),
    "GLOBAL": lambda machine, name: machine.push(TorchName(name)),
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
"""Action for each opcode of a dict of texts and vectors. Any other opcode is refused."""
_ACTIONS: dict[str, _Do] = {
    **_ACTIONS_FOR_TEXTS,
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": lambda machine, _: machine.extend_list(1),
    "APPENDS": lambda machine, _: machine.extend_list(None),
    "BINFLOAT": _Machine.push,
}
"""Action for each opcode of a dict of plain values and tensors."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """Values that a file may hold.

    Attributes:
        actions: Action for each opcode.
        dtypes: Types of the values of tensors, by the names of their storages.
        is_flat: Whether all tensors are vectors.
        shape_fault: Sentence about a tensor of another shape.
        storage_fault: Sentence about a storage of another type.
    """

    actions: Mapping[str, _Do]
    dtypes: Mapping[str, str]
    is_flat: bool
    shape_fault: str
    storage_fault: str


TEXTS_AND_BYTES = FileForm(
    _ACTIONS_FOR_TEXTS,
    {"torch ByteStorage": "uint8"},
    is_flat=True,
    shape_fault="a tensor is not a vector of bytes",
    storage_fault="a storage is not of bytes",
)
PLAIN_VALUES = FileForm(
    _ACTIONS,
    _DTYPES_OF_STORAGES,
    is_flat=False,
    shape_fault="a tensor is not contiguous",
    storage_fault="a storage has an unknown type",
)


def _parse_storage(said: Any, form: FileForm) -> TensorStorage:
    kind, of, key, _, size = said
    dtype = form.dtypes.get(of.name) if isinstance(of, TorchName) else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or type(size) is not int:
        raise _WrongError(form.storage_fault)
    return TensorStorage(key, dtype, size)


def _make_tensor(what: Any, args: Any, form: FileForm) -> Any:
    if what == TorchName(_ORDERED) and args == ():
        return None  # hooks: always an empty dict
    if what != TorchName(_REBUILD):
        raise _WrongError("it builds values other than tensors")
    storage, begin, shape, stride, *_ = args
    if (
        not isinstance(storage, TensorStorage)
        or not _are_lengths(shape)
        or not _are_lengths(stride)
    ):
        raise _WrongError(form.shape_fault)
    if type(begin) is not int or len(shape) != len(stride) or (form.is_flat and len(shape) != 1):
        raise _WrongError(form.shape_fault)
    step = 1
    for length, found in zip(reversed(shape), reversed(stride), strict=True):
        if found != step and (form.is_flat or length != 1):  # one row has any stride
            raise _WrongError(form.shape_fault)
        step *= max(1, length)
    if any(length < 0 for length in shape) or not 0 <= begin <= storage.size - prod(shape):
        raise _WrongError("a tensor exceeds its storage")
    return TensorInFile(storage, begin, shape)


def _are_lengths(values: Any) -> bool:
    """Decide whether a value is a short tuple of integers."""
    return (
        isinstance(values, tuple)
        and len(cast("tuple[Any, ...]", values)) <= _DIMENSIONS
        and all(
            type(one) is int and abs(one) < _LENGTH_MOST for one in cast("tuple[Any, ...]", values)
        )
    )
