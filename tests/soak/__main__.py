"""Run the kill and fault matrices, and print their counts: ``python -m tests.soak``."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random

from examples.demo import Size
from millrace.storage import StoreSpec, open_store
from millrace.testing.faults import Fault, Faults
from millrace.testing.hub import HubServer
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.integration.hostile.junk import RECORDS, Kind
from tests.soak import races, report, windows
from tests.soak.campaigns import run_campaigns
from tests.soak.case import Case, References
from tests.soak.cleaning import clean_with_kills, fill_bucket, list_by_boto3
from tests.soak.concurrent_drivers import Resumption, run_concurrent_case, share_work, take_over
from tests.soak.faults import (
    PROBABILITY,
    make_faults,
    make_r2_store,
    make_rgw_store,
    run_faults,
    run_long_stalls,
)
from tests.soak.formats import make_format_sources
from tests.soak.hostile import run_hostile
from tests.soak.kills import KillMatrix
from tests.soak.places import (
    READ_FAULTS,
    make_read_faults,
    put_on_hub,
    put_on_web,
    read_by_library,
)
from tests.soak.races import run_races
from tests.soak.ray import run_on_ray
from tests.soak.shared_stores import FolderStore, SharedStore
from tests.soak.source_data import SourceData, make_all_sources
from tests.soak.swarm import run_swarm
from tests.soak.tally import Tally
from tests.soak.targets import COMPLETE, list_combinations, make_target
from tests.support.demo import run_demo
from tests.support.web import Site, serve

CASES = 16  # smallest number of cases with faults: each kind of source, plain and in every format
FAULT_KILLS = CASES // 2  # smallest number of kills beside faults: two of three cases have some
FORMAT_KILLS = 20  # number of kills of each kind of source in every format, half beside faults
PLACE_KILLS = 21  # number of kills of each place of sources, in every format
STALL_SECONDS = 45.0  # longer than the timeout of a client
SAVES = 60  # number of saves with a kill
CLEANING_KILLS = 5  # number of processes that are killed while they clean
MIN_FAULTS = 20  # smallest number of injections of each kind of fault


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=212, help="smallest number of kills")
    parser.add_argument("--races", type=int, default=300, help="number of races")
    parser.add_argument("--windows", type=int, default=90, help="number of runs of gradients")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--fuzz", type=int, default=100_000, help="number of fuzzed inputs")
    parser.add_argument(
        "--objects",
        type=int,
        default=100_000,
        help="number of objects in the bucket that is cleaned",
    )
    parser.add_argument(
        "--rentals", type=int, default=600, help="number of rentals with kills of owners"
    )
    parser.add_argument(
        "--hostile", type=int, default=336, help="number of runs over hostile buckets"
    )
    parser.add_argument(
        "--campaigns", type=int, default=3, help="number of campaigns with kills of leaders"
    )
    parts = [
        "kills",
        "places",
        "faults",
        "races",
        "windows",
        "fuzz",
        "cleaning",
        "rentals",
        "campaigns",
        "swarm",
        "ray",
        "hostile",
        "demo",
    ]
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    start = time.monotonic()
    passed: list[bool] = []
    summary: list[str] = []
    others: dict[str, Callable[[argparse.Namespace], tuple[bool, str]]] = {
        "races": _run_races, "windows": _run_windows, "fuzz": _run_fuzz, "cleaning": _run_cleaning,
        "campaigns": _run_campaigns, "swarm": _run_swarm, "ray": _run_ray, "hostile": _run_hostile,
        "demo": _run_demo,
    }  # fmt: skip
    if options.only in {None, "rentals"}:
        others["rentals"] = _RentalsProcess(options).wait
    if options.only in {None, "kills", "places", "faults"}:
        passed, summary = _run_shards(options)
    for name, run_part in others.items():
        if options.only in {None, name}:
            is_correct, sentence = run_part(options)
            passed.append(is_correct)
            summary.append(sentence)
    print(f"{time.monotonic() - start:.0f} s", *reversed(summary), sep="\n")
    return 0 if all(passed) else 1


def _run_races(options: argparse.Namespace) -> tuple[bool, str]:
    """Run races and saves in a folder, on RGW, and through a proxy that injects faults."""
    with _start_stores(options.seed, "races") as (folder, stores, proxy):
        _lose_answers(proxy, "/epochs/", "/metadata.json")
        found = run_races(
            stores, folder, options.seed, races=options.races, saves=SAVES, report=_print_line
        )
        fired = proxy.count_fired()
        print(*races.format_summary(found), f"faults {fired}", "", sep="\n")
        is_covered = (
            min(fired.values()) >= MIN_FAULTS
            and min(found.interruptions[at] for at in races.POINTS) > 0
            and 0 < found.early_resumptions < found.stops
            and found.all_killed > 0
            and found.with_owner > 0
            and not proxy.count_pending()
        )
        return is_covered and not found.wrong, races.format_summary(found)[-1]


def _run_windows(options: argparse.Namespace) -> tuple[bool, str]:
    """Aggregate runs of gradients in a folder, on RGW, and through a proxy that injects faults."""
    with _start_stores(options.seed, "windows") as (folder, stores, proxy):
        _lose_answers(proxy, "/chain/000000000", "/chain/000000002", "/metadata.json")
        found = windows.run_windows(
            stores, folder, options.seed, runs=options.windows, report=_print_line
        )
        fired = proxy.count_fired()
        print(*windows.format_summary(found), f"faults {fired}", "", sep="\n")
        is_covered = (
            min(fired.values()) >= MIN_FAULTS
            and min(found.interruptions[at] for at in windows.POINTS) > 0
        )
        is_covered = is_covered and 0 < found.early_resumptions < found.stops and found.pairs > 0
        is_covered = is_covered and not proxy.count_pending()
        return is_covered and not found.wrong, windows.format_summary(found)[-1]


def _run_fuzz(options: argparse.Namespace) -> tuple[bool, str]:
    """Fuzz the parsers in a separate process, because a fault may end the process."""
    command = [sys.executable, "-m", "tests.soak.fuzz", str(options.fuzz), str(options.seed)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    output = process.stdout.decode(errors="replace")
    counts = [line for line in output.splitlines() if line.startswith("fuzzed; ")]
    is_correct = not process.returncode and len(counts) == 1
    if not is_correct:
        print(output)
    outcome = "all refused or correct" if is_correct else "wrong 1"
    return is_correct, f"{'; '.join(counts) or 'not fuzzed'}; {outcome}"


def _run_cleaning(options: argparse.Namespace) -> tuple[bool, str]:
    """Clean a bucket with the objects of all roles, with kills."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        RGW.start(Path(folder) / "rgw") as rgw,
    ):
        spec = StoreSpec.model_validate(make_rgw_store(rgw, "cleaning").make_spec("below"))
        fill_bucket(lambda: open_store(spec), options.objects, options.seed)
        list_all = list_by_boto3(rgw.make_client(rgw.full), "cleaning", "below/")
        result = clean_with_kills(spec, list_all, kills=CLEANING_KILLS, seed=options.seed)
    sentence = (
        f"objects {result.objects}, planned {result.planned}, cleaning killed {result.killed}"
    )
    is_covered = result.killed >= CLEANING_KILLS - 1  # a kill may come before a deletion
    return is_covered and not result.wrong, (
        f"{sentence}, differing {result.differing}, lost {result.lost}, left {result.left}, "
        f"faults {len(result.faults)}"
    )


