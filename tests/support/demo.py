"""README's demo by the letter, on a clone. Its environment has what pip would fetch, linked."""

import re
import sysconfig
from pathlib import Path

from examples.demo import EPOCHS, Size
from tests.support.packages import link_requirements
from tests.support.readme import make_clone, read_block


def describe(size: Size) -> str:
    """Return the line that the demo prints at its end."""
    windows = EPOCHS * size.windows
    steps = windows * size.steps
    return f"  {windows} windows, {steps} steps of each of {size.machines} workers\n"


def run_demo(folder: Path, size: Size) -> None:
    """Run the demo in a new clone, and check its report.

    Args:
        folder: Folder of the clone. It is made.
        size: Size of the demo.
    """
    clone = make_clone(folder)
    # The tests' own environment was fetched by pip, too. With these, pip fetches no others.
    link_requirements(
        Path(sysconfig.get_path("purelib", vars={"base": clone.folder / ".venv"})), "demo"
    )
    options = " ".join(f"--{name} {value}" for name, value in vars(size).items())
    shown = clone.run(read_block("Demo", "console"), DEMO=options)
    assert describe(size) in shown
    counts = re.search(
        r"^python-tokens: (\d+) rows of parquet, read back as (\d+) samples of WebDataset and "
        r"(\d+) of tokens, \S+ MB of equal text$", shown, re.MULTILINE,
    )  # fmt: skip
    assert counts, shown
    assert 100 < int(counts[1]) == int(counts[2]) == int(counts[3]), shown
    losses = re.search(r"^  loss (\S+) to (\S+), on text that the model", shown, re.MULTILINE)
    assert losses, shown
    assert 5 < float(losses[1]) < 6 > float(losses[2]) + 1, shown
    validated = re.search(r"the same batches as the workers of all (\d+) gradients$", shown, re.M)
    assert validated, shown
    assert int(validated[1]) >= EPOCHS * size.windows, shown
    ends = size.windows * size.steps
    for epoch in range(EPOCHS):
        assert f"  epoch {epoch} ended with the checkpoint of step {ends * (epoch + 1)}\n" in shown
    books = f"books: {size.machines} machines rented, .*\\n  0 left$"
    assert re.search(books, shown, re.MULTILINE), shown
