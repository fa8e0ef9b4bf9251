"""Objects in a plan, and objects left after its execution: judged by an oracle."""

import os
import random
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.cleanup import CleanupKind, CleanupSettings, Rule, execute, make_plan
from millrace.cleanup.plans import open_plan
from millrace.cleanup.protection import ProtectionPolicy
from millrace.keys.datasets import DatasetKeys, make_seek_point_key
from millrace.keys.gradients import ChainKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Holder, StoreClock, acquire
from millrace.storage import (
    Stat,
    Store,
    delete,
    delete_one,
    list_fairly,
    list_objects,
    open_store,
    put,
)
from tests.soak.cleaning import clean_with_kills, fill_bucket, list_by_boto3
from tests.stores import make_spec
from tests.support.cleanup.judge import Judge, ListedObject, read_time
from tests.support.cleanup.material import BucketBuilder
from tests.support.examples import scale_examples

RUNS = ("run", "run/a", "exp-1")
VERSIONS = ("0.2.1", "0.2.10", "0.3", "dev")
NOW = timedelta(0)


def files(folder: Path) -> list[ListedObject]:
    """Return the files of a folder."""
    found: list[ListedObject] = []
    for path in folder.rglob("*"):
        if path.is_file():
            stat = path.stat()
            written = datetime.fromtimestamp(stat.st_mtime, UTC)
            key = path.relative_to(folder).as_posix()
            found.append(ListedObject(key, stat.st_size, written, path.read_bytes))
    return found


def folder_place(folder: Path) -> BucketBuilder:
    folder.mkdir(parents=True, exist_ok=True)
    return BucketBuilder(open_store(folder.as_uri()))


def as_json(rule: Rule) -> dict[str, Any]:
    """A rule as the oracle is told."""
    hours = rule.older_than / timedelta(hours=1)
    return {**rule.model_dump(mode="json", exclude={"older_than"}), "older_than": hours}


def keys_of(place: BucketBuilder) -> set[str]:
    return {stat.key for stat in list_objects(place.store) if not stat.key.startswith("_clean/")}


class Filling:
    """Everything that there can be, of several ages."""

    def __init__(self, place: BucketBuilder, seed: int) -> None:
        self.place, self.dice = place, random.Random(seed)
        for run in RUNS:
            self.fill_run(run)
        for job in ("job", "exp-1/job"):
            self.fill_job(job)
        for name in ("words", "exp-1/words"):
            self.fill_dataset(name)
        for key in OTHERS:
            place.put(key, hours=self.draw_hours())
        if self.dice.random() < 0.1:
            place.put_lease("", "members/m1")

    def draw_hours(self) -> float:
        return self.dice.choice([0, 3, 30, 60, 200])

    def put_lease_rarely(self, scope: str, name: str) -> None:
        if self.dice.random() < 0.2:
            self.place.put_lease(scope, name, ended=self.dice.random() < 0.5)

    def fill_run(self, run: str) -> None:
        for version in self.dice.sample(VERSIONS, 2):
            for uid in ("w1", "w2"):
                for window in self.dice.sample(range(12), 3):
                    self.place.put_gradient(run, uid, window, version, self.draw_hours())
                self.place.put_start_window(run, uid, 1, version, self.draw_hours())
        version = self.dice.choice(VERSIONS)
        windows = self.dice.sample(range(7), self.dice.randrange(3))
        heads = {window: self.draw_hours() for window in windows}
        self.place.put_chain(run, version, 6, heads, self.draw_hours())
        self.put_lease_rarely(ChainKeys(run, version).job, "aggregator")

    def fill_job(self, job: str) -> None:
        same, homes = LARGE if job == "job" else b"embedding", dict[bytes, int]()
        for step in range(1, 1 + self.dice.randrange(6)):
            self.place.put_checkpoint(
                job, step, [f"{job} {step}".encode(), same], homes=dict(homes),
                hours=self.draw_hours(), missing=0 if self.dice.random() < 0.2 else None,
            )  # fmt: skip
            homes.setdefault(same, step)
            if self.dice.random() < 0.2:
                self.place.put_pin(job, step)
            if self.dice.random() < 0.2:
                self.place.put_epoch(job, step, step)
            folder, digits = f"{job}/checkpoints/step_{step:09d}", secrets.token_hex(32)
            for stray in (f"parts/{digits}.safetensors", f"block_digests/{digits}.bin"):
                self.place.put(f"{folder}/{stray}", hours=self.draw_hours())
        self.put_lease_rarely(job, "members/m1")

    def fill_dataset(self, name: str) -> None:
        self.place.put_dataset(
            name, self.dice.randrange(3), is_complete=self.dice.random() < 0.6,
            orphans=self.dice.randrange(3), hours=self.draw_hours(),
        )  # fmt: skip
        for cursor in range(self.dice.randrange(3)):
            prefix = DatasetKeys(name).make_seek_points_folder(0)
            self.place.put(make_seek_point_key(prefix, cursor), hours=self.draw_hours())
        for key in (f"transforms/{'0f' * 32}.py", *USERS):
            self.place.put(f"{name}/{key}", hours=self.draw_hours())
        for key in (DatasetKeys(name).card, DatasetKeys(name).readme):
            if self.dice.random() < 0.5:
                self.place.put(key, hours=self.draw_hours())
        self.put_lease_rarely(name, "train-00000")


