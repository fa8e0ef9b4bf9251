"""A Templar run that becomes a chain, as a person imports it."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from millrace import errors
from millrace.cli import main
from millrace.gradients import (
    ExclusionReason,
    TemplarImportSettings,
    WeightState,
    catch_up,
    import_templar_run,
    iterate_links,
    load_newest_state,
)
from millrace.gradients.weights import save_weights
from millrace.keys.gradients import ChainKeys
from millrace.storage import open_store
from tests.support.s3 import Refusal, Request, S3Endpoint, serve_s3
from tests.support.templar_gradients import Written, write_payload

SHAPES = {"a.weight": (64, 128), "norm.weight": (96,)}
KEYS = ChainKeys("runs/templar", "1")
FIRST, LAST = 40, 43


def write(window: int, uid: int, **changed: Any) -> Written:
    random = torch.Generator().manual_seed(100 * window + uid)
    changes = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return write_payload(changes, **{"k": 64, "window": window} | changed)


def name_of(window: int, uid: int) -> str:
    return f"gradient-{window}-{uid}-v2.1.28.pt"


@pytest.fixture
def bucket(tmp_path: Path) -> dict[tuple[int, int], Written]:
    """A bucket with three honest workers in each window, and faults in window 41."""
    folder = tmp_path / "templar"
    (folder / "gathers/2.1.28").mkdir(parents=True)
    sent = {(w, uid): write(w, uid) for w in range(FIRST, LAST + 1) for uid in (1, 7, 12)}
    for (window, uid), written in sent.items():
        (folder / name_of(window, uid)).write_bytes(written.save())
    (folder / name_of(41, 20)).write_bytes(write(40, 20).save())  # replayed
    (folder / name_of(41, 21)).write_bytes(b"no archive")
    (folder / name_of(41, 22)).write_bytes(write(41, 22, k=32).save())
    (folder / name_of(41, 23)).write_bytes(sent[41, 1].save())  # a copy
    (folder / name_of(41, 24)).write_bytes(bytes(1 << 20))
    for other in (
        "gradient-41-7-v2.1.2.pt",
        "gradient-41-x-v2.1.28.pt",
        "gradient-41-007-v2.1.28.pt",
        "gradient-410-1-v2.1.28.pt",
        "start_window_v2.1.28.json",
    ):
        (folder / other).write_bytes(b"{}")
    return sent


def settings_of(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    return {
        "templar": {
            "store": {"url": (tmp_path / "templar").as_uri()}, "version": "2.1.28",
            "first_window": FIRST, "last_window": LAST, "k": 64,
        },
        "run": {
            "run": KEYS.run, "steps": 30, "codec": {"bits": 32, "k": 4096},
            "merge": {"rule": "mean", "clip": False}, "outer": {"lr": 0.5},
        },
        "store": {"url": (tmp_path / "chain").as_uri()},
        "initial_weights": {"job": "start"},
        "every": 3,
    } | changed  # fmt: skip


def begin(tmp_path: Path) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    weights = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
    }
    state = WeightState({name: weight.copy() for name, weight in weights.items()})
    save_weights(state, open_store((tmp_path / "chain").as_uri()), "start", step=0, window=0)
    return weights


class ListedEndpoint(S3Endpoint):
    """Endpoint that lists its objects."""

    def answer(self, request: Request) -> tuple[int, bytes] | None:
        """Return the status and the body of an answer."""
        query = parse_qs(urlsplit(request.path).query)
        if "list-type" not in query:
            return super().answer(request)
        found = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{self.etag}</ETag><Size>{len(body)}</Size></Contents>"
            for key, body in sorted(self.objects.items())
            if key.startswith(query.get("prefix", [""])[0])
        )
        return 200, f"<ListBucketResult>{found}</ListBucketResult>".encode()


def serve_folder(stack: ExitStack, folder: Path) -> ListedEndpoint:
    endpoint = stack.enter_context(serve_s3(ListedEndpoint))
    endpoint.objects = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    return endpoint


def specify(endpoint: S3Endpoint, retry_timeout: str) -> dict[str, Any]:
    return {
        "url": "s3://bucket", "endpoint": endpoint.url, "region": "us-east-1",
        "credentials": {"access_key_id": "id", "secret_access_key": "secret"},
        "retry_timeout": retry_timeout,
    }  # fmt: skip


def load(tmp_path: Path, **changed: Any) -> TemplarImportSettings:
    return TemplarImportSettings.model_validate(settings_of(tmp_path, **changed))


def check_weights(tmp_path: Path, weights: dict[str, np.ndarray], bucket: Any) -> None:
    """Compare the weights of the chain with a sum of the changes that the writer decodes."""
    store = open_store((tmp_path / "chain").as_uri())
    state, window = load_newest_state(store, KEYS)
    catch_up(store, KEYS, state, after=window)
    for name, first in weights.items():
        expected = first.astype(np.float64)
        for number in range(FIRST, LAST + 1):
            sent = [bucket[number, uid].decoded[name].numpy() for uid in (1, 7, 12)]
            expected = expected - 0.5 * np.mean(sent, axis=0, dtype=np.float64)
        assert np.allclose(state.weights[name], expected, rtol=0, atol=1e-5)
        assert not np.allclose(first, expected, atol=0.1)


def test_an_import_has_the_changes_of_the_honest_workers_and_a_reason_for_each_other(
    tmp_path: Path, bucket: Any
) -> None:
    weights = begin(tmp_path)
    file = tmp_path / "import.yaml"
    settings = settings_of(tmp_path)
    settings["initial_weights"]["tensors"] = "weights."
    file.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(main, ["gradient", "import", str(file), "--json"])
    assert result.exit_code == 0, result.output
    links = list(iterate_links(open_store((tmp_path / "chain").as_uri()), KEYS))
    assert [link.window for link in links] == [1, 2, 3, 4]
    assert [link.step for link in links] == [30, 60, 90, 120]
    assert all(set(link.taken) == {"templar-1", "templar-7", "templar-12"} for link in links)
    assert {uid: one.reason for uid, one in links[1].excluded.items()} == {
        "templar-20": ExclusionReason.WINDOW,
        "templar-21": ExclusionReason.FORMAT,
        "templar-22": ExclusionReason.CODES,
        "templar-23": ExclusionReason.DUPLICATE,
        "templar-24": ExclusionReason.TOO_LARGE,
    }
    check_weights(tmp_path, weights, bucket)
    printed = json.loads(result.stdout)
    assert [one["templar_window"] for one in printed] == [40, 41, 42, 43]
    assert set(printed[1]["lost"].values()) == {0.0}
    assert printed[1]["excluded"]["templar-20"] == "window"
    again = CliRunner().invoke(main, ["gradient", "import", str(file)])
    assert again.exit_code == 0, again.output
    assert "All of these windows are in the chain." in again.output


def test_an_import_that_was_stopped_continues_with_the_same_bytes(
    tmp_path: Path, bucket: Any
) -> None:
    weights = begin(tmp_path)
    initial = {"job": "start", "tensors": "weights."}
    settings = load(tmp_path, initial_weights=initial)
    stopped = import_templar_run(settings)
    assert [next(stopped).window, next(stopped).window] == [1, 2]
    stopped.close()
    assert [link.window for link in import_templar_run(settings)] == [3, 4]
    check_weights(tmp_path, weights, bucket)


def test_an_import_that_was_stopped_after_its_last_link_saves_its_weights(
    tmp_path: Path, bucket: Any
) -> None:
    begin(tmp_path)
    settings = load(tmp_path, initial_weights={"job": "start", "tensors": "weights."})
    stopped = import_templar_run(settings)
    assert [next(stopped).window for _ in range(LAST - FIRST + 1)] == [1, 2, 3, 4]
    stopped.close()
    assert list(import_templar_run(settings)) == []
    assert load_newest_state(open_store((tmp_path / "chain").as_uri()), KEYS)[1] == 4


def test_an_import_that_goes_on_from_another_first_window_is_refused(
    tmp_path: Path, bucket: Any
) -> None:
    weights = begin(tmp_path)
    settings = settings_of(tmp_path, initial_weights={"job": "start", "tensors": "weights."})

    def import_windows(first: int, last: int) -> list[int]:
        settings["templar"] |= {"first_window": first, "last_window": last}
        loaded = TemplarImportSettings.model_validate(settings)
        return [link.window for link in import_templar_run(loaded)]

    assert import_windows(FIRST, FIRST) == [1]
    for last in (FIRST + 1, LAST):  # of which none, or all but the first would be imported
        with pytest.raises(errors.ConflictError, match="not made of Templar's window 41: leave"):
            import_windows(FIRST + 1, last)
    assert import_windows(FIRST, LAST) == [2, 3, 4]
    check_weights(tmp_path, weights, bucket)


def test_fewer_gradients_than_the_quorum_change_nothing(tmp_path: Path, bucket: Any) -> None:
    begin(tmp_path)
    settings = settings_of(tmp_path, initial_weights={"job": "start", "tensors": "weights."})
    settings["run"]["gather"] = {"quorum": 4}
    links = list(import_templar_run(TemplarImportSettings.model_validate(settings)))
    assert [len(link.taken) for link in links] == [0] * 4
    assert len({link.state for link in links}) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, errors.UnavailableError), (403, errors.DeniedError), (404, errors.NotFoundError)],
)
def test_a_shared_bucket_that_does_not_give_a_payload_ends_the_import_before_the_link(
    tmp_path: Path, bucket: Any, status: int, kind: type[Exception]
) -> None:
    weights = begin(tmp_path)
    settings = settings_of(tmp_path, initial_weights={"job": "start", "tensors": "weights."})
    with ExitStack() as stack:
        endpoint = serve_folder(stack, tmp_path / "templar")

        def load_with(retry_timeout: str) -> TemplarImportSettings:
            settings["templar"]["store"] = specify(endpoint, retry_timeout)
            return TemplarImportSettings.model_validate(settings)

        started = import_templar_run(load_with("2m"))
        assert next(started).window == 1
        started.close()
        outage = Refusal("GET", status, "", times=1 << 20, key=name_of(41, 12))
        endpoint.refusals = [outage]
        with pytest.raises(kind, match=name_of(41, 12)):
            next(import_templar_run(load_with("3s")))
        outage.times = 0
        links = list(import_templar_run(load_with("2m")))
    assert [link.window for link in links] == [2, 3, 4]
    assert all(set(link.taken) == {"templar-1", "templar-7", "templar-12"} for link in links)
    check_weights(tmp_path, weights, bucket)


def test_a_worker_with_its_own_bucket_is_believed_there_only(tmp_path: Path, bucket: Any) -> None:
    begin(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    (own / name_of(40, 7)).write_bytes(write(40, 7, bins=256).save())
    (own / name_of(40, 1)).write_bytes(write(40, 1, bins=256).save())
    settings = settings_of(tmp_path, initial_weights={"job": "start", "tensors": "weights."})
    settings["templar"] |= {"worker_stores": {7: {"url": own.as_uri()}}, "last_window": 41}
    links = list(import_templar_run(TemplarImportSettings.model_validate(settings)))
    assert set(links[0].taken) == {"templar-1", "templar-7", "templar-12"}
    assert set(links[1].taken) == {"templar-1", "templar-12"}
    (tmp_path / "other").mkdir()
    shared = {
        "initial_weights": {"job": "start", "tensors": "weights."},
        "initial_weights_store": {"url": (tmp_path / "chain").as_uri()},
        "store": {"url": (tmp_path / "other").as_uri()},
    }
    plain = next(iter(import_templar_run(load(tmp_path, **shared))))
    assert plain.taken["templar-1"].digest == links[0].taken["templar-1"].digest
    assert plain.taken["templar-7"].digest != links[0].taken["templar-7"].digest


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("status", [301, 400, 403, 503])
def test_an_own_bucket_that_refuses_excludes_its_worker_only(
    tmp_path: Path, bucket: Any, method: str, status: int
) -> None:
    begin(tmp_path)
    settings = settings_of(tmp_path, initial_weights={"job": "start", "tensors": "weights."})
    with ExitStack() as stack:
        own = serve_folder(stack, tmp_path / "templar")
        settings["templar"] |= {"worker_stores": {7: specify(own, "1s")}, "last_window": 40}
        own.refusals = [Refusal(method, status, "", times=1 << 20)]
        (link,) = import_templar_run(TemplarImportSettings.model_validate(settings))
    assert set(link.taken) == {"templar-1", "templar-12"}
    is_final = method == "GET" and status in {301, 400}  # another read would fail, too
    reason = ExclusionReason.FORMAT if is_final else ExclusionReason.UNAVAILABLE
    assert {uid: one.reason for uid, one in link.excluded.items()} == {"templar-7": reason}


def test_a_copy_in_an_own_bucket_that_states_an_earlier_time_is_excluded(
    tmp_path: Path, bucket: Any
) -> None:
    begin(tmp_path)
    stated = {"copier": 1, "late": 3_000_000_000, "middle": 2_000_000_000}
    for uid, written in ((1, 1_900_000_000), (12, 1_950_000_000)):
        os.utime(tmp_path / "templar" / name_of(40, uid), (written, written))
    for name, number, original in (("copier", 2, 1), ("late", 3, 30), ("middle", 30, 30)):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / name_of(40, number)
        path.write_bytes(write(40, original).save())
        os.utime(path, (stated[name], stated[name]))
    early = tmp_path / "early" / name_of(40, 7)
    early.parent.mkdir()
    early.write_bytes(bucket[40, 7].save())
    os.utime(early, (1, 1))
    settings = settings_of(tmp_path, initial_weights={"job": "start", "tensors": "weights."})
    settings["templar"] |= {
        "last_window": 40,
        "worker_stores": {
            number: {"url": (tmp_path / name).as_uri()}
            for name, number in (("copier", 2), ("late", 3), ("early", 7), ("middle", 30))
        },
    }
    (link,) = import_templar_run(TemplarImportSettings.model_validate(settings))
    assert set(link.taken) == {"templar-1", "templar-7", "templar-12", "templar-30"}
    assert {uid: one.reason for uid, one in link.excluded.items()} == {
        "templar-2": ExclusionReason.DUPLICATE,
        "templar-3": ExclusionReason.DUPLICATE,
    }
    order = sorted(link.taken, key=lambda uid: link.taken[uid].written)
    assert order == ["templar-1", "templar-12", "templar-7", "templar-30"]
    assert link.taken["templar-30"].written.timestamp() == stated["middle"]


def test_a_run_that_has_not_begun_needs_weights(tmp_path: Path, bucket: Any) -> None:
    with pytest.raises(errors.NotFoundError, match="initial_weights"):
        list(import_templar_run(load(tmp_path, initial_weights=None)))
