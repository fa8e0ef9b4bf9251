"""Run flows and commands over buckets to which hostile principals have written, from seeds."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millrace.testing.rgw import RGW
from tests.integration.hostile.matrix import UndisturbedError, Verdicts, hostile_matrix, seeds

_CONCURRENCY = 3


def run_hostile(
    rgw: RGW, folder: Path, *, runs: int, seed: int, report: Callable[[str], None]
) -> Verdicts:
    """Run all flows and commands in turn.

    Args:
        rgw: Server of the bucket.
        folder: Folder for files of the runs.
        runs: Number of runs.
        seed: Seed of all random choices.
        report: Function that is called with a line of progress.
    """
    with hostile_matrix(rgw, folder) as matrix, ThreadPoolExecutor(_CONCURRENCY) as pool:

        def run_case(case: tuple[str, str]) -> None:
            try:
                faults = matrix.run(*case).wrong
            except UndisturbedError as error:
                faults = [str(error)]
                matrix.verdicts.stopped += faults
            for line in faults:
                report(line)
            number = matrix.verdicts.runs.total()
            if number % 20 == 0:
                report(matrix.verdicts.format_sentence())

        list(pool.map(run_case, seeds(runs, seed)))
        return matrix.verdicts
