"""Stream a dataset into shards in a store, each exactly once, resumable on any machine."""

from millrace.shards.gc import Garbage, collect_garbage
from millrace.shards.pipeline import (
    Preflight,
    ShardReport,
    check_destination,
    plan_dataset,
    run_from_file,
    run_pipeline,
    shard_dataset,
)
from millrace.shards.repair import Repair, repair_dataset
from millrace.shards.settings import CutSettings, ExecutionSettings, PipelineSettings, SourcePlace
from millrace.shards.status import DatasetStatus, SplitState, SplitStatus, find_datasets, status
from millrace.shards.verify import Fault, Verification, sealed, verify

__all__ = [
    "CutSettings",
    "DatasetStatus",
    "ExecutionSettings",
    "Fault",
    "Garbage",
    "PipelineSettings",
    "Preflight",
    "Repair",
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
]
