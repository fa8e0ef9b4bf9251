"""Translate settings files of Train Data Bridge into settings of a dataset.

Such a file has the sections ``vast``, ``r2`` and ``pipeline``. Variables ``${NAME}`` stay as they
are. Secrets become variables of ``.env.example``, whether the file has them or names variables.
"""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from millrace import errors
from millrace.datasets import PipelineSettings
from millrace.formatting import clean_text
from millrace.keys.names import check_name
from millrace.rented_sharding import VastFileSettings
from millrace.settings import fill_variables, parse_settings_file, validate_settings

_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_UNKNOWN_VARIABLE = re.compile(r"\$\$\{|\$\{(?![A-Za-z_][A-Za-z0-9_]*\})")
_REPO = re.compile(r"hf://(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+)/?")
_PART = re.compile(r"[\w.-]+")  # config or split of a dataset of the Hub
_PACKED = (".bz2", ".xz", ".7z")  # read by the library of Train Data Bridge, and not by Millrace
_CHOOSES_ROWS = {"data_dir", "data_files", "name", "revision"}  # arguments of `load_dataset`

_Text = str | None
_Number = int | float | str | None  # a text is a variable


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    def list_unknown(self) -> list[str]:
        """Return the names of settings that Train Data Bridge does not have."""
        return sorted(clean_text(str(name), 100) for name in self.model_extra or {})


class _Vast(_Section):
    api_key: SecretStr | None = None
    offer_id: Any = None
    image: _Text = None
    storage_gb: _Number = None
    max_price_usd_hour: _Number = None
    repo_url: _Text = None
    repo_ref: _Text = None
    workdir: Any = None


class _R2(_Section):
    account_id: str
    access_key_id: SecretStr
    secret_access_key: SecretStr
    bucket: str
    region: Any = None
    prefix: str = "datasets"


class _Pipeline(_Section):
    name: Literal["webdataset", "litdata"]
    input_uri: str
    input_format: Literal["jsonl", "huggingface"] = "jsonl"
    samples_per_shard: int | str | None = None
    shards: int | str | None = None
    staging_dir: Any = None
    output_format: Any = None
    source_options: dict[str, Any] = Field(default={}, repr=False)


class _Bridge(_Section):
    vast: _Vast = _Vast()
    r2: _R2
    pipeline: _Pipeline


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Setting that was left out.

    Attributes:
        name: Name of the setting in the file, such as ``pipeline.staging_dir``.
        reason: Sentence about the reason.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImportedSettings:
    """Settings of a dataset that were translated.

    Attributes:
        settings: Settings by their names, with variables.
        variables: Names of the variables, which must be set before a run.
        left_out: Settings that were left out.
        notes: Sentences about settings that mean something else now.
    """

    settings: Mapping[str, Any]
    variables: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    def make_yaml(self) -> str:
        """Return a settings file, with a comment for each setting that was left out."""
        comments = [
            f"Set these variables: {', '.join(self.variables)}.",
            *self.notes,
            *(f"Left out: {one.name}. {one.reason}" for one in self.left_out),
        ]
        body = yaml.safe_dump(
            dict(self.settings), sort_keys=False, allow_unicode=True, width=1 << 16
        )
        return "".join(f"# {comment}\n" for comment in comments) + body


def import_bridge_settings(path: Path, *, dataset: str | None = None) -> ImportedSettings:
    """Translate a settings file of Train Data Bridge. Nothing is sent.

    Args:
        path: Path of the file: YAML or TOML.
        dataset: Name of the dataset; by default the name of the pipeline.

    Raises:
        ConfigurationError: The file cannot be read, or has a setting without an equivalent. The
            message says what to write. The message contains no secret.
    """
    data, _ = parse_settings_file(path, template="train-data-bridge init")
    _lower_choices(data)
    old = validate_settings(_Bridge, data, source=str(path))
    translation = _Translation(str(path), old)
    settings = translation.translate(dataset)
    _, variables = fill_variables(settings, {})
    filled, _ = fill_variables(settings, dict.fromkeys(variables, "1"))  # any value fits all
    validate_settings(PipelineSettings, filled, source=f"{path}, translated")
    if "vast" in settings:
        validate_settings(VastFileSettings, {"vast": filled["vast"]}, source=f"{path}, translated")
    return ImportedSettings(
        settings, tuple(variables), tuple(translation.left_out), tuple(translation.notes)
    )


