"""Refusals of a loader of samples, and the sequences of packed tokens."""

import contextlib
import errno
import itertools
import math
import pickle
import secrets
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from millrace import errors
from millrace.datasets.formats import FieldType
from millrace.datasets.loader import Remainder, ShardLoader, fetch, shard_loader
from millrace.datasets.loader.dataset_files import DatasetFiles
from millrace.datasets.loader.disk_cache import DiskCache
from millrace.datasets.loader.fetch import ShardFetcher
from millrace.datasets.loader.readers import offset_table
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.storage import open_store, put, read
from tests.support.s3 import Refusal, serve_s3
from tests.support.shard_datasets import write_dataset

SIZES = (7, 5, 8)
Make = Callable[..., ShardLoader]


@pytest.fixture(scope="module")
def url() -> str:
    """A store with texts, and documents of the tokens 0, 1, 1, 2, 2, 2 and so on."""
    url = f"memory://{secrets.token_hex(8)}"
    store, numbers = open_store(url), iter(range(sum(SIZES)))
    parts = [[next(numbers) for _ in range(size)] for size in SIZES]
    texts = [[Sample(f"k{n}", {"txt": b"%d" % n}, n) for n in part] for part in parts]
    tokens = [
        [Sample(f"k{n}", {"tokens": np.full(n, n, "<u2").tobytes()}, n) for n in part]
        for part in parts
    ]
    write_dataset(store, "texts", ["mds", "webdataset"], {"txt": FieldType.STR}, texts)
    write_dataset(store, "others", ["mds"], {"txt": FieldType.STR}, texts[:2])
    write_dataset(store, "tokens", ["tokens"], {"tokens": FieldType.UINT16_ARRAY}, tokens)
    return url


@pytest.fixture
def make(url: str) -> Make:
    def make(dataset: str = "texts", **options: Any) -> ShardLoader:
        return ShardLoader(url, dataset, **options)

    return make


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "tar"}, "no format 'tar'. The formats are webdataset"),
        ({"format": "parquet"}, "no shards in the format parquet. Its formats are mds, webdataset"),
        ({"format": "mds", "decode": False}, "Shards in the format mds have values of the types"),
        ({"split": "val"}, "no samples in the split 'val'. Its splits are train"),
        ({"streams": 64, "world_size": 6}, "64 streams cannot be dealt equally to 6 ranks"),
        ({"streams": 64, "world_size": 6}, "such as 66"),
        ({"streams": 0}, "cannot be dealt"),
        ({"rank": 2, "world_size": 2, "streams": 2}, "`rank` is 2"),
        ({"batch_size": 0}, "`batch_size` is at least 1"),
        ({"pack": 0, "pack_field": "txt"}, "`pack` is at least 1"),
        ({"shuffle_window": 0}, "`shuffle_window` is at least 1"),
        ({"shuffle_window": -1}, "`shuffle_window` is at least 1"),
        ({"shuffle_window": 1.5}, "shuffle_window: Input should be a valid integer"),
        ({"buffer_bytes": -1}, "`buffer_bytes` is at least 0"),
        ({"seed": 1.5}, "The arguments of the loader: seed: Input should be a valid integer"),
        ({"pack": 4}, "The format tokens takes one field"),
        ({"remainder": "all"}, "no remainder 'all'"),
        ({"transform": dict, "remainder": "drop"}, "`remainder` cannot be 'drop'"),
        ({"world_size": 21, "streams": 21}, "20 samples, fewer than the 21 ranks"),
        ({"remainder": "pad", "streams": 21}, "fewer than the 21 streams"),
    ],
)
def test_an_invalid_argument_is_a_sentence(make: Make, options: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=text):
        make(**options)


