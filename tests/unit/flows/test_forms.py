"""Forms of the deployments: titles, order, defaults, examples, and how their input is read."""

import inspect
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any

import pytest
import yaml
from prefect import Flow
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_docstrings, parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError as PrefectValidationError
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel, TypeAdapter, ValidationError

from flows.aggregate_gradients import aggregate_gradients
from flows.clean_bucket import clean_bucket
from flows.prewarm import FilesRequest, prewarm
from flows.rent_machines import rent_machines
from flows.save_checkpoint import CheckpointInput
from flows.shard_dataset import shard_dataset
from millrace.cleanup import CleanupKind, Rule
from millrace.gradients import RunSettings
from millrace.rentals import MachineSettings, OfferRequest
from millrace.swarm import LimitSettings
from millrace.testing.process import REPOSITORY
from tasks.forms import ADVANCED, list_models
from tasks.locations import InputLocation, SourceInput, WeightsInput

DEPLOYMENTS = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
FLOWS: dict[str, "Flow[..., Any]"] = {
    one["name"]: getattr(import_module(module), name)
    for one in DEPLOYMENTS
    for module, _, name in [one["entrypoint"].rpartition(".")]
}
every_form = pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
EXAMPLES = re.compile(r"such as ((?:`[^`]+`(?:, | or |, or )?)+)")


