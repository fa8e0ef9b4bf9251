"""The engine from a source to a complete dataset, and the errors that it raises."""

import io
import json
import logging
import os
import random
import re
import secrets
import shutil
import tarfile
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import webdataset
from click.testing import CliRunner
from pyarrow import parquet as pq

from millrace import deletion, errors, run_from_file
from millrace.cli import main
from millrace.dataset_ledger import find_referenced_keys
from millrace.datasets import (
    PartitionState,
    PipelineSettings,
    delete_garbage,
    find_datasets,
    plan_dataset,
    plan_garbage,
    preflight_dataset,
    read_status,
    repair_dataset,
    shard_dataset,
    verify_dataset,
)
from millrace.datasets.formats.parquet import ParquetFormat
from millrace.datasets.loader import ShardLoader
from millrace.datasets.plan import commit_plan
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionOpened,
    PartitionsPending,
    PlanCommitted,
    PlanRemoved,
    PlanReplacementStarted,
    ShardCommitted,
    ShardDeletionStarted,
    ShardUploaded,
)
from millrace.datasets.quarantine import QuarantineLimit
from millrace.datasets.settings import CardSettings
from millrace.datasets.sources import MirroredFiles
from millrace.deletion import ObjectsDeleted, delete_planned
from millrace.keys.datasets import DatasetKeys, make_seek_point_key
from millrace.keys.leases import (
    COLLECTOR,
    PLAN_REMOVAL,
    LeaseKeys,
    make_run_lease_name,
    parse_lease,
)
from millrace.lease import Heartbeat, Holder, Lease, StoreClock, acquire
from millrace.progress import Event
from millrace.records import encode_record, fetch
from millrace.schemas.dataset import DatasetPlan, FileRef, decode_sample_offsets
from millrace.storage import create, delete, exists, list_objects, open_store, put, read
from tests.stores import make_spec

ANY_AGE = timedelta(seconds=-60)


def rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    rng = random.Random(seed)
    return [{"id": i, "text": "x" * rng.randrange(400)} for i in range(count)]


def lines(count: int) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows(count))


@pytest.fixture
def settings(tmp_path):
    """A dataset of 2,000 rows in a folder, in about 5 partitions of 5 shards."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text(lines(2000))
    return PipelineSettings.model_validate(
        {
            "dataset": "sets/one",
            "source": {
                "columns": {"txt": "text", "id": "id"},
                "url": (tmp_path / "source").as_uri(),
            },
            "store": {"url": (tmp_path / "store").as_uri()},
            "sharding": {"shard_bytes": 512 << 10, "partition_bytes": 100_000},
            "execution": {"workers": 2},
        }
    )


def changed(settings, **parts):
    """The settings with other values in some of their parts: ``sharding={"seed": 1}``."""
    data = settings.model_dump()
    for name, part in parts.items():
        data[name] = {**data[name], **part} if isinstance(part, dict) else part
    return PipelineSettings.model_validate(data)


def ids_in(store, shards) -> Counter:
    """The ids of all samples, as Python's own tarfile sees them."""
    found: Counter = Counter()
    for shard in shards:
        with tarfile.open(fileobj=io.BytesIO(read(store, shard.key))) as tar:
            for member in tar:
                if member.name.endswith(".id"):
                    found[int(tar.extractfile(member).read())] += 1
    return found


def objects(store, prefix: str) -> dict[str, bytes]:
    return {stat.key: read(store, stat.key) for stat in list_objects(store, prefix)}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_row_is_in_exactly_one_shard(settings, workers):
    report = shard_dataset(changed(settings, execution={"workers": workers}))
    store = open_store(settings.store)
    assert report.samples == 2000
    assert ids_in(store, report.manifest.shards) == Counter(range(2000))
    assert verify_dataset(store, "sets/one").is_intact


def test_the_bytes_do_not_depend_on_who_made_them(settings):
    store = open_store(settings.store)
    made = []
    for name, execution in (("a", {"workers": 0}), ("b", {"workers": 3, "uploads": 3})):
        shard_dataset(changed(settings, dataset=name, execution=execution))
        shards = objects(store, f"{name}/shards/")
        made.append({k.partition("/")[2]: v for k, v in shards.items() if k.endswith(".tar")})
        assert len(shards) == len(made[-1]) + 1, "an index, which names the dataset"
    assert made[0] == made[1]
    assert len(made[0]) == 8


def test_a_second_run_finds_all_done(settings):
    first = shard_dataset(settings)
    second = shard_dataset(settings)
    assert (second.new_shards, second.manifest) == (0, first.manifest)


def test_two_runs_at_once_share_the_work_and_both_end_right(settings):
    settings = changed(settings, sharding={"partition_bytes": 25_000}, execution={"workers": 1})
    events: list[list[Event]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(shard_dataset, settings, progress=own.append) for own in events]
        reports = [run.result() for run in runs]
    assert reports[0].manifest == reports[1].manifest
    for own in events:
        (pending,) = (one.partitions for one in own if isinstance(one, PartitionsPending))
        assert sum(isinstance(one, PartitionEnded) for one in own) == pending
    assert sum(report.new_shards for report in reports) == len(reports[0].manifest.shards)
    assert ids_in(open_store(settings.store), reports[0].manifest.shards) == Counter(range(2000))


@contextmanager
def hold_partition(settings, partition: str, *, is_alive: bool = True):
    """Hold the lease of a partition as another run does, with heartbeats while it is alive."""
    store, holder = open_store(settings.store), Holder.describe_this_process()
    ttl = timedelta(seconds=9 if is_alive else 3)
    keys, clock = LeaseKeys("sets/one", partition), StoreClock.read(store, "sets/one", holder)
    with Heartbeat(ttl, lambda: is_alive) as heartbeat:
        lease = acquire(store, keys, holder, ttl, clock)
        assert isinstance(lease, Lease)
        heartbeat.keep(lease)
        yield


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_need_not_wait_ends_while_other_runs_work_on_the_rest(settings, workers):
    settings = changed(settings, execution={"workers": workers})
    with hold_partition(settings, "train-00001"):
        with pytest.raises(errors.HeldError, match="Other runs work on 1 open partition of "):
            shard_dataset(settings, wait=False)
        status = read_status(open_store(settings.store), "sets/one")
        assert status.ended_partitions == len(status.partitions) - 1
    assert shard_dataset(settings, wait=False).samples == 2000


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_need_not_wait_takes_over_from_a_run_that_is_dead(settings, workers):
    settings = changed(settings, execution={"workers": workers})
    with hold_partition(settings, "train-00001", is_alive=False):
        assert shard_dataset(settings, wait=False).samples == 2000