def test_a_loader_without_ranks_among_several_processes_is_a_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, if a launcher has set the variable."""
    monkeypatch.setattr(
        shard_loader, "_warn_of_ranks", cache(shard_loader._warn_of_ranks.__wrapped__)
    )
    for value in ("", "1", "all"):
        monkeypatch.setenv("WORLD_SIZE", value)
        make()
    monkeypatch.setenv("WORLD_SIZE", "8")
    make(world_size=1)
    make(rank=0)
    assert list_warnings(caplog, shard_loader) == []
    assert [make().samples for _ in range(2)] == [sum(SIZES)] * 2
    (warning,) = list_warnings(caplog, shard_loader)
    assert "WORLD_SIZE is 8, and the loader was opened without `rank`" in warning


def test_the_order_does_not_depend_on_the_format_whose_samples_are_smaller(make: Make) -> None:
    """A tar has at least 1 KiB for each sample, so the buffer has a window of few samples."""
    loaders = [make(format=name, buffer_bytes=8000) for name in ("mds", "webdataset")]
    small, large = (loader.table.mean_size for loader in loaders)
    assert small * sum(SIZES) < 8000 < large * sum(SIZES)
    first, second = ([sample["__key__"] for sample in loader] for loader in loaders)
    assert first == second


def test_the_default_is_as_many_streams_as_the_buffer_has_room_for_samples(url: str) -> None:
    body = bytes(20_000)
    parts = [[Sample(f"{n}", {"bin": body}, n)] for n in range(256)]
    write_dataset(open_store(url), "large", ["mds"], {"bin": FieldType.BYTES}, parts)

    def count_streams(samples: float, **options: Any) -> int:
        size = table.largest_mean_size
        loader = ShardLoader(url, "large", buffer_bytes=math.ceil(samples * size), **options)
        return loader.state_dict()["streams"]

    table = ShardLoader(url, "large").table
    assert [count_streams(n) for n in (65, 64, 63, 32, 31, 1)] == [64, 64, 32, 32, 16, 16]
    assert count_streams(1, world_size=16) == 16
    assert count_streams(1, world_size=32) == 32
    assert count_streams(1, streams=8) == 8
    assert count_streams(1, shuffle_window=3) == 64
    saved = ShardLoader(url, "large", streams=8).state_dict()
    loader = ShardLoader(url, "large", buffer_bytes=len(body))
    loader.load_state_dict(saved)
    assert loader.state_dict() == saved


def test_a_store_without_the_name_of_a_dataset_is_a_sentence(url: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="names a store and no dataset"):
        ShardLoader(url)
    with pytest.raises(errors.NotFoundError, match="has no manifest"):
        ShardLoader(url, "none")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 2}, "seed=1, and this one has seed=2"),
        ({"seed": 1, "shuffle": False}, "shuffle=True"),
        ({"seed": 1, "transform": dict}, "transform=False"),
        ({"seed": 1, "pack": 4, "pack_field": "txt"}, "pack=None, and this one has pack=4"),
        ({"seed": 1, "dataset": "others"}, "of another dataset, or of another version"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    make: Make, options: dict[str, Any], text: str
) -> None:
    state = make(seed=1).state_dict()
    with pytest.raises(errors.ConfigurationError, match=text):
        make(**options).load_state_dict(state)


def save_in_sample(make: Make, received: int, **options: Any) -> Any:
    """Return the state behind a number of samples that are all made of the sample ``k0``."""
    loader = make(shuffle=False, **options)
    assert len(list(itertools.islice(loader, received))) == received
    return loader.state_dict()


@pytest.mark.parametrize("made", [20, 32, 0, None])
def test_a_state_within_a_document_that_has_fewer_tokens_now_is_refused(
    make: Make, made: int | None
) -> None:
    state = save_in_sample(make, 1, pack=32, transform=lambda _: {"tokens": [1] * 50})
    changed = make(
        shuffle=False, pack=32, transform=lambda _: None if made is None else {"tokens": [1] * made}
    )
    changed.load_state_dict(state)
    text = "0 samples, and at least 1" if made is None else f"{made} tokens, and at least 33"
    with pytest.raises(errors.ConfigurationError, match=f"The sample 'k0' gives {text}") as error:
        next(iter(changed))
    assert "Open the loader as it was when the state was saved" in str(error.value)


@pytest.mark.parametrize("made", [0, 1, 2])
def test_a_state_within_a_sample_of_which_fewer_are_made_now_is_refused(
    make: Make, made: int
) -> None:
    state = save_in_sample(make, 2, transform=lambda sample: [sample] * 5)
    changed = make(shuffle=False, transform=lambda sample: [sample] * made)
    changed.load_state_dict(state)
    with pytest.raises(errors.ConfigurationError, match=f"'k0' gives {made} samples?, and at"):
        next(iter(changed))
    longer = make(shuffle=False, transform=lambda sample: [sample] * 3)
    longer.load_state_dict(state)
    assert [sample["__key__"] for sample in itertools.islice(longer, 2)] == ["k0", "k1"]


def test_a_state_has_the_field_that_is_packed(make: Make) -> None:
    options: dict[str, Any] = {"pack": 4, "transform": lambda _: {"a": [1] * 9, "b": [2] * 9}}
    state = save_in_sample(make, 1, pack_field="a", **options)
    other = make(shuffle=False, pack_field="b", **options)
    with pytest.raises(errors.ConfigurationError, match="pack_field='a', and this one has pack_"):
        other.load_state_dict(state)
    del state["pack_field"]  # as in a state of an older version
    other.load_state_dict(state)
    assert next(iter(other))["b"].tolist() == [2] * 4


def test_a_damaged_state_is_refused(make: Make) -> None:
    loader = make()
    state = loader.state_dict()
    for damage in ({"position": 21}, {"position": -1}, {"ahead": {0: 99}}, {"ahead": {9: 1}}):
        with pytest.raises(errors.ConfigurationError, match="does not fit the dataset"):
            loader.load_state_dict({**state, **damage})
    with pytest.raises(errors.ConfigurationError, match="version has a value"):
        loader.load_state_dict({**state, "version": 2})
    with pytest.raises(errors.ConfigurationError, match="no state of a ShardLoader"):
        loader.load_state_dict({"step": 3})
    with pytest.raises(errors.ConfigurationError, match="snapshot_every_n_steps=1"):
        loader.load_state_dict({"_steps_since_snapshot": 2, "_snapshot": state})


def test_a_state_that_is_refused_changes_nothing(make: Make) -> None:
    other = make(streams=4, shuffle_window=5, world_size=2, remainder="keep")
    next(iter(other))
    share, alone = other.state_dict(), make(streams=4, shuffle_window=5).state_dict()
    loader, same = (make(streams=2, shuffle_window=3) for _ in range(2))
    iterator = iter(loader)
    received = [next(iterator)]
    for refused in (share, {**alone, "position": 21}):
        with pytest.raises(errors.ConfigurationError, match=r"is missing|does not fit the dataset"):
            loader.load_state_dict(refused)
    received += iterator
    assert received == list(same)
    for one in (loader, same):
        one.read_as_worker(0, 2)
    assert list(loader) == list(same)


def test_states_of_different_steps_are_refused(make: Make) -> None:
    loader = make()
    states = [loader.state_dict()]
    next(iter(loader))
    states.append(loader.state_dict())
    with pytest.raises(errors.ConfigurationError, match="different steps"):
        make().load_state_dict(states)


def test_the_states_of_all_ranks_are_needed_where_ranks_differ(make: Make) -> None:
    options: dict[str, Any] = {"streams": 4, "transform": lambda sample: [sample] * 2}
    ranks = [make(rank=rank, world_size=2, **options) for rank in range(2)]
    for rank in ranks:
        next(iter(rank))
    states = [rank.state_dict() for rank in ranks]
    with pytest.raises(errors.ConfigurationError, match="state of rank 1 of 2 is missing"):
        make(**options).load_state_dict(states[0])
    make(**options).load_state_dict(states)
    again = make(rank=0, world_size=2, **options)
    again.load_state_dict(states[0])
    assert again.state_dict() == states[0]


@pytest.mark.parametrize("rule", ["drop", "pad"])
def test_ranks_that_were_at_different_places_need_the_states_of_all_under_another_rule(
    make: Make, rule: str
) -> None:
    options: dict[str, Any] = {"streams": 4, "world_size": 2, "shuffle_window": 2}
    received, states = list[str](), list[dict[str, Any]]()
    for rank, count in enumerate((3, 6)):
        loader = make(rank=rank, remainder="keep", **options)
        received += [sample["__key__"] for sample in itertools.islice(loader, count)]
        states.append(loader.state_dict())
    ranks = [make(rank=rank, remainder=rule, **options) for rank in range(2)]
    for rank, state in zip(ranks, states, strict=True):
        with pytest.raises(errors.ConfigurationError, match=r"state of rank . of 2 is missing"):
            rank.load_state_dict(state)
        rank.load_state_dict(states)
    assert ranks[0].state_dict() == ranks[1].state_dict()
    received += [sample["__key__"] for sample in itertools.islice(ranks[0], 2)]
    received += [sample["__key__"] for sample in itertools.islice(ranks[1], 2)]
    alone = make(streams=4, shuffle_window=2)
    alone.load_state_dict(ranks[0].state_dict())
    received += [sample["__key__"] for sample in alone]
    assert sorted(received) == sorted(f"k{n}" for n in range(sum(SIZES)))


@pytest.mark.parametrize(("rule", "change"), [("drop", "leave out"), ("pad", "repeat")])
def test_a_warning_has_the_samples_that_ranks_leave_out_or_repeat_after_workers(
    make: Make, rule: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    states, received = list[dict[str, Any]](), list[str]()
    for worker, count in enumerate((8, 2)):
        loader = make(streams=4, remainder=rule)
        loader.read_as_worker(worker, 2)
        received += [sample["__key__"] for sample in itertools.islice(loader, count)]
        states.append(loader.state_dict())
    for rank in range(4):
        loader = make(streams=4, rank=rank, world_size=4, remainder=rule)
        loader.load_state_dict(states)
        received += [sample["__key__"] for sample in loader]
    lost, repeated = sum(SIZES) - len(set(received)), len(received) - len(set(received))
    assert (lost, repeated) == ((6, 0) if rule == "drop" else (0, 6))
    (warning,) = list_warnings(caplog, shard_loader)
    assert f"In epoch 0, the ranks together {change} about 6 samples" in warning
    caplog.clear()
    for world_size in (1, 2):
        make(streams=4, world_size=world_size, remainder=rule).load_state_dict(states)
        make(streams=4, world_size=4, remainder="keep").load_state_dict(states)
    assert list_warnings(caplog, shard_loader) == []


def test_a_state_has_its_own_streams_and_window(make: Make) -> None:
    state = make(streams=4, shuffle_window=3).state_dict()
    loader = make(streams=2, shuffle_window=1)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    older = {**state, "window": state["shuffle_window"]}  # as in a state of an older version
    del older["shuffle_window"]
    loader.load_state_dict(older)
    assert loader.state_dict() == state
    with pytest.raises(errors.ConfigurationError, match="4 streams, which cannot be dealt"):
        make(streams=3, world_size=3).load_state_dict(state)


def test_an_older_iteration_is_refused_after_a_later_one(make: Make) -> None:
    loader = make()
    older = iter(loader)
    next(older)
    next(iter(loader))
    with pytest.raises(errors.ConfigurationError, match="A later iteration of the loader"):
        next(older)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iteration_that_has_failed_does_not_look_ended(
    mirrors: list[Path], batch_size: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import DataLoader

    loader = ShardLoader(
        mirrors[1].as_uri(), "d", streams=1, shuffle_window=10, batch_size=batch_size
    )
    expected = list(ShardLoader(mirrors[1].as_uri(), "d", streams=1, shuffle_window=10))
    opened: list[int] = []
    open_shard = ShardFetcher.open

    def fail_once(fetcher: ShardFetcher, number: int, *args: Any) -> Any:
        opened.append(number)
        if len(opened) == 2:
            raise errors.UnavailableError("The store cannot be reached.")
        return open_shard(fetcher, number, *args)

    monkeypatch.setattr(ShardFetcher, "open", fail_once)
    forks: Any = {"timeout": 120, "multiprocessing_context": "fork"} if workers else {}
    data = DataLoader(loader.as_torch_dataset(), batch_size=None, num_workers=workers, **forks)
    samples, received = iter(data), list[Any]()
    with pytest.raises(errors.UnavailableError, match="The store cannot be reached"):
        received.extend(samples)
    for _ in range(3):
        with pytest.raises(errors.ConfigurationError, match="of the samples has failed before"):
            next(samples)
    if not workers:
        received += loader
        assert list(samples) == []
        samples = received if batch_size is None else itertools.chain(*received)
        assert [one["__key__"] for one in samples] == [one["__key__"] for one in expected]


def test_batches_have_their_size_and_the_last_has_the_rest(make: Make) -> None:
    loader = make(batch_size=6)
    assert [len(batch) for batch in loader] == [6, 6, 6, 2]


@pytest.mark.parametrize(("rule", "counts"), [("drop", [6] * 3), ("pad", [7] * 3)])
def test_ranks_have_equally_many_samples(make: Make, rule: str, counts: list[int]) -> None:
    ranks = [make(rank=n, world_size=3, streams=6, remainder=rule) for n in range(3)]
    found = [[sample["txt"] for sample in rank] for rank in ranks]
    assert [len(one) for one in found] == counts
    assert len({text for one in found for text in one}) == (18 if rule == "drop" else 20)
    assert Remainder(rule) == rule


def test_a_transform_that_fails_names_the_sample(make: Make) -> None:
    def fail(sample: dict[str, Any]) -> None:
        raise ZeroDivisionError(sample["txt"])

    with pytest.raises(ZeroDivisionError) as error:
        list(make(transform=fail, shuffle=False))
    assert error.value.__notes__ == ["`transform` failed for the sample 'k0'."]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (5, "a int"), ("text", "a str"), ([5], "a int in place 0 of its results"),
        ([{}, None], "None in place 1 of its results"),
    ],
)  # fmt: skip
def test_a_transform_with_a_result_of_another_type_is_a_sentence(
    make: Make, made: Any, said: str
) -> None:
    with pytest.raises(errors.ConfigurationError) as error:
        list(make(transform=lambda _: made, shuffle=False))
    assert str(error.value) == (
        f"For the sample 'k0', `transform` returned {said}: return a dict, a list of dicts or None."
    )


@pytest.mark.parametrize("tokens", [5, "text", [[1, 2]]])
def test_what_is_no_list_of_tokens_is_not_packed(make: Make, tokens: Any) -> None:
    loader = make(transform=lambda _: {"tokens": tokens}, pack=2)
    with pytest.raises(errors.ConfigurationError, match="`pack` needs a list of tokens in the fie"):
        list(loader)


@pytest.mark.parametrize("tokens", [[0.5, 1.5], ["a", "b"], [True, False], [1 << 70, 1]])
def test_tokens_that_are_no_integers_are_not_packed(make: Make, tokens: Any) -> None:
    loader = make(transform=lambda _: {"tokens": tokens}, pack=2)
    with pytest.raises(errors.ConfigurationError, match="`pack` needs integers in the field 'tok"):
        list(loader)


@pytest.mark.parametrize("make_tokens", [list, lambda ids: np.array(ids, np.uint16)])
def test_a_document_without_tokens_leaves_the_type_of_the_others(
    make: Make, make_tokens: Callable[[list[int]], Any]
) -> None:
    def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["txt"])
        return {"tokens": make_tokens([number] * 3) if number % 2 else []}

    found = list(make(transform=tokenize, pack=5, shuffle=False))
    assert {one["tokens"].dtype for one in found} == {np.asarray(make_tokens([1])).dtype}
    assert [one["tokens"].tolist() for one in found[:2]] == [[1, 1, 1, 3, 3], [3, 5, 5, 5, 7]]
    assert [one["tokens_ends"].tolist() for one in found[:2]] == [[0, 3, 3], [1, 1, 4, 4]]


def test_sequences_follow_each_other_and_have_the_ends_of_documents(make: Make) -> None:
    loader = make("tokens", shuffle=False, pack=8)
    found = list(loader)
    together = [token for one in found for token in one["tokens"].tolist()]
    documents = [token for n in range(sum(SIZES)) for token in [n] * n]
    assert together == documents[: len(documents) // 8 * 8]
    assert found[0]["tokens"].dtype == np.uint16
    ends = [8 * number + end for number, one in enumerate(found) for end in one["tokens_ends"]]
    expected = list(itertools.accumulate(range(sum(SIZES))))
    assert ends == [end for end in expected if end <= len(together)]


def test_tokens_of_a_transform_are_packed(make: Make) -> None:
    loader = make(
        transform=lambda sample: {"ids": [int(sample["txt"])] * 3},
        pack=4, pack_field="ids", shuffle=False,
    )  # fmt: skip
    assert next(iter(loader))["ids"].tolist() == [0, 0, 0, 1]
    with pytest.raises(errors.ConfigurationError, match="`pack` needs the field 'tokens'"):
        list(make(transform=dict, pack=4))


@pytest.fixture
def mirrors(tmp_path: Path) -> list[Path]:
    """Three folders with one dataset, of which the first is damaged in each shard."""
    folders = [tmp_path / name for name in "abc"]
    rng, parts = np.random.default_rng(1), list[list[Sample]]()
    for number in range(4):
        bodies = [rng.bytes(150_000) for _ in range(10)]
        parts.append([Sample(f"{number}-{n}", {"bin": body}, n) for n, body in enumerate(bodies)])
    folders[0].mkdir()
    fields = {"bin": FieldType.BYTES}
    write_dataset(open_store(folders[0].as_uri()), "d", ["webdataset"], fields, parts)
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    for shard in folders[0].rglob("*.tar"):
        body = bytearray(shard.read_bytes())
        body[len(body) // 2] ^= 1
        shard.write_bytes(body)
    return folders


def load_bodies(loader: ShardLoader) -> dict[str, bytes]:
    return {sample["__key__"]: sample["bin"] for sample in loader}


@pytest.mark.parametrize("has_cache", [False, True])
def test_shards_are_read_from_any_location_that_has_them(
    mirrors: list[Path], tmp_path: Path, has_cache: bool
) -> None:
    expected = load_bodies(ShardLoader(mirrors[1].as_uri(), "d"))
    assert len(expected) == 40
    shutil.rmtree(mirrors[2] / "d/shards")
    cache = tmp_path / "cache" if has_cache else None
    urls = [f"{folder.as_uri()}/d" for folder in mirrors]
    loader = ShardLoader(urls, cache=cache)
    assert load_bodies(loader) == expected
    found = loader.make_mirror_report().locations
    assert found[0].differing > 0
    assert [one.differing for one in found[1:]] == [0, 0]
    with pytest.raises(errors.CorruptError, match="does not have the digest of the manifest"):
        load_bodies(ShardLoader(mirrors[0].as_uri(), "d"))


def test_a_location_without_the_manifest_does_not_matter(mirrors: list[Path]) -> None:
    (mirrors[0] / "d/manifest.json").unlink()
    loader = ShardLoader([folder.as_uri() for folder in mirrors], "d")
    assert len(load_bodies(loader)) == 40
    with pytest.raises(errors.ConfigurationError, match="different names: d, e"):
        ShardLoader([mirrors[0].as_uri() + "/d", mirrors[1].as_uri() + "/e"])


def test_a_folder_that_was_warmed_is_read_in_place(mirrors: list[Path], tmp_path: Path) -> None:
    _, store, warmed = mirrors
    expected = load_bodies(ShardLoader(store.as_uri(), "d"))
    shutil.rmtree(store / "d/shards")
    cache = DiskCache(tmp_path / "cache", 1 << 30)
    loader = ShardLoader(store.as_uri(), "d", cache=cache, warmed=[warmed])
    assert load_bodies(loader) == expected
    assert cache.held_bytes == 0
    assert load_bodies(pickle.loads(pickle.dumps(loader))) != {}
    with pytest.raises(errors.ConfigurationError, match="`warmed` folders need a `cache`"):
        ShardLoader(store.as_uri(), "d", warmed=[warmed])


def test_a_cache_without_room_leaves_the_samples_as_they_are(
    mirrors: list[Path], tmp_path: Path
) -> None:
    expected = load_bodies(ShardLoader(mirrors[1].as_uri(), "d"))
    cache = DiskCache(tmp_path / "cache", 2 << 20)  # one shard of four
    for _ in range(2):
        assert load_bodies(ShardLoader(mirrors[1].as_uri(), "d", cache=cache)) == expected
    assert cache.held_bytes <= 2 << 20


def test_shards_that_are_read_stay_in_the_cache(mirrors: list[Path], tmp_path: Path) -> None:
    """A file that is removed before it is closed takes bytes that the cache does not count."""
    expected = load_bodies(ShardLoader(mirrors[1].as_uri(), "d"))
    cache = DiskCache(tmp_path / "cache", 4 << 20)  # two shards of four
    loader = ShardLoader(mirrors[1].as_uri(), "d", streams=8, cache=cache)
    found: dict[str, bytes] = {}
    for sample in loader:
        found[sample["__key__"]] = sample["bin"]
        assert list_removed(cache.folder) == []
        assert cache.held_bytes <= cache.max_bytes
    assert found == expected


def list_removed(folder: Path) -> list[str]:
    """Return the files of a folder that are open in this process, and have no name any more."""
    found: list[str] = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path = str(each.readlink())
            if path.startswith(f"{folder}/files/") and each.stat().st_nlink == 0:
                found.append(path)
    return found


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_iteration_that_ends_early_fetches_no_more_and_lends_nothing(
    is_cached: bool, mirrors: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches the second shard when it ends."""
    begun, go_on, fetched = threading.Event(), threading.Event(), list[object]()
    name = "lend_file" if is_cached else "read_object"
    fetch = getattr(DatasetFiles, name)

    def fetch_late(files: DatasetFiles, shard: object, *args: Any, **options: Any) -> Any:
        fetched.append(shard)
        if len(set(fetched)) > 1:
            begun.set()
            assert go_on.wait(60)
        return fetch(files, shard, *args, **options)

    monkeypatch.setattr(DatasetFiles, name, fetch_late)
    cache = DiskCache(tmp_path / "cache", 1 << 30) if is_cached else None
    urls = [mirrors[1].as_uri(), mirrors[2].as_uri()]
    loader = ShardLoader(urls, "d", streams=1, shuffle_window=10, cache=cache)
    samples = iter(loader)
    next(samples)
    assert begun.wait(60)
    samples.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("shard-"):
            thread.join(60)
    assert len(set(fetched)) == 2
    if cache is not None:
        names = [path.name for path in (cache.folder / "files").iterdir()]
        assert len(names) == 2
        assert all(cache._remove(name) for name in names)


