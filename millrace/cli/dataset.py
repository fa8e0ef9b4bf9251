"""``millrace dataset``: shard a source, verify the shards, and delete garbage."""

from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace import errors
from millrace.cli.common import (
    DURATION,
    SIZE,
    CommandResult,
    NounGroup,
    add_yes_option,
    confirm,
    is_store_location,
    print_result,
    read_store,
    show_deletion,
    show_failures,
    take_location,
    take_settings_file,
    write_template,
)
from millrace.formatting import format_count, format_size
from millrace.terminal import echo, echo_text, make_console, make_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from millrace.datasets import (
        DatasetStatus,
        PipelineSettings,
        Preflight,
        PreviewedRow,
        SamplePreview,
        ShardReport,
        Verification,
    )
    from millrace.progress import Event
    from millrace.rented_sharding import VastSettings
    from millrace.schemas.dataset import DatasetPlan
    from millrace.storage import Store

_FILE = "millrace.yaml"
_TEMPLATE = """\
# A dataset, from its source to its shards. `millrace run THIS_FILE` makes the shards, and continues
# a run that was stopped. ${NAME} is a variable of the environment, ${NAME:-value} has a default.

dataset: my-dataset             # a prefix below the store's URL

source:
  url: file:///path/to/a/folder # or s3://bucket/prefix, r2://account/bucket/prefix, gs://
  kind: jsonl                   # a sample of each line; or csv, parquet (of rows), files (of files)
  include: ["*.jsonl", "*.jsonl.gz", "*.jsonl.zst"]
  columns: {txt: text}          # field: column; without `columns`, each row is kept as json
  # credentials:                # by default AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
  #   access_key_id: ${R2_DATASET_READ_ACCESS_KEY_ID}
  #   secret_access_key: ${R2_DATASET_READ_SECRET_ACCESS_KEY}

# Destination of the shards. By default the environment names it (.env.example):
# LOCAL_STORAGE_PATH, or STORAGE_BACKEND=s3 with CHECKPOINT_BUCKET.
# store:
#   url: r2://${R2_DATASET_ACCOUNT_ID}/${R2_DATASET_BUCKET_NAME}
#   credentials:
#     access_key_id: ${R2_DATASET_WRITE_ACCESS_KEY_ID}
#     secret_access_key: ${R2_DATASET_WRITE_SECRET_ACCESS_KEY}

sharding:                       # pinned by the plan: cannot change under the same name
  shard_bytes: 64MiB
  partition_bytes: 512MiB       # one worker at a time works on a partition
  # partition_files: 10000      # of kind `files`: approximate number of files in a partition
  seed: 0                       # seed of the shuffle; null keeps the source's order
  holdout: 0.0                  # share of the bytes that is held out as the split `val`

execution:                      # never changes the shards
  # workers: null               # workers at a time; null is one for each CPU
  uploads: 2                    # memory: shard_bytes * (uploads + 1) * workers * formats
  # ray: null                   # `auto` or HOST:PORT: the Ray cluster that shards
  # max_quarantined: 0.01       # largest share of rows that make no sample; else the run fails
  # allow_empty: false          # true completes a dataset that has no samples

# card: {license: cc-by-4.0}    # writes README.md, by which datasets.load_dataset opens the shards
"""

_SAMPLES = 3  # shown by default
_MAX_SAMPLES = 20
_SHOWN_FILES = 20  # of each state of an index
_INDEX_STATES = {
    "stale": "was written after it was indexed",
    "missing": "was not indexed yet",
    "gone": "was indexed, and is gone",
    "unchecked": "was indexed without checksums",
}

_prefix = click.option(
    "--prefix", metavar="NAME", help="Name of the dataset, instead of the name in the file."
)


