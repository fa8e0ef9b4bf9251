"""Usage of a store, compared with sums that are computed here."""

import json
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from millrace.cleanup import ObjectFilter, limit_groups, measure_usage, usage
from millrace.cli import main
from millrace.storage import open_store, put
from tests.support.cleanup.material import BucketBuilder

NOW = datetime.now(UTC)
AGES = {
    "under 1 day": 12, "1 to 7 days": 48, "7 to 30 days": 240, "30 to 90 days": 1_000,
    "over 90 days": 10_000,
}  # fmt: skip


@pytest.fixture
def bucket(tmp_path: Path) -> BucketBuilder:
    return BucketBuilder(open_store((tmp_path / "bucket").as_uri()))


def test_objects_are_counted_by_kind_folder_and_age(bucket: BucketBuilder) -> None:
    dice = random.Random(3)
    wanted = {name: Counter[str]() for name in ("objects", "sizes", "folders", "ages")}
    for number in range(200):
        age, size = dice.choice(list(AGES)), dice.randrange(1, 1_000)
        folder, group = dice.choice([("", "."), ("a/", "a/"), ("a/b/", "a/b/"), ("c/d/e/", "c/d/")])
        bucket.put(f"{folder}{number:04d}.bin", bytes(size), hours=AGES[age])
        wanted["folders"][group] += size
        wanted["ages"][age] += size
        wanted["sizes"]["other"] += size
        wanted["objects"]["other"] += 1
    key = bucket.put_gradient("runs/one", "worker-1", 3, "1")
    gradient = (Path(bucket.store.location.bucket) / key).stat().st_size
    wanted["folders"]["runs/one/"] += gradient
    wanted["ages"]["under 1 day"] += gradient
    wanted["sizes"]["gradient"] += gradient
    wanted["objects"]["gradient"] += 1

    found = measure_usage(bucket.store, depth=2, now=NOW)
    assert {one.name: one.size for one in found.folders} == wanted["folders"]
    assert {one.name: one.size for one in found.ages} == wanted["ages"]
    assert {one.name: one.size for one in found.kinds} == wanted["sizes"]
    assert {one.name: one.objects for one in found.kinds} == wanted["objects"]
    assert (found.total.objects, found.total.size) == (201, sum(wanted["sizes"].values()))
    assert [one.size for one in found.folders] == sorted(wanted["folders"].values(), reverse=True)


@pytest.mark.parametrize(
    ("objects", "keys"),
    [
        (ObjectFilter(), {"a/1.pt", "a/2.txt", "b/3.pt"}),
        (ObjectFilter(prefix="a/"), {"a/1.pt", "a/2.txt"}),
        (ObjectFilter(suffix=".pt"), {"a/1.pt", "b/3.pt"}),
        (ObjectFilter(pattern="*[12].*"), {"a/1.pt", "a/2.txt"}),
        (ObjectFilter(exclude=("*/1.*", "b*")), {"a/2.txt"}),
        (ObjectFilter(older_than=timedelta(hours=24)), {"a/2.txt", "b/3.pt"}),
        (ObjectFilter(newer_than=timedelta(hours=40)), {"a/1.pt", "a/2.txt"}),
        (ObjectFilter(prefix="a/", suffix=".pt", older_than=timedelta(hours=24)), set[str]()),
    ],
)
def test_objects_meet_all_conditions(
    bucket: BucketBuilder, objects: ObjectFilter, keys: set[str]
) -> None:
    for hours, key in ((1, "a/1.pt"), (30, "a/2.txt"), (60, "b/3.pt")):
        bucket.put(key, hours=hours)
    assert {stat.key for stat in objects.iterate_objects(bucket.store, NOW)} == keys
    assert measure_usage(bucket.store, objects, now=NOW).total.objects == len(keys)


def test_many_folders_take_bounded_memory(
    bucket: BucketBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_MAX_FOLDERS", 3)
    for number in range(9):
        bucket.put(f"{number}/x")
    found = measure_usage(bucket.store).folders
    assert sorted(one.objects for one in found) == [1, 1, 1, 6]
    first, rest = limit_groups(found, 1)
    assert (first.objects, rest.name, rest.objects) == (6, "3 more", 3)


def test_the_commands_print_tables_and_json(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    put(store, "runs/a\u202e.pt", b"12345")
    put(store, "b.txt", b"12")
    shown = CliRunner().invoke(main, ["bucket", "usage", str(tmp_path), "--price", "1e9"])
    assert shown.exit_code == 0
    assert "2 objects, 7 bytes, $7.00 a month at $1e+09 a GB." in shown.output
    assert "71%" in shown.output
    shown = CliRunner().invoke(main, ["bucket", "list", str(tmp_path), "--suffix", ".pt"])
    assert "runs/a\ufffd.pt" in shown.output
    assert "1 object, 5 bytes." in shown.output
    shown = CliRunner().invoke(main, ["bucket", "list", str(tmp_path), "--limit", "1", "--json"])
    (one,) = json.loads(shown.stdout)
    assert one.keys() == {"key", "size", "last_write"}


@pytest.mark.parametrize(
    "words",
    [
        ["list", "--match", ""],
        ["usage", "--exclude", ""],
        ["copy", "memory://other", "--match", ""],
        ["clean", "--older-than", "1d", "--match", ""],
    ],
)
def test_an_empty_pattern_is_refused_by_every_command(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["bucket", words[0], "memory://bucket", *words[1:]])
    assert (done.exit_code, "A pattern of keys is empty" in done.output) == (2, True)
