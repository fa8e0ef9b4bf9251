"""Reader for files of ``torch.save``: a dict of plain values and tensors, or a state dict.

No code of the file is executed. torch's loader is not used, since even with ``weights_only`` it
trusts the lengths of storages in the file. This reader follows the pickle opcode by opcode, and
refuses opcodes that such a dict does not need.
"""

import io
import mmap
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

_END, _END_SIGNATURE = struct.Struct("<10xHI4xH"), b"PK\x05\x06"
# Record of archives above 4 GiB: its signature and size, and the entries and size of the directory.
_LARGER, _LARGER_SIGNATURE = struct.Struct("<4sQ20xQQ8x"), b"PK\x06\x06"
_LOCATOR, _LOCATOR_SIGNATURE = struct.Struct("<8xQ4x"), b"PK\x06\x07"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # before each file: signature, lengths of name and extra
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ENTRY_MOST = 1024  # bytes of an entry: its header, its name and torch's padding
_OTHERS = 16  # files besides the tensors
_DIMENSIONS, _LENGTH_MOST = 8, 1 << 48  # largest number of dimensions, and of values in one
_REBUILD, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]{0,79} [A-Za-z_]\w{0,39}", re.ASCII)
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
    "float64": np.dtype("<f8"),
    "complex64": np.dtype("<c8"),
    "int8": np.dtype("i1"),
    "bool": np.dtype("?"),
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
class UnknownValue:
    """Value of a class that this reader does not make, in a state dict.

    Attributes:
        name: Full name of the class or function.
    """

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
    """Tensor in a file, whose values were not read.

    Attributes:
        storage: Storage of the values.
        begin: Index of the first value in the storage.
        shape: Lengths of the dimensions.
        strides: Distances between neighbours of each dimension in the storage, in values.
    """

    storage: TensorStorage
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

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
        body: Bytes of the file; or the file on the disk, which is mapped into memory.
        most: Largest number of tensors.
        head: Largest size of the pickle in bytes.
        form: Values that the file may hold; by default `PLAIN_VALUES`.

    Attributes:
        content: Dict that was saved. Its values are None, bools, integers, floats, texts,
            `TorchName`, `TensorInFile`, and lists, tuples and dicts of these. State dicts may
            also have bytes and `UnknownValue`. One list may be in
            several places, also within itself: limit the depth and the number of values.

    Raises:
        FormatError: The file has another format or content.
    """

    content: dict[str, Any]

    def __init__(
        self, body: bytes | BinaryIO, *, most: int, head: int, form: "FileForm | None" = None
    ) -> None:
        form = form or PLAIN_VALUES
        if isinstance(body, bytes):
            file, self._body = io.BytesIO(body), memoryview(body)
        else:
            file, self._body = body, _map_file(body)
        _check_directory(self._body, most)
        self._rest = len(self._body)
        self._seen: set[str] = set()
        with _translate_errors():
            self._archive = zipfile.ZipFile(file)
            names = self._archive.namelist()
            self._root = names[0].partition("/")[0]
            order = f"{self._root}/byteorder"
            if order in names and _read_stored(self._archive, order, 16) != b"little":
                raise _WrongError("its values are not little-endian")
            pickle = _read_stored(self._archive, f"{self._root}/data.pkl", head)
            self.content = _run_pickle(pickle, form)

    def read(self, tensor: TensorInFile) -> npt.NDArray[Any]:
        """Return the values of a contiguous tensor. Each storage is read once.

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

    def view(self, storage: TensorStorage) -> memoryview:
        """Return the bytes of a storage without a copy, after a check of their CRC.

        Raises:
            FormatError: The storage is missing or damaged, or has another length.
        """
        size = storage.size * _LAYOUTS[storage.dtype].itemsize
        with _translate_errors():
            info = self._archive.getinfo(f"{self._root}/data/{storage.key}")
            _check_stored(info, size)
            start = info.header_offset
            signature, *lengths = _LOCAL_HEADER.unpack_from(self._body, start)
            start += _LOCAL_HEADER.size + sum(lengths)
            body = self._body[start : start + size]
            if signature != _LOCAL_SIGNATURE or len(body) != size or info.file_size != size:
                raise _WrongError("a storage is shorter than its declared length")
            if zlib.crc32(body) != info.CRC:
                raise _WrongError("a storage is damaged: it has another checksum")
        return body


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
        struct.error,
        zipfile.BadZipFile,
    ) as error:  # any error of the zip and pickle readers; their text may come from the file
        raise FormatError("it is not an archive with a pickle, or it is damaged") from error


