"""The files below deployments/ say the same as the code that they deploy."""

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prefect.automations import Automation
from prefect.events import AutomationCore
from prefect.settings.models.worker import WorkerWebserverSettings

from blocks.bucket import BucketRole
from blocks.environment import BUCKET_LIST_VARIABLE, read_buckets
from blocks.server_names import TAG, WORK_POOL
from millrace.errors import ConfigurationError
from millrace.storage import Right
from millrace.testing.process import REPOSITORY

HERE = REPOSITORY / "deployments"
EXAMPLE = REPOSITORY / ".env.example"
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
DOCKERFILE = (HERE / "Dockerfile").read_text()
SECRETS = {
    "POSTGRES_PASSWORD": "of-the-database",
    "PREFECT_API_AUTH_STRING": "admin:of-the-server",
    "PREFECT_SERVER_ENCRYPTION_KEY": "of-the-blocks",
}


def found(pattern: str, text: str) -> list[Any]:
    """All that fits, where ^ and $ stand for a line's begin and end."""
    return re.findall(pattern, text, re.MULTILINE)


def read(path: str) -> str:
    return (REPOSITORY / path).read_text()


def compose(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Ask Docker Compose itself, which needs no Docker to read a file."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "docker-compose"), "--env-file", str(EXAMPLE),
         "--file", str(HERE / "compose.yaml"), "--profile", "*", "config", *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    said = compose("--format", "json", **SECRETS)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)["services"]


def named_in_example() -> set[str]:
    """Every variable of the example; optional ones are comments."""
    return set(found(r"^(?:# )?([A-Z]\w+)=", EXAMPLE.read_text()))


def set_in_example() -> set[str]:
    return set(found(r"^(\w+)=", EXAMPLE.read_text()))


def read_for_buckets() -> set[str]:
    """Return what `millrace setup` reports as missing, if all is missing."""
    with pytest.raises(ConfigurationError) as refused:
        read_buckets({}, BucketRole, Right)
    return set(found(r"^  (\w+):", str(refused.value)))


def read_by_setup() -> set[str]:
    code = read("blocks/setup.py") + read("blocks/environment.py")
    named = found(r'environ\.get\("(\w+)"', code) + found(r'^_NOTIFY_VARIABLE = "(\w+)"', code)
    return {*read_for_buckets(), BUCKET_LIST_VARIABLE, *named}


def extras_of(text: str) -> list[str]:
    (listed,) = found(r"EXTRAS[=:][^\n]*?\b((?:\w+,)+\w+)", text)
    return listed.split(",")


# .env.example


def test_env_example_is_the_same_to_a_shell_and_to_compose() -> None:
    shell = subprocess.run(
        ["bash", "-euac", f'. "{EXAMPLE}"; exec env --null'],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    by_shell = dict(line.split("=", 1) for line in shell.stdout.split("\0") if line)
    said = compose("--environment", **SECRETS)
    by_compose = dict(line.split("=", 1) for line in said.stdout.splitlines() if "=" in line)
    names = set_in_example() - set(SECRETS)
    assert {name: by_compose[name] for name in names} == {name: by_shell[name] for name in names}


def test_env_example_names_all_that_setup_reads() -> None:
    assert read_by_setup() <= named_in_example()


def test_env_example_as_it_is_sets_nothing_that_prefect_or_boto3_takes_empty() -> None:
    empty = set(found(r"^(\w+)=$", EXAMPLE.read_text()))
    assert [
        name for name in empty if not re.match(r"R2_(DATASET|GRADIENTS|AGGREGATOR)_", name)
    ] == []


# compose.yaml


def test_compose_reads_nothing_that_env_example_does_not_name() -> None:
    text = (HERE / "compose.yaml").read_text()
    names = found(r"\$\{(\w+)", text) + found(r"^      ([A-Z]\w+):$", text)
    assert set(names) - named_in_example() == set()


@pytest.mark.parametrize("name", SECRETS)
def test_compose_refuses_to_do_without_a_secret(name: str) -> None:
    said = compose(**{other: value for other, value in SECRETS.items() if other != name})
    assert said.returncode != 0
    assert re.search(rf"required variable {name} is missing a value: \w.*\w", said.stderr)


def test_no_secret_stands_in_compose(services: dict[str, dict[str, Any]]) -> None:
    secret = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|_KEY")
    for service in services.values():
        for name, value in service["environment"].items():
            if secret.search(name):
                assert value in {None, "", *SECRETS.values()}, name


def test_only_this_machine_reaches_a_port(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert "ports" not in services["database"]
    assert set(services["worker"]["networks"]) == {"default"}


def test_the_server_asks_for_the_password_that_its_clients_give(
    services: dict[str, dict[str, Any]],
) -> None:
    asked = services["server"]["environment"]["PREFECT_SERVER_API_AUTH_STRING"]
    for client in ("setup", "worker"):
        assert services[client]["environment"]["PREFECT_API_AUTH_STRING"] == asked


def test_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        image, _, tag = service["image"].partition(":")
        assert "build" in service or re.match(r"\d+\.\d+", tag), name
        assert "build" not in service or image == "millrace"
    assert found(r"^FROM (\S+)", DOCKERFILE) == ["python:3.12-slim-bookworm"]
    assert "Programming Language :: Python :: 3.12" in PROJECT["classifiers"]


def test_the_server_is_of_the_version_that_was_tested(services: dict[str, dict[str, Any]]) -> None:
    (tested,) = found(r"^prefect==(\S+)", read("constraints.txt"))
    assert services["server"]["image"].startswith(f"prefecthq/prefect:{tested}-python")


def test_setup_gets_all_that_it_reads_and_the_worker_none_of_it(
    services: dict[str, dict[str, Any]],
) -> None:
    own = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "DO_NOT_TRACK"}
    assert set(services["setup"]["environment"]) - own == read_by_setup()
    assert set(services["worker"]["environment"]) == own


# Dockerfile


def test_the_image_has_extras_that_there_are(services: dict[str, dict[str, Any]]) -> None:
    wanted = extras_of(DOCKERFILE)
    assert set(wanted) <= set(PROJECT["optional-dependencies"])
    assert wanted == extras_of(EXAMPLE.read_text())
    assert wanted == extras_of((HERE / "compose.yaml").read_text())
    assert ",".join(wanted) == services["worker"]["build"]["args"]["EXTRAS"]


def test_the_image_is_made_of_what_there_is() -> None:
    kept = found(r"^!(\S+)", (HERE / "Dockerfile.dockerignore").read_text())
    copied = [name for line in found(r"^COPY (.+) \S+$", DOCKERFILE)
              for name in line.split()]  # fmt: skip
    assert sorted(copied) == sorted(kept)
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
    packages = SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in packages} <= set(copied)


