"""Stream a dataset into shards in a store, each exactly once, resumable on any machine."""

from millrace.datasets.garbage import Garbage, collect_garbage
from millrace.datasets.pipeline import (
    Preflight,
    ShardReport,
    check_destination,
    plan_dataset,
    run_from_file,
    run_pipeline,
    shard_dataset,
)
from millrace.datasets.repair import Repair, repair_dataset
from millrace.datasets.settings import CutSettings, ExecutionSettings, PipelineSettings, SourcePlace
from millrace.datasets.status import DatasetStatus, SplitState, SplitStatus, find_datasets, status
from millrace.datasets.verify import Fault, Verification, sealed, verify

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