def _map_file(file: BinaryIO) -> memoryview:
    """Map a file into memory. Writes to the memory do not reach the file.

    Raises:
        FormatError: The file is empty.
    """
    try:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except ValueError:
        raise FormatError("it is empty") from None


def _check_directory(body: memoryview, most: int) -> None:
    """Check the size of the archive's directory before Python's reader parses it.

    The size is in a record at the end of the file. A larger record before it may replace it, and
    Python's reader uses that record then. Of some versions, it is where the locator between both
    says; of others, it is before the locator.

    Raises:
        _WrongError: The directory is missing, or has too many entries.
    """
    end = len(body) - _END.size
    if end < 0 or bytes(body[end : end + 4]) != _END_SIGNATURE:
        raise FormatError("it is not an archive, or it is damaged")
    entries, size, comment = _END.unpack_from(body, end)
    at = end - _LOCATOR.size
    larger = at - _LARGER.size
    if larger >= 0 and bytes(body[at : at + 4]) == _LOCATOR_SIGNATURE:
        (place,) = _LOCATOR.unpack_from(body, at)
        signature, rest, entries, size = _LARGER.unpack_from(body, larger)
        if (place, signature, rest) != (larger, _LARGER_SIGNATURE, _LARGER.size - 12):
            raise FormatError("its directory is damaged")
    if comment or entries > most + _OTHERS or size > entries * _ENTRY_MOST:
        raise FormatError("it has more files in it than tensors")


