"""A dataset is sharded on rented machines: what they are sent, and what they may reach."""

import json
import re
import secrets
import shutil
import ssl
import sysconfig
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner
from pyarrow import parquet
from pydantic import SecretStr
from tokenizers import Tokenizer

from millrace import errors, rented_sharding
from millrace.cli import main
from millrace.datasets import PipelineSettings, shard_dataset
from millrace.datasets.progress_events import PartitionEnded, PlanCommitted, ShardCommitted
from millrace.datasets.transforms import bundle_files
from millrace.keys.leases import LeaseKeys
from millrace.lease import Heartbeat, Holder, Lease, StoreClock, acquire
from millrace.progress import Event
from millrace.rentals import RentalSettings
from millrace.rentals.progress_events import (
    MachineReady,
    MachineReleased,
    MachineRented,
    RentalCostUpdated,
)
from millrace.rented_sharding import VastSettings, make_sharding_rental, run_pipeline
from millrace.schemas.rental import ReleaseReason
from millrace.settings import load_settings
from millrace.storage import Right, StoreSpec, open_store, put
from millrace.storage import read as read_object
from millrace.testing.rgw import RGW
from millrace.testing.tls import make_certificates
from millrace.testing.vast import VastServer
from tests.support.rentals.parts import HOUR, START, make_attempt, receive_program
from tests.support.transforms import train_tokenizer
from tests.support.web import Site, serve

STORE = {
    "url": "s3://bucket/below",
    "endpoint": "http://127.0.0.1:9",
    "credentials": {"access_key_id": "parent", "secret_access_key": "of all secrets"},
}
VAST = VastSettings.model_validate(
    {
        "account": {"api_key": "the account's"},
        "request": {"max_hourly": 1.0, "max_total": 5.0},
        "repo_url": "https://example.org/millrace",
        "machines": 3,
    }
)


def settings(**more: Any) -> PipelineSettings:
    source = {"include": ["*.jsonl"], **STORE, "url": "s3://bucket/below/raw/words"}
    return PipelineSettings.model_validate(
        {"dataset": "words", "source": source, "store": STORE, "sharding": {"seed": 7}, **more}
    )


def test_machines_are_sent_the_mirrors_that_they_can_read() -> None:
    source = {**STORE, "url": "s3://bucket/below/raw/words"}
    near = {**STORE, "url": "s3://bucket/below/copy"}
    public = {"url": "hf://datasets/owner/words"}
    rent = make_sharding_rental(settings(source={**source, "mirrors": [near, public]}), VAST)
    assert {one.prefix for one in rent.storage_grants} == {"raw/words/", "words/", "copy/"}
    (text,) = rent.program.files.values()
    first, second = yaml.safe_load(text)["source"]["mirrors"]
    assert (first["url"], second) == ("${MILLRACE_STORE}/copy", public)
    assert "secrets" not in text
    for refused in (
        {**STORE, "url": "s3://another/words"}, {"url": "/folder"},
        {"url": "https://host/words", "options": {"Authorization": "a secret"}},
    ):  # fmt: skip
        with pytest.raises(errors.ConfigurationError, match="cannot read the mirror"):
            make_sharding_rental(
                settings(source={**source, "paths": ["a.jsonl"], "mirrors": [refused]}), VAST
            )


