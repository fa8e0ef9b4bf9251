"""Import of checkpoints that other tools saved: safetensors files, or files of ``torch.save``.

Copies of the files are mapped into memory, so the memory is that of the files that are uploaded at
once. No code of a file is executed.
"""

import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import orjson
import torch

from millrace import errors
from millrace.checkpoints.find import find_checkpoint
from millrace.checkpoints.foreign_files import (
    TORCH_SUFFIXES,
    ForeignFiles,
    ImportedCheckpoint,
    open_foreign_files,
)
from millrace.checkpoints.parts import read_boxes
from millrace.checkpoints.progress_events import ImportStarted
from millrace.checkpoints.saving import Saver
from millrace.checkpoints.settings import SaveSettings
from millrace.hub.spec import HubSpec
from millrace.progress import Progress, ignore_event
from millrace.storage import Store, StoreSpec
from millrace.temporary_folders import make_temporary_folder
from millrace.torchfile import (
    STATE_DICTS,
    FormatError,
    TensorInFile,
    TorchFile,
    TorchName,
    UnknownValue,
)

_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")
# Files beside the weights that other tools save.
_OTHER_NAMES = re.compile(
    r"(optimizer|scheduler|scaler|rng_state(_\d+)?|training_args|adapter_\w+|consolidated\.\d+)\."
)
_USUAL_NAMES = ("model", "pytorch_model", "diffusion_pytorch_model", "state", "checkpoint", "ckpt")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
_UNFINISHED = re.compile(r"(^|[^a-z])(tmp|temp|partial|incomplete)([^a-z]|$)", re.IGNORECASE)
_LFS_POINTER = b"version https://git-lfs"
_STEP = re.compile(
    r"(?:(?<![a-z])(?:global_?)?(?:step|checkpoint|ckpt|iter|iteration)[-_=]?|^(?=\d+$))"
    r"(\d{1,15})(?![0-9a-z])",
    re.IGNORECASE,
)
_MAX_TENSORS, _MAX_PICKLE_SIZE = 200_000, 256 << 20
_MAX_INDEX_SIZE = 64 << 20
_MAX_VALUES = 2_000_000  # values of one file; an optimizer's state has some for each tensor
_MAX_TEXT = 64 << 20  # characters of texts and of the names of values, which are written out
_MAX_DIMENSIONS, _MAX_ELEMENTS = 32, 1 << 60
_MAX_GROWTH, _FREE_GROWTH = 2, 64 << 20  # times the size of a file, and bytes
_SLICE = slice(0, 5)  # names in an error message
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    )
}  # fmt: skip


def import_checkpoint(
    source: str | StoreSpec | HubSpec,
    store: Store,
    job: str,
    *,
    step: int | None = None,
    only: str = "",
    settings: SaveSettings | None = None,
    progress: Progress = ignore_event,
) -> ImportedCheckpoint:
    """Save a checkpoint of another tool as one of a job.

    Weights alone become the state ``{"model": weights}``. A dict of several states, such as
    ``{"model": ..., "optimizer": ..., "epoch": 3}``, is the state as it is.

    Args:
        source: Folder or file to import: a path, the URL of a store, ``hf://owner/name``, or the
            settings of a store or a repository. A folder has a safetensors file or a file of
            ``torch.save``, an index with its files, or folders such as ``step_1000`` with these.
        store: Store to save to.
        job: Name of the job.
        step: Step of the checkpoint. A folder or file whose name says this step is taken before
            others. By default, files of the folder itself are taken, or else the newest folder in
            it, and the step is that in the name, or 0.
        only: Name of the value to import from a file of ``torch.save``, such as ``model`` or
            ``state.model``; by default all.
        settings: Settings of the files and their upload.
        progress: Receives `ImportStarted`, then the events of `Saver`.

    Raises:
        NotFoundError: There are no weights.
        ConfigurationError: It is not clear which files to import, or a value cannot be saved.
        CorruptError: A file is damaged, or has another format.
        ChangedError: A file was written while the files were copied, which may be of two versions.
        NoSpaceError: The temporary folder has too little space for the files.
    """
    files, name = open_foreign_files(source)
    with make_temporary_folder("millrace-import-") as folder:
        selected = _select_files(files, name, step, folder)
        progress(ImportStarted(source=files.url, files=len(selected.keys), size=selected.size))
        state: dict[str, Any] = {}
        for key in selected.keys:
            url = f"{files.url}/{key}"
            _merge(state, _read_file(url, files.fetch(key, folder), only), url)
        files.check_unchanged()
        _check_names(state, selected, files.url)
        if all(isinstance(value, torch.Tensor) for value in state.values()):
            state = {"model": state}
        step = selected.step if step is None else step
        only_file = f"/{selected.keys[0]}" if len(selected.keys) == 1 else ""
        there = find_checkpoint(store, job, step)  # with the same content, or a conflict
        position = there.position if there else None
        notes = there.notes if there else {"imported from": files.url + only_file}
        with Saver(store, job, settings, progress=progress) as saver:
            saving = saver.save(state, step=step, position=position, notes=notes, in_place=True)
            checkpoint = saving.result()
    tensors = len(checkpoint.tensors) - 1  # without the skeleton
    return ImportedCheckpoint(checkpoint, files.url, selected.keys, tensors)


