"""The commands that rent machines, and give them back."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from millrace.cli import said
from millrace.progress import Event
from millrace.terminal import echo, echo_text

if TYPE_CHECKING:
    from millrace.datasets import PipelineSettings
    from millrace.rentals import Offer, Rented, RentSettings

_settings_file = click.argument("settings", type=click.Path(path_type=Path), default="rent.yaml")


@click.command()
@_settings_file
@said
def offers(settings: Path) -> int:
    """Show what would be rented, that which costs least in all first. Rents nothing."""
    from millrace.rentals import RentSettings, account, find_offers
    from millrace.settings import load

    rent = load(settings, RentSettings)
    found = find_offers(account(rent.account), rent.wanted)
    if not found:
        echo("No offer fits: ask for less, or grant more dollars an hour.", err=True)
        return 1
    echo_text(table_of(found))
    return 0


@click.command()
@_settings_file
@click.option("--detach", is_flag=True, help="Leave the machines when all of their programs run.")
@said
def rent(settings: Path, *, detach: bool) -> int:
    """Rent machines, run a program on each, and give them back when it has ended."""
    from millrace.rentals import Rental, RentSettings
    from millrace.settings import load

    wanted = load(settings, RentSettings)
    if not detach:
        return _use(wanted)
    give_back_when_stopped()
    with Rental(wanted, detached=True, progress=_Lines()) as rental:
        for machine in rental.until_ready():
            where = machine.instance.address if machine.instance else ""
            echo(f"{wanted.name}/{machine.slot} runs at {where or 'no address'}.")
        cost = rental.cost
    again = f"millrace release {settings} {wanted.name}"
    echo(f"It has cost about ${cost:.2f} so far; give them back with `{again}`.")
    return 0


@click.command()
@_settings_file
@said
def rentals(settings: Path) -> int:
    """List what is rented, for how long, and what it has cost."""
    from millrace.rentals import StandSettings, list_rentals
    from millrace.settings import load

    found = list_rentals(load(settings, StandSettings))
    for one in found:
        echo(sentence_of(one))
    echo(f"Rented: {_machines(len(found))}, ${sum(one.cost for one in found):.2f} so far.")
    return 0


@click.command()
@_settings_file
@click.argument("rental")
@said
def release(settings: Path, rental: str) -> int:
    """Give back all machines of a rental."""
    from millrace.rentals import StandSettings
    from millrace.rentals import release as give_back
    from millrace.settings import load

    count = give_back(load(settings, StandSettings), rental)
    echo(f"Given back: {_machines(count)} of {rental}; a listing shows none.")
    return 0


@click.command("reap")
@_settings_file
@click.option("--dry-run", is_flag=True, help="Only say what would be given back.")
@said
def reap_rentals(settings: Path, *, dry_run: bool) -> int:
    """Give back what has no living owner, or is over its time; nothing that is not ours."""
    from millrace.rentals import StandSettings, reap
    from millrace.settings import load

    found = reap(load(settings, StandSettings), dry_run=dry_run)
    for one in found.returned:
        echo(sentence_of(one))
    word = "Would be given back" if dry_run else "Given back"
    echo(f"{word}: {_machines(len(found.returned))}. Stay: {len(found.kept)}.")
    if found.closed:
        echo(f"Closed: {found.closed}, of which nothing was left.")
    if found.elsewhere:
        echo(f"Another account pays for {found.elsewhere} more: look with its API key.")
    return 0


def shard_on_vast(settings: Path, config: "PipelineSettings") -> int:
    """Shard a dataset on rented machines, and give them back. Stopped, it goes on."""
    from millrace.remote import WithVast, sharding
    from millrace.settings import load

    return _use(sharding(config, load(settings, WithVast).vast))


def _use(wanted: "RentSettings") -> int:
    """Rent machines until all of their programs have ended."""
    from millrace.rentals import Rental

    give_back_when_stopped()
    with Rental(wanted, progress=_Lines()) as rental:
        rental.until_done()
        cost = rental.cost
    echo(f"All is given back. It has cost about ${cost:.2f}.")
    return 0


def give_back_when_stopped(rented: Callable[[], bool] = lambda: True) -> None:
    """End this process by giving back what it rents, however often it is asked to end.

    Args:
        rented: Whether it has machines now. While it has, only the first request interrupts:
            a second one, wherever it hits, could end the process before its machines are back.
    """
    asked = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal asked
        if asked and rented():
            echo("Machines are being given back: wait, or they are billed on.", err=True)
            return
        asked = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)


def table_of(found: "Sequence[Offer]") -> str:
    """Offers, a line each."""
    lines = [f"{'offer':>10}  {'gpu':24}  {'$/h':>7}  {'in all':>8}  {'reliable':>8}  place"]
    for one in found:
        gpu = f"{one.gpus} x {one.gpu}, {one.gpu_memory:.0f} GB"
        lines.append(
            f"{one.id:>10}  {gpu:24}  {one.dph:7.3f}  {one.total:8.2f}  {one.reliability:8.3f}  "
            f"{one.place}"
        )
    return "\n".join(lines)


def sentence_of(one: "Rented") -> str:
    """Describe a rented machine in a sentence."""
    instance = one.instance
    what = f"{one.rental or instance.label}: instance {instance.id} is {instance.status}"
    who = one.why or (f"held by {one.owner}" if one.owner else "left until its time is over")
    if one.attempt is None:
        who = one.why or "nobody understands its label"
        return f"{what}; {who}."
    intent = one.attempt.intent
    return (
        f"{what}, since {intent.begun:%Y-%m-%d %H:%M} until {intent.until:%Y-%m-%d %H:%M} UTC, "
        f"${instance.dph:.3f} an hour, ${one.cost:.2f} so far; {who}."
    )


def _machines(number: int) -> str:
    return f"{number} machine{'' if number == 1 else 's'}"


class _Lines:
    """Says each thing that happens to a machine, and what it prints."""

    def __call__(self, event: Event) -> None:
        figures = event.figures
        match event.name:
            case "machine.printed":
                echo(f"{event.subject}| {figures['text']}")
            case "rental.offer":
                price = f"{figures['gpu']} in {figures['place']} for ${figures['dph']:.3f} an hour"
                echo(f"{event.subject}: takes {price}.")
            case "rental.raised":
                prices = f"${figures['dph']:.3f} an hour, and was offered for"
                echo(f"{event.subject}: costs {prices} ${figures['offered']:.3f}.", err=True)
            case "rental.rented":
                echo(f"{event.subject}: rented, instance {figures['instance']}.")
            case "rental.ready":
                echo(f"{event.subject}: its program runs.")
            case "rental.missing":
                echo(f"{event.subject}: not replaced yet: {figures['why']}", err=True)
            case "rental.returned":
                echo(
                    f"{event.subject}: given back ({figures['why']}: {figures['said']}), "
                    f"${figures['dollars']:.2f}."
                )
            case _:
                pass
