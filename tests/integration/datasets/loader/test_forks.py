"""Workers of a `DataLoader`, which are forked after their parent has used the store."""

import gzip
import itertools
import os
import pickle
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.checkpoints import Saver, load
from millrace.datasets.formats.base import FieldType
from millrace.datasets.formats.parquet import PagesFormat
from millrace.datasets.loader import Page, PageLoader, ShardLoader, TokenLoader
from millrace.datasets.loader.page_index import index_pages
from millrace.datasets.sample import Sample
from millrace.keys.datasets import DatasetKeys
from millrace.storage import (
    Store,
    StoreSpec,
    copy,
    create,
    delete_one,
    exists,
    head,
    list_folders,
    list_objects,
    make_boto3_client,
    open_store,
    open_writer,
    put,
    read,
    read_and_hash,
    read_range,
    stream,
)
from millrace.storage.clients import make_full_key
from millrace.storage.signed import can_sign
from millrace.testing.gcs import GCSServer
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.faults import make_faults, make_r2_store
from tests.stores import make_spec
from tests.support.byte_pairs import encode_json, make_tokenizer
from tests.support.forks import leave_out_prefect
from tests.support.formats import make_objects
from tests.support.shard_datasets import write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
SIZES = (1200, 349)


@pytest.fixture(autouse=True)
def without_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep services of Prefect, which earlier tests have started, from ending a forked child."""
    leave_out_prefect(monkeypatch)


@pytest.fixture
def texts() -> list[str]:
    rng = random.Random(1)
    return [rng.randbytes(rng.randrange(1, 90)).hex() for _ in range(sum(SIZES))]


def upload(spec: StoreSpec, texts: list[str]) -> None:
    samples = [Sample(f"k{n}", {"txt": text.encode()}, n) for n, text in enumerate(texts)]
    parts = [samples[: SIZES[0]], samples[SIZES[0] :]]
    store = open_store(spec)
    objects = make_objects(PagesFormat(), DatasetKeys("d"), {"txt": FieldType.STR}, parts)
    for key, body in objects.items():
        put(store, key, body)


@pytest.fixture(params=["key pair", "environment"])
def dataset(
    request: pytest.FixtureRequest, rgw: RGW, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> StoreSpec:
    """A dataset by a key pair of its settings, and of the environment."""
    spec = make_spec("rgw", request)
    upload(spec, texts)
    if request.param == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.full.access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.full.secret_access_key)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        spec = spec.model_copy(update={"credentials": None})
    assert can_sign(open_store(spec)) == (request.param == "key pair")
    return spec


def call_in_fork(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a forked process, or raise its error here."""

    def run(answers: Connection) -> None:
        try:
            answers.send((function(), None))
        except Exception as error:  # noqa: BLE001 - raised in the parent
            answers.send((None, error))
        finally:
            answers.close()
            os._exit(0)

    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=run, args=(theirs,))
    child.start()
    theirs.close()
    try:
        assert ours.poll(120), "the forked process hangs"
        value, error = ours.recv()
    finally:
        child.kill()
        child.join()
    if error is not None:
        raise error
    return value


def read_texts(loader: PageLoader, pages: list[Page]) -> list[str]:
    return [text for values in loader.read(pages) for text in values.to_pylist()]


def expect(texts: list[str], pages: list[Page]) -> list[str]:
    starts = (0, SIZES[0])
    return [text for page in pages for text in texts[starts[page.file] :][page.start : page.end]]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_forked_process_reads_as_its_parent(
    is_indexed: bool, dataset: StoreSpec, texts: list[str]
) -> None:
    """By the same loader, and by one of its own."""
    if is_indexed:
        index_pages(dataset)
    loader = PageLoader(dataset, cache_bytes=1)
    pages = loader.draw(7, 0, len(loader))
    assert read_texts(loader, pages[:3]) == expect(texts, pages[:3])
    assert call_in_fork(lambda: read_texts(loader, pages)) == expect(texts, pages)
    opened = call_in_fork(lambda: read_texts(PageLoader(dataset), pages))
    assert opened == expect(texts, pages)
    assert read_texts(loader, pages) == expect(texts, pages)


