"""Events of the engine: one class for each, under a kind of its own."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import millrace
from millrace.progress import Event, serialize_events, shield_progress

MODULES = [
    module.name
    for module in pkgutil.walk_packages(millrace.__path__, "millrace.")
    if module.name.endswith(".progress_events") or module.name == "millrace.deletion"
]
EVENTS = sorted(
    {
        event_class
        for name in MODULES
        for _, event_class in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if issubclass(event_class, Event) and event_class.kind
    },
    key=lambda event_class: event_class.kind,
)


def test_every_capability_that_reports_progress_has_events() -> None:
    assert {event_class.__module__ for event_class in EVENTS} == set(MODULES)
    assert len(MODULES) == 8


def test_kinds_are_unique() -> None:
    assert [kind for kind, n in Counter(one.kind for one in EVENTS).items() if n > 1] == []


@pytest.mark.parametrize("event_class", EVENTS, ids=lambda event_class: event_class.kind)
def test_an_event_is_frozen_and_describes_each_field(event_class: type[Event]) -> None:
    assert re.fullmatch(r"[a-z]+\.[a-z]+", event_class.kind)
    assert event_class.__dataclass_params__.frozen
    assert "__slots__" in vars(event_class)
    text = "\n".join(inspect.cleandoc(str(one.__doc__)) for one in event_class.__mro__[:-1])
    for field in dataclasses.fields(event_class):
        assert re.search(rf"^    {field.name}: ", text, re.MULTILINE), field.name


def test_events_of_several_threads_are_passed_on_one_at_a_time() -> None:
    count = 0

    def add(event: Event) -> None:
        nonlocal count
        before = count
        time.sleep(0)  # another thread may run
        count = before + 1

    progress = serialize_events(add)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: progress(Event()), range(1000)):
            pass
    assert count == 1000


def test_a_receiver_that_fails_is_logged_once_and_gets_the_next_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[Event] = []

    def fail(event: Event) -> None:
        told.append(event)
        raise BrokenPipeError

    progress = shield_progress(fail)
    progress(Event())
    progress(Event())
    assert len(told) == 2
    assert [one.message for one in caplog.records] == [
        "The progress cannot be shown. The work goes on."
    ]
