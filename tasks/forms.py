"""Forms that the Prefect UI draws for flows, and the input of forms, which becomes parameters.

Prefect makes a form from the types of a flow's parameters. `draw_form` makes the form readable for
a person who has not read the code. Titles are words, required settings come first, and durations
and sizes are text. Groups of settings start empty, and an empty group stands for the defaults.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from prefect import Flow
from prefect.blocks.core import Block
from pydantic import (
    BaseModel,
    ByteSize,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from millrace.cleanup import Rule
from millrace.gradients import RunSettings
from millrace.gradients.settings import RunOptions
from millrace.rentals import MachineSettings, OfferRequest, Program
from millrace.schemas.chain import OuterOptimizer
from millrace.schemas.gradient import Codec
from millrace.settings_values import make_plain
from millrace.swarm import PrewarmOptions
from tasks.locations import SourceInput
from tasks.sharding import ShardingMachinesInput
from tasks.templar import TemplarInput

F = TypeVar("F", bound="Flow[..., Any]")

ADVANCED = "advanced"
"""Name of the group that holds the rarely changed settings of a model."""

_SHOWN: Mapping[type[BaseModel], frozenset[str]] = {
    OfferRequest: frozenset({"gpu"}),
    PrewarmOptions: frozenset({"check", "min_node_share"}),
    Program: frozenset(),
    MachineSettings: frozenset({"machines"}),
    Rule: frozenset({"older_than", "name"}),
    RunOptions: frozenset({"window_length", "steps"}),
    RunSettings: frozenset({"window_length", "steps", "windows"}),
    ShardingMachinesInput: frozenset({"extras", "machines", "vast"}),
    TemplarInput: frozenset(),
    SourceInput: frozenset({"bucket", "columns", "include", "kind", "prefix", "url"}),
}
"""Optional settings of a model that its form shows. All others are in the group `advanced`."""

_MODEL_TITLES: Mapping[type[BaseModel], str] = {
    OuterOptimizer: "Optimizer settings",
    Codec: "Codec settings",
    MachineSettings: "Rental settings",
    RunOptions: "Run settings",
}
"""Titles of models whose names say little to a person who has not read the code."""

_WORDS = {
    "arn": "ARN", "gpu": "GPU", "gpus": "GPUs", "id": "ID", "sha256": "SHA-256", "url": "URL",
    "vast": "Vast.ai",
}  # fmt: skip
_TYPE_TITLES = {
    "string": "Text", "integer": "Whole number", "number": "Number", "boolean": "Yes or no",
    "array": "List", "object": "JSON", "null": "None",
}  # fmt: skip
_SIZE_PATTERN = TypeAdapter(ByteSize).json_schema()["anyOf"][0]["pattern"]
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

JsonSchema = dict[str, Any]


def draw_form(flow: F) -> F:
    """Prepare a flow for the form that the Prefect UI draws of it.

    The flow is called as before. Parameters from a form may hold groups that are empty, and
    the group `advanced`. The description of the flow is its docstring without the parameters.
    """
    signature = inspect.signature(flow.fn, eval_str=True)
    wrapped = [
        one.replace(annotation=Annotated[one.annotation, _FormInput(one.annotation)])
        for one in signature.parameters.values()
    ]
    flow.fn.__signature__ = signature.replace(parameters=wrapped)  # pyright: ignore[reportFunctionMemberAccess] - Prefect validates by it
    drawn = [one.replace(default=_describe_parameter(one)) for one in wrapped]
    flow.__signature__ = signature.replace(parameters=drawn)  # pyright: ignore[reportAttributeAccessIssue] - `prefect deploy` reads it
    flow.description = (inspect.getdoc(flow.fn) or "").partition("\nArgs:")[0].strip()
    return flow


def list_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings models that a type contains, outer models first. Blocks are left out."""
    seen: set[type[BaseModel]] = set()
    waiting = [annotation]
    while waiting:
        one = waiting.pop(0)
        if _is_model(one) and one not in seen:
            seen.add(one)
            yield one
            waiting += [field.annotation for field in one.model_fields.values()]
        waiting += get_args(one)


