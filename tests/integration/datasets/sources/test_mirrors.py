"""Sources with several locations, on real servers that die, differ or change."""

import io
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from pyarrow import parquet
from pydantic import SecretStr, ValidationError

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets import SourceLocation, delete_garbage, plan_garbage, repair_dataset
from millrace.datasets.pipeline import preflight_dataset
from millrace.datasets.plan import make_plan
from millrace.datasets.plan_digest import compute_plan_digest
from millrace.datasets.progress_events import ShardCommitted
from millrace.datasets.sources import StoredDigests, open_mirrored_files
from millrace.datasets.sources.files import Patterns
from millrace.datasets.sources.table import unpack_row
from millrace.keys.datasets import DatasetKeys
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, SourceRecord
from millrace.storage import StoreSpec, open_store
from millrace.testing.credentials import make_credentials
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.rgw import RGW
from tests.support.flows.fixtures import make_jsonl, make_texts
from tests.support.web import Site, serve

TEXTS = make_texts(1200)
FILES = {"a.jsonl": make_jsonl(TEXTS[:700]), "b.jsonl": make_jsonl(TEXTS[700:])}
KEYS = DatasetKeys("words")
RETRY = timedelta(seconds=0.5)


class StoppedError(Exception):
    pass


@dataclass
class Place:
    """A location of the files.

    Attributes:
        spec: Settings of the location.
        remove: Function that makes it fail for ever.
        site: Its server, if it is one of the web.
        folder: Its folder, if it is one.
    """

    spec: StoreSpec
    remove: Callable[[], Any]
    site: Site = field(default_factory=Site)
    folder: Path = Path()


