"""Distrust: no action of others, and no report, costs money or another's machines."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Holder
from millrace.rentals import Rental, VastClient, machine_starter, reap, release_rental, reports
from millrace.rentals.ledger import list_attempts
from millrace.rentals.machine_environment import make_environment
from millrace.rentals.messages import MachineHeartbeat, ProgramExit
from millrace.rentals.progress_events import OutputPrinted
from millrace.schemas.rental import ReleaseReason
from millrace.storage import Credentials, Store, StoreSpec, create, open_store, put, read_range
from millrace.testing.credentials import make_credentials
from millrace.testing.process import REPOSITORY
from millrace.testing.rgw import RGW
from millrace.testing.vast import VastServer
from tests.prefect_server import wait_until
from tests.support.rentals.account import Account_, Reset
from tests.support.rentals.parts import make_attempt


def leave(account: Account_, **more: Any) -> None:
    with Rental(account.make_settings(**more), vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()


def says(account: Account_, name: str, text: str | bytes) -> None:
    """Have the first machine of `fleet` say something."""
    path = account.folder / "_machines/fleet/000000" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def test_what_was_left_ends_before_its_money_is_spent(world: Reset) -> None:
    account = world()
    leave(account, machines=2, request={"max_total": 1.0})
    account.server.advance(20 * 3600)
    for _ in range(2):
        reap(account.make_ledger_settings(), vast=account.vast)
    assert account.server.list_alive() == []
    for attempt in list_attempts(open_store(account.store), "fleet"):
        hours = (attempt.intent.deadline - attempt.intent.started_at) / timedelta(hours=1)
        assert hours * attempt.intent.dollars_per_hour == pytest.approx(0.5, abs=0.01)


def test_what_was_left_goes_when_its_program_has_ended(world: Reset) -> None:
    account = world(program=600.0)
    leave(account)
    assert len(reap(account.make_ledger_settings(), vast=account.vast).kept) == 1
    account.server.advance(900)
    (gone,) = reap(account.make_ledger_settings(), vast=account.vast).released
    assert gone.release_reason == "the program has ended"
    assert account.server.list_alive() == []


def test_machines_that_are_left_are_told_so_and_others_that_they_have_an_owner(
    world: Reset,
) -> None:
    account = world()
    said = account.folder / "_rentals/fleet/owner.txt"
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        assert said.read_bytes() != b"detached"
    leave(account)
    assert said.read_bytes() == b"detached"


def test_an_owner_that_was_followed_ends_and_touches_nothing(world: Reset) -> None:
    account = world()
    rental = Rental(account.make_settings(machines=2), vast=account.vast)
    rental.__enter__()
    rental.wait_until_ready()
    keys = RentalKeys("fleet")
    body = {"kind": "lease", "version": 1, "nonce": "x"}
    holder = Holder(id="other", host="elsewhere", machine="", pid=1, started="1")
    record = {"holder": holder.model_dump(), "ttl": "PT3M"}
    there = json.dumps({**body, "record": record}).encode()
    create(open_store(account.store), keys.lease.make_term_key(1), there)
    with pytest.raises(errors.HeldError, match="Another process has taken over fleet") as caught:
        rental.wait_until_done()
    rental.__exit__(type(caught.value), caught.value, None)
    assert len(account.server.list_alive()) == 2
    assert all(one["call"] != "delete" for one in account.server.list_requests())


def test_two_that_rent_at_once_do_not_both(world: Reset, monkeypatch: pytest.MonkeyPatch) -> None:
    account = world()
    commit = machine_starter.commit_once

    def second(store: Any, key: str, record: Any) -> Any:
        if key.endswith("-intent.json"):  # another was a moment earlier
            commit(store, key, record.model_copy(update={"offer_id": 1}))
        return commit(store, key, record)

    monkeypatch.setattr(machine_starter, "commit_once", second)
    rental = Rental(account.make_settings(), vast=account.vast)
    with pytest.raises(errors.HeldError, match="Another process"), rental:
        rental.wait_until_ready()
    assert account.server.list_machines() == []


@pytest.mark.parametrize(
    "number", ["1.7e308", "1" + "0" * 400, "1" + "0" * 30, "-5", '"x"', "1e15"]
)
def test_a_machine_may_say_that_it_has_moved_anything(world: Reset, number: str) -> None:
    account = world(program=3000.0)
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        says(account, "beat.json", f'{{"number": 99, "received": {number}, "sent": {number}}}')
        rental.wait_until_ready()
        assert rental.cost < 50.0
    (attempt,) = list_attempts(open_store(account.store), "fleet")
    assert attempt.release_record
    assert attempt.release_record.cost < 50.0
    assert reap(account.make_ledger_settings(), vast=account.vast).released == ()


def test_a_damaged_record_keeps_no_other_from_being_released(world: Reset) -> None:
    account = world()
    leave(account)
    with Rental(account.make_settings("other"), vast=account.vast) as rental:
        rental.wait_until_ready()
        rental._stack.close()
        rental._ownership.is_superseded = True  # it goes without a word
    put(open_store(account.store), RentalKeys("fleet").make_released_key(0), b"{}")
    found = reap(account.make_ledger_settings(), vast=account.vast)
    assert [one.rental for one in found.released] == ["other"]


def test_what_it_prints_is_bounded_and_printable(world: Reset) -> None:
    account = world(program=3000.0)
    with Rental(account.make_settings(), vast=account.vast, progress=account.note_event) as rental:
        rental.wait_until_ready()
        says(account, "log/000000.txt", b"\x1b[2Jgone\x07\n" + b"x" * 5000 + b"\n" * 100_000)
        says(account, "log/000001.txt", b"y" * (10 << 20))
        rental.wait_until_ready()
    printed = [event.text for event in account.told if isinstance(event, OutputPrinted)]
    assert printed[0] == "[2Jgone"
    assert len(printed) < 3000
    assert max(len(str(line)) for line in printed) == 500


def test_creates_that_nobody_answers_are_not_tried_without_end(world: Reset) -> None:
    account = world()
    account.server.fail_next(1000, "error502", "create")
    rental = Rental(account.make_settings(), vast=account.vast)
    with pytest.raises(errors.UnavailableError, match="whether a machine was rented"), rental:
        rental.wait_until_ready()
    assert sum(one["call"] == "create" for one in account.server.list_requests()) == 3


def test_a_refusal_that_names_a_contract_has_left_a_machine(world: Reset) -> None:
    account = world()
    account.server.fail_next(1, "low bid, 400", "create")
    with Rental(
        account.make_settings(request={"interruptible": True}), vast=account.vast
    ) as rental:
        rental.wait_until_ready()
        assert len(account.server.list_alive()) == 1
    first, _ = list_attempts(open_store(account.store), "fleet")
    assert first.release_record
    assert first.release_record.reason is ReleaseReason.OUTBID
    assert account.server.list_alive() == []


def test_what_is_left_while_the_reaper_looks_stays(
    world: Reset, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = world()
    rental = Rental(account.make_settings(), vast=account.vast, detached=True)
    rental.__enter__()
    rental.wait_until_ready()
    instances = VastClient.list_instances

    def leaving(vast: VastClient) -> Any:
        found = instances(vast)
        monkeypatch.setattr(VastClient, "list_instances", instances)
        rental.__exit__(None, None, None)
        return found

    monkeypatch.setattr(VastClient, "list_instances", leaving)
    assert len(reap(account.make_ledger_settings(), vast=account.vast).kept) == 1
    assert len(account.server.list_alive()) == 1


def test_a_release_that_failed_is_gone_on_with_by_the_reaper(world: Reset) -> None:
    account = world()
    leave(account)
    account.server.fail_next(10_000, "error500", "delete")
    with pytest.raises(errors.UnavailableError, match="millrace machine reap"):
        release_rental(account.make_ledger_settings(), "fleet", vast=account.vast)
    account.server.fail_next(0, "error500", "delete")
    account.server.ask("calm", {})
    assert len(reap(account.make_ledger_settings(), vast=account.vast).released) == 1
    assert account.server.list_alive() == []


def test_a_machine_whose_label_was_changed_is_known_by_its_number(world: Reset) -> None:
    account = world()
    leave(account)
    (one,) = account.server.list_alive()
    account.server.ask("label", {"instance": one["id"], "label": "mine"})
    assert release_rental(account.make_ledger_settings(), "fleet", vast=account.vast) == 1
    assert account.server.list_alive() == []
    abandoned = Rental(account.make_settings("other"), vast=account.vast)
    abandoned.__enter__()
    abandoned.wait_until_ready()
    abandoned._stack.close()
    (one,) = account.server.list_alive()
    account.server.ask("label", {"instance": one["id"], "label": ""})
    assert len(reap(account.make_ledger_settings(), vast=account.vast).released) == 1
    assert account.server.list_alive() == []


def test_a_machine_that_makes_its_reports_unreadable_is_released(world: Reset) -> None:
    account = world()
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        says(account, "log/\x1b000000.txt", "a name that no folder of ours lists")
        account.server.advance(1000)
        rental.wait_until_ready()
        first, second = account.server.list_machines()
        assert first["destroyed"]
        assert not second["destroyed"]
    attempts = list_attempts(open_store(account.store), "fleet")
    assert attempts[0].release_record
    assert attempts[0].release_record.message == "the machine sent no heartbeat for 0:05:00"


def test_a_store_that_cannot_be_read_is_no_silent_machine(
    world: Reset, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = world()
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        monkeypatch.setattr(
            "millrace.rentals.reports.list_objects",
            lambda *_, **__: (_ for _ in ()).throw(errors.UnavailableError("down")),
        )
        account.server.advance(1000)
        rental.wait_until_ready()
        monkeypatch.undo()
        assert len(account.server.list_machines()) == 1


def test_a_machine_is_given_no_secret_of_the_stores_options(world: Reset) -> None:
    account = world()
    pair = Credentials(access_key_id="a", secret_access_key=SecretStr("b"))
    spec = StoreSpec(
        url="s3://bucket", endpoint="http://127.0.0.1:9", credentials=pair,
        options={"proxy_url": SecretStr("http://user:secret@proxy")},
    )  # fmt: skip
    with pytest.raises(errors.ConfigurationError, match="options or a ca_file"):
        make_environment(
            open_store(spec), account.make_settings(role_arn="x"), make_attempt(),
            vast_url=account.server.url,
        )  # fmt: skip


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"]
)
def test_a_watchdog_lives_through_any_answer(vast: VastServer, answer: bytes) -> None:
    vast.reset(rate=1.0, strict=False)
    number = vast.plant("x")
    (entry,) = vast.list_alive()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        done = watch(vast, number, entry["key"], f"http://127.0.0.1:{server.getsockname()[1]}/", 1)
    assert "the owner sent no heartbeat" in done
    assert vast.list_alive() == []


def test_a_watchdog_stays_with_a_machine_that_was_left(vast: VastServer, tmp_path: Path) -> None:
    vast.reset(rate=1.0, strict=False)
    number = vast.plant("x")
    (entry,) = vast.list_alive()
    (tmp_path / "owner.txt").write_bytes(b"detached")
    done = watch(vast, number, entry["key"], (tmp_path / "owner.txt").as_uri(), 1, lifetime=3)
    assert "the deadline has passed" in done
    assert vast.list_alive() == []


def test_a_watchdog_destroys_its_machine_though_the_disk_is_full(vast: VastServer) -> None:
    """It cannot write a line into its log then."""
    vast.reset(rate=1.0, strict=False)
    number = vast.plant("x")
    (entry,) = vast.list_alive()
    with Path("/dev/full").open("wb") as full:
        watchdog = start_watchdog(vast, number, entry["key"], "", 1000, lifetime=1, stdout=full)
    try:
        wait_until(lambda: not vast.list_alive(), "its end")
    finally:
        os.killpg(watchdog.pid, signal.SIGKILL)
        watchdog.wait()


FULL_MACHINE = """
import os
fork, refusals = os.fork, [BlockingIOError("processes"), OSError("memory")]

