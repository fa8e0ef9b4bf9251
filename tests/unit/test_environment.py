"""Environment variables that were left empty, as in a copied ``.env.example``."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from millrace import cluster
from millrace.environment import drop_empty_variables, read_variable
from millrace.errors import ConfigurationError
from millrace.storage import open_store


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "HF_ENDPOINT", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_ENDPOINT_URL"]
)
def test_an_empty_variable_of_a_store_client_is_dropped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    monkeypatch.setenv(f"{name}_SET", "value")
    monkeypatch.setenv("OTHER_EMPTY", "")
    drop_empty_variables()
    assert name not in os.environ
    assert os.environ[f"{name}_SET"] == "value"
    assert os.environ["OTHER_EMPTY"] == ""


def test_an_empty_variable_reads_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANY_NAME", "")
    assert read_variable("ANY_NAME") is None
    assert read_variable("ANY_NAME", {"ANY_NAME": "x"}) == "x"


def test_an_empty_account_of_r2_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2_ACCOUNT_ID", "")
    with pytest.raises(ConfigurationError, match="names no account"):
        open_store("r2://bucket")


def test_an_empty_address_of_ray_means_the_cluster_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = SimpleNamespace(get_ray_address_from_environment=lambda *_: "10.0.0.1:6379")
    ray: Any = SimpleNamespace(_private=SimpleNamespace(services=services))
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster._resolve_address(ray, None) == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster._resolve_address(ray, None) == "10.0.0.2:6379"