def _take_machine_options(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """Add the options of rented machines."""
    for option in (
        click.option(
            "--workdir",
            metavar="FOLDER",
            help="Folder of the program on a machine; `vast.workdir`.",
        ),
        click.option(
            "--disk", type=SIZE, help="Size of the disk, such as 80GB; `vast.request.disk`."
        ),
        click.option(
            "--offer-id",
            type=int,
            metavar="NUMBER",
            help="Rent this offer of `millrace plan`, and no other; `vast.request.offer_id`.",
        ),
        click.option(
            "--use-vast",
            is_flag=True,
            help="Shard on rented machines, by the section `vast` of the file.",
        ),
    ):
        command = option(command)
    return command


@click.group(cls=NounGroup)
def dataset() -> None:
    r"""Shard a source into WebDataset or other shards, each sample exactly once.

    `init`, `plan`, `run`, `status` and `verify` are also commands of `millrace` itself.

    \b
    Example:
      millrace dataset run job.yaml
      millrace dataset verify r2://ACCOUNT/BUCKET my-dataset
    """


@dataset.command()
@click.argument("path", type=click.Path(path_type=Path), default=_FILE)
@print_result
def init(path: Path) -> CommandResult:
    r"""Write a settings file to start from.

    \b
    Example: millrace init job.yaml
    """
    write_template(path, _TEMPLATE)
    echo(f"Wrote {path}. Set its source and store, then: millrace plan {path}")
    return CommandResult({"path": path})


@dataset.command()
@take_settings_file(_FILE)
@_prefix
@_take_machine_options
@click.option(
    "--samples",
    type=click.IntRange(0, _MAX_SAMPLES),
    help="Number of samples to show; 0 reads no row.  [default: 3; 0 for a list of URLs]",
)
@print_result
def plan(
    settings: Path,
    prefix: str | None,
    *,
    samples: int | None,
    use_vast: bool,
    **machine_options: "Any",
) -> CommandResult:
    r"""Show the partitions, the destination and the first samples of a dataset. Writes nothing.

    The samples are those of the first rows of the first partition, through the transforms. At most
    100 rows are looked at, and 64 MiB of files are read. Functions of the transforms are called.

    If the file has a section `vast`, the command also shows the offers that `run --use-vast` would
    take. Exit code 1 if `run` would refuse the settings.

    \b
    Example: millrace plan job.yaml
    """
    from millrace.datasets import preflight_dataset
    from millrace.datasets.sources import SourceKind

    config = _read_settings(settings, prefix)
    is_url_list = samples is None and config.source.kind is SourceKind.URLS
    count = 0 if is_url_list else _SAMPLES if samples is None else samples
    plan, found = preflight_dataset(config, samples=count)
    _show_plan(plan, config, found.largest_sample)
    echo(f"Goes to {found.url}{found.state and f' ({found.state})'}.")
    for sentence in (*found.notes, *found.unchecked):
        echo(sentence)
    if is_url_list:
        echo("The first samples are shown with --samples, which requests that many URLs.")
    _show_samples(found.preview)
    refusals = list(found.refusals)
    if use_vast or config.vast is not None:
        vast = _read_machines(settings, config, machine_options)
        try:
            _show_offers(config, vast, found)
        except errors.ConfigurationError as error:
            if use_vast:
                refusals.append(str(error))
            else:
                echo(f"`millrace run --use-vast` will refuse: {error}", err=True)
    else:
        _refuse_machine_options(machine_options)
    for sentence in refusals:
        echo(f"`millrace run` will refuse: {sentence}", err=True)
    data = {
        "dataset": plan.dataset,
        "url": found.url,
        "state": found.state,
        "files": plan.source.files,
        "bytes": plan.source.size,
        "mirrors": [spec.url for spec in config.source.mirrors],
        "formats": plan.layout.formats,
        "fields": plan.layout.fields,
        "partitions": [
            {"name": one.name, "split": one.split, "bytes": one.source_range.size}
            for one in plan.partitions
        ],
        "samples": list(map(_describe_row, found.preview.rows)),
        "refusals": refusals,
    }
    return CommandResult(data, 1 if refusals else 0)


@dataset.command()
@take_settings_file(_FILE)
@_prefix
@_take_machine_options
@click.option(
    "--slot",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Number of this machine, from 0 on, if several shard the dataset. While others work on "
    "all open partitions, machine 0 waits, and the others end with exit code 0.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Then verify all shards, and make missing or damaged shards again.",
)
@add_yes_option
@print_result
def run(
    settings: Path,
    prefix: str | None,
    *,
    use_vast: bool,
    slot: int | None,
    repair: bool,
    yes: bool,
    **machine_options: "Any",
) -> CommandResult:
    r"""Shard a dataset, or continue a run that was stopped.

    With --use-vast, the command shows the offers, and asks before it rents.

    \b
    Example: millrace run job.yaml
    """
    from millrace.datasets import repair_dataset, shard_dataset
    from millrace.progress_bar import PartitionsBar

    config = _read_settings(settings, prefix)
    if use_vast and repair:
        raise errors.ConfigurationError(
            "--repair works on this machine, and --use-vast on rented machines. Shard with "
            "--use-vast first, then run --repair alone."
        )
    if slot is not None and (use_vast or repair):
        raise errors.ConfigurationError(
            "--slot is for one of several machines that shard a dataset: remove it, or remove "
            f"{'--use-vast' if use_vast else '--repair'}."
        )
    if use_vast:
        return _run_on_machines(config, _read_machines(settings, config, machine_options), yes=yes)
    _refuse_machine_options(machine_options)
    try:
        with PartitionsBar() as progress:
            report = shard_dataset(
                config, progress=progress, accept_changed_source=repair, wait=not slot
            )
    except errors.HeldError as error:
        if not slot:
            raise
        echo(str(error))
        return CommandResult({"dataset": config.dataset, "held": str(error)})
    _show_report(report)
    data = _describe_report(report)
    if repair:
        repaired = repair_dataset(config)
        for key in repaired.remade_keys:
            echo(f"Made again: {key}")
        echo(
            f"{format_count(repaired.shards, 'shard')} verified, {len(repaired.remade_keys)} made "
            "again."
        )
        for stray in repaired.strays:
            echo(f"Not repaired: {stray.key}: {stray.reason}", err=True)
        data["remade"] = repaired.remade_keys
        data["strays"] = repaired.strays
        return CommandResult(data, 1 if repaired.strays else 0)
    return CommandResult(data)


def _read_machines(
    settings: Path, config: "PipelineSettings", options: "dict[str, Any]"
) -> "VastSettings":
    """Return the section `vast` of a settings file, with the options of the command."""
    from millrace.rented_sharding import read_vast_settings

    return read_vast_settings(config, str(settings), **options)


def _refuse_machine_options(options: "dict[str, Any]") -> None:
    """Refuse options of rented machines without `--use-vast`."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise errors.ConfigurationError(
            f"{given[0]} needs --use-vast: add it, or remove {given[0]}."
        )


def _run_on_machines(
    config: "PipelineSettings", vast: "VastSettings", *, yes: bool
) -> CommandResult:
    """Shard a dataset on rented machines, after a question."""
    from millrace.cli.machine import EventPrinter, confirm_rental, interrupt_on_signal
    from millrace.datasets import preflight_dataset
    from millrace.progress_bar import PartitionsBar
    from millrace.rentals import RentalSupervisor
    from millrace.rented_sharding import (
        limit_machines,
        make_sharding_rental,
        needs_machines,
        shard_on_machines,
    )

    rental, found = make_sharding_rental(config, vast), None
    if needs_machines(config):
        _, found = preflight_dataset(config)
        if found.refusals:
            raise errors.ConfigurationError(found.refusals[0])
        rental, note = limit_machines(rental, found)
        if note:
            echo(note)
        if not confirm_rental(rental, yes=yes):
            return CommandResult({"rental": rental.name, "dollars": 0.0}, 1)
        vast = vast.model_copy(update={"machines": rental.machines})
    interrupt_on_signal(RentalSupervisor.has_any_machines)
    show_machines = EventPrinter()
    with PartitionsBar() as show_partitions:

        def progress(event: "Event") -> None:
            show_machines(event)
            show_partitions(event)

        report = shard_on_machines(config, vast, found=found, progress=progress)
    _show_report(report)
    if report.dollars is not None:
        echo(f"All is released. It has cost about ${report.dollars:.2f}.")
    return CommandResult(
        {**_describe_report(report), "rental": rental.name, "dollars": report.dollars or 0.0}
    )


def _describe_report(report: "ShardReport") -> "dict[str, object]":
    """Return the report of a run as plain values."""
    return {
        "url": report.url,
        "manifest": report.manifest_key,
        "samples": report.samples,
        "shards": len(report.manifest.shards),
        "bytes": report.manifest.size,
        "quarantined": report.manifest.quarantined,
        "dropped": report.manifest.dropped,
        "new_shards": report.new_shards,
        "new_bytes": report.new_bytes,
        "seconds": report.seconds,
        "warnings": report.warnings,
    }


@dataset.command("import-settings")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@_prefix
@print_result
def import_settings(path: Path, prefix: str | None) -> CommandResult:
    r"""Print the settings of a file of Train Data Bridge as settings of Millrace.

    Reads the sections `vast`, `r2` and `pipeline`. Secrets are not printed: variables stand for
    them. Comments name the settings that were left out.

    \b
    Example: millrace dataset import-settings bridge.yaml > job.yaml
    """
    from millrace.bridge_settings import import_bridge_settings

    imported = import_bridge_settings(path, dataset=prefix)
    echo_text(imported.make_yaml().rstrip("\n"))
    return CommandResult(imported)


def _take_dataset(command: "Callable[..., Any]") -> "Callable[..., Any]":
    """Add the arguments that name a complete or unfinished dataset."""
    name = click.argument("name", metavar="[DATASET]", required=False)
    return take_location(_FILE, "[FILE|URL]")(name(command))


@dataset.command()
@_take_dataset
@click.option("--quick", is_flag=True, help="Compare sizes only; read no shard.")
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="URL",
    help="Also verify the copies there, by the same manifest: a URL, or a settings file with a "
    "`store` and its credentials. May be given again.",
)
@print_result
def verify(
    location: str, name: str | None, *, quick: bool, mirrors: tuple[str, ...]
) -> CommandResult:
    r"""Compare every shard with the manifest. Exit code 1 if a shard is missing or differs.

    An object beside the shards that the manifest does not name is an error, too.

    \b
    Example: millrace verify r2://ACCOUNT/BUCKET my-dataset
             millrace verify job.yaml --mirror s3://MIRROR
    """
    from millrace.datasets import verify_dataset, verify_mirror

    store, found_name = _open_dataset(location, name)
    specs = [read_store(one) for one in mirrors]
    result = verify_dataset(store, found_name, digests=not quick)
    _show_verification(store.url, result)
    copies: dict[str, Verification] = {}
    for spec in specs:
        found = copies[spec.url] = verify_mirror(store, spec, found_name, digests=not quick)
        _show_verification(spec.url, found)
    is_intact = all(one.is_intact for one in (result, *copies.values()))
    return CommandResult({**asdict(result), "mirrors": copies}, 0 if is_intact else 1)


def _show_verification(url: str, result: "Verification") -> None:
    """Print the faults of a dataset at a URL, and how many of its shards are intact."""
    from millrace.storage.locations import escape_key

    for fault in result.all_faults:
        name = url if fault.key == url else f"{url}/{escape_key(fault.key)}"
        echo(f"{name}: {fault.reason}")
    compared = "sizes and digests" if result.includes_digests else "sizes"
    echo(
        f"{url}: {format_count(result.shards - len(result.faults), 'shard')} of {result.shards} "
        f"as the manifest says ({compared}, {format_size(result.size)})."
    )
    for sentence in result.notes:
        echo(sentence)


@dataset.command()
@_take_dataset
@print_result
def status(location: str, name: str | None) -> CommandResult:
    r"""Show the progress of a dataset, or of all datasets below a URL, from the bucket alone.

    \b
    Example: millrace status r2://ACCOUNT/BUCKET
    """
    from millrace.datasets import find_datasets, read_status

    if name is None and is_store_location(location):
        from millrace.storage import open_store

        store = open_store(location, make_folder=False)
        names = find_datasets(store)
        if not names:
            raise errors.NotFoundError(f"There is no dataset below {store.url}.")
    else:
        store, found_name = _open_dataset(location, name)
        names = [found_name]
    found: list[DatasetStatus | dict[str, str]] = []
    code = 0
    for each in names:
        try:
            status = read_status(store, each)
        except errors.CorruptError as error:
            if len(names) == 1:
                raise
            echo(f"{each} cannot be read: {error}", err=True)  # other datasets are still shown
            found.append({"dataset": each, "error": str(error)})
            code = 1
        else:
            found.append(status)
            _show_status(status)
    return CommandResult(found, code)


@dataset.command()
@click.argument("url")
@click.option("--column", default="text", show_default=True, help="Column whose pages are indexed.")
@click.option(
    "--include",
    multiple=True,
    default=("*.parquet",),
    show_default=True,
    metavar="PATTERN",
    help="Pattern of the paths of the files; may be given again.",
)
@click.option(
    "--checksums",
    is_flag=True,
    help="Read the pages, 16 files at once, and store a checksum of each for loaders with mirrors.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the index is stale.")
@print_result
def index(
    url: str, column: str, include: tuple[str, ...], *, checksums: bool, check: bool
) -> CommandResult:
    r"""Make the index of the pages of parquet files, so that loaders need not read each file's end.

    The index is stored beside the files. After files have changed, only their ends are read anew.

    With --checksums, loaders also read copies in other stores whose ETag is another one. The pages
    of the column are read once, where the index has no checksums of them yet.

    \b
    Example: millrace dataset index r2://ACCOUNT/BUCKET/my-dataset/shards/pages/train
    """
    from millrace.datasets.loader.page_index import index_pages

    store = read_store(url)
    report = index_pages(
        store, column, include=include, includes_checksums=checksums, is_check=check
    )
    for name, state in _INDEX_STATES.items():
        paths = getattr(report, name)
        for path in paths[:_SHOWN_FILES]:
            echo(f"{path}: {state}")
        if len(paths) > _SHOWN_FILES:
            echo(f"and {format_count(len(paths) - _SHOWN_FILES, 'other file')}: {state}")
    for sentence in report.differing:
        echo(sentence, err=True)
    state = "was made" if report.is_new else "is current" if report.is_current else "is stale"
    echo(
        f"The index of {column!r} {state}: {format_count(report.files, 'file')}, "
        f"{format_count(report.rows, 'row')}, {format_size(report.size)}. Files with checksums: "
        f"{report.checked}."
    )
    return CommandResult(report, 1 if report.differing or not report.is_current else 0)


@dataset.command("collect-garbage")
@_take_dataset
@click.option(
    "--min-age", type=DURATION, default="1h", show_default=True, help="Least age of an object."
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; delete nothing.")
@add_yes_option
@print_result
def collect_garbage(
    location: str, name: str | None, *, min_age: timedelta, dry_run: bool, yes: bool
) -> CommandResult:
    r"""Delete objects that no record of a dataset names, such as leftovers of killed runs.

    The command shows the objects, and asks before it deletes them.

    \b
    Example: millrace dataset collect-garbage r2://ACCOUNT/BUCKET my-dataset
    """
    from millrace.datasets import delete_garbage, plan_garbage

    store, found_name = _open_dataset(location, name)
    plan = plan_garbage(store, found_name, min_age=min_age)
    for one in plan.objects:
        echo(store.make_url(one.key))
    for upload in plan.uploads.uploads:
        echo(f"{store.make_url(upload.key)}: unfinished upload, {format_size(upload.size)}")
    show_failures(plan.uploads.failures)
    count = f"{format_count(len(plan.objects), 'object')}, {format_size(plan.size)}"
    if plan.uploads.uploads:
        count += f", and abort {format_count(len(plan.uploads.uploads), 'unfinished upload')}"
    if dry_run or not (plan.objects or plan.uploads.uploads):
        echo(f"Would delete {count}.")
        return CommandResult(plan)
    if not confirm(f"Delete {count}?", yes=yes):
        return CommandResult(plan, 1)
    done = delete_garbage(store, plan)
    show_failures(done.uploads.failures[len(plan.uploads.failures) :])
    show_deletion(done.deletion)
    if plan.uploads.uploads:
        aborted = format_count(len(done.uploads.successes), "unfinished upload")
        echo(f"Aborted {aborted}, {format_size(done.uploads.size)}.")
    return CommandResult(done, 1 if done.failures else 0)


def _read_settings(path: Path, prefix: str | None) -> "PipelineSettings":
    from millrace.datasets import PipelineSettings
    from millrace.settings import load_settings

    config = load_settings(path, PipelineSettings, template="millrace init")
    if prefix is None:
        return config
    if not prefix:
        raise errors.ConfigurationError("--prefix is empty: write the name of the dataset.")
    return config.model_copy(update={"dataset": prefix})


def _open_dataset(location: str, name: str | None) -> "tuple[Store, str]":
    """Open the store of a settings file, URL or folder; return the store and the dataset's name."""
    from millrace.storage import open_store

    if not is_store_location(location):
        config = _read_settings(Path(location), name)
        return open_store(config.store, make_folder=False), config.dataset
    if not name:
        raise errors.ConfigurationError(
            f"{location} names no dataset. After a URL or a folder, name the dataset: URL DATASET."
        )
    return open_store(location, make_folder=False), name


def _show_plan(plan: "DatasetPlan", config: "PipelineSettings", largest: int | None) -> None:
    table = make_table("split", "partitions", "source bytes")
    for split in sorted({partition.split for partition in plan.partitions}):
        own = [partition for partition in plan.partitions if partition.split == split]
        size = sum(partition.source_range.size for partition in own)
        table.add_row(split, str(len(own)), format_size(size))
    echo(
        f"{plan.dataset}: {format_count(plan.source.files, 'file')}, "
        f"{format_size(plan.source.size)} of {plan.source.kind} at {plan.source.url}"
    )
    if config.source.mirrors:
        echo(f"Mirrors: {', '.join(spec.url for spec in config.source.mirrors)}.")
    if plan.source.markers:
        markers = format_count(plan.source.markers, "empty object")
        echo(f"Skipped: {markers} that only show folders.")
    make_console().print(table)
    if steps := plan.source.settings.get("transforms", {}).get("steps"):
        echo(f"Transforms: {', '.join(step['kind'] for step in steps)}.")
    fields = ", ".join(f"{name} ({kind})" for name, kind in plan.layout.fields.items())
    echo(
        f"Formats: {', '.join(plan.layout.formats)}{f', with the fields {fields}' * bool(fields)}."
    )
    execution = config.execution
    is_unknown = execution.ray is not None and execution.workers is None
    workers = 1 if is_unknown else max(1, execution.count_workers())
    buffers = (execution.uploads + 1) * workers * len(plan.layout.formats)
    memory = plan.layout.shard_bytes * buffers
    echo(
        f"Shards of at most {format_size(plan.layout.shard_bytes)}; "
        f"at most {format_size(memory)} of them in the memory of "
        f"{'each task of Ray' if is_unknown else format_count(workers, 'worker')}."
    )
    if largest is None:
        echo(
            "A larger row is a shard of its own. A worker holds at most one such row at a time, in "
            "memory of up to five times its size, and 18 times if it is a list of short values."
        )
    elif largest > plan.layout.shard_bytes:
        echo(
            f"The largest sample has {format_size(largest)}, and is a shard of its own. With one "
            "such sample in each worker it is at most "
            f"{format_size(memory + workers * len(plan.layout.formats) * largest)}."
        )


def _show_samples(preview: "SamplePreview") -> None:
    """Show the first rows of a dataset."""
    if preview.rows:
        echo(f"First rows of {preview.partition}:")
    for row in preview.rows:
        if row.reason:
            echo(f"  {row.name} makes no sample: {row.reason}")
            continue
        echo(f"  {row.name}")
        for name, field in row.fields.items():
            beginning = "bytes" if field.beginning is None else field.beginning
            echo(f"    {name} ({format_size(field.size)}): {beginning}")
    for sentence in preview.notes:
        echo(sentence)


def _describe_row(row: "PreviewedRow") -> "dict[str, object]":
    """Return a sample, or a row that makes none, as plain values."""
    if row.reason:
        return {"where": row.name, "reason": row.reason}
    fields = {
        name: {"bytes": field.size, "beginning": field.beginning}
        for name, field in row.fields.items()
    }
    return {"key": row.name, "fields": fields}


def _show_offers(config: "PipelineSettings", vast: "VastSettings", found: "Preflight") -> None:
    """Show the offers that `run --use-vast` would take."""
    if find_spec("vastai") is None:
        echo("`run --use-vast` needs the extra vast: pip install 'millrace[vast]'.")
        return
    from millrace.cli.machine import show_offers
    from millrace.rented_sharding import limit_machines, make_sharding_rental

    rental, note = limit_machines(make_sharding_rental(config, vast), found)
    if note:
        echo(note)
    show_offers(rental)


def _show_report(report: "ShardReport") -> None:
    _show_run(report)
    for sentence in report.warnings:
        echo(f"Warning: {sentence}", err=True)


def _show_run(report: "ShardReport") -> None:
    manifest = report.manifest
    contents = (
        f"{format_count(report.samples, 'sample')} in "
        f"{format_count(len(manifest.shards), 'shard')}, {format_size(manifest.size)}"
    )
    if report.was_complete:
        echo(
            f"{report.url} is complete already: {contents}. The manifest is "
            f"{report.manifest_url}. This run made 0 shards."
        )
        return
    rate = format_size(report.new_bytes / report.seconds)
    echo(f"{report.url}: {contents}, from {format_count(report.partitions, 'partition')}.")
    echo(
        f"This run made {format_count(report.new_shards, 'shard')}, "
        f"{format_size(report.new_bytes)} in {report.seconds:.1f} s ({rate}/s)."
    )
    for location, size in report.served.items():
        echo(f"Read {format_size(size)} from {location}.")
    if manifest.dropped:
        echo(f"The transforms dropped {format_count(manifest.dropped, 'row')} of the source.")
    if manifest.quarantined:
        echo(
            f"{format_count(manifest.quarantined, 'row')} made no sample. Each is kept with its "
            f"reason below {report.url}/quarantine/."
        )
    echo(f"Finalized by {report.manifest_key}.")


def _show_status(found: "DatasetStatus") -> None:
    partitions = format_count(len(found.partitions), "partition")
    state = "complete" if found.is_complete else f"{found.ended_partitions} of {partitions} ended"
    note = f". {found.other_name}" if found.other_name else ""
    echo(f"{found.dataset}: {state}, from {found.source}{note}")
    table = make_table("partition", "state", "shards", "samples", "bytes", "quarantined", "held by")
    for one in found.partitions:
        table.add_row(
            one.name,
            one.state,
            str(one.shards),
            str(one.samples),
            format_size(one.size),
            str(one.quarantined),
            f"{one.host} until {one.until:%H:%M:%S}" if one.until else "",
        )
    make_console().print(table)
    if found.damaged_records:
        damaged = format_count(len(found.damaged_records), "record")
        echo(f"{damaged} of its ledger cannot be read:")
        for sentence in found.damaged_records[:10]:
            echo(f"  {sentence}")
