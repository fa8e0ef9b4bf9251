import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from millrace.checkpoints import Saver, load
from millrace.checkpoints.cooldown.rosters import commit_roster
from millrace.cli import main
from millrace.datasets import PipelineSettings
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress_bar import BytesBar
from millrace.records import commit_once
from millrace.schemas.checkpoint import Vote
from millrace.settings import load_settings
from millrace.storage import delete_one, list_objects, open_store, put
from millrace.swarm.progress_events import PrewarmProgressed
from millrace.testing.process import REPOSITORY, find_free_ports


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == code, result.output
        return result.output

    return command


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "source").mkdir()
    text = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(100))
    (tmp_path / "source" / "a.jsonl").write_text(text + "bad\n")
    path = tmp_path / "job.yaml"
    path.write_text(
        f"dataset: lines\nsource: {{url: {(tmp_path / 'source').as_uri()}}}\n"
        f"store: {{url: {(tmp_path / 'store').as_uri()}}}\nexecution: {{workers: 1}}\n"
    )
    return path


def test_help_names_every_command(run):
    shown = run("--help")
    commands = ["init", "plan", "run", "status", "verify", "deploy", "setup"]
    nouns = {
        "dataset": [
            "init",
            "plan",
            "run",
            "status",
            "verify",
            "collect-garbage",
            "import-settings",
            "index",
        ],
        "swarm": ["prewarm", "node"],
        "checkpoint": [
            "list",
            "verify",
            "save",
            "import",
            "retain",
            "pin",
            "unpin",
            "probe",
            "cooldown",
            "clear-votes",
        ],
        "gradient": ["aggregate", "catch-up", "import", "key", "roster", "score", "standings"],
        "machine": ["offers", "rent", "list", "release", "reap"],
        "bucket": ["audit", "clean", "wipe", "abort-uploads"],
        "campaign": ["init", "run", "worker"],
    }
    for command in [*commands, *nouns]:
        assert f"\n  {command} " in shown
    for noun, verbs in nouns.items():
        shown = run(noun, "--help")
        assert "\n  Example:" in shown
        assert "..." not in shown.partition("\nCommands:\n")[2]  # each sentence is whole
        for verb in verbs:
            assert f"\n  {verb} " in shown
            assert f"Example: millrace {verb if noun == 'dataset' else noun} " in run(
                noun, verb, "--help"
            ).replace("millrace dataset ", "millrace ")


def test_all_commands_but_two_print_their_result_as_json():
    def list_without(group: click.Group, path: str) -> list[str]:
        found: list[str] = []
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            assert command is not None
            if isinstance(command, click.Group):
                found += list_without(command, f"{path}{name} ")
            elif not any("--json" in one.opts for one in command.params):
                found.append(f"{path}{name}")
        return found

    assert list_without(main, "") == ["swarm node", "campaign worker"]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("millrace sw", ["swarm"]),
        ("millrace swarm p", ["prewarm"]),
        ("millrace checkpoint re", ["retain"]),
        ("millrace campaign run --y", ["--yes"]),
        ("millrace dep", ["deploy"]),
    ],
)
def test_a_shell_completes_commands_and_options(typed, completed):
    page = (REPOSITORY / "docs/reference/cli.md").read_text()
    (line,) = re.findall(r"^(eval .*=bash_source millrace\)\")", page, re.MULTILINE)
    words = typed.split()
    script = f'''{line}
        COMP_WORDS=({typed}) COMP_CWORD={len(words) - 1}
        _millrace_completion millrace
        printf "%s\\n" "${{COMPREPLY[@]}}"'''
    folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (completed, "")


@pytest.mark.parametrize(("shell", "installs"), [("zsh", "compdef"), ("fish", "complete ")])
def test_other_shells_get_a_script_of_their_own(shell, installs):
    page = (REPOSITORY / "docs/reference/cli.md").read_text()
    assert f"_MILLRACE_COMPLETE={shell}_source millrace" in page
    instruction = {"_MILLRACE_COMPLETE": f"{shell}_source"}
    done = CliRunner().invoke(main, [], prog_name="millrace", env=instruction)
    assert (done.exit_code, f"{installs}" in done.stdout) == (0, True)


