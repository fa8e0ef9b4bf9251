"""Transforms of the samples between a source and the shards."""

from millrace.datasets.transforms.recorded import (
    RecordedTransforms,
    bundle_files,
    list_transform_changes,
    open_transformed_source,
    open_transforms,
    record_transforms,
    store_large_files,
)
from millrace.datasets.transforms.settings import (
    FilterSettings,
    FunctionSettings,
    JoinSettings,
    RenameSettings,
    TokenizeSettings,
    TransformList,
    TransformSettings,
)
from millrace.datasets.transforms.source import TransformChain, TransformedSource

__all__ = [
    "FilterSettings",
    "FunctionSettings",
    "JoinSettings",
    "RecordedTransforms",
    "RenameSettings",
    "TokenizeSettings",
    "TransformChain",
    "TransformList",
    "TransformSettings",
    "TransformedSource",
    "bundle_files",
    "list_transform_changes",
    "open_transformed_source",
    "open_transforms",
    "record_transforms",
    "store_large_files",
]
