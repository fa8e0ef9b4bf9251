"""Describe transforms for the plan of a dataset, and open the transforms that a plan describes.

The plan has the digest of every function and tokenizer. The bytes of files are objects of the
dataset, so a worker on another machine runs the same bytes. Code is run only if its digest comes
from the settings or from a file of this machine, never because an object of the dataset has it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

from millrace import errors
from millrace.datasets.field_names import TOKENS
from millrace.datasets.sources import (
    DownloadSettings,
    SourceFiles,
    SourceKind,
    is_store_url,
    open_files,
    open_source,
)
from millrace.datasets.sources.files import Patterns
from millrace.datasets.sources.table import unpack_row
from millrace.datasets.transforms.base import Packing, SampleTransform
from millrace.datasets.transforms.fields import NO_TYPES
from millrace.datasets.transforms.function import (
    FunctionTransform,
    load_from_bytes,
    load_installed,
)
from millrace.datasets.transforms.imports import (
    check_imports,
    digest_file_imports,
    digest_package_imports,
)
from millrace.datasets.transforms.join import JoinTransform
from millrace.datasets.transforms.json_check import JsonCheck
from millrace.datasets.transforms.rename import RenameTransform
from millrace.datasets.transforms.settings import (
    FilterSettings,
    FunctionSettings,
    JoinSettings,
    RenameSettings,
    TokenizeSettings,
    TransformSettings,
)
from millrace.datasets.transforms.source import TransformChain, TransformedSource
from millrace.digest import compute_digest
from millrace.extras import import_extra_module
from millrace.keys.datasets import DatasetKeys
from millrace.records import JsonObject
from millrace.schemas.dataset import SourceRecord
from millrace.storage import Store, StoreSpec, create, open_store, read

_VERSION = "4"  # changes whenever the code of this package makes other samples of the same rows
_MAX_CODE_BYTES = 4 << 20
_MAX_DATA_BYTES = 128 << 20  # of a tokenizer or a table
_MAX_SENT_BYTES = 1 << 20  # of a file that is sent to another machine with its settings
_MAX_KEPT = 4  # tokenizers and tables that a process keeps
_TABLE_KINDS = {
    SourceKind.JSONL, SourceKind.CSV, SourceKind.PARQUET, SourceKind.HUGGINGFACE
}  # fmt: skip
_kept: dict[str, bytes] = {}  # verified tokenizers and tables, by their digests


@dataclass(frozen=True, slots=True)
class RecordedTransforms:
    """Transforms as the plan of a dataset has them.

    Attributes:
        record: Description of the transforms; empty without transforms. Equal descriptions make
            equal samples.
        objects: Objects that must be stored before the plan, by their keys.
    """

    record: JsonObject
    objects: Mapping[str, bytes]


def record_transforms(
    settings: Sequence[TransformSettings],
    keys: DatasetKeys,
    *,
    seed: int | None,
    dataset_store: Store | None = None,
    allow_private: bool = False,
) -> RecordedTransforms:
    """Read the functions, tokenizers and tables of transforms, check them, and describe them.

    Args:
        settings: Settings of the transforms.
        keys: Names of the dataset.
        seed: Seed of the dataset.
        dataset_store: Store of the dataset, where files are found whose digests the settings name.
            None reads no such files.
        allow_private: Whether a tokenizer may be read from a web server in a private network.

    Raises:
        ConfigurationError: A file is not of the digest that the settings name, or a function or a
            tokenizer cannot be used. The message says which.
        NotFoundError: A file is not there.
    """
    if not settings:
        return RecordedTransforms({}, {})
    reader = _FileReader(keys, dataset_store, allow_private=allow_private)
    steps = [_describe_step(step, reader) for step in settings]
    record = {"version": _VERSION, "seed": seed, "steps": steps}
    _open_chain(record, reader.objects.__getitem__, NO_TYPES)  # checks functions and tokenizers
    return RecordedTransforms(record, reader.objects)


def bundle_files(
    settings: Sequence[TransformSettings], *, allow_private: bool = False
) -> tuple[list[TransformSettings], dict[str, str]]:
    """Read the files of transforms for another machine.

    The machine takes a file from the dataset that is no text of up to 1 MiB: `store_large_files`
    stores it there. So it does with a tokenizer or a table that is not on this machine, if the
    settings have its digest.

    Args:
        settings: Settings of the transforms.
        allow_private: Whether a file may be read from a web server in a private network.

    Returns:
        The settings with relative paths and the digests of the files; and the texts by path.

    Raises:
        ConfigurationError: A file is too large, has another digest than the settings name, or
            imports a module beside it.
        NotFoundError: A file is not there.
    """
    steps: list[TransformSettings] = []
    texts: dict[str, str] = {}
    for number, step in enumerate(settings):
        file = _find_file(step)
        if file is None:
            steps.append(step)
            continue
        path = f"transforms/{number}.{file.extension}"
        body = _read_file(file, allow_private=allow_private)
        if body is not None:
            if isinstance(step, FunctionSettings):
                _refuse_imports(file.location, body)
            if _is_sent(body):
                texts[path] = body.decode()
        digest = file.digest if body is None else compute_digest(body)
        update = {file.setting: f"./{path}{file.suffix}", "digest": digest}
        steps.append(step.model_copy(update=update))
    return steps, texts


def store_large_files(
    store: Store,
    keys: DatasetKeys,
    settings: Sequence[TransformSettings],
    *,
    allow_private: bool = False,
) -> None:
    """Store the files of transforms in the dataset that `bundle_files` does not return as texts.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        settings: Settings of the transforms.
        allow_private: Whether a file may be read from a web server in a private network.

    Raises:
        ConfigurationError: A file is too large, or has another digest than the settings name.
        NotFoundError: A file is not there.
    """
    for file in filter(None, map(_find_file, settings)):
        body = _read_file(file, allow_private=allow_private)
        if body is not None and not _is_sent(body):
            # The key contains the digest of the object, and every reader checks the digest.
            with suppress(errors.ExistsError):
                create(store, keys.make_transform_key(compute_digest(body), file.extension), body)


class _StepFile(NamedTuple):
    """File of a transform.

    Attributes:
        setting: Name of the setting that names the file.
        location: Path or URL of the file.
        suffix: Text after the location in the setting.
        digest: Digest that the file must have; None accepts any file.
        extension: Extension of the file in the dataset.
        max_size: Largest size in bytes.
    """

    setting: str
    location: str
    suffix: str
    digest: str | None
    extension: str
    max_size: int


def _find_file(step: TransformSettings) -> _StepFile | None:
    """Return the file of a transform; None if it has none."""
    match step:
        case FunctionSettings(file=str(location)):
            return _StepFile(
                "function", location, f":{step.name}", step.digest, "py", _MAX_CODE_BYTES
            )
        case TokenizeSettings(tokenizer=location):
            return _StepFile("tokenizer", location, "", step.digest, "json", _MAX_DATA_BYTES)
        case JoinSettings(table=location):
            return _StepFile("table", location, "", step.digest, step.extension, _MAX_DATA_BYTES)
        case _:
            return None


def _read_file(file: _StepFile, *, allow_private: bool) -> bytes | None:
    """Return the bytes of a file; None if the dataset may have a file that is not there.

    The modules that code imports are beside its file only, so code must be there.
    """
    try:
        body = _read_location(file.location, file.max_size, allow_private=allow_private)
    except errors.NotFoundError:
        if file.digest is None or file.setting == "function":
            raise
        return None
    _check_digest(file.location, compute_digest(body), file.digest)
    return body


def _is_sent(body: bytes) -> bool:
    """Decide whether a file is sent to another machine with its settings, as a text."""
    if len(body) > _MAX_SENT_BYTES:
        return False
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse_imports(location: str, code: bytes) -> None:
    """Refuse code that imports modules from its folder, which another machine does not have.

    Raises:
        ConfigurationError: The code imports such modules.
    """
    if "://" in location:
        return
    if found := digest_file_imports(code, Path(location).parent):
        raise errors.ConfigurationError(
            f"{location} imports {', '.join(sorted(found)[:3])} from its folder, and other "
            "machines get the file alone: write all code into the file, or install the modules "
            "there as a package."
        )


def read_tokenizer(
    location: str, *, digest: str | None = None, allow_private: bool = False
) -> bytes:
    """Return the bytes of a ``tokenizer.json``.

    Args:
        location: Path, or URL of a store or of a web server.
        digest: Digest that the file must have; None accepts any file.
        allow_private: Whether a web server may be in a private network.

    Raises:
        ConfigurationError: The file has another digest, or is too large.
        NotFoundError: There is no such file.
    """
    body = _read_location(location, _MAX_DATA_BYTES, allow_private=allow_private)
    _check_digest(location, compute_digest(body), digest)
    return body


def open_transforms(
    record: JsonObject, dataset_store: Store, types: Mapping[str, str] = NO_TYPES
) -> TransformChain:
    """Return the transforms that a plan describes, with the bytes that the dataset has.

    Args:
        record: Description of the transforms; empty without transforms.
        dataset_store: Store of the dataset.
        types: Declared types of the fields after the transforms, by their names.

    Raises:
        ConfigurationError: A function or a library of this machine is not that of the plan.
        CorruptError: An object of the dataset does not have the digest of the plan.
        NotFoundError: An object of the dataset is gone.
    """

    def read_object(key: str) -> bytes:
        return read(dataset_store, key, max_size=_MAX_DATA_BYTES)

    return _open_chain(record, read_object, types)


def list_transform_changes(committed: JsonObject, proposed: JsonObject) -> list[str]:
    """Return how a description differs from the one in a plan: a short text for each difference."""
    changes = [
        f"transforms.{name} ({committed.get(name)}, now {proposed.get(name)})"
        for name in ("version", "seed")
        if committed and proposed and committed.get(name) != proposed.get(name)
    ]
    before, after = committed.get("steps", []), proposed.get("steps", [])
    if [step["kind"] for step in before] != [step["kind"] for step in after]:
        kinds = (", ".join(step["kind"] for step in steps) or "none" for steps in (before, after))
        return [*changes, "transforms ({}, now {})".format(*kinds)]
    for number, steps in enumerate(zip(before, after, strict=True)):
        old, new = map(_flatten_step, steps)
        changes += [
            f"transforms.{number}.{name} ({old.get(name)}, now {new.get(name)})"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return changes


def _flatten_step(step: JsonObject) -> JsonObject:
    """Return the values of a step that decide its samples, with a name for each module."""
    modules = {f"modules.{name}": digest for name, digest in step.get("modules", {}).items()}
    return {n: value for n, value in step.items() if n not in {"object", "modules"}} | modules


class _FileReader:
    """Reads the files that settings name, and collects them as objects of the dataset."""

    def __init__(
        self, keys: DatasetKeys, dataset_store: Store | None, *, allow_private: bool
    ) -> None:
        self._keys, self._store, self._allow_private = keys, dataset_store, allow_private
        self.objects: dict[str, bytes] = {}

    def read(
        self, location: str, digest: str | None, extension: str, max_size: int
    ) -> dict[str, str]:
        """Read a file, and return its digest and its key as a part of a description."""
        body = self._find_stored(digest, extension, max_size)
        if body is None:
            body = _read_location(location, max_size, allow_private=self._allow_private)
        found = compute_digest(body)
        _check_digest(location, found, digest)
        key = self._keys.make_transform_key(found, extension)
        self.objects[key] = body
        return {"digest": found, "object": key}

    def _find_stored(self, digest: str | None, extension: str, max_size: int) -> bytes | None:
        if digest is None or self._store is None:
            return None
        try:
            body = read(
                self._store, self._keys.make_transform_key(digest, extension), max_size=max_size
            )
        except errors.NotFoundError:
            return None
        return body if compute_digest(body) == digest else None


def _read_location(location: str, max_size: int, *, allow_private: bool) -> bytes:
    """Return the bytes of a file of this machine, of a web server or of a store."""
    if "://" not in location:
        return _read_path(Path(location), max_size)
    if is_store_url(location):
        folder, _, name = location.rpartition("/")
        store = open_store(StoreSpec(url=folder), make_folder=False)
        return read(store, unquote(name), max_size=max_size)
    files = open_files(StoreSpec(url=location), allow_private=allow_private)
    rows = files.collect(Patterns()).rows
    if len(rows) != 1:
        raise errors.ConfigurationError(f"{location} is not the URL of one file: correct it.")
    file = unpack_row(rows[0])
    _check_size(location, file.size, max_size)
    return files.read(file)


def _read_path(path: Path, max_size: int) -> bytes:
    try:
        _check_size(str(path), path.stat().st_size, max_size)
        return path.read_bytes()
    except OSError as error:
        raise errors.NotFoundError(
            f"{path} cannot be read: {error.strerror}. Correct the path, which is relative to the "
            "working directory, or set `digest` to take the file from the dataset."
        ) from error


def _check_size(location: str, size: int, max_size: int) -> None:
    if size > max_size:
        raise errors.ConfigurationError(
            f"{location} has {size:,} bytes, more than the {max_size:,} that are allowed: name "
            "another file."
        )


def _check_digest(where: str, found: str, expected: str | None) -> None:
    """Check that code or a tokenizer has the digest that settings or a plan name.

    Raises:
        ConfigurationError: The digests differ.
    """
    if expected not in {None, found}:
        raise errors.ConfigurationError(
            f"{where} has the digest {found} here, and not {expected}: take the version with that "
            "digest, or shard the source under another dataset name."
        )


def _describe_step(step: TransformSettings, reader: _FileReader) -> JsonObject:
    match step:
        case FilterSettings() | RenameSettings():
            return step.model_dump(mode="json", exclude_none=True)
        case FunctionSettings(file=None):
            digest = load_installed(step.module, step.name)[1]
            _check_digest(step.module, digest, step.digest)
            described = {"kind": step.kind, "function": step.function, "digest": digest}
            return described | _describe_modules(digest_package_imports(step.module))
        case FunctionSettings():
            file = reader.read(str(step.file), step.digest, "py", _MAX_CODE_BYTES)
            code = reader.objects[file["object"]]
            load_from_bytes(code, step.name, str(step.file))
            described = {"kind": step.kind, "function": step.name, **file}
            if "://" in str(step.file):
                return described
            return described | _describe_modules(
                digest_file_imports(code, Path(str(step.file)).parent)
            )
        case TokenizeSettings():
            file = reader.read(step.tokenizer, step.digest, "json", _MAX_DATA_BYTES)
            module = _import_tokenize()
            made = module.TokenizeTransform(step, reader.objects[file["object"]])
            others = step.model_dump(
                mode="json", exclude={"tokenizer", "digest"}, exclude_none=True
            )
            return {**others, **file, "dtype": made.dtype, "library": module.LIBRARY_VERSION}
        case JoinSettings():
            file = reader.read(step.table, step.digest, step.extension, _MAX_DATA_BYTES)
            JoinTransform(step, reader.objects[file["object"]])  # errors name the table
            others = step.model_dump(mode="json", exclude={"table", "digest"}, exclude_none=True)
            return {**others, **file}


def _describe_modules(digests: dict[str, str]) -> JsonObject:
    """Return the part of a description with the modules that a function imports, if any."""
    return {"modules": digests} if digests else {}


def _open_chain(
    record: JsonObject, read_object: Callable[[str], bytes], types: Mapping[str, str]
) -> TransformChain:
    """Return the transforms of a description.

    Args:
        record: Description of the transforms; empty without transforms.
        read_object: Function that returns the object with a key.
        types: Declared types of the fields after the transforms, by their names.

    Raises:
        ConfigurationError: A function or a library of this machine is not that of the description,
            or another version of Millrace wrote the description.
        CorruptError: An object does not have the digest of the description.
    """
    if record and record["version"] != _VERSION:
        raise errors.ConfigurationError(
            f"The plan has transforms of version {record['version']!r}, and this Millrace makes "
            f"those of version {_VERSION!r}: work on the dataset with the Millrace that planned it."
        )
    transforms: list[SampleTransform] = []
    packing = None
    steps = cast("list[JsonObject]", record.get("steps", []))
    all_types = _trace_types(steps, types)
    for number, (step, types_there) in enumerate(zip(steps, all_types, strict=True)):
        body = _read_verified(step, read_object)
        match step["kind"]:
            case "function":
                transforms.append(_open_function(step, body, record["seed"], types_there, number))
            case "tokenize":
                transform, packing = _open_tokenize(step, body)
                transforms.append(transform)
            case "join":
                transforms.append(_open_join(step, body, types_there))
            case "filter":
                from millrace.datasets.transforms.filter import FilterTransform  # noqa: PLC0415

                transforms.append(FilterTransform(FilterSettings.model_validate(step)))
            case _:
                transforms.append(RenameTransform(RenameSettings.model_validate(step)))
    return TransformChain(transforms, packing)


def _read_verified(step: JsonObject, read_object: Callable[[str], bytes]) -> bytes:
    """Return the object of a step, or empty bytes if the step has none.

    A process reads a tokenizer or a table once for all partitions. Its digest is its identity.
    """
    if "object" not in step:
        return b""
    if (kept := _kept.get(step["digest"])) is not None:
        return kept
    body = read_object(step["object"])
    if compute_digest(body) != step["digest"]:
        raise errors.CorruptError(
            f"{step['object']} does not have the digest of the plan: another program has written "
            "under this dataset's name. Shard the source under another name."
        )
    if step["kind"] in {"tokenize", "join"}:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[step["digest"]] = body
    return body


def _trace_types(
    steps: Sequence[JsonObject], types: Mapping[str, str]
) -> Iterable[Mapping[str, str]]:
    """Return the types of the fields at each step, by the names that they have there.

    Args:
        steps: Descriptions of the transforms.
        types: Declared types of the fields after the last one, by their names.
    """
    found: list[Mapping[str, str]] = []
    for step in reversed(steps):
        if step["kind"] == "rename":
            renamed: dict[str, str] = step["fields"]
            kept = {name: kind for name, kind in types.items() if name not in renamed.values()}
            types = kept | {old: types[new] for old, new in renamed.items() if new in types}
        elif step["kind"] == "tokenize":
            types = {name: kind for name, kind in types.items() if name != TOKENS}
        found.append(types)
    return reversed(found)


def _open_function(
    step: JsonObject, body: bytes, seed: int | None, types: Mapping[str, str], number: int
) -> FunctionTransform:
    check_imports(step.get("modules", {}))
    if "object" in step:
        name = step["function"]
        function = load_from_bytes(body, name, "The file of a transform")
        return FunctionTransform(function, name, seed, types, number)
    settings = FunctionSettings(function=step["function"])
    function, digest = load_installed(settings.module, settings.name)
    _check_digest(f"The module {settings.module}", digest, step["digest"])
    return FunctionTransform(function, settings.name, seed, types, number)


def _open_tokenize(step: JsonObject, body: bytes) -> tuple[SampleTransform, Packing | None]:
    module = _import_tokenize()
    others = {n: v for n, v in step.items() if n not in {"digest", "object", "dtype", "library"}}
    settings = TokenizeSettings.model_validate({**others, "tokenizer": step["object"]})
    if step["library"] != module.LIBRARY_VERSION:
        raise errors.ConfigurationError(
            f"The dataset was planned with tokenizers {step['library']}, and this machine has "
            f"{module.LIBRARY_VERSION}: pip install tokenizers=={step['library']}."
        )
    packing = None if settings.pack is None else Packing(settings.pack, step["dtype"])
    return module.TokenizeTransform(settings, body), packing


def _open_join(step: JsonObject, body: bytes, types: Mapping[str, str]) -> JoinTransform:
    others = {name: value for name, value in step.items() if name not in {"digest", "object"}}
    settings = JoinSettings.model_validate({**others, "table": step["object"]})
    return JoinTransform(settings, body, types)


def _import_tokenize() -> Any:
    return import_extra_module("millrace.datasets.transforms.tokenize", "tokenizers")


def open_transformed_source(
    record: SourceRecord,
    files: SourceFiles,
    dataset_store: Store,
    *,
    types: Mapping[str, str],
    any_version: bool = False,
    downloads: DownloadSettings | None = None,
    allow_private: bool = False,
) -> TransformedSource:
    """Return the source that a plan names, with the transforms of the plan.

    Args:
        record: Source of the plan.
        files: Files of the source.
        dataset_store: Store of the dataset.
        types: Types of the samples' fields, by their names after the transforms. Others have the
            types of their extensions.
        any_version: Whether a file is also read if it was written again after the plan was made.
        downloads: Settings of the requests to the servers of a list of URLs; None for the defaults.
        allow_private: Whether these servers may be in a private network or on this machine.
    """
    transforms = record.settings.get("transforms", {})
    source = open_source(
        record,
        files,
        dataset_store,
        types=next(iter(_trace_types(transforms.get("steps", []), types)), types),
        any_version=any_version,
        downloads=downloads,
        allow_private=allow_private,
    )
    chain = open_transforms(transforms, dataset_store, types)
    return TransformedSource(source, chain, None if _makes_json(record) else JsonCheck(types))


def _makes_json(record: SourceRecord) -> bool:
    """Decide whether Millrace has made or parsed all JSON of the samples.

    Whole rows are such JSON. The bytes of a column, a file or a function may be anything.
    """
    steps = record.settings.get("transforms", {}).get("steps", [])
    return (
        record.kind in _TABLE_KINDS
        and record.settings["columns"] is None
        and not any(step["kind"] in {"function", "join", "rename"} for step in steps)
    )