def test_of_several_machines_only_the_first_one_waits_for_the_others(settings, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(settings.model_dump_json())
    with hold_partition(settings, "train-00001"):
        ended = CliRunner().invoke(main, ["run", str(path), "--slot", "3"])
    assert (ended.exit_code, "none is left for this run" in ended.output) == (0, True), ended.output
    with hold_partition(settings, "train-00001", is_alive=False):
        done = CliRunner().invoke(main, ["run", str(path), "--slot", "0"])
    assert (done.exit_code, "2,000 samples" in done.output) == (0, True), done.output
    for option in ("--repair", "--use-vast"):
        refused = CliRunner().invoke(main, ["run", str(path), "--slot", "0", option])
        assert (refused.exit_code, f"or remove {option}" in refused.output) == (2, True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_walks_through_no_partitions_that_another_run_has_ended_meanwhile(settings, workers):
    settings = changed(
        settings, sharding={"partition_bytes": 25_000}, execution={"workers": workers}
    )
    events: list[Event] = []

    def progress(event: Event) -> None:
        events.append(event)
        if isinstance(event, PartitionsPending):
            shard_dataset(settings)

    report = shard_dataset(settings, progress=progress)
    assert report.new_shards == 0
    assert sum(isinstance(one, PartitionEnded) for one in events) == report.partitions > 10
    assert not any(isinstance(one, PartitionOpened) for one in events)
    terms = list_objects(open_store(settings.store), "sets/one/lease/train-")
    assert sum(stat.key.endswith("/000001.json") for stat in terms) == 1


def test_bad_rows_are_kept_with_their_reasons(settings, tmp_path):
    with (tmp_path / "source" / "a.jsonl").open("a") as file:
        file.write('not json\n{"id": 1}\n[]\n')
    report = shard_dataset(settings)
    store = open_store(settings.store)
    assert (report.samples, report.manifest.quarantined) == (2000, 3)
    kept = [
        json.loads(line)
        for body in objects(store, "sets/one/quarantine/").values()
        for line in body.splitlines()
    ]
    assert [row["data"] for row in kept] == ["not json", '{"id": 1}', "[]"]
    assert [re.split("[:,]", row["reason"])[0] for row in kept] == [
        "not valid JSON",
        "no column 'text'",
        "not a JSON object",
    ]


def test_a_column_that_no_row_has_fails_the_run_with_the_first_reasons(settings, tmp_path):
    settings = changed(settings, sharding={"seed": None}, execution={"max_quarantined": 0.9})
    typo = changed(settings, source={"columns": {"txt": "texd"}})
    with pytest.raises(errors.QuarantineError) as caught:
        shard_dataset(typo)
    assert "2000 of 2000 rows" in str(caught.value)
    assert "a.jsonl, byte 0: no column 'texd'" in str(caught.value)
    assert not exists(open_store(settings.store), "sets/one/manifest.json")


def test_the_first_reasons_are_found_among_objects_of_any_size_and_content(settings):
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    shard_dataset(settings)
    row = b'{"where":"a, \\"b\\"","reason":"no \\"text\\"","data":"'
    put(store, f"{keys.quarantined}a.jsonl", b"[]\nnonsense\n" + row + b"x" * (64 << 20))
    limit = changed(settings, execution={"max_quarantined": 0}).execution
    plan = fetch(store, keys.plan, DatasetPlan)
    found = QuarantineLimit(store, keys, plan, limit)
    tracemalloc.start()
    with pytest.raises(errors.QuarantineError, match=r'reasons: a, "b": no "text" \(all'):
        found.check(samples=1, rows=9, bad_rows=8)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 << 20


def test_a_quarantine_object_that_is_deleted_meanwhile_hides_no_error(settings, monkeypatch):
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    for name in ("a", "b"):
        put(
            store,
            f"{keys.quarantined}{name}.jsonl",
            b'{"where":"row","reason":"%s"' % name.encode(),
        )

    def list_and_delete(*args, **options):
        found = list(list_objects(*args, **options))
        delete(store, [f"{keys.quarantined}a.jsonl"])
        return iter(found)

    monkeypatch.setattr("millrace.datasets.quarantine.list_objects", list_and_delete)
    limit = changed(settings, execution={"max_quarantined": 0}).execution
    with pytest.raises(errors.QuarantineError, match="First reasons: row: b"):
        QuarantineLimit(store, keys, plan_dataset(settings), limit).check(
            samples=1, rows=9, bad_rows=8
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_over_its_limit_of_bad_rows_goes_on_once_the_limit_is_raised(
    settings, tmp_path, workers
):
    bad = "".join(f'{{"id": {i}}}\n' for i in range(60))
    (tmp_path / "source" / "a.jsonl").write_text(bad + lines(2000))
    settings = changed(settings, execution={"workers": workers})
    with pytest.raises(errors.QuarantineError, match=r"limit of 1%.*max_quarantined"):
        shard_dataset(settings)
    made = shard_dataset(changed(settings, execution={"max_quarantined": 0.05}))
    assert (made.samples, made.manifest.quarantined) == (2000, 60)
    assert made.new_shards < len(made.manifest.shards)  # the first run's shards were kept


def test_a_run_that_can_no_longer_meet_its_limit_ends_early(settings, tmp_path):
    (tmp_path / "source" / "a.jsonl").write_text("bad\n" * 300_000)
    committed = []

    def note(event: Event) -> None:
        if isinstance(event, ShardCommitted):
            committed.append(event.quarantined)

    config = changed(settings, sharding={"partition_bytes": 10_000_000}, execution={"workers": 0})
    with pytest.raises(errors.QuarantineError, match="of about 300000 expected"):
        shard_dataset(config, progress=note)
    assert len(committed) == 1
    with pytest.raises(errors.QuarantineError):  # and at once when it is started again
        shard_dataset(config, progress=note)
    assert len(committed) == 1


def test_up_to_ten_bad_rows_are_allowed_in_a_small_dataset_unless_none_may_be(settings, tmp_path):
    (tmp_path / "source" / "a.jsonl").write_text(lines(20) + "bad\n" * 10)
    with pytest.raises(errors.QuarantineError, match="10 of 30 rows"):
        shard_dataset(changed(settings, execution={"max_quarantined": 0.0}))
    assert shard_dataset(settings).manifest.quarantined == 10


@pytest.mark.parametrize(
    ("good", "bad", "is_allowed"), [(2, 10, False), (9, 10, False), (10, 10, True), (1, 1, True)]
)
def test_bad_rows_are_at_most_half_of_a_small_dataset(settings, tmp_path, good, bad, is_allowed):
    (tmp_path / "source" / "a.jsonl").write_text(lines(good) + "bad\n" * bad)
    if is_allowed:
        assert shard_dataset(settings).samples == good
        return
    with pytest.raises(errors.QuarantineError, match=rf"{bad} of {good + bad} rows.*limit of 1%"):
        shard_dataset(settings)
    made = shard_dataset(changed(settings, execution={"max_quarantined": 0.9}))
    assert (made.samples, made.new_shards) == (good, 0)  # the first run has read all rows


def test_a_few_bad_rows_stop_no_run_before_its_last_row(settings, tmp_path):
    # By bytes, the bad row is nearly the whole source.
    (tmp_path / "source" / "a.jsonl").write_text(f"bad{' ' * 100_000}\n")
    (tmp_path / "source" / "b.jsonl").write_text(lines(1))
    config = changed(
        settings, sharding={"partition_bytes": 200_000, "seed": None}, execution={"workers": 0}
    )
    made = shard_dataset(config)
    assert (made.samples, made.manifest.quarantined, made.partitions) == (1, 1, 2)


@pytest.mark.parametrize("content", ["", "\n", "bad\n" * 10])
def test_a_dataset_of_no_samples_is_finalized_only_if_that_is_allowed(settings, tmp_path, content):
    (tmp_path / "source" / "a.jsonl").write_text(content)
    (tmp_path / "source" / "b.jsonl").write_text("\n\n")
    with pytest.raises(errors.QuarantineError, match=r"no samples.*allow_empty"):
        shard_dataset(settings)
    allowed = changed(settings, execution={"allow_empty": True, "max_quarantined": 1.0})
    report = shard_dataset(allowed)
    assert (report.samples, report.manifest.shards, report.new_shards) == (0, (), 0)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"sharding": {"shard_bytes": 1 << 20}}, r"layout.shard_bytes \(524288, now 1048576\)"),
        ({"sharding": {"seed": 7}}, r"seed \(0, now 7\)"),
        ({"sharding": {"holdout": 0.5}}, r"holdout \(0.0, now 0.5\)"),
        ({"source": {"columns": {"txt": "text"}}}, "source.settings"),
    ],
)
def test_other_settings_under_the_same_name_are_refused_by_their_names(settings, parts, named):
    shard_dataset(settings)
    with pytest.raises(errors.ConflictError, match=named):
        shard_dataset(changed(settings, **parts))


def test_a_source_that_changed_since_the_plan_is_refused(settings, tmp_path):
    shard_dataset(settings)
    (tmp_path / "source" / "b.jsonl").write_text(lines(3))
    with pytest.raises(errors.ChangedError, match=r"b\.jsonl is new \(1 file .* then, 2 files"):
        shard_dataset(settings)


def test_a_source_that_changes_meanwhile_stops_the_run_and_mixes_nothing(settings, tmp_path):
    source = tmp_path / "source" / "a.jsonl"

    def rewrite(event: Event) -> None:
        if isinstance(event, PlanCommitted):
            source.write_text(lines(2000).replace("x", "y"))

    with pytest.raises(errors.ChangedError, match="so that two versions are not mixed"):
        shard_dataset(settings, progress=rewrite)
    assert not exists(open_store(settings.store), "sets/one/manifest.json")


class KilledError(Exception):
    pass


def kill_at(event_class: type[Event]):
    """A progress that ends the run where it says so."""

    def kill(event: Event) -> None:
        if isinstance(event, event_class):
            raise KilledError

    return kill


