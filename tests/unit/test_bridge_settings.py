"""Settings files of Train Data Bridge, translated by the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from millrace.cli import main
from millrace.datasets import PipelineSettings
from millrace.datasets.sources import SourceKind
from millrace.rented_sharding import VastFileSettings
from millrace.settings import load_settings

ACCOUNT = "0123456789abcdef0123456789abcdef"
ENVIRONMENT = {
    "R2_DATASET_WRITE_ACCESS_KEY_ID": "key",
    "R2_DATASET_WRITE_SECRET_ACCESS_KEY": "secret",
    "VAST_API_KEY": "vast",
    "HF_TOKEN": "hf",
    "R2_ACCOUNT_ID": ACCOUNT,
    "SAMPLES": "77",
}
SECRETS = ["PLANTED-VAST", "PLANTED-ID", "PLANTED-SECRET", "PLANTED-HF", "PLANTED-OTHER"]
Import = Callable[..., str]


def make_file(**changes: dict[str, Any]) -> dict[str, Any]:
    """Return a file with every setting that Train Data Bridge has."""
    sections: dict[str, dict[str, Any]] = {
        "vast": {
            "api_key": "PLANTED-VAST", "offer_id": 123456, "image": "pytorch/pytorch:2.3.0",
            "storage_gb": 60, "max_price_usd_hour": 1.5, "workdir": "/root/bridge",
            "repo_url": "https://github.com/example/project.git", "repo_ref": "v1",
        },
        "r2": {
            "account_id": ACCOUNT, "access_key_id": "PLANTED-ID",
            "secret_access_key": "PLANTED-SECRET", "bucket": "shards", "region": "auto",
            "prefix": "datasets",
        },
        "pipeline": {
            "name": "WebDataset", "input_uri": "s3://raw/logs/part[1].jsonl",
            "input_format": "jsonl", "samples_per_shard": 500, "staging_dir": "/tmp/bridge",
            "output_format": None, "source_options": {},
        },
    }  # fmt: skip
    return {name: own | changes.get(name, {}) for name, own in sections.items()}


@pytest.fixture
def run(tmp_path: Path) -> Import:
    """Run the command on a file; return its standard output, or standard error if it fails."""

    def run(data: object, *options: str, code: int = 0) -> str:
        path = tmp_path / "bridge.yaml"
        path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        words = ["dataset", "import-settings", str(path), *options]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == code, result.output
        shown = result.stdout + result.stderr
        assert not [secret for secret in SECRETS if secret in shown]
        return result.stderr if code else result.stdout

    return run


def read(tmp_path: Path, text: str) -> PipelineSettings:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_settings(path, PipelineSettings, ENVIRONMENT)


def test_a_file_with_every_setting_becomes_settings_that_load(tmp_path: Path, run: Import) -> None:
    text = run(make_file())
    found = read(tmp_path, text)
    assert found.dataset == "webdataset"
    assert (found.source.url, found.source.kind) == ("s3://raw/logs", SourceKind.JSONL)
    assert found.source.include == ["part[[]1].jsonl"]
    assert found.store.url == f"r2://{ACCOUNT}/shards/datasets"
    assert found.store.credentials is not None
    assert found.store.credentials.access_key_id == "key"
    assert found.store.credentials.secret_access_key.get_secret_value() == "secret"
    assert found.sharding.formats == ["webdataset"]
    assert (found.sharding.shard_samples, found.sharding.seed) == (500, None)
    vast = load_settings(tmp_path / "job.yaml", VastFileSettings, ENVIRONMENT).vast
    assert vast.account.api_key.get_secret_value() == "vast"
    assert (vast.repo_url, vast.repo_ref) == ("https://github.com/example/project.git", "v1")
    assert vast.image == "pytorch/pytorch:2.3.0"
    assert (vast.request.disk, vast.request.max_hourly, vast.request.max_total) == (60e9, 1.5, 1.5)
    comments = [line for line in text.splitlines() if line.startswith("# Left out: ")]
    assert [line.split()[3] for line in comments] == [
        "vast.offer_id.", "vast.workdir.", "r2.region.", "pipeline.staging_dir.",
        "pipeline.output_format.",
    ]  # fmt: skip


def test_a_dataset_of_the_hub_is_read_by_its_configuration_and_split(
    tmp_path: Path, run: Import
) -> None:
    options = {
        "split": "validation", "config": "en",
        "load_kwargs": {"token": "PLANTED-HF", "trust_remote_code": "PLANTED-OTHER"},
    }  # fmt: skip
    pipeline = {"name": "litdata", "input_uri": "hf://laion/laion2B-en",
                "input_format": "huggingface", "source_options": options}  # fmt: skip
    text = run(make_file(pipeline=pipeline), "--prefix", "laion/en")
    found = read(tmp_path, text)
    assert found.dataset == "laion/en"
    assert found.source.url == "hf://datasets/laion/laion2B-en"
    assert found.source.kind == SourceKind.HUGGINGFACE
    assert (found.source.config, found.source.split) == ("en", "validation")
    assert found.source.options["token"].get_secret_value() == "hf"
    assert "# Left out: pipeline.source_options.trust_remote_code." in text


def test_variables_of_a_file_stay_and_those_of_secrets_are_our_own(
    tmp_path: Path, run: Import
) -> None:
    secrets = {"access_key_id": "${R2_ACCESS_KEY_ID}", "secret_access_key": "${R2_SECRET}"}
    text = run(
        make_file(
            vast={"api_key": "${MY_KEY}"},
            r2={"account_id": "${R2_ACCOUNT_ID}", **secrets},
            pipeline={"samples_per_shard": "${SAMPLES}"},
        )
    )
    assert "MY_KEY" not in text
    assert "R2_SECRET}" not in text
    found = read(tmp_path, text)
    assert found.store.url == f"r2://{ACCOUNT}/shards/datasets"
    assert found.sharding.shard_samples == 77
    assert text.startswith(
        "# Set these variables: R2_ACCOUNT_ID, R2_DATASET_WRITE_ACCESS_KEY_ID, "
        "R2_DATASET_WRITE_SECRET_ACCESS_KEY, SAMPLES, VAST_API_KEY.\n"
    )


def test_defaults_old_names_and_unknown_settings(tmp_path: Path, run: Import) -> None:
    data = make_file(r2={"unknown\nline": "PLANTED-OTHER"})
    data["vast"] = {"api_key": "PLANTED-VAST", "offer_id": 1, "image": "x"}
    data["pipeline"] = {"name": "litdata", "input_uri": "data/rows.jsonl.gz", "shards": 9}
    text = run(data)
    found = read(tmp_path, text)
    assert found.source.url == (Path.cwd() / "data").as_uri()
    assert found.source.include == ["rows.jsonl.gz"]
    assert found.sharding.shard_samples == 9
    assert "# Left out: vast. Machines are rented only if `repo_url` is set.\n" in text
    assert "# Left out: r2.unknown line. Train Data Bridge has no such setting.\n" in text
    del data["pipeline"]["shards"]
    assert read(tmp_path, run(data)).sharding.shard_samples == 2048


def test_the_result_for_programs(run: Import) -> None:
    found = json.loads(run(make_file(), "--json"))
    assert found["settings"]["sharding"]["shard_samples"] == 500
    assert found["left_out"][0]["name"] == "vast.offer_id"
    assert "VAST_API_KEY" in found["variables"]


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bridge.toml"
    path.write_text(
        f'[r2]\naccount_id = "{ACCOUNT}"\naccess_key_id = "a"\nsecret_access_key = "b"\n'
        'bucket = "c"\n[pipeline]\nname = "webdataset"\ninput_uri = "https://host/a.jsonl"\n'
    )
    result = CliRunner().invoke(main, ["dataset", "import-settings", str(path)])
    assert result.exit_code == 0, result.output
    assert read(tmp_path, result.stdout).source.url == "https://host/a.jsonl"


def test_a_path_may_begin_with_a_variable(
    tmp_path: Path, run: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "DATA", "/data")
    found = read(tmp_path, run(make_file(pipeline={"input_uri": "${DATA}/raw/a.jsonl"})))
    assert (found.source.url, found.source.include) == ("/data/raw", ["a.jsonl"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": {"name": "parquet"}}, "pipeline.name: Input should be 'webdataset' or"),
        ({"pipeline": {"samples_per_shard": 0}}, "sharding.shard_samples"),
        ({"pipeline": {"input_uri": "r2://raw/a.jsonl"}}, "url: r2://ACCOUNT/BUCKET/PREFIX"),
        ({"pipeline": {"input_uri": "hdfs://host/a.jsonl"}}, "url: s3://BUCKET/PREFIX"),
        ({"pipeline": {"input_uri": "s3://PLANTED-ID:PLANTED-SECRET@raw/a"}}, "credentials or a"),
        ({"pipeline": {"input_uri": "https://h/a?sig=PLANTED-OTHER"}}, "a query in it"),
        ({"pipeline": {"input_uri": "s3://raw/a.jsonl.bz2"}}, "write `source: {url: ...}`"),
        ({"pipeline": {"input_uri": "${INPUT}"}}, "url: FOLDER, include"),
        ({"pipeline": {"input_uri": "/data/${1}/a"}}, "a variable of another form"),
        (
            {"pipeline": {"input_format": "huggingface"}},
            "url: hf://datasets/OWNER/NAME, kind: huggingface",
        ),
        ({"vast": {"repo_url": "https://PLANTED-OTHER@host/x.git"}}, "clone public repositories"),
        ({"r2": {"bucket": ["PLANTED-OTHER"]}}, "r2.bucket: Input should be a valid string"),
        ({"vast": {"storage_gb": 1}}, "vast.request.disk"),
    ],
)
def test_a_setting_without_an_equivalent_is_refused_with_the_line_to_write(
    run: Import, changes: dict[str, Any], message: str
) -> None:
    assert message.lower() in run(make_file(**changes), code=2).lower()


@pytest.mark.parametrize("name", ["data_files", "data_dir", "revision"])
def test_arguments_that_choose_other_rows_are_refused(run: Import, name: str) -> None:
    pipeline = {
        "input_uri": "hf://a/b", "input_format": "huggingface",
        "source_options": {"load_kwargs": {name: "PLANTED-OTHER"}},
    }  # fmt: skip
    assert "chooses other rows. Write `source:" in run(make_file(pipeline=pipeline), code=2)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "vast: 1", "pipeline: PLANTED-OTHER"])
def test_a_file_that_is_no_settings_file_is_refused(run: Import, text: str) -> None:
    assert "bridge.yaml" in run(text, code=2)
