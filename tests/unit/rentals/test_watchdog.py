"""The watchdog in a machine obeys what the owner wrote last."""

from types import SimpleNamespace

import pytest

from millrace.rentals.guest import watchdog

ENV = {
    "MILLRACE_DEADLINE": "10000",
    "MILLRACE_LIFETIME": "10000",
    "MILLRACE_HEARTBEAT_TIMEOUT": "300",
    "MILLRACE_OWNER_URL": "",
}


@pytest.mark.parametrize(("contents", "reason", "end"), [
    ([b"detached"], "the deadline has passed", 10000.0),
    ([b"detached 700"], "the deadline has passed", 700.0),
    ([b"detached 20000"], "the deadline has passed", 10000.0),
    ([b"a", b"detached 700", None], "the deadline has passed", 700.0),  # the store is silent
    ([b"detached", None, b"a", None], "the owner sent no heartbeat", 330.0),
    ([None], "the owner sent no heartbeat", 300.0),
    ([b"detached soon"], "the owner sent no heartbeat", 300.0),
    ([b"detached 700", b"a"], "the owner sent no heartbeat", 315.0),  # an owner has taken over
])  # fmt: skip
def test_a_detached_machine_ends_when_its_owner_said(
    monkeypatch: pytest.MonkeyPatch, contents: list[bytes | None], reason: str, end: float
) -> None:
    elapsed, remaining = 0.0, list(contents)

    def sleep(seconds: float) -> None:
        nonlocal elapsed
        elapsed += seconds

    def read_owner(_: str) -> bytes | None:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    clock = SimpleNamespace(monotonic=lambda: elapsed, time=lambda: elapsed, sleep=sleep)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "read_owner", read_owner)
    assert watchdog.watch(ENV, 0.0) == reason
    assert elapsed == pytest.approx(end, abs=1.0)