def test_a_folder_of_a_cache_that_cannot_be_made_is_named(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.ConfigurationError, match="file of the cache cannot be made"):
        ShardLoader(url, "texts", cache=tmp_path / "file")


@pytest.mark.parametrize("epoch", [-1, 0.5])
def test_a_number_that_no_epoch_has_is_refused(make: Make, epoch: Any) -> None:
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(errors.ConfigurationError, match="epoch: Input should be"):
        loader.set_epoch(epoch)
    with pytest.raises(errors.ConfigurationError, match="epoch: Input should be"):
        loader.seek(epoch, 0)
    assert loader.state_dict() == state


def test_a_trainer_that_changes_its_samples_changes_no_repetition(make: Make) -> None:
    options: dict[str, Any] = {"streams": 3, "world_size": 3, "rank": 2, "remainder": "pad"}
    expected = [sample["tokens"].tolist() for sample in make("tokens", shuffle=False, **options)]
    assert expected[-1] == expected[-2]
    for batch_size in (1, 4):
        found: list[list[int]] = []
        for batch in make("tokens", shuffle=False, batch_size=batch_size, **options):
            for sample in batch:
                tokens = sample.pop("tokens")
                found.append(tokens.tolist())
                tokens += 1
        assert found == expected


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_the_length_is_that_of_a_whole_epoch_of_the_rank(
    make: Make, remainder: str, batch_size: int | None
) -> None:
    for rank in range(3):
        loader = make(
            world_size=3, streams=6, rank=rank, remainder=remainder, batch_size=batch_size
        )
        assert len(loader) == len(list(loader)) > 0
        state = loader.state_dict()
        next(iter(loader))
        assert len(loader) == len(loader.as_torch_dataset()) == len(list(loader)) + 1
        loader.load_state_dict(state)


