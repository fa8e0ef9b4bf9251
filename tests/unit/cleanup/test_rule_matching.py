"""The first rule that takes or keeps an object decides."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from millrace.cleanup import CleanupKind, Rule
from millrace.cleanup.protection import BucketSurvey
from millrace.cleanup.rule_matching import RuleMatcher
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.gradients import GradientKeys
from millrace.keys.kinds import ObjectKind, classify_key
from millrace.storage import Stat

NOW = datetime(2026, 1, 10, tzinfo=UTC)
DAY = timedelta(days=1)


def matcher_of(*rules: Rule) -> RuleMatcher:
    return RuleMatcher(rules, NOW, BucketSurvey())


def stat_of(key: str, age: timedelta = 10 * DAY) -> Stat:
    return Stat(key=key, size=1, last_modified=NOW - age, etag="")


def find_object_rule(matcher: RuleMatcher, stat: Stat) -> int | None:
    return matcher.find_object_rule(stat, classify_key(stat.key))


GRADIENT = GradientKeys("run", "1").make_gradient_key("worker", 8)


def test_the_first_rule_for_the_kind_that_fits_takes_an_object() -> None:
    young = Rule(kinds=(CleanupKind.GRADIENTS,), older_than=20 * DAY)
    other = Rule(kinds=(CleanupKind.OTHER,), older_than=DAY, prefix="notes")
    old = Rule(kinds=(CleanupKind.GRADIENTS,), older_than=DAY)
    matcher = matcher_of(young, other, old, old)
    assert find_object_rule(matcher, stat_of(GRADIENT)) == 2
    assert find_object_rule(matcher, stat_of("notes.txt")) == 1
    assert find_object_rule(matcher, stat_of(GRADIENT, age=timedelta(hours=1))) is None


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({"name": "run"}, 0),
        ({"name": "another"}, None),
        ({"version": "1"}, 0),
        ({"version": "2"}, None),
        ({"keep_every": 3}, 0),
        ({"keep_every": 4}, None),
        ({"prefix": GRADIENT[:5]}, 0),
        ({"prefix": "another/"}, None),
        ({"suffix": ".json"}, None),
    ],
)
def test_each_option_of_a_rule_limits_it(options: dict[str, object], index: int | None) -> None:
    rule = Rule.model_validate({"kinds": [CleanupKind.GRADIENTS], "older_than": DAY, **options})
    assert find_object_rule(matcher_of(rule), stat_of(GRADIENT)) == index


def test_a_checkpoint_is_kept_by_its_rank_and_its_step() -> None:
    rule = Rule(kinds=(CleanupKind.CHECKPOINTS,), older_than=DAY, keep_last=2, keep_every=10)
    matcher = matcher_of(rule)
    stat = stat_of(CheckpointKeys("job").make_metadata_key(5))
    assert matcher.find_step_rule("job", 1, 5, stat) is None
    assert matcher.find_step_rule("job", 2, 5, stat) == 0
    assert matcher.find_step_rule("job", 2, 20, stat) is None


def test_no_later_rule_takes_what_a_rule_keeps() -> None:
    survey = BucketSurvey()
    survey._newest = {(ObjectKind.GRADIENT, "run", "1"): [9, 8, 7]}
    kinds = (CleanupKind.GRADIENTS, CleanupKind.CHECKPOINTS)
    first = Rule(kinds=kinds, older_than=5 * DAY, keep_last=2, keep_every=3)
    matcher = RuleMatcher((first, Rule(kinds=kinds, older_than=DAY)), NOW, survey)
    keys = GradientKeys("run", "1")
    for age, index in {10 * DAY: 0, 3 * DAY: 1, timedelta(hours=1): None}.items():
        for number in (9, 8, 6, 3):  # a window to keep is kept at any age
            gradient = stat_of(keys.make_gradient_key("worker", number), age)
            assert find_object_rule(matcher, gradient) is None
        assert find_object_rule(matcher, stat_of(keys.make_gradient_key("w", 7), age)) == index
        metadata = stat_of(CheckpointKeys("job").make_metadata_key(7), age)
        assert matcher.find_step_rule("job", 1, 7, metadata) is None
        assert matcher.find_step_rule("job", 2, 6, metadata) is None
        assert matcher.find_step_rule("job", 2, 7, metadata) == index
    another = first.model_copy(update={"name": "another"})  # it keeps windows of its own run only
    matcher = RuleMatcher((another, Rule(kinds=kinds, older_than=DAY)), NOW, survey)
    assert find_object_rule(matcher, stat_of(keys.make_gradient_key("worker", 9))) == 1


def test_a_rule_for_other_objects_takes_none_of_templar_that_an_earlier_rule_keeps() -> None:
    survey = BucketSurvey()
    survey._newest = {(ObjectKind.GRADIENT, "", "2"): [8]}
    keep = Rule(kinds=(CleanupKind.GRADIENTS,), older_than=DAY, keep_last=1)
    other = Rule(kinds=(CleanupKind.OTHER,), older_than=DAY, match="*")
    stat = stat_of("gradient-8-1-v2.pt")
    assert find_object_rule(RuleMatcher((keep, other), NOW, survey), stat) is None
    assert find_object_rule(RuleMatcher((other, keep), NOW, survey), stat) == 0


def test_a_dataset_is_as_old_as_its_youngest_object() -> None:
    listings = 0

    def list_with(age: timedelta) -> Callable[[], list[Stat]]:
        def iterate() -> list[Stat]:
            nonlocal listings
            listings += 1
            return [stat_of("data/a"), stat_of("data/b", age)]

        return iterate

    other = Rule(kinds=(CleanupKind.DATASETS,), older_than=DAY, name="another")
    matcher = matcher_of(other, Rule(kinds=(CleanupKind.DATASETS,), older_than=DAY))
    assert matcher.find_dataset_rule("data", list_with(2 * DAY)) == 1
    assert matcher.find_dataset_rule("data", list_with(timedelta(hours=1))) is None
    assert listings == 2  # the rule for another dataset lists nothing


def test_an_object_is_new_if_it_was_written_after_the_plan() -> None:
    matcher = matcher_of()
    assert not matcher.is_new(stat_of("a", timedelta(0)))
    assert matcher.is_new(stat_of("a", -timedelta(seconds=3)))


def test_templars_objects_are_taken_by_rules_of_their_kinds_and_for_other_objects() -> None:
    survey = BucketSurvey()
    survey._newest = {(ObjectKind.TEMPLAR_CHECKPOINT, "", "2"): [9]}
    kinds = (CleanupKind.GRADIENTS, CleanupKind.CHECKPOINTS, CleanupKind.GATHERS)
    some, all_of_two, other = (
        Rule(kinds=kinds, older_than=DAY),
        Rule(kinds=(CleanupKind.START_WINDOWS,), version="2", older_than=DAY),
        Rule(kinds=(CleanupKind.OTHER,), older_than=DAY, prefix="checkpoint-"),
    )
    unversioned = Rule(kinds=(CleanupKind.START_WINDOWS,), older_than=DAY)
    matcher = RuleMatcher((some, unversioned, all_of_two, other), NOW, survey)
    for key, index in {
        "gradient-8-1-v2.pt": 0,
        "checkpoint-8-1-v2.pt": 0,
        "checkpoint-9-1-v2.pt": 3,  # the newest: only by its name
        "aggregator-8-v2.pt": 0,
        "start_window_v2.json": 2,
        "start_window_v1.json": None,
        "notes/gradient-8-1-v2.pt": None,
    }.items():
        assert find_object_rule(matcher, stat_of(key)) == index, key
