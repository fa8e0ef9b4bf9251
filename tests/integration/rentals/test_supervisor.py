"""A rental that a thread supervises."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest

from millrace.errors import MachineError
from millrace.progress import Event, Progress
from millrace.rentals import RentalSupervisor
from millrace.rentals.progress_events import MachineReady
from tests.support.rentals.account import Reset

FAST = timedelta(milliseconds=100)


class Listener:
    """A context of events that notes whether it is open."""

    def __init__(self) -> None:
        self.told: list[type[Event]] = []
        self.is_open = False

    @contextmanager
    def opened(self) -> Generator[Progress]:
        self.is_open = True
        try:
            yield self.hear
        finally:
            self.is_open = False

    def hear(self, event: Event) -> None:
        self.told.append(type(event))


@pytest.mark.soak
def test_machines_are_rented_while_the_block_lasts(world: Reset) -> None:
    account, listener = world(rate=100.0, strict=False, program=1e9), Listener()
    settings = account.make_settings(machines=2, poll_interval=FAST)
    with RentalSupervisor(settings, progress=listener.opened()) as rental:
        assert RentalSupervisor.has_any_machines()
        rental.wait_until_ready()
        assert rental.cost > 0
        assert (rental.name, rental.is_over) == ("fleet", False)
        assert len(account.server.list_alive()) == 2
        assert listener.is_open
    assert account.server.list_alive() == []
    assert not listener.is_open
    assert not RentalSupervisor.has_any_machines()
    assert listener.told.count(MachineReady) == 2


@pytest.mark.soak
def test_a_rental_goes_on_though_no_progress_can_be_shown(world: Reset) -> None:
    account = world(rate=100.0, strict=False, program=1e9)

    def fail(event: Event) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    settings = account.make_settings(poll_interval=FAST)
    with RentalSupervisor(settings, progress=nullcontext(fail)) as rental:
        rental.wait_until_ready()
        assert len(account.server.list_alive()) == 1
    assert account.server.list_alive() == []


@pytest.mark.soak
def test_a_program_that_never_joined_ends_the_rental_after_its_second_failure(world: Reset) -> None:
    account, listener = (
        world(rate=100.0, strict=False, program=100.0, fates={"failing": 1.0}),
        Listener(),
    )
    settings = account.make_settings(poll_interval=FAST, retry_failed=True)
    with RentalSupervisor(settings, lambda: False, progress=listener.opened()) as rental:
        rental.wait_until_done(timedelta(minutes=1))
        with pytest.raises(
            MachineError, match="The program failed on 2 machines, and has joined the run on none"
        ):
            rental.raise_failure()
        assert rental.describe_end() != "The programs ended with 0."
    assert (account.server.list_alive(), len(account.server.list_machines())) == ([], 2)