def test_json_has_standard_output_for_itself(settings):
    done = CliRunner().invoke(main, ["run", "--config", str(settings), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["samples"], found["new_shards"], found["quarantined"]) == (100, 1, 1)
    assert "100 samples in 1 shard" in done.stderr
    status = CliRunner().invoke(main, ["status", str(settings), "--json"])
    (lines,) = json.loads(status.stdout)
    assert (lines["dataset"], lines["partitions"][0]["state"]) == ("lines", "ended")
    again = CliRunner().invoke(main, ["status", str(settings)])
    assert "lines: complete" in again.stdout  # the next command prints for people again


def test_json_shows_names_that_are_not_utf_8(tmp_path):
    folder = tmp_path / "bucket"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    (folder / os.fsdecode(b"caf\xe9")).symlink_to("nothing")
    words = ["bucket", "wipe", str(folder), "--confirm", "bucket", "--json"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.exception) == (0, None)
    assert json.loads(done.stdout)["left_alone"] == ["caf\ufffd"]
    assert not (folder / "a").exists()


@pytest.mark.parametrize("command", ["plan", "status", "verify", "dataset collect-garbage"])
def test_a_settings_file_is_named_once(run, settings, command):
    run("run", str(settings))
    words = command.split()
    assert run(*words, "--config", str(settings)) == run(*words, str(settings))
    shown = run(*words, str(settings), "--config", str(settings), code=2)
    assert "Name the settings file once" in shown
    assert "The name of the settings file is empty" in run(*words, "", code=2)


def test_garbage_is_shown_and_deleted_only_after_a_yes(run, settings, tmp_path):
    run("run", str(settings))
    left = tmp_path / "store" / "lines" / "shards/webdataset/train" / "train-00000-000009.tar"
    left.write_bytes(b"left")
    words = ["dataset", "collect-garbage", str(settings), "--min-age", "0s"]
    shown = run(*words, "--dry-run")
    assert left.as_uri() in shown
    count = shown.splitlines()[-1].removeprefix("Would delete ").removesuffix(".")
    no = CliRunner().invoke(main, words, input="n\n")
    assert (no.exit_code, f"Delete {count}?" in no.stderr) == (1, True)
    silent = CliRunner().invoke(main, words)
    assert (silent.exit_code, "Add --yes" in silent.stderr) == (2, True)
    assert left.exists()
    assert f"Deleted {count}." in run(*words, "--yes")
    assert not left.exists()


def test_garbage_that_appears_after_the_question_is_not_deleted(
    run, settings, tmp_path, monkeypatch
):
    run("run", str(settings))
    shards = tmp_path / "store" / "lines" / "shards/webdataset/train"
    shown, new = shards / "train-00000-000009.tar", shards / "train-00000-000010.tar"
    shown.write_bytes(b"shown")
    new.with_name(f"{new.name}#1").write_bytes(b"half")

    def write_another(question: str, *, yes: bool) -> bool:
        new.write_bytes(b"new")
        shards.joinpath("train-00000-000011.tar#1").write_bytes(b"half")
        return "and abort 1 unfinished upload?" in question

    monkeypatch.setattr("millrace.cli.dataset.confirm", write_another)
    output = run("dataset", "collect-garbage", str(settings), "--min-age", "0s")
    assert "Aborted 1 unfinished upload, 4 bytes." in output
    assert not shown.exists()
    assert new.exists()
    assert [path.name for path in shards.glob("*#*")] == ["train-00000-000011.tar#1"]


def test_a_checkpoint_is_copied_and_verified(run, tmp_path):
    disk, bucket = (tmp_path / "disk").as_uri(), (tmp_path / "bucket").as_uri()
    with Saver(open_store(disk), "job") as saver:
        for step in (1, 2):
            saver.save({"w": torch.full((10,), float(step))}, step=step).result()
    assert "Step 2 of job is in" in run("checkpoint", "save", disk, "job", bucket)
    assert "verified" in run("checkpoint", "verify", bucket, "job")
    assert "sent 0 bytes" in run("checkpoint", "save", disk, "job", bucket)
    copy = run("checkpoint", "save", disk, "job", bucket, "--step", "1", "--as", "old")
    assert "Step 1 of old is in" in copy
    assert load(open_store(bucket), "old").checkpoint.step == 1
    assert "has no" in run("checkpoint", "save", disk, "none", bucket, code=1)


def save_steps(url: str, job: str, *steps: int) -> None:
    with Saver(open_store(url), job) as saver:
        for step in steps:
            saver.save({"w": torch.full((10,), float(step))}, step=step).result()


def test_jobs_are_listed_without_a_listing_of_their_files(run, tmp_path, monkeypatch):
    store = open_store(tmp_path.as_uri())
    save_steps(store.url, "one", 1, 20)
    save_steps(store.url, "team/run-7", 5)
    put(store, CheckpointKeys("one").make_part_key(30, "blake3:" + "0" * 64), b"of a save")
    put(store, CheckpointKeys("begun").make_part_key(1, "blake3:" + "0" * 64), b"of a save")
    put(store, "others/checkpoints/step_5/model.bin", b"of another program")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the files of a job are listed")

    monkeypatch.setattr("millrace.checkpoints.find.list_objects", refuse)
    lines = run("checkpoint", "list", store.url).splitlines()
    rows = [line.split() for line in lines if line.strip()[-1:].isdigit()]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("begun", "none", "1"),
        ("one", "20", "3"),
        ("team/run-7", "5", "1"),
    ]
    shown = CliRunner().invoke(main, ["checkpoint", "list", store.url, "--json"])
    found = {row.pop("job"): row for row in json.loads(shown.stdout)}
    saved = load(store, "one").checkpoint
    assert datetime.fromisoformat(found["one"].pop("saved")) == saved.saved
    assert found["one"] == {"newest_step": 20, "bytes": saved.size, "steps": 3}
    assert found["begun"] == {"newest_step": None, "saved": None, "bytes": None, "steps": 1}


