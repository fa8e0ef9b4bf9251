"""Rows of a table by their names, in few bytes: objects of Python take several times the memory."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise


class PackedRows:
    """Rows of a table, of which all have the same fields. They are added first, and then found.

    Memory: the bytes of the names and the values, and 24 bytes for each row and 8 for each field.
    """

    def __init__(self) -> None:
        self._fields: tuple[str, ...] = ()
        self._data = bytearray()  # the name and the values of each row
        self._ends = array("Q")  # of each name and value
        self._hashes = array("q")  # of the names; `finish` sorts them
        self._order = array("q")  # number of the row of each hash

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def size(self) -> int:
        """Bytes of memory, once the rows are sorted."""
        return len(self._data) + 8 * len(self._ends) + 16 * len(self._hashes)

    def add(self, name: str, values: Mapping[str, bytes]) -> None:
        """Add a row."""
        self._fields = self._fields or tuple(values)
        encoded = _encode_name(name)
        self._hashes.append(hash(encoded))
        for value in (encoded, *map(values.__getitem__, self._fields)):
            self._data += value
            self._ends.append(len(self._data))

    def finish(self) -> str | None:
        """Sort the rows, and return a name that several of them have; None if there is none."""
        # Numpy is imported only for what needs it.
        import numpy as np  # noqa: PLC0415

        hashes = np.frombuffer(self._hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        self._order, self._hashes = (array("q", one.tobytes()) for one in (order, hashes))
        for at in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
            name, other = (self._read_row(self._order[one])[0] for one in (at, at + 1))
            if name == other:
                return name.decode("utf-8", "surrogatepass")
        return None

    def find(self, name: str) -> dict[str, bytes] | None:
        """Return the fields of the row with a name; None without a row."""
        encoded = _encode_name(name)
        wanted = hash(encoded)
        at = bisect_left(self._hashes, wanted)
        while at < len(self._hashes) and self._hashes[at] == wanted:
            found, *values = self._read_row(self._order[at])
            if found == encoded:
                return dict(zip(self._fields, values, strict=True))
            at += 1
        return None

    def _read_row(self, number: int) -> list[bytes]:
        """Return the name and the values of a row."""
        step = 1 + len(self._fields)
        first = number * step
        edges = [self._ends[first - 1] if first else 0, *self._ends[first : first + step]]
        view = memoryview(self._data)
        return [view[begin:end].tobytes() for begin, end in pairwise(edges)]


def _encode_name(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
