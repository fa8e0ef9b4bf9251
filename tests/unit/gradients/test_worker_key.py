"""The key of a worker, and its signatures."""

import pytest

from millrace.errors import ConfigurationError
from millrace.gradients import WorkerKey
from millrace.gradients.sync.worker_key import is_signed
from millrace.schemas.registration import Registration

WANTED = Registration(run="runs/one", version="1", uid="a", number=1, key="0" * 64)


def test_a_key_is_written_once_and_for_its_owner_only(tmp_path):
    path = tmp_path / "folder" / "worker.key"
    key = WorkerKey.load(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["worker.key"]
    assert WorkerKey.load(path).public == key.public
    assert WorkerKey.load(tmp_path / "other.key").public != key.public


@pytest.mark.parametrize("content", ["", "ab", "0" * 63, "z" * 64, "0" * 10_000])
def test_a_file_without_a_key_is_named_and_stays(tmp_path, content):
    path = tmp_path / "worker.key"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"worker\.key has no worker's key.*restore"):
        WorkerKey.load(path)
    assert path.read_text() == content


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be read or written"):
        WorkerKey.load(tmp_path / "file" / "worker.key")


def test_a_registration_is_signed_whole():
    signed = WorkerKey.generate().sign(WANTED)
    assert is_signed(signed)
    other = WorkerKey.generate().public
    for change in (
        {"run": "runs/two"}, {"version": "2"}, {"uid": "b"}, {"number": 2}, {"leaves_after": 3},
        {"key": other}, {"signature": ""}, {"signature": "0" * 128}, {"key": "f" * 64},
    ):  # fmt: skip
        assert not is_signed(signed.model_copy(update=change)), change
