"""Each flow and command over a bucket that a principal has written to: it ends as if nobody had.

A handful of seeds for each principal; ``python -m tests.soak --only hostile`` runs hundreds.
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest

from millrace.testing.process import REPOSITORY
from millrace.testing.rgw import RGW
from tests.integration.hostile.commands import WITHOUT_A_BUCKET, known_commands
from tests.integration.hostile.flows import FLOWS, WITHOUT_A_RUN
from tests.integration.hostile.junk import (
    CONTROLS,
    CONTROLS_OF_RGW,
    LITTER,
    NAMES,
    OBJECTS,
    Kind,
    Reach,
    make_junk,
)
from tests.integration.hostile.matrix import (
    Matrix,
    UndisturbedError,
    hostile_matrix,
    refuse_exit_code,
    silent,
)
from tests.integration.hostile.site import Ended

QUICK = (
    "shard-dataset", "clean-bucket", "wipe-bucket", "aggregate-gradients", "cooldown",
    "reap-machines", "prewarm", "verify-checkpoints", "millrace status",
    "millrace dataset collect-garbage", "millrace gradient import",
)  # fmt: skip
"""Flows and commands of all principals that a test runs; the soak runs all."""


@pytest.fixture(scope="module")
def matrix(rgw: RGW, server_folder: Path) -> Iterator[Matrix]:
    with hostile_matrix(rgw, server_folder / "hostile") as made:
        yield made


@pytest.mark.parametrize("name", QUICK)
def test_a_flow_ends_the_same_whatever_others_have_written(name: str, matrix: Matrix) -> None:
    found = matrix.run(name, "tests")
    assert "\n".join(found.wrong) == ""
    assert found.met[name] > 0


def test_no_command_is_left_out() -> None:
    ran = {name.removeprefix("millrace ") for name in FLOWS if name.startswith("millrace ")}
    assert ran | WITHOUT_A_BUCKET.keys() == set(known_commands())


def test_no_flow_is_left_out() -> None:
    sources = "\n".join(path.read_text() for path in (REPOSITORY / "flows").glob("*.py"))
    flows = re.findall(r"@flow\(\s*name=\"([^\"]+)\"", sources)
    assert len(flows) > 15
    assert set(flows) <= FLOWS.keys() | WITHOUT_A_RUN.keys()


def test_a_report_that_does_not_say_what_a_sender_sent_is_found() -> None:
    told = ["n2 is trusted: it no longer answers", "n1 is not trusted: ", "rows"]
    blamed = [["n1 is not trusted"], ["n2 is not trusted"], ["n2 is trusted", "no agent"]]
    assert silent(Ended(said=told, blamed=blamed)) == blamed[1:]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("millrace plan", [0, [], ["key"]], [2, [], ["key"]]),
        ("millrace bucket audit", [20, [], []], [0, [], []]),
        ("millrace machine rent", {"result": [[], [], []]}, {"result": [[], [1], []]}),
    ],
)
def test_a_command_that_fails_undisturbed_is_refused(name: str, good: Any, bad: Any) -> None:
    refuse_exit_code(name, good)
    with pytest.raises(UndisturbedError, match=name):
        refuse_exit_code(name, bad)


def test_names_for_rgw_have_only_characters_that_its_answers_can_have() -> None:
    reach = Reach(("other/",), litter=("run/",))
    every, some = (
        "".join(one.key for one in make_junk(reach, {}, 400, 1000, Random(2), controls))
        for controls in (CONTROLS, CONTROLS_OF_RGW)
    )
    assert set("\x01\x1b\x0b\n\t\x7f") <= set(every)
    assert set("\n\r\t\x7f") == {one for one in some if one < " " or one == "\x7f"}


def test_each_kind_is_made_and_stays_where_its_writer_may_write() -> None:
    worker = {f"run/w1/gradient-{n:09d}-w1-v1.safetensors": b"abc" * 50 for n in range(9)}
    link = b'{"kind": "chain-link", "record": {"at": "2026-01-01"}}'
    genuine = {
        **worker,
        "other/votes/w0.json": b"{}",
        "run/gathers/1/chain/000000001.json": link,
    }
    reach = Reach(("run/w1/", "other/"), litter=("run/",), scopes=("run/",), ghosts=("w0",))
    made = [make_junk(reach, genuine, 200, 1000, Random(seed)) for seed in range(8)]
    kinds = {frozenset(one.kind for one in each) for each in made}
    assert kinds == {frozenset(OBJECTS), frozenset({Kind.GHOST})}
    assert max(len(one.key.encode()) for each in made for one in each) == 1000
    for one in chain.from_iterable(made):
        litter = one.kind in LITTER and one.key.startswith("run/")
        evil = one.kind not in NAMES and one.key.startswith("evil-")
        assert one.key.startswith(reach.prefixes) or litter or evil
    assert made[0] == make_junk(reach, genuine, 200, 1000, Random(0))