def test_other_processes_read_by_the_listing_of_the_second_location(
    dataset: StoreSpec, tmp_path: Path, texts: list[str]
) -> None:
    """The first location is a folder that a prewarm has not filled yet."""
    loader = PageLoader([tmp_path.as_uri(), dataset], cache_bytes=1)
    pages = loader.draw(7, 0, len(loader))
    assert read_texts(loader, pages) == expect(texts, pages)
    assert call_in_fork(lambda: read_texts(loader, pages)) == expect(texts, pages)
    spawned = pickle.loads(pickle.dumps(loader))  # as a process that is spawned gets it
    assert read_texts(spawned, pages) == expect(texts, pages)


def test_a_file_that_is_written_again_is_noticed_in_a_forked_process(
    dataset: StoreSpec,
) -> None:
    loader = PageLoader(dataset, cache_bytes=1)
    put(open_store(dataset), loader.paths[0], b"other")
    with pytest.raises(errors.ChangedError, match="was replaced or deleted"):
        call_in_fork(lambda: read_texts(loader, [Page(0, 0, 10)]))


def test_the_verbs_that_read_work_in_a_forked_process(dataset: StoreSpec) -> None:
    check_verbs(open_store(dataset))


def test_the_verbs_that_read_a_folder_work_in_a_forked_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    store = open_store(tmp_path.as_uri())
    check_verbs(store)
    assert call_in_fork(lambda: list_folders(store, "a/none/")) == []
    for key in ("a", "../a", "a//b"):
        with pytest.raises((errors.NotFoundError, errors.ConfigurationError)) as here:
            read(store, key)
        with pytest.raises(here.type):
            call_in_fork(lambda key=key: read(store, key))


def test_a_forked_process_reads_the_bytes_of_compressed_objects(dataset: StoreSpec) -> None:
    """Read stored bytes like the parent, whatever their Content-Encoding is."""
    store, body = open_store(dataset), gzip.compress(bytes(10_000))
    client = make_boto3_client(store)
    for key in ("whole", "part", "none"):
        given = body[:-9] if key == "part" else body if key == "whole" else b"none"
        client.put_object(
            Bucket=store.location.bucket, Key=make_full_key(store, key), Body=given,
            ContentEncoding="gzip",
        )  # fmt: skip

    def call_all() -> list[Any]:
        return [
            read(store, "whole"),
            read_range(store, "whole", 5, 20),
            read_range(store, "whole", 0, len(body), size=len(body)),
            b"".join(stream(store, "whole", block_size=7)),
            head(store, "whole"),
            read(store, "part"),
            read(store, "none"),
        ]

    expected = call_all()
    assert expected[0] == body
    assert call_in_fork(call_all) == expected


def check_verbs(store: Store) -> None:
    """Compare the results and the errors of verbs here and in a forked process."""
    put(store, "a/b c+d", b"0123456789")
    put(store, "a/nothing", b"")
    etag = head(store, "a/b c+d").etag

    def call_all() -> list[Any]:
        body = bytearray(10)
        return [
            read(store, "a/b c+d"),
            read(store, "a/b c+d", etag=etag, max_size=10),
            read(store, "a/nothing"),
            read_range(store, "a/b c+d", 3, 7, etag=etag),
            read_range(store, "a/b c+d", 3, 70),
            b"".join(stream(store, "a/b c+d", block_size=4)),
            head(store, "a/b c+d"),
            exists(store, "a/none"),
            sorted(stat.key for stat in list_objects(store, "a/")),
            list_folders(store),
            (read_and_hash(store, "a/b c+d", [memoryview(body)], size=10), body)
            if not store.is_remote
            else None,
        ]

    expected = call_all()
    assert call_in_fork(call_all) == expected
    for act, kind in (
        (lambda: read(store, "a/none"), errors.NotFoundError),
        (lambda: head(store, "a/none"), errors.NotFoundError),
        (lambda: read(store, "a/b c+d", etag='"0"'), errors.ChangedError),
        (lambda: read_range(store, "a/b c+d", 0, 5, size=11), errors.ChangedError),
        (lambda: read(store, "a/b c+d", max_size=9), errors.CorruptError),
        (lambda: read_range(store, "a/b c+d", 30, 40), errors.CorruptError),
    ):
        with pytest.raises(kind):
            act()
        with pytest.raises(kind):
            call_in_fork(act)