def test_a_job_whose_newest_checkpoint_cannot_be_read_is_listed_with_the_others(run, tmp_path):
    store = open_store(tmp_path.as_uri())
    for job in ("one", "two"):
        save_steps(store.url, job, 1)
    put(store, CheckpointKeys("one").make_metadata_key(1), b"{}")
    shown = run("checkpoint", "list", store.url, code=1)
    assert re.search(r"^ one +1 +unreadable", shown, re.MULTILINE)
    assert re.search(r"^ two +1 +20\d\d-", shown, re.MULTILINE)
    assert f"{store.url}/one/checkpoints/step_000000001/metadata.json" in shown


def test_a_long_name_in_a_table_is_shown_in_full(run, tmp_path, monkeypatch):
    url, job = tmp_path.as_uri(), f"team/{'-'.join(['a-long-name'] * 12)}"
    save_steps(url, job, 1)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert f" {job} " in run("checkpoint", "list", url)  # in a pipe, on one line
    monkeypatch.setenv("COLUMNS", "60")
    _, rows = re.split(r"─ *\n", run("checkpoint", "list", url))
    assert "".join(line.split()[0] for line in rows.splitlines() if line.strip()) == job


def test_a_url_without_jobs_is_a_sentence_and_that_of_a_job_says_what_to_write(run, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    put(open_store(url), "notes/a.txt", b"")
    assert f"There is no checkpoint below {url}." in run("checkpoint", "list", url, code=1)
    save_steps(url, "job", 1)
    shown = run("checkpoint", "list", f"{url}/job", code=1)
    assert f"is the folder of a job: write millrace checkpoint list {url} job." in shown
    assert "all files there" in run("checkpoint", "list", url, "job")
    shown = run("checkpoint", "list", url, "none", code=1)
    assert f"none has no checkpoint. `millrace checkpoint list {url}` shows the jobs" in shown


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(run, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    save_steps(url, "job", 1, 2, 3)
    retain = ("checkpoint", "retain", url, "job", "--last", "1", "--yes")
    shown = run("checkpoint", "pin", url, "job", "1", "--reason", "the paper's model")
    assert shown == "Step 1 of job is pinned: the paper's model\n"
    again = run("checkpoint", "pin", url, "job", "1")
    assert again == shown
    refused = run("checkpoint", "pin", url, "job", "2", "--reason", "\udcff", code=2)
    assert "has bytes that are no UTF-8" in refused
    put(open_store(url), CheckpointKeys("job").make_pin_key(2), b"junk")
    shown = CliRunner().invoke(main, ["checkpoint", "list", url, "job", "--json"])
    assert {row["step"]: row["pin"] for row in json.loads(shown.stdout)} == {
        1: "the paper's model", 2: "it has a pin that cannot be read", 3: None
    }  # fmt: skip
    assert re.search(r"\bpin\b", run("checkpoint", "list", url, "job"))
    delete_one(open_store(url), CheckpointKeys("job").make_pin_key(2))
    assert "step 1 stays: pinned: the paper's model" in run(*retain)
    assert load(open_store(url), "job", step=1).checkpoint.step == 1
    assert "Step 1 of job has no pin." in run("checkpoint", "unpin", url, "job", "1")
    assert "step 1 goes" in run(*retain)
    assert "metadata.json" in run("checkpoint", "pin", url, "job", "1", code=1)
    for job in ("job", "jobb"):
        assert "neither a pin nor a checkpoint" in run("checkpoint", "unpin", url, job, "1", code=1)


def test_votes_of_an_epoch_that_cannot_end_are_cleared(run, tmp_path):
    store = open_store((tmp_path / "bucket").as_uri())
    vote = Vote(member="n0", step=5, root="blake3:" + "f" * 64, rest="x", size=1)
    commit_roster(store, "job", 5, ["n0"])
    commit_once(store, CooldownKeys("job", 5).make_vote_key("n0"), vote)
    command = ["checkpoint", "clear-votes", store.url, "job", "5"]
    assert "Add --yes" in run(*command, code=2)
    assert len(list(list_objects(store))) == 2
    assert "records of 1 member." in run(*command, "--yes")
    assert list(list_objects(store)) == []
    assert "has no votes" in run(*command, "--yes", code=1)


def test_init_writes_settings_that_are_read_back_and_never_overwrites(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_STORAGE_PATH", str(tmp_path / "shards"))
    assert "millrace plan" in run("init")
    assert "There is no folder" in run("plan", code=1)
    assert not Path("/path/to").exists()
    before = (tmp_path / "millrace.yaml").read_text()
    assert "already there" in run("init", code=2)
    assert (tmp_path / "millrace.yaml").read_text() == before
    assert "none/job.yaml cannot be written: No such file" in run("init", "none/job.yaml", code=2)


def test_plan_shows_and_writes_nothing(run, settings, tmp_path):
    shown = run("plan", str(settings))
    assert "1 file, " in shown
    assert "at most" in shown
    assert not (tmp_path / "store").exists()


def test_plan_says_how_much_memory_the_largest_sample_takes(run, settings, tmp_path):
    assert "A larger row is a shard of its own" in run("plan", str(settings))
    (tmp_path / "source" / "large.bin").write_bytes(bytes(3_000_000))
    (tmp_path / "source" / "small.bin").write_bytes(bytes(1000))
    text = settings.read_text().replace("source: {", "source: {kind: files, ")
    settings.write_text(text.replace("workers: 1", "workers: 2") + "sharding: {shard_bytes: 1MB}\n")
    shown = run("plan", str(settings))
    assert "at most 6.0 MB of them in the memory of 2 workers" in shown
    assert "The largest sample has 3.0 MB, and is a shard of its own" in shown
    assert "in each worker it is at most 12.0 MB." in shown


def test_plan_names_the_formats_with_their_fields_and_the_transforms(run, settings):
    assert "Formats: webdataset.\n" in run("plan", str(settings))
    with settings.open("a") as file:
        file.write(
            "sharding:\n  formats: [webdataset, mds]\n  transforms: [{field: json, min_size: 5}]\n"
        )
    shown = run("plan", str(settings))
    assert "Transforms: filter.\n" in shown
    assert "Formats: mds, webdataset, with the fields json (json).\n" in shown
    assert "of them in the memory of 1 worker." in shown


def test_plan_shows_the_mirrors_of_a_source(run, settings, tmp_path):
    assert "Mirrors" not in run("plan", str(settings))
    mirror = tmp_path / "mirror"
    (tmp_path / "source").rename(mirror)
    text = settings.read_text()
    settings.write_text(text.replace("source: {", f"source: {{mirrors: [{{url: {mirror}}}], "))
    shown = run("plan", str(settings))
    assert f"Mirrors: {mirror}.\n" in shown
    assert f"at {mirror.as_uri()}" in shown


def test_plan_says_where_the_dataset_goes_and_where_run_will_refuse(run, settings, tmp_path):
    where = (tmp_path / "store" / "lines").as_uri()
    assert f"Goes to {where} (new: the run makes the folder)." in run("plan", str(settings))
    assert not (tmp_path / "store").exists()
    run("run", str(settings))
    shown = run("plan", str(settings))
    assert f"Goes to {where} (complete)." in shown
    assert "Whether the credentials may write there is not checked" in shown
    settings.write_text(settings.read_text() + "sharding: {seed: 3}\n")
    shown = run("plan", str(settings), code=1)
    assert "`millrace run` will refuse: The dataset lines was planned with other settings" in shown
    assert "was planned with other settings" in run("run", str(settings), code=1)


def test_plan_says_that_a_destination_does_not_answer(run, settings, monkeypatch):
    (port,) = find_free_ports(1)
    monkeypatch.setattr("millrace.datasets.pipeline._PREFLIGHT_TIMEOUT", timedelta(seconds=0.5))
    text = re.sub("^store: .*$", "", settings.read_text(), flags=re.MULTILINE)
    settings.write_text(
        f"{text}store: {{url: 's3://bucket', endpoint: 'http://127.0.0.1:{port}', "
        "credentials: {access_key_id: a, secret_access_key: b}}\n"
    )
    shown = run("plan", str(settings), code=1)
    assert "`millrace run` will refuse: s3://bucket does not answer" in shown


@pytest.mark.parametrize("key", ["wrong key", "wrong secret", "key of another user"])
def test_plan_fails_with_credentials_that_the_destination_refuses(run, settings, rgw, bucket, key):
    pair = {
        "wrong key": ("none", "none"),
        "wrong secret": (rgw.full.access_key_id, "wrong"),
        "key of another user": (rgw.other.access_key_id, rgw.other.secret_access_key),
    }[key]
    text = re.sub("^store: .*$", "", settings.read_text(), flags=re.MULTILINE)
    settings.write_text(
        f"{text}store: {{url: 's3://{bucket}', endpoint: '{rgw.endpoint}', "
        f"credentials: {{access_key_id: {pair[0]}, secret_access_key: {pair[1]}}}}}\n"
    )
    shown = run("plan", str(settings), code=1)
    refusal = shown[shown.index("`millrace run` will refuse: ") :].strip()
    assert f"s3://{bucket}/lines/" in refusal
    assert refusal.partition("refuse: ")[2] in run("run", str(settings), code=1)


def test_plan_fails_with_a_plan_that_cannot_be_read(run, settings, tmp_path):
    run("run", str(settings))
    (tmp_path / "store/lines/plan.json").write_text("no record")
    shown = run("plan", str(settings), code=1)
    assert "`millrace run` will refuse: " in shown
    assert "lines/plan.json" in shown


def test_the_store_of_a_source_stands_beside_its_other_settings(run, settings):
    """A flow's form and a campaign's file have it there."""
    settings.write_text(settings.read_text().replace("source: {url:", "source: {store: {url:", 1))
    settings.write_text(settings.read_text().replace("}\n", "}}\n", 1))
    assert "source: the settings of its store stand beside its other settings: write" in run(
        "plan", str(settings), code=2
    )


def test_the_template_leaves_the_store_to_the_environment(run, tmp_path, monkeypatch):
    """And its variables are those of .env.example."""
    run("init")
    monkeypatch.setenv("STORAGE_BACKEND", "local")
    monkeypatch.setenv("LOCAL_STORAGE_PATH", str(tmp_path / "shards"))
    assert load_settings(tmp_path / "millrace.yaml", PipelineSettings).store.url == (
        (tmp_path / "shards").as_uri()
    )
    named = set(re.findall(r"\$\{([A-Z0-9_]+)", (tmp_path / "millrace.yaml").read_text()))
    known = set(re.findall(r"^#? ?([A-Z0-9_]+)=", (REPOSITORY / ".env.example").read_text(), re.M))
    assert named - {"NAME"} == named & known
    assert {"R2_DATASET_ACCOUNT_ID", "R2_DATASET_WRITE_ACCESS_KEY_ID"} <= named


def test_what_the_template_has_as_a_comment_is_valid_too(run, tmp_path, monkeypatch):
    """And is the default: taking the "# " away changes nothing."""
    monkeypatch.setenv("LOCAL_STORAGE_PATH", str(tmp_path))
    run("init")
    path = tmp_path / "millrace.yaml"
    text = path.read_text()
    for name in ("max_quarantined", "allow_empty", "partition_files"):
        assert re.search(rf"^  # {name}: ", text, re.MULTILINE), name
    before = load_settings(path, PipelineSettings)
    path.write_text(re.sub(r"^  # (\w+: [\w.]+ +#)", r"  \1", text, flags=re.MULTILINE))
    after = load_settings(path, PipelineSettings)
    assert (after.sharding, after.execution) == (before.sharding, before.execution)
    assert {"max_quarantined", "allow_empty"} <= after.execution.model_fields_set
    assert "partition_files" in after.sharding.model_fields_set


def test_the_status_of_a_store_shows_the_datasets_beside_a_damaged_one(run, settings, tmp_path):
    run("run", str(settings))
    junk = tmp_path / "store" / "a" / "plan.json"
    junk.parent.mkdir()
    junk.write_bytes(b"{}")
    shown = run("status", (tmp_path / "store").as_uri(), code=1)
    assert "lines: complete" in shown
    assert "a cannot be read: " in shown
    assert "a/plan.json is not a record of Millrace's" in shown
    done = CliRunner().invoke(main, ["status", "--json", str(tmp_path / "store")])
    assert done.exit_code == 1
    damaged, whole = json.loads(done.stdout)
    assert (damaged["dataset"], whole["dataset"]) == ("a", "lines")
    assert "a/plan.json is not a record of Millrace's" in damaged["error"]


def test_run_verify_status_and_gc_speak_of_the_same_dataset(run, settings, tmp_path):
    store = (tmp_path / "store").as_uri()
    shown = run("run", str(settings))
    assert "100 samples in 1 shard," in shown
    assert "1 row made no sample" in shown
    (line,) = run("run", str(settings)).splitlines()
    assert line.startswith(f"{store}/lines is complete already: 100 samples in 1 shard, ")
    assert f"The manifest is {store}/lines/manifest.json. This run made 0 shards" in line
    assert "1 shard of 1 as the manifest says" in run("verify", str(settings))
    assert "1 shard of 1" in run("verify", store, "lines", "--quick")
    assert "lines: complete" in run("status", store)
    assert "lines: complete" in run("status", str(settings))
    above = run("status", tmp_path.as_uri())
    assert f"store/lines: complete, from {(tmp_path / 'source').as_uri()}. " in above
    assert f"is the dataset 'lines' of {store}: open that URL" in above
    assert "Would delete" in run("dataset", "collect-garbage", store, "lines", "--dry-run")
    shard = next((tmp_path / "store" / "lines" / "shards").rglob("*.tar"))
    shard.write_bytes(b"other")
    assert "5 bytes, not" in run("verify", store, "lines", code=1)


def test_copies_at_mirrors_are_verified_by_the_manifest_of_the_store(run, settings, tmp_path):
    run("run", str(settings))
    store = tmp_path / "store"
    urls = [(tmp_path / name).as_uri() for name in ("store", "whole", "damaged", "none")]
    for name in ("whole", "damaged"):
        shutil.copytree(store, tmp_path / name)
    (shard,) = (tmp_path / "damaged").rglob("*.tar")
    shard.write_bytes(bytes(shard.stat().st_size))
    shown = run("verify", urls[0], "lines", "--mirror", urls[1])
    for url in urls[:2]:
        assert f"{url}: 1 shard of 1 as the manifest says (sizes and digests" in shown
    options = [part for url in urls[1:] for part in ("--mirror", url)]
    shown = run("verify", str(settings), *options, code=1)
    assert f"{urls[2]}/{shard.relative_to(tmp_path / 'damaged')}: its bytes are not" in shown
    assert f"{urls[2]}: 0 shards of 1 as the manifest says" in shown
    assert f"{urls[3]}: There is no folder {tmp_path / 'none'}" in shown
    shown = run("verify", str(settings), "--quick", "--mirror", urls[2], "--json")
    mirrors = json.loads(shown[shown.index("{") :])["mirrors"]
    assert [(url, found["faults"]) for url, found in mirrors.items()] == [(urls[2], [])]


def test_only_a_rental_needs_the_variables_of_its_section(run, settings, tmp_path):
    with settings.open("a") as file:
        file.write(
            "vast:\n  account: {api_key: '${UNSET_API_KEY}'}\n"
            "  request: {max_hourly: 1, max_total: 5}\n  repo_url: https://example.org/x\n"
        )
    assert "100 samples" in run("run", str(settings))
    assert "1 shard of 1" in run("verify", str(settings))
    assert "lines: complete" in run("status", str(settings))
    assert "objects" in run("bucket", "usage", str(settings))
    shown = run("run", str(settings), "--use-vast", "--yes", code=2)
    assert f"Unset or empty in the environment: UNSET_API_KEY ({settings}, vast)." in shown


def test_the_pages_are_indexed_once_and_stale_files_are_named(run, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"text": ["a"] * 250}), folder / f"{number}.parquet")
    said = run("dataset", "index", str(folder), "--check", code=1)
    assert "0.parquet: was not indexed yet" in said
    assert "The index of 'text' was made: 2 files, 500 rows" in run("dataset", "index", str(folder))
    assert "is current" in run("dataset", "index", str(folder))
    pq.write_table(pa.table({"text": ["b"] * 10}), folder / "1.parquet")
    said = run("dataset", "index", folder.as_uri(), "--check", "--json", code=1)
    found = json.loads(said[said.index("{") :])
    assert (found["stale"], found["missing"], found["is_new"]) == (["1.parquet"], [], False)
    assert "1.parquet: was written after" in run("dataset", "index", str(folder))
    assert "260 rows" in run("dataset", "index", str(folder), "--check")


def test_a_repair_makes_a_lost_shard_again(run, settings, tmp_path):
    run("run", str(settings))
    (lost,) = (tmp_path / "store").rglob("*.tar")
    content = lost.read_bytes()
    lost.unlink()
    assert "missing" in run("verify", str(settings), code=1)
    shown = run("run", str(settings), "--repair")
    assert f"Made again: {lost.relative_to(tmp_path / 'store')}" in shown
    assert "1 shard verified, 1 made again." in shown
    assert lost.read_bytes() == content


def test_without_a_terminal_a_run_prints_lines_of_progress(run, settings):
    shown = run("run", str(settings)).splitlines()
    assert shown[0] == "0 of 1 partition, 0 shards, 0 samples"
    assert "1 of 1 partition, 1 shard, 100 samples" in shown


def test_without_a_terminal_a_prewarm_prints_lines_of_progress(capsys):
    with BytesBar() as bar:
        for done in (0, 1_000_000, 2_000_000):
            bar(
                PrewarmProgressed(
                    present=done,
                    total=2_000_000,
                    moved=done,
                    nodes=1,
                    ready=done // 2_000_000,
                    seconds=1.0,
                )
            )
    assert capsys.readouterr().err.splitlines() == [
        "0 bytes of 2.0 MB on 0 of 1 nodes",
        "2.0 MB of 2.0 MB on 1 of 1 nodes",
    ]


def _millrace(*words: str, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "millrace", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **how)


def _hear_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_stops_a_command_reads_one_sentence(number, tmp_path):
    (port,) = find_free_ports(1)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"dataset: a\nstore: {{url: {tmp_path.as_uri()}}}\n"
        f"source: {{url: 's3://bucket', endpoint: 'http://127.0.0.1:{port}', "
        "credentials: {access_key_id: id, secret_access_key: secret}}\n"
    )
    with _millrace("plan", str(path), cwd=REPOSITORY, preexec_fn=_hear_hangups) as command:
        assert command.stderr is not None
        assert "does not answer (Connection refused)" in command.stderr.readline()
        command.send_signal(number)
        rest = command.stderr.read()
    assert command.returncode == 130
    assert rest == "\nStopped. Run it again: it goes on where it was.\n"


