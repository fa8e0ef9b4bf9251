"""Decide the types of the fields, for formats whose fields have types."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from millrace.datasets.field_names import TOKENS
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
    is text, ``json`` is JSON, ``cls`` is an integer, and most are bytes. The tokens of `tokenize`
    have the type of their ids, also in webdataset, whose readers could not know it.

    Args:
        formats: Formats of the dataset.
        source: Settings of the source, which name the fields.
        steps: Descriptions of the transforms, which change the fields.
        types: Types of fields in the settings, by the names of the fields.
        schema_types: Types of the fields of the source, by its schema; by default the types of
            their extensions.

    Returns:
        Types in the order of the names; those of tokens alone if no format has types.

    Raises:
        ConfigurationError: The fields are not known, a type is given or a transform asks for a
            field that the samples do not have, a type is not that of the tokens, or a format cannot
            have the fields.
    """
    traced = _trace_fields(source, steps, schema_types)
    typed = sorted(one.name for one in formats if one.has_types)
    if not typed:
        if types:
            raise ConfigurationError(
                "`types` are for formats whose fields have types, and the fields of webdataset "
                "have none. Remove `types`, or add a format."
            )
        return {name: kind.value for name, kind in traced.tokens.items()}
    found = dict(traced.fields)
    if not traced.is_complete:
        # A sample has fields of its own, besides those that a table adds.
        joined = {
            name
            for step in steps
            if step["kind"] == "join"
            for name in step.get("columns") or ["json"]
        }
        if not types and found.keys() <= joined:
            raise ConfigurationError(
                f"{typed[0]} needs the fields of the samples, which neither files nor functions "
                "name. Write them into `types` of `sharding`, such as {jpg: bytes, cls: int}. Of a "
                "list of URLs, name the field of the bodies in `content_field`."
            )
        found |= types
    if unknown := sorted(types.keys() - found.keys()):
        raise ConfigurationError(
            f"`types` has {unknown[0]!r}, and the samples have the fields {sorted(found)}. "
            "Correct `types`, or the `columns` of the source."
        )
    for name, kind in traced.tokens.items():
        if types.get(name, kind) not in {kind, FieldType.BYTES}:
            raise ConfigurationError(
                f"`types` gives the field {name!r} the type {types[name]}, and `tokenize` makes it "
                f"of the type {kind}, by the vocabulary of its tokenizer. Write {{{name}: "
                f'"{kind}"}}, or leave the field out of `types`.'
            )
    fields = dict(sorted((found | dict(types)).items()))
    for one in formats:
        one.make_encoder(fields, _CAPACITY)  # refuses fields that the format cannot have
    return {name: kind.value for name, kind in fields.items()}


class _TracedFields(NamedTuple):
    """Fields of the samples after some transforms.

    Attributes:
        fields: Types of the known fields, by their names.
        is_complete: Whether the samples have no other fields.
        tokens: Types of the fields that `tokenize` has made, by their names.
    """

    fields: Mapping[str, FieldType]
    is_complete: bool = True
    tokens: Mapping[str, FieldType] = MappingProxyType({})


_UNKNOWN = _TracedFields({}, is_complete=False)


def _trace_fields(
    source: SourceSettings, steps: Sequence[JsonObject], schema_types: Mapping[str, str] | None
) -> _TracedFields:
    """Return the fields that the samples have after the transforms.

    Raises:
        ConfigurationError: A transform needs a field that the samples do not have.
    """
    traced = _list_source_fields(source, schema_types)
    for step in steps:
        needed = step.get("fields") or ([step["field"]] if "field" in step else [])
        missing = sorted(set(needed) - traced.fields.keys())
        if missing and traced.is_complete:
            raise ConfigurationError(
                f"The transform {step['kind']} needs the field {missing[0]!r}, and the samples "
                f"have the fields {sorted(traced.fields)}. Name the column in `columns` of the "
                f'source, such as {{"{missing[0]}": "text"}}, or correct the transform.'
            )
        match step["kind"]:
            case "function":
                traced = _UNKNOWN
            case "rename":
                new: Mapping[str, str] = step["fields"]
                traced = traced._replace(
                    fields={new.get(name, name): kind for name, kind in traced.fields.items()},
                    tokens={new.get(name, name): kind for name, kind in traced.tokens.items()},
                )
            case "join":
                added = {name: guess_type(name) for name in step.get("columns") or ["json"]}
                if twice := sorted(added.keys() & traced.fields.keys()):
                    raise ConfigurationError(
                        f"The transform join adds the field {twice[0]!r}, which the samples have "
                        "already. Give it another name in `columns` of the transform, or rename "
                        "the field before."
                    )
                traced = traced._replace(fields={**traced.fields, **added})
            case "tokenize":
                tokens = {TOKENS: FieldType(f"{step['dtype']}[]")}
                if "pack" in step:
                    traced = _TracedFields(tokens, tokens=tokens)
                    continue
                kept = {n: kind for n, kind in traced.fields.items() if n != step["field"]}
                traced = traced._replace(fields=kept | tokens, tokens={**traced.tokens, **tokens})
            case _:
                pass  # a filter changes no field
    return traced


def _list_source_fields(
    source: SourceSettings, schema_types: Mapping[str, str] | None
) -> _TracedFields:
    if source.kind in {SourceKind.FILES, SourceKind.WEBDATASET}:
        return _UNKNOWN
    names = [*(source.columns or ["json"])]
    if source.kind is SourceKind.URLS:
        if source.urls.content_field is None:
            return _UNKNOWN
        names.append(source.urls.content_field)
    fields = {name: guess_type(name) for name in names}
    return _TracedFields(
        fields | {name: FieldType(kind) for name, kind in (schema_types or {}).items()}
    )
