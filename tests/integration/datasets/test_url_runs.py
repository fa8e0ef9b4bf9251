"""Runs over lists of URLs whose servers send other bytes at each request: each row is there once.

The judge reads the shards with webdataset and the records with `json`.
"""

import io
import json
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

from millrace import PipelineSettings, errors, shard_dataset
from millrace.dataset_ledger import fetch_plan
from millrace.datasets import (
    delete_garbage,
    plan_garbage,
    preflight_dataset,
    read_status,
    repair_dataset,
    verify_dataset,
)
from millrace.datasets.partition import ShardBuffers, write_partition
from millrace.datasets.pipeline import _make_jobs
from millrace.datasets.plan import commit_plan, make_plan
from millrace.datasets.progress_events import (
    PartitionEnding,
    PartitionOpened,
    PlanCommitted,
    ShardCommitted,
    ShardEncoded,
    ShardUploaded,
)
from millrace.datasets.quarantine import QuarantineLimit
from millrace.datasets.stall_watch import RowNotes
from millrace.datasets.transforms import open_transformed_source
from millrace.datasets.worker import PartitionJob
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Event, ignore_event
from millrace.schemas.dataset import PartitionEnd
from millrace.storage import delete, open_store
from millrace.testing.byte_level import END
from tests.integration.datasets.test_pipeline import ANY_AGE
from tests.oracle import compute_blake3
from tests.support.fork_server import ForkedProcess, get_fork_server
from tests.support.transforms import train_tokenizer
from tests.support.url_server import UrlHandler, UrlSite, serve_urls

ROWS = 60
GONE = range(7, ROWS, 20)  # rows whose URLs have no body


@pytest.fixture(autouse=True)
def _limits_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def site() -> Iterator[UrlSite]:
    """A server whose bodies have another content and another size at each request."""
    numbers = count()

    def answer(handler: UrlHandler) -> None:
        if int(handler.path[1:]) in GONE:
            handler.send(status=404)
        else:
            number = next(numbers)
            handler.send(f"{handler.path} {number} ".encode() + bytes(number * 7919 % 3000))

    with serve_urls(answer) as site:
        yield site


@pytest.fixture
def settings(site: UrlSite, tmp_path: Path) -> PipelineSettings:
    (tmp_path / "list").mkdir()
    rows = "".join(f"{site.url}/{n}\n" for n in range(ROWS))
    (tmp_path / "list" / "a.txt").write_text(rows)
    return PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {
                "kind": "urls", "url": (tmp_path / "list").as_uri(), "allow_private": True,
                "urls": {"content_field": "bin"},
            },
            "store": {"url": (tmp_path / "out").as_uri()},
            "sharding": {"shard_bytes": 16 << 10},
            "execution": {"workers": 0, "downloads": {"host_interval": "0s"}},
        }
    )  # fmt: skip


def change(settings: PipelineSettings, **parts: dict[str, Any]) -> PipelineSettings:
    data = settings.model_dump()
    return PipelineSettings.model_validate(data | {n: data[n] | p for n, p in parts.items()})


def judge(folder: Path) -> None:
    """Check that each row is in exactly one committed shard or quarantine, as the records say."""
    manifest = json.loads((folder / "d/manifest.json").read_text())["record"]
    commits = [
        json.loads(path.read_text())["record"]
        for path in sorted((folder / "d/commits").glob("train-00000/[0-9]*.json"))
    ]
    committed = [shard for commit in commits for shard in commit["shards"]]
    assert [(s["key"], s["digest"]) for s in committed] == [
        (s["key"], s["digest"]) for s in manifest["shards"]
    ]
    found: list[int] = []
    for shard in committed:
        body = (folder / shard["key"]).read_bytes()
        assert (compute_blake3(body), len(body)) == (shard["digest"], shard["size"])
        assert shard["digest"].split(":")[1][:16] in shard["key"]
        for sample in group_by_keys(
            tar_file_expander([{"url": shard["key"], "stream": io.BytesIO(body)}])
        ):
            number = int(json.loads(sample["json"])["url"].rpartition("/")[2])
            assert sample["bin"].startswith(f"/{number} ".encode())
            found.append(number)
    bad = [
        int(json.loads(json.loads(line)["data"])["url"].rpartition("/")[2])
        for commit in commits
        if commit["quarantine_key"]
        for line in (folder / commit["quarantine_key"]).read_text().splitlines()
    ]
    assert found == [number for number in range(ROWS) if number not in GONE]  # and their order
    assert Counter(bad) == Counter(GONE)


