"""Decide whether objects of two stores are equal."""

from millrace.cleanup.copy_sides import CopySides
from millrace.digest import compute_stream_digest
from millrace.storage import Backend, Stat
from millrace.storage.etags import EtagHasher, parse_etag
from millrace.storage.multipart import MIN_PART_SIZE
from millrace.storage.signed import shows_md5

SOURCE_ETAG = "millrace-source-etag"
"""Metadata of a copy that is proven though its ETag differs from that of its source: the latter.

It is written when the upload begins. So the upload is completed only if the store confirms the MD5
of each part, or has copied the parts by itself.
"""


class ObjectComparer:
    """Comparer of single objects of two stores. Threads may share it."""

    def __init__(self, sides: CopySides) -> None:
        self._sides = sides
        self._source, self._destination = sides.source, sides.destination

    def are_equal(self, stat: Stat, there: Stat) -> bool:
        """Compare two objects by their ETags; read them if the ETags prove nothing."""
        if stat.size != there.size:
            return False
        mine = parse_etag(self._source, stat.etag)
        theirs = parse_etag(self._destination, there.etag)
        if not stat.size or (mine is not None and mine == theirs):
            return True
        are_whole = mine is not None and theirs is not None and not mine[1] and not theirs[1]
        if are_whole and self._have_md5s(stat):
            return False
        return self._is_noted_copy(stat, there) or self._have_equal_bytes(stat, there)

    def _have_md5s(self, stat: Stat) -> bool:
        """Decide whether the ETags of two whole objects are MD5s. Up to two requests."""
        both = (self._destination, self._source)
        headers = (
            self._sides.describe(store, stat)["ResponseMetadata"]["HTTPHeaders"] for store in both
        )
        return all(map(shows_md5, headers))

    def is_right_copy(self, stat: Stat) -> bool:
        """Read an object and its copy, unless they are empty, and compare them."""
        written = self._sides.find_target(stat)
        if written is None or written.size != stat.size:
            return False
        return not stat.size or self._have_equal_bytes(stat, written)

    def _is_noted_copy(self, stat: Stat, there: Stat) -> bool:
        """Decide by an object's metadata whether it is a proven copy. One request."""
        if self._sides.client is None or stat.etag is None or stat.size < MIN_PART_SIZE:
            return False
        found = self._sides.describe(self._destination, stat)
        if not shows_md5(found["ResponseMetadata"]["HTTPHeaders"]):
            return False  # the store did not confirm the MD5 of any part
        is_listed = found["ETag"].strip('"') == (there.etag or "").strip('"')
        return is_listed and found.get("Metadata", {}).get(SOURCE_ETAG) == stat.etag

    def _have_equal_bytes(self, stat: Stat, there: Stat) -> bool:
        """Compare the bytes of two objects. A file is compared with the ETag of the other one."""
        mine, theirs = (self._source, stat), (self._destination, there)
        for (store, one), (other_store, other) in ((mine, theirs), (theirs, mine)):
            etag = parse_etag(other_store, other.etag)
            if store.location.backend is Backend.FILE and etag is not None:
                hasher = EtagHasher(self._sides.find_part_size(other_store, other, etag[1])[0])
                for block in self._sides.iterate_blocks(store, one):
                    hasher.update(block)
                if hasher.compute_etag() == etag[0]:
                    return True
        digests = {
            compute_stream_digest(self._sides.iterate_blocks(store, one))[0]
            for store, one in (mine, theirs)
        }
        return len(digests) == 1
