"""Vast's own SDK talks, at the API's pace, and each answer comes to what it means."""

import json
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.rentals import Instance, Offer, OfferRequest, Rental, VastClient, find_offers
from millrace.rentals.destroy import destroy_machines
from millrace.rentals.vast import api
from millrace.testing.vast import LISTS, StandInClock
from tests.support.rentals.account import Reset


def test_the_requests_are_the_sdks_and_as_the_api_documents_them(world: Reset) -> None:
    account = world(program=100.0)
    request = {"gpu": "RTX_4090", "gpu_memory": "20GB", "regions": ("US", "DE", "CA", "JP")}
    with Rental(account.make_settings(request=request), vast=account.vast) as rental:
        rental.wait_until_done()
    sent = account.server.list_requests()
    search = next(one for one in sent if one["call"] == "search")
    assert (search["method"], search["path"]) == ("POST", "/api/v0/bundles/")
    assert search["body"] == {
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "external": {"eq": False},
        "verified": {"eq": True},
        "num_gpus": {"eq": 1},
        "gpu_name": {"eq": "RTX 4090"},
        "gpu_ram": {"gte": 20_000},
        "disk_space": {"gte": 40},
        "inet_down": {"gte": 100},
        "inet_up": {"gte": 100},
        "reliability": {"gte": 0.95},
        "duration": {"gte": 86_400},
        "direct_port_count": {"gte": 0},
        "geolocation": {"in": ["US", "DE", "CA", "JP"]},
        "dph_total": {"lte": 2.0},
        "order": [["dph_total", "asc"]],
        "type": "on-demand",
        "limit": 100,
        "allocated_storage": 40,
    }
    create = next(one for one in sent if one["call"] == "create")
    assert create["method"] == "PUT"
    assert create["path"].startswith("/api/v0/asks/")
    body = create["body"]
    assert (body["client_id"], body["cancel_unavail"], body["price"]) == ("me", True, None)
    assert (body["disk"], body["runtype"]) == (40, "ssh_direc")
    assert body["label"].startswith("millrace/")
    assert len(body["onstart"]) < 1000
    assert sum(len(name) + len(value) for name, value in body["env"].items()) < 32_768
    listing = next(one for one in sent if one["call"] == "list")
    assert (listing["method"], listing["path"]) == ("GET", "/api/v1/instances/")
    assert json.loads(listing["query"]["order_by"]) == [{"col": "id", "dir": "asc"}]
    delete = next(one for one in sent if one["call"] == "delete")
    assert (delete["method"], delete["body"]) == ("DELETE", {})
    assert {one["call"] for one in sent} == {"user", "search", "create", "list", "delete"}
    assert account.key not in json.dumps([one["body"] for one in sent])


def test_a_listing_goes_over_its_pages(world: Reset) -> None:
    account = world()
    planted = [account.server.plant(f"{number}") for number in range(60)]
    assert [one.id for one in account.vast.list_instances()] == planted
    assert sum(one["call"] == "list" for one in account.server.list_requests()) == 3


@pytest.mark.parametrize("fault", ["error500", "json429", "lost", "cut", "part"])
def test_a_brief_listing_gives_up_within_its_time(world: Reset, fault: str) -> None:
    account = world()
    planted = [account.server.plant(f"{number}") for number in range(60)]
    account.server.fail_next(2, fault, "list")
    vast = account.vast
    assert [one.id for one in vast.list_instances(is_brief=True)] == planted
    account.server.fail_next(1000, fault, "list")
    start = vast.clock.monotonic()
    with pytest.raises(errors.UnavailableError):
        vast.list_instances(is_brief=True)
    assert vast.clock.monotonic() - start <= api.BRIEF_LISTING_TIME.total_seconds()


