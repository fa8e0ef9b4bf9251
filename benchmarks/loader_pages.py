"""Read random pages of 100 texts from an S3 store, and make packed tokens of 24 pages.

`benchmarks.loader` calls `run_pages`. The texts are parts of Python's standard library of 2.6 kB on
average. All systems read the same pages, in files of the format ``pages``; Lance has the same rows
in its own. Files are open before the measurement, with their footers.

``page``: one page after the other.

- ``millrace``: `PageLoader`, one request a page.
- ``templar-like``: s3fs with blocks of 4 MB, and pyarrow's ``read_row_group``.
- ``pyarrow``: pyarrow's own S3 file system, and ``read_row_group``.
- ``lance``: ``take`` of pylance.
- ``floor``: obstore GETs of the stored pages, whose places are known. Nothing is decoded.

``24 pages to tokens``: 24 pages become sequences of 2,048 tokens, packed.

- ``millrace``: `TokenLoader` and `Packer`.
- ``templar-like``: eight pages at once; each text is encoded alone in a thread by ``tokenizers``,
  and the tokens are packed as lists of Python. No text is truncated, so that all do the same work.
- ``pyarrow`` and ``lance``: eight pages at once, ``encode_batch_fast`` and NumPy.
- ``floor``: eight GETs at once, and tiktoken on the texts, which are in memory.

``kB_per_page`` is measured in a pass of its own, behind a relay that counts what the store sends.
"""

import asyncio
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson

from benchmarks.common import (
    CpuTimer,
    Results,
    measure_process,
    print_table,
    rotate_systems,
)
from benchmarks.corpus import read_text
from millrace.testing.byte_level import END, train_byte_level
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW

SYSTEMS = ("millrace", "templar-like", "pyarrow", "lance", "floor")
PAGE, TOKENS = "page", "24 pages to tokens"
ROWS, PAGES, LENGTH, CONCURRENCY = 100, 24, 2048, 8
VOCABULARY = 16_000
BLOCK = 4 << 20  # of Templar's loader
MIB = 1 << 20

ReadPage = Callable[[tuple[int, int]], list[str]]
"""Function that returns the texts of a page, given as the number of its file and its first row."""


def make_texts(size: int) -> list[str]:
    """Return texts of 2.6 kB on average, of exponentially distributed lengths."""
    whole, rng = read_text(), random.Random(1)
    texts: list[str] = []
    made = 0
    while made < size:
        length = 1 + int(rng.expovariate(1 / 2600))
        start = rng.randrange(len(whole) - length)
        texts.append(whole[start : start + length])
        made += length
    return texts


