"""Wiping, and uploads that were never finished."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from millrace import deletion, errors
from millrace.cleanup import (
    StaleUploads,
    abort_uploads,
    find_stale_uploads,
    make_confirmation,
    plan_wipe,
    survey_wipe,
    wipe,
)
from millrace.cli import main
from millrace.deletion import ObjectsDeleted
from millrace.keys.gradients import ChainKeys
from millrace.keys.rentals import RentalKeys
from millrace.progress import Event
from millrace.storage import (
    StoreSpec,
    VersionCount,
    delete_versions,
    exists,
    list_objects,
    list_uploads,
    list_versions,
    open_store,
    put,
    versions,
    write,
)
from millrace.testing.credentials import make_credentials
from millrace.testing.key import Key
from tests.stores import make_spec
from tests.support.cleanup.material import BucketBuilder

NOW = timedelta(0)
OLD = timedelta(seconds=-60)


@pytest.fixture(params=["local", "memory", "rgw", "r2", "gcs"])
def place(request: pytest.FixtureRequest) -> BucketBuilder:
    return BucketBuilder(open_store(make_spec(request.param, request)))


def keys_of(place: BucketBuilder) -> set[str]:
    return {stat.key for stat in list_objects(place.store)}


def fill(place: BucketBuilder) -> set[str]:
    place.put_gradient("run", "w1", 0, "1")
    place.put_checkpoint("job", 1, [b"1"])
    place.put_pin("job", 1)
    place.put_dataset("words", 2)
    place.put_lease("words", "train-00000", ended=True)
    place.put("mine/notes.txt")
    return keys_of(place)


def test_all_goes_once_its_name_was_typed_and_nothing_before(place):
    there = fill(place)
    plan = plan_wipe(place.store.spec)
    assert plan.objects == len(there)
    for wrong in (
        "",
        "wrong",
        place.store.url,
        make_confirmation(place.store.location).upper() + "x",
    ):
        with pytest.raises(errors.ConfigurationError, match="nothing was deleted"):
            wipe(place.store.spec, plan.name, confirm=wrong)
    assert there < keys_of(place)
    done = wipe(place.store.spec, plan.name, confirm=make_confirmation(place.store.location))
    assert (done.deleted_objects, done.failures) == (len(there), ())
    assert not keys_of(place)


def test_what_is_beside_the_prefix_stays(rgw, bucket, request):
    spec = make_spec("rgw", request)
    for key in ("below/here2/x", "below/her", "below/here/x"):
        rgw.make_client(rgw.full).put_object(Bucket=bucket, Key=key, Body=b"x")
    assert make_confirmation(open_store(spec).location) == f"{bucket}/below/here"
    wipe(spec, plan_wipe(spec).name, confirm=f"{bucket}/below/here")
    left = rgw.make_client(rgw.full).list_objects_v2(Bucket=bucket)["Contents"]
    assert {stat["Key"] for stat in left} == {"below/here2/x", "below/her"}


def test_a_store_where_somebody_works_is_not_wiped(place):
    fill(place)
    plan = plan_wipe(place.store.spec)
    there = keys_of(place)
    place.put_lease(ChainKeys("run", "1").job, "aggregator")
    with pytest.raises(errors.HeldError, match="run/gathers/1 is worked on by elsewhere"):
        wipe(place.store.spec, plan.name, confirm=make_confirmation(place.store.location))
    with pytest.raises(errors.HeldError):
        plan_wipe(place.store.spec)
    assert there < keys_of(place)


def test_a_ledger_of_machines_that_are_not_given_back_is_not_wiped(place):
    there = fill(place)
    keys = RentalKeys("fleet")
    for part in (keys.make_intent_key(0), keys.make_released_key(0), keys.make_intent_key(1)):
        put(place.store, part, b"{}")  # of a machine that came back, and of one that did not
    for look in (survey_wipe, plan_wipe):
        with pytest.raises(
            errors.HeldError, match="holds the ledger of fleet, whose machines are not released"
        ):
            look(place.store.spec)
    put(place.store, keys.make_released_key(1), b"{}")
    done = wipe(
        place.store.spec, plan_wipe(place.store.spec).name,
        confirm=make_confirmation(place.store.location),
    )  # fmt: skip
    assert done.deleted_objects == len(there) + 4
    assert not keys_of(place)


def test_what_was_written_since_a_wiping_was_planned_stays(place):
    there = fill(place)
    plan = plan_wipe(place.store.spec)
    put(place.store, "new", b"new")
    put(place.store, "mine/notes.txt", b"rewritten")
    done = wipe(place.store.spec, plan.name, confirm=make_confirmation(place.store.location))
    assert done.deleted_objects == len(there) - 1
    assert keys_of(place) == {"new", "mine/notes.txt"}


def test_a_lease_that_appears_between_two_batches_ends_the_wiping(tmp_path, monkeypatch):
    monkeypatch.setattr(deletion, "_BATCH", 10)
    monkeypatch.setattr(
        deletion, "_MAX_BATCHES", 1
    )  # each batch is settled before the next is chosen
    place = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    place.put("another.txt")
    for window in range(30):
        place.put_gradient("run", "w1", window, "1")
        place.put(f"run/notes/{window}.txt")
    there = keys_of(place)
    plan = plan_wipe(place.store.spec)
    told: list[int] = []

    def take_lease(event: Event) -> None:
        assert isinstance(event, ObjectsDeleted)
        told.append(event.objects)
        if len(told) == 1:
            place.put_lease("run", "who")

    with pytest.raises(errors.HeldError, match=r"run is worked on by elsewhere .* 10 objects"):
        wipe(place.store.spec, plan.name, confirm="bucket", progress=take_lease)
    left = {key for key in keys_of(place) if not key.startswith("_clean/")}
    assert len(there - left) == 10
    assert exists(place.store, plan.key)


def test_the_command_asks_for_the_name(tmp_path: Path):
    folder = tmp_path / "bucket"
    place = BucketBuilder(open_store(folder.as_uri()))
    there = fill(place)
    for confirm in (["--confirm", "wrong"], ["--confirm", ""]):
        told = CliRunner().invoke(main, ["bucket", "wipe", str(folder), *confirm])
        assert told.exit_code == 2
    assert keys_of(place) == there  # not even a plan was made
    told = CliRunner().invoke(main, ["bucket", "wipe", str(folder)], input="bucke\n")
    assert told.exit_code == 2
    assert "Type bucket to continue" in told.output
    assert there <= keys_of(place)
    shown = CliRunner().invoke(main, ["bucket", "wipe", str(folder), "--dry-run"])
    assert shown.exit_code == 0
    assert "objects" in shown.output
    assert there <= keys_of(place)
    done = CliRunner().invoke(main, ["bucket", "wipe", str(folder)], input="bucket\n")
    assert done.exit_code == 0, done.output
    assert not keys_of(place)


@pytest.mark.parametrize(
    ("answer", "said"), [(None, "add --confirm bucket"), ("no\n", "type bucket")]
)
def test_a_wipe_without_the_right_answer_leaves_no_plan(
    tmp_path: Path, answer: str | None, said: str
):
    place = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    there = fill(place)
    told = CliRunner().invoke(main, ["bucket", "wipe", str(tmp_path / "bucket")], input=answer)
    assert (told.exit_code, said in " ".join(told.output.split())) == (2, True), told.output
    assert keys_of(place) == there


def test_a_wipe_that_may_not_delete_an_object_leaves_no_plan(rgw, bucket, request):
    spec = make_spec("rgw", request)
    place = BucketBuilder(open_store(spec))
    place.put("kept/object")
    place.put("other/object")
    rule = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{bucket}/below/here/kept/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    rgw.make_client(rgw.full).put_bucket_policy(Bucket=bucket, Policy=policy)
    done = wipe(spec, plan_wipe(spec).name, confirm=f"{bucket}/below/here")
    assert [one.key for one in done.failures] == ["kept/object"]
    assert keys_of(place) == {"kept/object"}


def test_an_object_that_appears_after_the_question_is_not_wiped(tmp_path: Path, monkeypatch):
    place = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    there = fill(place)

    def type_name(question: str, *, err: bool) -> str:
        place.put("new.txt")
        return "bucket"

    monkeypatch.setattr("click.prompt", type_name)
    done = CliRunner().invoke(main, ["bucket", "wipe", str(tmp_path / "bucket")])
    assert done.exit_code == 0, done.output
    assert f"Deleted {len(there)} objects" in done.output
    assert keys_of(place) == {"new.txt"}


def test_a_dry_run_of_wiping_writes_nothing(rgw, bucket, request, tmp_path):
    spec = make_spec("rgw", request)
    fill(BucketBuilder(open_store(spec)))
    before = len(rgw.list_requests())
    found = survey_wipe(spec)
    assert (found.objects, found.versions) == (
        len(keys_of(BucketBuilder(open_store(spec)))),
        VersionCount(),
    )
    settings = settings_file(tmp_path, spec, rgw.full)
    shown = CliRunner().invoke(main, ["bucket", "wipe", str(settings), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert f"holds {found.objects} objects" in shown.output
    asked = [line for line in rgw.list_requests()[before:] if bucket in line]
    assert asked
    assert [line for line in asked if "GET /" not in line and "HEAD /" not in line] == []


def settings_file(folder: Path, spec: StoreSpec, key: Key) -> Path:
    """A settings file that names a store."""
    file = folder / "place.yaml"
    file.write_text(
        f"store:\n  url: {spec.url}\n  endpoint: {spec.endpoint}\n  credentials:\n"
        f"    access_key_id: {key.access_key_id}\n    secret_access_key: {key.secret_access_key}\n"
    )
    return file


@pytest.fixture
def versioned(rgw, bucket, request) -> StoreSpec:
    """A store that keeps versions: 14 older ones, and a delete marker."""
    client = rgw.make_client(rgw.full)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for number in range(14):
        client.put_object(Bucket=bucket, Key="below/here/a", Body=b"x" * number)
    client.put_object(Bucket=bucket, Key="below/here/b", Body=b"x" * 9)
    client.delete_object(Bucket=bucket, Key="below/here/b")
    client.put_object(Bucket=bucket, Key="below/other", Body=b"1")
    client.put_object(Bucket=bucket, Key="below/other", Body=b"2")
    return make_spec("rgw", request)


def test_a_versioned_bucket_is_not_called_emptied(rgw, bucket, versioned, tmp_path):
    found = survey_wipe(versioned)
    assert (found.objects, found.versions) == (1, VersionCount(14, 1, sum(range(13)) + 9))
    settings = settings_file(tmp_path, versioned, rgw.full)
    wipe_here = ["bucket", "wipe", str(settings), "--confirm", f"{bucket}/below/here"]
    done = CliRunner().invoke(main, wipe_here)
    assert done.exit_code == 0, done.output
    assert "It keeps 14 older versions (87 bytes) and 1 delete marker beside them." in done.output
    said = next(line for line in done.output.splitlines() if "are left, and billed" in line)
    versions, markers = count_versions_by_boto3(rgw, bucket)
    assert f"{versions} older versions" in said
    assert f"{markers} delete markers" in said
    assert "`millrace bucket wipe --versions` deletes them, too" in said
    assert versions >= 15

    done = CliRunner().invoke(main, [*wipe_here, "--versions"])
    assert done.exit_code == 0, done.output
    assert "left" not in done.output
    assert count_versions_by_boto3(rgw, bucket) == (0, 0)
    beside = rgw.make_client(rgw.full).list_object_versions(Bucket=bucket, Prefix="below/other")
    assert len(beside["Versions"]) == 2


def count_versions_by_boto3(rgw, bucket: str) -> tuple[int, int]:
    answer = rgw.make_client(rgw.full).list_object_versions(Bucket=bucket, Prefix="below/here/")
    return len(answer.get("Versions", [])), len(answer.get("DeleteMarkers", []))


@pytest.mark.parametrize("command", ["clean", "wipe"])
def test_markers_of_folders_are_listed_and_deleted_by_their_own_keys(
    rgw, bucket, request, tmp_path, command
):
    client, spec = rgw.make_client(rgw.full), make_spec("rgw", request)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    keys = ["dir/", "dir/sub/", "twice", "twice/"]
    for key in keys:
        client.put_object(Bucket=bucket, Key=f"below/here/{key}", Body=b"")
    settings = settings_file(tmp_path, spec, rgw.full)
    shown = CliRunner().invoke(main, ["bucket", "list", str(settings), "--json"])
    assert [one["key"] for one in json.loads(shown.stdout)] == keys
    words = {"wipe": ["--confirm", f"{bucket}/below/here"], "clean": ["--yes"]}[command]
    with settings.open("a") as file:
        file.write('rules: [{kinds: [other], older_than: 0s, match: "*"}]\n')
    done = CliRunner().invoke(main, ["bucket", command, str(settings), *words])
    assert (done.exit_code, "Deleted 4 objects" in done.output) == (0, True), done.output
    listed = client.list_object_versions(Bucket=bucket, Prefix="below/here/")
    marked = [one["Key"].removeprefix("below/here/") for one in listed["DeleteMarkers"]]
    assert [key for key in marked if not key.startswith("_clean/")] == keys
    left = {stat.key for stat in list_objects(open_store(spec), exact=True)}
    assert not left.intersection(keys)


@pytest.mark.parametrize("page", [10, 11])  # one ends between a delete marker and its version
def test_no_object_comes_back_where_its_versions_are_on_the_next_page(
    rgw, bucket, request, monkeypatch, page
):
    monkeypatch.setattr(versions, "_BATCH", page)
    spec, client = make_spec("rgw", request), rgw.make_client(rgw.full)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})

    def twice(number: int) -> None:
        client.put_object(Bucket=bucket, Key=f"below/here/{number:04d}", Body=b"x")
        client.delete_object(Bucket=bucket, Key=f"below/here/{number:04d}")

    for _ in range(2):
        client.put_object(Bucket=bucket, Key="below/here/!", Body=b"x")
    for number in range(26):
        twice(number)
    plan = plan_wipe(spec)
    name = make_confirmation(open_store(spec).location)
    done = wipe(spec, plan.name, confirm=name, versions=True)
    assert (done.failures, done.versions) == ((), VersionCount())
    assert list(list_objects(open_store(spec))) == []
    assert count_versions_by_boto3(rgw, bucket) == (0, 0)


def test_versions_that_may_not_be_deleted_are_said(rgw, bucket, versioned):
    reader = versioned.model_copy(update={"credentials": make_credentials(rgw.read_only)})
    store = open_store(reader)
    failures = delete_versions(store, list_versions(store))
    assert len(failures) == 15
    assert count_versions_by_boto3(rgw, bucket) == (15, 1)


def test_versions_of_keys_that_no_list_of_deletes_can_have_are_deleted(rgw, bucket, versioned):
    client = rgw.make_client(rgw.full)
    for key in ("below/here/a\x01b", "below/here/a\x1b[2J"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
        client.delete_object(Bucket=bucket, Key=key)
    plan = plan_wipe(versioned)
    name = make_confirmation(open_store(versioned).location)
    done = wipe(versioned, plan.name, confirm=name, versions=True)
    assert (done.failures, done.versions) == ((), VersionCount())
    assert count_versions_by_boto3(rgw, bucket) == (0, 0)


def sizes_of(found: StaleUploads) -> dict[str, int]:
    return {one.key: one.size for one in found.uploads}


def begin(rgw, bucket: str, key: str, parts: int) -> None:
    client = rgw.make_client(rgw.full)
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    for number in range(parts):
        client.upload_part(
            Bucket=bucket, Key=key, UploadId=upload, PartNumber=number + 1, Body=b"x" * 1000
        )


def test_uploads_that_were_never_finished_are_found_and_aborted(rgw, bucket, request, tmp_path):
    spec = make_spec("rgw", request)
    begin(rgw, bucket, "below/here/a", 2)
    begin(rgw, bucket, "below/here/b/c", 0)
    begin(rgw, bucket, "below/elsewhere", 1)
    young = find_stale_uploads(spec, older_than=timedelta(hours=1))
    assert (young.uploads, young.recent) == ((), 2)
    found = find_stale_uploads(spec, older_than=OLD)
    assert (sizes_of(found), found.size, found.is_aborted) == (
        {"a": 2000, "b/c": 0},
        2000,
        False,
    )
    assert len(list(list_uploads(open_store(spec)))) == 2
    file = settings_file(tmp_path, spec, rgw.full)
    told = CliRunner().invoke(main, ["bucket", "abort-uploads", str(file), "--dry-run"])
    assert "Would abort 0 uploads, 0 bytes; 2 are younger than that." in told.output
    gone = abort_uploads(spec, find_stale_uploads(spec, older_than=OLD, prefix="b"))
    assert (sizes_of(gone), gone.failures) == ({"b/c": 0}, ())
    assert [upload.key for upload in list_uploads(open_store(spec))] == ["a"]
    reader = spec.model_copy(update={"credentials": make_credentials(rgw.read_only)})
    refused = abort_uploads(reader, find_stale_uploads(reader, older_than=OLD))
    assert [failure.key for failure in refused.failures] == ["a"]
    assert refused.size == 0
    left = rgw.make_client(rgw.full).list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert {upload["Key"] for upload in left} == {"below/here/a", "below/elsewhere"}


def test_more_uploads_than_a_page_are_all_found(rgw, bucket, request, monkeypatch):
    monkeypatch.setattr(write, "_BATCH", 7)
    client = rgw.make_client(rgw.full)
    for number in range(31):
        client.create_multipart_upload(Bucket=bucket, Key=f"below/here/{number // 2:04d}")
    found = list(list_uploads(open_store(make_spec("rgw", request))))
    assert len({upload.id for upload in found}) == len(found) == 31


def test_a_wrong_time_is_said(tmp_path: Path):
    told = CliRunner().invoke(
        main, ["bucket", "abort-uploads", str(tmp_path), "--older-than", "soon"]
    )
    assert told.exit_code == 2
    assert "'soon' is no duration: write 90s, 90m, 90h or 90d" in told.output


def test_the_halves_of_a_killed_process_are_uploads_of_a_folder(tmp_path: Path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "plan.json#1").write_bytes(b"xyz")
    spec = StoreSpec(url=tmp_path.as_uri())
    found = abort_uploads(spec, find_stale_uploads(spec, older_than=OLD))
    assert sizes_of(found) == {"words/plan.json": 3}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_whose_name_ends_like_that_of_a_half_stays_and_is_named(tmp_path: Path):
    finished = tmp_path / "folder" / "Invoice #12"
    finished.parent.mkdir()
    finished.write_bytes(b"xyz")
    spec = StoreSpec(url=tmp_path.as_uri())
    assert find_stale_uploads(spec, older_than=OLD).uploads == ()
    assert (
        CliRunner().invoke(main, ["bucket", "abort-uploads", str(tmp_path), "--yes"]).exit_code == 0
    )
    put(open_store(spec), "object", b"abc")
    assert [one.key for one in survey_wipe(spec).unlisted] == ["folder/Invoice #12"]
    confirm = make_confirmation(open_store(spec).location)
    done = CliRunner().invoke(main, ["bucket", "wipe", str(tmp_path), "--confirm", confirm])
    assert (done.exit_code, "Deleted 1 object, 3 bytes" in done.output) == (0, True)
    assert "folder/Invoice #12 is left alone: its name ends in # and digits" in done.output
    assert finished.read_bytes() == b"xyz"


def test_an_upload_that_appears_after_the_question_is_not_aborted(tmp_path: Path, monkeypatch):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "plan.json#1").write_bytes(b"xyz")

    def begin_another(question: str, *, yes: bool) -> bool:
        (tmp_path / "words" / "index.json#1").write_bytes(b"xyz")
        return question == "Abort 1 upload, 3 bytes?"

    monkeypatch.setattr("millrace.cli.bucket.confirm", begin_another)
    words = ["bucket", "abort-uploads", str(tmp_path), "--older-than", "0s"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "Aborted 1 upload, 3 bytes" in done.output
    assert [path.name for path in tmp_path.rglob("*#*")] == ["index.json#1"]
