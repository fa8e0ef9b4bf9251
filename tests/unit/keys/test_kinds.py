import re

import pytest

from millrace.digest import compute_digest
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.gradients import GradientKeys
from millrace.keys.kinds import (
    ClassifiedKey,
    ObjectKind,
    WorkerPrefixes,
    classify_key,
    classify_nested_key,
)
from millrace.keys.leases import LeaseKeys
from millrace.testing.process import REPOSITORY

_NAMES = re.findall(
    r"^\| `([^`]+[^`/])`", (REPOSITORY / "docs/reference/object-names.md").read_text(), re.MULTILINE
)
_VALUES = {
    "partition": "train-00000", "number": "000000", "step": "000000001", "window": "000000001",
    "epoch": "000000", "term": "000000", "version": "1", "digest": "a" * 64, "root": "b" * 64,
    "nonce": "0123456789abcdef", "holder": "0123456789abcdef", "operation": "read",
    "digits": "c" * 16, "plan": "20260101T000000-01234567", "piece": "000000",
    "price_number": "000000", "registration": "000000001", "plain_window": "41", "plain_uid": "7",
    "file": "00003", "cursor": "0" * 19,
}  # fmt: skip
"""Values in names; all others are a word."""


@pytest.mark.parametrize("name", _NAMES)
def test_every_name_of_the_reference_has_a_kind(name: str) -> None:
    """A rule of cleaning for objects that Millrace did not write takes those without a kind."""
    key = re.sub(r"\{(\w+)\}", lambda field: _VALUES.get(field[1], "some"), name)
    assert classify_key(key) is not None


@pytest.mark.parametrize(
    ("key", "kind", "version", "number"),
    [
        ("gradient-41-7-v0.2.80.pt", ObjectKind.GRADIENT, "0.2.80", 41),
        ("checkpoint-41-7-v2.1.28.pt", ObjectKind.TEMPLAR_CHECKPOINT, "2.1.28", 41),
        ("debug-41-7-v2.1.28.pt", ObjectKind.TEMPLAR_GATHER, "2.1.28", 41),
        ("aggregator-41-v2.1.28.pt", ObjectKind.TEMPLAR_GATHER, "2.1.28", 41),
        ("start_window_v0.2.80.json", ObjectKind.START_WINDOW, "0.2.80", -1),
        ("peers_41_v0.2.80.json", ObjectKind.TEMPLAR_GATHER, "0.2.80", 41),
        ("gathers/0.2.80/a/b.npz", ObjectKind.TEMPLAR_GATHER, "0.2.80", -1),
    ],
)
def test_templars_names_at_the_root_have_a_kind_and_no_scope(key, kind, version, number):
    found = classify_key(key)
    assert found == ClassifiedKey(kind, "", version, number)
    assert found.is_of_templar
    assert found.lease_scope == ""
    workers = WorkerPrefixes()
    workers.learn(key)
    assert classify_key("/7/x", workers) is None
    assert classify_key("7/x", workers) is None
    for other in (f"data/{key}", f"/{key}", key + "x", key.replace("41", "041"), key[1:]):
        if other != key:
            assert classify_key(other) is None


def test_what_a_member_uploads_for_its_owner_is_used_once_and_its_votes_stay():
    keys = CooldownKeys("c/model", 3)
    for key in (keys.make_vote_key("m"), keys.make_late_vote_key("m"), keys.make_result_key("m")):
        assert classify_key(key) == ClassifiedKey(ObjectKind.RECORD, "c/model", worker="m")
    for key in (keys.make_draft_key("m"), keys.make_part_key("m", compute_digest(b"a"))):
        assert classify_key(key) == ClassifiedKey(ObjectKind.TEMPORARY, "c/model", worker="m")