LARGE = b"embedding" * 2**17  # of several blocks
USERS = (  # what users keep in the folders of a dataset
    "transforms/lower/plan.json",
    "transforms/lower/manifest.json",
    "transforms/lower/shards/webdataset/train/train-00000-000000.tar",
    "transforms/run/w1/gradient-000000001-w1-v0.2.1.safetensors",
    "transforms/notes.txt",
    "shards/webdataset/train/notes.txt",
    "commits/notes.txt",
    "partitions/notes.txt",
    "quarantine/notes.jsonl",
    "lease/notes.txt",
)
OTHERS = (
    f"_probe-{'0f' * 8}",
    f"run/_audit-{'0f' * 8}-put",
    f"job/lease/clock/{'0f' * 8}",
    "_machines/fleet/000000/log/000000.txt",
    "_machines/shard/words/000001/beat.json",
    "_machines/fleet/notes.txt",
    "_rentals/fleet/attempts/000000-intent.json",
    "_audit-2024-report.pdf",
    "mine/_probe-1.csv",
    "cam/lease/clock/photo.jpg",
    "w1/gradient-000000001-w1-v1.pt",
    "gradient-000000001-w1-v0.2.1.safetensors",
    f"gathers/0.3/000000001-{'a' * 64}.npz",
    "checkpoints/step_000000001/metadata.json",
    "shards/webdataset/train/train-00000-000000.tar",
    "plan.json",
    "mine/plan.json",
    "mine/notes.txt",
    "mine/_rentals/installation.json",
    "mine/_rentals/fleet/attempts/000000-intent.json",
    "mine/_rentals/fleet/notes.txt",
    "mine/_machines/fleet/000000/files.json",
    "mine/_clean/20260101T000000-01234567/plan.jsonl",
    "mine/my data/words/shards/webdataset/train/train-00000-000000.tar",
    "mine/my data/words/notes.txt",
    "mine/checkpoints/job/checkpoints/step_000000001/metadata.json",
    "mine/checkpoints/job/notes.txt",
    "run/w1/gradient-000000001-w2-v0.2.1.pt",
    "run/w2/mine/notes.txt",
    "run/w3/notes.txt",
    "exp-1/w2/x",
    "run/a/w1/w2/x",
)
NUMBERED = [
    CleanupKind.GRADIENTS,
    CleanupKind.START_WINDOWS,
    CleanupKind.GATHERS,
    CleanupKind.CHECKPOINTS,
]
VERSIONED = NUMBERED[:3]


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    what = draw(st.lists(st.sampled_from(list(CleanupKind)), min_size=1, max_size=5, unique=True))
    have: dict[str, Any] = {}
    have["older_than"] = timedelta(hours=draw(st.sampled_from([0, 0, 1, 24, 48, 100])))
    if not set(what) - set(VERSIONED):
        have["version"] = draw(
            st.sampled_from(["", "0.2.1", "!=0.2.1", ">=0.2,<0.3", "<0.2.5", "dev", "!=dev"])
        )
    if not set(what) - set(NUMBERED):
        have["keep_last"] = draw(st.integers(0, 3))
        have["keep_every"] = draw(st.sampled_from([None, 2, 3]))
    if not {CleanupKind.CHECKPOINTS, CleanupKind.DATASETS} & set(what):
        have["suffix"] = draw(st.sampled_from(["", "", ".safetensors", ".tar", "n"]))
    ours = ["", "", "", "run/", "run/w", "exp-1/", "job"]
    prefixes = ["mine/", "w1", "words/"] if CleanupKind.OTHER in what else ours
    have["prefix"] = draw(st.sampled_from(prefixes))
    have["name"] = draw(st.sampled_from([""] * 9 + ["run", "run/a", "job", "words"]))
    return Rule(kinds=tuple(what), **have)