@contextmanager
def call_at_message(text, call, caplog):
    """Call a function once, at the first message of a run that contains a text."""

    class CallOnce(logging.Handler):
        called = False

        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage() and not self.called:
                self.called = True
                call()

    logger, handler = logging.getLogger("millrace.datasets.dispatch"), CallOnce()
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert handler.called


OTHER = {"sharding": {"partition_bytes": 40_000}}


@pytest.mark.parametrize("killed_at", [None, PlanReplacementStarted, PlanRemoved])
def test_a_plan_by_which_nothing_was_committed_is_replaced(settings, killed_at):
    alone = changed(settings, execution={"workers": 0})
    with pytest.raises(KilledError):  # a shard is there, and no commit
        shard_dataset(alone, progress=kill_at(ShardUploaded))
    assert list(list_objects(open_store(settings.store), "sets/one/shards/"))
    if killed_at:
        with pytest.raises(KilledError):
            shard_dataset(changed(alone, **OTHER), progress=kill_at(killed_at))
    store = open_store(settings.store)
    report = shard_dataset(changed(alone, **OTHER))
    assert report.partitions > 5
    assert not exists(store, "sets/one/plan-removed.json")
    assert ids_in(store, report.manifest.shards) == Counter(range(2000))
    assert len(list(list_objects(store, "sets/one/shards/"))) == len(report.manifest.shards) + 1


def test_a_plan_whose_shards_cannot_be_deleted_is_replaced_later(settings, tmp_path):
    alone = changed(settings, execution={"workers": 0})
    with pytest.raises(KilledError):
        shard_dataset(alone, progress=kill_at(ShardUploaded))
    store = open_store(settings.store)
    shards = Path(store.location.bucket) / "sets/one/shards/webdataset"
    shards.rename(tmp_path / "elsewhere")
    shards.symlink_to(tmp_path / "elsewhere")  # nothing is deleted through a link
    for _ in range(2):
        with pytest.raises(errors.DeniedError, match="replaced plan and could not be deleted"):
            shard_dataset(changed(alone, **OTHER))
        assert exists(store, "sets/one/plan-removed.json")
    shards.unlink()
    (tmp_path / "elsewhere").rename(shards)
    report = shard_dataset(changed(alone, **OTHER))
    assert not exists(store, "sets/one/plan-removed.json")
    assert len(list(list_objects(store, "sets/one/shards/"))) == len(report.manifest.shards) + 1


def test_a_shard_that_another_run_writes_while_a_plan_is_replaced_stays(settings, monkeypatch):
    alone = changed(settings, execution={"workers": 0})
    with pytest.raises(KilledError):
        shard_dataset(alone, progress=kill_at(ShardUploaded))
    store = open_store(settings.store)
    shard = next(list_objects(store, "sets/one/shards/"))

    def delete_after_write(*args):
        put(store, shard.key, b"other bytes")
        return delete_planned(*args)

    monkeypatch.setattr("millrace.datasets.plan.delete_planned", delete_after_write)
    with pytest.raises(errors.ConflictError, match="another run wrote shards"):
        shard_dataset(changed(alone, **OTHER))
    assert read(store, shard.key) == b"other bytes"
    monkeypatch.undo()
    assert shard_dataset(changed(alone, **OTHER)).samples == 2000


def test_no_plan_is_committed_while_another_run_removes_one(settings, monkeypatch):
    """The resumed run deletes shards without a commit, such as the first ones of a new run."""
    store = open_store(settings.store)
    clock = StoreClock.read(store, "sets/one", Holder.describe_this_process())
    put(store, "sets/one/plan-removed.json", b"")
    lease = acquire(
        store,
        LeaseKeys("sets/one", "plan"),
        Holder.describe_this_process(),
        timedelta(minutes=1),
        clock,
    )
    assert isinstance(lease, Lease)
    plans = []

    def sleep(_: float) -> None:  # as often as the run finds the lease held
        plans.append(exists(store, "sets/one/plan.json"))
        if len(plans) == 3:
            lease.release()

    monkeypatch.setattr("millrace.datasets.plan.time", SimpleNamespace(sleep=sleep))
    assert shard_dataset(changed(settings, execution={"workers": 0})).samples == 2000
    assert plans == [False] * 3
    assert not exists(store, "sets/one/plan-removed.json")


def test_a_plan_that_a_run_works_by_is_not_replaced(settings):
    refused: list[Event] = []

    def meet(event: Event) -> None:
        if isinstance(event, PartitionOpened) and event.partition == "train-00000":
            with pytest.raises(errors.ConflictError, match=r"A run of .* works on it"):
                shard_dataset(changed(settings, **OTHER))
            refused.append(event)

    report = shard_dataset(changed(settings, execution={"workers": 0}), progress=meet)
    assert report.samples == 2000
    assert len(refused) == 1


def test_a_run_whose_plan_is_replaced_before_its_lease_commits_nothing(settings):
    alone = changed(settings, execution={"workers": 0})
    other, stopped = changed(alone, **OTHER), []

    def replace_plan(event: Event) -> None:
        if isinstance(event, PartitionsPending):
            with pytest.raises(KilledError):
                shard_dataset(other, progress=kill_at(PartitionEnded))
            stopped.append(event)

    with pytest.raises(errors.ConflictError, match="replaced the plan meanwhile"):
        shard_dataset(alone, progress=replace_plan)
    assert len(stopped) == 1
    report = shard_dataset(other)
    store = open_store(settings.store)
    assert ids_in(store, report.manifest.shards) == Counter(range(2000))
    assert verify_dataset(store, "sets/one").is_intact


def test_a_run_waits_for_the_removal_of_its_plan_before_it_commits(settings, caplog):
    store, holder = open_store(settings.store), Holder.describe_this_process()
    keys = DatasetKeys("sets/one")
    clock = StoreClock.read(store, "sets/one", holder)
    removals: list[Lease] = []

    def begin_removal(event: Event) -> None:
        if isinstance(event, PartitionsPending):
            name = LeaseKeys("sets/one", PLAN_REMOVAL)
            removal = acquire(store, name, holder, timedelta(hours=1), clock)
            assert isinstance(removal, Lease)
            removals.append(removal)

    def end_removal() -> None:
        assert delete(store, [keys.plan]) == []
        removals[0].release()

    with (
        call_at_message("waits for the end of the removal", end_removal, caplog),
        pytest.raises(errors.ConflictError, match="replaced the plan meanwhile"),
    ):
        shard_dataset(changed(settings, execution={"workers": 0}), progress=begin_removal)
    assert not list(list_objects(store, keys.commits))


def test_a_plan_is_not_replaced_while_a_run_reads_digests_by_it(settings, tmp_path, monkeypatch):
    mirrored = changed(settings, source={"mirrors": [{"url": (tmp_path / "mirror").as_uri()}]})
    refused = []

    def store_digests(files: MirroredFiles, planned: list[FileRef]) -> None:
        with pytest.raises(errors.ConflictError, match=r"A run of .* works on it") as error:
            shard_dataset(changed(mirrored, **OTHER))
        refused.append(error)

    monkeypatch.setattr(MirroredFiles, "store_digests", store_digests)
    assert shard_dataset(mirrored).samples == 2000
    assert len(refused) == 1


def test_a_commit_made_while_a_plan_is_replaced_keeps_the_plan(settings):
    old = changed(settings, execution={"workers": 0})
    with pytest.raises(KilledError):
        shard_dataset(old, progress=kill_at(PlanCommitted))
    store = open_store(settings.store)
    plan = read(store, "sets/one/plan.json")

    def commit(event: Event) -> None:
        if isinstance(event, PlanRemoved):  # by a run that had read the plan before
            put(store, "sets/one/plan.json", plan)
            leases = [stat.key for stat in list_objects(store, "sets/one/lease/")]
            assert delete(store, leases) == []  # the removal was not heard of for long
            with pytest.raises(KilledError):
                shard_dataset(old, progress=kill_at(ShardCommitted))
            assert delete(store, ["sets/one/plan.json"]) == []

    with pytest.raises(errors.ConflictError, match="other settings: partition_bytes"):
        shard_dataset(changed(old, **OTHER), progress=commit)
    assert shard_dataset(old).samples == 2000