def _read_stored(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info = archive.getinfo(name)
    _check_stored(info, most)
    return archive.read(info)


def _check_stored(info: zipfile.ZipInfo, most: int) -> None:
    if info.file_size > most:
        raise _WrongError("a file in it is too long")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _WrongError("a file in it is compressed")


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
    if isinstance(found, UnknownValue):
        raise _WrongError(f"it is a {found.name}, and not a dict: save its state_dict()")
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
        self.stack.append(_make_value(self.stack.pop(), args, self._form))

    def set_items(self, count: int | None) -> None:
        """Add pairs to the dict below them: the last two values, or those since the mark."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        into, pairs = self.stack[at - 1], self.stack[at:]
        if isinstance(into, UnknownValue):
            del self.stack[at:]
            return
        if not isinstance(into, dict):
            raise _WrongError("it gives names to values outside of a dict")
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(name) not in self._form.keys:  # the hash of others could take very long
                raise _WrongError("a name is not a text")
            into[name] = value
        del self.stack[at:]

    def build(self) -> None:
        """Discard the attributes of a dict: state dicts have the versions of their modules."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict | UnknownValue):
            raise _WrongError("it sets attributes of values other than dicts")

    def extend_list(self, count: int | None) -> None:
        """Add the last value, or those since the mark, to the list below them."""
        at = self._marks.pop() if count is None else len(self.stack) - count
        into = self.stack[at - 1]
        if isinstance(into, UnknownValue):
            del self.stack[at:]
            return
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
_ACTIONS_FOR_STATES: dict[str, _Do] = {
    **_ACTIONS,
    "BUILD": lambda machine, _: machine.build(),
    "NEWOBJ": lambda machine, _: machine.reduce(),  # of an unknown class
}
"""Action for each opcode of a state dict."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """Values that a file may hold.

    Attributes:
        actions: Action for each opcode.
        dtypes: Types of the values of tensors, by the names of their storages.
        is_flat: Whether all tensors are vectors.
        is_state: Whether ordered dicts, parameters and tensors of any strides are permitted too.
        keys: Types of the keys of dicts.
        shape_fault: Sentence about a tensor of another shape.
        storage_fault: Sentence about a storage of another type.
    """

    actions: Mapping[str, _Do]
    dtypes: Mapping[str, str]
    is_flat: bool
    shape_fault: str
    storage_fault: str
    is_state: bool = False
    keys: frozenset[type] = frozenset([str])


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
STATE_DICTS = FileForm(
    _ACTIONS_FOR_STATES,
    _DTYPES_OF_STORAGES
    | {
        "torch DoubleStorage": "float64",
        "torch ComplexFloatStorage": "complex64",
        "torch CharStorage": "int8",
        "torch BoolStorage": "bool",
    },
    is_flat=False,
    shape_fault="a tensor has a wrong shape",
    storage_fault="a storage has an unknown type",
    is_state=True,
    keys=frozenset([str, int, float, bool]),
)


def _parse_storage(said: Any, form: FileForm) -> TensorStorage:
    kind, of, key, _, size = said
    dtype = form.dtypes.get(of.name) if isinstance(of, TorchName) else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or type(size) is not int:
        name = of.name if form.is_state and isinstance(of, TorchName) else ""
        shown = f" ({name.replace(' ', '.')})" if _CLASS_NAME.fullmatch(name) else ""
        raise _WrongError(form.storage_fault + shown)
    return TensorStorage(key, dtype, size)


def _make_value(what: Any, args: Any, form: FileForm) -> Any:
    """Return the value of a call in a pickle.

    Raises:
        _WrongError: The value is not permitted.
    """
    match what:
        case TorchName(name) if name == _ORDERED and args == ():
            return {} if form.is_state else None  # hooks of tensors are always an empty dict
        case TorchName(name) if name == _REBUILD:
            return _make_tensor(args, form)
        case TorchName(name) if form.is_state and _CLASS_NAME.fullmatch(name):
            return _make_state_value(name, args, form)
        case _:
            raise _WrongError("it builds values other than tensors")


def _make_state_value(name: str, args: Any, form: FileForm) -> Any:
    """Return the value of a call in the pickle of a state dict. Nothing is called."""
    match name, args:
        case "torch._utils _rebuild_parameter", (TensorInFile() as tensor, *_):
            return tensor
        case "torch._utils _rebuild_parameter", _:
            raise _WrongError(form.shape_fault)
        case "collections Counter", (dict(), *_):
            return args[0]
        case "torch Size", (lengths,) if _are_lengths(lengths):
            return lengths
        case "_codecs encode", (str() as text, "latin1"):  # bytes, in older protocols
            return text.encode("latin1")
        case _:
            return UnknownValue(name.replace(" ", "."))


def _make_tensor(args: Any, form: FileForm) -> TensorInFile:
    storage, begin, shape, strides, *more = args
    if more[2:] and more[2]:  # such as the bit of a lazy conjugate
        raise _WrongError("a tensor has values that torch computes when it loads them")
    if (
        not isinstance(storage, TensorStorage)
        or not _are_lengths(shape)
        or not _are_lengths(strides)
    ):
        raise _WrongError(form.shape_fault)
    if type(begin) is not int or len(shape) != len(strides) or (form.is_flat and len(shape) != 1):
        raise _WrongError(form.shape_fault)
    if not (form.is_state or _are_contiguous(shape, strides, is_flat=form.is_flat)):
        raise _WrongError(form.shape_fault)
    if any(length < 0 for length in (*shape, *strides)) or begin < 0:
        raise _WrongError("a tensor exceeds its storage")
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    end = begin + last + 1 if prod(shape) else begin
    if end > storage.size:
        raise _WrongError("a tensor exceeds its storage")
    return TensorInFile(storage, begin, shape, strides)


def _are_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], *, is_flat: bool) -> bool:
    step = 1
    for length, found in zip(reversed(shape), reversed(strides), strict=True):
        if found != step and (is_flat or length != 1):  # one row has any stride
            return False
        step *= max(1, length)
    return True


def _are_lengths(values: Any) -> bool:
    """Decide whether a value is a short tuple of integers."""
    return (
        isinstance(values, tuple)
        and len(cast("tuple[Any, ...]", values)) <= _DIMENSIONS
        and all(
            type(one) is int and abs(one) < _LENGTH_MOST for one in cast("tuple[Any, ...]", values)
        )
    )
