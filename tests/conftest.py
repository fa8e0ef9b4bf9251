pytest_plugins = ["tests.prefect_server", "tests.servers.fixtures"]