def test_the_worker_takes_from_our_pool_and_is_asked_where_it_answers() -> None:
    (command,) = found(r"^CMD (.+)$", DOCKERFILE)
    assert json.loads(command)[:5] == ["prefect", "worker", "start", "--pool", WORK_POOL]
    assert "--with-healthcheck" in command
    assert f"http://127.0.0.1:{WorkerWebserverSettings().port}/health" in DOCKERFILE
    assert found(r"^USER (\d+)$", DOCKERFILE) == ["10001"]


def test_what_setup_runs_is_in_the_image(services: dict[str, dict[str, Any]]) -> None:
    said = " ".join(services["setup"]["command"])
    assert re.search(r"\bmillrace setup .*&& millrace deploy$", said)
    assert "millrace" in PROJECT["scripts"]
    assert {"setup", "deploy"} <= set(PROJECT["entry-points"]["millrace.commands"])
    for deployment in yaml.safe_load(read("prefect.yaml"))["deployments"]:
        module, _, flow = deployment["entrypoint"].rpartition(".")
        assert found(rf"^(?:async )?def {flow}\(", read(f"{module.replace('.', '/')}.py"))


# automations/


@pytest.mark.parametrize("name", sorted(path.name for path in (HERE / "automations").iterdir()))
def test_an_automation_is_one_that_prefect_takes(name: str) -> None:
    path = HERE / "automations" / name
    data = yaml.safe_load(path.read_text())
    core = AutomationCore.model_validate(data)  # as `prefect automation create --from-file` does
    Automation.model_validate(data)
    assert core.name == f"millrace-{path.stem}"
    assert core.name not in read("blocks/setup.py")
    assert f"prefect.tag.{TAG}" in path.read_text()


# infra/


def test_terraform_renders_all_that_setup_reads_for_buckets() -> None:
    outputs = read("deployments/infra/terraform/outputs.tf")
    templates = found(r'"(R2_\$\{upper\(role\)\}_\w+)"', outputs)
    rendered = {
        name.replace("${upper(role)}", role.upper()) for name in templates for role in BucketRole
    }
    assert rendered == read_for_buckets()


def test_terraform_knows_the_roles_rights_and_jurisdictions() -> None:
    variables = read("deployments/infra/terraform/variables.tf")
    main = read("deployments/infra/terraform/main.tf")
    assert set(found(r"(\w+) += optional\(string", variables)) == set(BucketRole)
    groups = found(r'^    (\w+) += "Workers R2 Storage Bucket Item (\w+)"', main)
    assert groups == [(right.value, right.value.capitalize()) for right in Right]
    (known,) = found(r"contains\((\[.+?\]), var.jurisdiction", variables)
    for jurisdiction in json.loads(known):
        account = "0" * 32 + ("" if jurisdiction == "default" else f".{jurisdiction}")
        given = dict.fromkeys(read_for_buckets(), "x")
        given |= {name: account for name in given if name.endswith("_ACCOUNT_ID")}
        assert {bucket.account_id for bucket in read_buckets(given, BucketRole, Right)} == {account}


def test_terraform_shows_no_secret_and_pins_its_provider() -> None:
    text = read("deployments/infra/terraform/outputs.tf")
    outputs = re.split(r"^output ", text, flags=re.MULTILINE)[1:]
    assert len(outputs) == 3
    assert all(found(r"^  sensitive +=\s+true$", each) for each in outputs)
    assert re.search(r'version = "~> \d+\.\d+"', read("deployments/infra/terraform/versions.tf"))


def test_ansible_brings_secrets_so_that_only_root_reads_them() -> None:
    (play,) = yaml.safe_load((HERE / "infra/ansible/site.yaml").read_text())
    (task,) = [task for task in play["tasks"] if "millrace_env_file" in str(task)]
    assert task["no_log"] is True
    assert task["ansible.builtin.copy"]["mode"] == "0600"
    assert play["vars"]["millrace_compose"][-1] == (
        "{{ millrace_home }}/current/deployments/compose.yaml"
    )


def test_the_readme_names_files_that_there_are() -> None:
    named = found(r"`([\w./-]+/[\w./-]*|[\w.-]+\.(?:yaml|sh|tf))`", read("deployments/README.md"))
    assert named
    assert [
        name for name in named if not ((HERE / name).exists() or (REPOSITORY / name).exists())
    ] == []


def test_every_requirement_is_held_at_the_tested_version() -> None:
    required = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    names = {canonicalize_name(Requirement(one).name) for one in required}
    held = {canonicalize_name(one) for one in found(r"^([\w.-]+)==", read("constraints.txt"))}
    assert names - held == {"millrace", "setuptools"}  # the latter only builds