def test_a_forked_process_does_not_write_into_a_folder(tmp_path: Path) -> None:
    """Instead of hanging."""
    store = open_store(tmp_path.as_uri())
    put(store, "a", b"1")

    def write() -> None:
        with open_writer(store, "b") as writer:
            writer.write(b"1")

    for act in (
        lambda: put(store, "b", b"1"),
        lambda: create(store, "b", b"1"),
        lambda: copy(store, "a", "b"),
        lambda: delete_one(store, "a"),
        write,
    ):
        with pytest.raises(errors.ConfigurationError, match=r"forked after file://.*spawn"):
            call_in_fork(act)


def write_texts(folder: Path) -> list[str]:
    """Write a dataset into a folder, and return its texts."""
    samples = [Sample(f"k{n}", {"txt": f"text {n}".encode()}, n) for n in range(40)]
    store = open_store(folder.as_uri())
    write_dataset(store, "d", ["webdataset"], {"txt": FieldType.STR}, [samples[:25], samples[25:]])
    return sorted(f"text {n}" for n in range(40))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_of_torch_read_the_shards_of_a_folder(tmp_path: Path, method: str) -> None:
    """Right after their parent has read them, and again in the next epoch."""
    from torch.utils.data import DataLoader

    texts = write_texts(tmp_path)
    loader = ShardLoader(tmp_path.as_uri(), "d")
    assert sorted(sample["txt"] for sample in loader) == texts
    head(open_store(tmp_path.as_uri()), DatasetKeys("d").manifest)
    dataset = ShardLoader(tmp_path.as_uri(), "d").as_torch_dataset()
    data = DataLoader(
        dataset, batch_size=None, num_workers=2, timeout=120, multiprocessing_context=method,
        persistent_workers=True,
    )  # fmt: skip
    assert len(data) == len(texts)
    state = dataset.state_dict()
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert dataset.state_dict() == {**state, "epoch": epoch}
        assert sorted(sample["txt"] for sample in data) == texts
        with pytest.raises(errors.ConfigurationError, match="Worker processes read the samples"):
            dataset.state_dict()
    dataset.set_epoch(0)
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state


def load_epochs(folder: Path, workers: int, count: int) -> list[list[str]]:
    """Return the texts of epochs by workers that end with each epoch."""
    from torch.utils.data import DataLoader

    dataset = ShardLoader(folder.as_uri(), "d", streams=4).as_torch_dataset()
    data = DataLoader(
        dataset, batch_size=None, num_workers=workers, timeout=120, multiprocessing_context="fork"
    )
    epochs: list[list[str]] = []
    for epoch in range(count):
        dataset.set_epoch(epoch)
        epochs.append([sample["txt"] for sample in data])
    return epochs


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_stay_go_to_the_epoch_of_their_parent(tmp_path: Path, workers: int) -> None:
    """An epoch may end early, such as with the first rank that has no more samples."""
    from torch.utils.data import DataLoader

    write_texts(tmp_path)
    epochs = load_epochs(tmp_path, workers, 4)
    dataset = ShardLoader(tmp_path.as_uri(), "d", streams=4).as_torch_dataset()
    data = DataLoader(
        dataset, batch_size=None, num_workers=workers, timeout=120, multiprocessing_context="fork",
        persistent_workers=True,
    )  # fmt: skip
    for epoch, count in ((0, 5), (0, 40), (1, 40), (3, 7), (2, 40), (3, 3), (0, 39), (0, 40)):
        dataset.set_epoch(epoch)
        found = [sample["txt"] for sample in itertools.islice(data, count)]
        assert found == epochs[epoch][:count], (epoch, count)
    dataset.load_state_dict(ShardLoader(tmp_path.as_uri(), "d").state_dict())
    samples = iter(data)
    for _ in range(6):
        with pytest.raises(errors.ConfigurationError, match="A state was loaded after the worker"):
            next(samples)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_iteration_of_workers_that_stay_is_the_next_epoch(
    tmp_path: Path, workers: int
) -> None:
    """A worker reads ahead, so it may have ended an epoch which the trainer has left before."""
    from torch.utils.data import DataLoader

    write_texts(tmp_path)
    epochs = load_epochs(tmp_path, workers, 5)
    dataset = ShardLoader(tmp_path.as_uri(), "d", streams=4).as_torch_dataset()
    data = DataLoader(
        dataset, batch_size=None, num_workers=workers, timeout=120, multiprocessing_context="fork",
        persistent_workers=True,
    )  # fmt: skip
    for epoch, count in enumerate((5, 40, 37, 1, 40)):
        found = [sample["txt"] for sample in itertools.islice(data, count)]
        assert found == epochs[epoch][:count], epoch


