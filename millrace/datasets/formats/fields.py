"""Decide the types of the fields, for formats whose fields have types."""

from collections.abc import Mapping, Sequence

from millrace.datasets.formats.base import FieldType, ShardFormat, guess_type
from millrace.datasets.sources import SourceKind, SourceSettings
from millrace.errors import ConfigurationError
from millrace.records import JsonObject

_CAPACITY = 4096


def decide_fields(
    formats: Sequence[ShardFormat],
    source: SourceSettings,
    steps: Sequence[JsonObject],
    types: Mapping[str, FieldType],
    *,
    schema_types: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the types of the fields of every sample, by their names.

    A field without a type in the settings has the type of its extension, as in webdataset: ``txt``
    is text, ``json`` is JSON, ``cls`` is an integer, and most are bytes.

    Args:
        formats: Formats of the dataset.
        source: Settings of the source, which name the fields.
        steps: Descriptions of the transforms, which change the fields.
        types: Types of fields in the settings, by the names of the fields.
        schema_types: Types of the fields of the source, by its schema; by default the types of
            their extensions.

    Returns:
        Types in the order of the names; nothing if no format has types.

    Raises:
        ConfigurationError: The fields are not known, a type is given or a transform asks for a
            field that the samples do not have, or a format cannot have the fields.
    """
    found = _trace_fields(source, steps, schema_types)
    typed = sorted(one.name for one in formats if one.has_types)
    if not typed:
        if types:
            raise ConfigurationError(
                "`types` are for formats whose fields have types, and the fields of webdataset "
                "have none. Remove `types`, or add a format."
            )
        return {}
    if found is None:
        if not types:
            raise ConfigurationError(
                f"{typed[0]} needs the fields of the samples, which neither files nor functions "
                "name. Write them into `types` of `sharding`, such as {jpg: bytes, cls: int}. Of a "
                "list of URLs, name the field of the bodies in `content_field`."
            )
        found = dict(types)
    if unknown := sorted(types.keys() - found.keys()):
        raise ConfigurationError(
            f"`types` has {unknown[0]!r}, and the samples have the fields {sorted(found)}. "
            "Correct `types`, or the `columns` of the source."
        )
    fields = dict(sorted((found | dict(types)).items()))
    for one in formats:
        one.make_encoder(fields, _CAPACITY)  # refuses fields that the format cannot have
    return {name: kind.value for name, kind in fields.items()}


def _trace_fields(
    source: SourceSettings, steps: Sequence[JsonObject], schema_types: Mapping[str, str] | None
) -> dict[str, FieldType] | None:
    """Return the fields that the samples have after the transforms; None if they are not known.

    Raises:
        ConfigurationError: A transform needs a field that the samples do not have.
    """
    if source.kind in {SourceKind.FILES, SourceKind.WEBDATASET}:
        return None
    names = [*(source.columns or ["json"])]
    if source.kind is SourceKind.URLS:
        if source.urls.content_field is None:
            return None
        names.append(source.urls.content_field)
    fields = {name: guess_type(name) for name in names}
    fields |= {name: FieldType(kind) for name, kind in (schema_types or {}).items()}
    for step in steps:
        needed = step.get("fields") or ([step["field"]] if "field" in step else [])
        if missing := sorted(set(needed) - fields.keys()):
            raise ConfigurationError(
                f"The transform {step['kind']} needs the field {missing[0]!r}, and the samples "
                f"have the fields {sorted(fields)}. Name the column in `columns` of the source, "
                f'such as {{"{missing[0]}": "text"}}, or correct the transform.'
            )
        match step["kind"]:
            case "function":
                return None
            case "rename":
                fields = {step["fields"].get(name, name): kind for name, kind in fields.items()}
            case "tokenize":
                fields.pop(step["field"], None)
                if "pack" in step:
                    fields.clear()
                fields["tokens"] = FieldType(f"{step['dtype']}[]")
            case _:
                pass  # a filter changes no field
    return fields
