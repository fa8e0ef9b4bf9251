"""``python -m tests.soak``: the whole of the kill and fault matrices, and their counts."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random

from examples.demo import Size
from millrace.storage import StoreSpec, open_store
from millrace.testing.faults import Fault
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.integration.hostile.junk import Kind
from tests.soak import races, report, windows
from tests.soak.campaigns import run_campaigns
from tests.soak.case import Case, References
from tests.soak.cleaning import clean, fill, list_by_boto3
from tests.soak.faults import bad_weather, outlast, r2_place, rgw_place, run_faults
from tests.soak.hostile import run_hostile
from tests.soak.kills import Kills
from tests.soak.material import make_all
from tests.soak.place import LocalPlace, Place
from tests.soak.races import run_races
from tests.soak.swarm import run_swarm
from tests.soak.tally import Tally
from tests.soak.together import Wakes, meet, share, take_over
from tests.support.demo import run_demo

CASES = 6  # with faults
OUTLASTS = 45.0  # seconds, more than a client waits for a byte
SAVES = 60  # that are killed
KILLED = 5  # processes that clean
AT_LEAST = 20  # times that each kind of fault shall fire


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=212, help="at least so many")
    parser.add_argument("--races", type=int, default=300)
    parser.add_argument("--windows", type=int, default=90, help="runs of gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fuzz", type=int, default=100_000, help="gradients and updates, made up")
    parser.add_argument(
        "--objects", type=int, default=100_000, help="of the bucket that is cleaned"
    )
    parser.add_argument("--rentals", type=int, default=600, help="whose owners are killed")
    parser.add_argument("--hostile", type=int, default=336, help="runs over hostile buckets")
    parser.add_argument("--campaigns", type=int, default=3, help="whose leaders are killed")
    parts = [
        "kills",
        "faults",
        "races",
        "windows",
        "fuzz",
        "cleaning",
        "rentals",
        "campaigns",
        "swarm",
        "hostile",
        "demo",
    ]
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    began = time.monotonic()
    good: list[bool] = []
    summary: list[str] = []
    if options.only in {None, "kills", "faults"}:
        good, summary = _shards(options)
    others = {
        "races": _races, "windows": _windows, "fuzz": _fuzz, "cleaning": _cleaning,
        "rentals": _rentals, "campaigns": _campaigns, "swarm": _swarm,
        "hostile": _hostile, "demo": _demo,
    }  # fmt: skip
    for name, part in others.items():
        if options.only in {None, name}:
            right, said = part(options)
            good.append(right)
            summary.append(said)
    print(f"{time.monotonic() - began:.0f} s", *reversed(summary), sep="\n")
    return 0 if all(good) else 1


def _races(options: argparse.Namespace) -> tuple[bool, str]:
    """Ends of epochs and savers: in a folder, on RGW, and through a proxy that fails."""
    with _everywhere(options.seed, "races") as (folder, places, proxy):
        found = run_races(
            places, folder, options.seed, races=options.races, saves=SAVES, tell=_tell
        )
        fired = proxy.count_fired()
        print(*races.summary(found), f"faults {fired}", "", sep="\n")
        often = min(fired.values()) >= AT_LEAST and min(found.blows[at] for at in races.ALL) > 0
        return often and not found.wrong, races.summary(found)[-1]


def _windows(options: argparse.Namespace) -> tuple[bool, str]:
    """Runs of gradients: in a folder, on RGW, and through a proxy that fails."""
    with _everywhere(options.seed, "windows") as (folder, places, proxy):
        specs = list(map(races.make_spec, places))
        found = windows.run_windows(specs, folder, options.seed, runs=options.windows, tell=_tell)
        fired = proxy.count_fired()
        print(*windows.summary(found), f"faults {fired}", "", sep="\n")
        often = min(fired.values()) >= AT_LEAST and min(found.blows[at] for at in windows.ALL) > 0
        often = often and found.stops > 0 and found.together > 0
        return often and not found.wrong, windows.summary(found)[-1]


def _fuzz(options: argparse.Namespace) -> tuple[bool, str]:
    """Bytes that no worker of ours would send; in a process of its own, as it may end with it."""
    command = [sys.executable, "-m", "tests.soak.fuzz", str(options.fuzz), str(options.seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(done.stdout.decode(errors="replace"))
    ended = "all refused or right" if not done.returncode else "wrong 1"
    return not done.returncode, f"gradients and updates made up {options.fuzz}, {ended}"


def _cleaning(options: argparse.Namespace) -> tuple[bool, str]:
    """A bucket of all roles, cleaned by processes that are killed."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        RGW.start(Path(folder) / "rgw") as rgw,
    ):
        spec = StoreSpec.model_validate(rgw_place(rgw, "cleaning").make_spec("below"))
        fill(lambda: open_store(spec), options.objects, options.seed)
        look = list_by_boto3(rgw.make_client(rgw.full), "cleaning", "below/")
        came = clean(spec, look, kills=KILLED, seed=options.seed)
    said = f"objects {came.objects}, planned {came.planned}, cleaning killed {came.killed}"
    return not came.wrong and came.killed > 0, (
        f"{said}, differing {came.differing}, lost {came.lost}, left {came.left}, "
        f"unfit {len(came.unfit)}"
    )