def list_shards(folder: Path) -> set[str]:
    below = [*(folder / "d/shards").rglob("*.tar"), *(folder / "d/quarantine").rglob("*")]
    return {path.relative_to(folder).as_posix() for path in below}


def list_committed(folder: Path) -> set[str]:
    paths = (folder / "d/commits").rglob("*.json")
    records = [json.loads(path.read_text())["record"] for path in paths]
    shards = {s["key"] for record in records for s in record.get("shards", ())}
    return shards | {record.get("quarantine_key") for record in records} - {None}


class StoppedError(Exception):
    pass


class Partition:
    """The partition of a committed plan, which several runs shard without leases."""

    def __init__(self, settings: PipelineSettings) -> None:
        self.keys = DatasetKeys("d")
        self.store = open_store(settings.store)
        self.files = settings.source.open_files()
        plan, found = make_plan(
            self.keys, settings.source, self.files, settings.sharding, self.store
        )
        commit_plan(self.store, self.keys, plan, found.objects)
        jobs = _make_jobs(settings, plan, self.files, settings.store)
        self.job: PartitionJob = jobs.make(jobs.partitions[0])

    def shard(self, progress=ignore_event) -> PartitionEnd:
        source = open_transformed_source(
            self.job.source, self.files, self.store, types=self.job.layout.fields,
            downloads=self.job.downloads, allow_private=True,
        )  # fmt: skip
        buffers = ShardBuffers(self.job.layout, 2)
        return write_partition(
            self.store, source, self.keys, buffers, self.job.partition,
            plan_digest=self.job.plan_digest, progress=progress, notes=RowNotes(),
            is_reproducible=False,
        )()  # fmt: skip


@pytest.mark.parametrize("boundary", [ShardEncoded, ShardUploaded])
@pytest.mark.parametrize("commits", [1, 2, ROWS])
def test_a_run_that_is_overtaken_continues_after_the_commits_of_the_other(
    settings: PipelineSettings, tmp_path: Path, boundary: type[Event], commits: int
) -> None:
    partition = Partition(settings)
    opened: list[int] = []
    won: list[int] = []
    ends: list[PartitionEnd] = []

    def stop_after_commits(event: Event) -> None:
        if isinstance(event, ShardCommitted):
            won.append(event.number)
            if len(won) == commits:
                raise StoppedError

    def be_overtaken(event: Event) -> None:
        if isinstance(event, PartitionOpened):
            opened.append(event.commits)
        if isinstance(event, boundary) and event.number == 1 and not won:
            try:
                ends.append(partition.shard(stop_after_commits))
            except StoppedError:
                assert len(won) >= commits

    end = partition.shard(be_overtaken)
    assert opened[0] == 0
    # Commit 0 may have been the first run's. After the end of the other run, no row is read again.
    assert len(opened) == 1 + (won != [0] and not ends)
    assert ends in ([], [end])
    assert end.samples == ROWS - len(GONE)
    assert shard_dataset(settings).samples == ROWS - len(GONE)
    judge(tmp_path / "out")