@lru_cache  # no test changes a schema
def schema_of(flow: "Flow[..., Any]") -> dict[str, Any]:
    return parameter_schema(flow).model_dump_for_openapi()


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a schema that has settings."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        for part in schema.values():
            yield from objects_in(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects_in(part)


@every_form
def test_titles_are_words(flow: "Flow[..., Any]") -> None:
    schema = schema_of(flow)
    classes = {
        model.__name__
        for one in inspect.signature(flow.fn).parameters.values()
        for model in list_models(one.annotation)
    }
    blocks = [one for one in schema["definitions"].values() if "block_type_slug" in one]
    titles = [one["title"] for one in blocks]
    for part in objects_in(schema):
        titles.append(part["title"])
        titles += [member["title"] for member in part["properties"].values() if "title" in member]
    compound = {name for name in classes if re.search(r"[a-z][A-Z]", name)}  # not Host, Rule
    assert [title for title in titles if title in compound] == []
    assert [title for title in titles if "_" in title or re.search(r"[a-z][A-Z]", title)] == []
    choices = re.findall(r'"title": "([^"]+)"', json.dumps(schema))
    assert {"str", "int", "dict", "list", "float"}.isdisjoint(choices)


@every_form
def test_every_setting_is_described_and_the_required_come_first(flow: "Flow[..., Any]") -> None:
    for part in objects_in(schema_of(flow)):
        drawn = sorted(part["properties"].items(), key=lambda item: item[1]["position"])
        assert [name for name, one in drawn if not one.get("description")] == []
        required = [name in part.get("required", []) for name, _ in drawn]
        assert required == sorted(required, reverse=True)


@every_form
def test_groups_start_empty_and_durations_are_text(flow: "Flow[..., Any]") -> None:
    for part in objects_in(schema_of(flow)):
        for name, one in part["properties"].items():
            default = one.get("default")
            is_choice = name in {"cluster", "machines"}  # between classes: one is chosen at first
            assert not isinstance(default, dict) or is_choice or not default, name
            assert not re.match(r"P(T?\d)", str(default)), name


@every_form
def test_the_description_of_a_deployment_has_no_list_of_parameters(
    flow: "Flow[..., Any]",
) -> None:
    assert flow.description
    assert "Args:" not in flow.description


def test_no_default_is_of_the_machine_that_deploys() -> None:
    execution = schema_of(shard_dataset)["definitions"]["ExecutionSettings"]
    assert execution["properties"]["workers"].get("default") is None


def described() -> Iterator[tuple[str, Any, str]]:
    """Every setting and parameter of the forms: its place, its type, its description."""
    for name, flow in FLOWS.items():
        texts = parameter_docstrings(inspect.getdoc(flow.fn))
        for one in inspect.signature(flow.fn, eval_str=True).parameters.values():
            yield f"{name}.{one.name}", one.annotation, texts[one.name]
            for model in list_models(one.annotation):
                for key, field in model.model_fields.items():
                    place = f"{model.__name__}.{key}"
                    yield place, model_field(model, key), field.description or ""


def model_field(model: type[BaseModel], key: str) -> Any:
    """The type of a setting with its limits."""
    field = model.model_fields[key]
    annotation: Any = field.annotation
    for one in field.metadata:
        annotation = Annotated[annotation, one]
    return annotation


def examples() -> dict[tuple[str, str], Any]:
    return {
        (place, example): annotation
        for place, annotation, text in described()
        for found in EXAMPLES.findall(" ".join(text.split()))
        for example in re.findall(r"`([^`]+)`", found)
    }


def is_accepted(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def test_every_example_is_accepted_when_it_is_pasted() -> None:
    """Try each example as text, as JSON, and as an item of a list."""
    found = examples()
    assert len(found) > 12
    refused: list[tuple[str, str]] = []
    for (place, example), annotation in found.items():
        values: list[Any] = [example, [example]]
        if example[0] in "{[":
            values = [json.loads(example)]
        if not any(is_accepted(annotation, value) for value in values):
            refused.append((place, example))
    assert refused == []


def test_an_example_that_is_no_json_is_refused() -> None:
    assert not is_accepted(model_field(Rule, "older_than"), "2 fortnights")
    with pytest.raises(json.JSONDecodeError):
        json.loads("{txt: text}")


RENTED = {
    "name": "fleet",
    "bucket": "dataset",
    "vast": "vast",
}
PROGRAM = {"repo_url": "https://example.org/x", "command": ["true"]}


def read_rent_settings(request: dict[str, Any], **others: object) -> MachineSettings:
    """Read the settings of a rental as the form sends them."""
    settings = {"program": PROGRAM, "request": request, **others}
    return rent_machines.validate_parameters({**RENTED, "settings": settings})["settings"]


def test_the_input_of_a_form_is_read_as_the_settings_themselves() -> None:
    price = {"max_hourly": 1.0, "max_total": 5.0}
    empty = read_rent_settings({**price, "gpu": "", "advanced": None}, timeouts=None)
    assert empty.request == OfferRequest(**price)
    assert empty.timeouts.max_attempts == 5
    drawn = {"disk": "80GB", "max_lifetime": "2h", "regions": ["DE"]}
    given = read_rent_settings({**price, "advanced": drawn})
    flat = read_rent_settings({**price, **drawn})
    assert given.request == flat.request == OfferRequest(**price, **drawn)


def test_nested_groups_may_be_empty() -> None:
    run = {"run": "r", "advanced": {"gather": None, "codec": {"k": 32}, "merge": None}}
    given = aggregate_gradients.validate_parameters({"bucket": "a", "run": run, "workers": ["w"]})
    assert given["run"] == RunSettings.model_validate({"run": "r", "codec": {"k": 32}})
    files = [{"url": "file:///x"}]
    warm = {"files": files, "root": "/x", "options": {"limits": None}}
    assert prewarm.validate_parameters(warm)["options"].limits == LimitSettings()


def test_items_of_a_list_are_read_likewise() -> None:
    rules = [{"kinds": ["gradients"], "advanced": {"keep_last": 2}}, {"kinds": ["junk"]}]
    given = clean_bucket.validate_parameters({"bucket": "gradients", "rules": rules})
    assert given["rules"] == [
        Rule(kinds=(CleanupKind.GRADIENTS,), keep_last=2),
        Rule(kinds=(CleanupKind.JUNK,)),
    ]


def test_what_no_setting_takes_is_still_refused() -> None:
    source = {"url": "file:///x", "exclude": None}
    with pytest.raises(Exception, match="exclude"):
        shard_dataset.validate_parameters({"dataset": "d", "source": source, "destination": "/x"})


def test_the_error_of_a_mistyped_setting_has_the_names_that_the_form_shows() -> None:
    schema = schema_of(shard_dataset)
    given = {"dataset": "d", "source": {"url": "/x", "mirrors": []}, "destination": "/z"}
    validate(given, schema, raise_on_error=True)
    given["source"] = {"url": "/x", "colums": {"txt": "text"}}
    with pytest.raises(PrefectValidationError, match=r"'colums' is not one of .*'columns'") as said:
        validate(given, schema, raise_on_error=True)
    assert "'mirrors'" in str(said.value)  # which a command line may set


def test_an_empty_text_of_a_form_is_no_value() -> None:
    names = ("key", "dataset", "checkpoint", "destination", "into", "sha256")
    empty = FilesRequest.model_validate({"url": "/x", **dict.fromkeys(names, "")})
    assert empty == FilesRequest(url="/x")
    with pytest.raises(ValidationError, match="job"):
        CheckpointInput(url="/x", job="")


@pytest.mark.parametrize(
    "model", [InputLocation, FilesRequest, SourceInput, WeightsInput, CheckpointInput]
)
def test_an_emptied_url_leaves_the_choice_to_the_bucket(model: type[InputLocation]) -> None:
    given = {"job": "my-job"} if model is CheckpointInput else {}
    assert model.model_validate({**given, "url": "", "bucket": "dataset"}).location == "dataset"
    assert model.model_validate({**given, "url": "/x", "bucket": ""}).location == "/x"
    with pytest.raises(ValidationError, match="name either a url or a bucket"):
        model.model_validate({**given, "url": "", "bucket": ""})


def test_mirrors_of_a_source_are_folded_and_read_from_there() -> None:
    source = schema_of(shard_dataset)["definitions"]["SourceInput"]["properties"]
    assert "mirrors" not in source
    folded = source[ADVANCED]["anyOf"][0]["properties"]
    assert folded["mirrors"]["items"]
    mirrors = [{"url": "/y"}, {"bucket": "words", "prefix": "text"}]
    given = {"url": "/x", "advanced": {"mirrors": mirrors}}
    parameters = {"dataset": "d", "source": given, "destination": "/z"}
    found = shard_dataset.validate_parameters(parameters)["source"]
    assert [(one.url, one.bucket, one.prefix) for one in found.mirrors] == [
        ("/y", None, ""),
        (None, "words", "text"),
    ]
    of_folders = SourceInput.model_validate({"url": "/x", "mirrors": mirrors[:1]}).make_source()
    assert [spec.url for spec in of_folders.list_locations()] == ["file:///x", "file:///y"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"url": "hf://datasets/a/b", "kind": "huggingface"}, "not for the kind `huggingface`"),
        ({"url": "https://host/folder"}, "write the URL of the folder of a web server into `url`"),
    ],
)
def test_mirrors_that_a_source_cannot_have_are_refused_in_the_form(
    source: dict[str, Any], said: str
) -> None:
    parameters = {"dataset": "d", "source": {**source, "mirrors": [{"url": "/y"}]}}
    with pytest.raises(ParameterTypeError, match=said):
        shard_dataset.validate_parameters({**parameters, "destination": "/z"})
