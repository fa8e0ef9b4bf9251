"""`millrace bucket clean URL`: objects that Millrace did not write, in one line."""

import json
import secrets
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millrace.cleanup import CleanupKind, CleanupSettings, Rule, make_plan
from millrace.cleanup.protection import find_path
from millrace.cli import main
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.kinds import classify_key
from millrace.keys.rentals import INSTALLATION, RentalKeys
from millrace.storage import Location, list_objects, open_store, put
from tests.support.cleanup.material import BucketBuilder


@pytest.fixture
def bucket(tmp_path: Path) -> BucketBuilder:
    """A bucket with old and new objects of others, and an old gradient."""
    bucket = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    for key in ("logs/a.txt", "logs/b.bin", "models/a.txt"):
        bucket.put(key, hours=60)
    bucket.put("logs/new.txt")
    bucket.put_gradient("runs/one", "worker-1", 1, "1", 60)
    return bucket


def clean(bucket: BucketBuilder, *options: str, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["bucket", "clean", bucket.store.url, *options])
    assert done.exit_code == code, done.output
    return done


def list_keys(bucket: BucketBuilder) -> set[str]:
    return {one.key for one in list_objects(bucket.store) if not one.key.startswith("_clean/")}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ([], {"logs/a.txt", "logs/b.bin", "models/a.txt"}),
        (["--prefix", "logs/"], {"logs/a.txt", "logs/b.bin"}),
        (["--suffix", ".txt"], {"logs/a.txt", "models/a.txt"}),
        (["--match", "*/a.*"], {"logs/a.txt", "models/a.txt"}),
        (["--prefix", "logs/", "--match", "*.txt"], {"logs/a.txt"}),
    ],
)
def test_old_objects_of_others_are_deleted(
    bucket: BucketBuilder, options: list[str], gone: set[str]
) -> None:
    before = list_keys(bucket)
    clean(bucket, "--older-than", "48h", *options, "--dry-run")
    assert list_keys(bucket) == before
    shown = clean(bucket, "--older-than", "48h", *options, "--yes", "--json")
    assert json.loads(shown.stdout)["deleted_objects"] == len(gone)
    assert list_keys(bucket) == before - gone


def test_the_objects_of_a_store_below_are_no_objects_of_others(bucket: BucketBuilder) -> None:
    """The ledger of machines that are still billed is one of them."""
    root = bucket.store.url
    rental = RentalKeys("fleet")
    for prefix in ("team/a", "_stores/my data", "checkpoints", "words/transforms"):
        inner = BucketBuilder(open_store(f"{root}/{prefix}"))
        for key in (
            rental.make_intent_key(0),
            rental.make_contract_key(0),
            rental.make_detached_key(0),
            f"{rental.make_machine_prefix(0)}files.json",
            INSTALLATION,
        ):
            inner.put(key, hours=60)
        inner.put_dataset("words", 1, hours=60)
        inner.put_checkpoint("job", 1, [b"weights"], hours=60)
        inner.put_chain("run", "1", 1, {}, hours=60)
    inner = BucketBuilder(open_store(f"{root}/{'long/' * 12}"))
    inner.put_dataset("/".join(["name"] * 12), 1, hours=60)
    before = list_keys(bucket)
    shown = clean(bucket, "--older-than", "48h", "--yes")
    assert "stay: it belongs to a store of Millrace below this one" in shown.output
    assert list_keys(bucket) == before - {"logs/a.txt", "logs/b.bin", "models/a.txt"}