def filter_short_rows(settings: PipelineSettings) -> tuple[PipelineSettings, int]:
    """Return settings that drop short rows, and the number of samples before the last row.

    These samples fill a shard.
    """
    keep = {"kind": "filter", "field": "bin", "min_size": 10}
    samples = ROWS - 1 - len(GONE)
    sharding = {"shard_samples": samples, "shard_bytes": 1 << 20, "transforms": [keep]}
    return change(settings, sharding=sharding), samples


def answer_before_last(handler: UrlHandler) -> bool:
    """Answer a request for a row before the last one; return False for the last one."""
    number = int(handler.path[1:])
    if number == ROWS - 1:
        return False
    handler.send(bytes(20)) if number not in GONE else handler.send(status=404)
    return True


@pytest.mark.parametrize("late_size", [0, 3000])
def test_commits_after_the_end_of_another_run_are_not_in_the_dataset(
    settings: PipelineSettings, site: UrlSite, tmp_path: Path, late_size: int
) -> None:
    """The last row is dropped in the first download, and fails or makes a sample in a later one."""
    settings, samples = filter_short_rows(settings)
    partition = Partition(settings)
    ends: list[PartitionEnd] = []
    is_overtaken = False

    def answer(handler: UrlHandler) -> None:
        nonlocal is_overtaken
        if answer_before_last(handler):
            return
        if is_overtaken:
            is_overtaken = False
            ends.append(partition.shard())
            handler.send(bytes(late_size)) if late_size else handler.send(status=404)
        else:
            handler.send(b"short")

    def stop(event: Event) -> None:
        if isinstance(event, ShardCommitted):
            raise StoppedError

    site.answer = answer
    with pytest.raises(StoppedError):
        partition.shard(stop)
    is_overtaken = True
    committed: list[Event] = []
    end = partition.shard(committed.append)
    assert [event.number for event in committed if isinstance(event, ShardCommitted)] == [1]
    assert [end] == ends
    assert (end.commits, end.samples, end.dropped) == (1, samples, 1)
    for _ in range(2):
        manifest = shard_dataset(settings).manifest
        assert (len(manifest.shards), sum(manifest.samples.values())) == (1, samples)
        assert (manifest.quarantined, manifest.dropped) == (len(GONE), 1)
    plan = fetch_plan(partition.store, partition.keys)
    limit = QuarantineLimit(partition.store, partition.keys, plan, settings.execution)
    limit.resume(plan)
    assert limit._bad_rows == len(GONE)
    assert read_status(partition.store, "d").partitions[0].samples == samples
    assert verify_dataset(partition.store, "d").is_intact
    garbage = plan_garbage(partition.store, "d", min_age=ANY_AGE)
    assert all("/lease/" in one.key for one in garbage.objects)


def test_a_run_that_drops_the_last_row_continues_after_a_commit_of_another(
    settings: PipelineSettings, site: UrlSite
) -> None:
    """The row makes a sample in the download of another run, which commits it and is stopped."""
    settings, samples = filter_short_rows(settings)
    partition = Partition(settings)
    opened: list[int] = []
    is_overtaken = False

    def stop_at_end(event: Event) -> None:
        if isinstance(event, PartitionEnding):
            raise StoppedError

    def answer(handler: UrlHandler) -> None:
        nonlocal is_overtaken
        if answer_before_last(handler):
            return
        if is_overtaken:
            handler.send(bytes(3000))
        else:
            is_overtaken = True
            with pytest.raises(StoppedError):
                partition.shard(stop_at_end)
            handler.send(b"short")

    def note(event: Event) -> None:
        if isinstance(event, PartitionOpened):
            opened.append(event.commits)

    site.answer = answer
    end = partition.shard(note)
    assert opened == [0, 2]
    assert (end.commits, end.samples, end.dropped) == (2, samples + 1, 0)
    assert shard_dataset(settings).samples == samples + 1


