"""Forked processes of tests."""

import threading
from typing import Any, cast

import pytest


def leave_out_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the services of Prefect out of the end of a process that is forked in this test.

    Their threads do not exist in the child, which would end with an error.
    """
    ends = [
        end
        for end in cast("Any", threading)._threading_atexits
        if "prefect" not in getattr(getattr(end, "func", end), "__module__", "")
    ]
    monkeypatch.setattr(threading, "_threading_atexits", ends)