@pytest.mark.parametrize("left", ["manifest", "commits", "ends"])
def test_a_lost_plan_is_replaced_by_no_other(settings, left):
    settings = changed(settings, execution={"workers": 0})
    shard_dataset(settings)
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    plan = fetch(store, keys.plan, DatasetPlan)
    found = [stat.key for stat in list_objects(store, keys.commits)]
    lost = [keys.plan] if left == "manifest" else [keys.plan, keys.manifest]
    lost += [key for key in found if left == "ends" and keys.parse_commit(key)]
    lost += [key for key in found if left == "commits" and keys.parse_end(key)]
    assert delete(store, lost) == []
    other = changed(settings, **OTHER)
    with pytest.raises(errors.ConflictError, match=r"has no plan\.json.*with the settings"):
        shard_dataset(other)
    assert "has no plan" in preflight_dataset(other)[1].refusals[0]
    assert not exists(store, keys.plan)
    assert preflight_dataset(settings)[1].refusals == ()
    if left != "ends":
        assert shard_dataset(settings).samples == 2000
        assert fetch(store, keys.plan, DatasetPlan) == plan
        assert verify_dataset(store, "sets/one").is_intact


def test_a_manifest_of_another_plan_is_refused(settings):
    shard_dataset(settings)
    store, other = open_store(settings.store), changed(settings, **OTHER)
    put(store, "sets/one/plan.json", encode_record(plan_dataset(other), "0" * 32))
    with pytest.raises(errors.ConflictError, match=r"manifest.json was made by another plan"):
        shard_dataset(other)
    assert preflight_dataset(other)[1].refusals
    assert delete(store, ["sets/one/plan.json"]) == []
    assert shard_dataset(settings).was_complete


@pytest.mark.parametrize("suspended_at", [PlanReplacementStarted, PlanRemoved])
def test_a_suspended_replacement_keeps_the_dataset_of_another_run(settings, suspended_at):
    store, old = open_store(settings.store), changed(settings, execution={"workers": 0})
    with pytest.raises(KilledError):
        shard_dataset(old, progress=kill_at(PlanCommitted))
    other = changed(old, **OTHER)

    def complete_other(event: Event) -> None:
        if isinstance(event, suspended_at):
            leases = [stat.key for stat in list_objects(store, "sets/one/lease/")]
            assert delete(store, leases) == []  # this run was not heard of for long
            shard_dataset(other)
            if suspended_at is PlanRemoved:  # the suspension was just before the delete
                assert delete(store, ["sets/one/plan.json"]) == []

    with pytest.raises(errors.ConflictError):
        shard_dataset(changed(old, sharding={"seed": 7}), progress=complete_other)
    assert exists(store, "sets/one/plan.json") is (suspended_at is PlanReplacementStarted)
    assert shard_dataset(other).was_complete
    assert fetch(store, "sets/one/plan.json", DatasetPlan) == plan_dataset(other)
    assert verify_dataset(store, "sets/one").is_intact


@pytest.mark.parametrize("other_dies", [False, True])
def test_a_suspended_run_whose_plan_was_replaced_mixes_nothing(settings, other_dies):
    store, alone = open_store(settings.store), changed(settings, execution={"workers": 0})
    other, met = changed(alone, **OTHER), []
    late = "sets/one/shards/webdataset/train/train-00000-000009.tar"

    def meet(event: Event) -> None:
        if isinstance(event, ShardUploaded) and not met:
            met.append(event)
            leases = [stat.key for stat in list_objects(store, "sets/one/lease/")]
            assert delete(store, leases) == []  # this run was not heard of for long
            if other_dies:
                with pytest.raises(KilledError):
                    shard_dataset(other, progress=kill_at(PartitionsPending))
            else:
                shard_dataset(other)
                put(store, late, b"shard")  # an upload of this run ends only now

    with pytest.raises(errors.ConflictError):
        shard_dataset(changed(alone, execution={"workers": 1}), progress=meet)  # stops in `meet`
    if other_dies:
        with pytest.raises(errors.ConflictError, match="commit of another plan"):
            shard_dataset(other)
        assert not exists(store, "sets/one/manifest.json")
    else:
        found = verify_dataset(store, "sets/one")
        assert (found.faults, found.other_faults) == ((), ())
        assert late in {stray.key for stray in found.strays}
        delete_garbage(store, plan_garbage(store, "sets/one", min_age=timedelta(seconds=-60)))
        assert verify_dataset(store, "sets/one").is_intact
        assert shard_dataset(other).samples == 2000


def test_a_commit_of_a_partition_that_the_new_plan_lacks_is_an_error_with_a_sentence(settings):
    store, few = open_store(settings.store), changed(settings, execution={"workers": 0})
    many = changed(few, **OTHER)
    met = []

    def meet(event: Event) -> None:
        if isinstance(event, ShardUploaded) and not met:
            met.append(event)
            leases = [stat.key for stat in list_objects(store, "sets/one/lease/")]
            assert delete(store, leases) == []  # this run was not heard of for long
            with pytest.raises(KilledError):
                shard_dataset(few, progress=kill_at(PartitionsPending))

    with pytest.raises(errors.ConflictError):
        shard_dataset(changed(many, execution={"workers": 1}), progress=meet)  # stops in `meet`
    left = json.loads(read(store, next(list_objects(store, "sets/one/commits/")).key))
    left["record"] |= {"partition": "train-00099", "number": 0, "key": None}
    put(store, "sets/one/commits/train-00099/000000.json", json.dumps(left).encode())
    with pytest.raises(errors.ConflictError, match="commit of another plan"):
        shard_dataset(few)
    assert read_status(store, "sets/one").dataset == "sets/one"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.unlink(), "a.jsonl has changed.*it is gone"),
        (lambda file: file.write_text("{}"), "has 2 bytes now, and had"),
        (lambda file: os.utime(file, ns=(1, 1)), "written again"),
    ],
)
def test_a_source_that_changed_is_named_with_what_is_different(settings, tmp_path, change, said):
    def make(event: Event) -> None:
        if isinstance(event, PlanCommitted):
            change(tmp_path / "source" / "a.jsonl")

    with pytest.raises(errors.ChangedError, match=said):
        shard_dataset(settings, progress=make)


def test_a_shard_that_is_there_with_other_bytes_is_never_overwritten(settings):
    store = open_store(settings.store)
    key = "sets/one/shards/webdataset/train/train-00000-000000.tar"
    put(store, key, b"somebody else's")
    with pytest.raises(errors.ConflictError, match="already there with other bytes"):
        shard_dataset(settings)
    assert read(store, key) == b"somebody else's"


