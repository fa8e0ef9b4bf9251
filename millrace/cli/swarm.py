"""``millrace swarm``: copy files to every node of a cluster, peer to peer."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace import errors
from millrace.cli.common import (
    CommandResult,
    NounGroup,
    handle_errors,
    print_result,
    take_settings_file,
)
from millrace.formatting import format_count, format_size
from millrace.terminal import echo, make_console, make_table

if TYPE_CHECKING:
    from millrace.swarm import PrewarmReport

_SHOWN_FILES = 20  # of a dry run


@click.group(cls=NounGroup)
def swarm() -> None:
    r"""Copy files to every node of a cluster, reading each byte from the store once.

    \b
    Example:
      millrace swarm node --root /data --host 0.0.0.0 --port 7000
      millrace swarm prewarm prewarm.yaml
    """


@swarm.command()
@take_settings_file("prewarm.yaml")
@click.option("--dry-run", is_flag=True, help="Show the files and destinations; copy nothing.")
@print_result
def prewarm(settings: Path, *, dry_run: bool) -> CommandResult:
    r"""Copy the same files to every node of a cluster.

    Exit code 1 if a node is not ready at the end. A dry run has exit code 1 if the settings would
    be refused.

    \b
    Example: millrace swarm prewarm prewarm.yaml --dry-run
    """
    from millrace.progress_bar import BytesBar
    from millrace.settings import load_settings
    from millrace.swarm import PrewarmSettings, preview
    from millrace.swarm import prewarm as warm_nodes

    config = load_settings(settings, PrewarmSettings)
    if dry_run:
        seen = preview(config)
        for path, size, origin in seen.files[:_SHOWN_FILES]:
            destination = config.root / path if config.root is not None else path
            echo(f"{destination}  {format_size(size)}  {origin}")
        if len(seen.files) > _SHOWN_FILES:
            more = format_count(len(seen.files) - _SHOWN_FILES, "more file")
            echo(f"and {more}, which --json lists.")
        files, pieces = format_count(len(seen.files), "file"), format_count(seen.pieces, "piece")
        echo(f"{files}, {format_size(seen.size)}, in {pieces}.")
        for sentence in seen.refusals:
            echo(f"`millrace swarm prewarm` will refuse: {sentence}", err=True)
        return CommandResult(seen, 1 if seen.refusals else 0)
    with BytesBar() as progress:
        report = warm_nodes(config, progress=progress)
    _show_report(report)
    return CommandResult(report, 0 if all(node.ready for node in report.nodes) else 1)


@swarm.command()
@click.option(
    "--root", type=click.Path(path_type=Path), required=True, help="Folder for the files."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port to listen on; 0 takes a free port, and prints its number.",
)
@handle_errors
def node(root: Path, host: str, port: int) -> int:
    r"""Serve this machine as a node of a swarm, until it is stopped.

    The environment variable MILLRACE_NODE_KEY holds the secret that all nodes share.

    \b
    Example: millrace swarm node --root /data --host 0.0.0.0 --port 7000
    """
    from millrace.swarm.agent import serve

    key = os.environ.get("MILLRACE_NODE_KEY", "")
    if len(key) < 16:
        raise errors.ConfigurationError(
            "The key of the node is too short. Set MILLRACE_NODE_KEY to a secret of 16 characters "
            "or more, the same on every node and in the driver's settings. A holder of the secret "
            "may write files here."
        )
    serve(root, key.encode(), host, port, lambda at: echo(f"Listening at {at}"))
    return 0


def _show_report(report: "PrewarmReport") -> None:
    table = make_table("node", "ready", "cached", "store", "peers", "failed", "seconds")
    for seen in report.nodes:
        state = "yes" if seen.ready else "no"
        table.add_row(
            seen.name,
            state if seen.trusted else f"{state} (untrusted)",
            *(format_size(size) for size in (seen.cached, seen.from_store, seen.from_peers)),
            str(seen.failures),
            f"{seen.seconds:.1f}",
        )
    make_console().print(table)
    for seen in report.nodes:
        if seen.reason:
            echo(f"{seen.name}: {seen.reason}")
    ready, nodes = sum(node.ready for node in report.nodes), len(report.nodes)
    echo(
        f"{format_count(report.files, 'file')}, {format_size(report.size)}, on {ready} of "
        f"{format_count(nodes, 'node')} in {report.seconds:.1f} s; "
        f"{format_size(report.store_bytes)} left the store."
    )
    if report.direct:
        echo(f"Nodes also read from the store what others had: {report.direct}.")
    for reason in report.refused:
        echo(reason)
    if report.unverified:
        echo(
            f"{format_count(report.unverified, 'file')} unverified at the source: no record has "
            "the digest."
        )
    if report.unconfirmed:
        echo(
            f"A part of {format_count(report.unconfirmed, 'file')} was read by one node alone, and "
            "no other read has confirmed the bytes. Give the `sha256` of these files, or use two "
            "nodes."
        )
