"""The names that others may rely on. A change here is a change of the API: say it in CHANGELOG."""

import millrace
import millrace.datasets
import millrace.storage
import millrace.swarm


def test_the_names_of_the_package():
    assert millrace.__all__ == [
        "PipelineSettings",
        "run_from_file",
        "run_pipeline",
        "shard_dataset",
    ]
    for name in millrace.__all__:
        assert getattr(millrace, name).__name__ == name


def test_the_names_of_storage():
    assert millrace.storage.__all__ == [
        "Backend",
        "Credentials",
        "LinkFinder",
        "Location",
        "ObjectFailure",
        "ObjectVersion",
        "Right",
        "Stat",
        "Store",
        "StoreSettings",
        "StoreSpec",
        "UnfinishedUpload",
        "VersionCount",
        "abort_upload",
        "call_boto3",
        "copy",
        "count_versions",
        "create",
        "delete",
        "delete_one",
        "delete_versions",
        "describe_difference",
        "exists",
        "fetch_stored_sha256",
        "hash_damaged_file",
        "hash_object",
        "head",
        "is_etag_md5",
        "list_fairly",
        "list_folders",
        "list_objects",
        "list_sorted_keys",
        "list_uploads",
        "list_versions",
        "make_boto3_client",
        "marks_folder",
        "matches_stored_checksum",
        "measure_upload",
        "open_filesystem",
        "open_scoped_store",
        "open_store",
        "open_writer",
        "put",
        "read",
        "read_and_hash",
        "read_range",
        "read_spec_from_environment",
        "read_views_and_hash",
        "sign_url",
        "stream",
    ]


def test_the_names_of_shards():
    assert set(millrace.datasets.__all__) == {
        "ShardingSettings",
        "CardSettings",
        "DatasetStatus",
        "ShardFault",
        "GarbagePlan",
        "GarbageResult",
        "PipelineSettings",
        "Repair",
        "Preflight",
        "ExecutionSettings",
        "ShardReport",
        "SourceLocation",
        "SamplePreview",
        "PreviewedField",
        "PreviewedRow",
        "PartitionState",
        "PartitionStatus",
        "Verification",
        "preflight_dataset",
        "preview_samples",
        "delete_garbage",
        "find_datasets",
        "plan_dataset",
        "plan_garbage",
        "repair_dataset",
        "run_from_file",
        "read_manifest",
        "read_status",
        "shard_dataset",
        "verify_dataset",
        "verify_mirror",
    }


def test_the_names_of_swarm():
    assert millrace.swarm.__all__ == [
        "CacheCheck",
        "Host",
        "Hosts",
        "LimitSettings",
        "NeededFiles",
        "NodeReport",
        "Preview",
        "PrewarmOptions",
        "PrewarmReport",
        "PrewarmSettings",
        "RayNodes",
        "Request",
        "Unpacking",
        "needs_files",
        "preview",
        "prewarm",
        "wait_for_path",
    ]
    for name in millrace.swarm.__all__:
        assert getattr(millrace.swarm, name).__name__ == name