def test_what_lost_is_garbage_and_nothing_else(settings: PipelineSettings, tmp_path: Path) -> None:
    partition = Partition(settings)
    has_run: list[PartitionEnd] = []

    def be_overtaken(event: Event) -> None:
        if isinstance(event, ShardUploaded) and event.number == 1 and not has_run:
            has_run.append(partition.shard())

    assert partition.shard(be_overtaken) == has_run[0]
    shard_dataset(settings)
    folder = tmp_path / "out"
    lost = list_shards(folder) - list_committed(folder)
    assert lost
    store = open_store(settings.store)
    assert read_status(store, "d").partitions[0].samples == ROWS - len(GONE)
    assert verify_dataset(store, "d").is_intact
    garbage = plan_garbage(store, "d", min_age=ANY_AGE)
    assert {one.key for one in garbage.objects if "/lease/" not in one.key} == lost
    assert delete_garbage(store, garbage).failures == ()
    assert list_shards(folder) == list_committed(folder)
    assert verify_dataset(store, "d").is_intact
    judge(folder)


CHILD = """
import sys
from millrace import PipelineSettings, shard_dataset
kind, settings = sys.argv[1:]
def wait_at_boundary(event):
    global kind
    if type(event).__name__ == kind:
        kind = ""
        print("reached", flush=True)
        sys.stdin.readline()
report = shard_dataset(PipelineSettings.model_validate_json(settings), progress=wait_at_boundary)
print(report.samples)
"""


