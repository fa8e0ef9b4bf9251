import os

# The stand-in of the Hub speaks Git LFS; the library would offer it Xet. Read when it is imported.
os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

pytest_plugins = ["tests.prefect_server", "tests.ray_cluster", "tests.servers.fixtures"]
