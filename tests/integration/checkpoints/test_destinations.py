"""The contract of every destination: stores of every kind, and the Hugging Face Hub."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.hf_api import RepoFile
from pydantic import SecretStr

from millrace import errors
from millrace.audit import ProbeVerdict, probe
from millrace.checkpoints import (
    Destination,
    Saver,
    SaveSettings,
    StoreDestination,
    contents,
    copy_checkpoint,
    load,
    open_destination,
)
from millrace.checkpoints.destinations import copy_and_measure
from millrace.checkpoints.destinations.hub import HubDestination, HubSpec, matches_bytes
from millrace.checkpoints.find import commit_checkpoint, compute_root
from millrace.checkpoints.progress_events import CheckpointSaved, PartStored
from millrace.cli import main
from millrace.hub import client as hub_client
from millrace.hub.client import HubClient
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import open_store, put, read_and_hash
from millrace.testing.faults import Fault
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.process import find_free_ports
from tests.oracle import Folder, judge_checkpoints
from tests.stores import make_spec

pytestmark = pytest.mark.contract

JOB = "runs/there"
KEYS = CheckpointKeys(JOB)
SMALL = SaveSettings(part_bytes=4096)
SHORT = timedelta(seconds=0.3)
Damage = Callable[[str], None]


@dataclass
class Place:
    """A destination, and how to damage what is there."""

    there: Destination
    damage: Damage


def hub_spec(hub: HubServer, repo: str, **more: object) -> HubSpec:
    spec = HubSpec(repo=repo, token=SecretStr(WRITER), endpoint=hub.endpoint)
    return spec.model_copy(update=more)


@pytest.fixture(params=["local", "memory", "rgw", "r2", "gcs", "hub", "hub by LFS"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param.startswith("hub"):
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", request.param == "hub by LFS")
        hub: HubServer = request.getfixturevalue("hub")
        repo = hub.make_repo()
        return Place(open_destination(hub_spec(hub, repo)), lambda key: hub.flip(repo, key))
    store = open_store(make_spec(request.param, request))
    return Place(StoreDestination(store), lambda key: put(store, key, b"x" * 4096))


@dataclass
class Source:
    """Checkpoints on a disk."""

    here: StoreDestination
    folder: Path

    def save(
        self, seed: int, step: int = 5, *, sample: int = 9, note: str = "", job: str = ""
    ) -> Checkpoint:
        dice = torch.Generator().manual_seed(seed)
        state = {"model": {f"w{n}": torch.randn(900, generator=dice) for n in range(5)}, "lr": 0.1}
        position, notes = {"sample": sample}, {"note": note}
        with Saver(self.here.store, job or f"trained-{seed}", SMALL) as saver:
            return saver.save(state, step=step, position=position, notes=notes).result()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(StoreDestination(open_store((tmp_path / "disk").as_uri())), tmp_path)


@dataclass
class Heard:
    """Events that progress received."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def sent(self) -> int:
        return sum(e.sent for e in self.events if isinstance(e, PartStored))


def test_a_checkpoint_is_brought_there_once_and_back(place: Place, source: Source) -> None:
    saved, heard = source.save(1), Heard()
    found = copy_checkpoint(source.here, saved, place.there, JOB, progress=heard)
    assert (found.job, found.step, found.root) == (JOB, 5, saved.root)
    assert found.position == {"sample": 9}
    assert heard.sent == saved.size
    assert [type(event) for event in heard.events].count(CheckpointSaved) == 1
    assert (
        list(place.there.iterate_checkpoints(JOB))
        == [place.there.read_checkpoint(JOB, 5)]
        == [found]
    )
    assert place.there.verify(found) == {}

    heard = Heard()
    assert copy_checkpoint(source.here, saved, place.there, JOB, progress=heard) == found
    assert heard.sent == 0

    back = StoreDestination(open_store((source.folder / "back").as_uri()))
    copy_checkpoint(place.there, found, back, "again")
    state = load(source.here.store, "trained-1").state
    loaded = load(back.store, "again").state
    assert loaded["lr"] == 0.1
    assert all(torch.equal(loaded["model"][name], state["model"][name]) for name in state["model"])


