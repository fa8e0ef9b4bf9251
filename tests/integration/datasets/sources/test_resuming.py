"""Contract of every kind of source: a run that continues reads its files from the position that
`RESUMES` names, and refuses them where `RESUMES` has no position."""

import base64
import csv
import gzip
import io
import json
import random
import secrets
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from huggingface_hub import CommitOperationAdd, HfApi
from pyarrow import parquet
from pydantic import SecretStr

from millrace import errors
from millrace.datasets.sources import (
    BadRow,
    Division,
    SourceKind,
    SourceSettings,
    compressed,
    open_files,
    open_source,
    partition_source,
)
from millrace.datasets.sources.resuming import (
    MEANINGS,
    RESUMES,
    FileResume,
    LocationKind,
    ResumePoint,
)
from millrace.keys.datasets import DatasetKeys
from millrace.storage import StoreSpec, open_store, put
from millrace.testing.hub import READER, WRITER, HubServer
from tests.stores import make_spec
from tests.support.web import Site, serve

KEYS = DatasetKeys("d")
ROWS, GROUP, ROW_BYTES = 100, 10, 40_000
NEXT = 75  # the first row after the stop, in the middle of a group
SEEK_INTERVAL = 64 << 10
SLACK = 160 << 10  # of the reads of a header or footer
FILE_KINDS = [(kind, resume) for kind, resumes in RESUMES.items() for resume in resumes]