def refuse():
    if refusals:
        raise refusals.pop()
    return fork()

os.fork = refuse
"""


def test_a_watchdog_starts_its_watch_again_when_the_machine_allows_it(vast: VastServer) -> None:
    """The watch was killed for its memory, and the machine has too many processes."""
    vast.reset(rate=1.0, strict=False)
    number = vast.plant("x")
    (entry,) = vast.list_alive()
    watchdog = start_watchdog(
        vast, number, entry["key"], "", 1000, 1, subprocess.DEVNULL, machine=FULL_MACHINE
    )
    try:
        wait_until(lambda: not vast.list_alive(), "its end")
    finally:
        os.killpg(watchdog.pid, signal.SIGKILL)
        watchdog.wait()


def watch(
    vast: VastServer, number: int, key: str, url: str, silence: int, lifetime: int = 1000
) -> str:
    """Return the output of a watchdog that has destroyed its machine."""
    watchdog = start_watchdog(vast, number, key, url, silence, lifetime, subprocess.PIPE)
    assert watchdog.stdout
    said = watchdog.stdout.readline()
    wait_until(lambda: not vast.list_alive(), "its end")
    os.killpg(watchdog.pid, signal.SIGKILL)
    watchdog.wait()
    watchdog.stdout.close()
    return said


def start_watchdog(
    vast: VastServer,
    number: int,
    key: str,
    url: str,
    silence: int,
    lifetime: int,
    stdout: int | IO[bytes],
    *,
    machine: str = "",
) -> "subprocess.Popen[str]":
    """Start the watchdog of a machine, as the machine does, after a script that changes `os`."""
    environ = {
        "MILLRACE_DEADLINE": "9999999999", "MILLRACE_LIFETIME": f"{lifetime}",
        "MILLRACE_HEARTBEAT_TIMEOUT": f"{silence}", "MILLRACE_OWNER_URL": url,
        "MILLRACE_VAST_URL": vast.url, "CONTAINER_ID": f"{number}",
    }  # fmt: skip
    script = (REPOSITORY / "millrace/rentals/guest/watchdog.py").read_text()
    if machine:
        script = script.replace("_RESTART_DELAY = 10.0", "_RESTART_DELAY = 0.1")
        script = f"{machine}\nexec({script!r})"
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-c", script], env=environ, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=stdout,
    )  # fmt: skip
    assert watchdog.stdin
    with watchdog.stdin as pipe:
        pipe.write(key)
    return watchdog


def test_a_machine_that_prints_without_end_fills_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_MAX_LINES", 25)
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    keys = MachineKeys(RentalKeys("fleet").make_machine_prefix(0))
    heard = reports.MachineReports(store, keys)
    told: list[str] = []
    for piece in range(6):
        create(
            store, keys.make_log_key(piece), b"".join(b"%d.%d\n" % (piece, n) for n in range(10))
        )
        heard.refresh()
        told += heard.new_lines
    assert told[:25] == [f"{piece}.{n}" for piece in range(3) for n in range(10)][:25]
    assert told[25:] == [
        f"(only 25 lines are shown; the others are in {store.make_url(keys.logs)})"
    ]
    assert heard.tail[-1] == "5.9"


def test_a_long_log_is_read_to_its_end(
    rgw: RGW, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_MAX_OBJECTS", 4)
    monkeypatch.setattr(reports, "_MAX_CHUNKS_PER_REFRESH", 2)
    pair = make_credentials(rgw.full)
    store = open_store(StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=pair))
    keys = MachineKeys(RentalKeys("fleet").make_machine_prefix(0))
    heard = reports.MachineReports(store, keys)
    told: list[str] = []
    put(store, keys.heartbeat, b'{"number": 1}')
    for piece in range(10):
        create(store, keys.make_log_key(piece), b"%d\n" % piece)
    while heard.refresh():
        told += heard.new_lines
    assert told == [f"{piece}" for piece in range(10)]
    put(store, keys.heartbeat, b'{"number": 2}')
    assert heard.refresh()
    assert heard.heartbeat == MachineHeartbeat(number=2)
    assert not heard.refresh()


def test_the_last_output_of_a_program_is_that_before_its_end(tmp_path: Path) -> None:
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    keys = MachineKeys(RentalKeys("fleet").make_machine_prefix(0))
    heard = reports.MachineReports(store, keys)
    for piece in range(30):
        create(store, keys.make_log_key(piece), b"%d\n" % piece)
    put(store, keys.program_exit, b'{"code": 1}')
    assert heard.refresh()
    assert heard.program_exit == ProgramExit(code=1)
    assert heard.tail[-2:] == ["28", "29"]
    skipped = f"(8 files of the log are only in {store.make_url(keys.logs)})"
    assert heard.new_lines[-4:] == ["19", skipped, "28", "29"]


def test_a_refresh_that_fails_repeats_no_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    keys = MachineKeys(RentalKeys("fleet").make_machine_prefix(0))
    heard = reports.MachineReports(store, keys)
    for piece in range(3):
        create(store, keys.make_log_key(piece), b"%d\n" % piece)

    def fail_at_the_last(store: Store, key: str, start: int, end: int) -> bytes:
        if key == keys.make_log_key(2):
            raise errors.UnavailableError("The store does not answer.")
        return read_range(store, key, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(reports, "read_range", fail_at_the_last)
        with pytest.raises(errors.UnavailableError):
            heard.refresh()
    heard.refresh()
    assert heard.new_lines == heard.tail == ["0", "1", "2"]