class _RentalsProcess:
    """Rentals with kills, in a process beside the other parts: it mostly waits.

    Args:
        options: Options of the soak.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        module = [sys.executable, "-m", "tests.soak.rentals"]
        command = [*module, f"{options.rentals}", f"{options.seed}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait(self, _: argparse.Namespace) -> tuple[bool, str]:
        """Wait for the end of the process, and return the outcome."""
        output = self._process.communicate()[0]
        print(output)
        return not self._process.returncode, output.strip().rpartition("\n")[2]


def _run_campaigns(options: argparse.Namespace) -> tuple[bool, str]:
    """Run campaigns whose leaders are killed."""
    found = run_campaigns(options.campaigns, options.seed, _print_line)
    print(*found.wrong, sep="\n")
    return not found.wrong, found.format_sentence()


def _run_swarm(_: argparse.Namespace) -> tuple[bool, str]:
    """Run the swarm with faults of nodes and of the store."""
    cases, wrong = run_swarm(_print_line)
    return not wrong, f"swarm {cases}, wrong {wrong}"


def _run_ray(_: argparse.Namespace) -> tuple[bool, str]:
    """Shard on a Ray cluster, and kill one of its nodes."""
    wrong = run_on_ray(_print_line)
    print(*wrong, sep="\n")
    return not wrong, f"ray wrong {len(wrong)}"


def _run_hostile(options: argparse.Namespace) -> tuple[bool, str]:
    """Run flows and commands over buckets to which hostile principals have written."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        RGW.start(Path(folder) / "rgw") as rgw,
    ):
        found = run_hostile(
            rgw, Path(folder) / "runs", runs=options.hostile, seed=options.seed, report=_print_line
        )
    print(found.format_table(), *found.wrong, "", sep="\n")
    missing_kinds = [
        kind
        for kind in Kind
        if not found.read[kind] + (0 if kind in RECORDS else found.listed[kind])
    ]
    is_covered = not missing_kinds and found.held.total() > 0
    return is_covered and not found.wrong, found.format_sentence()


