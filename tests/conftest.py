import gc
import importlib
import os
import signal

import hypothesis
import pytest

from tests.support.combinations import list_further_combinations

# The library of the Hub reads this when it is imported. Its library of Xet reads its settings when
# a process first moves bytes: two short retries, so that tests of faults are short.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_XET_CLIENT_RETRY_BASE_DELAY"] = "10ms"
os.environ["HF_XET_CLIENT_RETRY_MAX_ATTEMPTS"] = "2"

# A shell lets what it starts by `&` ignore SIGINT. The commands that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The examples of a property are the same in every run. `make soak` draws new ones, and four times
# as many. How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("fixed")

# What tests import stays until the end. To look for garbage among it again and again takes time.
gc.disable()

pytest_plugins = ["tests.prefect_server", "tests.ray_cluster", "tests.server_fixtures"]

TIERS = ["e2e", "integration", "unit"]
SERVERS = {"prefect_server", "ray_cluster"}
"""Fixtures of servers that are slow to start. Some tests need both."""
SHARED_FOLDERS = {"integration/datasets/formats"}
"""Folders whose modules share what is slow to install."""
LONGEST = ["servers", "e2e/test_readme.py", "e2e/datasets/test_kills.py"]
LIBRARIES = ["torch.distributed.fsdp", "prefect_aws", "datasets", "ray"]
"""The libraries that take longest to compile."""


def pytest_collection(session: pytest.Session) -> None:
    """Compile the libraries of a fresh environment once, not in each process.

    Each process begins with another one, and finds the others compiled.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and session.config.args == session.config.getini("testpaths"):
        first = int(worker.removeprefix("gw")) % len(LIBRARIES)
        for name in LIBRARIES[first:] + LIBRARIES[:first]:
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark combinations of parameters, group tests by process, and order the groups.

    Of the combinations of a test's parameters, `make test` runs only so many that each value of a
    parameter is in one of them. The others get the mark `soak`.

    There are four processes, since tests that wait for a server leave a sixth of two processors
    idle when there are three. The groups that take longest run first. The options are
    `-n 4 --dist loadgroup --no-loadscope-reorder`.
    """
    for item in list_further_combinations(items):
        item.add_marker(pytest.mark.soak)
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _order(groups[item], item))


def _group(item: pytest.Item) -> str:
    """Return what shares a process: mostly a module."""
    if SERVERS & {*getattr(item, "fixturenames", ())}:
        return "servers"
    module = item.path.relative_to(item.config.rootpath / "tests")
    folder = module.parent.as_posix()
    return folder if folder in SHARED_FOLDERS else module.as_posix()


def _order(group: str, item: pytest.Item) -> tuple[int, int]:
    tier = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return [*LONGEST, group].index(group), [*TIERS, tier].index(tier)