@pytest.mark.parametrize(
    "fault", ["error500", "error502", "text429", "json429", "lost", "cut", "slow", "trickle"]
)
def test_what_may_be_asked_again_is_asked_again(
    world: Reset, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "trickle":
        shorten_deadlines(monkeypatch)
    account = world()
    number = account.server.plant("x")
    for call in ("list", "search", "user"):
        account.server.fail_next(2, fault, call)
    vast = account.vast
    assert [one.id for one in vast.list_instances()] == [number]
    assert vast.search_offers({}, offer_type="on-demand", disk=40, limit=3)
    assert vast.read_credit() == pytest.approx(100, abs=1)
    assert vast.identify_account() == "user-1"
    account.server.fail_next(2, fault, "delete")
    destroy_machines(
        vast, {"x": number}, lambda _: None
    )  # in rounds: one ask of each machine in each
    vast.destroy_instance(number)  # gone already: a success
    assert account.server.list_alive() == []
    assert account.server.count_fired()[fault] == (7 if fault == "slow" else 8)  # it fails nothing


def shorten_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the requests of the next clients one second, by the clock of this machine."""
    monkeypatch.setattr(api, "_REQUEST_TIMEOUT", 1.0)
    monkeypatch.setattr(api, "_BRIEF_REQUEST_TIMEOUT", 1.0)


@pytest.mark.soak
@pytest.mark.parametrize("call", ["list", "delete"])
def test_a_rental_polls_and_ends_while_the_api_trickles(
    world: Reset, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = world(program=600.0)
    shorten_deadlines(monkeypatch)
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        account.server.fail_next(3, "trickle", call)
        rental.wait_until_done()
    assert account.server.list_alive() == []
    assert account.server.count_fired()["trickle"] > 0


def test_a_create_is_never_sent_again_when_it_may_have_been_done(
    world: Reset, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = world()
    vast = account.vast
    (offer, other, *_) = find_offers(vast, account.make_settings().request)
    account.server.fail_next(1, "trickle", "create")
    shorten_deadlines(monkeypatch)
    with pytest.raises(errors.UnavailableError, match="no complete answer within 1 s"):
        account.vast.create_instance(other.id, image="x", disk=10, label="l")
    account.server.advance(5.0)  # the interval of creates, which another client keeps
    for fault, sent in (("error502", 1), ("cut", 1), ("lost", 1), ("text429", 3)):
        before = len(account.server.list_requests())
        account.server.fail_next(2 if fault == "text429" else 1, fault, "create")
        if fault == "text429":  # refused before anything was done
            with pytest.raises(errors.NotFoundError):  # what was lost has taken it
                vast.create_instance(offer.id, image="x", disk=10, label="l")
        else:
            with pytest.raises(errors.UnavailableError, match="does not answer to create"):
                vast.create_instance(offer.id, image="x", disk=10, label="l")
        assert len(account.server.list_requests()) - before == sent
    assert sum(one["call"] == "create" for one in account.server.list_requests()) == 7
    assert len(account.server.list_alive()) == 2


def test_a_wrong_key_is_said_once_and_not_shown(world: Reset) -> None:
    account = world()
    clock = StandInClock(account.server)
    vast = VastClient(SecretStr("not-a-key-of-yours"), account.server.url, clock=clock)
    with pytest.raises(errors.DeniedError, match="does not know the API key") as caught:
        vast.list_instances()
    assert "not-a-key" not in str(caught.value)
    assert len(account.server.list_requests()) == 1


def test_nobody_waits_for_a_day_for_searches(world: Reset) -> None:
    account = world()
    account.server.fail_next(1, "quota", "search")
    with pytest.raises(errors.UnavailableError, match="midnight UTC"):
        find_offers(account.vast, account.make_settings().request)
    assert len(account.server.list_requests()) == 1


def test_a_server_that_is_not_there_is_said_after_a_while(world: Reset) -> None:
    account = world()
    vast = VastClient(
        SecretStr("x"), "http://127.0.0.1:9", clock=StandInClock(account.server),
        retry_timeout=timedelta(seconds=30),
    )  # fmt: skip
    before = account.server.read_time()
    with pytest.raises(errors.UnavailableError, match="does not answer to list: ConnectionError"):
        vast.list_instances()
    assert 30 <= account.server.read_time() - before < 40


@pytest.mark.parametrize("fault", sorted(LISTS))
def test_a_list_that_is_none_is_asked_for_again_and_never_read_as_empty(
    world: Reset, fault: str
) -> None:
    account = world()
    number = account.server.plant("x")
    account.server.fail_next(2, fault, "list")
    assert [one.id for one in account.vast.list_instances()] == [number]
    account.server.fail_next(1000, fault, "list")
    with pytest.raises(errors.UnavailableError, match="does not answer to list"):
        account.vast.list_instances()
    assert account.server.count_fired()[fault] > 2


@pytest.mark.parametrize("fault", ["not found", "no credit"])
def test_a_refused_list_is_no_news_about_the_machines(world: Reset, fault: str) -> None:
    account = world()
    account.server.fail_next(1, fault, "list")
    with pytest.raises(errors.UnavailableError, match="does not list the instances"):
        account.vast.list_instances()


def test_an_account_keeps_its_identity_after_an_answer_without_one(world: Reset) -> None:
    account = world()
    account.server.fail_next(2, "empty", "user")
    assert account.vast.identify_account() == "user-1"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("error502", errors.UnavailableError),
        ("cut", errors.UnavailableError),
        ("text429", errors.UnavailableError),
        ("retired", errors.ConfigurationError),
    ],
)
def test_an_account_has_no_other_identity_after_an_outage(
    world: Reset, fault: str, error: type[errors.MillraceError]
) -> None:
    account = world()
    vast = account.vast
    account.server.fail_next(1000, fault, "user")
    with pytest.raises(error):
        vast.identify_account()
    account.server.ask("calm", {})
    assert vast.identify_account() == "user-1"


def test_an_account_whose_key_may_not_read_the_user_is_identified_by_the_key(world: Reset) -> None:
    account = world()
    account.server.fail_next(1000, "forbidden", "user")
    assert account.vast.identify_account() == account.vast.identify_account()
    assert account.vast.identify_account().startswith("key-")
    assert account.key not in account.vast.identify_account()


@pytest.mark.parametrize("rows", [0, 1], ids=["empty pages", "pages of machines"])
def test_a_list_whose_pages_do_not_end_is_unreadable(world: Reset, rows: int) -> None:
    vast = world().vast
    pages = 0

    def fetch(_: object, token: str) -> dict[str, Any]:
        nonlocal pages
        pages += 1
        machines = [Instance.from_row({"id": pages})] * rows
        return {"instances": machines, "total": 0, "next_token": f"{token[-50:]}x{pages}"}

    vast._fetch_page = fetch
    with pytest.raises(errors.UnavailableError, match="is incomplete"):
        vast.list_instances()
    assert pages < 2000


def test_a_host_moves_no_cursor_of_a_terminal() -> None:
    status = "x\x1b]0;owned\x07\x1b[2J\u202e"
    row = {"id": 1, "actual_status": "exited", "status_msg": status + "y" * 100_000}
    failure = Instance.from_row(row).failure
    assert failure.isprintable()
    assert len(failure) < 1100
    offer = {"id": 1, "machine_id": 2, "num_gpus": 1, "dph_total": 0.5}
    request = OfferRequest(max_hourly=2.0, max_total=10.0)
    found = Offer.from_row({**offer, "gpu_name": status, "geolocation": status}, request)
    assert (found.gpu + found.location).isprintable()


@pytest.mark.parametrize(
    ("row", "failure"),
    [
        ({"actual_status": "exited"}, "the machine is exited"),
        ({"actual_status": "unknown", "status_msg": " lost "}, "the machine is unknown: lost"),
        ({"actual_status": "created", "status_msg": "OCI runtime create failed: x"}, "start the"),
        ({"actual_status": "loading", "status_msg": "manifest unknown"}, "could not start"),
        ({"cur_state": "stopped", "intended_status": "stopped", "next_state": "stopped"}, "stopp"),
        ({"actual_status": "running", "status_msg": "no space left on device"}, ""),
        ({"actual_status": "loading", "cur_state": "stopped", "next_state": "running"}, ""),
        ({"ports": {"22/tcp": [{"HostPort": "4000-4010"}], "x": 7}, "dph_total": "?"}, ""),
        ({}, ""),
    ],
)
def test_what_will_never_come_up_is_known(row: dict[str, Any], failure: str) -> None:
    nulls = dict.fromkeys(("label", "machine_id", "status_msg", "dph_total", "ports", "is_bid"))
    instance = Instance.from_row({"id": 7, "start_date": None, "extra_env": None, **nulls, **row})
    assert failure in instance.failure
    assert bool(failure) is bool(instance.failure)
