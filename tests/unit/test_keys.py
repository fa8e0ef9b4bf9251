import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import errors
from millrace.keys import (
    CampaignKeys,
    ChainKeys,
    CheckpointKeys,
    ClassifiedKey,
    CooldownKeys,
    DatasetKeys,
    GradientKeys,
    LeaseKeys,
    MachineKeys,
    ObjectKind,
    RentalKeys,
    ShardName,
    WorkerPrefixes,
    check_name,
    classify_key,
    make_partition_name,
    parse_lease,
    parse_rental,
)

PARTITIONS = st.builds(
    make_partition_name, st.sampled_from(["train", "val"]), st.integers(0, 200_000)
)


@given(PARTITIONS, st.integers(0, 2_000_000))
def test_what_is_built_is_parsed_back(partition, number):
    keys, name = DatasetKeys("data/set"), ShardName(partition, number)
    assert ShardName.parse(str(name)) == name
    assert keys.parse_commit(keys.commit(name)) == name
    assert keys.parse_end(keys.end(partition)) == partition
    assert keys.parse_end(keys.commit(name)) is None
    assert keys.parse_commit(keys.end(partition)) is None


@given(st.lists(st.integers(0, 99_999), min_size=2, max_size=5))
def test_a_listing_is_in_the_order_of_the_numbers(numbers):
    keys = DatasetKeys("d")
    named = {keys.commit(ShardName(make_partition_name("train", 0), n)): n for n in numbers}
    assert [named[key] for key in sorted(named)] == sorted(set(numbers))


@pytest.mark.parametrize("key", ["", "d/commits/x.json", "d/commits/train-1-1.json", "e/plan.json"])
def test_what_is_not_ours_is_not_parsed(key):
    assert DatasetKeys("d").parse_commit(key) is None
    assert DatasetKeys("d").parse_end(key) is None


@pytest.mark.parametrize("name", ["", "../up", "a//b", "a b", ".hidden", "a/../b", "x" * 201, "ä"])
def test_a_name_that_some_store_would_change_is_refused(name):
    with pytest.raises(errors.ConfigurationError, match="letters, digits"):
        check_name(name, what="The dataset's name")


def test_a_leases_keys_are_parsed_back():
    keys = LeaseKeys("run", "train-00001")
    assert keys.parse(keys.epoch(3)) == (3, "json")
    assert keys.parse(keys.beat(3)) == (3, "beat")
    assert keys.parse(keys.end(3)) == (3, "end")
    assert keys.parse(LeaseKeys("run", "train-00002").epoch(3)) is None


WORDS = [
    "", ".", "..", " ", "a", "run", ".hidden", "ä", "\x00", "\n", "a b", "x" * 250, "٣٣٣٣٣٣",
    "_machines", "_rentals", "_cleaning", "lease", "clock", "attempts", "gathers", "chain",
    "windows", "epochs", "cooldowns", "claims", "ended", "checkpoints", "members", "commits",
    "partitions", "shards", "quarantine", "000000", "000000001", "0" * 600, "step_000000001",
    "step_٣٣٣٣٣٣٣٣٣", "000000.json", "000001-intent.json", "000000001.json", "plan.json",
    "train-00000-000000.tar", "gradient-000000001-a-v1.safetensors", "owner", "1",
    f"000000001-{'a' * 64}.npz",
]  # fmt: skip
OURS = [
    MachineKeys(RentalKeys("a").machine(0)).heartbeat, RentalKeys("a").intent(0),
    LeaseKeys("a", "owner").epoch(0), CheckpointKeys("a").metadata(1), CooldownKeys("a", 0).roster,
    CooldownKeys("a", 0).vote("b"), CooldownKeys("a", 0).part("b", "a" * 64),
    GradientKeys("a", "1").gradient("b", 1), ChainKeys("a", "1").link(1), DatasetKeys("a").manifest,
]  # fmt: skip


@st.composite
def keys(draw: st.DrawFn) -> str:
    """A key of ours in which folders were replaced, added and left out."""
    parts = draw(st.sampled_from(OURS)).split("/")
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(parts)))
        parts[start : start + draw(st.integers(0, 1))] = [draw(st.sampled_from(WORDS))]
    return "/".join(parts)


