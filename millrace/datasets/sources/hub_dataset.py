"""Splits of datasets of the Hub, as the library `datasets` resolves and reads them.

No code of a dataset is run, and no file outside of its repository is read: the configurations of a
README are checked before the library sees them.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import datasets  # pyright: ignore[reportMissingTypeStubs]
import pyarrow as pa
import yaml
from datasets.utils import file_utils  # pyright: ignore[reportMissingTypeStubs]
from httpx2 import TransportError
from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.repocard import RepoCard

from millrace import errors
from millrace.datasets.sources.arrow_rows import find_binary
from millrace.datasets.sources.http_files import RetryClock
from millrace.datasets.sources.hub_files import check_commit
from millrace.datasets.sources.settings import find_texts, is_path_of_repository
from millrace.hub import HubSpec
from millrace.hub.backoff import BackoffLimit
from millrace.hub.client import HubClient, find_asked_pause
from millrace.temporary_folders import make_temporary_folder

T = TypeVar("T")
Columns = Mapping[str, str] | None

_library = cast("Any", datasets)  # it has no types of its own
LIBRARY_VERSION: str = _library.__version__
FOLDERS = {"audiofolder", "imagefolder", "videofolder"}
"""Builders of the library for which each file is a sample."""

_BUILDERS = {"arrow", "csv", "json", "parquet", "text", "webdataset", "xml", *FOLDERS}
PARQUET = (".parquet", ".geoparquet", ".gpq")
"""Ends of the names of files that are read by row groups."""
_INFOS = "dataset_infos.json"
_CARDS = ("README.md", ".huggingface.yaml", _INFOS)
_MAX_CARD_BYTES = 16 << 20
_BATCH_ROWS = 100  # rows that are decoded at a time
_BATCH_BYTES = 1 << 20  # bytes from which on a batch takes no more rows, if rows hold bytes
_SMALL_TABLE = 16 << 20  # bytes of a table that is copied, to be one batch
_MAX_MEDIA_BYTES = 1 << 30  # bytes of a file that is the value of a column
_TRANSIENT = (TransportError, ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A split of a dataset at its commit, as the library resolves it.

    Attributes:
        spec: Repository at its commit.
        builder_name: Name of the library's builder, such as ``json``.
        split: Name of the split.
        paths: Paths of the data files, in the order of the library.
        expected_rows: Number of rows that the dataset's README tells; 0 without.
        rows: The iterable dataset; None if the files are read without the library.
    """

    spec: HubSpec
    builder_name: str
    split: str
    paths: tuple[str, ...]
    expected_rows: int
    rows: Any

    def read_schema(self) -> pa.Schema:
        """Return the schema of the rows. Reads the first rows if the dataset does not tell."""
        features = self.rows.features
        if features is not None:
            return features.arrow_schema
        first = _call(self.spec, lambda: next(self._iterate_tables(0), None))
        if first is None:
            raise errors.ConfigurationError(
                f"hf://datasets/{self.spec.repo}: the first file of the split {self.split!r} has "
                "no rows. Choose the files by `load_kwargs: {data_files: ...}`."
            )
        return first.schema

    def iterate_batches(self, shard: int, first: int, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard in batches, from a row on.

        Raises:
            Exception: The library cannot read the shard, or the Hub does not answer.
        """
        for table in self._iterate_tables(shard, columns):
            skipped = min(first, table.num_rows)
            first -= skipped
            rest = table.slice(skipped)
            if rest.nbytes < _SMALL_TABLE:  # Arrow cannot join chunks of more than 2 GiB
                rest = rest.combine_chunks()
            for batch in rest.to_batches():
                media = _find_media(batch.schema, columns)
                if not media:
                    yield batch
                    continue
                for index in range(batch.num_rows):  # a row may be large
                    yield self._read_media(batch.slice(index, 1), media)

    def _iterate_tables(self, shard: int, columns: Columns = None) -> Iterator[pa.Table]:
        rows = self.rows.shard(num_shards=self.rows.n_shards, index=shard, contiguous=True)
        if rows.features is not None:
            # Also puts the columns in one order, since rows of tar files differ in it.
            rows = rows.select_columns(_list_columns(rows.features, columns))
            kind = pa.struct(cast("Any", list_fields(rows.features.arrow_schema)))
            if find_binary(kind, "rows"):  # such as an image, which may be large
                return _join_tables(rows.with_format("arrow").iter(batch_size=1))
        arrow = rows.with_format("arrow")
        return (table for table in arrow.iter(batch_size=_BATCH_ROWS) if table.num_rows)

    def _read_media(self, row: pa.RecordBatch, media: Iterable[str]) -> pa.RecordBatch:
        """Read the files that are the values of media columns. Other paths stay null."""
        for name in media:
            index = row.schema.get_field_index(name)
            column = cast("Any", row).column(index)
            value: dict[str, Any] | None = column[0].as_py()
            if not value or value["bytes"] is not None or not self._is_own(value["path"]):
                continue
            read = value | {"bytes": self._read_file(value["path"])}
            array = cast("Any", pa).array([read], type=column.type)
            row = cast("Any", row).set_column(index, cast("Any", row.schema).field(index), array)
        return row

    def _is_own(self, path: str | None) -> bool:
        """Decide whether a path of the library is that of a file of the repository.

        A row of a foreign file may have any path, also one of this machine.
        """
        *inner, outer = (path or "").split("::")
        return (
            outer.startswith(_make_prefix(self.spec))
            and ".." not in outer.split("/")
            and all(one.startswith("zip://") for one in inner)
        )

    def _read_file(self, path: str) -> bytes:
        token = self.spec.token.get_secret_value() if self.spec.token else False
        options = _library.DownloadConfig(token=token)
        with cast("Any", file_utils).xopen(path, "rb", download_config=options) as file:
            data = cast("bytes", file.read(_MAX_MEDIA_BYTES + 1))
        if len(data) > _MAX_MEDIA_BYTES:
            raise errors.ConfigurationError(
                f"{path} has more than 1 GiB. Leave it out with `load_kwargs: {{data_files: ...}}`."
            )
        return data


_endpoint_lock = threading.Lock()
_endpoints: set[str] = set()


def _use_endpoint(endpoint: str) -> None:
    """Make the library send its requests to a Hub. The library has one Hub for each process.

    Raises:
        ConfigurationError: This process already reads from another Hub.
    """
    with _endpoint_lock:
        _endpoints.add(endpoint)
        if len(_endpoints) > 1:
            _endpoints.discard(endpoint)
            raise errors.ConfigurationError(
                f"This process already reads datasets from {next(iter(_endpoints))}. Run the "
                f"dataset from {endpoint} in another process."
            )
        _library.config.HF_ENDPOINT = endpoint
        _library.config.HUB_DATASETS_URL = (
            f"{endpoint}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
        )
        # By default the library asks the public Hub for the files about a dataset.
        _library.load.hf_dataset_url = partial(hf_hub_url, repo_type="dataset", endpoint=endpoint)
        # By default the library repeats a read twenty times, after pauses of up to a minute.
        # `_call` and `huggingface_hub` repeat failed requests.
        for action in ("READ", "OPEN"):
            setattr(_library.config, f"STREAMING_{action}_MAX_RETRIES", 1)
        for reason in ("READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT", "OPEN"):
            setattr(_library.config, f"STREAMING_{reason}_RETRY_INTERVAL", 0)


def open_hub_dataset(
    spec: HubSpec,
    config: str | None,
    split: str | None,
    load_kwargs: Mapping[str, Any],
    columns: Columns,
) -> HubDataset:
    """Resolve a split of a dataset to its files. A process resolves it once.

    Args:
        spec: Repository at its commit, with the endpoint of the Hub.
        config: Configuration; None for the default.
        split: Split; None for the only one.
        load_kwargs: More arguments of the library.
        columns: Column of each field, by the field's extension; None for whole rows.

    Raises:
        NotFoundError: There is no such split.
        ConfigurationError: The library cannot open the dataset, or has no such configuration, or
            the dataset has files outside of its repository, or the library reads texts as times.
        UnavailableError: The Hub does not answer.
    """
    names = None if columns is None else {one.removesuffix(".bytes") for one in columns.values()}
    taken = None if names is None else tuple(sorted(names))
    arguments = json.dumps(load_kwargs, sort_keys=True)
    return _open_once(cast("Any", spec), config, split, arguments, taken)


@lru_cache(maxsize=4)
def _open_once(
    spec: HubSpec,
    config: str | None,
    split: str | None,
    load_kwargs: str,
    taken: tuple[str, ...] | None,
) -> HubDataset:
    assert spec.endpoint is not None
    _use_endpoint(spec.endpoint)
    _check_cards(spec)
    token = spec.token.get_secret_value() if spec.token else False
    with make_temporary_folder("millrace-datasets-") as folder:
        # An empty folder: the library must not fall back to another commit in its own cache.
        builder: Any = _call(
            spec,
            lambda: _library.load_dataset_builder(
                spec.repo,
                config,
                revision=spec.revision,
                token=token,
                cache_dir=str(folder),
                **json.loads(load_kwargs),
            ),
        )
    if builder.hash != spec.revision:
        raise errors.ChangedError(
            f"The library `datasets` resolved hf://datasets/{spec.repo} to {builder.hash}, and the "
            f"plan is for the commit {spec.revision}. Run it again later."
        )
    name = type(builder).__module__.rpartition(".")[2]
    if name not in _BUILDERS:
        raise errors.ConfigurationError(
            f"hf://datasets/{spec.repo} is read by the library's builder {name!r}, which is not "
            f"supported. Use `kind: files`, or a dataset of {', '.join(sorted(_BUILDERS))}."
        )
    data_files: dict[str, list[str]] = {
        str(key): list(paths) for key, paths in _as_dict(builder.config.data_files).items()
    }
    split = _choose_split(spec, list(data_files), split)
    prefix = _make_prefix(spec)
    if outside := [path for path in data_files[split] if not path.startswith(prefix)]:
        raise errors.ConfigurationError(
            f"hf://datasets/{spec.repo} names {outside[0]!r} as a data file, which is not in the "
            "repository at its commit. Choose other files by `load_kwargs: {data_files: ...}`."
        )
    info = _as_dict(builder.info.splits).get(split)
    settings = builder.config
    is_direct = (
        name == "parquet"
        and not (settings.columns or settings.filters)
        and all(path.lower().endswith(PARQUET) for path in data_files[split])
    )
    if name == "json":
        _refuse_times(spec, builder, taken)
    if name in FOLDERS:
        settings.decode_num_threads = 0  # the bytes of the files are wanted
    streaming = builder.as_streaming_dataset
    return HubDataset(
        spec=spec,
        builder_name=name,
        split=split,
        paths=tuple(path.removeprefix(prefix) for path in data_files[split]),
        expected_rows=max(0, int(info.num_examples or 0)) if info else 0,
        rows=None if is_direct else _call(spec, lambda: streaming(split=split)),
    )


def _refuse_times(spec: HubSpec, builder: Any, taken: tuple[str, ...] | None) -> None:
    """Make a builder of JSON refuse times, unless the dataset declares them as such.

    JSON has no times. The library reads a column as times if all texts in about 10 MB look like
    times, and writes such a time in another form, also where the column is declared as text.

    Args:
        spec: Repository at its commit.
        builder: The builder, which has read no file yet.
        taken: Columns that the samples take, or parts of them; None for all.
    """
    features = builder.info.features
    declared = set(_iterate_times(features.arrow_schema)) if features else set[str]()
    cast_table = builder._cast_table  # noqa: SLF001 - the only step between the file and the cast

    def cast_checked(table: pa.Table, *arguments: Any, **options: Any) -> pa.Table:
        for path in _iterate_times(table.schema):
            is_taken = taken is None or any(
                f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in taken
            )
            if is_taken and path not in declared:
                raise errors.ConfigurationError(
                    f"hf://datasets/{spec.repo}: the library `datasets` reads texts in the column "
                    f"{path!r} as times, and would write them in another form. Use `kind: jsonl`, "
                    "which keeps texts, or leave the column out of `columns`, or declare it as "
                    "`timestamp` in the README of the dataset."
                )
        return cast_table(table, *arguments, **options)

    builder._cast_table = cast_checked  # noqa: SLF001


def _iterate_times(schema: pa.Schema) -> Iterator[str]:
    """Yield the paths of the columns, or parts of columns, that hold times."""
    found: list[tuple[str, Any]] = [(one.name, one.type) for one in list_fields(schema)]
    while found:
        path, kind = found.pop()
        if pa.types.is_temporal(kind):
            yield path
        fields: list[Any] = [cast("Any", kind).field(n) for n in range(kind.num_fields)]
        is_struct = pa.types.is_struct(kind)
        found += [(f"{path}.{one.name}" if is_struct else path, one.type) for one in fields]


def _as_dict(value: Any) -> dict[Any, Any]:
    """Return a mapping of the library; an empty one for None."""
    return value or {}


def _make_prefix(spec: HubSpec) -> str:
    """Return the beginning of the library's paths of the files of a repository at its commit."""
    return f"hf://datasets/{spec.repo}@{spec.revision}/"


def _check_cards(spec: HubSpec) -> None:
    """Check that the configurations of a dataset only name files of its repository.

    The library would also read files of this machine, or of its network. The library finds the
    checked files in the cache of `huggingface_hub`: it takes a file as absent whose request fails.

    Raises:
        ConfigurationError: A configuration names another location, or cannot be read.
    """
    client = HubClient(spec, is_dataset=True)
    for name in _CARDS:
        url = f"hf://datasets/{spec.repo}/{name}"
        try:
            text = client.download(name, spec.revision, _MAX_CARD_BYTES, keep=True).decode()
            configs = _read_configs(name, text)
        except errors.NotFoundError:
            continue
        except (ValueError, yaml.YAMLError) as error:
            raise errors.ConfigurationError(
                f"{url} cannot be read ({errors.format_error(error)}). Use `kind: parquet`, "
                "`jsonl`, `csv` or `files`, which do not need it."
            ) from error
        for path in find_texts([[one.get("data_files"), one.get("data_dir")] for one in configs]):
            if not is_path_of_repository(path):
                raise errors.ConfigurationError(
                    f"{url} names {path!r}, which is not a path of the repository. Nothing of it "
                    "was read. Use another dataset, or `kind: parquet`, `jsonl`, `csv` or `files`."
                )


def _read_configs(name: str, text: str) -> list[dict[str, Any]]:
    """Return the configurations in a file about a dataset.

    Raises:
        ValueError, YAMLError: The file cannot be read.
    """
    if name == _INFOS:  # features and numbers of rows only
        return []
    card: Any = RepoCard(text).data.to_dict() if name.endswith(".md") else yaml.safe_load(text)
    configs = cast("dict[str, Any]", card).get("configs") if isinstance(card, dict) else None
    found = cast("list[Any]", configs) if isinstance(configs, list) else []
    return [cast("dict[str, Any]", one) for one in found if isinstance(one, dict)]


def _choose_split(spec: HubSpec, names: list[str], wanted: str | None) -> str:
    """Return the split to read.

    Raises:
        NotFoundError: There is no such split.
        ConfigurationError: There are several splits, and none is chosen.
    """
    url, shown = f"hf://datasets/{spec.repo}", ", ".join(names)
    if wanted is None and len(names) > 1:
        raise errors.ConfigurationError(
            f"{url} has the splits {shown}. Set `split` to one of them."
        )
    if wanted is not None and wanted not in names:
        raise errors.NotFoundError(
            f"{url} has no split {wanted!r}. Its splits are {shown}. Correct `split`."
        )
    return wanted or names[0]


def _call(spec: HubSpec, call: Callable[[], T]) -> T:
    """Call the library, with retries of transient errors.

    Raises:
        MillraceError: The same as of `translate_error`, or the Hub does not answer in time.
    """
    timeout = spec.retry_timeout.total_seconds()
    clock, limit = RetryClock(timeout), BackoffLimit(timeout)
    while True:
        try:
            with limit.apply():
                return call()
        except Exception as error:  # noqa: BLE001 - the library raises errors of many kinds
            limit.fail_try(time.monotonic())
            where = f"hf://datasets/{spec.repo}"
            clock.wait(translate_error(spec, where, "open it", error), find_asked_pause(error))


def translate_error(
    spec: HubSpec, where: str, action: str, error: Exception
) -> errors.UnavailableError:
    """Return the error of a request that may succeed later.

    Args:
        spec: Repository at its commit.
        where: URL of the file or the repository, for the message.
        action: Failed action of the library, such as ``open it``.
        error: Error of the library.

    Raises:
        ConfigurationError: The library cannot read the dataset.
        ChangedError: The commit is gone.
        DeniedError: The Hub refuses the token.
        MillraceError: The error is one already. This error is raised again.
    """
    if isinstance(error, errors.MillraceError | MemoryError):
        raise error
    shown = errors.format_error(error)
    if _is_transient(error):
        return errors.UnavailableError(
            f"{where}: the Hub does not answer ({shown}). Run it again when it does; the run "
            "continues."
        )
    check_commit(spec)  # the library often does not tell why it finds no dataset
    raise errors.ConfigurationError(
        f"{where}: the library `datasets` cannot {action} ({shown}). Correct `config`, `split` or "
        "`load_kwargs`, or shard the files by another `kind`, under another dataset name."
    ) from error


def _is_transient(error: BaseException) -> bool:
    """Decide whether an error of the library is that of a request which may succeed later."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError):
            return cause.response.status_code == 429 or cause.response.status_code >= 500
        if isinstance(cause, _TRANSIENT):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _join_tables(rows: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of tables of one row in tables of about 1 MiB, and of at most 100 rows."""
    held: list[pa.Table] = []
    size = 0
    for row in rows:
        held.append(row)
        size += row.nbytes
        if len(held) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
    if held:
        yield pa.concat_tables(held)


def _find_media(schema: pa.Schema, columns: Columns) -> list[str]:
    """Return the columns with undecoded images, sounds or films that the samples take."""
    taken = {name.removesuffix(".bytes") for name in (columns or {}).values()}
    return [field.name for field in list_fields(schema) if field.name in taken and is_media(field)]


def _list_columns(features: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return the whole columns that the samples take."""
    if columns is None:
        return list(features)
    wanted = {name if name in features else name.partition(".")[0] for name in columns.values()}
    return sorted(wanted)


def list_fields(schema: pa.Schema) -> list[Any]:
    """Return the columns of a schema."""
    return list(cast("Any", schema))


def is_media(field: Any) -> bool:
    """Decide whether a column is one of undecoded media: bytes and a path."""
    kind = field.type
    if not pa.types.is_struct(kind):
        return False
    names = {cast("Any", kind).field(i).name for i in range(kind.num_fields)}
    return names == {"bytes", "path"}