def test_what_a_worker_writes_below_its_own_prefix_beside_our_names_is_its_junk():
    keys, cooldown = GradientKeys("runs/one", "1"), CooldownKeys("jobs/a", 3)
    workers = WorkerPrefixes()
    proofs = [
        keys.make_gradient_key("w1", 3),
        cooldown.make_vote_key("m"),
        CampaignKeys("team/c").committed_training,
    ]
    for key in proofs:
        workers.learn(key)
    mine = ClassifiedKey(ObjectKind.JUNK, "runs/one", worker="w1")
    for rest in (
        "x",
        "a/b",
        "/x",
        "a//b",
        "../../x",
        "\x1b[2J",
        "x" * 900,
        "gathers/1/x",
        "y/gradient-000000003-w1-v1.pth",
        "gradient-000000003-w2-v1.safetensors",
    ):
        assert classify_key(f"runs/one/w1/{rest}", workers) == mine
    for prefix in ("jobs/a/members/m/", "jobs/a/lease/members/m/"):
        assert classify_key(f"{prefix}x", workers) == ClassifiedKey(
            ObjectKind.JUNK, "jobs/a", worker="m"
        )
    for prefix in CampaignKeys("team/c").list_write_prefixes(7):
        scope = "team/c/run" if "/run/" in prefix else "team/c/model"
        assert classify_key(f"{prefix}x", workers) == ClassifiedKey(
            ObjectKind.JUNK, scope, worker="worker-7"
        )
    for key in [
        *proofs[:2],
        LeaseKeys("team/c/model", "members/worker-7").make_term_key(0),
        CooldownKeys("team/c/model", 0).make_part_key("worker-7", "a" * 64),
        CampaignKeys("team/c").list_write_prefixes(7)[0] + "_probe-0123456789abcdef",
    ]:
        assert classify_key(key, workers) == classify_key(key)
        assert classify_key(key) is not None
    for key in (
        "runs/one/w2/x",
        "runs/one/w1",
        "runs/one/x",
        "runs/w1/x",
        "w1/x",
        "/runs/one/w1/x",
        "jobs/a/members/n/x",
        "team/c/run/worker-x/x",
        "team/c/run/x",
        "team/c/notes.txt",
        "team/c/campaign/notes.txt",
        "team/d/run/worker-7/x",
    ):
        assert classify_key(key, workers) is None


def test_a_worker_cannot_put_its_junk_down_to_another():
    workers = WorkerPrefixes()
    for key in (
        "c/run/worker-1/c/run/worker-2/gradient-000000000-worker-2-v1.safetensors",
        "c/run/worker-1/c/campaign/training.json",
        "c/campaign/training.json",
    ):
        workers.learn(key)
    for rest in ("c/run/worker-2/x", "c/model/members/worker-3/x"):
        found = classify_key(f"c/run/worker-1/{rest}", workers)
        assert found == ClassifiedKey(ObjectKind.JUNK, "c/run", worker="worker-1")


@pytest.mark.parametrize(
    ("prefix", "key", "kind", "scope"),
    [
        ("team/a/", "_rentals/a/attempts/000000-intent.json", ObjectKind.RECORD, "_rentals/a"),
        ("team/a/", "_rentals/installation.json", ObjectKind.RECORD, ""),
        ("team/a/", "_machines/fleet/000000/files.json", ObjectKind.TEMPORARY, "_rentals/fleet"),
        ("team/a/", "_clean/20260101T000000-01234567/plan.jsonl", ObjectKind.TEMPORARY, ""),
        ("my data/", "words/plan.json", ObjectKind.DATASET, "words"),
        ("a//b/", "words/plan.json", ObjectKind.DATASET, "words"),
        ("words/transforms/", "words/plan.json", ObjectKind.DATASET, "words"),
        ("checkpoints/", "a/checkpoints/step_000000001/pin.json", ObjectKind.CHECKPOINT, "a"),
        ("a/" * 12, f"{'b/' * 12}plan.json", ObjectKind.DATASET, "/".join("b" * 12)),
        (f"{'a' * 150}/", f"{'b' * 150}/plan.json", ObjectKind.DATASET, "b" * 150),
    ],
)  # fmt: skip
def test_an_object_of_a_store_below_has_the_kind_that_it_has_there(prefix, key, kind, scope):
    assert classify_key(key).kind is kind
    assert classify_key(f"{prefix}{key}") is None
    found = classify_nested_key(f"{prefix}{key}")
    assert (found.kind, found.scope) == (kind, f"{prefix}{scope}" if scope else "")


@pytest.mark.parametrize(
    "key",
    [
        "team/a/notes.txt",
        "my data/notes.txt",
        "team/a/_rentals/notes.txt",
        "words/shards/notes.txt",
        "my data/gradient-41-7-v0.2.80.pt",  # Templar's objects are at the root of a bucket
        f"{'_/' * 400}words/plan.json",
    ],
)
def test_a_key_that_is_no_name_in_any_store_has_no_kind(key):
    assert classify_nested_key(key) is None


def test_a_number_in_digits_of_another_script_is_none_of_ours():
    assert CheckpointKeys("a").parse_folder("step_٣٣٣٣٣٣٣٣٣") is None
    assert classify_key("a/checkpoints/step_٣٣٣٣٣٣٣٣٣/metadata.json") is None


def test_a_key_deeper_than_any_name_of_ours_is_none():
    """Each folder above an object may have leases, and reading them costs a request."""
    for rest in (
        "w9/gradient-000000001-w9-v1.safetensors",
        "checkpoints/step_000000001/metadata.json",
        "plan.json",
        "lease/x/000000.json",
        "members/w9/cooldowns/000000/vote.json",
    ):
        assert classify_key(f"run/w1/{'x/' * 14}{rest}") is not None
        assert classify_key(f"run/w1/{'x/' * 15}{rest}") is None
