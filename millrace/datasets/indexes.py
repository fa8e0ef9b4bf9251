"""Make the objects that readers of the formats need beside the shards, from the manifest."""

from millrace import errors
from millrace.datasets.formats import FieldType, open_format
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import Manifest
from millrace.storage import Store, read


def make_indexes(manifest: Manifest) -> dict[str, bytes]:
    """Return the indexes of all formats of a dataset by their keys."""
    keys = DatasetKeys(manifest.dataset)
    fields = {name: FieldType(one) for name, one in manifest.fields.items()}
    indexes: dict[str, bytes] = {}
    for name in manifest.formats:
        shards = [shard for shard in manifest.shards if shard.format == name]
        indexes |= open_format(name).make_indexes(keys, fields, shards)
    return indexes


def describe_index(store: Store, key: str, expected: bytes) -> str:
    """Describe the fault of an index. One request.

    Args:
        store: Store of the dataset.
        key: Key of the index.
        expected: Bytes that the index must have.

    Returns:
        Short text; empty if the index has these bytes.

    Raises:
        UnavailableError: The store does not answer.
    """
    try:
        found = read(store, key, max_size=len(expected))
    except errors.NotFoundError:
        return "missing"
    except errors.UnavailableError:
        raise
    except errors.MillraceError:  # longer, or not readable
        found = None
    return "" if found == expected else "does not fit the manifest"
