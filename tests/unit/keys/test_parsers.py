import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigurationError
from millrace.keys.checkpoints import CheckpointKeys, find_block_list_key
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.keys.kinds import ObjectKind, classify_key, classify_nested_key
from millrace.keys.leases import LeaseKeys, parse_lease
from millrace.keys.rentals import MachineKeys, RentalKeys, parse_attempt, parse_price_number
from tests.support.examples import scale_examples

WORDS = [
    "", ".", "..", " ", "a", "run", ".hidden", "ä", "\x00", "\n", "a b", "x" * 250, "٣٣٣٣٣٣",
    "_machines", "_rentals", "_cleaning", "lease", "clock", "attempts", "gathers", "chain",
    "windows", "epochs", "cooldowns", "claims", "ended", "checkpoints", "members", "commits",
    "partitions", "shards", "quarantine", "000000", "000000001", "0" * 600, "step_000000001",
    "step_٣٣٣٣٣٣٣٣٣", "000000.json", "000001-intent.json", "000000001.json", "plan.json",
    "block_digests.bin", "card.json", "README.md",
    "train-00000-000000.tar", "gradient-000000001-a-v1.safetensors", "owner", "1",
    f"000000001-{'a' * 64}.npz", f"000000001-{'a' * 64}.safetensors",
]  # fmt: skip
OURS = [
    MachineKeys(RentalKeys("a").make_machine_prefix(0)).heartbeat,
    RentalKeys("a").make_intent_key(0), RentalKeys("a").make_raised_key(0, 1),
    LeaseKeys("a", "owner").make_term_key(0), CheckpointKeys("a").make_metadata_key(1),
    CooldownKeys("a", 0).roster,
    CooldownKeys("a", 0).make_vote_key("b"), CooldownKeys("a", 0).make_part_key("b",
    "blake3:" + "a" * 64),
    GradientKeys("a", "1").make_gradient_key("b", 1), ChainKeys("a", "1").make_link_key(1),
    ChainKeys("a", "1").make_update_key(1, "blake3:" + "a" * 64), DatasetKeys("a").manifest,
]  # fmt: skip


@st.composite
def keys(draw: st.DrawFn) -> str:
    """A key of ours in which folders were replaced, added and left out."""
    parts = draw(st.sampled_from(OURS)).split("/")
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(parts)))
        parts[start : start + draw(st.integers(0, 1))] = [draw(st.sampled_from(WORDS))]
    return "/".join(parts)


def parse_by_all(key: str) -> None:
    """Call every parser with a key."""
    parsers = [
        classify_key, classify_nested_key, parse_attempt, CommitName.parse,
        DatasetKeys("a").parse_commit,
        DatasetKeys("a").parse_end, LeaseKeys("a", "owner").parse, CheckpointKeys("a").parse_folder,
        CheckpointKeys("a").parse_part, CheckpointKeys("a").is_block_list, find_block_list_key,
        GradientKeys("a", "1").parse,
        GradientKeys("a", "1").parse_start_window, GradientKeys("a", "1").parse_registration,
        CheckpointKeys("a").parse_epoch, lambda key: CooldownKeys("a", 0).parse_part("b", key),
        RentalKeys("a").parse, lambda key: parse_lease("a", key),
    ]  # fmt: skip
    for parse in parsers:
        parse(key)


@pytest.mark.parametrize("key", OURS)
def test_a_number_of_thousands_of_digits_fails_no_parser(key):
    """The endpoint of a worker may list any text."""
    parse_by_all(re.sub(r"[0-9]{2,}", "1" * 5000, key))


@settings(max_examples=scale_examples(2000))
@given(keys())
@example(f"gathers/lease/_machines/a/000000/000000001-{'a' * 64}.npz")
def test_no_key_that_anybody_may_write_fails_a_parser(key):
    parse_by_all(key)
    what = classify_key(key)
    if what is not None and what.is_of_templar:
        assert what.lease_scope == ""
    elif what is not None and what.version:
        assert ChainKeys(what.scope, what.version).job == what.lease_scope


def test_each_record_of_an_attempt_is_a_record_of_its_rental():
    rental = RentalKeys("a/b")
    keys = {
        "intent": rental.make_intent_key(7),
        "contract": rental.make_contract_key(7),
        "raised-000012": rental.make_raised_key(7, 12),
        "detached": rental.make_detached_key(7),
        "released": rental.make_released_key(7),
    }
    for kind, key in keys.items():
        assert parse_attempt(key) == (rental, 7, kind)
        classified = classify_key(key)
        assert classified is not None
        assert (classified.kind, classified.scope) == (ObjectKind.RECORD, "_rentals/a/b")
    assert parse_price_number("raised-000012") == 12
    assert parse_price_number("released") is None
    assert parse_attempt(rental.make_raised_key(7, 12).replace("raised-000012", "raised")) is None


def test_a_rental_cannot_be_named_as_the_records_of_another():
    with pytest.raises(ConfigurationError, match="attempts"):
        RentalKeys("fleet/attempts/b")
