"""`millrace bucket clean URL`: objects that Millrace did not write, in one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millrace.cli import main
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