PINS = ["run/", "job/checkpoints/step_000000002/", "mine/notes.txt", "words/", "exp-1/job/"]


@settings(
    max_examples=scale_examples(60), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    some=st.lists(rules(), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 20),
    pinned=st.lists(st.sampled_from(PINS), max_size=2, unique=True),
)
def test_a_plan_is_what_an_oracle_says_and_the_run_deletes_just_that(tmp_path, some, seed, pinned):
    folder = tmp_path / secrets.token_hex(6)
    place = folder_place(folder)
    Filling(place, seed)
    things = files(folder)
    expected = Judge(
        things, [as_json(rule) for rule in some], read_time(), pinned=pinned, path=f"{folder}"
    ).list_deletions()
    config = CleanupSettings(store=place.store.spec, rules=tuple(some), pins=tuple(pinned))
    plan = make_plan(config)
    with open_plan(place.store, plan.name) as (_, entries):
        found = {entry.stat.key: entry.rule_index for entry in entries}
    assert found == expected
    assert plan.totals.unmatched_pins == tuple(
        pin
        for pin in pinned
        if not any(f"{thing.key}/".startswith(f"{pin.rstrip('/')}/") for thing in things)
    )
    assert plan.objects == len(expected)
    assert plan.size == sum(thing.size for thing in things if thing.key in expected)
    done = execute(config, plan.name)
    assert not done.failures
    assert not done.skipped
    assert done.deleted_objects == len(expected)
    assert done.deleted_bytes == plan.size
    assert keys_of(place) == {thing.key for thing in things} - expected.keys()


def test_a_bucket_of_all_roles_is_cleaned_and_goes_on_after_a_kill(rgw, bucket, request):
    spec = make_spec("rgw", request)
    fill_bucket(lambda: open_store(spec), 900, seed=1)
    came = clean_with_kills(
        spec, list_by_boto3(rgw.make_client(rgw.full), bucket, "below/here/"), kills=1, seed=1
    )
    assert came.objects > 700
    assert 300 < came.planned < came.objects
    assert came.killed == 1
    assert came.wrong == 0, came


