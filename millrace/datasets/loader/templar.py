"""Load batches as Templar's training scripts do, over `PageLoader`.

A script changes its import: ``from millrace.datasets.loader.templar import R2DatasetLoader``.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import SecretStr

from millrace import errors
from millrace.datasets.loader.draw import PAGE_ROWS, draw_templar_pages
from millrace.datasets.loader.mirrored_files import (
    FileLocations,
    limit_retries,
    list_specs,
    open_mirrors,
)
from millrace.datasets.loader.page_tokens import TokenLoader
from millrace.datasets.loader.pages import PageLoader
from millrace.datasets.loader.templar_index import (
    SHARD_SIZES,
    TemplarConfig,
    group_by_folder,
    make_pages,
    match_files,
    read_templar_index,
)
from millrace.datasets.loader.tokenizer import PageTokenizer, TokenPage
from millrace.datasets.sources import is_store_url, is_web_url, open_files
from millrace.environment import read_variable
from millrace.storage import Credentials, StoreSpec

PageInfo = tuple[str, int, str]
"""A page: the name of its config, its first row in the config, and its split."""
Batch = npt.NDArray[np.int64]

_ENVIRONMENT = "R2_DATASET_"


class FastTokenizer(Protocol):
    """Tokenizer of the library `transformers` that is made of a ``tokenizer.json``."""

    eos_token_id: int | None

    @property
    def backend_tokenizer(self) -> Any:
        """Tokenizer of the library `tokenizers`."""
        ...


class WindowSettings(Protocol):
    """Parameters of a window, as Templar's ``hparams`` have them."""

    pages_per_window: int
    batch_size: int
    sequence_length: int


@dataclass(frozen=True, slots=True)
class _OpenedDataset:
    """Dataset with its configs.

    Attributes:
        pages: Loader of the pages.
        configs: Configs by their names.
        numbers: Number of the file of each path in the index.
    """

    pages: PageLoader
    configs: dict[str, TemplarConfig]
    numbers: dict[str, int]