def test_machines_are_sent_settings_without_a_secret_that_they_can_read(tmp_path: Path) -> None:
    rent = make_sharding_rental(settings(), VAST)
    assert (rent.name, rent.machines, rent.program.command[:2]) == (
        "shard/words", 3, ("millrace", "run"),
    )  # fmt: skip
    assert {(one.prefix, one.access) for one in rent.storage_grants} == {
        ("raw/words/", Right.READ), ("words/", Right.WRITE),
    }  # fmt: skip
    (text,) = rent.program.files.values()
    assert "secrets" not in text
    assert "account" not in text
    (tmp_path / "sent.yaml").write_text(text)
    there = {"MILLRACE_STORE": "s3://bucket/below"}
    for right in ("READ", "WRITE"):
        there |= {
            f"MILLRACE_{right}_{name}": f"{right} {name}"
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
        }
    read = load_settings(tmp_path / "sent.yaml", PipelineSettings, there)
    assert (read.dataset, read.sharding, read.execution) == (
        "words",
        settings().sharding,
        settings().execution,
    )
    assert read.store.url == STORE["url"]
    assert read.source.store.url == "s3://bucket/below/raw/words"
    assert read.source.store.credentials
    assert read.source.store.credentials.access_key_id == "READ ACCESS_KEY_ID"
    assert read.store.credentials
    assert read.store.credentials.session_token == SecretStr("WRITE SESSION_TOKEN")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"url": "file:///raw"}, "cannot read the source file:///raw: copy it into a bucket"),
        ({"url": "s3://another/raw"}, "for s3://another/raw: write those of the source"),
        (
            {"url": "hf://datasets/one/two", "options": {"token": "hf_secret"}},
            "The source hf://datasets/one/two has options, such as a token",
        ),
        (
            {"url": "https://host/raw", "options": {"Authorization": "Bearer secret"}},
            "The source https://host/raw has options, such as a token",
        ),
        (
            {**STORE, "url": "s3://bucket/below/_raw/words"},
            "get no access to s3://bucket/below/_raw/words: its folder",
        ),
    ],
)
def test_a_source_that_machines_could_not_read_or_would_betray_is_refused(
    source: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if source["url"].startswith("file://"):
        source["url"] = tmp_path.as_uri()
        said = said.replace("file:///raw", tmp_path.as_uri())
    with pytest.raises(errors.ConfigurationError) as refused:
        make_sharding_rental(settings(source=source), VAST)
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_function_that_imports_a_module_beside_its_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "clean.py").write_text("import json, beside\n\ndef clean(sample): ...\n")
    step = {"kind": "function", "function": f"{tmp_path}/clean.py:clean"}
    with pytest.raises(errors.ConfigurationError, match=r"clean\.py imports beside from its folde"):
        make_sharding_rental(settings(sharding={"transforms": [step]}), VAST)


def test_a_dataset_whose_name_no_rental_may_have_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="name 'shard/crawl/000123' has the part"):
        make_sharding_rental(settings(dataset="crawl/000123"), VAST)


def test_a_run_on_a_ray_cluster_is_not_rented() -> None:
    with pytest.raises(errors.ConfigurationError, match="no nodes of a Ray cluster"):
        make_sharding_rental(settings(execution={"ray": "auto"}), VAST)


def receive(rent: RentalSettings, folder: Path) -> tuple[str, PipelineSettings]:
    """Receive settings and files as a machine does; return the text, and the settings it loads."""
    environment = receive_program(rent, folder, make_attempt(deadline=START + HOUR))
    path = folder / rent.program.command[-1]
    return path.read_text(), load_settings(path, PipelineSettings, environment)