def make_title(name: str) -> str:
    """Return the name of a setting in words: ``Older than`` for ``older_than``."""
    words = [_WORDS.get(word, word) for word in name.strip("_").split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def make_model_title(name: str) -> str:
    """Return the name of a class in words: ``Ray nodes`` for ``RayNodes``."""
    return make_title(_CAPITAL.sub("_", name).lower())


class _FormInput:
    """Annotation of a parameter that draws the form and reads the input of the form."""

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: _unfold(value, self._annotation), handler(source)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchema:
        drawn = handler(schema)
        models = {model.__name__: model for model in list_models(self._annotation)}
        _Drawing(models, handler.resolve_ref_schema).draw(drawn)
        return drawn


class _Drawing:
    """Change of a JSON schema into one that makes a readable form."""

    def __init__(
        self,
        models: Mapping[str, type[BaseModel]],
        resolve: Callable[[JsonSchema], JsonSchema],
    ) -> None:
        self._models, self._resolve = models, resolve

    def draw(self, schema: JsonSchema) -> None:
        """Change a schema in place, with all schemas that the schema refers to."""
        if "$ref" in schema:
            self._draw_reference(schema)
        if schema.get("format") == "duration":
            del schema["format"]  # a form would take ISO 8601 only, and refuse `20m`
        if "oneOf" in schema:  # the form can only draw the other
            schema["anyOf"] = schema.pop("oneOf")
        for part in ("anyOf", "allOf"):
            for member in schema.get(part, ()):
                self.draw(member)
        if "anyOf" in schema:
            self._title_members(schema)
        if isinstance(schema.get("items"), dict):
            self.draw(schema["items"])
            self._split_list(schema)

    def _draw_reference(self, schema: JsonSchema) -> None:
        target = self._resolve(schema)
        name = target.get("title", "")
        if "block_type_slug" in target:
            # Without the block's own fields, the schema also allows a reference to a saved block.
            for part in ("properties", "required", "description"):
                target.pop(part, None)
            target["title"] = name if " " in name else f"{make_model_title(name)} block"
        elif name in self._models:
            target["title"] = _find_model_title(self._models[name])
            self._draw_model(target, self._models[name])
        elif "enum" in target:
            target.pop("title", None)  # the setting has one
            target.pop("description", None)

    def _draw_model(self, schema: JsonSchema, model: type[BaseModel]) -> None:
        """Order and title the settings of a model, and fold those that are rarely changed."""
        required = schema.get("required", [])
        properties: JsonSchema = schema["properties"]
        hidden: JsonSchema = {}
        for name, drawn in list(properties.items()):
            field = model.model_fields[name]
            if "const" in drawn and name not in required:
                hidden[name] = properties.pop(name)  # there is no other value to choose
                continue
            if drawn.get("title", "") in {"", name.replace("_", " ").title()}:
                drawn["title"] = make_title(name)
            if field.default_factory is None and name not in required:
                drawn["default"] = make_plain(field.default)
            elif field.default_factory in {dict, list, tuple}:
                drawn["default"] = make_plain(field.get_default(call_default_factory=True))
            else:
                drawn.pop("default", None)  # computed where the flow runs
            if field.description:
                # The schema of a nested model has the description of the class instead.
                drawn["description"] = field.description
            self.draw(drawn)
            if _is_group(field):
                _allow_none(drawn)
        ordered = sorted(properties, key=lambda name: name not in required)
        shown = _SHOWN.get(model)
        if shown is not None:
            folded = [name for name in ordered if name not in required and name not in shown]
            hidden |= {name: properties[name] for name in folded}
            ordered = [name for name in ordered if name not in folded]
            properties[ADVANCED] = _make_group({name: properties[name] for name in folded})
            ordered.append(ADVANCED)
        schema["properties"] = _place({name: properties[name] for name in ordered})
        if hidden and schema.get("additionalProperties") is False:
            # A parameter from a command line may hold these settings, which the form does not show.
            schema["patternProperties"] = {f"^{name}$": one for name, one in hidden.items()}
            # The error of `additionalProperties` would list the hidden names only.
            schema["propertyNames"] = {"enum": [*ordered, *hidden]}
            del schema["additionalProperties"]

    def _title_members(self, schema: JsonSchema) -> None:
        """Name the types that a person chooses from."""
        members: list[JsonSchema] = []
        for member in schema["anyOf"]:
            members += member.get("anyOf", [member])
        schema["anyOf"] = members
        slugs = [slug for member in members if (slug := self._find_slug(member))]
        for member in members:
            kind = member.get("type", "")
            if kind == "string" and slugs:
                member["title"] = "Name or URL" if slugs[0] == "millrace-bucket" else "Name"
            elif kind == "string" and member.get("pattern") == _SIZE_PATTERN:
                member["title"] = "Size"
            elif "title" not in member and kind in _TYPE_TITLES:
                member["title"] = _TYPE_TITLES[kind]

    def _split_list(self, schema: JsonSchema) -> None:
        """Change a list of blocks or texts into a choice of two lists, which a form can draw."""
        members = schema["items"].get("anyOf", [])
        texts = [member for member in members if member.get("type") == "string"]
        if len(members) != 2 or len(texts) != 1:
            return
        rest = {key: schema.pop(key) for key in ("type", "items", "minItems") if key in schema}
        (block,) = (member for member in members if member is not texts[0])
        schema["anyOf"] = [
            {**rest, "items": texts[0], "title": "Names or URLs"},
            {**rest, "items": block, "title": "Blocks"},
        ]

    def _find_slug(self, schema: JsonSchema) -> str:
        """Return the type of a block; empty for other types."""
        return self._resolve(schema).get("block_type_slug", "") if "$ref" in schema else ""


def _describe_parameter(parameter: inspect.Parameter) -> FieldInfo:
    """Return the title and the default of a parameter, which Prefect reads from its default."""
    title = {"title": make_title(parameter.name)}
    if parameter.default is parameter.empty:
        return cast("FieldInfo", Field(json_schema_extra=cast("Any", title)))
    default = make_plain(parameter.default)
    return cast("FieldInfo", Field(default=default, json_schema_extra=cast("Any", title)))


def _unfold(value: Any, annotation: Any) -> Any:
    """Return the input of a form in the shape of the type, without empty groups."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _unfold(value, arguments[0])
    if origin in {Union, UnionType}:
        for one in arguments:
            value = _unfold(value, one)
        return value
    if origin in {list, tuple} and isinstance(value, list):
        return [_unfold(one, arguments[0]) for one in cast("list[Any]", value)]
    if _is_model(annotation) and isinstance(value, dict):
        return _unfold_model(cast("dict[str, Any]", value), annotation)
    return value


def _unfold_model(given: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    found = dict(given)
    if model in _SHOWN and isinstance(found.get(ADVANCED, {}), dict | None):
        found = {**(found.pop(ADVANCED, None) or {}), **found}
    for name, field in model.model_fields.items():
        if found.get(name) is None and _is_group(field):
            found.pop(name, None)
        elif name in found:
            found[name] = _unfold(found[name], field.annotation)
    return found


def _find_model_title(model: type[BaseModel]) -> str:
    """Return the class of a model in words."""
    return _MODEL_TITLES.get(model) or make_model_title(model.__name__.removesuffix("Input"))


def _is_model(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and not issubclass(annotation, Block)
    )


def _is_group(field: FieldInfo) -> bool:
    """Return whether a setting is a group of settings that all have defaults."""
    return not field.is_required() and _is_model(field.annotation)


def _allow_none(schema: JsonSchema) -> None:
    """Let a group start empty."""
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"type": "null", "title": "None"}]
    schema["default"] = None


def _make_group(properties: JsonSchema) -> JsonSchema:
    return {
        "title": make_title(ADVANCED),
        "description": "Settings that are rarely changed. Without them, the defaults hold.",
        "anyOf": [
            {
                "type": "object",
                "title": "Settings",
                "properties": _place(properties),
                "additionalProperties": False,
            },
            {"type": "null", "title": "None"},
        ],
        "default": None,
    }


def _place(properties: JsonSchema) -> JsonSchema:
    """Return settings with their positions, since the server may not keep their order."""
    return {
        name: {**one, "position": number} for number, (name, one) in enumerate(properties.items())
    }