def upload(folder: Path, spec: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Write the texts as pages and for Lance, and return what a run needs."""
    import lance
    import pyarrow as pa

    from millrace.datasets import PipelineSettings, shard_dataset
    from millrace.datasets.loader import PageLoader
    from millrace.datasets.loader.page_index import index_pages

    source = folder / "rows"
    source.mkdir()
    (source / "rows.jsonl").write_bytes(b"\n".join(orjson.dumps({"text": t}) for t in texts))
    shard_dataset(
        PipelineSettings.model_validate(
            {
                "source": {"url": source.as_uri(), "kind": "jsonl", "columns": {"txt": "text"}},
                "store": spec,
                "dataset": "texts",
                "sharding": {
                    "formats": ["pages"],
                    "types": {"txt": "str"},
                    "seed": None,
                    "shard_bytes": "32MiB",
                },
                "execution": {"workers": 0},
            }
        )
    )
    pages = {**spec, "url": f"{spec['url']}/texts/shards/pages/train"}
    loader = PageLoader(make_spec(pages))
    index_pages(make_spec(pages))
    counts = [loader.table.count_rows(number) for number in range(len(loader.paths))]
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    table = pa.table({"text": list(texts)})
    lance.write_dataset(table, f"{spec['url']}/lance", storage_options=make_lance_options(spec))
    drawn = [(page.file, page.start) for page in loader.draw(1, 0, len(loader))
             if page.end - page.start == ROWS]  # fmt: skip
    return {
        "spec": spec,
        "pages": pages,
        "paths": loader.paths,
        "starts": starts,
        "drawn": drawn,
        "tokenizer": train_byte_level(texts[: len(texts) // 8], VOCABULARY),
    }


def make_spec(values: dict[str, Any]) -> Any:
    """Return a store from plain values."""
    from millrace.storage import StoreSpec

    return StoreSpec.model_validate(values)


def make_lance_options(spec: dict[str, Any]) -> dict[str, str]:
    """Return the options of a store under the names of Lance."""
    return {
        "access_key_id": spec["credentials"]["access_key_id"],
        "secret_access_key": spec["credentials"]["secret_access_key"],
        "endpoint": spec["endpoint"],
        "region": "us-east-1",
        "allow_http": "true",
    }


def open_system(system: str, place: dict[str, Any]) -> ReadPage:
    """Open the files, and return the function that reads a page."""
    return OPENERS[system](place)


def _open_millrace(place: dict[str, Any]) -> ReadPage:
    from millrace.datasets.loader import Page, PageLoader

    loader = PageLoader(make_spec(place["pages"]), cache_bytes=64 * MIB)

    def read(page: tuple[int, int]) -> list[str]:
        (values,) = loader.read([Page(page[0], page[1], page[1] + ROWS)])
        texts: list[str] = values.to_pylist()
        return texts

    _warm(read, place)
    return read


def _open_parquet(place: dict[str, Any], open_file: Callable[[str], Any]) -> ReadPage:
    """Return a function that reads a row group for a page, with open files."""
    import pyarrow.parquet as pq

    bucket = urlsplit(place["pages"]["url"])
    files = [
        pq.ParquetFile(open_file(f"{bucket.netloc}{bucket.path}/{path}")) for path in place["paths"]
    ]
    locks = [threading.Lock() for _ in files]
    ends = [
        np.cumsum([one.metadata.row_group(n).num_rows for n in range(one.num_row_groups)])
        for one in files
    ]

    def read(page: tuple[int, int]) -> list[str]:
        file, row = page
        group = int(np.searchsorted(ends[file], row, "right"))
        with locks[file]:
            table = files[file].read_row_group(group, columns=["text"])
        first = row - (int(ends[file][group - 1]) if group else 0)
        texts: list[Any] = table["text"].to_pylist()
        return texts[first : first + ROWS]

    _warm(read, place)
    return read


def _open_templar(place: dict[str, Any]) -> ReadPage:
    import s3fs

    spec = place["spec"]
    system = s3fs.S3FileSystem(
        key=spec["credentials"]["access_key_id"],
        secret=spec["credentials"]["secret_access_key"],
        client_kwargs={"endpoint_url": spec["endpoint"], "region_name": "us-east-1"},
        config_kwargs={"max_pool_connections": 50, "retries": {"max_attempts": 3}},
        default_block_size=BLOCK,
        default_cache_type="readahead",
    )
    return _open_parquet(place, lambda path: system.open(path, "rb"))


def _open_pyarrow(place: dict[str, Any]) -> ReadPage:
    from pyarrow import fs

    spec, parts = place["spec"], urlsplit(place["spec"]["endpoint"])
    system = fs.S3FileSystem(
        access_key=spec["credentials"]["access_key_id"],
        secret_key=spec["credentials"]["secret_access_key"],
        endpoint_override=parts.netloc,
        scheme=parts.scheme,
        region="us-east-1",
    )
    return _open_parquet(place, system.open_input_file)


def _open_lance(place: dict[str, Any]) -> ReadPage:
    import lance

    spec = place["spec"]
    dataset = lance.dataset(f"{spec['url']}/lance", storage_options=make_lance_options(spec))

    def read(page: tuple[int, int]) -> list[str]:
        first = place["starts"][page[0]] + page[1]
        table = dataset.take(list(range(first, first + ROWS)), columns=["text"])
        texts: list[Any] = table["text"].to_pylist()
        return texts

    _warm(read, place)
    return read


def _open_floor(place: dict[str, Any]) -> ReadPage:
    """Return a function that fetches the bytes of a page, and returns no texts."""
    import obstore

    from millrace.datasets.loader.column import read_layout
    from millrace.datasets.sources import open_files
    from millrace.datasets.sources.files import Patterns
    from millrace.datasets.sources.table import iterate_files
    from millrace.storage import open_store

    spec = make_spec(place["pages"])
    files, store = open_files(spec), open_store(spec)
    found = iterate_files(files.collect(Patterns(["*.parquet"])), local=False)
    layouts = {file.path: read_layout(files, file, "text") for _, file, _ in found}

    def read(page: tuple[int, int]) -> list[str]:
        layout = layouts[place["paths"][page[0]]]
        group = int(np.searchsorted(layout.starts, page[1], "right")) - 1
        part = layout.groups[group][0]
        assert part.first_rows is not None
        number = int(np.searchsorted(part.first_rows, page[1] - layout.starts[group], "right"))
        start, end = part.bounds[number : number + 2].tolist()
        obstore.get_range(store.raw, place["paths"][page[0]], start=start, end=end)
        return []

    _warm(read, place)
    return read


def _warm(read: ReadPage, place: dict[str, Any]) -> None:
    """Read a page of each file, so that connections and footers are there."""
    for file in range(len(place["paths"])):
        read(next(page for page in reversed(place["drawn"]) if page[0] == file))


OPENERS: dict[str, Callable[[dict[str, Any]], ReadPage]] = {
    "millrace": _open_millrace,
    "templar-like": _open_templar,
    "pyarrow": _open_pyarrow,
    "lance": _open_lance,
    "floor": _open_floor,
}


def measure_pages(system: str, place: dict[str, Any], first: int, count: int) -> dict[str, float]:
    """Read pages one after the other."""
    read = open_system(system, place)
    drawn = place["drawn"][first : first + count]
    seconds: list[float] = []
    texts: list[str] = []
    cpu = CpuTimer()
    for page in drawn:
        began = time.perf_counter()
        texts += read(page)
        seconds.append(time.perf_counter() - began)
    return {
        "samples/s": count * ROWS / sum(seconds),
        "p50_ms": median(seconds) * 1e3,
        "p99_ms": quantiles(seconds, n=100, method="inclusive")[98] * 1e3,
        "cpu_ms": cpu.read() / count * 1e3,
        "digest": _hash("".join(texts).encode()),
    }


def measure_tokens(system: str, place: dict[str, Any], first: int) -> dict[str, float]:
    """Make packed tokens of 24 pages."""
    make = {"millrace": _prepare_millrace, "floor": _prepare_floor}.get(system, _prepare_peer)
    run = make(system, place, place["drawn"][first : first + PAGES])
    cpu, began = CpuTimer(), time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - began
    return {
        "samples/s": PAGES * ROWS / seconds,
        "tokens/s": len(tokens) / seconds,
        "s": seconds,
        "cpu_s": cpu.read(),
        "digest": _hash(np.asarray(tokens, np.uint32).tobytes()),
    }


def _hash(data: bytes) -> float:
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big"))


def _prepare_millrace(
    _system: str, place: dict[str, Any], drawn: Sequence[tuple[int, int]]
) -> Callable[[], Any]:
    from millrace.datasets.loader import Packer, Page, PageLoader, TokenLoader

    pages = PageLoader(make_spec(place["pages"]), cache_bytes=64 * MIB, concurrency=CONCURRENCY)
    loader = TokenLoader(pages, place["tokenizer"].encode(), end_token=END)
    chosen = [Page(file, row, row + ROWS) for file, row in drawn]
    for file in range(len(place["paths"])):
        found = (page for page in reversed(place["drawn"]) if page[0] == file)
        other, row = next(found)
        list(loader.read([Page(other, row, row + ROWS)]))

    def run() -> Any:
        packer = Packer(LENGTH, loader.dtype)
        packed = [one.tokens for one in loader.read_packed(chosen, packer)]
        return np.concatenate(packed).ravel()

    return run


def _prepare_peer(
    system: str, place: dict[str, Any], drawn: Sequence[tuple[int, int]]
) -> Callable[[], Any]:
    from tokenizers import Tokenizer

    read = open_system(system, place)
    tokenizer = Tokenizer.from_str(place["tokenizer"])
    end = tokenizer.token_to_id(END)
    assert end is not None

    def encode_singly(texts: list[str]) -> list[int]:
        joined: list[int] = []
        for text in texts:  # in the thread of the page, as in Templar's loader
            joined.extend(tokenizer.encode(text).ids)
            joined.append(end)
        return joined

    def encode_batch(texts: list[str]) -> Any:
        ids = tokenizer.encode_batch_fast(texts)
        return np.concatenate([np.array([*one.ids, end], np.uint16) for one in ids])

    def run_templar(pool: ThreadPoolExecutor) -> Any:
        buffer: list[int] = []
        for tokens in pool.map(lambda page: encode_singly(read(page)), drawn):
            buffer.extend(tokens)
        return _pack_lists(buffer, end)

    def run_others(pool: ThreadPoolExecutor) -> Any:
        tokens = np.concatenate(list(pool.map(lambda page: encode_batch(read(page)), drawn)))
        return tokens[: len(tokens) // LENGTH * LENGTH]

    def run() -> Any:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return run_templar(pool) if system == "templar-like" else run_others(pool)

    return run


def _pack_lists(buffer: list[int], end: int) -> list[int]:
    """Pack tokens as Templar's loader does, by ``list.index`` and slices."""
    padded: list[int] = []
    packed: list[int] = []
    while buffer:
        position = buffer.index(end) + 1
        document, buffer = buffer[:position], buffer[position:]
        padded.extend(document[:-1])
        padded.append(end)
        while len(padded) >= LENGTH:
            packed.extend(padded[:LENGTH])
            padded = padded[LENGTH:]
    return packed


def _prepare_floor(
    _system: str, place: dict[str, Any], drawn: Sequence[tuple[int, int]]
) -> Callable[[], Any]:
    from millrace.datasets.loader import PageTokenizer

    texts = [open_system("millrace", place)(page) for page in drawn]
    read = open_system("floor", place)
    tokenizer = PageTokenizer(place["tokenizer"].encode(), end_token=END)

    def work(page: tuple[int, int], own: list[str]) -> Any:
        read(page)
        return tokenizer.encode(own).tokens

    def run() -> Any:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            tokens = np.concatenate(list(pool.map(work, drawn, texts)))
        return tokens[: len(tokens) // LENGTH * LENGTH]

    return run


def measure_bytes(system: str, place: dict[str, Any], first: int, count: int) -> dict[str, float]:
    """Read pages through a relay, and return what the store sends for one."""
    parts = urlsplit(place["spec"]["endpoint"])
    assert parts.hostname is not None
    assert parts.port is not None
    with relay(parts.hostname, parts.port) as (port, counted):
        through = f"http://127.0.0.1:{port}"
        spec = {**place["spec"], "endpoint": through}
        pages = {**place["pages"], "endpoint": through}
        read = open_system(system, {**place, "spec": spec, "pages": pages})
        before = counted[0]
        for page in place["drawn"][first : first + count]:
            read(page)
        return {"kB_per_page": (counted[0] - before) / count / 1e3}


@contextmanager
def relay(host: str, port: int) -> Iterator[tuple[int, list[int]]]:
    """Forward connections to a server, and count the bytes that the server sends.

    Yields:
        Port of the relay, and a list with the count.
    """
    counted = [0]

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool
    ) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                counted[0] += len(data) if is_counted else 0
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(
                forward(reader, back, is_counted=False), forward(there, writer, is_counted=True)
            )

    listening = socket.create_server(("127.0.0.1", 0))
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(connect, sock=listening)
        await ended.wait()
        server.close()

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1], counted
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def run_pages(folder: Path, server: RGW, results: Results, *, quick: bool) -> None:
    """Measure all systems in turn, with pages in a new bucket, and add their values."""
    credentials = make_credentials(server.full)
    spec = {
        "url": f"s3://{server.create_bucket('pages')}",
        "endpoint": server.endpoint,
        "credentials": {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key.get_secret_value(),
        },
    }
    place = upload(folder, spec, make_texts((20 if quick else 80) * MIB))
    count, repeats = (20, 1) if quick else (60, 3)
    for repeat in range(repeats):
        digests: dict[tuple[str, str], float] = {}
        for system in rotate_systems(SYSTEMS, repeat):
            found = measure_process(measure_pages, system, place, repeat * count, count)
            _add(results, PAGE, system, found.figures, found.peak_rss, digests)
            found = measure_process(measure_tokens, system, place, repeat * PAGES)
            _add(results, TOKENS, system, found.figures, found.peak_rss, digests)
        _check(digests)
    for system in SYSTEMS:
        found = measure_process(measure_bytes, system, place, 0, count)
        results.add(PAGE, system, "kB_per_page", found.figures["kB_per_page"])


