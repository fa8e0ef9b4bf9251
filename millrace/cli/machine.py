"""``millrace machine``: rent machines of Vast.ai, and release them."""

import contextlib
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from millrace.cli.common import (
    CommandResult,
    NounGroup,
    add_yes_option,
    confirm,
    print_result,
    take_settings_file,
)
from millrace.formatting import format_count
from millrace.progress import Event
from millrace.terminal import echo, echo_text

if TYPE_CHECKING:
    from millrace.rentals import MachineStatus, Offer, RentalSettings

_take_settings = take_settings_file("rent.yaml")


@click.group(cls=NounGroup)
def machine() -> None:
    r"""Rent machines of Vast.ai, run a program on each, and release them.

    \b
    Example:
      millrace machine offers rent.yaml
      millrace machine rent rent.yaml
      millrace machine list rent.yaml
    """


@machine.command()
@_take_settings
@print_result
def offers(settings: Path) -> CommandResult:
    r"""Show the offers that `rent` would take, by expected cost. Rents nothing.

    Exit code 1 if no offer fits.

    \b
    Example: millrace machine offers rent.yaml
    """
    from millrace.rentals import RentalSettings
    from millrace.settings import load_settings

    found = show_offers(load_settings(settings, RentalSettings))
    return CommandResult(found, 0 if found else 1)


@machine.command()
@_take_settings
@click.option(
    "--detach", is_flag=True, help="Exit when all programs run, and leave the machines rented."
)
@add_yes_option
@print_result
def rent(settings: Path, *, detach: bool, yes: bool) -> CommandResult:
    r"""Rent machines, run a program on each, and release them when all programs have ended.

    The command shows the offers, and asks before it rents.

    \b
    Example: millrace machine rent rent.yaml --detach
    """
    from millrace.rentals import OwnerMonitor, Rental, RentalSettings
    from millrace.settings import load_settings

    rental_settings = load_settings(settings, RentalSettings)
    if not detach:
        return run_rental(rental_settings, yes=yes)
    if not confirm_rental(rental_settings, yes=yes):
        return CommandResult({"rental": rental_settings.name, "dollars": 0.0}, 1)
    interrupt_on_signal()
    with (
        OwnerMonitor(rental_settings.ledger, rental_settings.name),
        Rental(rental_settings, detached=True, progress=EventPrinter()) as rental,
    ):
        rental.wait_until_ready()
        running = rental.machines
        for one in running:
            address = one.instance.address if one.instance else ""
            echo(f"{rental_settings.name}/{one.slot} runs at {address or 'no address'}.")
        cost = rental.cost
    if running:
        quoted = shlex.quote(str(settings))
        release_command = f"millrace machine release {rental_settings.name} {quoted}"
        echo(f"The machines have cost about ${cost:.2f}; release them with `{release_command}`.")
    else:
        echo(
            f"All programs of {rental_settings.name} have ended: no machine is rented. To run them "
            "again, choose another `name`."
        )
    return CommandResult({"rental": rental_settings.name, "dollars": cost})


@machine.command("list")
@_take_settings
@print_result
def list_machines(settings: Path) -> CommandResult:
    r"""List the rented machines, with their times and their costs.

    \b
    Example: millrace machine list rent.yaml
    """
    from millrace.rentals import LedgerSettings, list_rentals
    from millrace.settings import load_settings

    found = list_rentals(load_settings(settings, LedgerSettings))
    for one in found:
        echo(describe_machine(one))
    count = format_count(len(found), "machine")
    echo(f"Rented: {count}, ${sum(one.cost for one in found):.2f} so far.")
    return CommandResult(found)


