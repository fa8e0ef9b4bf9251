"""Input of forms for the weights that a run begins with."""

from pydantic import Field

from millrace.gradients import InitialWeights
from millrace.storage import Right, StoreSpec
from tasks.locations import BucketLocation, make_store_spec


class InitialWeightsInput(InitialWeights):
    """Weights that a run begins with: a checkpoint, its bucket, and their names in it."""

    bucket: BucketLocation | None = Field(
        default=None,
        description="Bucket of the checkpoint: a Millrace Bucket block with read credentials, its "
        "name, or a URL. By default the bucket of the run.",
    )

    def make_weights(self) -> InitialWeights:
        """Return the checkpoint as the engine takes it."""
        return InitialWeights(job=self.job, step=self.step, tensors=self.tensors)

    def make_spec(self) -> StoreSpec | None:
        """Return the store of the checkpoint, with read credentials; None for the run's."""
        return None if self.bucket is None else make_store_spec(self.bucket, Right.READ)
