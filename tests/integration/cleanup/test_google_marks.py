"""Empty objects that mark folders in Google Cloud Storage, whose keys obstore shortens."""

import contextlib
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from pydantic import SecretStr

from millrace.cleanup import (
    CleanupSettings,
    CopyOutcome,
    Rule,
    copy_objects,
    execute,
    make_plan,
    plan_wipe,
    wipe,
)
from millrace.storage import (
    Store,
    StoreSpec,
    create,
    delete,
    list_objects,
    open_store,
    read,
)
from millrace.testing.gcs import GCSServer
from tests.stores import make_spec
from tests.support.kms import KmsEndpoint
from tests.support.s3 import serve_s3

MARKS = ["data/", "data/inner/", "logs/"]


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> StoreSpec:
    return make_spec("gcs", request)


def put_mark(server: GCSServer, key: str) -> None:
    """Write an empty object, as consoles do."""
    request = Request(f"{server.endpoint}/bucket/{key}", data=b"", method="PUT")
    with contextlib.closing(urlopen(request)):
        pass


@pytest.fixture
def store(spec: StoreSpec, gcs: GCSServer) -> Store:
    """A store with marks, also beside objects of almost the same keys."""
    store = open_store(spec)
    for key in MARKS:
        put_mark(gcs, f"{store.location.prefix}/{key}")
    for key in ("data-x", "data/x", "empty", "logs"):
        create(store, key, b"" if key == "empty" else key.encode())
    return store


def list_keys(store: Store) -> list[str]:
    return [stat.key for stat in list_objects(store, exact=True)]


def test_exact_listings_have_the_keys_of_marks(store: Store) -> None:
    objects = ["data-x", "data/x", "empty", "logs"]
    assert list_keys(store) == sorted([*objects, *MARKS])
    sizes = {stat.key: stat.size for stat in list_objects(store, exact=True)}
    assert {key for key, size in sizes.items() if not size} == {*MARKS, "empty"}


def test_a_mark_is_deleted_and_the_object_beside_it_stays(store: Store) -> None:
    assert delete(store, ["logs/", "logs/"]) == []
    assert read(store, "logs") == b"logs"
    assert "logs/" not in list_keys(store)


def test_a_mark_is_deleted_with_the_credentials_of_the_store(tmp_path: Path) -> None:
    with GCSServer.start(tmp_path) as server:
        for key in ("data/", "kept/"):
            put_mark(server, key)
        options = {"service_account_key": SecretStr(server.create_service_account())}
        store = open_store(StoreSpec(url="gs://bucket", endpoint=server.endpoint, options=options))
        assert delete(store, ["data/"]) == []
        server.deny("storage.objects.delete")
        (failure,) = delete(store, ["kept/"])
        assert "the store refuses these credentials" in failure.reason
        assert list_keys(store) == ["kept/"]


def test_a_cleaning_deletes_the_marks_that_it_counts(spec: StoreSpec, store: Store) -> None:
    rule = {"kinds": ["other"], "older_than": "0s", "match": "data*"}
    settings = CleanupSettings(store=spec, rules=(Rule.model_validate(rule),))
    done = execute(settings, make_plan(settings).name)
    assert (done.deleted_objects, done.missing, done.failures) == (4, 0, ())
    left = [key for key in list_keys(store) if not key.startswith("_clean/")]
    assert left == ["empty", "logs", "logs/"]


def test_a_mark_of_a_listed_folder_is_deleted_alone(spec: StoreSpec, store: Store) -> None:
    """Its key is the prefix of the listing, and an object has the key without the slash."""
    assert [stat.key for stat in list_objects(store, "logs/", exact=True)] == ["logs/"]
    rule = {"kinds": ["other"], "older_than": "0s", "match": "logs/"}
    settings = CleanupSettings(store=spec, rules=(Rule.model_validate(rule),))
    done = execute(settings, make_plan(settings).name)
    assert (done.deleted_objects, done.missing, done.failures) == (1, 0, ())
    assert "logs/" not in list_keys(store)
    assert read(store, "logs") == b"logs"


def test_a_wipe_deletes_marks(spec: StoreSpec, store: Store) -> None:
    done = wipe(spec, plan_wipe(spec).name, confirm=f"bucket/{store.location.prefix}")
    assert (done.deleted_objects, done.failures) == (7, ())
    assert list_keys(store) == []


def test_marks_are_copied_into_buckets_and_left_out_of_folders(
    store: Store, tmp_path: Path
) -> None:
    with serve_s3(KmsEndpoint) as target:
        done = copy_objects(store, target.open())
        assert (done.failures, done.objects[CopyOutcome.COPIED]) == ([], 7)
        assert sorted(target.objects) == list_keys(store)
        assert copy_objects(store, target.open()).objects[CopyOutcome.EQUAL] == 7
    delete(store, ["logs"])
    folder = open_store(tmp_path.as_uri())
    done = copy_objects(store, folder)
    assert (done.failures, done.objects[CopyOutcome.COPIED]) == ([], 3)
    assert [one.key for one in done.skipped] == MARKS