def test_a_file_of_the_hub_that_is_larger_than_expected_is_not_read(
    hub: HubServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = hub_spec(hub, hub.make_repo())
    found = copy_checkpoint(source.here, source.save(1), open_destination(spec), JOB)
    client, key = HubClient(spec), KEYS.make_part_key(5, found.parts[0].digest)
    is_dry: list[bool] = []
    download = HfApi.hf_hub_download

    def watch(*arguments: object, dry_run: bool, **settings: object) -> object:
        is_dry.append(dry_run)
        return download(*arguments, dry_run=dry_run, **settings)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(HfApi, "hf_hub_download", watch)
    size = found.parts[0].size
    with pytest.raises(
        errors.CorruptError, match=f"has {size:,} bytes, more than the {size - 1:,}"
    ):
        client.download(key, client.read_head(), size - 1)
    assert is_dry == [True]
    assert len(client.download(key, client.read_head(), size)) == size


def test_a_repository_of_the_hub_with_too_many_files_is_refused(
    hub: HubServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = hub_spec(hub, hub.make_repo())
    copy_checkpoint(source.here, source.save(1), open_destination(spec), JOB)
    client = HubClient(spec)
    head = client.read_head()
    count = len(client.list_tree("", head, recursive=True))
    monkeypatch.setattr(hub_client, "_MAX_ENTRIES", count)
    assert len(client.list_tree("", head, recursive=True)) == count
    monkeypatch.setattr(hub_client, "_MAX_ENTRIES", count - 1)
    with pytest.raises(errors.CorruptError, match=f"lists more than {count - 1} files"):
        client.list_tree("", head, recursive=True)


def test_a_step_has_one_content(place: Place, source: Source) -> None:
    first = copy_checkpoint(source.here, source.save(1), place.there, JOB)
    with pytest.raises(errors.ConflictError, match="same step with another content"):
        copy_checkpoint(source.here, source.save(2), place.there, JOB)
    assert place.there.read_checkpoint(JOB, 5) == first
    assert place.there.verify(first) == {}


def test_a_copy_with_another_position_or_other_notes_is_a_conflict(
    place: Place, source: Source
) -> None:
    first = copy_checkpoint(source.here, source.save(1), place.there, JOB)
    resumed = source.save(1, sample=10, note="resumed", job="resumed")
    with pytest.raises(errors.ConflictError, match="differs in position and notes"):
        copy_checkpoint(source.here, resumed, place.there, JOB)
    assert place.there.read_checkpoint(JOB, 5) == first


def test_several_that_bring_the_same_come_to_one_checkpoint(place: Place, source: Source) -> None:
    saved = source.save(1)
    found: list[Checkpoint] = []

    def one() -> None:
        found.append(copy_checkpoint(source.here, saved, place.there, JOB))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [place.there.read_checkpoint(JOB, 5)] * 4
    assert place.there.verify(found[0]) == {}


def test_the_newest_comes_first_and_what_is_not_there_is_not_found(
    place: Place, source: Source
) -> None:
    assert list(place.there.iterate_checkpoints(JOB)) == []
    with pytest.raises(errors.NotFoundError):
        place.there.read_checkpoint(JOB, 5)
    for seed, step in ((1, 9), (2, 10), (3, 100)):
        copy_checkpoint(source.here, source.save(seed, step), place.there, JOB)
    assert [found.step for found in place.there.iterate_checkpoints(JOB)] == [100, 10, 9]
    assert list(place.there.iterate_checkpoints("another")) == []


def test_damage_is_found_and_damaged_files_are_not_given_out(place: Place, source: Source) -> None:
    found = copy_checkpoint(source.here, source.save(1), place.there, JOB)
    part = found.parts[1]
    place.damage(KEYS.make_part_key(5, part.digest))
    assert list(place.there.verify(found)) == [part.digest]
    content = place.there.open_content(found)
    with pytest.raises(errors.CorruptError, match="not the bytes that were saved"):
        content.read(1)
    assert content.read(0)
    with pytest.raises(errors.CorruptError):
        copy_checkpoint(place.there, found, source.here, "copy")
    assert not list(source.here.iterate_checkpoints("copy"))


def test_damage_of_the_source_is_not_brought_along(place: Place, source: Source) -> None:
    saved = source.save(1)
    keys = CheckpointKeys(saved.job)
    put(source.here.store, keys.make_part_key(5, saved.parts[0].digest), b"x")
    with pytest.raises(errors.CorruptError):
        copy_checkpoint(source.here, saved, place.there, JOB)
    assert not list(place.there.iterate_checkpoints(JOB))


def test_a_checkpoint_without_files_is_copied(tmp_path: Path) -> None:
    """No saver makes one, but another program may have written its metadata."""
    made = Checkpoint(
        job=JOB, step=1, run="", position={}, notes={}, saved=datetime(2026, 1, 1, tzinfo=UTC),
        root=compute_root((), {}), parts=(), tensors={},
    )  # fmt: skip
    source, there = (
        StoreDestination(open_store((tmp_path / name).as_uri())) for name in ("a", "b")
    )
    commit_checkpoint(source.store, made)
    copied = copy_checkpoint(source, source.read_checkpoint(JOB, 1), there, JOB)
    assert there.read_checkpoint(JOB, 1) == copied
    assert copied.parts == ()


def test_a_place_that_is_ready_is_left_as_it_was(place: Place) -> None:
    found = probe(place.there, JOB, size=1 << 20, within=timedelta(hours=1))
    assert (found.verdict, found.reason[-1]) == (ProbeVerdict.READY, ".")
    assert found.rate > 0
    slow = probe(place.there, JOB, size=1 << 20, within=timedelta(0))
    assert slow.verdict is ProbeVerdict.TOO_SLOW
    assert not list(place.there.iterate_checkpoints(JOB))


def test_a_store_that_loses_answers_and_has_wrong_files_gets_the_right_ones(
    request: pytest.FixtureRequest, source: Source
) -> None:
    saved, r2 = source.save(1), request.getfixturevalue("r2")
    store = open_store(make_spec("r2", request))
    r2.reset()
    r2.fail_next(Fault.LOST, 3, "PUT", "/parts/")
    put(store, KEYS.make_part_key(5, saved.parts[-1].digest), b"wrong")
    there = StoreDestination(store)
    try:
        found = copy_checkpoint(source.here, saved, there, JOB)
        assert r2.count_fired()[Fault.LOST] == 3
    finally:
        r2.reset()
    assert there.verify(found) == {}


def test_bytes_that_replace_a_damaged_file_count_as_sent(tmp_path: Path, source: Source) -> None:
    saved, there = source.save(1), StoreDestination(open_store((tmp_path / "there").as_uri()))
    copy_checkpoint(source.here, saved, there, JOB)
    part = saved.parts[1]
    put(there.store, KEYS.make_part_key(5, part.digest), b"x" * part.size)
    copied = copy_and_measure(source.here, saved, there, JOB)
    assert copied.sent_bytes == part.size
    assert there.verify(copied.checkpoint) == {}


# -- the Hub alone


@pytest.fixture
def repo(hub: HubServer) -> Iterator[str]:
    yield hub.make_repo()
    hub.fail_next(0, 500)


def test_a_checkpoint_is_one_commit_and_its_snapshot_can_be_loaded(
    hub: HubServer, repo: str, source: Source
) -> None:
    there = open_destination(hub_spec(hub, repo))
    before = hub.count_commits(repo)
    found = copy_checkpoint(source.here, source.save(1), there, JOB)
    assert hub.count_commits(repo) == before + 1
    folder = snapshot_download(
        repo, local_dir=source.folder / "snapshot", endpoint=hub.endpoint, token=READER
    )
    assert load(open_store(Path(folder).as_uri()), JOB).checkpoint == found


@pytest.mark.parametrize("rule", ["*.safetensors", "*.json", "*"])
def test_a_repository_that_ignores_files_gets_all_files_of_a_checkpoint(
    hub: HubServer, repo: str, source: Source, rule: str
) -> None:
    ignore_files(hub, repo, rule)
    there = open_destination(hub_spec(hub, repo))
    there.try_save(JOB, timeout=SHORT)
    found = copy_checkpoint(source.here, source.save(1), there, JOB)
    assert there.verify(found) == {}
    assert list(there.iterate_checkpoints(JOB)) == [found]


def test_a_hub_that_ignores_files_in_spite_of_the_client_gets_no_checkpoint(
    hub: HubServer, repo: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "_IGNORE_NOTHING", "metadata.json")
    there = open_destination(hub_spec(hub, repo))
    with pytest.raises(errors.MillraceError, match=r"ignores this file.*\.gitignore"):
        copy_checkpoint(source.here, source.save(1), there, JOB)
    assert list(there.iterate_checkpoints(JOB)) == []


@pytest.mark.parametrize("lost", [0, -1], ids=["a file", "the metadata"])
def test_a_commit_without_a_file_of_the_checkpoint_is_not_reported_as_saved(
    hub: HubServer, repo: str, source: Source, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    commit_once = HubClient.commit_once

    def lose_file(client: HubClient, key: str, added: list, message: str, head: str) -> str:
        return commit_once(client, key, [one for one in added if one != added[lost]], message, head)

    monkeypatch.setattr(HubClient, "commit_once", lose_file)
    heard = Heard()
    with pytest.raises(errors.CorruptError, match="the commit of the checkpoint lacks 1 file"):
        copy_checkpoint(
            source.here, source.save(1), open_destination(hub_spec(hub, repo)), JOB, progress=heard
        )
    assert not any(isinstance(event, CheckpointSaved) for event in heard.events)


def ignore_files(hub: HubServer, repo: str, rule: str) -> None:
    """Commit a ``.gitignore`` with one rule."""
    HfApi(endpoint=hub.endpoint, token=WRITER).upload_file(
        repo_id=repo, path_in_repo=".gitignore", path_or_fileobj=f"{rule}\n".encode()
    )


def test_a_snapshot_has_the_digests_of_blocks_and_is_loaded_by_block(
    hub: HubServer, repo: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(3_000_000.0).view(-1, 1000)}
    with Saver(source.here.store, "large") as saver:
        saved = saver.save(state, step=5).result()
    before = hub.count_commits(repo)
    copy_checkpoint(source.here, saved, open_destination(hub_spec(hub, repo)), JOB)
    assert hub.count_commits(repo) == before + 1
    folder = snapshot_download(
        repo, local_dir=source.folder / "snapshot", endpoint=hub.endpoint, token=READER
    )
    assert judge_checkpoints(Folder(Path(folder)), JOB, is_cleaned=True) == []
    counts: list[int] = []

    def read_counted(store, key, buffers, **more):
        counts.append(sum(map(len, buffers)))
        return read_and_hash(store, key, buffers, **more)

    monkeypatch.setattr(contents, "read_and_hash", read_counted)
    loaded = load(
        open_store(Path(folder).as_uri()), JOB, only=lambda name: name == "w", rows={"w": (0, 9)}
    )
    assert torch.equal(loaded.state["w"], state["w"][:9])
    assert sum(counts) < saved.size / 2


def test_a_file_of_the_branch_is_kept_only_if_its_bytes_are_those_that_were_saved(
    hub: HubServer, repo: str, source: Source
) -> None:
    saved, client, heard = source.save(1), HubClient(hub_spec(hub, repo)), Heard()
    content = source.here.open_content(saved)
    keys = [KEYS.make_part_key(5, part.digest) for part in saved.parts[:2]]
    bodies = {keys[0]: bytes(content.read(0).body), keys[1]: b"x" * saved.parts[1].size}
    client.commit_once(keys[0], client.upload(keys[0], bodies), "left behind", client.read_head())
    there = open_destination(hub_spec(hub, repo))
    found = copy_checkpoint(source.here, saved, there, JOB, progress=heard)
    assert heard.sent == saved.size - saved.parts[0].size
    assert there.verify(found) == {}


@pytest.mark.parametrize("lfs", [False, True])
def test_a_file_of_the_hub_is_compared_by_its_digest_there(*, lfs: bool) -> None:
    entry: dict[str, object] = {
        "path": "a",
        "size": 3,
        "oid": "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f",  # of `git hash-object`
    }
    if lfs:
        digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        entry |= {"oid": "0" * 40, "lfs": {"size": 3, "oid": digest, "pointerSize": 134}}
    assert matches_bytes(RepoFile(**entry), b"abc")
    assert not matches_bytes(RepoFile(**entry), b"abd")
    assert not matches_bytes(RepoFile(**entry | {"size": 4}), b"abc")


def test_a_damaged_copy_on_the_hub_is_not_reported_as_verified(
    hub: HubServer, repo: str, source: Source
) -> None:
    saved, there = source.save(1), open_destination(hub_spec(hub, repo))
    copy_checkpoint(source.here, saved, there, JOB)
    hub.flip(repo, KEYS.make_part_key(5, saved.parts[1].digest))
    with pytest.raises(errors.CorruptError, match=r"1 damaged file.*[Dd]elete .*step_000000005/"):
        copy_checkpoint(source.here, saved, there, JOB)


def test_a_commit_of_somebody_else_is_not_undone(hub: HubServer, repo: str, source: Source) -> None:
    there = open_destination(hub_spec(hub, repo))
    before = hub.count_commits(repo)
    saved = source.save(1)
    hub.commit_behind(repo)
    found = copy_checkpoint(source.here, saved, there, JOB)
    assert hub.count_commits(repo) == before + 2
    assert hub.count_uploads(repo) == len(saved.parts)  # each once, though it tried twice
    assert there.verify(found) == {}


@pytest.mark.parametrize("after", [False, True], ids=["failed", "lost"])
@pytest.mark.parametrize(
    ("what", "lfs"),
    [
        ("/api/.*/commit/.*", False),
        ("/api/.*/tree/.*", False),
        (".*/xet-write-token/.*", False),
        (".*/xet-read-token/.*", False),
        ("/lfs/.*", True),
        (".*/batch", True),
    ],
)
def test_faults_that_pass_are_got_over(
    hub: HubServer,
    repo: str,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    *,
    after: bool,
    lfs: bool,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", lfs)
    before = hub.count_commits(repo)
    hub.fail_next(1 if after else 2, 503, what, after=after)
    found = copy_checkpoint(source.here, source.save(1), open_destination(hub_spec(hub, repo)), JOB)
    assert hub.count_commits(repo) == before + 1
    assert open_destination(hub_spec(hub, repo)).verify(found) == {}
    assert hub.count_unfired() == 0


@pytest.mark.parametrize(
    ("verdict", "changes"),
    [
        (ProbeVerdict.READ_ONLY, {"token": SecretStr(READER)}),
        (ProbeVerdict.DENIED, {"token": SecretStr("hf_unknown")}),
        (ProbeVerdict.NOT_FOUND, {"repo": "person/nothing"}),
        (ProbeVerdict.UNREACHABLE, {"endpoint": "http://127.0.0.1:{port}"}),
        (ProbeVerdict.THROTTLED, {}),
    ],
)
def test_a_probe_of_the_hub_tells_refusals_apart(
    hub: HubServer, repo: str, verdict: ProbeVerdict, changes: dict[str, object]
) -> None:
    if "endpoint" in changes:
        (port,) = find_free_ports(1)
        changes = {"endpoint": f"http://127.0.0.1:{port}"}
    timeout = SHORT
    if verdict is ProbeVerdict.THROTTLED:
        hub.fail_next(1000, 429, f"/api/models/{repo}/commit/.*", retry_after=3600)
        timeout = timedelta(minutes=1)  # shorter than the pause, which is not waited for
    spec = hub_spec(hub, repo).model_copy(update=changes)
    found = probe(HubDestination(spec), JOB, timeout=timeout)
    assert found.verdict is verdict, found.reason
    assert hub.list_branches(repo) == ["main"]
    assert hub.count_commits(repo) == 1


def test_bytes_of_a_file_that_the_hub_lost_are_reported_as_damage(
    hub: HubServer, repo: str, source: Source
) -> None:
    saved, there = source.save(1), open_destination(hub_spec(hub, repo))
    found = copy_checkpoint(source.here, saved, there, JOB)
    hub.move_xet(repo, hub.endpoint)
    damage = there.verify(found)
    assert list(damage) == [part.digest for part in found.parts]
    assert all(reason.endswith("is missing.") for reason in damage.values())


def test_a_storage_of_the_hub_that_does_not_answer_is_unreachable(
    hub: HubServer, repo: str, source: Source
) -> None:
    (port,) = find_free_ports(1)
    hub.move_xet(repo, f"http://127.0.0.1:{port}")
    spec = hub_spec(hub, repo, retry_timeout=SHORT)
    found = probe(HubDestination(spec), JOB, timeout=SHORT)
    assert found.verdict is ProbeVerdict.UNREACHABLE, found.reason
    assert hub.list_branches(repo) == ["main"]
    with pytest.raises(errors.UnavailableError):
        copy_checkpoint(source.here, source.save(1), open_destination(spec), JOB)
    assert hub.count_commits(repo) == 1


def test_what_names_no_repository_is_refused() -> None:
    for url in ("hf://", "hf://name", "hf://a/b/c", "hf:///b"):
        with pytest.raises(errors.ConfigurationError, match="write hf://owner/name"):
            open_destination(url)
    assert open_destination("hf://person/repo").url == "hf://person/repo@main"
    assert open_destination("hf://person/repo@next").url == "hf://person/repo@next"


def test_the_command_probes_a_repository(
    hub: HubServer, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    said = CliRunner().invoke(main, ["checkpoint", "probe", f"hf://{repo}", JOB])
    assert said.exit_code == 0, said.output
    assert "ready: hf://" in said.output