@settings(max_examples=2000)
@given(keys())
def test_no_key_that_anybody_may_write_fails_a_parser(key):
    parsers = [
        classify_key, parse_rental, ShardName.parse, DatasetKeys("a").parse_commit,
        DatasetKeys("a").parse_end, LeaseKeys("a", "owner").parse, CheckpointKeys("a").parse_folder,
        CheckpointKeys("a").parse_part, GradientKeys("a", "1").parse,
        GradientKeys("a", "1").parse_start_window,
        CheckpointKeys("a").parse_epoch, lambda key: CooldownKeys("a", 0).parse_part("b", key),
        RentalKeys("a").parse, lambda key: parse_lease("a", key),
    ]  # fmt: skip
    for parse in parsers:
        parse(key)
    what = classify_key(key)
    if what is not None and what.version:
        assert ChainKeys(what.scope, what.version).job == what.lease_scope


def test_what_a_member_uploads_for_its_owner_is_used_once_and_its_votes_stay():
    keys = CooldownKeys("c/model", 3)
    for key in (keys.vote("m"), keys.late("m"), keys.result("m")):
        assert classify_key(key) == ClassifiedKey(ObjectKind.RECORD, "c/model", worker="m")
    for key in (keys.draft("m"), keys.part("m", "a" * 64)):
        assert classify_key(key) == ClassifiedKey(ObjectKind.TEMPORARY, "c/model", worker="m")


def test_what_a_worker_writes_below_its_own_prefix_beside_our_names_is_its_junk():
    keys, cooldown = GradientKeys("runs/one", "1"), CooldownKeys("jobs/a", 3)
    workers = WorkerPrefixes()
    proofs = [keys.gradient("w1", 3), cooldown.vote("m"), CampaignKeys("team/c").plan]
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
        LeaseKeys("team/c/model", "members/worker-7").epoch(0),
        CooldownKeys("team/c/model", 0).part("worker-7", "a" * 64),
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
        "c/run/worker-1/c/campaign/plan.json",
        "c/campaign/plan.json",
    ):
        workers.learn(key)
    for rest in ("c/run/worker-2/x", "c/model/members/worker-3/x"):
        found = classify_key(f"c/run/worker-1/{rest}", workers)
        assert found == ClassifiedKey(ObjectKind.JUNK, "c/run", worker="worker-1")


def test_a_number_in_digits_of_another_script_is_none_of_ours():
    assert CheckpointKeys("a").parse_folder("step_٣٣٣٣٣٣٣٣٣") is None
    assert classify_key("a/checkpoints/step_٣٣٣٣٣٣٣٣٣/metadata.json") is None


def test_a_key_deeper_than_any_name_of_ours_is_none():
    """Each folder above an object may have leases, and looking at them costs a request."""
    for rest in (
        "w9/gradient-000000001-w9-v1.safetensors",
        "checkpoints/step_000000001/metadata.json",
        "plan.json",
        "lease/x/000000.json",
        "members/w9/cooldowns/000000/vote.json",
    ):
        assert classify_key(f"run/w1/{'x/' * 14}{rest}") is not None
        assert classify_key(f"run/w1/{'x/' * 15}{rest}") is None
    assert check_name("/".join("x" * 16), what="The name") == "/".join("x" * 16)
    with pytest.raises(errors.ConfigurationError, match="16 folders"):
        check_name("/".join("x" * 17), what="The name")


@pytest.mark.parametrize("number", ["0000003", "00000000003", "3"])
def test_a_number_with_other_zeros_than_ours_is_no_epoch(number):
    assert LeaseKeys("job", "members/a").parse(f"job/lease/members/a/{number}.json") is None


def test_a_lease_below_a_members_own_is_not_another_members():
    assert parse_lease("job", "job/lease/members/a/b/000000.json") is None
    assert parse_lease("job", "job/lease/members/a/b/c/000000.json") is None


@pytest.mark.parametrize("name", ["members/a//", "members/../a/", "members/./a/", "members/a\n/"])
def test_a_key_that_no_store_reads_is_no_lease(name):
    assert parse_lease("job", f"job/lease/{name}000000.json") is None
    assert parse_lease("job", "job/lease/members/a/000000.json") == LeaseKeys("job", "members/a")
