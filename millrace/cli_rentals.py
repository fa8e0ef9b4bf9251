"""Commands that rent machines, and give them back."""

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
    from millrace.rentals import MachineStatus, Offer, RentalSettings

_settings_file = click.argument("settings", type=click.Path(path_type=Path), default="rent.yaml")


@click.command("offers")
@_settings_file
@said
def show_offers(settings: Path) -> int:
    """Show the offers that fit, by expected cost. Rents nothing."""
    from millrace.rentals import RentalSettings, find_offers, open_account
    from millrace.settings import load_settings

    rent = load_settings(settings, RentalSettings)
    found = find_offers(open_account(rent.account), rent.effective_request)
    if not found:
        echo("No offer fits: ask for less, or grant more dollars an hour.", err=True)
        return 1
    echo_text(format_offers(found))
    return 0


@click.command("rent")
@_settings_file
@click.option("--detach", is_flag=True, help="Leave the machines when all of their programs run.")
@said
def rent_machines(settings: Path, *, detach: bool) -> int:
    """Rent machines, run a program on each, and give them back when it has ended."""
    from millrace.rentals import Rental, RentalSettings
    from millrace.settings import load_settings

    rental_settings = load_settings(settings, RentalSettings)
    if not detach:
        return _run_rental(rental_settings)
    release_on_signal()
    with Rental(rental_settings, detached=True, progress=_EventPrinter()) as rental:
        for machine in rental.wait_until_ready():
            address = machine.instance.address if machine.instance else ""
            echo(f"{rental_settings.name}/{machine.slot} runs at {address or 'no address'}.")
        cost = rental.cost
    release_command = f"millrace release {settings} {rental_settings.name}"
    echo(f"It has cost about ${cost:.2f} so far; give them back with `{release_command}`.")
    return 0


@click.command("rentals")
@_settings_file
@said
def list_machines(settings: Path) -> int:
    """List the rented machines, with their times and costs."""
    from millrace.rentals import LedgerSettings, list_rentals
    from millrace.settings import load_settings

    machines = list_rentals(load_settings(settings, LedgerSettings))
    for machine in machines:
        echo(describe_machine(machine))
    cost = sum(machine.cost for machine in machines)
    echo(f"Rented: {_format_machine_count(len(machines))}, ${cost:.2f} so far.")
    return 0


@click.command("release")
@_settings_file
@click.argument("rental")
@said
def release_machines(settings: Path, rental: str) -> int:
    """Give back all machines of a rental."""
    from millrace.rentals import LedgerSettings, release
    from millrace.settings import load_settings

    count = release(load_settings(settings, LedgerSettings), rental)
    echo(f"Given back: {_format_machine_count(count)} of {rental}; a listing shows none.")
    return 0


@click.command("reap")
@_settings_file
@click.option("--dry-run", is_flag=True, help="Only say what would be given back.")
@said
def reap_machines(settings: Path, *, dry_run: bool) -> int:
    """Give back machines whose owner is lost or whose time is over, of this installation only."""
    from millrace.rentals import LedgerSettings, reap
    from millrace.settings import load_settings

    result = reap(load_settings(settings, LedgerSettings), dry_run=dry_run)
    for one in result.returned:
        echo(describe_machine(one))
    verb = "Would be given back" if dry_run else "Given back"
    echo(f"{verb}: {_format_machine_count(len(result.returned))}. Stay: {len(result.kept)}.")
    if result.closed_attempts:
        echo(f"Closed: {result.closed_attempts}, of which nothing was left.")
    if result.foreign_attempts:
        echo(f"Another account pays for {result.foreign_attempts} more: look with its API key.")
    return 0


def shard_on_vast(settings: Path, config: "PipelineSettings") -> int:
    """Shard a dataset on rented machines, and give them back. The next run resumes it."""
    from millrace.remote import VastFileSettings, make_sharding_rental
    from millrace.settings import load_settings

    return _run_rental(make_sharding_rental(config, load_settings(settings, VastFileSettings).vast))


def _run_rental(settings: "RentalSettings") -> int:
    """Rent machines until all of their programs have ended."""
    from millrace.rentals import Rental

    release_on_signal()
    with Rental(settings, progress=_EventPrinter()) as rental:
        rental.wait_until_done()
        cost = rental.cost
    echo(f"All is given back. It has cost about ${cost:.2f}.")
    return 0


def release_on_signal(has_machines: Callable[[], bool] = lambda: True) -> None:
    """Release the machines of this process when a signal ends it, even if signals repeat.

    Args:
        has_machines: Tells whether this process has machines now. While it has, only the first
            signal interrupts: a second one could end the process before its machines are returned.
    """
    was_interrupted = False

    def handle_signal(_: int, __: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted and has_machines():
            echo("Machines are being given back: wait, or they are billed on.", err=True)
            return
        was_interrupted = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handle_signal)


def format_offers(offers: "Sequence[Offer]") -> str:
    """Format offers as a table, one offer on each line."""
    lines = [f"{'offer':>10}  {'gpu':24}  {'$/h':>7}  {'in all':>8}  {'reliable':>8}  location"]
    for one in offers:
        gpu = f"{one.gpus} x {one.gpu}, {one.gpu_memory:.0f} GB"
        lines.append(
            f"{one.id:>10}  {gpu:24}  {one.hourly_price:7.3f}  {one.expected_cost:8.2f}  "
            f"{one.reliability:8.3f}  {one.location}"
        )
    return "\n".join(lines)


def describe_machine(machine: "MachineStatus") -> str:
    """Describe a rented machine in a sentence."""
    instance = machine.instance
    status = f"{machine.rental or instance.label}: instance {instance.id} is {instance.status}"
    owner = machine.return_reason or (
        f"held by {machine.owner}" if machine.owner else "left until its time is over"
    )
    if machine.attempt is None:
        owner = machine.return_reason or "nobody understands its label"
        return f"{status}; {owner}."
    intent = machine.attempt.intent
    return (
        f"{status}, since {intent.begun:%Y-%m-%d %H:%M} until {intent.until:%Y-%m-%d %H:%M} UTC, "
        f"${instance.hourly_price:.3f} an hour, ${machine.cost:.2f} so far; {owner}."
    )


def _format_machine_count(number: int) -> str:
    return f"{number} machine{'' if number == 1 else 's'}"


class _EventPrinter:
    """Printer of the events of machines, and of their programs' output."""

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