def test_verify_finds_what_is_missing_and_what_differs(settings):
    report = shard_dataset(settings)
    store = open_store(settings.store)
    flipped, shortened, missing = (shard.key for shard in report.manifest.shards[:3])
    data = bytearray(read(store, flipped))
    data[len(data) // 2] ^= 1
    put(store, flipped, data)
    put(store, shortened, read(store, shortened)[:-512])
    delete(store, [missing])
    reasons = {fault.key: fault.reason for fault in verify_dataset(store, "sets/one").faults}
    assert reasons.keys() == {flipped, shortened, missing}
    assert "the digest differs" in reasons[flipped]
    assert reasons[missing] == "missing"
    quick = verify_dataset(store, "sets/one", digests=False)
    assert {fault.key for fault in quick.faults} == {shortened, missing}


def test_verify_names_objects_beside_the_shards_that_readers_would_double(settings):
    report = shard_dataset(changed(settings, sharding={"formats": ["webdataset", "parquet"]}))
    store = open_store(settings.store)
    folder = "sets/one/shards/webdataset/train"
    put(store, "sets/one/shards/parquet/train/_pages/text-000001.json", b"{}")  # `dataset index`
    assert verify_dataset(store, "sets/one", digests=False).is_intact
    copy = f"{folder}/train-00009-000000.tar"
    put(store, copy, read(store, f"{folder}/train-00000-000000.tar"))
    found = verify_dataset(store, "sets/one", digests=False)
    assert (found.faults, [fault.key for fault in found.strays]) == ((), [copy])
    assert found.all_faults == found.strays
    repaired = repair_dataset(changed(settings, sharding={"formats": ["webdataset", "parquet"]}))
    assert (repaired.remade_keys, repaired.strays) == ((), found.strays)
    garbage = plan_garbage(store, "sets/one", min_age=timedelta(seconds=-60))
    assert copy in {planned.key for planned in garbage.objects}
    delete_garbage(store, garbage)
    assert verify_dataset(store, "sets/one").is_intact
    assert verify_dataset(store, "sets/one").shards == len(report.manifest.shards)


def test_a_mark_of_a_folder_beside_the_shards_is_no_fault(settings):
    memory = changed(
        settings, store={"url": f"memory://{secrets.token_hex(8)}"}, execution={"workers": 0}
    )
    shard_dataset(memory)
    store = open_store(memory.store)
    put(store, "sets/one/shards/webdataset/train", b"")
    assert verify_dataset(store, "sets/one", digests=False).is_intact


def test_keys_beside_the_shards_that_end_in_a_slash_are_named_whole(settings, rgw, bucket, request):
    """A listing that drops the slash would name an object that is not there."""
    remote = changed(settings, store=make_spec("rgw", request).reveal_secrets())
    shard_dataset(remote)
    store, client = open_store(remote.store), rgw.make_client(rgw.full)
    folder = "sets/one/shards/webdataset/train/"
    for key, body in ((folder, b""), ("sets/one/shards/", b""), (f"{folder}x.tar/", b"junk")):
        client.put_object(Bucket=bucket, Key=f"below/here/{key}", Body=body)
    found = verify_dataset(store, "sets/one", digests=False)
    assert [fault.key for fault in found.strays] == [f"{folder}x.tar/"]
    garbage = plan_garbage(store, "sets/one", min_age=timedelta(seconds=-60))
    assert all("/lease/" in planned.key for planned in garbage.objects)


def test_an_object_that_a_run_may_be_uploading_is_not_called_a_fault(settings):
    shard_dataset(settings)
    store, holder = open_store(settings.store), Holder.describe_this_process()
    key = "sets/one/shards/webdataset/train/train-00009-000000.tar"
    put(store, key, b"shard of another plan")
    clock = StoreClock.read(store, "sets/one", holder)
    name = LeaseKeys("sets/one", make_run_lease_name(holder.id))
    lease = acquire(store, name, holder, timedelta(minutes=5), clock)
    assert isinstance(lease, Lease)
    found = verify_dataset(store, "sets/one", digests=False)
    assert found.is_intact
    assert key in found.notes[0]
    assert "Verify it again when the run has ended" in found.notes[0]
    lease.release()
    found = verify_dataset(store, "sets/one", digests=False)
    assert ([fault.key for fault in found.strays], found.notes) == ([key], ())


def test_garbage_is_what_no_record_names(settings):
    report = shard_dataset(settings)
    store = open_store(settings.store)
    orphans = [
        "sets/one/shards/webdataset/train/train-09999-000000.tar",
        "sets/one/quarantine/train-09999-000000.jsonl",
    ]
    for key in orphans:
        put(store, key, b"orphan")
    kept = {shard.key for shard in report.manifest.shards}
    assert plan_garbage(store, "sets/one").objects == ()
    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert {one.key for one in plan.objects if "/lease/" not in one.key} == set(orphans)
    assert exists(store, orphans[0])
    delete_garbage(store, plan)
    left = {stat.key for stat in list_objects(store, "sets/one/")}
    assert kept <= left
    assert not left & set(orphans)
    assert verify_dataset(store, "sets/one").is_intact


@pytest.mark.parametrize(
    ("below", "name", "said"),
    [
        ("/sets", "one", "is the dataset 'sets/one' of {url}: open that URL"),
        ("", "renamed", "/renamed is a copy of the dataset 'sets/one', or was renamed"),
    ],
)
def test_a_dataset_under_another_name_than_its_own_is_refused_and_stays_whole(
    settings, tmp_path, below, name, said
):
    shard_dataset(settings)
    root = open_store(settings.store)
    planned = plan_garbage(root, "sets/one", min_age=ANY_AGE)
    shutil.copytree(tmp_path / "store" / "sets" / "one", tmp_path / "store" / "renamed")
    other = changed(settings, dataset=name, store={"url": f"{root.url}{below}"})
    store = open_store(other.store)
    before = objects(root, "")
    for call in (
        lambda: plan_garbage(store, name, min_age=ANY_AGE),
        lambda: delete_garbage(store, replace(planned, dataset=name)),
        lambda: verify_dataset(store, name),
        lambda: repair_dataset(other),
        lambda: shard_dataset(other),
        lambda: shard_dataset(other, accept_changed_source=True),
        lambda: ShardLoader(store.url, name),
    ):
        with pytest.raises(errors.ConfigurationError) as refused:
            call()
        assert said.format(url=root.url) in str(refused.value)
    (sentence,) = preflight_dataset(other)[1].refusals
    status = read_status(store, name)
    assert status.is_complete
    assert sentence == status.other_name == str(refused.value)
    assert objects(root, "") == before
    assert read_status(root, "sets/one").other_name == ""
    assert verify_dataset(root, "sets/one").is_intact


def test_a_plan_without_commits_is_not_replaced_under_another_name(settings):
    store = open_store(settings.store)
    commit_plan(store, DatasetKeys("sets/one"), plan_dataset(settings), {})
    with pytest.raises(errors.ConfigurationError, match="is the dataset 'sets/one' of"):
        shard_dataset(changed(settings, dataset="one", store={"url": f"{store.url}/sets"}))
    assert fetch(store, "sets/one/plan.json", DatasetPlan).dataset == "sets/one"


def test_what_a_user_keeps_in_the_folders_of_a_dataset_is_no_garbage(settings):
    shard_dataset(settings)
    store = open_store(settings.store)
    users = [
        f"sets/one/{key}"
        for key in (
            "transforms/lower/manifest.json",
            "transforms/notes.txt",
            f"transforms/{'a' * 63}.py",
            "shards/webdataset/train/notes.txt",
            "shards/notes.txt",
            "quarantine/notes.txt",
            "partitions/notes.txt",
            "lease/notes.txt",
        )
    ]
    for key in users:
        put(store, key, b"mine")
    delete_garbage(store, plan_garbage(store, "sets/one", min_age=ANY_AGE))
    assert all(exists(store, key) for key in users)
    strays = verify_dataset(store, "sets/one").strays
    assert {stray.key for stray in strays} == {key for key in users if "/shards/" in key}
    assert all("move or delete it yourself" in stray.reason for stray in strays)


def test_a_shard_that_the_manifest_names_is_no_garbage_without_its_commit(settings):
    report = shard_dataset(settings)
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    assert delete(store, [stat.key for stat in list_objects(store, keys.commits)]) == []
    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert {shard.key for shard in report.manifest.shards}.isdisjoint(
        one.key for one in plan.objects
    )
    assert delete_garbage(store, plan).failures == ()
    assert verify_dataset(store, "sets/one").is_intact
    put(store, keys.manifest, b"damaged")
    with pytest.raises(errors.CorruptError, match=r"manifest\.json"):
        plan_garbage(store, "sets/one", min_age=ANY_AGE)


@pytest.mark.parametrize("kind", ["seek point", "index"])
def test_a_seek_point_or_index_is_garbage_once_its_dataset_is_complete(settings, kind):
    shard_dataset(settings)
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    point = make_seek_point_key(keys.make_seek_points_folder(0), 7)
    if kind == "index":
        point = keys.make_member_index_key(0)
    put(store, point, b"{}")
    manifest = read(store, keys.manifest)
    delete(store, [keys.manifest])
    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert point not in {one.key for one in plan.objects}
    put(store, keys.manifest, manifest)
    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert point in {one.key for one in plan.objects}
    assert delete_garbage(store, plan).failures == ()
    assert not exists(store, point)
    assert verify_dataset(store, "sets/one").is_intact


def test_an_upload_below_a_dataset_that_is_not_of_the_dataset_is_no_garbage(settings, tmp_path):
    shard_dataset(settings)
    store, folder = open_store(settings.store), tmp_path / "store" / "sets" / "one"
    own = {
        "shards/webdataset/train/train-09999-000000.tar",
        "lease/train-00000/000000.beat",
        "lease/clock/0123456789abcdef",
    }
    others = {
        "two/shards/webdataset/train/train-00000-000000.tar",
        "checkpoints/step_000000001/rank_0.bin",
        "notes",
    }
    for key in own | others:
        half = folder / f"{key}#1"
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"half")
    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert {one.key for one in plan.uploads.uploads} == {f"sets/one/{key}" for key in own}
    delete_garbage(store, plan)
    assert {half.relative_to(folder).as_posix() for half in folder.rglob("*#1")} == {
        f"{key}#1" for key in others
    }


