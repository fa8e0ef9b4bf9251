"""The flows shard-dataset and verify-datasets, with credentials from blocks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from prefect.events.filters import EventFilter, EventResourceFilter
from prefect.events.schemas.events import ReceivedEvent as Event
from pydantic import SecretStr

from blocks import HuggingFaceCredentials
from blocks.server_names import UPLOAD_LIMIT
from flows.shard_dataset import shard_dataset
from flows.verify_datasets import verify_datasets
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.rgw import RGW
from tasks.assets import make_asset_key
from tests.oracle import Folder
from tests.prefect_server import PrefectServer, wait_until
from tests.support.flows.fixtures import (
    RUN,
    SHARDING,
    MakeBlock,
    make_jsonl,
    make_texts,
    read_texts,
)


def test_read_only_credentials_are_refused_before_anything_is_read(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    source = rgw.create_bucket(f"{bucket}-source")
    rgw.make_client(rgw.full).put_object(
        Bucket=source, Key="rows.jsonl", Body=make_jsonl(make_texts())
    )
    before = len(rgw.list_requests())

    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source={"bucket": block(source, read=rgw.full)},
        destination=block(bucket, write=rgw.read_only),
    )

    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert state.name == "Failed"
    assert "does not let these credentials create objects" in (state.message or "")
    seen = rgw.list_requests()[before:]
    assert any(f"PUT /{bucket}/words/" in line for line in seen)
    assert not [line for line in seen if f"/{source}" in line]
    assert rgw.make_client(rgw.full).list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_block_without_write_credentials_is_refused(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock,
    folder_source: dict[str, Any],
) -> None:  # fmt: skip
    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=block(bucket, read=rgw.full),
    )
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "write credentials are needed" in (state.message or "")


def test_a_dataset_of_the_hub_is_read_with_a_token_from_a_block(
    prefect_api: PrefectServer, hub: HubServer, tmp_path: Path
) -> None:
    repo, texts = hub.make_repo(dataset=True), make_texts(20)
    HfApi(endpoint=hub.endpoint, token=WRITER).create_commit(
        repo,
        [CommitOperationAdd("train.jsonl", make_jsonl(texts))],
        commit_message="files",
        repo_type="dataset",
    )
    credentials = HuggingFaceCredentials(token=SecretStr(READER), endpoint=hub.endpoint)
    credentials.save("hub-reader")
    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source={
            "url": f"hf://datasets/{repo}",
            "kind": "huggingface",
            "columns": {"txt": "text"},
            "credentials": {"$ref": {"block_document_slug": "hugging-face-credentials/hub-reader"}},
        },
        destination=(tmp_path / "out").as_uri(),
    )
    assert done.code == 0, done.output
    assert read_texts(Folder(tmp_path / "out/words")) == Counter(texts)


def test_verification_finds_a_shard_that_is_gone_and_a_repair_makes_it_again(
    prefect_api: PrefectServer, tmp_path: Path, folder_source: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    made = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=out.as_uri(),
        sharding=SHARDING,
        execution=RUN,
    )
    assert made.code == 0, made.output
    log = prefect_api.read_logs(made.run).splitlines()
    assert any("partitions ended" in line for line in log)
    assert log.count("Finished in state Completed()") == 1, "a line for the run, none for its tasks"
    good = prefect_api.call(verify_datasets, bucket=out.as_uri(), depth="digests")
    assert good.code == 0, good.output
    assert (
        "1 complete dataset, every shard is there"
        in prefect_api.read_artifacts(good.run)["verified-datasets"]
    )

    lost = next(name for name in Folder(out).list_names() if name.endswith(".tar"))
    content = (out / lost).read_bytes()
    (out / lost).unlink()

    bad = prefect_api.call(verify_datasets, bucket=out.as_uri())
    assert bad.code == 1
    assert f"| `{lost}` | missing |" in prefect_api.read_artifacts(bad.run)["verified-datasets"]

    repaired = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=out.as_uri(),
        sharding=SHARDING,
        execution=RUN,
        repair=True,
    )
    assert repaired.code == 0, repaired.output
    assert (out / lost).read_bytes() == content

    above = prefect_api.call(verify_datasets, bucket=out.parent.as_uri())
    assert above.code == 1
    assert "open that URL" in prefect_api.read_artifacts(above.run)["verified-datasets"]


def test_a_repair_holds_one_slot_of_the_limit_on_uploads(
    prefect_api: PrefectServer,
    deployed: PrefectServer,
    tmp_path: Path,
    folder_source: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def count_taken(*_: object) -> None:
        with deployed.make_client() as client:
            found = client.read_global_concurrency_limit_by_name(UPLOAD_LIMIT)
        taken.append(found.active_slots)

    monkeypatch.setattr("flows.shard_dataset.repair_shards", count_taken)
    count_taken()
    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=(tmp_path / "out").as_uri(),
        execution={"workers": 0},
        repair=True,
    )
    assert done.code == 0, done.output
    before, during = taken
    assert during - before == 1


def read_asset_events(server: PrefectServer, key: str) -> list[Event]:
    """Return the events of an asset, once the server has its materialization."""
    query = EventFilter(resource=EventResourceFilter(id=[key]))

    def look() -> list[Event] | None:
        with server.make_client() as client:
            answer = client._client.post(
                "/events/filter", json={"filter": query.model_dump(mode="json"), "limit": 50}
            )
        found = [Event.model_validate(one) for one in answer.raise_for_status().json()["events"]]
        return found or None

    return wait_until(look, f"events of {key}")


def test_a_dataset_is_an_asset_with_its_source_upstream(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    source = rgw.create_bucket(f"{bucket}-source")
    rgw.make_client(rgw.full).put_object(
        Bucket=source, Key="raw/rows.jsonl", Body=make_jsonl(make_texts(50))
    )
    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source={"bucket": block(source, read=rgw.full), "prefix": "raw"},
        destination=block(bucket, write=rgw.full, read=rgw.full),
        sharding=SHARDING,
        execution={"workers": 0},
        card={},
    )
    assert done.code == 0, done.output
    (made,) = read_asset_events(prefect_api, f"s3://{bucket}/words")
    assert made.event == "prefect.asset.materialization.succeeded"
    assert made.resource["prefect.resource.name"] == "words"
    related = {(one.role, one.id) for one in made.related}
    assert ("asset", f"s3://{source}/raw") in related
    assert ("flow-run", f"prefect.flow-run.{done.run}") in related
    manifest = json.loads(
        rgw.make_client(rgw.full)
        .get_object(Bucket=bucket, Key="words/manifest.json")["Body"]
        .read()
    )["record"]
    assert made.payload["plan_digest"] == manifest["plan_digest"]
    assert made.payload["samples"] == {"train": 50}
    (used,) = read_asset_events(prefect_api, f"s3://{source}/raw")
    assert used.event == "prefect.asset.referenced"
    assert made.payload["source_revision"] in used.resource["prefect.asset.description"]
    for secret in (rgw.full.secret_access_key, rgw.full.access_key_id):
        assert secret not in made.model_dump_json() + used.model_dump_json()
    report = next(v for k, v in prefect_api.read_artifacts(done.run).items() if "shards" in k)
    assert f"| Asset | `s3://{bucket}/words` |" in report
    assert rgw.make_client(rgw.full).head_object(Bucket=bucket, Key="words/README.md")


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("s3://bucket/data/words", "s3://bucket/data/words"),
        ("r2://0123/bucket/words", "r2://0123/bucket/words"),
        ("hf://datasets/o/n@0123/data", "hf://datasets/o/n@0123/data"),
        ("file:///srv/words", None),
        ("memory://test/words", None),
        ("https://host/a%20b", None),
        ("s3://bucket/" + "x" * 600, None),
    ],
)
def test_an_asset_has_the_url_as_its_key_or_none(url: str, key: str | None) -> None:
    assert make_asset_key(url) == key


def test_a_source_is_read_from_a_mirror_of_the_form(
    prefect_api: PrefectServer, tmp_path: Path, folder_source: dict[str, Any]
) -> None:
    missing = (tmp_path / "missing").as_uri()
    source = {**folder_source, "url": missing, "mirrors": [{"url": folder_source["url"]}]}
    done = prefect_api.call(
        shard_dataset, dataset="words", source=source, destination=(tmp_path / "out").as_uri()
    )
    assert done.code == 0, done.output
    assert read_texts(Folder(tmp_path / "out")) == Counter(make_texts())
