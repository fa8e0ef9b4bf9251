import os
import signal

import hypothesis
import pytest

# The library of the Hub reads this when it is imported. Its library of Xet reads its settings when
# a process first moves bytes: two short retries, so that tests of faults are short.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_XET_CLIENT_RETRY_BASE_DELAY"] = "10ms"
os.environ["HF_XET_CLIENT_RETRY_MAX_ATTEMPTS"] = "2"

# A shell lets what it starts by `&` ignore SIGINT. The commands that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The examples of a property are the same in every run, and `--hypothesis-profile random` draws new
# ones. How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("fixed")

pytest_plugins = ["tests.prefect_server", "tests.ray_cluster", "tests.server_fixtures"]

TIERS = ["e2e", "integration", "unit"]
LONGEST = [
    "ray",
    "e2e/test_demo.py",
    "e2e/flows/test_campaign_kills.py",
    "e2e/flows/test_campaign.py",
    "e2e/test_readme.py",
    "e2e/flows/test_aggregate.py",
    "e2e/guides/test_campaigns.py",
    "e2e/datasets/test_kills.py",
    "e2e/flows/test_cleaning_form.py",
]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for three processes, and run the groups that take longest first.

    Each process starts the servers that its groups need, once: a Prefect server, an RGW. Tests that
    wait for a server leave a fifth of two processors idle when there are two processes.
    The options are `-n 3 --dist loadgroup --no-loadscope-reorder`.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _order(groups[item], item))


def _group(item: pytest.Item) -> str:
    """Return what shares a process: a module, or all tests of the Ray cluster."""
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        return "ray"
    return item.path.relative_to(item.config.rootpath / "tests").as_posix()


def _order(group: str, item: pytest.Item) -> tuple[int, int]:
    tier = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return [*LONGEST, group].index(group), [*TIERS, tier].index(tier)