class R2DatasetLoader:
    """Batches of token ids from pages, with the parameters of Templar's loader of the same name.

    It draws the same pages, and differs where Templar's loader loses or changes data:

    - A document is not truncated to the length of a sequence: its tail is in the next sequences.
    - A page has exactly its rows, also across row groups and files. Templar's loader divides the
      rows of a file by its row groups, and moves a start near the end of a group backwards.
    - A page that cannot be read is an error. Templar's loader logs and leaves it out.
    - The end of one loader closes no file of another loader.
    - A seed that is a text is hashed by BLAKE2b. Python's ``hash`` differs in each process.

    The last tokens that fill no batch are left out, as in Templar's loader.

    Args:
        batch_size: Sequences of a batch.
        sequence_length: Tokens of a sequence.
        tokenizer: Tokenizer of the library `transformers`, or a `PageTokenizer`.
        pack_samples: Whether documents follow each other with one end token between them. Without
            it, end tokens fill the last sequence of each document.

    Attributes:
        source: Folder with ``_shard_sizes.json``, or several that have the same files, as for
            `PageLoader`. None reads ``R2_DATASET_ACCOUNT_ID``, ``R2_DATASET_BUCKET_NAME``,
            ``R2_DATASET_READ_ACCESS_KEY_ID`` and ``R2_DATASET_READ_SECRET_ACCESS_KEY``, and the
            other buckets that ``R2_DATASET_BUCKET_LIST`` has.
        DATASET_SUBFOLDER: Folder in the buckets, if the environment names them.
        pages: Pages of the loader.

    Example:
        pages = await R2DatasetLoader.next_pages(offset=window * 6, n_pages=6, seed=uid)
        loader = await R2DatasetLoader.create(
            batch_size=6, sequence_length=2048, pages_info=pages, tokenizer=tokenizer
        )
        for batch in loader:
            train(torch.tensor(batch))
    """

    source: ClassVar[FileLocations | None] = None
    DATASET_SUBFOLDER: ClassVar[str] = "HuggingFaceFW_fineweb-edu-score-2"

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _opened: ClassVar[list[tuple[list[StoreSpec], _OpenedDataset]]] = []
    _tokenizers: ClassVar[dict[tuple[bytes, int], PageTokenizer]] = {}

    def __init__(
        self,
        batch_size: int,
        sequence_length: int,
        tokenizer: FastTokenizer | PageTokenizer,
        *,
        pack_samples: bool = True,
    ) -> None:
        if batch_size < 1 or sequence_length < 1:
            raise errors.ConfigurationError(
                "A batch has at least one sequence, and a sequence one token. Correct "
                "`batch_size` or `sequence_length`."
            )
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.pack_samples = pack_samples
        self.tokenizer = self._open_tokenizer(tokenizer)
        self.pages: list[PageInfo] = []
        self._tokens: list[TokenPage] = []

    @classmethod
    async def next_pages(
        cls, offset: int, n_pages: int, seed: int | str, num_rows_per_page: int = PAGE_ROWS
    ) -> list[PageInfo]:
        """Return pages as Templar's loader draws them, see `draw_templar_pages`.

        Args:
            offset: Draws to skip: window times pages.
            n_pages: Number of pages.
            seed: Seed, such as the number of a worker.
            num_rows_per_page: Rows of a page.

        Raises:
            ConfigurationError: A config is too small for a page.
            MillraceError: The dataset cannot be opened.
        """
        opened = await asyncio.to_thread(cls._open)
        if isinstance(seed, str):
            seed = int.from_bytes(blake2b(seed.encode(), digest_size=4).digest(), "little")
        rows = {name: config.rows for name, config in opened.configs.items()}
        drawn = draw_templar_pages(rows, seed, offset, n_pages, num_rows_per_page)
        return [(name, row, opened.configs[name].split) for name, row in drawn]

    @classmethod
    async def create(
        cls,
        batch_size: int,
        sequence_length: int,
        pages_info: Sequence[PageInfo],
        tokenizer: FastTokenizer | PageTokenizer,
        pack_samples: bool = True,  # noqa: FBT001, FBT002 - as Templar's scripts pass it
        num_rows_per_page: int = PAGE_ROWS,
    ) -> Self:
        """Read pages and make their tokens, several pages at once.

        Args:
            batch_size: Sequences of a batch.
            sequence_length: Tokens of a sequence.
            pages_info: Pages of `next_pages`.
            tokenizer: Tokenizer of the library `transformers`, or a `PageTokenizer`.
            pack_samples: Whether documents follow each other with one end token between them.
            num_rows_per_page: Rows of a page.

        Raises:
            ConfigurationError: There is no such page, or the tokenizer has no end token.
            MillraceError: A page cannot be read.
        """
        loader = cls(batch_size, sequence_length, tokenizer, pack_samples=pack_samples)
        await asyncio.to_thread(loader._load, pages_info, num_rows_per_page)
        return loader

    @classmethod
    async def get_loader(
        cls,
        offset: int,
        hparams: WindowSettings,
        tokenizer: FastTokenizer | PageTokenizer,
        seed: int | str | None = None,
        data_type: str = "training",
        pack_samples: bool = True,  # noqa: FBT001, FBT002 - as Templar's scripts pass it
    ) -> tuple[Self, list[PageInfo]]:
        """Draw the pages of a window and read them; without a seed, draw by a random one.

        Returns:
            The loader and its pages.

        Raises:
            MillraceError: The pages cannot be drawn or read.
        """
        del data_type  # of Templar's log
        drawn_seed = int(np.random.default_rng().integers(1000, 1000000)) if seed is None else seed
        pages = await cls.next_pages(offset, hparams.pages_per_window, drawn_seed)
        loader = await cls.create(
            hparams.batch_size, hparams.sequence_length, pages, tokenizer, pack_samples
        )
        return loader, pages

    @classmethod
    def close_all(cls) -> None:
        """Close the datasets that were opened. Later calls open them again, with new listings."""
        with cls._lock:
            for _, opened in cls._opened:
                opened.pages.close()
            cls._opened.clear()

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches of the shape ``(batch_size, sequence_length)``, always from the first."""
        wanted = self.batch_size * self.sequence_length
        parts: list[npt.NDArray[Any]] = []
        size = 0
        for page in self._tokens:
            part = page.tokens if self.pack_samples else self._pad(page)
            parts.append(part)
            size += len(part)
            while size >= wanted:
                joined = np.concatenate(parts)
                yield joined[:wanted].reshape(self.batch_size, -1).astype(np.int64)
                parts, size = [joined[wanted:]], size - wanted

    def _pad(self, page: TokenPage) -> npt.NDArray[Any]:
        """Return documents, each filled with end tokens to a multiple of a sequence's length."""
        end_id = self.tokenizer.end_id
        sizes = page.ends - page.starts - 1  # without the end token
        padded = -(-sizes // self.sequence_length) * self.sequence_length
        joined = np.full(int(padded.sum()), end_id, page.tokens.dtype)
        at = 0
        for start, size, length in zip(
            page.starts.tolist(), sizes.tolist(), padded.tolist(), strict=True
        ):
            joined[at : at + size] = page.tokens[start : start + size]
            at += length
        return joined

    def _load(self, pages_info: Sequence[PageInfo], page_rows: int) -> None:
        opened = self._open()
        pages = [
            page
            for name, row, _ in pages_info
            for page in make_pages(
                _find_config(opened.configs, name), opened.numbers, row, row + page_rows
            )
        ]
        loader = TokenLoader(opened.pages, self.tokenizer)
        try:
            self._tokens = [_drop_empty(page) for page in loader.read(pages)]
        except errors.ChangedError:
            self._forget(opened)  # so the next call opens the new version
            raise
        self.pages = list(pages_info)

    @classmethod
    def _open(cls) -> _OpenedDataset:
        """Return the dataset, which is opened once in a process."""
        specs = (
            _read_environment(cls.DATASET_SUBFOLDER)
            if cls.source is None
            else list_specs(cls.source)
        )
        with cls._lock:
            found = next((opened for known, opened in cls._opened if known == specs), None)
            if found is None:
                found = _open_dataset(specs)
                cls._opened.append((specs, found))
        return found

    @classmethod
    def _forget(cls, opened: _OpenedDataset) -> None:
        """Open a dataset again at the next call. Other threads may still use this one."""
        with cls._lock:
            cls._opened[:] = [one for one in cls._opened if one[1] is not opened]

    @classmethod
    def _open_tokenizer(cls, tokenizer: FastTokenizer | PageTokenizer) -> PageTokenizer:
        if isinstance(tokenizer, PageTokenizer):
            if tokenizer.end_id is None:
                raise errors.ConfigurationError("The tokenizer has no end token: set `end_token`.")
            return tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or tokenizer.eos_token_id is None:
            raise errors.ConfigurationError(
                "The tokenizer has no `backend_tokenizer`, or no `eos_token_id`. Load a fast "
                "tokenizer of transformers, or make a PageTokenizer of its tokenizer.json."
            )
        body, end_id = cast("str", backend.to_str()).encode(), tokenizer.eos_token_id
        with cls._lock:
            if (body, end_id) not in cls._tokenizers:
                cls._tokenizers.clear()
                cls._tokenizers[body, end_id] = PageTokenizer(
                    body, end_token=end_id, add_special_tokens=True
                )
            return cls._tokenizers[body, end_id]


def _find_config(configs: dict[str, TemplarConfig], name: str) -> TemplarConfig:
    if name not in configs:
        raise errors.ConfigurationError(
            f"The dataset has no config {name!r}. Draw the pages with its own index."
        )
    return configs[name]


def _drop_empty(page: TokenPage) -> TokenPage:
    """Return the documents of a page that have more than an end token, as Templar's loader does."""
    sizes = page.ends - page.starts
    has_tokens = sizes > 1
    if has_tokens.all():
        return page
    kept = np.repeat(has_tokens, sizes)
    return TokenPage(page.tokens[kept], np.cumsum(sizes[has_tokens]))


def _open_dataset(specs: list[StoreSpec]) -> _OpenedDataset:
    """Open a dataset that one store has, or several."""
    pages = PageLoader(specs)
    configs = _read_index(specs) or group_by_folder(pages.paths, pages.table)
    numbers = match_files(list(configs.values()), pages.paths)
    for config in configs.values():
        for path, rows in config.files:
            if rows != pages.table.count_rows(numbers[path]):
                raise errors.CorruptError(
                    f"{specs[0].url}/{pages.paths[numbers[path]]} has "
                    f"{pages.table.count_rows(numbers[path])} rows, and {SHARD_SIZES} says {rows}. "
                    "Make the index again."
                )
    return _OpenedDataset(pages, configs, numbers)


def _read_index(specs: list[StoreSpec]) -> dict[str, TemplarConfig]:
    """Return the configs of the first store that has an index; empty without an index.

    Raises:
        MillraceError: The index cannot be read. The error is that of the last store.
    """
    if not is_store_url(specs[0].url):  # then it is the only one
        return {} if is_web_url(specs[0].url) else read_templar_index(open_files(specs[0]))
    *others, last = open_mirrors(specs)
    for store in others:
        with suppress(errors.MillraceError):
            if found := read_templar_index(limit_retries(store)):
                return found
    return read_templar_index(last)


def _read_environment(folder: str) -> list[StoreSpec]:
    """Return the stores that Templar's variables name.

    Raises:
        ConfigurationError: Variables are missing, or the list of buckets cannot be read.
    """
    listed = read_variable(f"{_ENVIRONMENT}BUCKET_LIST")
    names = ("ACCOUNT_ID", "BUCKET_NAME", "READ_ACCESS_KEY_ID", "READ_SECRET_ACCESS_KEY")
    own = {name: read_variable(f"{_ENVIRONMENT}{name}") or "" for name in names}
    missing = [f"{_ENVIRONMENT}{name}" for name, value in own.items() if not value]
    if missing and not listed:
        raise errors.ConfigurationError(
            f"Set {', '.join(missing)}, or `R2DatasetLoader.source` to the URL of the dataset."
        )
    specs = [] if missing else [_make_spec(*own.values())]
    specs += _read_bucket_list(listed) if listed else []
    first_of_each = {spec.url: spec for spec in reversed(specs)}
    return [spec.with_prefix(folder) for spec in reversed(first_of_each.values())]


def _read_bucket_list(text: str) -> list[StoreSpec]:
    try:
        return [
            StoreSpec(url=entry)
            if isinstance(entry, str)
            else _make_spec(
                entry["account_id"],
                entry["name"],
                entry["credentials"]["read"]["access_key_id"],
                entry["credentials"]["read"]["secret_access_key"],
            )
            for entry in orjson.loads(text)
        ]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise errors.ConfigurationError(
            f"{_ENVIRONMENT}BUCKET_LIST is no list of buckets: write "
            '[{"account_id": ..., "name": ..., "credentials": {"read": {"access_key_id": ..., '
            '"secret_access_key": ...}}}].'
        ) from None


def _make_spec(account: str, bucket: str, key_id: str, secret: str) -> StoreSpec:
    return StoreSpec(
        url=f"r2://{account}/{bucket}",
        credentials=Credentials(access_key_id=key_id, secret_access_key=SecretStr(secret)),
    )
