"""Environment of a training script, and its reports."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from millrace import errors
from millrace.campaigns.worker import (
    WindowLoader,
    Worker,
    find_joined_workers,
    read_median_metric,
    reports,
)
from millrace.checkpoints import load
from millrace.datasets.formats import FieldType
from millrace.datasets.sample import Sample
from millrace.gradients import RunSettings, TrainingWindow, begin_run, select_weights
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import EpochRecord
from millrace.schemas.gradient import StartWindow
from millrace.storage import Store, put, read
from millrace.testing.rgw import RGW
from tests.support.campaigns.workers import Make, finalize_dataset, owned
from tests.support.mirrors import Mirrors, start_mirrors
from tests.support.shard_datasets import write_dataset


def test_a_worker_has_its_share_of_the_shards_on_its_disk(store: Store, make: Make) -> None:
    finalize_dataset(store, 5)
    for number in range(2):
        worker = Worker(make(number=number, workers=2))
        mine = worker.fetch_shards("train", only_own=True)
        assert [path.name for path in mine] == [
            f"train-00000-{n:06d}.tar" for n in range(number, 5, 2)
        ]
    assert len(worker.fetch_shards("train")) == 5
    (held,) = worker.fetch_shards("val")
    assert held.stat().st_size > 100
    few = Worker(make(number=7, workers=8))
    assert len(few.fetch_shards("train", only_own=True)) == 5  # fewer than workers: all have all


def test_what_was_brought_is_not_fetched_and_what_is_damaged_is_refused(
    store: Store, make: Make
) -> None:
    finalize_dataset(store, 2)
    worker = Worker(make())
    first, second = worker.fetch_shards()
    whole = second.read_bytes()
    put(store, "text/shards/webdataset/train/train-00000-000000.tar", b"x" * first.stat().st_size)
    assert worker.fetch_shards() == [first, second]  # they are here: the store is not asked
    second.write_bytes(b"y" * len(whole))  # whoever may bring files here
    again = Worker(make())
    assert again.fetch_shards()[1].read_bytes() == whole
    first.unlink()
    worker = Worker(make())
    with pytest.raises(errors.CorruptError, match="not what its manifest says"):
        worker.fetch_shards()
    assert not first.exists()
    assert [path.name for path in first.parent.iterdir()] == [second.name]


def test_no_more_of_a_shard_is_written_than_the_manifest_says(store: Store, make: Make) -> None:
    finalize_dataset(store, 1)
    key = "text/shards/webdataset/train/train-00000-000000.tar"
    whole = read(store, key)
    put(store, key, whole + b"x" * (32 << 20))
    (path,) = Worker(make()).fetch_shards()
    assert path.read_bytes() == whole


def test_a_worker_without_a_dataset_says_so(make: Make) -> None:
    with pytest.raises(errors.ConfigurationError, match="names no dataset"):
        Worker(make(dataset=None)).fetch_shards()


def test_a_script_that_no_worker_started_is_told_how() -> None:
    with pytest.raises(errors.ConfigurationError, match="started by `millrace campaign worker"):
        Worker.from_environment({})


def test_an_epoch_ends_where_a_window_begins_that_follows_it(store: Store, make: Make) -> None:
    model = torch.nn.Linear(3, 2)
    settings = make()
    with owned(store, epochs=2), Worker(settings) as worker:
        worker.begin_window(TrainingWindow(1, 0, 5), model.state_dict(), loss=3.0)
        worker.begin_window(TrainingWindow(2, 5, 5), model.state_dict(), loss=float("nan"))
        with pytest.raises(errors.NotFoundError):
            fetch(store, "small/model/epochs/000000.json", EpochRecord)
        worker.begin_window(TrainingWindow(3, 10, 5), model.state_dict(), loss=2.0)
        worker.begin_window(TrainingWindow(3, 10, 5), model.state_dict(), loss=9.0)  # started again
        worker.begin_window(TrainingWindow(5, 20, 5), model.state_dict(), loss=1.0)
    assert fetch(store, "small/model/epochs/000000.json", EpochRecord).step == 10
    assert fetch(store, "small/model/epochs/000001.json", EpochRecord).step == 20
    found = load(store, "small/model")
    assert found.checkpoint.step == 20
    keys = settings.run.gradient_keys
    said = {1: 3.0, 3: 2.0, 5: 1.0}
    assert read_median_metric(store, keys, ["worker-0", "gone"], "loss", until=5) == said
    assert read_median_metric(store, keys, ["worker-0"], "loss", until=4) == {1: 3.0, 3: 2.0}
    assert (
        read_median_metric(store, keys, ["worker-0", "gone", "too"], "loss", until=5) == {}
    )  # one of three


def test_what_a_worker_says_that_is_nothing_is_passed_over(store: Store, make: Make) -> None:
    keys = make().run.gradient_keys
    uids = ["a", "b", "c", "d", "e", "f", "g"]
    for uid, loss in zip(uids, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e300], strict=True):
        said = StartWindow(uid=uid, window=1, step=0, measured={"loss": loss})
        commit_once(store, keys.make_start_window_key(uid, 1), said)
    folder = Path(store.url.removeprefix("file://"))
    another = (folder / keys.make_start_window_key("a", 1)).read_bytes()
    for uid, body in (
        ("b", another), ("c", b"[" * 5000), ("d", b'{"kind":"start-window"}'),
    ):  # fmt: skip
        put(store, keys.make_start_window_key(uid, 1), body)
    assert read_median_metric(store, keys, ["a", "b", "c", "d"], "loss", until=1) == {}
    assert read_median_metric(store, keys, ["a", "b", "e", "f", "g"], "loss", until=1) == {1: 5.0}


def test_reports_of_many_windows_are_read_evenly_spaced(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_MAX_WINDOWS", 4)
    keys = make().run.gradient_keys
    for window in range(1, 11):
        said = StartWindow(uid="a", window=window, step=0, measured={"loss": float(window)})
        commit_once(store, keys.make_start_window_key("a", window), said)
    found = read_median_metric(store, keys, ["a"], "loss", until=10)
    assert found == {1: 1.0, 4: 4.0, 7: 7.0, 10: 10.0}


def test_a_worker_says_once_what_the_weights_of_a_window_are_worth(
    store: Store, make: Make
) -> None:
    keys = make().run.gradient_keys
    for uid, loss in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("liar", 100.0)):
        said = StartWindow(uid=uid, window=1, step=0, measured={"loss": loss})
        commit_once(store, keys.make_start_window_key(uid, 1), said)
    for zeros in range(1, 9):
        key = keys.make_start_window_key("liar", 1).replace("window-", f"window-{'0' * zeros}")
        commit_once(store, key, StartWindow(uid="liar", window=1, step=0, measured={"loss": 100.0}))
    found = read_median_metric(store, keys, ["a", "b", "c", "liar"], "loss", until=1)
    assert found == {1: 2.5}


def test_a_member_that_writes_nonsense_stops_no_other(store: Store, make: Make) -> None:
    put(store, "small/model/lease/members/liar/000000.json", b"nonsense")
    put(store, "small/model/members/liar/cooldowns/000000/vote.json", b"nonsense")
    with owned(store), Worker(make()) as worker:
        worker.begin_window(TrainingWindow(3, 10, 5), torch.nn.Linear(3, 2).state_dict())
    assert fetch(store, "small/model/epochs/000000.json", EpochRecord).step == 10


def test_a_worker_waits_for_its_run_to_begin(store: Store, make: Make) -> None:
    from datetime import timedelta

    settings, model = make(), torch.nn.Linear(3, 2)
    with pytest.raises(errors.UnavailableError, match="has not begun in 0:00:00"):
        Worker(settings).join(timeout=timedelta(0))
    begin_run(store, settings.run.chain_keys, select_weights(model))
    assert Worker(settings).join().open_window == TrainingWindow(1, 0, 30)


def test_who_has_joined_is_who_has_written_since_the_run_began(store: Store, make: Make) -> None:
    settings, model = make(), torch.nn.Linear(3, 2)
    uids = ["worker-0", "worker-1"]
    with pytest.raises(errors.NotFoundError):
        find_joined_workers(store, settings.run, uids)
    put(store, settings.run.gradient_keys.make_gradient_key("worker-1", 1), b"of a run before")
    begin_run(store, settings.run.chain_keys, select_weights(model))
    assert find_joined_workers(store, settings.run, uids) == set()
    with Worker(settings) as worker:
        worker.begin_window(worker.join().open_window, model.state_dict())
    assert find_joined_workers(store, settings.run, uids) == {"worker-0"}


def test_a_worker_that_joins_or_begins_a_window_again_has_joined_again(
    store: Store, make: Make
) -> None:
    settings, model = make(), torch.nn.Linear(3, 2)
    begin_run(store, settings.run.chain_keys, select_weights(model))
    window = TrainingWindow(1, 0, 30)
    Worker(settings).begin_window(window, model.state_dict(), loss=2.0)
    key = settings.run.gradient_keys.make_start_window_key("worker-0", 1)
    file = Path(store.url.removeprefix("file://")) / key
    later = file.stat().st_mtime - 30
    since = {"worker-0": datetime.fromtimestamp(later, UTC)}
    link = Path(store.url.removeprefix("file://")) / settings.run.chain_keys.make_link_key(0)
    os.utime(link, (later - 60, later - 60))
    for join_again in (
        lambda worker: worker.join(),  # a script that has sent its gradient waits for the window
        lambda worker: worker.begin_window(window, model.state_dict(), loss=9.0),
    ):
        os.utime(file, (later - 30, later - 30))
        assert find_joined_workers(store, settings.run, ["worker-0"], since) == set()
        join_again(Worker(settings))
        assert find_joined_workers(store, settings.run, ["worker-0"], since) == {"worker-0"}
    assert fetch(store, key, StartWindow).measured == {"loss": 2.0}


@pytest.mark.parametrize("split", ["vla", "test"])
def test_a_split_that_the_dataset_lacks_is_refused(store: Store, make: Make, split: str) -> None:
    finalize_dataset(store, 2)
    with pytest.raises(
        errors.ConfigurationError,
        match=f"text has no shards of the split '{split}': name 'train' or 'val'",
    ):
        Worker(make()).fetch_shards(split)


OUTSIDE = [
    "/{root}/evil", "text/shards/../../../evil", "../evil", "text/shards//evil", "text/shards/./x",
    "text/shards/a\\..\\evil", "text/shards/a\nb", "other/shards/evil", "text/evil", "",
]  # fmt: skip


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_manifest_whose_keys_lead_out_of_the_root_is_refused(
    store: Store, make: Make, tmp_path: Path, key: str
) -> None:
    finalize_dataset(store, 1)
    path = Path(store.url.removeprefix("file://")) / "text/manifest.json"
    written = json.loads(path.read_bytes())
    written["record"]["shards"][0]["key"] = key.format(root=tmp_path)
    put(store, "text/manifest.json", json.dumps(written).encode())
    before = set(tmp_path.rglob("*"))
    with pytest.raises(errors.CorruptError, match=r"text/manifest\.json is not a record"):
        Worker(make()).fetch_shards()
    assert set(tmp_path.rglob("*")) == before


def test_a_manifest_of_another_dataset_is_refused(store: Store, make: Make) -> None:
    finalize_dataset(store, 1)
    put(store, "words/manifest.json", read(store, "text/manifest.json"))
    with pytest.raises(errors.ConfigurationError, match="is a copy of the dataset 'text'"):
        Worker(make(dataset="words")).fetch_shards()


def test_a_worker_loads_its_windows_from_a_mirror_when_the_store_is_dead(
    rgw: RGW, make: Make, tmp_path: Path
) -> None:
    run = RunSettings(run="small/run", windows=12, steps=10)
    samples = [[Sample(f"k{n}", {"txt": b"%d" % n}, n)] for n in range(120)]  # a shard of each
    with start_mirrors(rgw, tmp_path, 2) as proxies:
        world = Mirrors.make(rgw, proxies)
        for store in world.stores:
            write_dataset(store, "text", ["webdataset"], {"txt": FieldType.STR}, samples)
        first, mirror = world.specs
        alone = WindowLoader(
            mirror, "text", run=run.name, number=0, workers=1, batch_size=1, steps=run.steps
        )
        worker = Worker(make(run=run, read_store=first, mirrors=[mirror]))
        loaded: list[str] = []
        for number in range(1, run.windows + 1):
            if number == 3:
                world.proxies[0].kill()
            window = TrainingWindow(number, 0, run.steps)
            batches = list(worker.load_batches(window, 1))
            assert batches == list(alone.load(number))
            loaded += [sample["txt"] for batch in batches for sample in batch]
    assert sorted(map(int, loaded)) == list(range(120))