@machine.command()
@click.argument("rental")
@_take_settings
@add_yes_option
@print_result
def release(settings: Path, rental: str, *, yes: bool) -> CommandResult:
    r"""Release all machines of a rental, and check that the provider lists none of them.

    The command shows the machines, and asks before it releases them.

    Of FILE, only `store` and `account` are read: the store of the ledger of rentals, such as the
    bucket of a campaign, and the account that pays.

    \b
    Example: millrace machine release wiki rent.yaml
    """
    from millrace.rentals import LedgerSettings, list_rentals, release_rental
    from millrace.settings import load_settings

    ledger = load_settings(settings, LedgerSettings)
    machines = [] if yes else [one for one in list_rentals(ledger) if one.rental == rental]
    if not _confirm_release(machines, yes=yes):
        return CommandResult({"rental": rental, "released": 0}, 1)
    count = release_rental(ledger, rental)
    echo(f"Released: {format_count(count, 'machine')} of {rental}; a listing shows none.")
    return CommandResult({"rental": rental, "released": count})


@machine.command()
@_take_settings
@click.option(
    "--dry-run", is_flag=True, help="Show the machines that would be released; release none."
)
@add_yes_option
@print_result
def reap(settings: Path, *, dry_run: bool, yes: bool) -> CommandResult:
    r"""Release machines that have no living owner, or have passed their deadline.

    Detached machines are also released when they cost more than their owner has allowed.

    The command shows the machines, and asks before it releases them. After the answer, the command
    looks again. Machines that have an owner by then stay. Machines that have lost theirs are
    released, too.

    Only machines with this installation's label are touched.

    \b
    Example: millrace machine reap rent.yaml --dry-run
             millrace machine reap rent.yaml --yes
    """
    from millrace.rentals import LedgerSettings
    from millrace.rentals import reap as reap_machines
    from millrace.settings import load_settings

    ledger = load_settings(settings, LedgerSettings)
    if not (dry_run or yes):
        plan = reap_machines(ledger, dry_run=True)
        if not _confirm_release(plan.released, yes=yes):
            kept = replace(plan, released=(), kept=plan.released + plan.kept)
            return CommandResult(kept, 1)
    result = reap_machines(ledger, dry_run=dry_run)
    for one in result.released:
        echo(describe_machine(one))
    verb = "Would be released" if dry_run else "Released"
    count = format_count(len(result.released), "machine")
    echo(f"{verb}: {count}. Stay: {len(result.kept)}.")
    if result.closed_attempts:
        echo(f"Closed: {format_count(result.closed_attempts, 'attempt')} without a machine.")
    if result.foreign_attempts:
        count = format_count(result.foreign_attempts, "machine")
        echo(f"Another account pays for {count}: run this command with its API key, too.")
    return CommandResult(result)


def show_offers(settings: "RentalSettings") -> "list[Offer]":
    """Print the offers that fit a rental, and return them."""
    from millrace.rentals import find_offers, open_account

    found = find_offers(open_account(settings.account), settings.effective_request)
    if found:
        echo_text(format_offers(found))
    elif settings.request.offer_id is not None:
        echo("This offer is gone, or does not fit: name another offer, or none.", err=True)
    else:
        echo("No offer fits: ask for less, or raise max_hourly.", err=True)
    return found


def run_rental(settings: "RentalSettings", *, yes: bool) -> CommandResult:
    """Rent machines, wait until all programs have ended, and release the machines.

    A monitor releases them half a minute after this process was killed.
    """
    from millrace.rentals import OwnerMonitor, Rental

    if not confirm_rental(settings, yes=yes):
        return CommandResult({"rental": settings.name, "dollars": 0.0}, 1)
    interrupt_on_signal()
    with (
        OwnerMonitor(settings.ledger, settings.name),
        Rental(settings, progress=EventPrinter()) as rental,
    ):
        rental.wait_until_done()
        cost = rental.cost
    echo(f"All is released. It has cost about ${cost:.2f}.")
    return CommandResult({"rental": settings.name, "dollars": cost})


