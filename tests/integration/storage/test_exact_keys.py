"""Keys that obstore refuses cost themselves, and never the listing that they are in."""

from datetime import timedelta

import boto3
import pytest

from millrace import errors
from millrace.storage import Store, delete, list_folders, list_objects, open_store, read
from millrace.testing.rgw import RGW
from tests.stores import make_spec
from tests.support.s3 import Refusal, serve_s3

REFUSED = ["a//b", "/lead", "c\x01d", "line\nbreak", "x/../y", "./z", "del\x7f", "a+b//c d%", "l//"]
GOOD = ["m/ok.txt", "a b+c%20.txt", "caf\u00e9/\u202f.png", "\U0001f468\u200d\U0001f469.txt"]


@pytest.fixture
def store(request: pytest.FixtureRequest, rgw: RGW) -> Store:
    opened = open_store(make_spec("rgw", request), retry_timeout=timedelta(seconds=20))
    client = rgw.make_client(rgw.full)
    for key in [*REFUSED, *GOOD]:
        client.put_object(Bucket=opened.location.bucket, Key=f"below/here/{key}", Body=b"1")
    client.put_object(Bucket=opened.location.bucket, Key="below/here/empty/", Body=b"")
    return opened


def test_a_listing_has_every_key_also_those_that_obstore_refuses(store):
    exact = [stat.key for stat in list_objects(store, exact=True)]
    assert exact == sorted([*REFUSED, *GOOD, "empty/"], key=str.encode)
    assert {stat.size for stat in list_objects(store, exact=True)} == {0, 1}
    plain = [stat.key for stat in list_objects(store)]
    assert {*REFUSED, *GOOD} <= {*plain}
    assert len(plain) == len(exact)
    assert [stat.key for stat in list_objects(store, "m/")] == ["m/ok.txt"]
    assert next(list_objects(store, after="m/a", exact=True)).key == "m/ok.txt"


@pytest.mark.parametrize("key", ["a//b", "/lead", "x/../y", "./z"])
def test_a_listing_begins_after_a_key_and_below_a_folder_that_obstore_refuses(store, key):
    every = [stat.key for stat in list_objects(store, exact=True)]
    assert [stat.key for stat in list_objects(store, after=key, exact=True)] == [
        one for one in every if one.encode() > key.encode()
    ]
    after = {stat.key.rstrip("/") for stat in list_objects(store, after=key)}
    assert after == {one.rstrip("/") for one in every if one.encode() > key.encode()}
    assert key in {stat.key for stat in list_objects(store, key.rpartition("/")[0])}


def test_what_is_listed_by_either_way_is_described_alike(store):
    (plain,) = list_objects(store, "m/")
    (exact,) = list_objects(store, "m/", exact=True)
    assert (plain.key, plain.size, plain.etag) == (exact.key, exact.size, exact.etag)
    assert plain.last_modified == exact.last_modified


def test_folders_are_listed_beside_keys_that_obstore_refuses(store):
    assert {"m", "a", "empty"} <= set(list_folders(store))


@pytest.mark.parametrize("key", ["a//b", "c\x01d", "x/../y"])
def test_a_key_that_cannot_be_read_is_refused_at_once(store, key):
    with pytest.raises(errors.ConfigurationError, match="the key is invalid"):
        read(store, key)


def test_pages_of_an_exact_listing_follow_each_other(store, rgw, monkeypatch):
    # RGW answers 500 when a page ends at a key with a control character below a tab.
    rgw.make_client(rgw.full).delete_object(Bucket=store.location.bucket, Key="below/here/c\x01d")
    seen = []

    def smaller(params: dict[str, object], **_: object) -> None:
        params["MaxKeys"] = 3
        seen.append(params)

    original = boto3.client

    def client(*args: object, **options: object) -> object:
        made = original(*args, **options)
        made.meta.events.register("provide-client-params.s3.ListObjectsV2", smaller)
        return made

    monkeypatch.setattr(boto3, "client", client)
    assert len(list(list_objects(store, exact=True))) == len(REFUSED) + len(GOOD)
    assert len(seen) == 5


def test_an_error_in_a_successful_answer_is_no_empty_listing():
    with serve_s3() as endpoint:
        endpoint.refusals = [Refusal("GET", 200, "InternalError")]
        assert list(list_objects(endpoint.open(), exact=True)) == []
        assert len(endpoint.requests) == 2


def test_keys_that_obstore_refuses_are_deleted_among_others(store):
    every = [stat.key for stat in list_objects(store, exact=True)]
    assert delete(store, every) == []
    assert list(list_objects(store, exact=True)) == []


@pytest.mark.parametrize("others", [[], ["a//b"], ["a b+c%20.txt"]])
def test_to_delete_a_key_that_ends_in_a_slash_leaves_the_key_without_it(store, rgw, others):
    client, bucket = rgw.make_client(rgw.full), store.location.bucket
    client.put_object(Bucket=bucket, Key="below/here/m/ok.txt/", Body=b"22")
    assert delete(store, ["m/ok.txt/", *others]) == []
    left = {stat.key for stat in list_objects(store, exact=True)}
    assert left == {*REFUSED, *GOOD, "empty/"} - {*others}


def test_a_key_that_ends_in_a_slash_does_not_pass_for_the_key_without_it(store, rgw):
    for name in ("ok.txt/", "ok.txt-a", "ok.txt.b/"):
        key = f"below/here/m/{name}"
        rgw.make_client(rgw.full).put_object(Bucket=store.location.bucket, Key=key, Body=b"22")
    found = [(stat.key, stat.size) for stat in list_objects(store, "m/")]
    assert found == [("m/ok.txt", 1), ("m/ok.txt-a", 2), ("m/ok.txt.b", 2), ("m/ok.txt/", 2)]
    later = [stat.key for stat in list_objects(store, "m/", after="m/ok.txt.b")]
    assert later == ["m/ok.txt.b/", "m/ok.txt/"]
