import os

import hypothesis
import pytest

# The stand-in of the Hub speaks Git LFS; the library would offer it Xet. Read when it is imported.
os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

# How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

pytest_plugins = ["tests.prefect_server", "tests.ray_cluster", "tests.server_fixtures"]


LONGEST = ["campaigns", "prefect", "e2e"]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What two processes share out by groups, those first that take longest.

    Each starts what a group needs, once: campaigns, all else with a Prefect server, else a folder.
    It goes with `-n 2 --dist loadgroup --no-loadscope-reorder`.
    A third process gains nothing on two cores: Prefect's group then takes as long as all did.
    """
    grouped = {item: _group(item) for item in items}
    for item, group in grouped.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: [*LONGEST, grouped[item]].index(grouped[item]))


def _group(item: pytest.Item) -> str:
    if item.path.name.startswith("test_campaign"):
        return "campaigns"
    if "prefect_server" in getattr(item, "fixturenames", ()):
        return "prefect"
    return item.path.relative_to(item.config.rootpath / "tests").parts[0]
