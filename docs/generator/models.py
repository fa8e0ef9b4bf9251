"""Tables of settings models: each model once on a page, in the order of their first use."""

import inspect
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from docs.generator.markdown import escape_text, format_table, make_anchor
from docs.generator.types import describe_field
from docs.generator.values import format_default
from millrace.storage import StoreSpec

HEADER = ("Name", "Type", "Default", "Description")


class ModelTables:
    """Tables of the models of one page.

    Attributes:
        places: Link of each model that has a table on this page or on an earlier one.
    """

    def __init__(self, earlier: Mapping[type[BaseModel], str] | None = None) -> None:
        self.places: dict[type[BaseModel], str] = dict(earlier or {})
        self._waiting: list[type[BaseModel]] = []

    def link(self, model: type[BaseModel]) -> str:
        """Return a link to the table of a model, which is written later if it has none yet."""
        if model not in self.places:
            self.places[model] = f"#{make_anchor(model.__name__)}"
            self._waiting.append(model)
        return f"[{model.__name__}]({self.places[model]})"

    def format_fields(self, model: type[BaseModel]) -> str:
        """Return the table of a model's fields."""
        rows = [
            (
                f"`{field.alias or name}`",
                describe_field(field, self.link),
                format_default(field),
                escape_text(field.description or ""),
            )
            for name, field in model.model_fields.items()
            if not _is_of_store(model, name)
        ]
        return format_table(HEADER, rows)

    def write_model(self, model: type[BaseModel]) -> Iterator[str]:
        """Yield the description of a model, and the table of its fields."""
        yield from describe_model(model)
        if issubclass(model, StoreSpec) and model is not StoreSpec:
            yield f"This section also has the settings of {self.link(StoreSpec)}."
        yield self.format_fields(model)

    def write_waiting(self, heading: str = "###") -> Iterator[str]:
        """Yield the headings, descriptions and tables of the models that were linked to."""
        while self._waiting:
            model = self._waiting.pop(0)
            yield f"{heading} {model.__name__}"
            yield from self.write_model(model)


def _is_of_store(model: type[BaseModel], name: str) -> bool:
    """Return whether a field is one of the settings of a store that a model has beside others."""
    inherited = StoreSpec.model_fields.get(name) if model is not StoreSpec else None
    field = model.model_fields[name]
    return (
        issubclass(model, StoreSpec)
        and inherited is not None
        and (field.description, field.is_required())
        == (inherited.description, inherited.is_required())
    )


def describe_model(model: type[BaseModel]) -> Iterator[str]:
    """Yield the paragraphs of a model's docstring, without its sections."""
    for paragraph in inspect.cleandoc(model.__doc__ or "").split("\n\n"):
        if paragraph.startswith(("Attributes:", "Example:")):
            return
        yield escape_text(paragraph)
