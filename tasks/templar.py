"""Input of forms for the gradients of a Templar run."""

from pydantic import BaseModel, ConfigDict, Field

from millrace.gradients import TemplarOptions, TemplarSource
from millrace.storage import Right
from tasks.locations import BucketLocation, make_store_spec


class TemplarWorkerBucket(BaseModel):
    """A Templar worker that has a bucket of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uid: int = Field(title="Number", ge=0, description="Number of the worker.")
    bucket: BucketLocation = Field(
        description="A Millrace Bucket block with read credentials, its name, or a URL."
    )


class TemplarInput(TemplarOptions):
    """Gradients of a Templar run, at the root of a bucket."""

    bucket: BucketLocation = Field(
        description="A Millrace Bucket block with read credentials, its name, or a URL. The "
        "gradients are at its root, those of several workers together, as in a copy of their "
        "buckets."
    )

    worker_buckets: tuple[TemplarWorkerBucket, ...] = Field(
        default=(), description="Workers that have a bucket of their own."
    )

    def make_source(self) -> TemplarSource:
        """Return the gradients as the engine takes them."""
        options = {name: getattr(self, name) for name in TemplarOptions.model_fields}
        stores = {one.uid: make_store_spec(one.bucket, Right.READ) for one in self.worker_buckets}
        return TemplarSource(
            store=make_store_spec(self.bucket, Right.READ), worker_stores=stores, **options
        )
