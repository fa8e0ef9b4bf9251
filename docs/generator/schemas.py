"""JSON Schemas of the settings files, for editors."""

import json
from typing import Any

from prefect.blocks.core import Block
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from millrace.settings_values import make_plain

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DURATION = r"^\s*(\d+(\.\d+)?\s*(s|m|h|d|w)\s*)+$|^[-+]?[Pp]"
_VARIABLE = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "Text with a variable of the environment: `${NAME}` or `${NAME:-default}`.",
}
_REFERENCE = {"$ref": "#/$defs/Variable"}
_STRICT_TYPES = {"integer", "number", "boolean"}
_ANNOTATIONS = ("title", "description", "default")
_LIMITS = ("ge", "gt", "le", "lt")  # of durations and sizes: JSON Schema has no words for them


class SettingsSchema(GenerateJsonSchema):
    """Generator of schemas of settings files, with durations and sizes as text."""

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        """Return the schema of a duration."""
        return {"type": "string", "pattern": _DURATION}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Return the schema of a model; of a block, that of a reference to it."""
        model = schema["cls"]
        return (
            _describe_reference(model) if issubclass(model, Block) else super().model_schema(schema)
        )

    def encode_default(self, dft: Any) -> Any:
        """Return a default as a settings file has it."""
        return make_plain(dft)

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out titles, which repeat the names of the fields."""
        return False


def _describe_reference(block: type[Block]) -> JsonSchemaValue:
    slug = block.get_block_type_slug()
    return {
        "type": "object",
        "description": f"A {block._block_type_name} block of the Prefect server.",  # noqa: SLF001
        "properties": {
            "$ref": {
                "type": "object",
                "properties": {"block_document_slug": {"type": "string", "pattern": f"^{slug}/"}},
                "required": ["block_document_slug"],
                "additionalProperties": False,
            }
        },
        "required": ["$ref"],
        "additionalProperties": False,
    }


def make_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a settings file before its variables are filled in."""
    schema = _allow_variables(model.model_json_schema(schema_generator=SettingsSchema))
    schema.setdefault("$defs", {})["Variable"] = _VARIABLE
    return {"$schema": _DIALECT, **schema}


def write_schema(model: type[BaseModel]) -> str:
    """Return the schema as the text of a file."""
    return json.dumps(make_schema(model), indent=2, ensure_ascii=False) + "\n"


def _allow_variables(schema: Any) -> Any:
    """Return a schema in which a variable may stand for each number, choice and formatted text."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {name: each for name, each in schema.items() if name not in _LIMITS}
    for name in ("properties", "$defs"):
        if name in found:
            found[name] = {key: _allow_variables(each) for key, each in found[name].items()}
    for name in ("items", "additionalProperties"):
        if name in found:
            found[name] = _allow_variables(found[name])
    for name in ("prefixItems", "oneOf"):
        if name in found:
            found[name] = [_allow_variables(each) for each in found[name]]
    if "anyOf" in found:
        found["anyOf"] = _flatten_choices(found["anyOf"])
        return found
    if not _is_strict(found):
        return found
    kept = {name: found.pop(name) for name in _ANNOTATIONS if name in found}
    return {**kept, "anyOf": [found, _REFERENCE]}


def _flatten_choices(choices: list[Any]) -> list[Any]:
    """Return the choices of a union, with a variable once at their end if one of them needs it."""
    flat: list[Any] = []
    for choice in map(_allow_variables, choices):
        flat += choice["anyOf"] if set(choice) == {"anyOf"} else [choice]
    unique = [each for number, each in enumerate(flat) if each not in flat[:number]]
    if _REFERENCE in unique:
        unique = [each for each in unique if each != _REFERENCE] + [_REFERENCE]
    return unique


def _is_strict(schema: dict[str, Any]) -> bool:
    """Return whether a schema refuses the text of a variable that it should take."""
    is_limited = "pattern" in schema or "minLength" in schema or schema.get("format") == "date-time"
    return schema.get("type") in _STRICT_TYPES or "enum" in schema or is_limited