def _run_demo(_: argparse.Namespace) -> tuple[bool, str]:
    """Run the demo of the README with its full size. The tests run a smaller one."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            run_demo(Path(folder) / "millrace", Size())
        except AssertionError as error:
            print(error)
            return False, "demo: wrong 1"
    return True, "demo: correct"


def _lose_answers(proxy: R2Proxy, *keys: str) -> None:
    """Lose the answer to the next commit of each kind. `count_pending` tells whether all fired."""
    for part_of_key in keys:
        proxy.fail_next(Fault.LOST, 1, "PUT", part_of_key)


def _make_rare_faults(seed: int) -> Faults:
    """Return faults in one of twenty requests.

    One upload in thirty is damaged, since a run has ten times fewer uploads than other requests.
    """
    return make_faults(seed, probability=PROBABILITY / len(Fault), damage=1 / 30)


@contextmanager
def _start_stores(seed: int, bucket: str) -> Iterator[tuple[Path, list[SharedStore], R2Proxy]]:
    """Start a folder, RGW, and RGW behind a proxy that injects faults."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        rgw = stack.enter_context(RGW.start(folder / "rgw"))
        keys = {rgw.full.access_key_id: rgw.full.secret_access_key}
        proxy = stack.enter_context(R2Proxy.start(rgw.endpoint, keys, folder / "r2"))
        proxy.set_faults(_make_rare_faults(seed))
        stores: list[SharedStore] = [
            FolderStore(folder / "store"),
            make_rgw_store(rgw, bucket),
            make_r2_store(rgw, proxy, "failing"),
        ]
        yield folder, stores, proxy


def _run_shards(options: argparse.Namespace) -> tuple[list[bool], list[str]]:
    """Run the parts that make datasets."""
    passed: list[bool] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        rgw = stack.enter_context(RGW.start(folder / "rgw"))
        bodies = stack.enter_context(serve(Site()))
        soak = _ShardSoak(folder, rgw, bodies, options.seed)
        keys = {rgw.full.access_key_id: rgw.full.secret_access_key}
        proxy = stack.enter_context(R2Proxy.start(rgw.endpoint, keys, folder / "r2"))
        if options.only in {None, "kills"}:
            passed += [
                soak.run_kills(options.kills),
                soak.run_format_kills(proxy),
                soak.run_concurrency(),
            ]
        if options.only in {None, "places"}:
            site = stack.enter_context(serve(Site()))
            hub = stack.enter_context(HubServer.start(folder / "hub"))
            passed.append(soak.run_place_kills(proxy, site, hub))
        if options.only in {None, "faults"}:
            passed.append(soak.run_faults(proxy))
        return passed, soak.summary


