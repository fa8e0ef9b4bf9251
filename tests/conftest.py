pytest_plugins = ["tests.prefect_server", "tests.ray_cluster", "tests.servers.fixtures"]
