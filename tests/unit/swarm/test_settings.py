"""Settings of a prewarm: the root, which only nodes of a Ray cluster need."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from millrace.errors import ConfigurationError
from millrace.swarm import PrewarmSettings, RayNodes
from millrace.swarm.actor import expand_variables
from millrace.swarm.nodes import connect_agents

HOSTS = {"kind": "hosts", "key": "k" * 16, "hosts": [{"url": "http://10.0.0.1:7000"}]}


def make_settings(**more: Any) -> PrewarmSettings:
    store, requests = {"url": "memory://x"}, [{"key": "a"}]
    return PrewarmSettings.model_validate({"stores": {"s": store}, "requests": requests, **more})


def test_hosts_need_no_root_as_their_agents_have_their_own():
    settings = make_settings(nodes=HOSTS)
    assert settings.root is None
    with connect_agents(settings.nodes, settings.root, lambda node: None) as expected:
        assert expected == 1


def test_a_root_is_absolute_or_in_a_home_folder_or_begins_with_a_variable(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    roots = {"/data": "/data", "~/warm": "/home/me/warm", "$SCRATCH/warm": "/scratch/warm"}
    for root, folder in roots.items():
        assert expand_variables(str(make_settings(root=root).root)) == Path(folder)
    with pytest.raises(ValidationError, match="root warm is a relative path"):
        make_settings(root="warm")


def test_the_nodes_of_a_ray_cluster_need_a_root():
    with pytest.raises(ValidationError, match="root is missing: name the folder on the nodes"):
        make_settings()
    with (
        pytest.raises(ConfigurationError, match="`root` is missing"),
        connect_agents(RayNodes(), None, lambda node: None),
    ):
        pass
