"""Flows and commands over buckets that every principal has written to, from seeds."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millrace.testing.rgw import RGW
from tests.integration.hostile.matrix import UndisturbedError, Verdicts, hostile_matrix, seeds

_SIDE_BY_SIDE = 3


def run_hostile(
    rgw: RGW, folder: Path, *, runs: int, seed: int, tell: Callable[[str], None]
) -> Verdicts:
    """Run all flows in turn.

    Args:
        rgw: Server of the bucket.
        folder: Folder for files of the runs.
        runs: Number of runs.
        seed: Seed of all chance.
        tell: Told a line now and then.
    """
    with hostile_matrix(rgw, folder) as matrix, ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:

        def one(case: tuple[str, str]) -> None:
            try:
                wrong = matrix.run(*case).wrong
            except UndisturbedError as error:
                wrong = [str(error)]
                matrix.verdicts.stopped += wrong
            for line in wrong:
                tell(line)
            done = matrix.verdicts.runs.total()
            if done % 20 == 0:
                tell(matrix.verdicts.format_sentence())

        list(pool.map(one, seeds(runs, seed)))
        return matrix.verdicts