@contextmanager
def run_to_boundary(settings: PipelineSettings, kind: str) -> Generator[ForkedProcess]:
    """Run a driver until an event of a kind, at which it waits until its input is closed."""
    child = get_fork_server("millrace.datasets").start(
        CHILD, kind, settings.model_dump_json(), stdin=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reached\n", kind
        try:
            yield child
        finally:
            child.kill()


def test_a_run_killed_at_every_boundary_has_each_row_once(
    settings: PipelineSettings, tmp_path: Path
) -> None:
    """The next run is killed at another boundary of the same dataset, until it is complete."""
    boundaries = [
        "PartitionOpened", "ShardHalfEncoded", "ShardEncoded", "ShardUploaded", "ShardCommitted",
        "PartitionEnding", "PartitionEnded", "ManifestComputed", "ManifestCommitted",
    ]  # fmt: skip
    for kind in boundaries:
        with run_to_boundary(settings, kind) as child:
            child.kill()
            assert child.wait() == -signal.SIGKILL
    assert shard_dataset(settings).was_complete
    judge(tmp_path / "out")
    assert list_shards(tmp_path / "out") > list_committed(tmp_path / "out")


def test_a_driver_killed_beside_another_loses_and_doubles_nothing(
    settings: PipelineSettings, tmp_path: Path
) -> None:
    several = change(settings, sharding={"partition_files": 1})
    with (
        run_to_boundary(several, "ShardUploaded") as first,
        run_to_boundary(several, "PartitionOpened") as second,
    ):
        first.kill()
        first.wait()
        output, _ = second.communicate()
        assert int(output) == ROWS - len(GONE)
    folder = tmp_path / "out"
    found = Counter[str]()
    for key in list_committed(folder):
        if key.endswith(".tar"):
            with (folder / key).open("rb") as stream:
                samples = group_by_keys(tar_file_expander([{"url": key, "stream": stream}]))
                found.update(json.loads(sample["json"])["url"] for sample in samples)
    assert sorted(found.values()) == [1] * (ROWS - len(GONE))
    assert verify_dataset(open_store(several.store), "d").is_intact


def test_a_lost_shard_is_not_made_again_and_the_error_says_what_to_do(
    settings: PipelineSettings, tmp_path: Path
) -> None:
    _, found = preflight_dataset(settings)
    assert "a shard that is lost later cannot be made again" in found.notes[0]
    report = shard_dataset(settings)
    store = open_store(settings.store)
    delete(store, [report.manifest.shards[1].key, "d/index.json"])
    verification = verify_dataset(store, "d")
    assert [fault.reason for fault in verification.faults] == ["missing"]
    with pytest.raises(errors.ChangedError, match=r"1 shard of d cannot.*Restore the objects"):
        repair_dataset(settings)
    assert list_shards(tmp_path / "out") < list_committed(tmp_path / "out")


def test_indexes_of_a_dataset_of_urls_are_repaired(settings: PipelineSettings) -> None:
    shard_dataset(settings)
    store = open_store(settings.store)
    delete(store, ["d/block_digests.bin"])
    assert repair_dataset(settings).remade_keys == ("d/block_digests.bin",)
    assert verify_dataset(store, "d").is_intact


def test_an_unfinished_dataset_that_lost_a_committed_shard_is_not_completed(
    settings: PipelineSettings,
) -> None:
    partition = Partition(settings)
    partition.shard()
    store = partition.store
    shards = verify_keys(settings)
    delete(store, [shards[0]])
    with pytest.raises(errors.ChangedError, match="under another dataset name"):
        shard_dataset(settings)


def verify_keys(settings: PipelineSettings) -> list[str]:
    folder = Path(settings.store.url.removeprefix("file://"))
    return sorted(key for key in list_committed(folder) if key.endswith(".tar"))


def test_the_limit_on_bad_rows_holds(settings: PipelineSettings) -> None:
    strict = change(settings, execution={"max_quarantined": 0.0})
    with pytest.raises(errors.QuarantineError, match="status 404"):
        shard_dataset(strict)
    assert shard_dataset(settings).manifest.quarantined == len(GONE)


def test_a_change_of_the_list_is_refused_and_a_change_of_the_limits_is_not(
    settings: PipelineSettings, tmp_path: Path
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, ShardCommitted):
            raise StoppedError

    with pytest.raises(StoppedError):
        shard_dataset(settings, progress=stop)
    slower = {"host_interval": "0.001s", "requests": 1, "requests_per_host": 1}
    seen: list[Event] = []
    shard_dataset(change(settings, execution={"downloads": slower}), progress=seen.append)
    assert any(isinstance(event, PlanCommitted) for event in seen)
    (tmp_path / "list" / "a.txt").write_text("http://127.0.0.1/x")
    with pytest.raises(errors.ChangedError, match=r"a\.txt"):
        shard_dataset(settings)


FUNCTIONS = """
def double(sample):
    return [sample, {**sample, "__key__": sample["__key__"] + "b"}]
def first(sample):
    return {**sample, "bin": sample["bin"][:5]}
"""


def test_a_transform_makes_at_most_one_sample_of_a_url(
    settings: PipelineSettings, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text(FUNCTIONS)

    def with_function(name: str) -> PipelineSettings:
        step = {"kind": "function", "function": f"{tmp_path}/code.py:{name}"}
        return change(settings, sharding={"transforms": [step]})

    with pytest.raises(errors.ConfigurationError, match="several samples of one row"):
        shard_dataset(with_function("double"))
    assert shard_dataset(with_function("first")).samples == ROWS - len(GONE)


def test_packing_is_refused_before_a_request(
    settings: PipelineSettings, site: UrlSite, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_bytes(train_tokenizer())
    step = {"kind": "tokenize", "tokenizer": f"{tmp_path}/x.json", "pack": 8, "end_token": END}
    packed = change(settings, sharding={"transforms": [step]})
    with pytest.raises(errors.ConfigurationError, match="`pack` is not for a list of URLs"):
        preflight_dataset(packed)
    assert site.requests.total() == 0


def test_a_card_names_the_committed_shards_only(settings: PipelineSettings, tmp_path: Path) -> None:
    data = settings.model_dump() | {"card": {"license": "cc0-1.0"}}
    report = shard_dataset(PipelineSettings.model_validate(data))
    text = (tmp_path / "out/d/README.md").read_text()
    assert "*.tar" not in text
    assert all(shard.key.removeprefix("d/") in text for shard in report.manifest.shards)
