"""Make a checkpoint of weights that another tool saved."""

from prefect import flow

from blocks import Bucket
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Right
from tasks import checkpointing
from tasks.checkpointing import check_checkpoint_destination, report_import
from tasks.forms import draw_form
from tasks.locations import BucketLocation, WeightsInput, check_right, make_store_spec


@draw_form
@flow(name="import-checkpoint", flow_run_name="import-{job}")
def import_checkpoint(
    source: WeightsInput,
    job: str,
    bucket: BucketLocation,
    step: int | None = None,
    only: str | None = None,
) -> Checkpoint:
    """Make a checkpoint of safetensors files, or of files of `torch.save`.

    The source is a model of the Hub, or a folder with `model.safetensors`, `pytorch_model.bin` or
    an index of several files, or with folders such as `step_1000`. No code of a file is executed.
    A run of gradients begins with such weights by `tensors: model.`.

    Args:
        source: Location of the weights.
        job: Job of the new checkpoint: a prefix below the bucket's URL.
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        step: Step of the checkpoint, and of the folder to import if there are several. By default
            the files of the folder itself, or the newest folder, and the step that its name says,
            or 0.
        only: Dict to import from a file of `torch.save`, such as `model`; by default all.
    """
    target = make_store_spec(bucket, Right.WRITE)
    check_right(bucket, Right.WRITE, job)
    check_checkpoint_destination(target, job)
    if isinstance(source.location, Bucket):
        check_right(source.location, Right.READ, source.prefix)
    done = checkpointing.import_checkpoint(source.make_place(), target, job, step, only or "")
    report_import(done, target.url)
    return done.checkpoint
