"""Datasets of the Hub as the library `datasets` finds and reads their files."""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants
from PIL import Image
from pyarrow import parquet
from pydantic import SecretStr, ValidationError

from millrace import PipelineSettings, errors, shard_dataset
from millrace.datasets import SourceLocation, preflight_dataset
from millrace.datasets.progress_events import ShardCommitted
from millrace.datasets.sources import SourceSettings, open_source
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan
from millrace.storage import StoreSpec, open_store
from millrace.testing.hub import READER, WRITER, HubServer
from tests.oracle import Folder
from tests.support.flows.fixtures import make_jsonl, make_texts, read_texts


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path_factory, monkeypatch):
    """Begin each test without cached files: the same files make the same commit in each run."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def repo(hub: HubServer) -> str:
    return hub.make_repo(dataset=True)


def commit(hub: HubServer, repo: str, files: dict[str, bytes]) -> None:
    HfApi(endpoint=hub.endpoint, token=WRITER).create_commit(
        repo,
        [CommitOperationAdd(name, body) for name, body in files.items()],
        commit_message="files",
        repo_type="dataset",
    )


def make_settings(hub: HubServer, repo: str, tmp_path: Path, **source) -> PipelineSettings:
    sharding = source.pop("sharding", {})
    given = {"kind": "huggingface", "columns": {"txt": "text"}, "split": "train"} | source
    return PipelineSettings(
        dataset="words",
        source=SourceLocation(
            url=f"hf://datasets/{repo}",
            endpoint=hub.endpoint,
            options={"token": SecretStr(READER)},
            retry_timeout=timedelta(seconds=3),
            **given,
        ),
        store=StoreSpec(url=(tmp_path / "out").as_uri()),
        sharding={"shard_bytes": 20480, "partition_bytes": 5_000} | sharding,
        execution={"workers": 0},
    )


def make_parquet(texts: list[str]) -> bytes:
    body = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), body, row_group_size=100)
    return body.getvalue()


def make_card(**metadata) -> bytes:
    return f"---\n{json.dumps(metadata)}\n---\n# Words\n".encode()


def fetch_plan(tmp_path: Path) -> DatasetPlan:
    return fetch(open_store((tmp_path / "out").as_uri()), "words/plan.json", DatasetPlan)


def read_members(tmp_path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for shard in sorted((tmp_path / "out").rglob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {one.name: tar.extractfile(one).read() for one in tar}
    return found


def test_parquet_of_a_configuration_is_read_by_row_groups(hub, repo, tmp_path):
    texts = make_texts(900)
    card = make_card(
        configs=[
            {"config_name": "en", "data_files": [{"split": "train", "path": "en/*.parquet"}]},
            {"config_name": "de", "data_files": [{"split": "train", "path": "de/*.parquet"}]},
        ]
    )
    commit(
        hub, repo, {"README.md": card, "en/a.parquet": make_parquet(texts[:500]),
                    "en/b.parquet": make_parquet(texts[500:]),
                    "de/a.parquet": make_parquet(["nein"])},
    )  # fmt: skip
    shard_dataset(make_settings(hub, repo, tmp_path, config="en"))
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    plan = fetch_plan(tmp_path)
    assert plan.source.kind == "parquet"
    assert plan.source.files == 2
    assert {one.source_range.kind for one in plan.partitions} == {"rows"}
    assert len(plan.partitions) > 2


def test_parquet_is_found_by_the_standard_names_of_splits(hub, repo, tmp_path):
    commit(
        hub, repo, {"data/train-00000-of-00001.parquet": make_parquet(["a", "b"]),
                    "data/test-00000-of-00001.parquet": make_parquet(["c"])},
    )  # fmt: skip
    shard_dataset(make_settings(hub, repo, tmp_path, split="test"))
    assert read_texts(Folder(tmp_path / "out")) == Counter(["c"])


def test_every_row_of_other_files_is_read_by_the_library(hub, repo, tmp_path):
    texts = make_texts(900)
    commit(
        hub, repo, {"data/train-0.jsonl": make_jsonl(texts[:400]),
                    "data/train-1.jsonl": make_jsonl(texts[400:]),
                    "data/test.jsonl": make_jsonl(["other"])},
    )  # fmt: skip
    settings = make_settings(hub, repo, tmp_path)
    plan, found = preflight_dataset(settings, samples=2)
    assert found.refusals == ()
    shown = [row.fields["txt"].beginning[:9] for row in found.preview.rows]
    assert shown in ([text[:9] for text in texts[n : n + 2]] for n in (0, 400))
    assert [(one.source_range.start, one.source_range.end) for one in plan.partitions] in (
        [(0, 1), (1, 2)],
        [(1, 2), (0, 1)],
    )
    assert shard_dataset(settings).samples == 900
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(READER.encode() in body for body in written)


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl.gz"])
def test_builders_of_the_library_give_every_row(hub, repo, tmp_path, name):
    import gzip

    texts = make_texts(30)
    bodies = {
        "a.csv": "text\n" + "".join(f"{text}\n" for text in texts),
        "a.txt": "".join(f"{text}\n" for text in texts),
        "a.jsonl.gz": make_jsonl(texts).decode(),
    }
    body = bodies[name].encode()
    commit(hub, repo, {name: gzip.compress(body) if name.endswith(".gz") else body})
    shard_dataset(make_settings(hub, repo, tmp_path))
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)


def make_lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("declared", [None, "string"])
@pytest.mark.parametrize("columns", [None, {"txt": "text"}])
def test_a_text_that_the_library_reads_as_a_time_is_refused(hub, repo, tmp_path, columns, declared):
    features = {"features": [{"name": "text", "dtype": declared}]}
    card = make_card(**({"dataset_info": features} if declared else {}))
    files = {"README.md": card, "train-0.jsonl": make_lines({"text": "unknown"})}
    commit(hub, repo, files | {"train-1.jsonl": make_lines(*[{"text": "2020-01-01"}] * 3)})
    settings = make_settings(hub, repo, tmp_path, columns=columns)
    with pytest.raises(errors.ConfigurationError, match=r"'text' as times.*Use `kind: jsonl`"):
        shard_dataset(settings)
    assert b"00:00:00" not in b"".join(read_members(tmp_path).values())

    exact = {"kind": "jsonl", "split": None, "columns": columns}
    settings = make_settings(hub, repo, tmp_path, **exact)
    shard_dataset(settings.model_copy(update={"dataset": "exact"}))
    assert b"2020-01-01" in b"".join(read_members(tmp_path).values())


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"a": {"b": ["2020-01-01 10:00:00"]}}, {"json": "a"}, r"'a\.b' as times"),
        ({"a": {"b": "2020-01-01", "c": 1}}, {"json": "a.b"}, r"'a\.b' as times"),
        ({"a": {"b": "2020-01-01", "c": 1}}, {"json": "a.c"}, ""),
        ({"a": "2020-01-01", "text": "x"}, {"txt": "text"}, ""),
    ],
)
def test_only_times_in_columns_that_are_taken_are_refused(hub, repo, tmp_path, row, columns, said):
    commit(hub, repo, {"train.jsonl": make_lines(row)})
    settings = make_settings(hub, repo, tmp_path, columns=columns)
    if not said:
        assert shard_dataset(settings).samples == 1
        return
    with pytest.raises(errors.ConfigurationError, match=said):
        preflight_dataset(settings)


def test_times_that_a_dataset_declares_are_written_as_times(hub, repo, tmp_path):
    features = {"features": [{"name": "at", "dtype": "timestamp[s]"}]}
    lines = make_lines({"at": "2020-01-01"}, {"at": None})
    commit(hub, repo, {"README.md": make_card(dataset_info=features), "train.jsonl": lines})
    shard_dataset(make_settings(hub, repo, tmp_path, columns={"json": "at"}))
    assert sorted(read_members(tmp_path).values()) == [b'"2020-01-01T00:00:00"', b"null"]


@pytest.mark.parametrize("load_kwargs", [{}, {"filters": [["n", ">", 1]]}])
def test_times_of_int96_are_exact_or_refused(hub, repo, tmp_path, load_kwargs):
    times = pyarrow.array([253402214400, 1577836800], pyarrow.timestamp("s"))
    table = pyarrow.table({"n": [1, 2], "t": times})
    body = io.BytesIO()
    parquet.write_table(table, body, use_deprecated_int96_timestamps=True)
    commit(hub, repo, {"train.parquet": body.getvalue()})
    arguments = {"columns": {"json": "t"}, "load_kwargs": load_kwargs}
    settings = make_settings(hub, repo, tmp_path, **arguments)
    if load_kwargs:
        with pytest.raises(errors.ConfigurationError, match="'t' has times of the type INT96"):
            preflight_dataset(settings)
        return
    shard_dataset(settings)
    assert set(read_members(tmp_path).values()) == {
        b'"9999-12-31T00:00:00.000000000"', b'"2020-01-01T00:00:00.000000000"'
    }  # fmt: skip


def test_parquet_that_the_library_filters_is_read(hub, repo, tmp_path):
    body = io.BytesIO()
    parquet.write_table(pyarrow.table({"n": [1, 2], "text": ["a", "b"]}), body)
    commit(hub, repo, {"train.parquet": body.getvalue()})
    arguments = {"filters": [["n", ">", 1]]}
    shard_dataset(make_settings(hub, repo, tmp_path, load_kwargs=arguments))
    assert read_texts(Folder(tmp_path / "out")) == Counter(["b"])


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("a.csv", b"text\n007\n", "`kind: csv` at the same URL"),
        ("a.jsonl", make_lines({"text": "a"}), "`kind: jsonl` at the same URL"),
        ("a.txt", b"a\n", ""),
    ],
)
def test_the_plan_says_that_the_library_guesses_types(hub, repo, tmp_path, name, body, said):
    commit(hub, repo, {name: body})
    _, found = preflight_dataset(make_settings(hub, repo, tmp_path))
    assert [said in note for note in found.notes] == ([True] if said else [])


class StopError(Exception):
    pass


@pytest.mark.parametrize("moved", [False, True])
def test_a_stopped_run_continues_at_its_row_and_commit(hub, repo, tmp_path, moved):
    texts = make_texts(2000)
    files = {"train-0.jsonl": make_jsonl(texts[:1500]), "train-1.jsonl": make_jsonl(texts[1500:])}
    commit(hub, repo, files)
    settings = make_settings(hub, repo, tmp_path)

    def stop(event):
        if isinstance(event, ShardCommitted):
            raise StopError

    for _ in range(3):
        with pytest.raises(StopError):
            shard_dataset(settings, progress=stop)
    if moved:
        commit(hub, repo, dict.fromkeys(files, make_jsonl(["new"])))
    shard_dataset(settings)
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)
    whole = make_settings(hub, repo, tmp_path / "whole")
    if not moved:
        shard_dataset(whole)
        assert read_members(tmp_path) == read_members(tmp_path / "whole")


def test_every_cursor_continues_with_the_next_row(hub, repo, tmp_path):
    commit(hub, repo, {"a.jsonl": make_jsonl(make_texts(250)), "b.jsonl": make_jsonl(["x", "y"])})
    settings = make_settings(hub, repo, tmp_path)
    plan, _ = preflight_dataset(settings)
    files = settings.source.open_files(plan.source)
    source = open_source(plan.source, files, open_store((tmp_path / "out").as_uri()))
    first, second = sorted((one.source_range for one in plan.partitions), key=lambda one: one.start)
    both = replace(first, end=second.end, size=first.size + second.size)
    rows = list(source.iterate_rows(both, 0))
    assert len(rows) == len({row.key for row in rows}) == 252
    assert [row.fields["txt"] for row in rows[-2:]] == [b"x", b"y"]
    for index in (0, 98, 99, 100, 249, 250, 251):
        after = list(source.iterate_rows(both, rows[index].next_cursor))
        assert after == rows[index + 1 :]


def test_a_removed_commit_is_a_sentence(hub, repo, tmp_path):
    files = {"train-0.jsonl": make_jsonl(make_texts(1000))}
    commit(hub, repo, files)
    settings = make_settings(hub, repo, tmp_path)

    def stop(event):
        if isinstance(event, ShardCommitted):
            raise StopError

    with pytest.raises(StopError):
        shard_dataset(settings, progress=stop)
    api = HfApi(endpoint=hub.endpoint, token=WRITER)
    api.super_squash_history(repo, repo_type="dataset")
    with pytest.raises(errors.ChangedError, match="is gone: the commit was removed"):
        shard_dataset(settings)


def test_a_removed_commit_is_a_sentence_in_the_middle_of_a_run(hub, repo, tmp_path):
    commit(hub, repo, {"a.jsonl": make_jsonl(["a"]), "b.jsonl": make_jsonl(["b"])})
    settings = make_settings(hub, repo, tmp_path)
    plan, _ = preflight_dataset(settings)
    HfApi(endpoint=hub.endpoint, token=WRITER).super_squash_history(repo, repo_type="dataset")
    files = settings.source.open_files(plan.source)
    source = open_source(plan.source, files, open_store((tmp_path / "out").as_uri()))
    with pytest.raises(errors.ChangedError, match="is gone: the commit was removed"):
        list(source.iterate_rows(plan.partitions[0].source_range, 0))


def test_pictures_are_written_as_their_bytes(hub, repo, tmp_path):
    pictures = {}
    for label in ("cat", "dog"):
        for number in range(3):
            body = io.BytesIO()
            Image.new("RGB", (4, 4), (number, 0, len(label))).save(body, "PNG")
            pictures[f"train/{label}/{number}.png"] = body.getvalue()
    commit(hub, repo, pictures)
    settings = make_settings(
        hub, repo, tmp_path, columns={"png": "image", "cls": "label"},
        sharding={"partition_bytes": 1 << 20, "formats": ["webdataset", "mds"]},
    )  # fmt: skip
    shard_dataset(settings)
    plan = fetch_plan(tmp_path)
    assert len(plan.partitions) == 1
    assert plan.layout.fields == {"cls": "int", "png": "bytes"}
    members = read_members(tmp_path)
    assert Counter(body for name, body in members.items() if name.endswith(".png")) == Counter(
        pictures.values()
    )
    assert Counter(body for name, body in members.items() if name.endswith(".cls")) == Counter(
        {b"0": 3, b"1": 3}
    )


def test_tar_files_of_webdataset_are_read_by_the_library(hub, repo, tmp_path):
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for number in range(4):
            for extension, data in (("jpg", bytes([number])), ("txt", b"caption")):
                member = tarfile.TarInfo(f"{number}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    commit(hub, repo, {"train-0.tar": body.getvalue()})
    shard_dataset(make_settings(hub, repo, tmp_path, columns={"jpg": "jpg", "txt": "txt"}))
    members = read_members(tmp_path)
    assert [body for name, body in sorted(members.items()) if name.endswith(".jpg")] == [
        bytes([number]) for number in range(4)
    ]


def test_files_of_this_machine_are_never_read(hub, repo, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"secret")
    rows = [{"image": {"path": path, "bytes": None}} for path in (str(secret), secret.as_uri())]
    features = {"features": [{"name": "image", "dtype": "image"}]}
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    commit(hub, repo, {"README.md": make_card(dataset_info=features), "train.jsonl": lines})
    settings = make_settings(hub, repo, tmp_path, columns={"jpg": "image"})
    with pytest.raises(errors.QuarantineError, match=r"'image.bytes' is null"):
        shard_dataset(settings)
    assert not any(
        b"secret" in path.read_bytes().replace(str(secret).encode(), b"")
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    )


@pytest.mark.parametrize(
    "path", ["/etc/hosts", "file:///etc/hosts", "http://127.0.0.1:1/a.txt", "../a.txt"]
)
def test_a_configuration_cannot_name_files_elsewhere(hub, repo, tmp_path, path):
    card = make_card(configs=[{"config_name": "default", "data_files": path}])
    commit(hub, repo, {"README.md": card, "a.txt": b"a"})
    with pytest.raises(errors.ConfigurationError, match="is not a path of the repository"):
        preflight_dataset(make_settings(hub, repo, tmp_path))


def test_wrong_settings_are_sentences(hub, repo, tmp_path):
    commit(hub, repo, {"train.jsonl": make_jsonl(["a"]), "test.jsonl": make_jsonl(["b"])})

    def plan(**source):
        preflight_dataset(make_settings(hub, repo, tmp_path, **source))

    with pytest.raises(errors.ConfigurationError, match=r"has the splits train, test. Set `split`"):
        plan(split=None)
    with pytest.raises(errors.NotFoundError, match=r"has no split 'dev'. Its splits are train, te"):
        plan(split="dev")
    with pytest.raises(errors.ConfigurationError, match="'nope' not found"):
        plan(config="nope")
    with pytest.raises(errors.ConfigurationError, match=r"has no column 'nope'. Its columns are"):
        plan(columns={"txt": "nope"})
    with pytest.raises(errors.ConfigurationError, match=r"cannot open .* 'nope'"):
        plan(load_kwargs={"nope": 1})
    for url in (f"hf://datasets/{repo}/data", tmp_path.as_uri()):
        settings = make_settings(hub, repo, tmp_path)
        source = SourceLocation(**(dict(settings.source) | {"url": url, "options": {}}))
        with pytest.raises(errors.ConfigurationError, match="of a whole dataset of the Hub"):
            preflight_dataset(settings.model_copy(update={"source": source}))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"load_kwargs": {"trust_remote_code": True}}, "no code of a dataset is run"),
        ({"load_kwargs": {"token": "x"}}, "its own settings"),
        ({"load_kwargs": {"data_files": "/etc/passwd"}}, "is another location"),
        ({"load_kwargs": {"data_files": {"train": ["https://host/a.csv"]}}}, "another location"),
        ({"load_kwargs": {"sep": print}}, "only have texts, numbers"),
        ({"include": ["*.csv"]}, "choose files by `config`, `split` or `load_kwargs`"),
        ({"kind": "jsonl", "split": "train"}, "for the kind `huggingface` only"),
    ],
)
def test_settings_that_do_not_fit_are_refused(source, reason):
    with pytest.raises(ValidationError, match=reason):
        SourceSettings(**({"kind": "huggingface"} | source))


def test_arguments_of_the_library_are_passed_on(hub, repo, tmp_path):
    commit(hub, repo, {"en/train.csv": b"text;n\na;1\n", "de/train.csv": b"text;n\nb;2\n"})
    arguments = {"data_dir": "de", "sep": ";"}
    shard_dataset(make_settings(hub, repo, tmp_path, load_kwargs=arguments))
    assert read_texts(Folder(tmp_path / "out")) == Counter(["b"])


def test_a_damaged_file_is_a_sentence(hub, repo, tmp_path):
    commit(hub, repo, {"a.jsonl": make_jsonl(["a"]), "b.jsonl": b'{"text": "a"}\n{"text": \n'})
    with pytest.raises(errors.ConfigurationError, match="cannot read it after row"):
        shard_dataset(make_settings(hub, repo, tmp_path))


INFO = r"/api/datasets/[^/]+/[^/]+(/revision/.*)?"
TREE = r"/api/datasets/.*/tree/.*"
CARD = r"/datasets/.*/README.md"
DATA = r"/datasets/.*/train.*"


@pytest.fixture
def failing_hub(hub: HubServer) -> Iterator[HubServer]:
    yield hub
    hub.fail_next(0, 500)


def make_files(extension: str, texts: list[str]) -> dict[str, bytes]:
    encode = make_parquet if extension == "parquet" else make_jsonl
    half = len(texts) // 2
    return {
        "README.md": b"# Words",
        f"train-0.{extension}": encode(texts[:half]),
        f"train-1.{extension}": encode(texts[half:]),
    }


@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
@pytest.mark.parametrize("fault", ["500", "503", "429 with a pause", "cut"])
def test_transient_failures_of_the_hub_are_retried(failing_hub, repo, tmp_path, fault, extension):
    texts = make_texts(400)
    commit(failing_hub, repo, make_files(extension, texts))
    for path in (INFO, TREE, CARD, DATA):
        if fault == "cut":
            failing_hub.cut_next(1, path)
        else:
            pause = 1 if "pause" in fault else None
            failing_hub.fail_next(1, int(fault[:3]), path, retry_after=pause)
    shard_dataset(make_settings(failing_hub, repo, tmp_path))
    assert failing_hub.count_unfired() == 0
    assert read_texts(Folder(tmp_path / "out")) == Counter(texts)


def test_a_read_that_the_library_gives_up_continues_at_its_row(
    failing_hub, repo, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in has no bridge to Xet
    texts = [f"{number} {'x' * 1000}" for number in range(26_000)]
    commit(failing_hub, repo, {"train.jsonl": make_jsonl(texts)})
    settings = make_settings(failing_hub, repo, tmp_path)
    plan, _ = preflight_dataset(settings)
    files = settings.source.open_files(plan.source)
    source = open_source(plan.source, files, open_store(settings.store))
    rows = source.iterate_rows(plan.partitions[0].source_range, 0)
    found = [next(rows).fields["txt"].decode()]
    failing_hub.fail_next(1, 520, DATA)  # a status that huggingface_hub does not repeat
    found += [row.fields["txt"].decode() for row in rows]
    assert failing_hub.count_unfired() == 0
    assert found == texts


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_configuration_is_not_taken_as_absent_when_its_request_fails(
    failing_hub, repo, tmp_path, name
):
    configs = {"configs": [{"config_name": "default", "data_files": "en/*.jsonl"}]}
    card = make_card(**configs) if name == "README.md" else json.dumps(configs).encode()
    files = {name: card, "en/a.jsonl": make_jsonl(["a"]), "b.jsonl": make_jsonl(["b"])}
    commit(failing_hub, repo, files)
    # Millrace reads the file by three requests. Those of the library would fail.
    failing_hub.fail_next(10, 500, f"/datasets/.*/{name}", skip=3)
    shard_dataset(make_settings(failing_hub, repo, tmp_path))
    assert read_texts(Folder(tmp_path / "out")) == Counter(["a"])


def test_a_hub_that_stays_down_is_a_sentence(failing_hub, repo, tmp_path):
    commit(failing_hub, repo, make_files("jsonl", make_texts(10)))
    failing_hub.fail_next(10_000, 503)
    with pytest.raises(errors.UnavailableError, match=r"hf://datasets/.*Run it again"):
        preflight_dataset(make_settings(failing_hub, repo, tmp_path))


@pytest.mark.parametrize("when", ["planned", "read"])
@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("token", errors.DeniedError, "the Hub refuses this token. Give a token"),
        ("gate", errors.DeniedError, "the repository is gated. Accept its conditions on its page"),
        ("squash", errors.ChangedError, "is gone: the commit was removed from the history"),
    ],
)
def test_a_hub_that_refuses_is_a_sentence(
    hub, repo, tmp_path, change, error, said, extension, when
):
    commit(hub, repo, make_files(extension, make_texts(10)))
    settings = make_settings(hub, repo, tmp_path)
    plan, _ = preflight_dataset(settings)
    pinned = settings.source.open_files(plan.source).committed_spec.revision
    match change:
        case "gate":
            hub.gate(repo)
        case "squash":
            HfApi(endpoint=hub.endpoint, token=WRITER).super_squash_history(
                repo, repo_type="dataset"
            )
        case _:
            pass
    # Other settings of the retries: as in another process, nothing is known of the repository.
    changed = {"retry_timeout": timedelta(seconds=2), "url": f"hf://datasets/{repo}@{pinned}"}
    if change == "token":
        changed["options"] = {"token": SecretStr("hf_revoked")}
    source = SourceLocation(**(dict(settings.source) | changed))

    def read_again():
        files, store = source.open_files(plan.source), open_store(settings.store)
        rows = open_source(plan.source, files, store).iterate_rows
        list(rows(plan.partitions[0].source_range, 0))

    def plan_again():
        preflight_dataset(settings.model_copy(update={"source": source}))

    with pytest.raises(error, match=said):
        plan_again() if when == "planned" else read_again()


def test_the_library_is_imported_only_when_it_is_needed():
    import subprocess
    import sys

    code = "import sys, millrace.datasets.sources; assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
