"""Stream a dataset into shards in a store, each exactly once, resumable on any machine."""

from millrace.dataset_ledger import read_manifest
from millrace.datasets.garbage import GarbagePlan, GarbageResult, delete_garbage, plan_garbage
from millrace.datasets.pipeline import (
    Preflight,
    ShardReport,
    plan_dataset,
    preflight_dataset,
    preview_samples,
    run_from_file,
    shard_dataset,
)
from millrace.datasets.preview import PreviewedField, PreviewedRow, SamplePreview
from millrace.datasets.repair import Repair, repair_dataset
from millrace.datasets.settings import (
    CardSettings,
    ExecutionSettings,
    PipelineSettings,
    ShardingSettings,
    SourceLocation,
)
from millrace.datasets.status import (
    DatasetStatus,
    PartitionState,
    PartitionStatus,
    find_datasets,
    read_status,
)
from millrace.datasets.verify import ShardFault, Verification, verify_dataset, verify_mirror

__all__ = [
    "CardSettings",
    "DatasetStatus",
    "ExecutionSettings",
    "GarbagePlan",
    "GarbageResult",
    "PartitionState",
    "PartitionStatus",
    "PipelineSettings",
    "Preflight",
    "PreviewedField",
    "PreviewedRow",
    "Repair",
    "SamplePreview",
    "ShardFault",
    "ShardReport",
    "ShardingSettings",
    "SourceLocation",
    "Verification",
    "delete_garbage",
    "find_datasets",
    "plan_dataset",
    "plan_garbage",
    "preflight_dataset",
    "preview_samples",
    "read_manifest",
    "read_status",
    "repair_dataset",
    "run_from_file",
    "shard_dataset",
    "verify_dataset",
    "verify_mirror",
]