def test_machines_shard_from_a_web_server_with_a_token_and_with_the_files_of_transforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "clean.py").write_text(
        "def clean(sample):\n    slot = ''\n"
        "    return {**sample, 'txt': f\"{slot}{sample['txt'].upper()}\"}\n"
    )
    (code / "tokenizer.json").write_bytes(train_tokenizer())
    transforms = [
        {"kind": "function", "function": f"{code}/clean.py:clean"},
        {"kind": "tokenize", "tokenizer": f"{code}/tokenizer.json"},
    ]
    with serve(Site(token="Bearer of secrets")) as site:
        site.files = {"/data/a.jsonl": b'{"${text}": "one"}\n{"${text}": "two"}\n'}
        source = {
            "url": f"{site.url}/data",
            "paths": ["a.jsonl"],
            "columns": {"txt": "${text}"},
            "allow_private": True,
            "options": {"Authorization": "Bearer of secrets"},
        }
        rent = make_sharding_rental(
            settings(
                source=source,
                store={"url": (tmp_path / "store").as_uri()},
                sharding={
                    "formats": ["tokens"],
                    "types": {"tokens": "uint16[]"},
                    "transforms": transforms,
                },
                execution={"workers": 0},
            ),
            VAST.model_copy(update={"share_source_options": True}),
        )
        (code / "clean.py").unlink()  # the machine has other folders
        (code / "tokenizer.json").unlink()
        text, read = receive(rent, tmp_path / "machine")
        assert "secrets" not in text
        monkeypatch.chdir(tmp_path / "machine")
        report = shard_dataset(read)
    assert report.samples == 2
    tokenizer = Tokenizer.from_str(train_tokenizer().decode())
    (shard,) = report.manifest.shards
    tokens = np.load(tmp_path / "store" / shard.key).tolist()
    assert sorted(tokens) == sorted(
        token for word in ("ONE", "TWO") for token in tokenizer.encode(word).ids
    )


