"""The work around the object store that training on rented GPUs depends on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.datasets import PipelineSettings, run_from_file, shard_dataset
    from millrace.rented_sharding import run_pipeline

__all__ = ["PipelineSettings", "run_from_file", "run_pipeline", "shard_dataset"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a worker that needs one package does not import the others.
    if name == "run_pipeline":
        from millrace import rented_sharding  # noqa: PLC0415

        return rented_sharding.run_pipeline
    if name in __all__:
        from millrace import datasets  # noqa: PLC0415

        return getattr(datasets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