def test_the_length_of_transformed_samples_is_not_known(make: Make) -> None:
    for loader in (make(transform=list), make("tokens", pack=8)):
        for one in (loader, loader.as_torch_dataset()):
            assert one
            with pytest.raises(TypeError, match="before the end of the epoch"):
                len(one)


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_a_loader_goes_to_any_place_of_an_epoch(make: Make, remainder: str) -> None:
    options: dict[str, Any] = {"world_size": 3, "streams": 6, "rank": 1, "remainder": remainder}
    loader = make(**options)
    loader.set_epoch(2)
    expected = [sample["__key__"] for sample in loader]
    assert len(expected) == loader.rank_samples
    for received in (5, 0, len(expected), 2):
        loader.seek(2, received)
        assert [sample["__key__"] for sample in loader] == expected[received:]
    for wrong in (-1, len(expected) + 1):
        with pytest.raises(errors.ConfigurationError, match=f"cannot go to {wrong} of the"):
            loader.seek(0, wrong)
    with pytest.raises(errors.ConfigurationError, match="a loader without `transform`"):
        make(transform=list).seek(0, 1)


@pytest.mark.parametrize("batch_size", [5, 6])
@pytest.mark.parametrize("options", [{}, {"world_size": 2, "streams": 2}, {"transform": dict}])
def test_a_state_of_the_end_of_an_epoch_does_not_repeat_the_epoch(
    make: Make, options: dict[str, Any], batch_size: int
) -> None:
    """The trainer counts the epochs, and saves its number with the state of the last batch."""
    options = {**options, "batch_size": batch_size}
    loader = make(**options)
    epochs, saved = list[list[Any]](), dict[str, Any]()
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch
            saved = saved if epoch else loader.state_dict()
    again = make(**options)
    again.load_state_dict(saved)
    again.set_epoch(0)
    assert again.state_dict() == saved or "transform" in options
    assert list(again) == []
    again.set_epoch(1)
    assert list(itertools.chain(*again)) == epochs[1]
    again.load_state_dict(saved)  # without a number, the next epoch follows at once
    if saved["epoch"]:
        assert list(itertools.chain(*again)) == epochs[1]
    again.load_state_dict(saved)
    again.set_epoch(3)
    assert again.state_dict()["epoch"] == 3
    assert list(again) != []