def make_texts() -> list[str]:
    dice = random.Random(7)
    return [base64.b64encode(dice.randbytes(ROW_BYTES * 3 // 4)).decode() for _ in range(ROWS)]


TEXTS = make_texts()


def make_lines(**columns: str) -> list[bytes]:
    return [json.dumps({"text": text, **columns}).encode() + b"\n" for text in TEXTS]


def make_list() -> list[bytes]:
    """Return the lines of a list of URLs that are not requested, since they are none."""
    return make_lines(url="none")


def make_table() -> list[bytes]:
    body = io.StringIO()
    csv.writer(body, lineterminator="\n").writerows([[text] for text in TEXTS])
    first, *rest = body.getvalue().encode().splitlines(keepends=True)
    return [b"text\n" + first, *rest]


def make_parquet(**columns: list[str]) -> bytes:
    body = io.BytesIO()
    parquet.write_table(
        pyarrow.table({"text": TEXTS, **columns}), body, row_group_size=GROUP, compression="none",
        use_dictionary=False, write_statistics=False,
    )  # fmt: skip
    return body.getvalue()


def make_tar() -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for number, text in enumerate(TEXTS):
            info = tarfile.TarInfo(f"{number:03d}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return body.getvalue()


def join_frames(lines: list[bytes]) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return b"".join(
        compress(b"".join(lines[at : at + GROUP])) for at in range(0, len(lines), GROUP)
    )


FILES = {
    (SourceKind.JSONL, "not compressed"): lambda: {"a.jsonl": b"".join(make_lines())},
    (SourceKind.JSONL, "`.gz`"): lambda: {"a.jsonl.gz": gzip.compress(b"".join(make_lines()), 1)},
    (SourceKind.JSONL, "`.zst`"): lambda: {"a.jsonl.zst": join_frames(make_lines())},
    (SourceKind.CSV, "not compressed"): lambda: {"a.csv": b"".join(make_table())},
    (SourceKind.CSV, "`.gz`"): lambda: {"a.csv.gz": gzip.compress(b"".join(make_table()), 1)},
    (SourceKind.CSV, "`.zst`"): lambda: {"a.csv.zst": join_frames(make_table())},
    (SourceKind.PARQUET, ""): lambda: {"a.parquet": make_parquet()},
    (SourceKind.HUGGINGFACE, "parquet"): lambda: {"a.parquet": make_parquet()},
    (SourceKind.HUGGINGFACE, "others"): lambda: {"a.jsonl": b"".join(make_lines())},
    (SourceKind.URLS, "not compressed"): lambda: {"a.jsonl": b"".join(make_list())},
    (SourceKind.URLS, "`.gz`"): lambda: {"a.jsonl.gz": gzip.compress(b"".join(make_list()), 1)},
    (SourceKind.URLS, "`.zst`"): lambda: {"a.jsonl.zst": join_frames(make_list())},
    (SourceKind.URLS, "parquet"): lambda: {"a.parquet": make_parquet(url=["none"] * ROWS)},
    (SourceKind.FILES, ""): lambda: {f"{n:03d}.txt": t.encode() for n, t in enumerate(TEXTS)},
    (SourceKind.WEBDATASET, ""): lambda: {"a.tar": make_tar()},
}  # fmt: skip
"""Files with the texts, for each kind of source and of its files. Add new kinds here."""


def read_text(row: Any) -> str:
    """Return the text of a sample, or of a row of a list whose URL has no body."""
    if isinstance(row, BadRow):
        return json.loads(row.data)["text"]
    return row.fields["txt"].decode()


class CountedFiles:
    """Files of a source, and the bytes that were read of them."""

    def __init__(self, files: Any) -> None:
        self._files, self.bytes = files, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def read(self, file: Any) -> bytes:
        body = self._files.read(file)
        self.bytes += len(body)
        return body

    def iterate_blocks(self, *given: Any, **options: Any) -> Iterator[bytes]:
        for block in self._files.iterate_blocks(*given, **options):
            self.bytes += len(block)
            yield block


class Counter:
    """Files at a location, and a count of the bytes that were read of them."""

    def __init__(self, files: Any) -> None:
        self.files = CountedFiles(files)

    def count(self) -> int:
        return self.files.bytes


class HubCounter(Counter):
    """Files of a repository, which the library `datasets` reads without `files`."""

    def __init__(self, files: Any, hub: HubServer, repo: str) -> None:
        super().__init__(files)
        self._hub, self._repo = hub, f"datasets/{repo}"

    def count(self) -> int:
        return self.files.bytes or self._hub.count_sent_bytes(self._repo)


class SiteCounter(Counter):
    """Files of a web server that sends each file as a whole, also if the client closes earlier."""

    def __init__(self, files: Any, site: Site) -> None:
        super().__init__(files)
        self._site = site

    def count(self) -> int:
        return sum(len(self._site.files[path]) for path, _ in self._site.requests)


@contextmanager
def place(
    location: LocationKind, bodies: dict[str, bytes], request: pytest.FixtureRequest
) -> Iterator[Counter]:
    """Put files at a location, and open them there."""
    match location:
        case LocationKind.FOLDER | LocationKind.BUCKET:
            kind = "local" if location is LocationKind.FOLDER else "rgw"
            store = open_store(make_spec(kind, request))
            for name, body in bodies.items():
                put(store, name, body)
            yield Counter(open_files(store.spec))
        case LocationKind.HUB:
            hub: HubServer = request.getfixturevalue("hub")
            repo = hub.make_repo(dataset=True)
            added = [CommitOperationAdd(name, body) for name, body in bodies.items()]
            HfApi(endpoint=hub.endpoint, token=WRITER).create_commit(
                repo, added, commit_message="files", repo_type="dataset"
            )
            options = {"token": SecretStr(READER)}
            spec = StoreSpec(url=f"hf://datasets/{repo}", endpoint=hub.endpoint, options=options)
            yield HubCounter(open_files(spec), hub, repo)
        case LocationKind.SERVER | LocationKind.SERVER_WITHOUT_PARTS:
            has_ranges = location is LocationKind.SERVER
            files = {f"/{name}": body for name, body in bodies.items()}
            with serve(Site(files=files, has_ranges=has_ranges)) as site:
                opened = open_files(StoreSpec(url=site.url), paths=list(bodies), allow_private=True)
                yield Counter(opened) if has_ranges else SiteCounter(opened, site)


def test_every_kind_has_its_positions() -> None:
    assert set(RESUMES) == set(SourceKind)
    assert set(FILES) == {(kind, resume.files) for kind, resume in FILE_KINDS}
    points = {point for _, resume in FILE_KINDS for point in resume.points.values()}
    assert set(MEANINGS) == set(ResumePoint) == points


@pytest.mark.parametrize("location", LocationKind)
@pytest.mark.parametrize(
    ("kind", "resume"),
    FILE_KINDS,
    ids=[f"{kind}-{resume.files.replace(' ', '-') or 'all'}" for kind, resume in FILE_KINDS],
)
def test_a_run_that_continues_reads_from_its_position(
    kind: SourceKind,
    resume: FileResume,
    location: LocationKind,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compressed, "SEEK_INTERVAL", SEEK_INTERVAL)
    bodies, point = FILES[kind, resume.files](), resume.points.get(location)
    has_columns = kind not in {SourceKind.FILES, SourceKind.WEBDATASET}
    chosen = SourceSettings(kind=kind, columns={"txt": "text"} if has_columns else None)
    dataset = open_store((tmp_path / "dataset").as_uri())
    with place(location, bodies, request) as source_files:
        opened: Any = source_files.files
        if point is None:
            with pytest.raises(errors.ConfigurationError):
                partition_source(chosen, opened, KEYS, Division(1 << 30, 1 << 20, None, 0.0))
            return
        divided = partition_source(chosen, opened, KEYS, Division(1 << 30, 1 << 20, None, 0.0))
        for key, body in divided.objects.items():
            put(dataset, key, body)
        (partition,) = divided.partitions

        def read(cursor: int) -> list[Any]:
            source = open_source(divided.record, opened, dataset)
            return list(source.iterate_rows(partition.source_range, cursor))

        rows = read(0)
        assert [read_text(row) for row in rows] == TEXTS
        before = source_files.count()
        assert read(rows[NEXT - 1].next_cursor) == rows[NEXT:]
        count = source_files.count() - before

    total = sum(map(len, bodies.values()))
    again = count - total * (ROWS - NEXT) // ROWS
    if kind is SourceKind.CSV and location is LocationKind.SERVER_WITHOUT_PARTS:
        again -= total  # another request for the header, which ends early
    in_group = total * (NEXT % GROUP) // ROWS
    least, most = {
        ResumePoint.ROW: (0, 0),
        ResumePoint.SAMPLE: (0, 0),
        ResumePoint.SEEK_POINT: (0, SEEK_INTERVAL + (128 << 10)),
        ResumePoint.FRAME: (in_group, in_group),
        ResumePoint.ROW_GROUP: (in_group, in_group),
        ResumePoint.FILE: (total * NEXT // ROWS, total * NEXT // ROWS),
    }[point]
    assert least - SLACK // 10 <= again <= most + SLACK


@pytest.mark.parametrize("files", ["not compressed", "`.gz`", "`.zst`"])
def test_the_plan_of_csv_files_reads_little_more_than_their_headers(files: str) -> None:
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for name, body in FILES[SourceKind.CSV, files]().items():
        put(store, name, body)
    opened: Any = CountedFiles(open_files(store.spec))
    chosen = SourceSettings(kind=SourceKind.CSV, columns={"txt": "text"})
    partition_source(chosen, opened, KEYS, Division(1 << 30, 1 << 20, None, 0.0))
    assert 0 < opened.bytes <= SLACK