def confirm_rental(settings: "RentalSettings", *, yes: bool) -> bool:
    """Show the offers, and ask whether to rent machines."""
    if yes:
        return True
    show_offers(settings)
    limit = f"${settings.request.max_total:.2f} in all"
    count = format_count(settings.machines, "machine")
    return confirm(f"Rent {count} for {settings.name}, for at most {limit}?", yes=yes)


def _confirm_release(machines: "Sequence[MachineStatus]", *, yes: bool) -> bool:
    """Show machines, and ask whether to release them. No machine needs no answer."""
    for one in machines:
        echo(describe_machine(one))
    return not machines or confirm(f"Release {format_count(len(machines), 'machine')}?", yes=yes)


def interrupt_on_signal(has_machines: Callable[[], bool] = lambda: True) -> None:
    """Interrupt this process at the first signal, and ignore further signals during a release.

    A second interrupt could end the process before its machines are released.

    Args:
        has_machines: Function that decides whether the process has machines. Without machines,
            each signal interrupts the process.
    """
    was_interrupted = False

    def handle_signal(_: int, __: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted and has_machines():
            with contextlib.suppress(OSError):  # the terminal may be closed
                echo(
                    "Machines are being released: wait. Machines that are not released are billed.",
                    err=True,
                )
            return
        was_interrupted = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handle_signal)


def format_offers(offers: "Sequence[Offer]") -> str:
    """Return a table with a line for each offer."""
    lines = [f"{'offer':>10}  {'gpu':24}  {'$/h':>7}  {'in all':>8}  {'reliable':>8}  location"]
    for one in offers:
        gpu = f"{one.gpus} x {one.gpu}, {one.gpu_memory:.0f} GB"
        lines.append(
            f"{one.id:>10}  {gpu:24}  {one.dollars_per_hour:7.3f}  {one.expected_cost:8.2f}  "
            f"{one.reliability:8.3f}  {one.location}"
        )
    return "\n".join(lines)


def describe_machine(machine: "MachineStatus") -> str:
    """Describe a rented machine in a sentence."""
    instance = machine.instance
    status = f"{machine.rental or instance.label}: instance {instance.id} is {instance.status}"
    owner = machine.release_reason or (
        f"held by {machine.owner}" if machine.owner else "detached until its deadline"
    )
    if machine.attempt is None:
        unknown = (
            "its record of the intent cannot be read"
            if machine.rental
            else "its label is damaged, or of another store"
        )
        return f"{status}; {machine.release_reason or unknown}."
    times = machine.attempt.intent.started_at, machine.attempt.deadline
    since, deadline = (f"{one:%Y-%m-%d %H:%M}" for one in times)
    return (
        f"{status}, since {since} until {deadline} UTC, "
        f"${instance.dollars_per_hour:.3f} an hour, ${machine.cost:.2f} so far; {owner}."
    )


class EventPrinter:
    """Printer of the events of machines, and of the output of their programs."""

    def __call__(self, event: Event) -> None:
        """Print an event."""
        from millrace.rentals import progress_events as events

        match event:
            case events.OutputPrinted():
                echo(f"{event.machine}| {event.text}")
            case events.OfferTaken():
                offer = f"{event.gpu} in {event.location} for ${event.dollars_per_hour:.3f} an hour"
                echo(f"{event.machine}: takes {offer}.")
            case events.PriceRaised():
                prices = f"${event.dollars_per_hour:.3f} an hour, and was offered for"
                echo(f"{event.machine}: costs {prices} ${event.offered:.3f}.", err=True)
            case events.MachineRented():
                echo(f"{event.machine}: rented, instance {event.instance}.")
            case events.MachineReady():
                echo(f"{event.machine}: its program runs.")
            case events.MachineMissing():
                echo(f"{event.machine}: not replaced yet: {event.message}", err=True)
            case events.RentalWaiting():
                echo(f"Waiting for {event.rental}: {event.message}", err=True)
            case events.MachineReleased():
                echo(
                    f"{event.machine}: released ({event.reason}: {event.message}), "
                    f"${event.dollars:.2f}."
                )
            case _:
                pass
