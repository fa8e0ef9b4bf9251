"""Decide the types of the fields, for formats whose fields have types."""

from collections.abc import Mapping, Sequence

from millrace.datasets.formats.base import FieldType, ShardFormat
from millrace.datasets.sources import SourceKind, SourceSettings
from millrace.errors import ConfigurationError

_STR = {"html", "md", "text", "transcript", "txt", "xml"}
_INT = {"class", "cls", "cls2", "count", "id", "index", "inx"}  # as webdataset decodes them
_CAPACITY = 4096
_TYPES = (
    dict.fromkeys(_STR, FieldType.STR)
    | dict.fromkeys(_INT, FieldType.INT)
    | {"json": FieldType.JSON}
)


def decide_fields(
    formats: Sequence[ShardFormat], source: SourceSettings, types: Mapping[str, FieldType]
) -> dict[str, str]:
    """Return the types of the fields of every sample, by their names.

    A field without a type in the settings has the type of its extension, as in WebDataset: ``txt``
    is text, ``json`` is JSON, ``cls`` is an integer, and most are bytes.

    Args:
        formats: Formats of the dataset.
        source: Settings of the source, which name the fields.
        types: Types of fields in the settings, by the names of the fields.

    Returns:
        Types in the order of the names; nothing if no format has types.

    Raises:
        ConfigurationError: The fields are not known, a type is given for a field that the samples
            do not have, or a format cannot have the fields.
    """
    typed = sorted(one.name for one in formats if one.has_types)
    if not typed:
        if types:
            raise ConfigurationError(
                "`types` are for formats whose fields have types, and the fields of webdataset "
                "have none. Remove `types`, or add a format."
            )
        return {}
    if source.kind is SourceKind.FILES:
        if not types:
            raise ConfigurationError(
                f"{typed[0]} needs the fields of the samples, which files do not name. Write them "
                "into `types` of `sharding`, such as {jpg: bytes, cls: int}."
            )
        fields = dict(types)
    else:
        names = set(source.columns or ["json"])
        if unknown := sorted(set(types) - names):
            raise ConfigurationError(
                f"`types` has {unknown[0]!r}, and the samples have the fields {sorted(names)}. "
                "Correct `types`, or the `columns` of the source."
            )
        fields = {name: types.get(name) or _guess_type(name) for name in names}
    fields = dict(sorted(fields.items()))
    for one in formats:
        one.make_encoder(fields, _CAPACITY)  # refuses fields that the format cannot have
    return {name: kind.value for name, kind in fields.items()}


def _guess_type(name: str) -> FieldType:
    return _TYPES.get(name.rpartition(".")[2], FieldType.BYTES)