def test_garbage_that_a_record_names_or_that_was_written_since_the_plan_stays(settings):
    shard_dataset(settings)
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    committed = sorted(s.key for s in list_objects(store, keys.commits) if keys.parse_commit(s.key))
    body = read(store, committed[0])
    delete(store, [committed[0]])
    orphans = [
        f"sets/one/shards/webdataset/train/train-09999-00000{number}.tar" for number in range(3)
    ]
    for key in orphans[:2]:
        put(store, key, b"orphan")
    delete(store, [keys.manifest])
    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    put(store, committed[0], body)
    put(store, orphans[1], b"written again")
    put(store, orphans[2], b"new")
    done = delete_garbage(store, plan)
    assert (done.deletion.deleted_objects, done.failures) == (1, ())
    assert done.deletion.skipped == {
        "a record of the dataset names it by now": 1,
        "it was written since the plan was made": 1,
    }
    assert [exists(store, key) for key in orphans] == [False, True, True]


def test_garbage_is_not_collected_under_a_run(settings):
    def collect(event: Event) -> None:
        if isinstance(event, ShardUploaded):
            with pytest.raises(errors.ConflictError, match="works on sets/one"):
                plan_garbage(open_store(settings.store), "sets/one")

    shard_dataset(settings, progress=collect)


def test_a_lease_that_appears_between_two_batches_ends_the_collecting(settings, monkeypatch):
    monkeypatch.setattr(deletion, "_BATCH", 10)
    shard_dataset(settings)
    store = open_store(settings.store)
    for number in range(30):
        put(store, f"sets/one/shards/webdataset/train/train-09999-{number:06d}.tar", b"orphan")
    clock = StoreClock.read(store, "sets/one", Holder.describe_this_process())

    def take_lease(event: Event) -> None:
        if isinstance(event, ObjectsDeleted) and event.objects == 10:
            keys, holder = LeaseKeys("sets/one", "train-00000"), Holder.describe_this_process()
            assert isinstance(acquire(store, keys, holder, timedelta(hours=1), clock), Lease)

    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    with pytest.raises(errors.ConflictError, match="works on sets/one"):
        delete_garbage(store, plan, progress=take_lease)
    left = [
        stat.key for stat in list_objects(store, "sets/one/shards/webdataset/train/train-09999")
    ]
    assert len(left) == 20


def test_garbage_of_a_dataset_of_any_size_is_planned_under_one_lease(settings):
    settings = changed(settings, sharding={"partition_bytes": 1024})
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    plan = plan_dataset(settings)
    assert len(plan.partitions) > 50
    commit_plan(store, keys, plan, {})
    put(store, "sets/one/shards/webdataset/train/train-09999-000000.tar", b"orphan")
    found = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert [one.key for one in found.objects] == [
        "sets/one/shards/webdataset/train/train-09999-000000.tar"
    ]
    leases = [parse_lease("sets/one", stat.key) for stat in list_objects(store, "sets/one/lease/")]
    assert {one.name for one in leases if one} - {"plan"} == {COLLECTOR}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_begins_no_partition_before_the_collector_of_garbage_has_ended(
    settings, workers, caplog
):
    store, holder = open_store(settings.store), Holder.describe_this_process()
    clock = StoreClock.read(store, "sets/one", holder)
    keys = LeaseKeys("sets/one", COLLECTOR)
    collector = acquire(store, keys, holder, timedelta(hours=1), clock)
    assert isinstance(collector, Lease)
    released: list[bool] = []

    def release() -> None:
        collector.release()
        released.append(True)

    def note(event: Event) -> None:
        assert released or not isinstance(event, PartitionOpened)

    with call_at_message("waits for the end of the collection", release, caplog):
        report = shard_dataset(changed(settings, execution={"workers": workers}), progress=note)
    assert released
    assert verify_dataset(store, "sets/one").is_intact
    assert ids_in(store, report.manifest.shards) == Counter(range(2000))


def test_garbage_is_left_once_a_lease_of_the_collector_has_ended(settings, monkeypatch):
    monkeypatch.setattr(deletion, "_BATCH", 10)
    store = open_store(settings.store)
    commit_plan(store, DatasetKeys("sets/one"), plan_dataset(settings), {})
    for number in range(30):
        put(store, f"sets/one/shards/webdataset/train/train-09999-{number:06d}.tar", b"orphan")

    def end_lease(event: Event) -> None:
        if isinstance(event, ObjectsDeleted) and event.objects == 10:
            # The lease of number 0 was that of the plan.
            create(
                store,
                LeaseKeys("sets/one", COLLECTOR).make_end_key(1),
                b"as after a suspension",
            )

    plan = plan_garbage(store, "sets/one", min_age=ANY_AGE)
    with pytest.raises(
        errors.ConflictError, match="The lease of this process on sets/one has ended"
    ):
        delete_garbage(store, plan, progress=end_lease)
    left = [
        stat.key for stat in list_objects(store, "sets/one/shards/webdataset/train/train-09999")
    ]
    assert len(left) == 20


def test_a_worker_that_was_suspended_commits_nothing_that_is_gone(settings):
    path = Path(settings.source.store.url.removeprefix("file://")) / "a.jsonl"
    path.write_text(path.read_text() + "{\n")  # a quarantined row
    store, gone = open_store(settings.store), list[str]()

    def collect(event: Event) -> None:
        """Collect the garbage, as another machine does while this process is suspended."""
        if isinstance(event, ShardUploaded):
            for prefix in ("sets/one/shards/", "sets/one/quarantine/"):
                named = find_referenced_keys(store, DatasetKeys("sets/one"), plan)
                lost = [stat.key for stat in list_objects(store, prefix) if stat.key not in named]
                assert not delete(store, lost)
                gone.extend(lost)

    plan = plan_dataset(settings)
    report = shard_dataset(changed(settings, execution={"workers": 0}), progress=collect)
    assert any("/shards/" in key for key in gone)
    assert any("/quarantine/" in key for key in gone)
    assert ids_in(store, report.manifest.shards) == Counter(range(2000))
    assert verify_dataset(store, "sets/one").is_intact
    assert all(exists(store, key) for key in gone)


def test_status_tells_from_the_bucket_alone_how_far_it_is(settings):
    store = open_store(settings.store)
    seen = []

    def look(event: Event) -> None:
        if isinstance(event, ShardCommitted) and not seen:
            seen.append(read_status(store, "sets/one"))

    shard_dataset(changed(settings, execution={"workers": 1}), progress=look)
    running = [p for p in seen[0].partitions if p.state is PartitionState.RUNNING]
    assert len(running) <= 2  # one that ends, and the next one
    assert sorted(partition.shards for partition in running) in ([1], [0, 1])
    for partition in running:
        assert partition.host
        assert partition.until > datetime.now(UTC)
    done = read_status(store, "sets/one")
    assert done.is_complete
    assert done.ended_partitions == len(done.partitions)
    assert sum(partition.samples for partition in done.partitions) == 2000
    assert find_datasets(open_store(f"{settings.store.url}/sets")) == ["one"]
    assert find_datasets(store) == ["sets/one"]


def test_datasets_are_found_below_others_and_at_any_depth(tmp_path):
    store = open_store(tmp_path.as_uri())
    deep = "/".join("abcdefghijklmnop")  # 16 folders
    for name in (
        "wiki", "wiki/en", deep, f"{deep}/q", "wiki/shards/x", "x/checkpoints/step_000000001/y",
    ):  # fmt: skip
        put(store, f"{name}/plan.json", b"{}")
    assert find_datasets(store) == ["wiki", "wiki/en", deep]


