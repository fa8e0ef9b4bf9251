"""``millrace gradient``: merge or import pseudo-gradients, score workers, and save weights."""

from pathlib import Path

import click

from millrace.cli.common import (
    CommandResult,
    NounGroup,
    print_result,
    take_settings_file,
)
from millrace.formatting import format_count, format_size
from millrace.terminal import echo


@click.group(cls=NounGroup)
def gradient() -> None:
    r"""Merge the pseudo-gradients of a run, score its workers, and save its newest weights.

    \b
    Example:
      millrace gradient aggregate aggregate.yaml
      millrace gradient score score.yaml
      millrace gradient standings r2://ACCOUNT/BUCKET runs/one
      millrace gradient catch-up r2://ACCOUNT/BUCKET runs/one --to file:///scratch/weights
      millrace gradient import import.yaml
      millrace gradient roster r2://ACCOUNT/BUCKET runs/one
    """


@gradient.command()
@take_settings_file("aggregate.yaml")
@click.option(
    "--max-windows", type=click.IntRange(min=1), help="Largest number of windows to merge."
)
@print_result
def aggregate(settings: Path, *, max_windows: int | None) -> CommandResult:
    r"""Merge the pseudo-gradients of a run, window after window, until the run is over.

    \b
    Example: millrace gradient aggregate aggregate.yaml
    """
    from millrace.gradients import AggregatorSettings, aggregate_run
    from millrace.gradients.progress_events import RosterChanged, WorkersAwaited
    from millrace.progress import Event
    from millrace.schemas.chain import count_reasons
    from millrace.settings import load_settings

    config = load_settings(settings, AggregatorSettings)
    if max_windows is not None:
        config = config.model_copy(update={"max_windows": max_windows})

    def print_roster(event: Event) -> None:
        if isinstance(event, RosterChanged):
            echo(f"window {event.window}: {event.describe()}")
        elif isinstance(event, WorkersAwaited):
            found = format_count(event.found, "worker")
            echo(f"window {event.window} waits for workers: {found} of {event.quorum}")

    merged: list[dict[str, object]] = []
    for link in aggregate_run(config, progress=print_roster):
        reasons = count_reasons(link.excluded.values())
        sent = sum(one.size for one in link.taken.values())
        echo(
            f"window {link.window}, step {link.step}: {len(link.taken)} taken, "
            f"{len(link.excluded)} excluded{reasons and f' ({reasons})'}; "
            f"{format_size(sent)} merged into {format_size(link.size)}, after {link.seconds:.1f} s"
        )
        merged.append(
            {
                "window": link.window, "step": link.step, "taken": sorted(link.taken),
                "excluded": {uid: str(one.reason) for uid, one in link.excluded.items()},
                "received_bytes": sent, "merged_bytes": link.size, "seconds": link.seconds,
            }
        )  # fmt: skip
    return CommandResult(merged)


@gradient.command("catch-up")
@click.argument("url")
@click.argument("run")
@click.option("--version", default="1", show_default=True, help="Version that the workers run.")
@click.option("--to", required=True, metavar="URL", help="URL of the store for the weights.")
@print_result
def catch_up(url: str, run: str, version: str, to: str) -> CommandResult:
    r"""Save the newest weights of a run, from a checkpoint of its chain and all later merges.

    The weights are saved as a checkpoint of the job RUN below the URL of --to. The tensors are in
    `weights` and, if the outer optimizer has momentum, in `moments`.

    \b
    Example: millrace gradient catch-up r2://ACCOUNT/BUCKET runs/one --to file:///scratch/weights
    """
    from millrace import gradients
    from millrace.gradients.merging.links import read_link
    from millrace.gradients.weights import save_weights
    from millrace.keys.gradients import ChainKeys
    from millrace.storage import open_store

    store, keys = open_store(url, make_folder=False), ChainKeys(run, version)
    state, window = gradients.load_newest_state(store, keys)
    last = gradients.catch_up(store, keys, state, after=window) or read_link(store, keys, window)
    now = last.window if isinstance(last, gradients.ChainLink) else 0
    saved = save_weights(state, open_store(to), run, step=last.step, window=now)
    echo(
        f"{run} is at step {last.step}, after window {now}: the checkpoint of window {window}, and "
        f"{format_count(now - window, 'later link')} applied. {format_size(saved.size)} in {to}, "
        f"as job {run}."
    )
    data = {
        "run": run, "step": last.step, "window": now, "replayed": now - window,
        "bytes": saved.size, "url": to,
    }  # fmt: skip
    return CommandResult(data)


