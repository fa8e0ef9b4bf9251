"""The names that others may rely on. A change here is a change of the API: say it in CHANGELOG."""

import millrace
import millrace.datasets
import millrace.storage
import millrace.swarm


def test_the_names_of_the_package():
    assert millrace.__all__ == ["PipelineSettings", "run_from_file", "run_pipeline"]
    for name in millrace.__all__:
        assert getattr(millrace, name).__name__ == name


def test_the_names_of_storage():
    assert millrace.storage.__all__ == [
        "Answer",
        "Backend",
        "Credentials",
        "DeleteFailure",
        "Location",
        "Right",
        "Stat",
        "Store",
        "StoreSettings",
        "StoreSpec",
        "Upload",
        "Version",
        "VersionCount",
        "abort_stale_uploads",
        "abort_upload",
        "answer_of",
        "boto3_client",
        "check",
        "copy",
        "count_versions",
        "create",
        "delete",
        "delete_one",
        "delete_versions",
        "difference",
        "etag_is_md5",
        "exists",
        "filesystem",
        "from_environment",
        "head",
        "kept_sha256",
        "list_folders",
        "list_objects",
        "list_uploads",
        "list_versions",
        "open_store",
        "open_writer",
        "put",
        "read",
        "read_into",
        "read_range",
        "scoped",
        "signed_url",
        "stream",
        "uploaded",
        "with_boto3",
    ]


def test_the_names_of_shards():
    assert set(millrace.datasets.__all__) == {
        "CutSettings",
        "DatasetStatus",
        "Fault",
        "Garbage",
        "PipelineSettings",
        "Repair",
        "Preflight",
        "ExecutionSettings",
        "ShardReport",
        "SourcePlace",
        "SplitState",
        "SplitStatus",
        "Verification",
        "check_destination",
        "collect_garbage",
        "find_datasets",
        "plan_dataset",
        "repair_dataset",
        "run_from_file",
        "run_pipeline",
        "sealed",
        "shard_dataset",
        "status",
        "verify",
    }


def test_the_names_of_swarm():
    assert millrace.swarm.__all__ == [
        "CacheCheck",
        "Host",
        "Hosts",
        "LimitSettings",
        "NodeReport",
        "Preview",
        "PrewarmReport",
        "PrewarmSettings",
        "RayNodes",
        "Request",
        "Unpacking",
        "preview",
        "prewarm",
        "wait_for_path",
    ]
    for name in millrace.swarm.__all__:
        assert getattr(millrace.swarm, name).__name__ == name