@dataclass(frozen=True, slots=True)
class _SelectedFiles:
    """Files to import.

    Attributes:
        keys: Keys of the files.
        size: Bytes of the files.
        step: Step that their names say, or 0.
        names: Names of the tensors that an index lists; None without an index.
    """

    keys: tuple[str, ...]
    size: int
    step: int
    names: frozenset[str] | None = None


def _select_files(
    files: ForeignFiles, name: str, step: int | None, folder: Path, prefix: str = ""
) -> _SelectedFiles:
    """Select the files of a folder that have the weights.

    Raises:
        NotFoundError: There are none.
        ConfigurationError: There are several, and none of them has a usual name.
    """
    found = files.list_folder(prefix)
    where = f"{files.url}/{prefix}"
    said = _find_step(name) or _find_step(unquote(where.rstrip("/").rpartition("/")[2]))
    if name:
        if name not in found.files:
            raise errors.NotFoundError(f"There is no {files.url}/{name}. Correct the URL.")
        _check_whole([name], where)
        return _SelectedFiles((name,), found.files[name], said or 0)
    steps = {} if prefix else _find_step_folders(found.folders, files.url)
    if step in steps:
        return _select_files(files, "", step, folder, f"{steps[step]}/")
    for suffix in _INDEX_SUFFIXES:
        if indexes := [each for each in found.files if each.endswith(suffix)]:
            index = _choose(indexes, step, where)
            return _read_index(files, prefix, index, found.files, folder, said or 0)
    for suffixes in ((".safetensors",), TORCH_SUFFIXES):
        weights = [
            each for each in found.files if each.endswith(suffixes) and not _OTHER_NAMES.match(each)
        ]
        if weights:
            _check_whole(weights, where)
            chosen = _choose(weights, step, where)
            said = said or _find_step(chosen) or 0
            return _SelectedFiles((prefix + chosen,), found.files[chosen], said)
    if any(each.endswith(".distcp") for each in found.files):
        raise errors.ConfigurationError(
            f"{where} is a checkpoint of torch.distributed.checkpoint: make one file of it by "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt, and "
            "import that."
        )
    if steps and step is None:
        return _select_files(files, "", step, folder, f"{steps[max(steps)]}/")
    if steps:
        shown = ", ".join(steps[each] for each in sorted(steps)[_SLICE])
        raise errors.NotFoundError(f"{files.url} has no folder of step {step}. It has {shown}.")
    raise errors.NotFoundError(
        f"{where} has no weights: no file that ends with .safetensors, "
        f"{', '.join(TORCH_SUFFIXES[:-1])} or {TORCH_SUFFIXES[-1]}, and no folder such as "
        "step_1000."
    )


def _find_step_folders(folders: Iterable[str], url: str) -> dict[int, str]:
    """Return the folders whose names say a step, without those that are not complete.

    Raises:
        ConfigurationError: Two folders have one step.
    """
    steps: dict[int, str] = {}
    for name in folders:
        number = None if _UNFINISHED.search(name) else _find_step(name)
        if number is None:
            continue
        if number in steps:
            raise errors.ConfigurationError(
                f"{url} has two folders of step {number}, {steps[number]} and {name}: write the "
                "URL of one of them."
            )
        steps[number] = name
    return steps


def _check_whole(names: Iterable[str], where: str) -> None:
    """Refuse one of several files whose index is missing.

    Raises:
        CorruptError: There is one.
    """
    for name in names:
        found = _SHARD.search(name)
        if found and int(found[2]) > 1:
            raise errors.CorruptError(
                f"{where}{name} is one of {int(found[2])} files, and their index is not beside it: "
                "complete the folder, and write its URL."
            )