@gradient.command("import")
@take_settings_file("import.yaml")
@print_result
def import_run(settings: Path) -> CommandResult:
    r"""Make a chain of the gradients of a Templar run.

    The windows of the Templar run become windows 1, 2, and so on. Each payload is checked, and
    compressed again with the codec of the run. After a kill, the same command continues.

    \b
    Example: millrace gradient import import.yaml
    """
    from millrace.gradients import TemplarImportSettings, import_templar_run
    from millrace.gradients.progress_events import PayloadConverted
    from millrace.progress import Event
    from millrace.schemas.chain import count_reasons
    from millrace.settings import load_settings

    config = load_settings(settings, TemplarImportSettings)
    lost: dict[str, float] = {}

    def note_lost(event: Event) -> None:
        if isinstance(event, PayloadConverted):
            lost[event.uid] = event.lost

    imported: list[dict[str, object]] = []
    for link in import_templar_run(config, progress=note_lost):
        reasons = count_reasons(link.excluded.values())
        number = config.templar.first_window + link.window - 1
        most = max(lost.values(), default=0.0)
        echo(
            f"Templar's window {number} as window {link.window}: {len(link.taken)} taken, "
            f"{len(link.excluded)} excluded{reasons and f' ({reasons})'}; at most "
            f"{most:.1%} of a norm lost"
        )
        imported.append(
            {
                "window": link.window, "templar_window": number, "taken": sorted(link.taken),
                "excluded": {uid: str(one.reason) for uid, one in link.excluded.items()},
                "lost": lost.copy(),
            }
        )  # fmt: skip
        lost.clear()
    if not imported:
        echo("All of these windows are in the chain.")
    return CommandResult(imported)


@gradient.command()
@click.argument(
    "file", type=click.Path(path_type=Path, dir_okay=False), default=".millrace/worker.key"
)
@print_result
def key(file: Path) -> CommandResult:
    r"""Print the public key of a worker that registers, by which a run admits it.

    A new key is written if FILE is missing. Run the command in the folder of the worker.

    \b
    Example: millrace gradient key
    """
    from millrace.gradients import WorkerKey

    public = WorkerKey.load(file).public
    echo(public)
    return CommandResult({"key": public, "file": str(file)})


@gradient.command()
@click.argument("url")
@click.argument("run")
@click.option("--version", default="1", show_default=True, help="Version that the workers run.")
@print_result
def roster(url: str, run: str, version: str) -> CommandResult:
    r"""Show the registered workers of a run, as the newest window was opened with them.

    \b
    Example: millrace gradient roster r2://ACCOUNT/BUCKET runs/one
    """
    from millrace.gradients import read_newest_roster
    from millrace.keys.gradients import ChainKeys
    from millrace.storage import open_store

    keys = ChainKeys(run, version)
    window, entries = read_newest_roster(open_store(url, make_folder=False), keys)
    if not entries:
        echo(
            f"{run} has no registered workers{f' in window {window}' if window else ''}. Workers "
            "register if the settings of the run have `registration`."
        )
    else:
        echo(f"{run}, window {window}:")
        width = max([6, *(len(uid) for uid in entries)])
        columns = "{:{}} {:>12} {:>6} {:>6} {:>7}  {}"
        echo(columns.format("worker", width, "status", "since", "valid", "missed", "key"))
        for uid, one in entries.items():
            echo(
                columns.format(
                    uid, width, one.status, one.since, one.valid, one.missed, one.key[:16]
                )
            )
    return CommandResult(
        {
            "run": run, "window": window,
            "workers": {uid: one.model_dump(mode="json") for uid, one in entries.items()},
        }
    )  # fmt: skip