def test_a_damaged_commit_costs_itself_and_is_named(settings):
    """Status counts all others, and what needs the whole ledger says which one is damaged."""
    shard_dataset(settings)
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    commits = sorted(s.key for s in list_objects(store, keys.commits) if keys.parse_commit(s.key))
    for key in commits[:2]:
        put(store, key, b"nonsense")
    found = read_status(store, "sets/one")
    assert sum(partition.shards for partition in found.partitions) == len(commits) - 2
    assert len(found.damaged_records) == 2
    for key, said in zip(commits, sorted(found.damaged_records), strict=False):
        assert key in said
    said = rf"2 of {len(commits)} records below .* is not a record .* is not a record"
    there = objects(store, "")
    with pytest.raises(errors.CorruptError, match=said):
        plan_garbage(store, "sets/one", min_age=ANY_AGE)
    assert objects(store, keys.shards).keys() <= there.keys()
    shown = CliRunner().invoke(main, ["status", settings.store.url, "sets/one"])
    assert shown.exit_code == 0, shown.output
    assert "2 records of its ledger cannot be read" in shown.output


def test_a_plan_is_shown_without_writing(settings, tmp_path):
    plan = plan_dataset(changed(settings, sharding={"holdout": 0.2}))
    assert {partition.split for partition in plan.partitions} == {"train", "val"}
    assert sum(partition.source_range.size for partition in plan.partitions) == plan.source.size
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("holdout", "empty"), [(0.0, []), (0.2, []), (1e-5, ["val"]), (1e-9, ["val"])]
)
def test_a_split_without_samples_is_a_warning(settings, holdout, empty):
    """The share of the source is shorter than a row, or than a byte."""
    settings = changed(settings, sharding={"holdout": holdout}, execution={"workers": 0})
    sentences = [
        f"The split `{split}` has no samples: with `holdout: {holdout:g}`" for split in empty
    ]
    for _ in range(2):  # also by a later run, which finds the dataset complete
        warnings = shard_dataset(settings).warnings
        assert [one.partition(", it has no whole")[0] for one in warnings] == sentences
    notes = preflight_dataset(settings)[1].notes
    assert len(notes) == (holdout == 1e-9)  # otherwise only a read of the source shows it


def test_a_split_for_which_no_row_is_left_is_a_warning(settings, tmp_path):
    (tmp_path / "source/a.jsonl").unlink()
    pq.write_table(pa.table({"id": [1], "text": ["x"]}), tmp_path / "source/a.parquet")
    parts = {
        "source": {"kind": "parquet"},
        "sharding": {"holdout": 0.2},
        "execution": {"workers": 0},
    }
    settings = changed(settings, **parts)
    (note,) = preflight_dataset(settings)[1].notes
    (warning,) = shard_dataset(settings).warnings
    assert note == warning
    assert warning.startswith("The split `train` has no samples: ")


# webdataset leaves local files for the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dataset_reads_back_through_its_index(settings, tmp_path):
    shard_dataset(settings)
    base = tmp_path / "store" / "sets" / "one"
    index = json.loads((base / "index.json").read_text())
    assert index["__kind__"] == "wids-shard-index-v1"
    shards = [str(base / shard["url"]) for shard in index["shardlist"]]
    assert [Path(s).stat().st_size for s in shards] == [e["filesize"] for e in index["shardlist"]]
    counted = Counter(int(s["id"]) for s in webdataset.WebDataset(shards, shardshuffle=False))
    assert counted == Counter(range(2000))


def test_a_run_in_memory_needs_no_processes(settings):
    memory = f"memory://{secrets.token_hex(8)}"
    own = {"dataset": "another", "store": {"url": memory}, "execution": {"workers": 0}}
    report = shard_dataset(changed(settings, **own))
    assert report.url == f"{memory}/another"
    assert report.samples == 2000


def test_a_dataset_inside_its_own_source_is_refused(settings):
    inside = {"url": f"{settings.source.url}/out"}
    with pytest.raises(errors.ConfigurationError, match="inside of its own source"):
        shard_dataset(changed(settings, store=inside))


def test_a_dataset_in_its_own_source_is_refused_behind_a_link_too(settings, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "source" / "out").symlink_to(tmp_path)  # the source is read through links
    for url in ("link", "source/out"):
        with pytest.raises(errors.ConfigurationError, match="inside of its own source"):
            shard_dataset(changed(settings, store={"url": (tmp_path / url).as_uri()}))
    assert not list(tmp_path.rglob("plan.json"))


@pytest.mark.parametrize("is_mirror", [False, True])
def test_a_source_among_the_shards_of_its_own_dataset_is_refused(settings, tmp_path, is_mirror):
    folder = tmp_path / "store" / "sets" / "one" / "shards" / "old"
    folder.mkdir(parents=True)
    shutil.copy(tmp_path / "source" / "a.jsonl", folder)
    source = {"mirrors": [{"url": folder.as_uri()}]} if is_mirror else {"url": folder.as_uri()}
    inside = changed(settings, source=source)
    with pytest.raises(errors.ConfigurationError, match="lies in the folder 'shards' of the data"):
        shard_dataset(inside)
    assert any("in the folder 'shards'" in one for one in preflight_dataset(inside)[1].refusals)
    raw = tmp_path / "store" / "sets" / "one" / "raw"
    folder.rename(raw)  # a user's folder, of which nothing is deleted
    assert shard_dataset(changed(settings, source={"url": raw.as_uri()})).samples == 2000


def test_a_bucket_of_the_same_name_on_another_server_is_another_one(settings, rgw, bucket, request):
    spec = make_spec("rgw", request).model_copy(update={"url": f"s3://{bucket}"})
    put(open_store(spec), "a.jsonl", lines(10).encode())
    elsewhere = {"endpoint": "http://127.0.0.1:9", "retry_timeout": timedelta(milliseconds=1)}
    there = changed(settings, source=spec.model_dump(), store={**spec.model_dump(), **elsewhere})
    (refusal,) = preflight_dataset(there)[1].refusals
    assert "does not answer" in refusal