def test_a_plan_of_an_earlier_release_deletes_no_ledger_of_a_store_below(
    bucket: BucketBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bucket.put(f"team/a/{RentalKeys('fleet').make_intent_key(0)}", hours=60)
    with monkeypatch.context() as earlier:
        earlier.setattr("millrace.cleanup.planner.classify_nested_key", classify_key)
        shown = clean(bucket, "--older-than", "48h", "--dry-run", "--json")
    assert json.loads(shown.stdout)["objects"] == 4
    done = clean(bucket, "--plan", json.loads(shown.stdout)["plan"], "--yes", "--json")
    assert json.loads(done.stdout)["deleted_objects"] == 3
    assert ledger in list_keys(bucket)


def fill(root: str, hours: float = 60) -> None:
    """Write old objects of each owner: of a job, a dataset, a run, a campaign and a rental."""
    bucket, rental = BucketBuilder(open_store(root)), RentalKeys("fleet")
    bucket.put_checkpoint("my-job", 1, [b"weights"], hours=hours)
    bucket.put_pin("my-job", 1)
    bucket.put_epoch("my-job", 0, 1)
    bucket.put_lease("my-job", "members/a", ended=True)
    bucket.put_dataset("words", 1, hours=hours)
    bucket.put_lease("words", "runs/x", ended=True)
    bucket.put("words/quarantine/train-00000-000000.jsonl")
    bucket.put_chain("run", "1", 1, {1: hours}, hours=hours)
    bucket.put(f"run/gathers/1/000000000-{'a' * 64}.npz")  # of an early version
    bucket.put_gradient("run", "worker-1", 1, "1")
    bucket.put(CampaignKeys("small").committed_training)
    bucket.put_gradient(CampaignKeys("small").run, "worker-1", 1, "1")
    for key in (rental.make_intent_key(0), rental.owner, INSTALLATION):
        bucket.put(key)
    bucket.put(f"{rental.make_machine_prefix(0)}files.json")
    for stat in list_objects(bucket.store):
        bucket.set_age(stat.key, hours)


FOLDERS = (
    "my-job", "my-job/checkpoints", "my-job/checkpoints/step_000000001", "my-job/epochs",
    "my-job/lease/members", "words", "words/shards/webdataset", "words/quarantine", "run",
    "run/worker-1", "run/gathers", "run/gathers/1/chain", "small", "small/run", "_rentals",
    "_rentals/fleet/attempts", "_machines", "_machines/fleet/000000",
)  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "team/a/", "my data/.x/", "d/" * 20, "checkpoints/"])
def test_a_url_that_is_a_folder_of_another_store_loses_no_object_of_it(
    tmp_path: Path, prefix: str
) -> None:
    root = (tmp_path / prefix).as_uri()
    fill(root)
    other = BucketBuilder(open_store(root))
    for folder in FOLDERS:
        inner = BucketBuilder(open_store(f"{root}/{folder}"))
        others = {inner.put("mine/notes.txt", hours=60), inner.put("notes-1.bin", hours=60)}
        inside = set[str]()
        # Below these folders, each object is one of a checkpoint or of a machine.
        if folder.endswith(("step_000000001", "_machines/fleet/000000")):
            inside, others = others, set[str]()
        before = list_keys(inner)
        shown = clean(inner, "--older-than", "48h", "--yes")
        assert list_keys(inner) == before - others, folder
        assert "stay: it belongs to a store of Millrace above this one" in shown.output
        for key in inside:
            (Path(inner.store.location.bucket) / key).unlink()
    assert list_keys(other)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("s3://bucket", ""),
        ("s3://bucket/my-job", "my-job/"),
        ("s3://bucket/team/a/my-job", "team/a/my-job/"),
        ("gs://bucket/my%20data/my-job/", "my data/my-job/"),
        (f"s3://bucket/x/{'d/' * 15}my-job", f"{'d/' * 15}my-job/"),
        ("file:///", ""),
        ("file:///no-such-folder/my-job", "no-such-folder/my-job/"),
        ("memory://bucket", ""),
    ],
)
def test_the_path_of_a_url_has_its_last_folders(url: str, path: str) -> None:
    store = replace(open_store("memory://any"), location=Location.parse(url))
    assert find_path(store) == path


def test_objects_at_the_root_of_a_bucket_have_no_folder_in_front() -> None:
    """The bucket is no job, so Millrace has not written them."""
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for key in ("checkpoints/step_000000001/metadata.json", "plan.json", "README.md"):
        put(store, key, b"x")
    rule = Rule(kinds=(CleanupKind.OTHER,), older_than=timedelta(0), match="*")
    assert make_plan(CleanupSettings(store=store.spec, rules=(rule,))).objects == 3


def test_a_plan_of_an_earlier_release_deletes_no_object_of_a_store_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path.as_uri())
    job = BucketBuilder(open_store(f"{tmp_path.as_uri()}/my-job"))
    there = list_keys(job)
    foreign = job.put("notes.bin", hours=60)
    with monkeypatch.context() as earlier:
        earlier.setattr("millrace.cleanup.planner.find_path", lambda _: "")
        shown = clean(job, "--older-than", "48h", "--dry-run", "--json")
    plan = json.loads(shown.stdout)
    assert plan["objects"] == len(there) + 1
    done = clean(job, "--plan", plan["plan"], "--yes", "--json")
    assert json.loads(done.stdout)["deleted_objects"] == 1
    assert list_keys(job) == there
    assert foreign not in there


def test_an_earlier_plan_is_executed_without_its_options(bucket: BucketBuilder) -> None:
    shown = clean(bucket, "--older-than", "0s", "--suffix", ".bin", "--dry-run", "--json")
    plan = json.loads(shown.stdout)["plan"]
    before = list_keys(bucket)
    clean(bucket, "--plan", plan, "--yes")
    assert list_keys(bucket) == before - {"logs/b.bin"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Give the least age"),
        (["--plan", "x", "--suffix", ".bin"], "A plan has its objects"),
    ],
)
def test_wrong_options_are_sentences(bucket: BucketBuilder, options: list[str], said: str) -> None:
    before = list_keys(bucket)
    assert said in clean(bucket, *options, code=2).output
    assert list_keys(bucket) == before


def test_options_of_a_url_are_refused_for_a_settings_file(tmp_path: Path) -> None:
    words = ["bucket", "clean", str(tmp_path / "clean.yaml"), "--prefix", "x"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "write them as rules" in done.output