@gradient.command()
@take_settings_file("score.yaml")
@click.option("--until", type=click.IntRange(min=1), help="Number of the last window to score.")
@click.option("--follow", is_flag=True, help="Wait for further windows.")
@print_result
def score(settings: Path, *, until: int | None, follow: bool) -> CommandResult:
    r"""Score the workers of a run by what their gradients do to the loss.

    Each merged window without scores is scored. The gradients come from the chain, so the command
    may run at any time. It continues where an earlier one ended.

    \b
    Example: millrace gradient score score.yaml --follow
    """
    from millrace.gradients import ScorerSettings, load_compute_loss, score_run
    from millrace.settings import load_settings
    from millrace.storage import open_store

    config = load_settings(settings, ScorerSettings)
    options = config.scoring
    if until is not None:
        options = options.model_copy(update={"until": until})
    scored: list[dict[str, object]] = []
    for scores in score_run(
        open_store(config.store, make_folder=False),
        config.chain_keys,
        load_compute_loss(config.loss, settings.parent),
        options,
        follow=config.poll_interval if follow or config.follow else None,
    ):
        evidence = scores.evidence
        best = next((uid for uid, _ in scores.rank()), "nobody")
        copied = f", {len(evidence.copies)} copied" if evidence.copies else ""
        echo(
            f"window {evidence.window}: {format_count(len(evidence.evaluations), 'worker')} "
            f"evaluated{copied}; {best} leads"
        )
        scored.append(
            {
                "window": evidence.window, "evaluated": sorted(evidence.evaluations),
                "copies": {uid: one.earlier for uid, one in evidence.copies.items()},
                "scores": {uid: one.score for uid, one in scores.standings.items()},
            }
        )  # fmt: skip
    if not scored:
        echo("All merged windows have scores.")
    return CommandResult(scored)


@gradient.command()
@click.argument("url")
@click.argument("run")
@click.option("--version", default="1", show_default=True, help="Version that the workers run.")
@print_result
def standings(url: str, run: str, version: str) -> CommandResult:
    r"""Show the standings of a run's workers, and prove that they follow from the evidence.

    \b
    Example: millrace gradient standings r2://ACCOUNT/BUCKET runs/one
    """
    from millrace.errors import NotFoundError
    from millrace.gradients import iterate_scores
    from millrace.keys.gradients import ChainKeys
    from millrace.storage import open_store

    store, keys = open_store(url, make_folder=False), ChainKeys(run, version)
    last = None
    for scores in iterate_scores(store, keys):
        last = scores
    if last is None:
        raise NotFoundError(
            f"{run} has no scores below {store.make_url(keys.scores)}: run `millrace gradient "
            "score` first."
        )
    echo(f"{run}, after window {last.evidence.window}:")
    ranked = last.rank()
    width = max([6, *(len(uid) for uid, _ in ranked)])
    columns = "{:{}} {:>8} {:>8} {:>14} {:>10} {:>8}"
    echo(columns.format("worker", width, "weight", "score", "rating", "own pages", "windows"))
    for uid, one in ranked:
        rating = f"{one.mu:.1f} ± {one.sigma:.1f}"
        echo(
            columns.format(
                uid, width, f"{one.weight:.1%}", f"{one.score:.2f}", rating, f"{one.use:+.2f}",
                one.evaluations,
            )
        )  # fmt: skip
    return CommandResult(
        {
            "run": run, "window": last.evidence.window,
            "standings": {uid: one.model_dump(mode="json") for uid, one in ranked},
        }
    )  # fmt: skip