def test_without_a_store_the_environment_names_one(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("STORAGE_BACKEND", "local")
    monkeypatch.setenv("LOCAL_STORAGE_PATH", str(tmp_path / "named"))
    data = settings.model_dump(exclude={"store"})
    report = shard_dataset(PipelineSettings.model_validate(data))
    assert report.url == (tmp_path / "named" / "sets" / "one").as_uri()


def test_a_run_from_a_file_is_the_same_run(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", settings.store.url)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"dataset: sets/one\nstore: {{url: '${{WHERE}}'}}\n"
        f"source: {{columns: {{txt: text, id: id}}, url: {settings.source.url}}}\n"
        "sharding: {shard_bytes: 512KiB, partition_bytes: 100000}\nexecution: {workers: 2}\n"
    )
    assert run_from_file(path).manifest == shard_dataset(settings).manifest
    assert run_from_file(path, dataset="two").manifest.dataset == "two"


def test_a_dataset_is_never_finalized_over_a_failed_upload(settings, request, r2):

    place = make_spec("r2", request).model_copy(
        update={"retry_timeout": timedelta(milliseconds=200)}
    )
    config = changed(settings, store=place.reveal_secrets(), execution={"workers": 0, "uploads": 1})
    r2.fail_next("error500", 10_000, method="PUT", key_contains="train-00001-000001.tar")
    with pytest.raises(errors.UnavailableError, match=r"train-00001-000001\.tar"):
        shard_dataset(config)
    assert r2.count_fired()["error500"] > 0
    assert not exists(open_store(place), "sets/one/manifest.json")
    r2.reset()
    report = shard_dataset(config)
    assert ids_in(open_store(place), report.manifest.shards) == Counter(range(2000))


def test_a_ledger_with_a_gap_is_never_finalized(settings):
    store = open_store(settings.store)

    def delete_a_commit(event: Event) -> None:
        if isinstance(event, PartitionEnded) and event.partition == "train-00001":
            assert delete(store, ["sets/one/commits/train-00001/000000.json"]) == []

    with pytest.raises(errors.ConflictError, match="train-00001 has no commit 0"):
        shard_dataset(settings, progress=delete_a_commit)
    assert not exists(store, "sets/one/manifest.json")


@pytest.mark.parametrize("kind", ["jsonl", "files"])
def test_a_repair_makes_what_verify_misses_byte_identical(settings, tmp_path, kind):
    if kind == "files":
        for row in rows(300):
            (tmp_path / "source" / f"{row['id']:04d}.txt").write_text(str(row["text"]) * 20)
        settings = changed(
            settings,
            source={"kind": kind, "columns": None, "include": ["*.txt"]},
            sharding={"partition_bytes": 500_000},
        )
    else:
        with (tmp_path / "source" / "a.jsonl").open("a") as file:
            file.write("bad\n" * 3)
    shard_dataset(settings)
    store = open_store(settings.store)
    before = objects(store, "sets/one/shards/")
    missing, shortened, flipped, *good = (key for key in before if key.endswith(".tar"))
    assert delete(store, [missing]) == []
    put(store, shortened, before[shortened][:-512])
    put(store, flipped, before[flipped][:-1] + b"x")
    index = read(store, "sets/one/index.json")
    put(store, "sets/one/index.json", index + b"x")
    times = {stat.key: stat.last_modified for stat in list_objects(store, "sets/one/shards/")}
    report = repair_dataset(settings)
    assert set(report.remade_keys) == {missing, shortened, flipped, "sets/one/index.json"}
    assert read(store, "sets/one/index.json") == index
    assert objects(store, "sets/one/shards/") == before
    after = {stat.key: stat.last_modified for stat in list_objects(store, "sets/one/shards/")}
    assert [after[key] for key in good] == [times[key] for key in good]
    assert repair_dataset(settings).remade_keys == ()


def test_a_repair_from_a_source_that_gives_other_bytes_replaces_nothing(settings, tmp_path):
    report = shard_dataset(settings)
    store, source = open_store(settings.store), tmp_path / "source" / "a.jsonl"
    damaged = report.manifest.shards[0].key
    put(store, damaged, b"damaged")
    stat = source.stat()
    source.write_text(lines(2000).replace("x", "y"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only the bytes tell
    with pytest.raises(errors.ChangedError, match="the source has other bytes now"):
        repair_dataset(settings)
    assert read(store, damaged) == b"damaged"


def upgrade_pyarrow(monkeypatch, *, other_bytes: bool = True) -> None:
    """Make this process one with a later pyarrow, whose files may have other bytes."""
    monkeypatch.setattr(ParquetFormat, "writer", {**ParquetFormat.writer, "pyarrow": "99.0"})
    if other_bytes:
        monkeypatch.setattr("millrace.datasets.formats.parquet._COMPRESSION_LEVEL", 19)


@pytest.mark.parametrize("other_bytes", [False, True])
def test_a_repair_with_another_pyarrow_names_the_version_that_has_the_bytes(
    settings, monkeypatch, other_bytes
):
    settings = changed(
        settings,
        sharding={"formats": ["webdataset", "parquet"]},
        execution={"workers": 0},
    )
    shard_dataset(settings)
    store = open_store(settings.store)
    before = objects(store, "sets/one/shards/")
    tar, table = (next(key for key in before if key.endswith(end)) for end in (".tar", ".parquet"))
    upgrade_pyarrow(monkeypatch, other_bytes=other_bytes)
    assert delete(store, [tar]) == []
    assert repair_dataset(settings).remade_keys == (tar,)
    assert delete(store, [table]) == []
    if other_bytes:
        version = re.escape(pa.__version__)
        said = rf"\(pyarrow {version}, now 99\.0\)\. Install pyarrow=={version} to repair it\."
        with pytest.raises(errors.ConflictError, match=said):
            repair_dataset(settings)
        assert not exists(store, table)
    else:
        repair_dataset(settings)
        assert objects(store, "sets/one/shards/") == before


def test_a_later_pyarrow_is_refused_only_while_shards_are_to_be_written(settings, monkeypatch):
    settings = changed(settings, sharding={"formats": ["parquet"]}, execution={"workers": 0})
    report = shard_dataset(settings)
    upgrade_pyarrow(monkeypatch)
    again = shard_dataset(settings.model_copy(update={"card": CardSettings(license="mit")}))
    assert (again.was_complete, again.new_shards) == (True, 0)
    assert again.manifest == report.manifest
    store = open_store(settings.store)
    assert exists(store, "sets/one/README.md")
    assert preflight_dataset(settings)[1].refusals == ()
    assert delete(store, ["sets/one/manifest.json"]) == []
    said = f"Install pyarrow=={pa.__version__} to finish it, or give this one another name."
    with pytest.raises(errors.ConflictError, match=re.escape(said)):
        shard_dataset(settings)
    assert preflight_dataset(settings)[1].refusals[0].endswith(said)


@pytest.mark.parametrize("found", ["missing", "other size"])
def test_a_shard_lost_before_the_dataset_is_complete_is_made_again(settings, found):
    settings = changed(settings, execution={"workers": 0})
    store, lost = open_store(settings.store), ""
    open_partitions = len(plan_dataset(settings).partitions)
    expected: dict[str, bytes] = {}

    def lose_a_shard(event: Event) -> None:
        nonlocal open_partitions, lost
        open_partitions -= isinstance(event, PartitionEnded)
        if open_partitions == 0 and not lost:
            expected.update(objects(store, "sets/one/shards/"))
            lost = next(iter(expected))
            if found == "missing":
                assert delete(store, [lost]) == []
            else:
                put(store, lost, expected[lost][:-512])

    shard_dataset(settings, progress=lose_a_shard)
    assert lost
    shards = objects(store, "sets/one/shards/")
    assert {key: body for key, body in shards.items() if key.endswith(".tar")} == expected
    assert verify_dataset(store, "sets/one").is_intact


def test_a_removal_that_another_runs_commits_overtook_names_the_repair(settings):
    """A removal deletes what had no commit when it looked, and may have been suspended since."""
    alone = changed(settings, execution={"workers": 0})
    with pytest.raises(KilledError):
        shard_dataset(alone, progress=kill_at(ShardUploaded))
    store = open_store(settings.store)
    plan = read(store, "sets/one/plan.json")

    def commit(event: Event) -> None:
        if isinstance(event, ShardDeletionStarted):
            put(store, "sets/one/plan.json", plan)
            leases = [stat.key for stat in list_objects(store, "sets/one/lease/")]
            assert delete(store, leases) == []  # the removal was not heard of for long
            with pytest.raises(KilledError):
                shard_dataset(alone, progress=kill_at(ShardCommitted))

    with pytest.raises(errors.ConflictError, match="--repair"):
        shard_dataset(changed(alone, **OTHER), progress=commit)
    shard_dataset(alone)
    assert verify_dataset(store, "sets/one").is_intact


@pytest.mark.parametrize("kind", ["jsonl", "files", "large files"])
def test_a_repair_takes_a_source_that_was_uploaded_again_with_the_same_bytes(
    settings, tmp_path, kind
):
    name = "a.jsonl"
    if kind != "jsonl":
        name = "a.bin"
        (tmp_path / "source" / name).write_bytes(os.urandom((40 if "large" in kind else 1) << 20))
        settings = changed(
            settings, source={"kind": "files", "columns": None, "include": ["*.bin"]}
        )
    report = shard_dataset(settings)
    store = open_store(settings.store)
    before = objects(store, "sets/one/shards/")
    assert delete(store, [report.manifest.shards[0].key]) == []
    os.utime(tmp_path / "source" / name, ns=(1, 1))
    with pytest.raises(errors.ChangedError, match="was written again"):
        shard_dataset(settings)
    assert shard_dataset(settings, accept_changed_source=True).new_shards == 0
    assert repair_dataset(settings).remade_keys == (report.manifest.shards[0].key,)
    assert objects(store, "sets/one/shards/") == before


def test_a_manifest_has_the_places_of_some_samples_of_tar_shards(settings, tmp_path):
    source = tmp_path / "source" / "a.jsonl"
    source.write_text(
        "".join(json.dumps({"text": "x" * 5000, "id": i}) + "\n" for i in range(1000))
    )
    large = changed(settings, sharding={"shard_bytes": 8 << 20, "partition_bytes": 1 << 30})
    formats = changed(large, sharding={"formats": ["webdataset", "mds"], "types": {"id": "int"}})
    manifest = shard_dataset(formats).manifest
    tar, other = sorted(manifest.shards, key=lambda shard: shard.format, reverse=True)
    assert other.sample_offsets == ""
    offsets = decode_sample_offsets(tar.sample_offsets, tar.samples, tar.size)
    assert [offset >> 20 for _, offset in offsets] == [1, 2, 3, 4, 5, 6]
    body = read(open_store(settings.store), tar.key)
    with tarfile.open(fileobj=io.BytesIO(body)) as members:
        places = [member.offset for member in members if member.name.endswith(".id")]
    assert all(places[row] == offset for row, offset in offsets)