def test_a_full_disk_below_the_output_is_a_sentence(run, settings, tmp_path):
    run("run", str(settings))
    with (
        Path("/dev/full").open("w") as full,
        _millrace("status", (tmp_path / "store").as_uri(), stdout=full, cwd=REPOSITORY) as command,
    ):
        assert command.stderr is not None
        said = command.stderr.read()
    assert (command.returncode, said) == (
        1,
        "millrace: the output could not be written: No space left on device.\n",
    )


def test_a_plan_says_which_files_no_pattern_takes(run, settings, tmp_path):
    assert "are left out" not in run("plan", str(settings))
    (tmp_path / "source" / "b.jsonl.gz").write_bytes(b"")
    settings.write_text(
        settings.read_text().replace("source: {", "source: {include: ['*.jsonl'], ")
    )
    said = "Files such as b.jsonl.gz are left out: no pattern of `include` takes them."
    assert said in run("plan", str(settings))


def test_the_state_of_the_output_fails_no_command(run, settings, tmp_path):
    run("run", str(settings))
    where = tmp_path / "store" / "ü→"
    where.mkdir()
    command = [sys.executable, "-m", "millrace", "bucket", "usage", str(tmp_path / "store")]
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(REPOSITORY)}
    (where / "→").write_bytes(b"1")
    done = subprocess.run(command, capture_output=True, env=environ, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert "ü?" in done.stdout.decode("latin-1")
    closed = ["bash", "-c", f"{shlex.join(command)} >&-"]
    done = subprocess.run(closed, stderr=subprocess.PIPE, env=environ, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    again = [*command[:3], "run", str(settings), "--prefix", "again"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(again, stdout=subprocess.PIPE, stderr=full, check=False, env=environ)
    assert done.returncode == 0
    assert b"100 samples in 1 shard" in done.stdout


def test_whoever_answers_a_question_by_ctrl_c_has_stopped_it(tmp_path, monkeypatch, capsys):
    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    (tmp_path / "a").write_bytes(b"1")
    monkeypatch.setattr("click.termui.visible_prompt_func", interrupt)
    for words in (("wipe", str(tmp_path)), ("clean", str(tmp_path), "--older-than", "0s")):
        with pytest.raises(SystemExit) as ended:
            main(["bucket", *words])
        assert ended.value.code == 130
        assert "Stopped. Run it again" in capsys.readouterr().err
    assert (tmp_path / "a").exists()


def test_a_prefix_is_another_dataset(run, settings):
    run("run", str(settings), "--prefix", "other/name")
    assert "other/name: complete" in run("status", str(settings), "other/name")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "none.yaml"), 2, "millrace init"),
        (("verify", "file:///nowhere-at-all"), 2, "name the dataset"),
        (("verify", "no-folder", "words"), 1, "There is no folder"),
        (("status", "ftp://x"), 2, "names no store"),
        (("run", "job.yaml", "--prefix", "../up"), 2, "letters, digits"),
        (("run", "job.yaml", "--prefix", ""), 2, "--prefix is empty"),
        (("init", "job.txt"), 2, "a name that ends in .yaml"),
        (("bucket", "abort-uploads", "x", "--older-than=-P1D"), 2, "'-P1D' is negative"),
        (("bucket", "abort-uploads", "x", "--older-than", "1000000d"), 2, "write at most 5000w"),
        (
            ("dataset", "collect-garbage", "x", "y", "--min-age", "1000000d"),
            2,
            "write at most 5000w",
        ),
    ],
)
def test_bad_input_gets_a_sentence_and_an_exit_code(run, settings, words, code, said):
    shown = run(*words, code=code)
    assert said in shown
    assert "Traceback" not in shown