def test_what_a_member_writes_below_its_lease_stops_no_cleaning(tmp_path):
    """It may be a lease for an hour; then it is none, whatever it says."""
    place = folder_place(tmp_path)
    part = f"c/model/checkpoints/step_000000001/parts/{'a' * 64}.safetensors"
    lease = tmp_path / "c/model/lease/members/w1/000005.json"
    put(place.store, part, b"x")
    put(place.store, "c/run/w1/gradient-000000001-w1-v1.safetensors", b"x")
    put(place.store, "c/model/lease/members/w1/000005.json", b"junk")
    put(place.store, "c/model/lease/members/w1/0000007.json", b"junk")
    kinds = (CleanupKind.CHECKPOINTS, CleanupKind.CHECKPOINT_ORPHANS, CleanupKind.GRADIENTS)
    rules = (Rule(kinds=kinds, older_than=NOW),)
    given = CleanupSettings(store=place.store.spec, rules=rules)
    assert make_plan(given).totals.objects == {0: 1}  # the gradient
    long_ago = (datetime.now(UTC) - timedelta(hours=200)).timestamp()
    for path in (lease, tmp_path / part):
        os.utime(path, (long_ago, long_ago))
    assert make_plan(given).totals.objects == {0: 2}


def test_nothing_is_deleted_through_a_link(tmp_path):
    """A local user who writes into a folder can make a link to anywhere."""
    place, elsewhere = folder_place(tmp_path / "store"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("mine")
    for uid in ("w1", "w2"):
        put(place.store, f"run/{uid}/gradient-000000001-{uid}-v1.safetensors", b"x")
    (tmp_path / "store/run/w1/out").symlink_to(elsewhere)
    (tmp_path / "store/run/w1/beside").symlink_to(tmp_path / "store/run/w2")
    rules = (Rule(kinds=(CleanupKind.JUNK,), older_than=NOW),)
    given = CleanupSettings(store=place.store.spec, rules=rules)
    plan = make_plan(given)
    assert not plan.totals.objects
    keys = ["run/w1/out/thesis.txt", f"run/w1/beside/{place_of_gradient('w2')}"]
    assert [failure.key for failure in delete(place.store, keys)] == keys
    for key in keys:
        with pytest.raises(errors.ConfigurationError, match="through a link"):
            delete_one(place.store, key)
    assert (elsewhere / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "store/run/w2" / place_of_gradient("w2")).exists()


def place_of_gradient(uid: str) -> str:
    return f"gradient-000000001-{uid}-v1.safetensors"


def test_deep_keys_of_a_worker_cost_a_cleaning_few_listings(tmp_path, monkeypatch):
    place = folder_place(tmp_path)
    put(place.store, f"run/w1/{place_of_gradient('w1')}", b"x")
    for number in range(20):
        put(place.store, f"run/w1/{number}/{'x/' * 400}w9/{place_of_gradient('w9')}", b"")
        put(place.store, f"run/w1/y/{number}/{'x/' * 5}w9/{place_of_gradient('w9')}", b"")
    listed: list[str] = []

    def count(store: Store, prefix: str, **options: Any) -> Iterator[Stat]:
        listed.append(prefix)
        return list_fairly(store, prefix, **options)

    monkeypatch.setattr("millrace.lease.list_fairly", count)
    rules = (Rule(kinds=(CleanupKind.GRADIENTS,), older_than=NOW),)
    plan = make_plan(CleanupSettings(store=place.store.spec, rules=rules))
    assert plan.totals.objects == {0: 21}
    assert len(listed) < 200


def test_a_worker_keeps_no_dataset_by_a_campaign_of_its_own_making(tmp_path):
    store = folder_place(tmp_path).store
    clock = StoreClock.read(store, "c", Holder.describe_this_process())
    put(store, f"c/run/worker-1/{place_of_gradient('worker-1')}", b"x")
    for campaign in ("c/run/worker-1/x", "d"):
        put(store, f"{campaign}/campaign/training.json", b'{"record": {"dataset": "words"}}')
        lease = LeaseKeys(f"{campaign}/model", "members/z")
        acquire(store, lease, Holder.describe_this_process(), timedelta(hours=1), clock)
    policy = ProtectionPolicy([store], (), VerifyDepth.SIZES, clock)
    reason = policy.describe_training_campaign("words")
    assert reason.startswith("the campaign d trains on it")