@pytest.mark.parametrize("has_blocks", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_bytes_that_change_once_on_their_way_are_read_again(
    tmp_path: Path, is_cached: bool, has_blocks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(1)
    samples = [Sample(f"k{n}", {"bin": rng.bytes(400_000)}, n) for n in range(6)]
    with serve_s3() as endpoint:
        store = endpoint.open()
        fields = {"bin": FieldType.BYTES}
        write_dataset(store, "d", ["mds"], fields, [samples], has_blocks=has_blocks)
        cache = tmp_path / "cache" if is_cached else None
        loader = ShardLoader(store.spec, "d", cache=cache)
        key = loader.table.shards[0].key
        changed = bytearray(endpoint.objects[key])
        changed[500_000] ^= 1
        once = Refusal("GET", 200, "", body=bytes(changed), key=key)
        endpoint.refusals.append(once)
        expected = {sample.key: sample.fields["bin"] for sample in samples}
        assert load_bodies(loader) == expected
        assert once.times == 0
        assert caplog.text.count(f"{key} is read again, since its bytes do not have") == 1


def test_a_mirror_of_other_content_does_not_double_the_traffic_of_whole_files(
    tmp_path: Path,
) -> None:
    urls = [f"memory://{secrets.token_hex(8)}" for _ in range(2)]
    stores, rng = [open_store(url) for url in urls], np.random.default_rng(1)
    parts = [[Sample(f"k{n}", {"bin": rng.bytes(20 << 20)}, n)] for n in range(4)]
    for store in stores:
        manifest = write_dataset(store, "d", ["mds"], {"bin": FieldType.BYTES}, parts)
    for shard in manifest.shards:
        body = bytearray(read(stores[1], shard.key))
        for at in range(0, len(body), 1 << 20):
            body[at] ^= 1
        put(stores[1], shard.key, bytes(body))
    loader = ShardLoader(urls, "d", cache=tmp_path / "cache")
    assert load_bodies(loader) == {part[0].key: part[0].fields["bin"] for part in parts}
    found = loader.make_mirror_report().locations
    assert found[1].differing > 0
    assert sum(one.served_bytes for one in found) == manifest.size


def test_digests_of_blocks_are_read_where_they_are(
    mirrors: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that a prewarm has filled may have the shards alone."""
    monkeypatch.setattr(fetch, "_SMALL_LISTS", 0)  # as in a dataset of more than 32 GiB
    copied: list[str] = []
    copy_file = DatasetFiles.copy_file

    def note_copy(files: DatasetFiles, key: str, *args: Any) -> None:
        copied.append(key)
        copy_file(files, key, *args)

    monkeypatch.setattr(DatasetFiles, "copy_file", note_copy)
    expected = load_bodies(ShardLoader(mirrors[1].as_uri(), "d"))
    (mirrors[1] / DatasetKeys("d").block_digests).unlink()
    loader = ShardLoader([mirrors[1].as_uri(), mirrors[2].as_uri()], "d")
    assert load_bodies(loader) == expected
    assert copied == []
    assert load_bodies(ShardLoader(mirrors[1].as_uri(), "d")) == expected
    assert len(copied) == 4


def list_warnings(caplog: pytest.LogCaptureFixture, module: ModuleType) -> list[str]:
    """Return the messages of a module. Threads of other iterations may log, too."""
    return [one.getMessage() for one in caplog.records if one.name == module.__name__]


def test_a_warning_says_why_whole_shards_are_copied(
    mirrors: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ShardLoader(mirrors[1].as_uri(), "d", streams=1)
    expected = load_bodies(loader)
    assert list_warnings(caplog, fetch) == []
    digests = mirrors[1] / DatasetKeys("d").block_digests
    body = digests.read_bytes()
    for change, reason in (
        (digests.unlink, f"There is no {digests.as_uri()}. Give `cache`"),
        (lambda: digests.write_bytes(bytes(len(body))), "does not fit the shards. Give `cache`"),
    ):
        change()
        loader = ShardLoader(mirrors[1].as_uri(), "d", streams=1)
        for _ in range(2):
            assert load_bodies(loader) == expected
        (warning,) = list_warnings(caplog, fetch)
        assert reason in warning
        caplog.clear()

    def fill_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DatasetFiles, "copy_file", fill_disk)
    with pytest.raises(errors.NoSpaceError, match=r"of temporary files has no room.*TMPDIR"):
        load_bodies(loader)


def test_a_warning_says_that_the_digests_of_blocks_cannot_be_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Credentials may be confined to the shards."""
    samples = [Sample(f"k{n}", {"bin": bytes([n]) * 400_000}, n) for n in range(6)]
    with serve_s3() as endpoint:
        store = endpoint.open()
        write_dataset(store, "d", ["mds"], {"bin": FieldType.BYTES}, [samples])
        key = DatasetKeys("d").block_digests
        endpoint.refusals.append(Refusal("", 403, "AccessDenied", times=9, key=key))
        loader = ShardLoader(store.spec, "d")
        assert load_bodies(loader) == {sample.key: sample.fields["bin"] for sample in samples}
    (warning,) = list_warnings(caplog, fetch)
    assert "block_digests.bin: the store refuses these credentials" in warning


def test_the_folders_of_a_loader_are_those_of_this_machine(
    mirrors: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _, store, warmed = mirrors
    expected = load_bodies(ShardLoader(store.as_uri(), "d"))
    shutil.rmtree(store / "d/shards")
    options: dict[str, Any]
    for options in ({"cache": "file:///cache"}, {"cache": "~/cache", "warmed": "s3://bucket/a"}):
        with pytest.raises(errors.ConfigurationError, match="is a folder of this machine, and no"):
            ShardLoader(store.as_uri(), "d", **options)
    for folder in (warmed, str(warmed), [f"~/{warmed.name}"]):
        loader = ShardLoader(store.as_uri(), "d", cache="~/cache", warmed=folder)
        assert load_bodies(loader) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "cache"]


def test_a_dataset_for_torch_stays_at_the_end_of_the_epoch_that_was_set(make: Make) -> None:
    loader = make()
    epochs = [list(loader) for _ in range(2)]
    dataset = make().as_torch_dataset()
    assert list(dataset) == epochs[0]
    state = dataset.state_dict()
    for epoch, rest in ((None, epochs[1]), (1, epochs[1]), (0, [])):
        again = make().as_torch_dataset()
        if epoch is not None:
            again.set_epoch(epoch)
        again.load_state_dict(state)
        assert list(again) == rest
    again.set_epoch(2)
    before = again.state_dict()
    with pytest.raises(errors.ConfigurationError, match="of epoch 1, and `set_epoch` has named ep"):
        again.load_state_dict(state)
    assert again.state_dict() == before


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_state_of_torchdata_has_no_sample_of_a_batch_that_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def open_data(state: Any = None) -> StatefulDataLoader[Any]:
        dataset = make(format="mds", batch_size=4).as_torch_dataset()
        if state is not None:
            dataset.load_state_dict(state)
        return StatefulDataLoader(dataset, batch_size=None, collate_fn=list)

    calls = itertools.count(1)
    decode = offset_table._StoredRows.__getitem__

    def decode_or_fail(rows: Any, index: int) -> Any:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return decode(rows, index)

    monkeypatch.setattr(offset_table._StoredRows, "__getitem__", decode_or_fail)
    data, received = open_data(), list[Any]()
    with pytest.raises(KeyboardInterrupt):
        received.extend(itertools.chain.from_iterable(data))
    assert len(received) == 4
    for batch in open_data(data.state_dict()):
        received += batch
    assert sorted(one["txt"] for one in received) == sorted(map(str, range(sum(SIZES))))


@pytest.mark.parametrize("options", [{"remainder": "keep"}, {"transform": dict}])
def test_workers_cannot_go_on_where_a_rank_alone_has_begun(
    make: Make, options: dict[str, Any]
) -> None:
    loader = make(world_size=2, streams=4, **options)
    next(iter(loader))
    with pytest.raises(errors.ConfigurationError, match="This rank has received samples in anoth"):
        loader.read_as_worker(0, 2)