def _rentals(options: argparse.Namespace) -> tuple[bool, str]:
    """Owners of rented machines that are killed; in a process of its own, as it forks."""
    command = [sys.executable, "-m", "tests.soak.rentals", f"{options.rentals}", f"{options.seed}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    print(done.stdout)
    return not done.returncode, done.stdout.strip().rpartition("\n")[2]


def _campaigns(options: argparse.Namespace) -> tuple[bool, str]:
    """Campaigns whose leaders are killed."""
    found = run_campaigns(options.campaigns, options.seed, _tell)
    print(*found.wrong, sep="\n")
    return not found.wrong, found.format_sentence()


def _swarm(_: argparse.Namespace) -> tuple[bool, str]:
    """Nodes that warm each other, and are killed."""
    cases, wrong = run_swarm(_tell)
    return not wrong, f"swarm {cases}, wrong {wrong}"


def _hostile(options: argparse.Namespace) -> tuple[bool, str]:
    """Flows and commands over buckets that every principal has written to."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        RGW.start(Path(folder) / "rgw") as rgw,
    ):
        found = run_hostile(
            rgw, Path(folder) / "runs", runs=options.hostile, seed=options.seed, tell=_tell
        )
    print(found.format_table(), *found.wrong, "", sep="\n")
    never = [kind for kind in Kind if not found.read[kind] + found.listed[kind]]
    return not found.wrong and not never, found.format_sentence()


def _demo(_: argparse.Namespace) -> tuple[bool, str]:
    """README's demo at its own size; the tests run a smaller one."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            run_demo(Path(folder) / "millrace", Size())
        except AssertionError as error:
            print(error)
            return False, "demo: wrong 1"
    return True, "demo: right"


@contextmanager
def _everywhere(seed: int, bucket: str) -> Iterator[tuple[Path, list[Place], R2Proxy]]:
    """A folder, RGW, and RGW behind a proxy at which one request in twenty meets a fault.

    One upload in thirty is damaged: a run has ten times fewer uploads than other requests.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        rgw = stack.enter_context(RGW.start(folder / "rgw"))
        keys = {rgw.full.access_key_id: rgw.full.secret_access_key}
        proxy = stack.enter_context(R2Proxy.start(rgw.endpoint, keys, folder / "r2"))
        proxy.set_faults(bad_weather(seed, each=0.05 / len(Fault), damage=1 / 30))
        places: list[Place] = [
            LocalPlace(folder / "store"),
            rgw_place(rgw, bucket),
            r2_place(rgw, proxy, "failing"),
        ]
        yield folder, places, proxy


def _shards(options: argparse.Namespace) -> tuple[list[bool], list[str]]:
    good: list[bool] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        rgw = stack.enter_context(RGW.start(folder / "rgw"))
        soak = _Soak(folder, rgw, options.seed)
        if options.only != "faults":
            good += [soak.run_kills(options.kills), soak.run_meetings()]
        if options.only != "kills":
            keys = {rgw.full.access_key_id: rgw.full.secret_access_key}
            proxy = stack.enter_context(R2Proxy.start(rgw.endpoint, keys, folder / "r2"))
            good.append(soak.run_faults(proxy))
        return good, soak.summary


class _Soak:
    """The parts of a soak, each of which prints its counts and says whether all was right."""

    def __init__(self, folder: Path, rgw: RGW, seed: int) -> None:
        self._folder, self._rgw, self._seed = folder, rgw, seed
        self._materials = make_all(folder / "material", seed)
        self._references = References(folder)
        self._places: list[Place] = [LocalPlace(folder / "store"), rgw_place(rgw, "soak")]
        self.summary: list[str] = []

    def run_kills(self, number: int) -> bool:
        """SIGKILLs."""
        tally = self._kills("kill", self._places).run(number, tell=_tell)
        missing = report.never_fired(tally)
        print(report.kill_table(tally), *(f"never fired: {m}" for m in missing), "", sep="\n")
        self.summary.append(report.result(f"kills {tally.counted}", tally))
        return not tally.wrong and not missing and tally.counted >= number

    def run_meetings(self) -> bool:
        """Two drivers at once."""
        dice = Random(f"{self._seed} meetings")
        shared, taken = Tally(), Tally()
        for number, workers in enumerate([1, 2, 0] * 2):
            case = self._case(f"share-{number}", dice, workers)
            meet(case, share, self._references, shared)
            _tell(f"{case}: two drivers at once")
        ways = [(wakes, too) for wakes in Wakes for too in (True, False)]
        for number, (wakes, too) in enumerate(ways * 2):
            case = self._case(f"take-{number}", dice, number % 3)
            meet(case, partial(take_over, workers_too=too, wakes=wakes), self._references, taken)
            _tell(f"{case}: stopped and taken over, goes on {wakes}")
        print(*shared.wrong, *taken.wrong, sep="\n")
        self.summary.append(report.result(f"two at once {shared.cases}", shared))
        self.summary.append(report.result(f"taken over {taken.cases}", taken))
        return not shared.wrong and not taken.wrong

    def run_faults(self, proxy: R2Proxy) -> bool:
        """A store that fails."""
        dice = Random(f"{self._seed} faults")
        kills = self._kills("fault", [r2_place(self._rgw, proxy, "soak")])
        fired = run_faults(kills, proxy, dice, cases=CASES, at_least=AT_LEAST, tell=_tell)
        slow = outlast(kills, proxy, seconds=OUTLASTS)
        _tell(f"stalls that the client has to end: {slow['stall']}")
        print(report.fault_table(fired, kills.tally), "", sep="\n")
        self.summary.append(report.result(f"faults {sum(fired.values())}", kills.tally))
        return not kills.tally.wrong and min(fired.values()) >= AT_LEAST and slow["stall"] == 2

    def _kills(self, name: str, places: Sequence[Place]) -> Kills:
        dice = Random(f"{self._seed} {name}")
        runs = self._folder / "runs"
        return Kills(self._materials, places, self._references, runs, dice, name=name)

    def _case(self, name: str, dice: Random, workers: int) -> Case:
        return Case(
            name,
            dice.choice(self._materials),
            dice.choice(self._places),
            self._folder / "runs",
            workers=workers,
        )


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