def test_a_copy_of_a_dataset_for_torch_leaves_the_state_of_the_original(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    dataset = ShardLoader(tmp_path.as_uri(), "d").as_torch_dataset()
    copies = [deepcopy(dataset), pickle.loads(pickle.dumps(dataset))]
    received = [sample["txt"] for sample in itertools.islice(dataset, 7)]
    state = dataset.state_dict()
    for one in copies:
        assert sorted(sample["txt"] for sample in one) == texts
        one.load_state_dict(state)
        assert sorted(received + [sample["txt"] for sample in one]) == texts


def test_a_process_that_reads_after_its_workers_has_a_state(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    texts = write_texts(tmp_path)
    dataset = ShardLoader(tmp_path.as_uri(), "d").as_torch_dataset()
    options: Any = {"num_workers": 1, "timeout": 120, "multiprocessing_context": "fork"}
    assert len(list(DataLoader(dataset, batch_size=None, **options))) == len(texts)
    received = [sample["txt"] for sample in itertools.islice(dataset, 7)]
    again = ShardLoader(tmp_path.as_uri(), "d")
    again.load_state_dict(dataset.state_dict())
    assert sorted(received + [sample["txt"] for sample in again]) == texts


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_forked_workers_of_torchdata_have_a_state(tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    texts = write_texts(tmp_path)

    def make_loader(workers: int, state: Any = None) -> StatefulDataLoader[Any]:
        dataset = ShardLoader(tmp_path.as_uri(), "d").as_torch_dataset()
        if state is not None:
            dataset.load_state_dict(state)
        options: Any = {"timeout": 120, "multiprocessing_context": "fork"} if workers else {}
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)

    data = make_loader(1)
    iterator = iter(data)
    received = [next(iterator)["txt"] for _ in range(7)]
    received += [sample["txt"] for sample in make_loader(0, data.state_dict())]
    assert sorted(received) == texts


class Training:
    """A training as that of the guide, which counts its epochs and saves after each batch.

    Args:
        folder: Folder of the dataset.
        workers: Number of workers.
        batch_size: Samples of a batch.
        options: Further arguments of the loader.
        stays: Whether workers stay for several epochs.
    """

    def __init__(
        self, folder: Path, workers: int, batch_size: int, *, stays: bool = False, **options: Any
    ) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.dataset = ShardLoader(folder.as_uri(), "d", streams=4, **options).as_torch_dataset()
        forks: Any = {"timeout": 120, "multiprocessing_context": "fork"} if workers else {}
        self.data = StatefulDataLoader(
            self.dataset, batch_size=batch_size, num_workers=workers, collate_fn=list,
            persistent_workers=stays and workers > 0, **forks,
        )  # fmt: skip
        self.received: dict[int, list[str]] = {}
        self.in_epoch: Any = None
        self.after_epoch: Any = None

    def run(self, saved: Any = None, *, epochs: int, others: bool = False) -> None:
        """Train from what was saved up to a number of epochs.

        Args:
            saved: State that another training has saved.
            epochs: Number of epochs.
            others: Whether the other training had another number of workers.
        """
        epoch = saved["epoch"] if saved else 0
        self.dataset.set_epoch(epoch)
        if saved:
            (self.dataset if others else self.data).load_state_dict(saved["data"])
        while epoch < epochs:
            self.received[epoch] = []
            for batch in self.data:
                self.received[epoch] += [sample["txt"] for sample in batch]
                self.in_epoch = {"epoch": epoch, "data": self.data.state_dict()}
            epoch += 1
            self.after_epoch = {"epoch": epoch, "data": self.data.state_dict()}
            self.dataset.set_epoch(epoch)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("saved", "workers", "stays", "options"),
    [
        ("in_epoch", 0, False, {"batch_size": 16}),
        ("in_epoch", 1, False, {"batch_size": 16}),
        ("in_epoch", 1, False, {"batch_size": 8}),
        ("in_epoch", 2, False, {"batch_size": 16}),
        ("in_epoch", 1, True, {"batch_size": 16}),
        ("in_epoch", 2, True, {"batch_size": 16}),
        ("in_epoch", 0, False, {"batch_size": 10, "world_size": 2}),
        ("in_epoch", 1, False, {"batch_size": 10, "world_size": 2}),
        ("in_epoch", 1, False, {"batch_size": 16, "world_size": 2, "remainder": "keep"}),
        ("in_epoch", 1, False, {"batch_size": 16, "transform": lambda sample: [sample]}),
        ("after_epoch", 0, False, {"batch_size": 16}),
        ("after_epoch", 1, False, {"batch_size": 16}),
        ("after_epoch", 1, True, {"batch_size": 16}),
        ("after_epoch", 2, True, {"batch_size": 16}),
    ],
)
def test_a_training_that_was_saved_at_the_end_of_an_epoch_reads_the_next_one_once(
    tmp_path: Path, saved: str, workers: int, stays: bool, options: dict[str, Any]
) -> None:
    """With the last batch of the epoch, or after it."""
    write_texts(tmp_path)
    whole = Training(tmp_path, workers, stays=stays, **options)
    whole.run(epochs=3)
    first = Training(tmp_path, workers, stays=stays, **options)
    first.run(epochs=1)
    assert first.received[0] == whole.received[0]
    second = Training(tmp_path, workers, stays=stays, **options)
    second.run(getattr(first, saved), epochs=3)
    rest = {0: list[str]()} if saved == "in_epoch" else {}
    assert second.received == {**rest, 1: whole.received[1], 2: whole.received[2]}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2), (2, 0), (2, 1)])