def _add(
    results: Results,
    work: str,
    system: str,
    figures: dict[str, float],
    peak_rss: int,
    digests: dict[tuple[str, str], float],
) -> None:
    digests[work, system] = figures.pop("digest")
    for metric, value in figures.items():
        results.add(work, system, metric, value)
    results.add(work, system, "peak_rss_MB", peak_rss / 1e6)


def _check(digests: dict[tuple[str, str], float]) -> None:
    """Check that all systems have read the same texts, and made the same tokens."""
    for work in (PAGE, TOKENS):
        systems = [one for one in SYSTEMS if (work, one) != (PAGE, "floor")]
        if len({digests[work, system] for system in systems}) > 1:
            raise RuntimeError(f"{work}: the systems have different results: {digests}")


def report_pages(results: Results) -> None:
    """Print the figures of both works, with ratios to the floor."""
    values = {(row.work, row.system, row.metric): row.value for row in results.compute_rows()}
    shown = {
        PAGE: ("samples/s", "kB_per_page", "p50_ms", "p99_ms", "cpu_ms", "peak_rss_MB"),
        TOKENS: ("samples/s", "tokens/s", "s", "cpu_s", "peak_rss_MB"),
    }
    for work, metrics in shown.items():
        lines = [
            [
                work,
                system,
                *(f"{values[work, system, metric]:,.4g}" for metric in metrics),
                f"{results.compute_ratio(work, system, 'floor', 'samples/s'):.2f}",
            ]
            for system in SYSTEMS
        ]
        print_table(["work", "system", *metrics, "/floor"], lines)
        print()
    size = values[PAGE, "millrace", "kB_per_page"] / values[PAGE, "lance", "kB_per_page"]
    speed = results.compute_ratio(TOKENS, "millrace", "templar-like", "samples/s")
    cpu = results.compute_ratio(TOKENS, "templar-like", "millrace", "cpu_s")
    print(f"A page has {size:.2f} times the bytes of Lance's (goal: at most 1.2).")
    print(f"Tokens of 24 pages: {speed:.1f} times templar-like (goal: 5), CPU {cpu:.1f} times.")
