"""`millrace bucket clean URL`: objects that Millrace did not write, in one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millrace.cli import main
from millrace.keys.kinds import classify_key
from millrace.keys.rentals import INSTALLATION, RentalKeys
from millrace.storage import list_objects, open_store
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