def _find_step(name: str) -> int | None:
    """Return the step that a name says; None if it says none."""
    found = _STEP.search(name)
    return int(found[1]) if found else None


def _choose(names: Iterable[str], step: int | None, where: str) -> str:
    """Return the name of the weights among several files.

    Raises:
        ConfigurationError: It is not clear which file has the weights.
    """
    there = sorted(names)
    of_step = [name for name in there if step is not None and _find_step(name) == step]
    usual = [name for name in there if name.partition(".")[0] in _USUAL_NAMES]
    for candidates in (there, of_step, usual):
        if len(candidates) == 1:
            return candidates[0]
    raise errors.ConfigurationError(
        f"{where} has several files that may have the weights ({', '.join(there[_SLICE])}): write "
        "the URL of one of them."
    )


def _read_index(
    files: ForeignFiles,
    prefix: str,
    index: str,
    sizes: Mapping[str, int],
    folder: Path,
    step: int,
) -> _SelectedFiles:
    """Return the files that an index names, as transformers writes it.

    Raises:
        CorruptError: The index is invalid, or a file is missing.
    """
    url = f"{files.url}/{prefix}{index}"
    if sizes[index] > _MAX_INDEX_SIZE:
        raise errors.CorruptError(f"{url} is too large for an index of weights.")
    try:
        places = orjson.loads(files.fetch(prefix + index, folder).read_bytes())["weight_map"]
        names = dict.fromkeys(places.values())
        valid = all(isinstance(name, str) for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.CorruptError(f"{url} is not an index of weights: {error}") from error
    if not (valid and names):
        raise errors.CorruptError(f"{url} names no files with weights.")
    missing = [name for name in names if name not in sizes]
    if missing:
        raise errors.CorruptError(
            f"{url} names {missing[0]}, which is not beside it: complete the folder."
        )
    size = sum(sizes[name] for name in names)
    return _SelectedFiles(tuple(prefix + name for name in names), size, step, frozenset(places))


def _check_names(state: Mapping[str, Any], selected: _SelectedFiles, url: str) -> None:
    """Compare the tensors of all files with those of their index.

    Raises:
        CorruptError: A tensor is missing.
    """
    missing = sorted((selected.names or frozenset()) - state.keys())
    if missing:
        raise errors.CorruptError(
            f"{url}: the index of the weights names {missing[0]!r}, which no file has: complete "
            "the folder."
        )


def _merge(state: dict[str, Any], others: Mapping[str, Any], url: str) -> None:
    """Add the values of another file.

    Raises:
        CorruptError: Two files have a value of the same name.
    """
    twice = sorted(map(str, state.keys() & others.keys()))
    if twice:
        raise errors.CorruptError(f"{url} has {twice[0]!r}, which another file has, too.")
    state.update(others)


def _read_file(url: str, path: Path, only: str) -> dict[str, Any]:
    """Return the values of a file. The tensors are mapped into memory.

    Raises:
        CorruptError: The file is damaged, or has another format.
        ConfigurationError: There is no value ``only``.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise errors.CorruptError(
                    f"{url} is a pointer of Git LFS, and not the file: run git lfs pull."
                )
            file.seek(0)
            if path.name.endswith(".safetensors"):
                found = _read_safetensors(file)
            else:
                form = STATE_DICTS
                opened = TorchFile(file, most=_MAX_TENSORS, head=_MAX_PICKLE_SIZE, form=form)
                found = _TorchState(opened, path.stat().st_size).convert(only)
    except FormatError as error:
        hint = " Save it again with torch 1.6 or newer." if "archive" in str(error) else ""
        raise errors.CorruptError(f"{url} cannot be imported: {error}.{hint}") from error
    if not any(isinstance(value, torch.Tensor | dict) for value in found.values()):
        raise errors.CorruptError(f"{url} cannot be imported: it has no tensors.")
    return found


def _read_safetensors(file: BinaryIO) -> dict[str, Any]:
    """Return the tensors of a file, which is mapped into memory.

    Raises:
        FormatError: The file has another format, or a shape that no tensor can have.
    """
    try:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        found = read_boxes(memoryview(mapped))
    except (errors.CorruptError, ValueError, AttributeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise FormatError(f"it is no whole safetensors file ({reason})") from error
    for name, tensor in found.items():
        _check_shape(name, tuple(tensor.shape))
    return dict(found)


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a shape that could not be loaded again."""
    if len(shape) > _MAX_DIMENSIONS or prod(max(1, length) for length in shape) > _MAX_ELEMENTS:
        raise FormatError(f"the shape of {name[:200]!r} is too large")


class _TorchState:
    """Conversion of the values of a file to tensors and plain values.

    Args:
        file: File to convert.
        size: Size of the file in bytes.
    """

    def __init__(self, file: TorchFile, size: int) -> None:
        self._file = file
        self._tensors: dict[TensorInFile, torch.Tensor] = {}
        self._storages: dict[str, torch.Tensor] = {}
        self._values, self._text = _MAX_VALUES, _MAX_TEXT
        self._bytes = _MAX_GROWTH * size + _FREE_GROWTH

    def convert(self, only: str) -> dict[str, Any]:
        """Convert the values of the file, or those of one dict in it.

        Raises:
            ConfigurationError: There is no such dict.
            FormatError: A value is of another kind, or the tensors have many times the file's size.
        """
        content: Any = self._file.content
        for name in only.split(".") if only else ():
            if not isinstance(content, dict) or name not in content:
                there = (
                    [str(one) for one in cast("dict[Any, Any]", content)][_SLICE]
                    if isinstance(content, dict)
                    else []
                )
                raise errors.ConfigurationError(
                    f"The file has no value {only!r}. Beside {name!r} are {', '.join(there)}."
                )
            content = cast("dict[str, Any]", content)[name]
        if not isinstance(content, dict):
            raise errors.ConfigurationError(f"{only!r} is no dict of tensors in the file.")
        try:
            return self._convert(content, "")
        except RecursionError:
            raise FormatError("its values are nested too deeply") from None

    def _convert(self, value: Any, path: str) -> Any:
        self._values -= 1
        self._text -= len(path) + (len(value) if isinstance(value, str | bytes) else 0)
        if self._values < 0:
            raise FormatError(f"it has more than {_MAX_VALUES:,} values")
        if self._text < 0:
            raise FormatError(f"its texts and names are longer than {_MAX_TEXT >> 20} MiB")
        match value:
            case TensorInFile():
                return self._open_tensor(value, path)
            case TorchName() | UnknownValue():
                return self._find_dtype(value, path)
            case dict():
                items = cast("dict[Any, Any]", value).items()
                return {name: self._convert(each, f"{path}{name}.") for name, each in items}
            case list() | tuple():
                values = enumerate(cast("list[Any]", value))
                made = [self._convert(each, f"{path}{number}.") for number, each in values]
                return made if isinstance(value, list) else tuple(made)
            case _:
                return value

    def _open_tensor(self, tensor: TensorInFile, path: str) -> torch.Tensor:
        """Return a view of the mapped file. Equal views are one tensor, and are saved once."""
        made = self._tensors.get(tensor)
        if made is None:
            _check_shape(path.rstrip("."), tensor.shape)
            storage = self._open_storage(tensor)
            self._bytes -= prod(tensor.shape) * storage.itemsize
            if self._bytes < 0:
                raise FormatError("its tensors share storages, and are many times its size")
            made = storage.as_strided(tensor.shape, tensor.strides, tensor.begin)
            self._tensors[tensor] = made
        return made

    def _open_storage(self, tensor: TensorInFile) -> torch.Tensor:
        """Return the values of a storage as a vector."""
        key, dtype = tensor.storage.key, _DTYPES[tensor.dtype]
        made = self._storages.get(key)
        if made is None:
            body = self._file.view(tensor.storage)
            made = torch.frombuffer(body, dtype=dtype) if body else torch.empty(0, dtype=dtype)
            self._storages[key] = made
        if made.dtype != dtype or made.numel() != tensor.storage.size:
            raise FormatError("two tensors declare one storage differently")
        return made

    @staticmethod
    def _find_dtype(value: TorchName | UnknownValue, path: str) -> torch.dtype:
        module, _, member = value.name.partition(" ")
        if isinstance(value, TorchName) and module == "torch" and member in _DTYPES:
            return _DTYPES[member]
        raise FormatError(
            f"{path.rstrip('.')[:200]} has a value of another kind "
            f"({value.name.replace(' ', '.')[:100]}). Import one dict of the file (--only model), "
            "or save the file without this value"
        )
