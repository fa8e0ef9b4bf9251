"""Decode and encode values of Thrift's compact protocol, in which parquet's metadata is written.

pyarrow writes the offsets of pages and does not read them, so they are decoded here. A
struct is a dict from the number of a field to its value, and each value keeps its type, so that a
struct can be changed and encoded again.
"""

from typing import Any, NamedTuple

_MAX_DEPTH = 32

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET = range(1, 11)
STRUCT = 12

Fields = dict[int, "Value"]


class ThriftError(ValueError):
    """Bytes that are no value of the compact protocol."""


class Value(NamedTuple):
    """A value with its type.

    Attributes:
        kind: Type, such as `I32`.
        content: The value. For a list, its values; for a struct, its fields.
        element: Type of the values of a list.
    """

    kind: int
    content: Any
    element: int = 0


def decode_struct(data: bytes | memoryview, position: int = 0) -> tuple[Fields, int]:
    """Return the fields of a struct, and the position after it.

    Raises:
        ThriftError: The bytes are no struct.
    """
    decoder = _StructDecoder(memoryview(data), position)
    return decoder.read_struct(0), decoder.position


def encode_struct(fields: Fields) -> bytes:
    """Return the bytes of a struct."""
    out = bytearray()
    _write_struct(out, fields)
    return bytes(out)


class _StructDecoder:
    def __init__(self, data: memoryview, position: int) -> None:
        self._data, self.position = data, position

    def read_struct(self, depth: int) -> Fields:
        if depth > _MAX_DEPTH:
            raise ThriftError("its structs are nested too deeply")
        fields: Fields = {}
        number = 0
        while header := self._read_byte():
            kind = header & 0x0F
            number = number + (header >> 4) if header >> 4 else _unzigzag(self._read_varint())
            if number in fields:
                raise ThriftError(f"a struct has the field {number} twice")
            fields[number] = self._read_value(kind, depth, in_list=False)
        return fields

    def _read_value(self, kind: int, depth: int, *, in_list: bool) -> Value:
        content: Any
        match kind:
            case 1 | 2:  # `TRUE`, `FALSE`
                content = self._read_byte() == TRUE if in_list else kind == TRUE
            case 3:  # `BYTE`
                content = self._read_byte()
            case 4 | 5 | 6:  # `I16`, `I32`, `I64`
                content = _unzigzag(self._read_varint())
            case 7:  # `DOUBLE`
                content = bytes(self._take(8))
            case 8:  # `BINARY`
                content = bytes(self._take(self._read_varint()))
            case 9 | 10 if not in_list:  # `LIST`, `SET`
                return self._read_list(kind, depth)
            case 12:  # `STRUCT`
                content = self.read_struct(depth + 1)
            case _:
                raise ThriftError(f"it has a value of the type {kind}")
        return Value(kind, content)

    def _read_list(self, kind: int, depth: int) -> Value:
        header = self._read_byte()
        element, count = header & 0x0F, header >> 4
        if count == 15:
            count = self._read_varint()
        if count > len(self._data) - self.position:  # each value has at least one byte
            raise ThriftError("a list has more values than bytes follow")
        values = [self._read_value(element, depth + 1, in_list=True).content for _ in range(count)]
        return Value(kind, values, element)

    def _read_varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._read_byte()
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 63:
                raise ThriftError("a number has more than 64 bits")

    def _read_byte(self) -> int:
        if self.position >= len(self._data):
            raise ThriftError("it ends too early")
        self.position += 1
        return self._data[self.position - 1]

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self.position:
            raise ThriftError("it ends too early")
        self.position += size
        return self._data[self.position - size : self.position]


def _write_struct(out: bytearray, fields: Fields) -> None:
    before = 0
    for number, value in sorted(fields.items()):
        step = number - before
        if 0 < step < 16:
            out.append(step << 4 | value.kind)
        else:
            out.append(value.kind)
            _write_varint(out, _zigzag(number))
        if value.kind not in (TRUE, FALSE):
            _write_content(out, value.kind, value.content, value.element)
        before = number
    out.append(0)


def _write_content(out: bytearray, kind: int, content: Any, element: int) -> None:
    if kind in (TRUE, FALSE):
        out.append(TRUE if content else FALSE)
    elif kind == BYTE:
        out.append(content)
    elif kind in (I16, I32, I64):
        _write_varint(out, _zigzag(content))
    elif kind == DOUBLE:
        out += content
    elif kind == BINARY:
        _write_varint(out, len(content))
        out += content
    elif kind in (LIST, SET):
        out.append(min(len(content), 15) << 4 | element)
        if len(content) >= 15:
            _write_varint(out, len(content))
        for value in content:
            _write_content(out, element, value, 0)
    else:
        _write_struct(out, content)


def _write_varint(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _zigzag(number: int) -> int:
    return number * 2 if number >= 0 else -number * 2 - 1


def _unzigzag(number: int) -> int:
    return number >> 1 if not number & 1 else -(number >> 1) - 1