def _lower_choices(data: dict[str, Any]) -> None:
    """Write the choices of a pipeline in lower case, as Train Data Bridge reads them."""
    pipeline = data.get("pipeline")
    if isinstance(pipeline, dict):
        for name in ("name", "input_format"):
            if isinstance(value := pipeline.get(name), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                pipeline[name] = value.lower()


class _Translation:
    """Translation of a settings file, section by section.

    Attributes:
        left_out: Settings that were left out.
        notes: Sentences about settings that mean something else now.
    """

    def __init__(self, path: str, old: _Bridge) -> None:
        self._path, self._old = path, old
        self.left_out: list[LeftOut] = []
        self.notes: list[str] = []

    def translate(self, dataset: str | None) -> dict[str, Any]:
        """Return the settings of the dataset."""
        pipeline, r2 = self._old.pipeline, self._old.r2
        given = (pipeline.samples_per_shard, pipeline.shards, 2048)
        samples = next(one for one in given if one is not None)
        prefix = "/".join(part for part in r2.prefix.split("/") if part)
        url = "/".join(part for part in ("r2:/", r2.account_id, r2.bucket, prefix) if part)
        values = {name: getattr(r2, name) for name in ("account_id", "bucket", "prefix")}
        self._check_variables("r2", values)
        self._check_variables("pipeline", {"samples_per_shard": samples})
        settings: dict[str, Any] = {
            "dataset": check_name(dataset or pipeline.name, what="The dataset's name"),
            "source": self._translate_source(),
            "store": {
                "url": url,
                "credentials": {
                    "access_key_id": "${R2_DATASET_WRITE_ACCESS_KEY_ID}",
                    "secret_access_key": "${R2_DATASET_WRITE_SECRET_ACCESS_KEY}",
                },
            },
            # Train Data Bridge keeps the order of the source.
            "sharding": {"formats": [pipeline.name], "shard_samples": samples, "seed": None},
        }
        if not dataset:
            self.notes.append(
                f"The dataset has the name of the pipeline. Its objects are below "
                f"{url}/{pipeline.name}/, and a later run continues it. Choose another name for "
                "other data."
            )
        if self._old.vast.repo_url:
            settings["vast"] = self._translate_vast(self._old.vast, self._old.vast.repo_url)
        elif "vast" in self._old.model_fields_set:
            self._leave_out("vast", "Machines are rented only if `repo_url` is set.")
        self._leave_out_rest()
        return settings

    def _translate_source(self) -> dict[str, Any]:
        pipeline = self._old.pipeline
        self._check_variables("pipeline", {"input_uri": pipeline.input_uri})
        self.notes.append(
            "Each row is kept whole as the field `json`. Train Data Bridge made a field of each "
            "column: for that, name them in `columns` of the source, such as {txt: text}."
        )
        if pipeline.input_format == "huggingface":
            return self._translate_hub(pipeline)
        for name in pipeline.source_options:
            self._leave_out(
                f"pipeline.source_options.{clean_text(str(name), 100)}",
                "Write credentials and other options into `source`.",
            )
        return {**self._locate_lines(pipeline.input_uri), "kind": "jsonl"}

    def _locate_lines(self, uri: str) -> dict[str, Any]:
        """Return the location of a file of JSON lines."""
        parts = urlsplit(uri)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise self._refuse(
                "input_uri",
                "has credentials or a query in it. Write `source: {url: ...}` without them, and "
                "`credentials` or `options` beside `url`.",
            )
        if uri.endswith(_PACKED):
            raise self._refuse(
                "input_uri",
                "is a compressed file that Millrace does not read. Write `source: {url: ...}` of a "
                "file in .gz or .zst, or of one that is not compressed.",
            )
        folder, _, name = uri.rpartition("/")
        match parts.scheme:
            case "http" | "https":
                return {"url": uri}
            case "s3" | "gs" if parts.path.strip("/") and name:
                return {"url": folder, "include": [glob.escape(name)]}
            case "file" | "" if name or "/" not in uri:
                # A relative path is allowed, also after file://.
                path = Path(uri.removeprefix("file://")).expanduser()
                if not str(path).startswith("${"):
                    path = path.absolute()
                if _VARIABLE.fullmatch(path.name):
                    raise self._refuse(
                        "input_uri",
                        "ends in a variable. Write `source: {url: FOLDER, include: [FILE]}`.",
                    )
                location = str(path.parent)
                url = location if "${" in location else path.parent.as_uri()
                return {"url": url, "include": [glob.escape(path.name)]}
            case "r2":
                line = "source: {url: r2://ACCOUNT/BUCKET/PREFIX, include: [FILE]}"
            case _:
                line = "source: {url: s3://BUCKET/PREFIX, include: [FILE]}"
        raise self._refuse(
            "input_uri",
            f"names no file of a kind that is read. Copy it to a bucket, and write `{line}`.",
        )

    def _translate_hub(self, pipeline: _Pipeline) -> dict[str, Any]:
        """Return the location of a dataset of the Hub, with its configuration and split."""
        options = dict(pipeline.source_options)
        config, split = options.pop("config", None), options.pop("split", None) or "train"
        given: object = options.pop("load_kwargs", None) or {}
        found = _REPO.fullmatch(pipeline.input_uri) or _REPO.fullmatch(f"hf://{pipeline.input_uri}")
        line = "Write `source: {url: hf://datasets/OWNER/NAME, kind: huggingface}`."
        if found is None:
            raise self._refuse("input_uri", f"names no dataset as OWNER/NAME. {line}")
        source = {"url": f"hf://datasets/{found['repo']}", "kind": "huggingface"}
        for name, value in (("config", config), ("split", split)):
            if value is None:
                continue
            if not isinstance(value, str) or not _PART.fullmatch(value):
                raise self._refuse(f"source_options.{name}", f"is not a name. {line}")
            source[name] = value
        if not isinstance(given, dict):
            raise self._refuse("source_options.load_kwargs", f"is no mapping. {line}")
        arguments = cast("dict[str, Any]", given)
        if chosen := sorted(_CHOOSES_ROWS.intersection(arguments)):
            raise self._refuse(
                f"source_options.load_kwargs.{chosen[0]}", f"chooses other rows. {line}"
            )
        located: dict[str, Any] = {**source}
        if "token" in arguments:
            located["options"] = {"token": "${HF_TOKEN}"}
        for name in [*arguments, *options]:
            if name != "token":
                self._leave_out(
                    f"pipeline.source_options.{clean_text(str(name), 100)}",
                    "Write arguments of the library `datasets` into `load_kwargs` of the source.",
                )
        return located

    def _translate_vast(self, vast: _Vast, repo_url: str) -> dict[str, Any]:
        parts = urlsplit(repo_url)
        if "@" in parts.netloc or parts.query:
            raise errors.ConfigurationError(
                f"{self._path}: vast.repo_url has credentials or a query in it, and machines clone "
                "public repositories. Write `vast: {repo_url: https://HOST/REPOSITORY}`."
            )
        hourly = 2.5 if vast.max_price_usd_hour is None else vast.max_price_usd_hour
        code = {"repo_url": repo_url, "repo_ref": vast.repo_ref, "image": vast.image}
        numbers = {"storage_gb": vast.storage_gb, "max_price_usd_hour": hourly}
        self._check_variables("vast", {**code, **numbers})
        self.notes.append(
            "`vast.request.max_total` is new: all machines are released when they have cost as "
            "much. It allows one hour. Raise it."
        )
        self.notes.append(
            "`vast.repo_url` must contain or require Millrace, and the machines must be able to "
            "read the source: not a folder of this machine."
        )
        return {
            "account": {"api_key": "${VAST_API_KEY}"},
            "request": {
                "disk": f"{50 if vast.storage_gb is None else vast.storage_gb}GB",
                "max_hourly": hourly,
                "max_total": hourly,
            },
            **{name: value for name, value in code.items() if value is not None},
        }

    def _leave_out_rest(self) -> None:
        old = self._old
        reasons = {
            "vast.offer_id": "Offers are searched at each run, by `vast.request`. To rent one "
            "offer, write its present number into `vast.request.offer_id`.",
            "vast.workdir": "A machine has a folder of its own. `vast.workdir` names another.",
            "r2.region": "R2 needs none.",
            "pipeline.staging_dir": "Shards are made in memory, and the state is in the bucket.",
            "pipeline.output_format": "It had no effect.",
        }
        for name, reason in reasons.items():
            section, _, field = name.partition(".")
            if field in getattr(old, section).model_fields_set and (
                section != "vast" or old.vast.repo_url
            ):
                self._leave_out(name, reason)
        for section, model in (("", old), ("vast.", old.vast), ("r2.", old.r2),
                               ("pipeline.", old.pipeline)):  # fmt: skip
            for name in model.list_unknown():
                self._leave_out(f"{section}{name}", "Train Data Bridge has no such setting.")

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(LeftOut(name, reason))

    def _check_variables(self, section: str, values: Mapping[str, Any]) -> None:
        """Refuse variables that the settings of Millrace read in another way."""
        for name, value in values.items():
            if isinstance(value, str) and _UNKNOWN_VARIABLE.search(value):
                raise errors.ConfigurationError(
                    f"{self._path}: {section}.{name} has a variable of another form than "
                    "${NAME}. Write ${NAME}, of letters, digits and '_', without a digit first."
                )

    def _refuse(self, name: str, reason: str) -> errors.ConfigurationError:
        return errors.ConfigurationError(f"{self._path}: pipeline.{name} {reason}")