@pytest.fixture
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Function that makes a location of a kind with files."""
    sites: list[Any] = []
    kinds: set[str] = set()

    def make(kind: str, files: dict[str, bytes] = FILES) -> Place:
        kinds.add(kind)
        match kind:
            case "folder":
                folder = tmp_path / f"place-{len(list(tmp_path.iterdir()))}"
                folder.mkdir()
                for name, body in files.items():
                    (folder / name).write_bytes(body)
                spec = StoreSpec(url=folder.as_uri())
                return Place(spec, lambda: shutil.rmtree(folder), folder=folder)
            case "web":
                serving = serve(Site(files={f"/d/{name}": body for name, body in files.items()}))
                site = serving.__enter__()
                sites.append(serving)
                spec = StoreSpec(url=f"{site.url}/d", retry_timeout=RETRY)
                return Place(spec, lambda: setattr(site, "dies_after", 0), site=site)
            case "bucket" | "parts":
                return make_bucket(request.getfixturevalue("rgw"), kind, files)
            case _:
                return make_repo(request.getfixturevalue("hub"), files)

    yield make
    for serving in sites:
        serving.__exit__(None, None, None)
    if "hub" in kinds:
        request.getfixturevalue("hub").fail_next(0, 404)


def make_bucket(rgw: RGW, kind: str, files: dict[str, bytes]) -> Place:
    """Make a bucket with the files; of the kind `parts`, with ETags that are no MD5."""
    bucket = rgw.create_bucket(f"mirror-{secrets.token_hex(8)}")
    client = rgw.make_client(rgw.full)
    for name, body in files.items():
        key = f"d/{name}"
        if kind == "bucket":
            client.put_object(Bucket=bucket, Key=key, Body=body)
            continue
        upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        about = {"Bucket": bucket, "Key": key, "UploadId": upload}
        etag = client.upload_part(**about, PartNumber=1, Body=body)["ETag"]
        client.complete_multipart_upload(
            **about, MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]}
        )
    spec = StoreSpec(
        url=f"s3://{bucket}/d", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full),
        retry_timeout=RETRY,
    )  # fmt: skip
    return Place(
        spec, lambda: [client.delete_object(Bucket=bucket, Key=f"d/{name}") for name in files]
    )


def make_repo(hub: HubServer, files: dict[str, bytes]) -> Place:
    repo = hub.make_repo(dataset=True)
    api = HfApi(endpoint=hub.endpoint, token=WRITER)
    operations = [CommitOperationAdd(f"d/{name}", body) for name, body in files.items()]
    api.create_commit(repo, operations, commit_message="files", repo_type="dataset")
    spec = StoreSpec(
        url=f"hf://datasets/{repo}@main/d", endpoint=hub.endpoint, retry_timeout=RETRY,
        options={"token": SecretStr(READER)},
    )  # fmt: skip
    return Place(spec, lambda: hub.fail_next(1_000_000, 404, f".*{repo}/.*"))


def make_settings(out: Path, *places: Place, workers: int = 0, **source: Any) -> PipelineSettings:
    first, *mirrors = (place.spec for place in places)
    chosen: dict[str, Any] = {"allow_private": True, "columns": {"txt": "text"}}
    if any(spec.url.startswith("http") for spec in (first, *mirrors)):
        chosen["paths"] = list(FILES)
    return PipelineSettings(
        dataset="words",
        source=SourceLocation(**dict(first), **(chosen | source), mirrors=mirrors),
        store=StoreSpec(url=out.as_uri()),
        sharding={"shard_bytes": 65536, "partition_bytes": 60_000},
        execution={"workers": workers},
    )


def read_shards(out: Path) -> dict[str, bytes]:
    """Return the bytes of the shards by their names."""
    folder = out / "words/shards"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.tar")}


def read_plan(out: Path) -> DatasetPlan:
    return fetch(open_store(out.as_uri()), KEYS.plan, DatasetPlan)


def shard_until(settings: PipelineSettings, commits: int) -> None:
    """Shard until a number of commits, and stop."""
    left = commits

    def stop(event: object) -> None:
        nonlocal left
        left -= isinstance(event, ShardCommitted)
        if left <= 0:
            raise StoppedError

    with pytest.raises(StoppedError):
        shard_dataset(settings, progress=stop)


@pytest.fixture
def expected(tmp_path: Path, make_place: Callable[..., Place]) -> dict[str, bytes]:
    """The shards of a run with one location."""
    place = make_place("folder")
    shard_dataset(make_settings(tmp_path / "one", place))
    return read_shards(tmp_path / "one")


def name(place: Place) -> str:
    return f"{place.spec.url} ({place.spec.endpoint})" if place.spec.endpoint else place.spec.url


def open_committed(*places: Place, report=None):
    """Open locations, whose first one is that of the plan and has its digests stored."""
    committed = SourceRecord(
        kind="jsonl", url=places[0].spec.url, settings={}, files=2, size=0,
        digest="blake3:" + "0" * 64,
    )  # fmt: skip
    store = open_store(f"memory://{secrets.token_hex(8)}")
    files = open_mirrored_files(
        [place.spec for place in places], allow_private=True, committed=committed,
        paths=list(FILES),
        digests=StoredDigests(store, KEYS), report=report,
    )  # fmt: skip
    files.store_digests(list_files(files))
    return files


def list_files(files):
    return [unpack_row(row) for row in files.locations[0].files.collect(Patterns()).rows]


def test_mirrors_are_no_part_of_the_plan(make_place, tmp_path):
    first, *mirrors = (make_place(kind) for kind in ("folder", "web", "folder"))
    digests = set()
    for chosen in ([], mirrors, mirrors[::-1], mirrors[1:]):
        settings = make_settings(tmp_path / "out", first, *chosen)
        plan, _ = make_plan(KEYS, settings.source, settings.source.open_files(), settings.sharding)
        digests.add(compute_plan_digest(plan))
    assert len(digests) == 1


@pytest.mark.parametrize("kind", ["folder", "web", "bucket", "parts", "hub"])
def test_the_plan_is_made_from_the_first_location_that_answers(
    make_place, expected, tmp_path, kind, caplog
):
    dead, alive = make_place("web"), make_place(kind)
    dead.remove()
    report = shard_dataset(make_settings(tmp_path / "out", dead, alive))
    assert read_shards(tmp_path / "out") == expected
    assert report.served[name(dead)] == 0
    assert report.served[name(alive)] >= sum(map(len, FILES.values()))
    (warning,) = [one.message for one in caplog.records if name(dead) in one.message]
    assert "status 503" in warning


PAIRS = [
    ("folder", "web"), ("web", "folder"), ("bucket", "folder"), ("bucket", "bucket"),
    ("parts", "web"), ("hub", "folder"), ("folder", "hub"), ("parts", "bucket"),
]  # fmt: skip


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize(("planned", "kind"), PAIRS)
def test_a_run_continues_when_the_location_of_its_plan_is_gone(
    make_place, expected, tmp_path, planned, kind, is_listed
):
    first, mirror, dead = make_place(planned), make_place(kind), make_place("web")
    dead.remove()
    shard_until(make_settings(tmp_path / "out", first, mirror), 5)
    plan = read_plan(tmp_path / "out")
    first.remove()
    locations = [dead, mirror, first] if is_listed else [mirror, dead]
    settings = make_settings(tmp_path / "out", *locations)
    found = preflight_dataset(settings, samples=2)[1]
    assert (found.state, found.refusals) == ("begun; the run continues it", ())
    (note,) = found.preview.notes
    assert note.endswith("the location of the plan, was not listed.")
    report = shard_dataset(settings)
    assert read_shards(tmp_path / "out") == expected
    assert read_plan(tmp_path / "out") == plan
    assert report.served[name(mirror)] > 0
    assert {size for where, size in report.served.items() if where != name(mirror)} <= {0}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_location_that_dies_within_a_file_is_followed_by_a_proven_mirror(
    make_place, expected, tmp_path, workers
):
    first, mirror = make_place("web"), make_place("folder")
    settings = make_settings(tmp_path / "out", first, mirror, workers=workers)
    whole = sum(map(len, FILES.values()))
    first.site.dies_after = whole + 2 * len(FILES) + 100_000  # digests, descriptions, rows
    report = shard_dataset(settings)
    assert read_shards(tmp_path / "out") == expected
    assert min(report.served.values()) > 50_000


def test_a_read_continues_at_the_offset_that_was_reached(make_place):
    first, mirror = make_place("web"), make_place("web")
    files = open_committed(first, mirror)
    (file, other), body = list_files(files), FILES["a.jsonl"]
    first.site.dies_after = 1000
    mirror.site.requests.clear()
    assert b"".join(files.iterate_blocks(file, 500, len(body), block=700)) == body[500:]
    reads = [span for _, span in mirror.site.requests if span != "bytes=0-0"]
    assert reads == [f"bytes=0-{len(body) - 1}", f"bytes=1500-{len(body) - 1}"]
    # It comes last now, and is not asked at all.
    before = len(first.site.requests)
    assert files.read(other) == FILES["b.jsonl"]
    assert len(first.site.requests) == before


FAULTY = {
    "other bytes": {**FILES, "a.jsonl": FILES["a.jsonl"].replace(b"water", b"wrong", 1)},
    "another size": {**FILES, "a.jsonl": FILES["a.jsonl"][:-100]},
    "no such file": {"b.jsonl": FILES["b.jsonl"]},
}  # fmt: skip


CASES = [
    *(("folder", fault) for fault in FAULTY), ("bucket", "other bytes"), ("parts", "other bytes"),
    ("hub", "other bytes"), ("bucket", "no such file"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_a_mirror_that_differs_is_left_out_with_one_warning(
    make_place, expected, tmp_path, caplog, kind, fault
):
    first, wrong, right = make_place("web"), make_place(kind, FAULTY[fault]), make_place("folder")
    workers = 2 if (kind, fault) == ("folder", "other bytes") else 0
    settings = make_settings(tmp_path / "out", first, wrong, right, workers=workers)
    first.site.dies_after = sum(map(len, FILES.values())) + 2 * len(FILES) + 50_000
    assert shard_dataset(settings).samples == len(TEXTS)
    assert read_shards(tmp_path / "out") == expected
    (warning,) = [one.message for one in caplog.records if name(wrong) in one.message]
    assert "a.jsonl" in warning
    assert {
        "other bytes": "has the same size, and other bytes", "another size": "bytes, not",
        "no such file": "does not have",
    }[fault] in warning  # fmt: skip


def test_wrong_bytes_reach_no_shard_if_no_mirror_is_equal(make_place, expected, tmp_path):
    first, wrong = make_place("web"), make_place("folder", FAULTY["other bytes"])
    dead = make_place("web")
    dead.remove()
    settings = make_settings(tmp_path / "out", first, wrong, dead)
    first.site.dies_after = sum(map(len, FILES.values())) + 2 * len(FILES) + 50_000
    with pytest.raises(errors.UnavailableError, match="cannot be read from any location") as raised:
        shard_dataset(settings)
    for reason in (f"{name(first)}: ", f"{name(wrong)}: ", f"{name(dead)}: ", "other bytes"):
        assert reason in str(raised.value)
    made = read_shards(tmp_path / "out")
    assert made.items() <= expected.items()
    first.site.dies_after = None
    shard_dataset(settings)
    assert read_shards(tmp_path / "out") == expected


def test_a_mirror_cannot_be_proven_if_the_plan_has_no_digests(make_place, tmp_path):
    first, mirror = make_place("folder"), make_place("folder")
    shard_until(make_settings(tmp_path / "out", first), 2)
    first.remove()
    settings = make_settings(tmp_path / "out", first, mirror)
    with pytest.raises(errors.ChangedError, match="has no stored digest"):
        shard_dataset(settings)


@pytest.mark.parametrize("kind", ["folder", "web"])
def test_a_mirror_that_is_replaced_during_a_read_is_left_out(make_place, kind):
    first, mirror, last = make_place("web"), make_place(kind), make_place("folder")
    faults = []
    files = open_committed(first, mirror, last, report=lambda *fault: faults.append(fault))
    file, body = list_files(files)[0], FILES["a.jsonl"]
    first.remove()
    mirror.site.cut_after = [len(body), 5000]  # of the proof and of the read
    found = b""
    for block in files.iterate_blocks(file, 0, len(body), block=1000):
        if not found:
            replace(mirror)
        found += block
    assert found == body
    assert [(where, differs) for where, _, differs in faults] == [
        (name(first), False), (name(mirror), True)
    ]  # fmt: skip
    assert "was written again" in faults[1][1]


def replace(place: Place) -> None:
    """Write other bytes of equal size."""
    other = FAULTY["other bytes"]["a.jsonl"]
    if place.site.url:
        place.site.headers = {"ETag": '"2"'}
        place.site.files["/d/a.jsonl"] = other
    else:
        (place.folder / "a.jsonl").write_bytes(other)


def test_a_file_that_was_written_again_with_the_same_bytes_is_proven(make_place):
    first, mirror = make_place("web"), make_place("folder")
    files = open_committed(first, mirror)
    file = list_files(files)[0]
    first.site.headers = {"ETag": '"2"'}
    assert files.read(file) == FILES["a.jsonl"]
    assert mirror.spec.url not in {where for where, size in files.served.items() if size}
    first.site.files["/d/a.jsonl"] = FAULTY["other bytes"]["a.jsonl"]
    first.site.headers = {"ETag": '"3"'}
    assert files.read(file) == FILES["a.jsonl"]
    assert files.served[mirror.spec.url] > 0


def test_a_slow_location_is_read_like_any_other(make_place, expected, tmp_path):
    first, mirror = make_place("web"), make_place("folder")
    first.site.section = 4096
    report = shard_dataset(make_settings(tmp_path / "out", first, mirror))
    assert read_shards(tmp_path / "out") == expected
    assert report.served[name(mirror)] == 0


def test_parquet_is_read_from_a_proven_mirror(make_place, tmp_path):
    def encode(texts: list[str]) -> bytes:
        body = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": texts}), body, row_group_size=100)
        return body.getvalue()

    tables = {"a.parquet": encode(TEXTS[:700]), "b.parquet": encode(TEXTS[700:])}
    chosen = {"kind": "parquet", "paths": list(tables)}
    first, mirror = make_place("web", tables), make_place("folder", tables)
    alone = make_settings(tmp_path / "one", first, **chosen)
    shard_dataset(alone)
    settings = make_settings(tmp_path / "out", first, mirror, **chosen)
    shard_until(settings, 2)
    first.remove()
    assert shard_dataset(settings).samples == len(TEXTS)
    assert read_shards(tmp_path / "out") == read_shards(tmp_path / "one")


def test_samples_of_many_files_continue_at_a_mirror(make_place, tmp_path):
    pictures = {f"{n:03d}.jpg": bytes([n]) * 2000 for n in range(120)}
    chosen = {"kind": "files", "columns": None}
    first, mirror = make_place("folder", pictures), make_place("bucket", pictures)
    shard_dataset(make_settings(tmp_path / "one", first, **chosen))
    settings = make_settings(tmp_path / "out", first, mirror, **chosen)
    shard_until(settings, 1)
    first.remove()
    assert shard_dataset(settings).samples == 120
    assert read_shards(tmp_path / "out") == read_shards(tmp_path / "one")


def test_a_repair_reads_a_mirror(make_place, expected, tmp_path):
    first, mirror = make_place("folder"), make_place("web")
    settings = make_settings(tmp_path / "out", first, mirror)
    shard_dataset(settings)
    first.remove()
    lost = next((tmp_path / "out/words/shards").rglob("*.tar"))
    lost.unlink()
    assert len(repair_dataset(settings).remade_keys) == 1
    assert read_shards(tmp_path / "out") == expected


def test_changed_settings_and_files_are_refused_with_mirrors(make_place, tmp_path):
    first, mirror = make_place("folder"), make_place("web")
    shard_until(make_settings(tmp_path / "out", first, mirror), 2)
    (first.folder / "b.jsonl").write_bytes(FILES["b.jsonl"] + b"\n")
    with pytest.raises(errors.ChangedError, match=r"b\.jsonl has"):
        shard_dataset(make_settings(tmp_path / "out", first, mirror))
    first.remove()
    other = make_settings(tmp_path / "out", first, mirror, columns={"text": "text"})
    with pytest.raises(errors.ConflictError, match=r"source\.settings"):
        shard_dataset(other)


def test_digests_of_files_are_kept_until_the_dataset_is_complete(make_place, tmp_path):
    first, mirror = make_place("folder"), make_place("folder")
    settings = make_settings(tmp_path / "out", first, mirror)
    shard_until(settings, 2)
    store = open_store(settings.store)
    digests = sorted((tmp_path / "out/words/partitions").glob("digests-*.json"))
    described = [json.loads(path.read_bytes())[0][2:4] for path in digests]
    assert sorted(described) == [[name, len(body)] for name, body in FILES.items()]
    assert all(KEYS.is_own(f"words/partitions/{path.name}") for path in digests)
    early = plan_garbage(store, "words", min_age=timedelta(seconds=-60))
    assert not any("digests-" in one.key for one in early.objects)
    shard_dataset(settings)
    garbage = plan_garbage(store, "words", min_age=timedelta(seconds=-60))
    assert {one.key.rpartition("/")[2] for one in garbage.objects} >= {p.name for p in digests}
    delete_garbage(store, garbage)
    assert shard_dataset(settings).was_complete


def test_no_secret_of_a_mirror_is_shown_or_stored(make_place, tmp_path):
    first, mirror = make_place("folder"), make_place("hub")
    settings = make_settings(tmp_path / "out", first, mirror, workers=2)
    shard_until(settings, 2)
    first.remove()
    shard_dataset(settings)
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(READER.encode() in body for body in written)
    assert READER not in repr(settings)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"url": "hf://datasets/o/n", "kind": "huggingface", "mirrors": [{"url": "s3://b"}]},
         "not for the kind `huggingface`"),
        ({"url": "https://host/a.jsonl", "mirrors": [{"url": "s3://b"}]}, "into `paths`"),
        ({"url": "s3://b/d", "mirrors": [{"url": "s3://b/d/"}]}, "named twice"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(source, sentence):
    with pytest.raises(ValidationError, match=sentence):
        SourceLocation(**source)