def test_a_training_with_other_workers_reads_the_next_epoch_once(
    tmp_path: Path, before: int, after: int
) -> None:
    texts = write_texts(tmp_path)
    first = Training(tmp_path, before, 16)
    first.run(epochs=1)
    second = Training(tmp_path, after, 16)
    second.run(first.in_epoch, epochs=3, others=True)
    assert {epoch: sorted(one) for epoch, one in second.received.items()} == {
        0: [], 1: texts, 2: texts
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_of_the_epoch_before_that_of_set_epoch_is_refused(
    tmp_path: Path, workers: int
) -> None:
    """An epoch ends early, and the training is saved before it takes a batch of the next one."""
    write_texts(tmp_path)
    first = Training(tmp_path, workers, 8)
    first.dataset.set_epoch(0)
    assert len(list(itertools.islice(first.data, 2))) == 2
    first.dataset.set_epoch(1)
    saved = {"epoch": 1, "data": first.data.state_dict()}
    for others in (False, True):
        second = Training(tmp_path, workers, 8)
        with pytest.raises(errors.ConfigurationError, match="is of epoch 0, and `set_epoch` has n"):
            second.run(saved, epochs=2, others=others)
    again = Training(tmp_path, workers, 8)
    again.run({**saved, "epoch": 0}, epochs=1)
    assert len(again.received[0]) == 24


def test_a_checkpoint_in_a_folder_is_loaded_in_a_forked_process(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    with Saver(store, "job") as saver:
        saver.save({"lr": 0.1, "text": "abc"}, step=1).result()
    assert call_in_fork(lambda: load(store, "job").state) == {"lr": 0.1, "text": "abc"}


def test_a_forked_process_reads_while_the_store_fails(
    rgw: RGW, r2: R2Proxy, bucket: str, texts: list[str]
) -> None:
    spec = StoreSpec.model_validate(make_r2_store(rgw, r2, bucket).make_spec(""))
    upload(spec, texts)
    loader = PageLoader(spec, cache_bytes=1)
    r2.reset()
    r2.set_faults(make_faults(3, stall_seconds=0.2))
    pages = [page for window in range(10) for page in loader.draw(7, window, 6)]
    assert call_in_fork(lambda: read_texts(loader, pages)) == expect(texts, pages)
    assert sum(r2.count_fired().values()) > 5


def test_what_cannot_be_read_after_a_fork_says_so(gcs: GCSServer, request: Any) -> None:
    """Instead of hanging: objects of GCS, and writes."""
    google = open_store(make_spec("gcs", request))
    put(google, "a", b"1")
    with pytest.raises(errors.ConfigurationError, match=r"forked after gs://.*spawn"):
        call_in_fork(lambda: read(google, "a"))
    with pytest.raises(errors.ConfigurationError, match=r"forked after gs://.*spawn"):
        call_in_fork(lambda: list(list_objects(google)))
    store = open_store(make_spec("rgw", request))
    with pytest.raises(errors.ConfigurationError, match=r"forked after s3://.*spawn"):
        call_in_fork(lambda: put(store, "a", b"1"))


def test_reading_that_began_before_a_fork_ends_with_a_sentence_in_the_child(
    dataset: StoreSpec,
) -> None:
    loader = PageLoader(dataset, cache_bytes=1)
    pages = loader.read(loader.draw(1, 0, 12))
    next(pages)
    with pytest.raises(errors.ConfigurationError, match="Begin to read after the fork"):
        call_in_fork(lambda: next(pages))


def make_torch_dataset(loader: TokenLoader, pages: list[Page]) -> Any:
    from torch.utils.data import IterableDataset, get_worker_info

    class Pages(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            own = pages[info.id :: info.num_workers]
            for page, tokens in zip(own, loader.read(own), strict=True):
                yield os.getpid(), pages.index(page), tokens.tokens.tolist()

    return Pages()


def test_forked_workers_of_torch_read_all_pages(dataset: StoreSpec) -> None:
    """Twice, as in two epochs, with requests of the parent between them."""
    from torch.utils.data import DataLoader

    loader = TokenLoader(PageLoader(dataset, cache_bytes=1), encode_json(make_tokenizer()))
    pages = loader.pages.draw(7, 0, len(loader.pages))
    expected = [tokens.tokens.tolist() for tokens in loader.read(pages)]
    for _ in range(2):
        data = DataLoader(
            make_torch_dataset(loader, pages), batch_size=None, num_workers=2, timeout=120,
            multiprocessing_context="fork",
        )  # fmt: skip
        found = list(data)
        assert {number: tokens for _, number, tokens in found} == dict(enumerate(expected))
        assert len({process for process, _, _ in found} - {os.getpid()}) == 2
        assert len(list(loader.read(pages[:2]))) == 2


def test_a_loader_is_pickled_for_a_process_that_is_spawned(
    dataset: StoreSpec, texts: list[str]
) -> None:
    """Without another listing: a file that came later is not among its files."""
    loader = PageLoader(dataset)
    pages = loader.draw(7, 0, 5)
    put(open_store(dataset), "later.parquet", b"junk")
    again = pickle.loads(pickle.dumps(loader))
    assert again.draw(7, 0, 5) == pages
    assert read_texts(again, pages) == expect(texts, pages)


def test_a_folder_is_read_in_a_forked_process(tmp_path: Path, texts: list[str]) -> None:
    upload(StoreSpec(url=tmp_path.as_uri()), texts)
    loader = PageLoader(str(tmp_path))
    pages = loader.draw(7, 0, len(loader))
    assert read_texts(loader, pages[:1]) == expect(texts, pages[:1])
    assert call_in_fork(lambda: read_texts(loader, pages)) == expect(texts, pages)
