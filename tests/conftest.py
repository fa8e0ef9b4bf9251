import os

import pytest

# The stand-in of the Hub speaks Git LFS; the library would offer it Xet. Read when it is imported.
os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

pytest_plugins = ["tests.prefect_server", "tests.ray_cluster", "tests.servers.fixtures"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of two processes (`-n 2 --dist loadgroup`) one has the Prefect server and all that needs it.

    The other servers each has for itself, once: what stands in one folder stays together.
    """
    fixtures = getattr(item, "fixturenames", ())
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    item.add_marker(pytest.mark.xdist_group("prefect" if "prefect_server" in fixtures else folder))