class _ShardSoak:
    """Parts of a soak that make datasets.

    Each part prints its counts, adds a line to the summary, and returns whether it passed.
    """

    def __init__(self, folder: Path, rgw: RGW, bodies: Site, seed: int) -> None:
        self._folder, self._rgw, self._seed = folder, rgw, seed
        self._sources = make_all_sources(folder / "material", seed, bodies)
        self._format_sources = make_format_sources(folder / "functions", self._sources)
        self._references = References(folder)
        self._stores: list[SharedStore] = [
            FolderStore(folder / "store"),
            make_rgw_store(rgw, "soak"),
        ]
        self.summary: list[str] = []

    def run_kills(self, number: int) -> bool:
        """Make datasets with kills of drivers and workers."""
        kills = self._make_kill_matrix("kill", self._stores, self._sources)
        tally = kills.run(number, report=_print_line)
        missing = report.list_missing_kills(tally)
        print(
            report.format_kill_table(tally),
            *(f"never killed: {combination}" for combination in missing),
            "",
            sep="\n",
        )
        self.summary.append(report.format_result(f"kills {tally.counted}", tally))
        return not tally.wrong and not missing and tally.counted >= number

    def run_format_kills(self, proxy: R2Proxy) -> bool:
        """Make datasets of every kind of source in every format, with kills.

        Half of the kills of each kind are of drivers whose store fails in one of twenty requests.
        """
        failing = make_r2_store(self._rgw, proxy, "formats")
        passed, counts = True, []
        for source in self._format_sources:
            kills = self._make_kill_matrix(source.name.split()[0], self._stores, [source])
            generator = Random(f"{self._seed} {source.name}")
            pairs = [pair for pair in list_combinations() if pair[0] != COMPLETE]
            targets = [make_target(generator, *p) for p in generator.sample(pairs, FORMAT_KILLS)]
            kills.kill_all(targets[::2], report=_print_line)
            kills.stores = [failing]
            proxy.reset()
            proxy.set_faults(_make_rare_faults(self._seed))
            tally = kills.kill_all(targets[1::2], report=_print_line)
            fired, requests = sum(proxy.count_fired().values()), len(proxy.list_requests())
            passed = passed and not tally.wrong and tally.counted == FORMAT_KILLS and fired > 0
            counts.append(
                report.format_result(
                    f"{source.name}: kills {tally.counted}, {tally.stores[failing.name]} of them "
                    f"beside {fired} faults in {requests} requests",
                    tally,
                )
            )
            print(*tally.wrong, sep="\n")
        proxy.reset()
        self.summary += counts
        return passed

    def run_place_kills(self, proxy: R2Proxy, site: Site, hub: HubServer) -> bool:
        """Make datasets of sources behind HTTP and on the Hub, with kills, while all fail."""
        for source in self._format_sources:
            self._references.compute_digests(source)  # of the files in a folder
        lines = next(one for one in self._format_sources if one.name.startswith("lines"))
        tables = next(one for one in self._format_sources if one.name.startswith("parquet"))
        places = {
            "web": [put_on_web(site, source) for source in self._format_sources],
            "hub": [put_on_hub(hub, source) for source in reversed(self._format_sources)],
            "huggingface, parquet": [read_by_library(hub, tables)],
            "huggingface, lines": [read_by_library(hub, lines)],
        }
        store = make_r2_store(self._rgw, proxy, "places")
        proxy.set_faults(make_faults(self._seed, probability=0.05 / len(Fault)))
        site.box.use(make_read_faults(self._seed))
        hub.set_faults(make_read_faults(self._seed))
        passed = True
        for name, sources in places.items():
            kills = self._make_kill_matrix(name.replace(", ", "-"), [store], sources)
            generator = Random(f"{self._seed} {name}")
            pairs = [pair for pair in list_combinations() if pair[0] != COMPLETE]
            targets = [make_target(generator, *p) for p in generator.sample(pairs, PLACE_KILLS)]
            tally = kills.kill_all(targets, report=_print_line)
            passed = passed and not tally.wrong and tally.counted == PLACE_KILLS
            text = f"{name} in every format: kills {tally.counted}"
            self.summary.append(report.format_result(text, tally))
            print(*tally.wrong, sep="\n")
        fired = [proxy.count_fired(), site.box.count_fired(), hub.count_fired()]
        print(*(f"faults {counts}" for counts in fired), sep="\n")
        proxy.reset()
        reads = [counts[kind] for counts in fired[1:] for kind in READ_FAULTS]
        return passed and min(reads) > 0 and sum(fired[0].values()) >= MIN_FAULTS

    def run_concurrency(self) -> bool:
        """Make datasets with two drivers at once."""
        generator = Random(f"{self._seed} meetings")
        shared, taken_over = Tally(), Tally()
        for number, workers in enumerate([1, 2, 0] * 2):
            case = self._make_case(f"share-{number}", generator, workers)
            run_concurrent_case(case, share_work, self._references, shared)
            _print_line(f"{case}: two drivers at once")
        variants = [
            (resumption, workers_too) for resumption in Resumption for workers_too in (True, False)
        ]
        for number, (resumption, workers_too) in enumerate(variants * 2):
            case = self._make_case(f"take-{number}", generator, number % 3)
            run_concurrent_case(
                case,
                partial(take_over, workers_too=workers_too, resumption=resumption),
                self._references,
                taken_over,
            )
            _print_line(f"{case}: stopped and taken over, resumed {resumption}")
        print(*shared.wrong, *taken_over.wrong, sep="\n")
        self.summary.append(report.format_result(f"two at once {shared.cases}", shared))
        self.summary.append(report.format_result(f"taken over {taken_over.cases}", taken_over))
        return not shared.wrong and not taken_over.wrong

    def run_faults(self, proxy: R2Proxy) -> bool:
        """Make datasets in a store that fails."""
        generator = Random(f"{self._seed} faults")
        kills = self._make_kill_matrix(
            "fault",
            [make_r2_store(self._rgw, proxy, "soak")],
            [*self._sources, *self._format_sources],
        )
        fired = run_faults(
            kills, proxy, generator, cases=CASES, at_least=MIN_FAULTS, report=_print_line
        )
        stalls = run_long_stalls(kills, proxy, seconds=STALL_SECONDS)
        _print_line(f"stalls that the client has to end: {stalls['stall']}")
        print(report.format_fault_table(fired, kills.tally), "", sep="\n")
        self.summary.append(report.format_result(f"faults {sum(fired.values())}", kills.tally))
        return (
            not kills.tally.wrong
            and kills.tally.counted >= FAULT_KILLS
            and min(fired.values()) >= MIN_FAULTS
            and stalls["stall"] == 2
        )

    def _make_kill_matrix(
        self, name: str, stores: Sequence[SharedStore], sources: Sequence[SourceData]
    ) -> KillMatrix:
        generator = Random(f"{self._seed} {name}")
        runs = self._folder / "runs"
        return KillMatrix(sources, stores, self._references, runs, generator, name=name)

    def _make_case(self, name: str, generator: Random, workers: int) -> Case:
        return Case(
            name,
            generator.choice(self._sources),
            generator.choice(self._stores),
            self._folder / "runs",
            workers=workers,
        )


def _print_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