@pytest.fixture
def warm(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.bin").write_bytes(bytes(2_000_000))
    path = tmp_path / "prewarm.yaml"
    path.write_text(
        f"requests: [{{prefix: ''}}]\nroot: /data\n"
        f"stores: {{models: {{url: {(tmp_path / 'models').as_uri()}}}}}\n"
        "nodes: {kind: hosts, key: '0123456789abcdef', hosts: [{url: 'http://127.0.0.1:9'}]}\n"
        "start_timeout: 0.2s\n"
    )
    return path


def test_prewarm_shows_what_would_go_where(run, warm, tmp_path):
    shown = run("swarm", "prewarm", str(warm), "--dry-run")
    assert "/data/a.bin  2.0 MB  file://" in shown
    assert "1 file, 2.0 MB, in 2 pieces." in shown
    for number in range(21):
        (tmp_path / "models" / f"{number}.txt").write_bytes(b"1")
    shown = run("swarm", "prewarm", str(warm), "--dry-run")
    assert shown.count("/data/") == 20
    assert "and 2 more files, which --json lists." in shown


def test_a_dry_run_says_where_prewarm_will_refuse(run, warm):
    """Within seconds, where Ray itself would try for minutes."""
    (port,) = find_free_ports(1)
    nodes = f"nodes: {{kind: ray, address: '127.0.0.1:{port}'}}"
    warm.write_text(re.sub("^nodes: .*$", nodes, warm.read_text(), flags=re.MULTILINE))
    shown = run("swarm", "prewarm", str(warm), "--dry-run", code=1)
    assert "1 file, 2.0 MB, in 2 pieces." in shown
    said = f"There is no Ray cluster at 127.0.0.1:{port}"
    assert f"`millrace swarm prewarm` will refuse: {said}" in shown
    assert said in run("swarm", "prewarm", str(warm), code=2)


def test_prewarm_says_which_node_cannot_be_reached(run, warm):
    said = run("swarm", "prewarm", str(warm), code=1)
    assert "1 of 1 nodes are lost" in said
    assert "127.0.0.1:9: it cannot be reached" in said


def test_a_node_wants_a_key(run, tmp_path, monkeypatch):
    monkeypatch.delenv("MILLRACE_NODE_KEY", raising=False)
    assert "Set MILLRACE_NODE_KEY" in run("swarm", "node", "--root", str(tmp_path), code=2)