def test_machines_trust_the_authorities_of_a_web_server_that_this_machine_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with serve(Site(files={"/data/a.jsonl": b'{"text": "one"}\n'}), context) as site:
        source = {
            "url": f"{site.url}/data",
            "paths": ["a.jsonl"],
            "allow_private": True,
            "ca_file": str(made.ca),
        }
        config = settings(
            source=source,
            store={"url": (tmp_path / "store").as_uri()},
            execution={"workers": 0},
        )
        rent = make_sharding_rental(config, VAST)
        made.ca.unlink()  # the machine has other folders
        _, read = receive(rent, tmp_path / "machine")
        monkeypatch.chdir(tmp_path / "machine")
        assert shard_dataset(read).samples == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "has no certificates in PEM"),
        (b"-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n", "has a private key"),
    ],
)
def test_a_ca_file_without_certificates_or_with_a_key_is_not_sent(
    text: bytes | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_bytes(text)
    source = {"url": "https://host/raw", "ca_file": str(path)}
    with pytest.raises(errors.ConfigurationError, match=said):
        make_sharding_rental(settings(source=source), VAST)


def test_machines_read_a_prefix_of_another_bucket_and_nothing_else_of_it(
    rgw: RGW, bucket: str, tmp_path: Path
) -> None:
    full = rgw.make_client(rgw.full)
    other = f"other-{secrets.token_hex(4)}"
    full.create_bucket(Bucket=other)
    full.put_object(Bucket=other, Key="raw/words/a.jsonl", Body=b'{"text": "one"}\n')
    full.put_object(Bucket=other, Key="raw/secret.jsonl", Body=b"{}")
    there = {
        "endpoint": rgw.endpoint,
        "credentials": {
            "access_key_id": rgw.full.access_key_id,
            "secret_access_key": rgw.full.secret_access_key,
        },
    }
    rent = make_sharding_rental(
        settings(
            source={**there, "url": f"s3://{other}/raw/words"},
            store={**there, "url": f"s3://{bucket}"},
            execution={"workers": 0},
        ),
        VAST.model_copy(update={"role_arn": rgw.create_role(f"rent-{secrets.token_hex(4)}")}),
    )
    text, read = receive(rent, tmp_path)
    assert rgw.full.secret_access_key not in text
    assert shard_dataset(read).samples == 1
    source = open_store(read.source.store)
    with pytest.raises(errors.DeniedError):
        put(source, "b.jsonl", b"{}")
    beside = read.source.store.model_copy(update={"url": f"s3://{other}/raw"})
    with pytest.raises(errors.DeniedError):
        read_object(open_store(beside), "secret.jsonl")


def test_a_whole_bucket_is_no_source_for_machines(tmp_path: Path) -> None:
    rent = make_sharding_rental(settings(source={**STORE, "url": "s3://another"}), VAST)
    with pytest.raises(errors.ConfigurationError, match="s3://another is a whole bucket"):
        receive(rent.model_copy(update={"store": StoreSpec(url=tmp_path.as_uri())}), tmp_path)


def write_rented_dataset(
    vast: VastServer, repository: Path, folder: Path, **world: Any
) -> tuple[Path, dict[str, Any]]:
    """Write a source and a settings file with real machines; return the file and the settings."""
    real = {"real": True, "rate": 1.0, "strict": False, "image": sysconfig.get_path("purelib")}
    key = vast.reset(**real | world)
    (folder / "store/raw").mkdir(parents=True)
    rows = b"".join(json.dumps({"text": f"row {number}"}).encode() + b"\n" for number in range(500))
    (folder / "store/raw/a.jsonl").write_bytes(rows)
    store = (folder / "store").as_uri()
    section = VAST.model_dump(mode="json", exclude_defaults=True)
    section |= {
        "account": {"api_key": key, "server_url": vast.url},
        "machines": 1,
        "repo_url": repository.as_uri(),
        "timeouts": {"poll_interval": "1s"},
    }
    data = {
        "dataset": "words",
        "source": {"url": f"{store}/raw"},
        "store": {"url": store},
        "sharding": {"shard_bytes": 10240, "partition_bytes": 4096},
        "execution": {"workers": 1},
        "vast": section,
    }
    path = folder / "millrace.yaml"
    path.write_text(yaml.safe_dump(data))
    return path, data


def read_shards(folder: Path) -> dict[str, bytes]:
    """Return the shards of a dataset, by their names."""
    return {one.name: one.read_bytes() for one in folder.glob("words/shards/**/*.tar")}


def shard_here(data: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """Shard the same source on this machine, and return the shards."""
    here = {name: value for name, value in data.items() if name != "vast"}
    run_pipeline(
        PipelineSettings.model_validate(here | {"store": {"url": (folder / "here").as_uri()}})
    )
    return read_shards(folder / "here")


def test_run_use_vast_rents_and_gives_back(
    vast: VastServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The handlers would replace pytest's own.
    monkeypatch.setattr("millrace.cli.machine.interrupt_on_signal", lambda _: None)
    path, data = write_rented_dataset(vast, repository, tmp_path)
    planned = CliRunner().invoke(main, ["plan", str(path), "--use-vast"])
    assert planned.exit_code == 0, planned.output
    assert "1 x RTX 4090" in planned.output
    refused = CliRunner().invoke(main, ["run", str(path), "--use-vast"], input="n\n")
    assert refused.exit_code == 1
    assert "Rent 1 machine for shard/words, for at most $5.00 in all?" in refused.stderr
    unanswered = CliRunner().invoke(main, ["run", str(path), "--use-vast"])
    assert (unanswered.exit_code, "Add --yes" in unanswered.stderr) == (2, True)
    assert vast.list_machines() == []
    done = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--yes"])
    assert done.exit_code == 0, done.output
    assert "shard/words/0: released (done: the program ended with exit code 0)" in done.output
    assert "500 samples in " in done.output
    assert "All is released. It has cost about $" in done.output
    assert vast.list_alive() == []
    assert read_shards(tmp_path / "store") == shard_here(data, tmp_path)
    again = CliRunner().invoke(main, ["run", str(path), "--use-vast"])
    assert (again.exit_code, len(vast.list_machines())) == (0, 1)
    assert "is complete already" in again.output
    unmended = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--repair"])
    assert (unmended.exit_code, vast.list_alive()) == (2, [])
    assert "Shard with --use-vast first, then run --repair alone" in unmended.output
    vast.reset()
    path.write_text(yaml.safe_dump({name: data[name] for name in data if name != "vast"}))
    for command in ("plan", "run"):
        refused = CliRunner().invoke(main, [command, str(path), "--use-vast"])
        assert refused.exit_code == 2
        assert "vast: Field required" in refused.output


@pytest.mark.soak
def test_a_dataset_that_was_deleted_is_made_again_on_another_machine(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, data = write_rented_dataset(vast, repository, tmp_path)
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)

    first = run_pipeline(path, use_vast=True, progress=note)
    shutil.rmtree(tmp_path / "store/words")
    again = run_pipeline(str(path), use_vast=True)
    books = vast.list_machines()
    vast.reset()
    assert [one["destroyed"] is not None for one in books] == [True, True]
    assert read_shards(tmp_path / "store") == shard_here(data, tmp_path)
    assert (first.samples, first.new_samples, again.new_samples) == (500, 500, 500)
    assert again.manifest == first.manifest
    assert first.dollars
    assert again.dollars
    assert again.dollars > first.dollars > 0  # of both machines
    planned = next(one for one in events if isinstance(one, PlanCommitted))
    assert planned.partitions == first.partitions
    committed = [one for one in events if isinstance(one, ShardCommitted)]
    assert sum(len(one.keys) for one in committed) == first.new_shards
    assert sum(isinstance(one, PartitionEnded) for one in events) == first.partitions


def test_settings_that_the_machines_would_refuse_rent_nothing(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, data = write_rented_dataset(vast, repository, tmp_path, rate=100.0, real=False)
    (tmp_path / "store/raw/a.jsonl").rename(tmp_path / "a.jsonl")
    with pytest.raises(errors.NotFoundError, match="has no files that match"):
        run_pipeline(path, use_vast=True)
    (tmp_path / "a.jsonl").rename(tmp_path / "store/raw/a.jsonl")
    run_pipeline(path)
    (tmp_path / "store/words/manifest.json").unlink()  # begun with other settings
    data["sharding"]["shard_bytes"] = 20480
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(errors.ConfigurationError, match="shard_bytes"):
        run_pipeline(path, use_vast=True)
    assert vast.list_machines() == []
    vast.reset()


def test_programs_that_end_without_the_dataset_are_an_error(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, _ = write_rented_dataset(vast, repository, tmp_path, rate=100.0, real=False, program=10.0)
    with pytest.raises(errors.MachineError, match="words is not complete: check `repo_url`"):
        run_pipeline(path, use_vast=True)
    assert (vast.list_alive(), len(vast.list_machines())) == ([], 1)
    vast.reset()


def test_a_program_that_hangs_after_the_dataset_is_complete_is_not_waited_for(
    vast: VastServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rented_sharding, "_EXIT_TIMEOUT", timedelta(0))
    path, data = write_rented_dataset(vast, repository, tmp_path, rate=100.0, real=False)
    here = PipelineSettings.model_validate({name: data[name] for name in data if name != "vast"})
    events: list[Event] = []

    def complete_dataset(event: Event) -> None:
        events.append(event)
        if isinstance(event, MachineReady):
            shard_dataset(here)

    report = run_pipeline(path, use_vast=True, progress=complete_dataset)
    assert report.samples == 500
    (released,) = (one for one in events if isinstance(one, MachineReleased))
    assert released.reason is ReleaseReason.UNNEEDED
    assert vast.list_alive() == []
    vast.reset()


def test_a_machine_finds_a_table_of_parquet_in_the_dataset(
    vast: VastServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rented_sharding, "_EXIT_TIMEOUT", timedelta(0))
    path, data = write_rented_dataset(vast, repository, tmp_path, rate=100.0, real=False)
    texts = [f"row {number}" for number in range(500)]
    parquet.write_table(pa.table({"text": texts, "length": texts}), tmp_path / "m.parquet")
    join = {"kind": "join", "table": f"{tmp_path}/m.parquet", "column": "text", "field": "txt"}
    data["source"]["columns"] = {"txt": "text"}
    data["sharding"]["transforms"] = [join]
    path.write_text(yaml.safe_dump(data))
    config = load_settings(path, PipelineSettings)
    steps, texts_to_send = bundle_files(config.sharding.transforms)
    assert not texts_to_send
    sharding = config.sharding.model_copy(update={"transforms": steps})
    there = config.model_copy(update={"sharding": sharding})
    (tmp_path / "machine").mkdir()
    monkeypatch.chdir(tmp_path / "machine")

    def shard_as_machine(event: Event) -> None:
        if isinstance(event, MachineReady):
            shard_dataset(there)

    report = run_pipeline(path, use_vast=True, progress=shard_as_machine)
    assert report.samples == 500
    assert vast.list_alive() == []
    vast.reset()


def test_machines_that_fail_beside_a_complete_dataset_are_a_warning(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, data = write_rented_dataset(
        vast, repository, tmp_path, rate=100.0, real=False, program=100.0, fates={"failing": 1.0}
    )
    here = PipelineSettings.model_validate({name: data[name] for name in data if name != "vast"})

    def complete_dataset(event: Event) -> None:
        if isinstance(event, MachineRented):
            shard_dataset(here)

    report = run_pipeline(path, use_vast=True, progress=complete_dataset)
    assert report.samples == 500
    assert report.dollars
    (warning,) = report.warnings
    assert warning.startswith("No other run is needed, though the machines ended so: ")
    assert "exit code 1" in warning
    assert vast.list_alive() == []
    vast.reset()


def test_no_more_machines_are_rented_than_partitions_are_open(
    vast: VastServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cli.machine.interrupt_on_signal", lambda _: None)
    path, data = write_rented_dataset(
        vast, repository, tmp_path, rate=100.0, real=False, program=10.0
    )
    data["vast"]["machines"] = 8
    path.write_text(yaml.safe_dump(data))
    here = {name: data[name] for name in data if name != "vast"} | {"execution": {"workers": 0}}

    def stop_after_a_partition(event: Event) -> None:
        if isinstance(event, PartitionEnded):
            raise errors.WorkerError("stop")

    planned = CliRunner().invoke(main, ["plan", str(path), "--use-vast"])
    said = "shard/words rents {}, not 8: a machine works on whole partitions, and {} of "
    assert said.format("2 machines", "2 partitions") in planned.output.replace("\n", " ")
    with pytest.raises(errors.WorkerError):
        shard_dataset(PipelineSettings.model_validate(here), progress=stop_after_a_partition)
    refused = CliRunner().invoke(main, ["run", str(path), "--use-vast"], input="n\n")
    assert said.format("1 machine", "1 partition") in refused.output.replace("\n", " ")
    assert "Rent 1 machine for shard/words" in refused.stderr
    needed: set[int] = set()

    def note_machines(event: Event) -> None:
        if isinstance(event, RentalCostUpdated):
            needed.add(event.machines)

    with pytest.raises(errors.MachineError, match="is not complete"):
        run_pipeline(path, use_vast=True, progress=note_machines)
    assert (len(vast.list_machines()), needed) == (1, {1})
    vast.reset()


def test_a_machine_for_which_no_partition_is_left_ends_and_the_first_machine_takes_over(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, data = write_rented_dataset(vast, repository, tmp_path)
    data["vast"] |= {"machines": 2}
    data["vast"]["request"]["max_lifetime"] = "10m"  # if no machine ends
    path.write_text(yaml.safe_dump(data))
    store, holder = open_store(data["store"]["url"]), Holder.describe_this_process()
    ttl, clock = timedelta(seconds=9), StoreClock.read(store, "words", holder)
    lease = acquire(store, LeaseKeys("words", "train-00001"), holder, ttl, clock)
    assert isinstance(lease, Lease)
    released: list[tuple[str, ReleaseReason]] = []
    with Heartbeat(ttl) as heartbeat:
        heartbeat.keep(lease)

        def release_partition(event: Event) -> None:
            if isinstance(event, MachineReleased):
                released.append((event.machine, event.reason))
                heartbeat.release(lease)

        report = run_pipeline(path, use_vast=True, progress=release_partition)
    assert released == [(f"shard/words/{slot}", ReleaseReason.DONE) for slot in (1, 0)]
    assert (report.samples, report.partitions, vast.list_alive()) == (500, 2, [])
    vast.reset()
    assert read_shards(tmp_path / "store") == shard_here(data, tmp_path)


def test_the_command_lists_the_source_once(
    vast: VastServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cli.machine.interrupt_on_signal", lambda _: None)
    monkeypatch.delattr(rented_sharding, "preflight_dataset")  # the command calls that of datasets
    path, _ = write_rented_dataset(vast, repository, tmp_path, rate=100.0, real=False, program=10.0)
    done = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--yes"])
    assert (done.exit_code, "is not complete: check `repo_url`" in done.output) == (1, True)
    assert len(vast.list_machines()) == 1
    vast.reset()


def test_a_limit_of_money_and_a_wrong_key_are_named(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, data = write_rented_dataset(vast, repository, tmp_path, rate=300.0, real=False)
    data["vast"]["request"]["max_total"] = 0.005  # less than a release costs
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(errors.BudgetError, match=r"No machine is added to .* Raise max_total"):
        run_pipeline(path, use_vast=True)
    assert vast.list_alive() == []
    data["vast"]["account"]["api_key"] = "another"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(errors.DeniedError, match=r"Vast\.ai does not know the API key"):
        run_pipeline(path, use_vast=True)
    vast.reset()


@pytest.mark.soak
def test_one_offer_is_rented_with_its_disk_and_folder(
    vast: VastServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cli.machine.interrupt_on_signal", lambda _: None)
    path, data = write_rented_dataset(vast, repository, tmp_path)
    planned = CliRunner().invoke(main, ["plan", str(path), "--use-vast", "--disk", "20GB"])
    offers = re.findall(r"^ *(\d+)  1 x", planned.output, re.MULTILINE)
    assert len(offers) > 2
    folder = tmp_path / "work/here"
    options = ["--use-vast", "--offer-id", offers[-1], "--disk", "20GB", "--workdir", str(folder)]
    done = CliRunner().invoke(main, ["run", str(path), *options, "--yes"])
    assert done.exit_code == 0, done.output
    assert (folder / "millrace-run.yaml").exists()
    requests = vast.list_requests()
    created = [one for one in requests if one["call"] == "create"]
    assert [one["path"] for one in created] == [f"/api/v0/asks/{offers[-1]}/"]
    assert created[0]["body"]["disk"] == 20
    shutil.rmtree(tmp_path / "store/words")
    gone = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--offer-id", "7", "--yes"])
    assert gone.exit_code == 1
    assert "Vast.ai does not have the offer 7 (any more)" in gone.output
    data["vast"]["machines"] = 2
    path.write_text(yaml.safe_dump(data))
    several = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--offer-id", "7"])
    assert several.exit_code == 2
    assert "an offer is one machine: set machines to 1" in several.output
    unrented = CliRunner().invoke(main, ["run", str(path), "--workdir", "/work"])
    assert unrented.exit_code == 2
    assert "--workdir needs --use-vast" in unrented.output
    vast.reset()


def test_a_plan_names_a_source_that_machines_cannot_read(
    vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    path, data = write_rented_dataset(vast, repository, tmp_path, real=False)
    (tmp_path / "raw").mkdir()
    (tmp_path / "store/raw/a.jsonl").rename(tmp_path / "raw/a.jsonl")
    data["source"]["url"] = (tmp_path / "raw").as_uri()
    path.write_text(yaml.safe_dump(data))
    local = CliRunner().invoke(main, ["plan", str(path)])
    assert local.exit_code == 0, local.output
    assert "`millrace run --use-vast` will refuse: Rented machines cannot read" in local.stderr
    rented = CliRunner().invoke(main, ["plan", str(path), "--use-vast"])
    assert rented.exit_code == 1
    assert "`millrace run` will refuse: Rented machines cannot read" in rented.stderr
    vast.reset()
