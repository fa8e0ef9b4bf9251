"""Lists of URLs, whose bodies come from a real server on this machine that may do anything."""

import gzip
import io
import json
import resource
import secrets
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from millrace import errors
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources import (
    Division,
    DownloadSettings,
    PartitionedSource,
    Source,
    SourceSettings,
    http_files,
    open_files,
    open_source,
    partition_source,
    url_download,
    url_rows,
)
from millrace.datasets.sources.host_limits import HostBusyError, HostLimits
from millrace.keys.datasets import DatasetKeys
from millrace.storage import Store, create, open_store, put
from millrace.testing.tls import make_certificates
from tests.support.url_server import UrlHandler, UrlSite, serve_urls

FAST = {"host_interval": "0s", "requests_per_host": 64}


@pytest.fixture(autouse=True)
def _limits_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def send_path(handler: UrlHandler) -> None:
    handler.send(handler.path.encode())


@pytest.fixture
def site() -> Iterator[UrlSite]:
    with serve_urls(send_path) as site:
        yield site


def open_list(
    store: Store,
    *,
    private: bool = True,
    downloads: dict[str, object] | None = None,
    **source: object,
) -> tuple[PartitionedSource, Source]:
    settings = SourceSettings.model_validate({"kind": "urls", **source})
    files = open_files(store.spec)
    division = Division(1 << 20, 10_000, None, 0.0)
    partitioned = partition_source(settings, files, DatasetKeys("d"), division)
    opened = open_source(
        partitioned.record, files, open_store(f"memory://{secrets.token_hex(8)}"),
        downloads=DownloadSettings.model_validate({**FAST, **(downloads or {})}),
        allow_private=private,
    )  # fmt: skip
    return partitioned, opened


def read_list(store: Store, **settings: object) -> list[Row]:
    partitioned, opened = open_list(store, **settings)
    return [
        row
        for partition in partitioned.partitions
        for row in opened.iterate_rows(partition.source_range, 0)
    ]


def fetch_all(urls: list[str], /, **settings: object) -> list[Row]:
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "list.txt", "\n".join(urls).encode())
    return read_list(store, **settings)


def fetch_reasons(urls: list[str], /, **settings: object) -> list[str]:
    rows = fetch_all(urls, **settings)
    return [row.reason if isinstance(row, BadRow) else "sample" for row in rows]


def encode_list(name: str, rows: list[dict[str, str]]) -> bytes:
    if name.endswith(".parquet"):
        body = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), body)
        return body.getvalue()
    if ".csv" in name:
        data = "".join(f"{line}\n" for line in ("url,text", *(",".join(r.values()) for r in rows)))
    elif ".jsonl" in name:
        data = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        data = "".join(row["url"] + "\r\n" for row in rows)
    return gzip.compress(data.encode()) if name.endswith(".gz") else data.encode()


NAMES = ["a.txt", "a", "a.txt.gz", "a.csv", "a.csv.gz", "a.jsonl", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_list_gives_the_bodies_of_its_urls_in_order(site, name):
    rows = [{"url": f"{site.url}/{n}.PNG?q={n}", "text": f"caption {n}"} for n in range(30)]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, name, encode_list(name, rows))
    found = read_list(store)
    has_text = "txt" not in name and name != "a"
    wanted = rows if has_text else [{"url": row["url"]} for row in rows]
    assert [json.loads(row.fields["json"]) for row in found] == wanted
    assert [row.fields["png"] for row in found] == [f"/{n}.PNG?q={n}".encode() for n in range(30)]
    assert len({row.key for row in found}) == 30
    if has_text:
        chosen = {"columns": {"cap.txt": "text"}, "urls": {"content_field": "jpg"}}
        one = read_list(store, **chosen)[7]
        assert one.fields == {"cap.txt": b"caption 7", "jpg": b"/7.PNG?q=7"}


@pytest.mark.parametrize("name", NAMES)
def test_every_cursor_goes_on_exactly_after_its_row(site, name):
    rows = [{"url": f"{site.url}/{n}", "text": ""} for n in range(9)]
    rows.insert(4, {"url": "ftp://host/x", "text": ""})
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, name, encode_list(name, rows))
    partitioned, opened = open_list(store)
    (partition,) = partitioned.partitions
    whole = list(opened.iterate_rows(partition.source_range, 0))
    assert [type(row) for row in whole] == [Sample] * 4 + [BadRow] + [Sample] * 5
    for index, row in enumerate(whole):
        after = opened.iterate_rows(partition.source_range, row.next_cursor)
        assert list(after) == whole[index + 1 :]


def test_a_list_is_divided_by_the_number_of_its_urls(site):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "a.txt", "".join(f"{site.url}/{n:0100d}\n" for n in range(400)).encode())
    settings = SourceSettings(kind="urls")
    division = Division(1 << 30, 100, None, 0.0)
    found = partition_source(settings, open_files(store.spec), DatasetKeys("d"), division)
    assert len(found.partitions) == 4
    assert "cannot be made again: keep a copy of the shards" in found.notes[0]
    assert not found.record.is_reproducible


def test_a_list_without_its_column_or_of_several_kinds_is_refused_before_a_request(site):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "a.csv", b"link,text\nx,y\n")
    with pytest.raises(errors.ConfigurationError, match="no column 'url'"):
        read_list(store)
    put(store, "b.txt", site.url.encode())
    with pytest.raises(errors.ConfigurationError, match=r"several kinds.*by `include`"):
        read_list(store)
    with pytest.raises(errors.ConfigurationError, match="list of plain text, which has no columns"):
        read_list(store, include=["b.txt"], columns={"txt": "text"})


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_list_without_its_column_is_refused_with_the_setting_that_names_it(site, name):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, name, encode_list(name, [{"url": site.url, "text": "x"}]))
    with pytest.raises(errors.ConfigurationError, match="correct `url_field` in `urls`"):
        read_list(store, urls={"url_field": "URL"})
    with pytest.raises(errors.ConfigurationError, match=r"no column 'caption'.*exclude`\.$"):
        read_list(store, columns={"txt": "caption"})


def test_whole_rows_of_parquet_that_json_cannot_hold_are_refused_before_a_request(site):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    body = io.BytesIO()
    parquet.write_table(pyarrow.table({"url": [site.url], "hash": [b"\xff"]}), body)
    put(store, "a.parquet", body.getvalue())
    with pytest.raises(errors.ConfigurationError, match="the column hash holds bytes"):
        open_list(store)
    assert len(read_list(store, columns={"hash": "hash"})) == 1


@pytest.mark.parametrize(
    ("name", "columns"),
    [("a.jsonl", None), ("a.parquet", None), ("a.parquet", {"txt": "text"})],
)
def test_a_url_may_be_a_part_of_a_column(site, name, columns):
    row = {"image": {"url": f"{site.url}/x"}, "text": "x"}
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, name, encode_list(name, [row]))
    (found,) = read_list(store, columns=columns, urls={"url_field": "image.url"})
    assert found.fields["bin"] == b"/x"


def test_a_row_without_a_url_is_named_by_its_position(site):
    rows: list[dict[str, object]] = [{"link": "x"}, {"url": ["http://h/x"]}, {"url": " "}]
    store = open_store(f"memory://{secrets.token_hex(8)}")
    put(store, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    found = read_list(store)
    assert [row.where for row in found] == [f"a.jsonl, byte {n}" for n in (0, 14, 38)]
    assert {row.reason for row in found} == {"no URL in 'url'"}
    assert json.loads(found[0].data) == {"link": "x"}
    body = io.BytesIO()
    parquet.write_table(pyarrow.table({"url": [f"{site.url}/x", None]}), body)
    other = open_store(f"memory://{secrets.token_hex(8)}")
    put(other, "a.parquet", body.getvalue())
    assert read_list(other)[1].where == "a.parquet, row 1"
    text = open_store(f"memory://{secrets.token_hex(8)}")
    put(text, "a.txt", f"{site.url}/x\n# a comment\n".encode())
    assert read_list(text)[1][:2] == (
        f"a.txt, byte {len(site.url) + 3}", "is not http:// or https://"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "urls", "urls": {"content_field": "JSON"}}, "also a field of the row"),
        ({"kind": "urls", "urls": {"max_body_bytes": "1GiB"}}, "less than or equal to"),
        ({"kind": "files", "urls": {"url_field": "link"}}, "for the kind `urls` only"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        SourceSettings.model_validate(settings)


def test_the_field_of_a_body_is_its_media_type_or_its_extension():
    types = {
        "/a.php": "image/webp; charset=x", "/b.TIFF": "application/octet-stream",
        "/c": "application/json", "/d": "",
    }  # fmt: skip

    with serve_urls(lambda h: h.send(b"x", Content_Type=types[h.path])) as site:
        rows = fetch_all([site.url + path for path in types])
        taken = fetch_reasons([f"{site.url}{path}" for path in types], urls={
            "media_types": ["image/*", "application/octet-stream"]
        })  # fmt: skip
    fields = [sorted(set(row.fields) - {"json"}) for row in rows]
    assert fields == [["webp"], ["tiff"], ["bin"], ["bin"]]  # `json` is the row
    assert taken == ["sample", "sample", "media type application/json", "media type missing"]


def test_a_url_that_fails_is_a_bad_row_with_its_reason_and_its_row():
    def answer(handler: UrlHandler) -> None:
        count = handler.site.requests[handler.path]
        match handler.path.split("?")[0]:
            case "/heals" if count < 3:
                handler.send(status=500)
            case "/fails":
                handler.send(status=500)
            case "/busy" if count < 2:
                handler.send(status=429, Retry_After="0")
            case "/loop":
                handler.send(status=302, Location="/loop")
            case "/away":
                handler.send(status=301, Location="ftp://host/x")
            case "/moved":
                handler.send(status=308, Location="/ok")
            case "/zip":
                handler.send(b"x", Content_Encoding="utf-8, GZIP")
            case "/chunked":
                handler.send(b"body", Content_Encoding="aws-chunked")
            case "/ok" | "/heals" | "/busy":
                handler.send(b"body")
            case path:
                handler.send(status=int(path[1:]))

    paths = [
        "/404", "/410", "/heals", "/fails", "/busy", "/loop", "/away", "/moved", "/zip", "/204",
        "/ok?secret=1", "/chunked",
    ]  # fmt: skip
    with serve_urls(answer) as site:
        urls = [site.url + path for path in paths]
        urls += ["", "mailto:x", f"{site.url}/a b", "http://me:pw@h/x", "http://[::1/", "http://"]
        store = open_store(f"memory://{secrets.token_hex(8)}")
        put(store, "a.jsonl", "".join(json.dumps({"url": u, "n": 1}) + "\n" for u in urls).encode())
        rows = read_list(store)
        assert [site.requests[path] for path in ("/404", "/heals", "/fails", "/busy")] == [
            1, 3, 4, 2
        ]  # fmt: skip
    reasons = [row.reason if isinstance(row, BadRow) else "" for row in rows]
    assert reasons == [
        "status 404", "status 410", "", "status 500", "", "it is redirected too often",
        "it redirects to an address that is not http:// or https://", "",
        "compressed, although the server is asked not to", "status 204", "", "",
        "no URL in 'url'", "is not http:// or https://", "has spaces or control characters",
        "has credentials in it", "is not a valid URL", "has no host",
    ]  # fmt: skip
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert all("pw" not in row.where for row in bad)
    assert json.loads(bad[0].data) == {"url": f"{site.url}/404", "n": 1}
    assert bad[0].where == f"{site.url}/404"


def test_the_row_of_a_url_that_fails_has_its_values_as_the_list_has_them():
    values = ["123", "é", {"a": [1]}, None, 7]
    with serve_urls(lambda handler: handler.send(status=404)) as site:
        lines = [json.dumps({"url": site.url, "meta": one}) for one in values]
        store = open_store(f"memory://{secrets.token_hex(8)}")
        put(store, "a.jsonl", "\n".join(lines).encode())
        rows = read_list(store, columns={"json": "meta"})
    assert [json.loads(row.data)["meta"] for row in rows if isinstance(row, BadRow)] == values


def test_a_redirect_in_utf8_or_with_a_space_is_followed():
    def answer(handler: UrlHandler) -> None:
        if handler.path.startswith("/from"):
            name = ("/größe", "/a b", "/a%20b")[int(handler.path[-1])]
            head = f"HTTP/1.1 302 Found\r\nLocation: {name}\r\nContent-Length: 0\r\n\r\n"
            handler.wfile.write(head.encode())
        else:
            handler.send(handler.path.encode())

    with serve_urls(answer) as site:
        rows = fetch_all([f"{site.url}/from{n}" for n in range(3)])
    assert [row.fields["bin"] for row in rows] == [b"/gr%C3%B6%C3%9Fe", b"/a%20b", b"/a%20b"]


def test_the_scheme_of_a_url_may_have_capital_letters(site):
    url = site.url.replace("http://", "HTTP://")
    assert fetch_reasons([f"{url}/x", "Ftp://host/x"]) == ["sample", "is not http:// or https://"]


@pytest.mark.parametrize(
    "head",
    [
        b"hello",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 500 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
    ],
    ids=["text", "status", "long header", "many headers", "two lengths", "negative chunk"],
)
def test_an_answer_that_is_not_http_is_named_as_such(head):
    with serve_urls(lambda handler: handler.wfile.write(head)) as site:
        assert fetch_reasons([f"{site.url}/x"]) == ["the answer of its server is not valid HTTP"]


def test_a_body_over_the_limit_is_read_no_further():
    def answer(handler: UrlHandler) -> None:
        if handler.path == "/declared":
            handler.send(length=1 << 40)
            handler.site.is_closing.wait()
        elif handler.path == "/endless":
            handler.send_response(200)
            handler.end_headers()
            while True:
                handler.wfile.write(bytes(1 << 16))
        elif handler.path == "/chunks":
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            while True:
                handler.wfile.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        else:
            handler.send(bytes(1000 + (handler.path == "/more")))

    with serve_urls(answer) as site:
        paths = ["/declared", "/endless", "/chunks", "/more", "/exact"]
        found = fetch_reasons([site.url + p for p in paths], urls={"max_body_bytes": 1000})
    assert found == ["larger than 1000 bytes"] * 4 + ["sample"]


def test_a_cut_connection_and_a_wrong_length_are_tried_again_and_then_bad():
    def answer(handler: UrlHandler) -> None:
        heals = handler.path == "/heals" and handler.site.requests[handler.path] > 1
        if handler.path == "/reset":
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            handler.send(b"half", length=4 if heals else 8)

    with serve_urls(answer) as site:
        found = fetch_reasons([site.url + p for p in ("/half", "/heals", "/reset")])
        assert site.requests == {"/half": 4, "/heals": 2, "/reset": 4}
    assert found == ["the connection was cut", "sample", "the connection was cut"]


@pytest.mark.parametrize("part", ["nothing", "headers", "body", "endless body"])
def test_a_slow_server_costs_its_own_urls_only(part):
    def answer(handler: UrlHandler) -> None:
        if handler.path != "/slow":
            handler.send(b"x")
            return
        if part == "headers":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        elif part == "body":
            handler.send(b"x", length=1000)
        elif part == "endless body":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not handler.site.is_closing.wait(0.05):
            if part != "nothing":
                handler.wfile.write(b"x")

    with serve_urls(answer) as site:
        urls = [f"{site.url}/{path}" for path in ("a", "slow", "b")]
        found = fetch_reasons(urls, downloads={"timeout": "1s"})
    assert found == ["sample", "its server took longer than 1 s", "sample"]


def test_a_pause_that_a_server_asks_for_holds_for_its_host_and_a_long_one_costs_the_url(tmp_path):
    with serve_urls(lambda h: h.send(status=429, Retry_After="3000")) as site:
        chosen = {"requests_per_host": 1, "timeout": "60s"}
        found = fetch_reasons([f"{site.url}/{n}" for n in range(5)], downloads=chosen)
        assert site.requests.total() == 1
    assert len(found) == 5
    assert all(reason.startswith("its host asks for a pause of ") for reason in found)
    other = HostLimits(1, DownloadSettings().host_interval)  # as another process would
    with pytest.raises(HostBusyError), other.hold("127.0.0.1", 60.0):
        pass


def answer_in_pairs():
    """Return an answer that is sent when two requests have arrived."""
    pair = threading.Barrier(2, timeout=60)

    def answer(handler: UrlHandler) -> None:
        pair.wait()
        handler.send(b"x")

    return answer


def test_a_host_gets_only_so_many_requests_at_a_time():
    with serve_urls(answer_in_pairs()) as site:
        urls = [f"{site.url}/{n}" for n in range(12)]
        assert fetch_reasons(urls, downloads={"requests_per_host": 2}) == ["sample"] * 12
        assert site.most_active == 2
        assert site.requests.total() == 12  # each answer has waited for a second request


def test_bodies_in_memory_limit_the_requests_at_a_time(monkeypatch):
    monkeypatch.setattr(url_rows, "MAX_BODY_BYTES", 3000)
    with serve_urls(answer_in_pairs()) as site:
        urls = [f"{site.url}/{n}" for n in range(12)]
        assert fetch_reasons(urls, urls={"max_body_bytes": 1400}) == ["sample"] * 12
        assert site.most_active == 2


def test_samples_keep_the_order_of_the_list_if_answers_do_not():
    last = threading.Event()

    def answer(handler: UrlHandler) -> None:
        if handler.path == "/9":
            last.set()
        elif handler.path == "/0":
            last.wait(60)
        handler.send(handler.path.encode())

    with serve_urls(answer) as site:
        rows = fetch_all([f"{site.url}/{n}" for n in range(10)])
    assert [row.fields["bin"] for row in rows] == [f"/{n}".encode() for n in range(10)]
    assert last.is_set()


def test_private_addresses_are_refused_by_name_and_number(site):
    port = site.url.rpartition(":")[2]
    hosts = ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0x7f.1"]
    found = fetch_reasons([f"http://{host}:{port}/x" for host in hosts], private=False)
    assert site.requests.total() == 0
    assert (
        found[:2] == ["its address is in a private network (see `allow_private` of `source`)"] * 2
    )
    assert "sample" not in found


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1",
        "fec0::1", "fd00::1", "ff02::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:0:127.0.0.1",
        "2002:7f00:1::", "64:ff9b::7f00:1",
    ],
)  # fmt: skip
def test_no_form_of_a_private_address_is_public(address):
    with pytest.raises(errors.ConfigurationError, match="allow_private"):
        http_files.check_public("host", address)


def test_public_addresses_are_public():
    for address in ("1.1.1.1", "2606:4700:4700::1111", "2002:101:101::", "64:ff9b::101:101"):
        http_files.check_public("host", address)


def answer_name(monkeypatch: pytest.MonkeyPatch, name: str, addresses: list[str]) -> None:
    """Give a name addresses, since the name server of a test has none."""
    find = socket.getaddrinfo
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    def find_addresses(host: str, *arguments: object, **settings: object) -> object:
        return found if host == name else find(host, *arguments, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", find_addresses)


def test_no_connection_to_a_private_address_is_opened(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        found = fetch_reasons([f"http://127.0.0.1:{server.getsockname()[1]}/x"], private=False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert found == ["its address is in a private network (see `allow_private` of `source`)"]


def test_a_name_with_many_addresses_costs_no_more_time_than_one(monkeypatch):
    tried: list[str] = []
    connect = url_download.create_connection

    def count_tries(address: tuple[str, int], *arguments: object, **settings: object) -> object:
        tried.append(address[0])
        return connect(("127.0.0.1", port), 0.2, **settings)

    monkeypatch.setattr(url_download, "create_connection", count_tries)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
        port = server.getsockname()[1]
        first.connect(("127.0.0.1", port))  # the server takes no other connection, and is silent
        answer_name(monkeypatch, "many.example", ["127.0.0.1"] * 100)
        found = fetch_reasons(["http://many.example/x"], downloads={"timeout": "1s"})
    assert found == ["its host does not answer"]
    assert 1 < len(tried) < 50


def test_a_redirect_to_a_private_address_is_refused(monkeypatch):
    """127.0.0.1 counts as public here, since no server of a test has a public address."""
    list_addresses = http_files._list_addresses

    def list_others(address):
        return [one for one in list_addresses(address) if str(one) != "127.0.0.1"]

    monkeypatch.setattr(http_files, "_list_addresses", list_others)

    def answer(handler: UrlHandler) -> None:
        host, port = ("127.0.0.2", "127.0.0.1"), handler.site.url.rpartition(":")[2]
        if handler.path in {"/private", "/public"}:
            where = host[handler.path == "/public"]
            handler.send(status=302, Location=f"http://{where}:{port}/end-{where}")
        else:
            handler.send(b"x")

    with serve_urls(answer) as site:
        urls = [f"{site.url}/private", f"{site.url}/public"]
        found = fetch_reasons(urls, private=False)
        assert found[0].startswith("its address is in a private network")
        assert found[1] == "sample"
        assert set(site.requests) == {"/private", "/public", "/end-127.0.0.1"}


def test_certificates_are_verified_and_a_slow_body_ends_behind_tls(tmp_path, monkeypatch):
    def answer(handler: UrlHandler) -> None:
        if handler.path == "/slow":
            handler.send(b"x", length=1000)
            handler.site.is_closing.wait()
        else:
            handler.send(b"x")

    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with serve_urls(answer, context) as site:
        urls = [f"{site.url}/{path}" for path in ("a", "slow", "b")]
        untrusted = fetch_reasons(urls)
        monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
        found = fetch_reasons(urls, downloads={"timeout": "1s"})
    assert untrusted == ["the certificate of its server is not trusted"] * 3
    assert found == ["sample", "its server took longer than 1 s", "sample"]


def test_headers_of_the_list_are_not_sent_to_the_servers_of_its_urls(site):
    sent: list[dict[str, str]] = []

    def answer(handler: UrlHandler) -> None:
        sent.append({name: value for name, value in handler.headers.items() if name != "Host"})
        handler.send(b"x")

    with serve_urls(answer) as other:
        fetch_all([f"{other.url}/x"], downloads={"user_agent": "crawler (me@example.com)"})
    assert sent == [{
        "Accept-Encoding": "identity", "Connection": "close",
        "User-Agent": "crawler (me@example.com)",
    }]  # fmt: skip


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port of this machine that takes no connections."""
    monkeypatch.setattr(url_download, "_MAX_UNANSWERED_TRIES", 1)
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("0.0.0.0", 0))
        yield bound.getsockname()[1]


def test_a_machine_without_a_network_stops_the_run_and_quarantines_no_list(closed_port):
    urls = [f"http://127.0.0.{n}:{closed_port}/x" for n in range(1, 101)]
    with pytest.raises(errors.UnavailableError, match="Check the network of this machine"):
        fetch_all(urls)
    assert fetch_reasons(urls[:49]) == ["its host cannot be reached"] * 49
    with pytest.raises(errors.UnavailableError, match="50 URLs of 50 hosts"):
        fetch_all([one for url in urls for one in (url, "mailto:x")])  # which asks nobody


def test_hosts_that_are_gone_stop_no_run_that_allows_them(closed_port):
    urls = [f"http://127.0.0.{n}:{closed_port}/x" for n in range(1, 101)]
    found = fetch_reasons(urls, downloads={"max_unanswered": 101})
    assert found == ["its host cannot be reached"] * 100


def test_a_host_that_fails_after_it_answered_stops_the_run_and_one_that_is_gone_does_not(
    site, closed_port
):
    urls, gone = (
        [f"http://{host}:{closed_port}/{n}" for n in range(60)]
        for host in ("127.0.0.1", "127.0.0.2")
    )
    with pytest.raises(errors.UnavailableError, match=r"50 URLs of 127\.0\.0\.2.*host answers"):
        fetch_all(gone)  # no other host has answered: the network may be down
    assert fetch_reasons([f"{site.url}/x", *gone])[1:] == ["its host cannot be reached"] * 60
    with pytest.raises(errors.UnavailableError, match=r"50 URLs of 127\.0\.0\.1.*host answers"):
        fetch_all([f"{site.url}/x", *urls])
    with pytest.raises(errors.UnavailableError, match="50 URLs"):
        fetch_all(urls)  # another run, while the host still fails
    between = fetch_reasons(
        [url for n in range(0, 60, 40) for url in (f"{site.url}/{n}", *urls[:40])]
    )
    assert between.count("sample") == 2


@pytest.mark.parametrize("answered_before", ["nobody", "another host", "the host"])
def test_a_host_that_answers_with_errors_for_a_while_stops_the_run(
    site, monkeypatch, answered_before
):
    """Unless it is one of several hosts, and has never answered otherwise."""
    monkeypatch.setattr(url_download, "_MAX_TRIES", 1)

    def answer(handler: UrlHandler) -> None:
        handler.send(b"x", 503 if handler.path != "/good" else 200)

    with serve_urls(answer) as failing:
        urls = [f"{failing.url.replace('127.0.0.1', '127.0.0.2')}/{n}" for n in range(60)]
        if answered_before == "another host":
            assert fetch_reasons([f"{site.url}/x", *urls])[1:] == ["status 503"] * 60
            return
        if answered_before == "the host":
            urls.insert(0, urls[0].removesuffix("0") + "good")
        with pytest.raises(errors.UnavailableError, match=r"status 503.*Run it again when the"):
            fetch_all(urls)


def test_a_pause_longer_than_the_time_of_a_url_stops_the_run_instead_of_losing_the_host():
    with serve_urls(lambda h: h.send(status=429, Retry_After="3000")) as site:
        urls = [f"{site.url}/{n}" for n in range(60)]
        with pytest.raises(errors.UnavailableError, match=r"a pause of .*raise `timeout`"):
            fetch_all(urls)
        found = fetch_reasons(urls, downloads={"max_unanswered": 61})
    assert all(reason.startswith("its host asks for a pause") for reason in found)


def test_a_source_that_is_closed_ends_its_requests():
    begun = threading.Event()

    def answer(handler: UrlHandler) -> None:
        if handler.path == "/0":
            handler.send(b"x")
        else:
            begun.set()
            handler.site.is_closing.wait()

    with serve_urls(answer) as site:
        store = open_store(f"memory://{secrets.token_hex(8)}")
        put(store, "a.txt", "\n".join(f"{site.url}/{n}" for n in range(20)).encode())
        partitioned, opened = open_list(store, downloads={"timeout": "1h"})
        rows = opened.iterate_rows(partitioned.partitions[0].source_range, 0)
        assert isinstance(next(rows), Sample)
        begun.wait(60)
        rows.close()  # returns, although the server never answers


def test_the_requests_of_a_host_are_an_interval_apart(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("millrace.datasets.sources.host_limits.time.monotonic", lambda: now[0])
    limits = [HostLimits(4, DownloadSettings(host_interval="10s").host_interval) for _ in range(2)]
    waits = [limits[n % 2]._take_turn("a", 0.0) for n in range(3)]
    assert waits == [0.0, 10.0, 20.0]
    assert limits[0]._take_turn("b", 0.0) == 0.0
    now[0] += 35.0
    assert limits[0]._take_turn("a", 0.0) == 0.0
    limits[1].pause("a", 25.0)
    assert limits[0]._take_turn("a", 60.0) == 25.0
    with pytest.raises(HostBusyError, match="a pause of 25 s"):
        limits[0]._take_turn("a", 20.0)
    now[0] = 5.0  # after a boot, the times of before are far away
    assert limits[0]._take_turn("a", 0.0 + 3600) <= 3600.0


def set_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of the limits; return its time, in a list that a test changes."""
    now = [1000.0]
    monkeypatch.setattr("millrace.datasets.sources.host_limits.time.monotonic", lambda: now[0])
    return now


def test_requests_after_a_pause_are_an_interval_apart_too(monkeypatch):
    set_clock(monkeypatch)
    limits = HostLimits(4, DownloadSettings(host_interval="10s").host_interval)
    limits.pause("a", 100.0)
    assert [limits._take_turn("a", 200.0) for _ in range(3)] == [100.0, 110.0, 120.0]


def test_a_pause_outlasts_the_requests_and_pauses_of_hosts_that_share_its_file(monkeypatch):
    now = set_clock(monkeypatch)
    monkeypatch.setattr("millrace.datasets.sources.host_limits._BUCKETS", 1)
    limits = HostLimits(4, DownloadSettings(host_interval="0s").host_interval)
    limits.pause("a", 100.0)
    assert limits._take_turn("b", 0.0) == 0.0
    limits.pause("b", 30.0)
    for host, rest in (("a", 100.0), ("b", 30.0)):
        with pytest.raises(HostBusyError) as busy:
            limits._take_turn(host, 0.0)
        assert busy.value.seconds == rest
    now[0] += 50.0
    assert limits._take_turn("b", 0.0) == 0.0
    assert limits._take_turn("a", 60.0) == 50.0


def test_a_pause_that_begins_while_a_request_waits_for_its_turn_holds_for_it(monkeypatch):
    now = set_clock(monkeypatch)
    limits = HostLimits(4, DownloadSettings(host_interval="10s").host_interval)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            limits.pause("a", 40.0)
        now[0] += seconds

    with limits.hold("a", 60.0):
        pass
    with limits.hold("a", 60.0, sleep):
        assert now[0] == 1040.0
    assert waits == [10.0, 30.0]
    with pytest.raises(HostBusyError), limits.hold("a", 30.0, lambda _: limits.pause("a", 40.0)):
        pass
    with limits.hold("a", 60.0, lambda _: True):  # the caller is stopped
        pass


def test_an_answer_of_a_host_is_remembered_for_an_hour(monkeypatch):
    now = set_clock(monkeypatch)
    limits = [HostLimits(1, DownloadSettings().host_interval) for _ in range(2)]
    assert not limits[1].has_answered("a")
    limits[0].note_answer("a")
    assert limits[1].has_answered("a")
    assert not limits[1].has_answered("b")
    now[0] += 3600.0
    assert limits[1].has_answered("a")
    now[0] += 1.0
    assert not limits[1].has_answered("a")
    limits[0].note_answer("a")
    assert limits[1].has_answered("a")


def test_times_of_hosts_that_cannot_be_read_are_dropped(tmp_path):
    limits = HostLimits(1, DownloadSettings().host_interval, tmp_path)
    limits.pause("a", 50.0)
    (path,) = tmp_path.glob("*-turns")
    path.write_bytes(b"\xff" * 100)
    assert limits._take_turn("a", 0.0) == 0.0


def test_a_folder_of_limits_that_was_deleted_is_made_again(tmp_path):
    limits = HostLimits(2, DownloadSettings().host_interval, tmp_path / "limits")
    with limits.hold("a", 0.0), limits.hold("b", 0.0):
        shutil.rmtree(tmp_path / "limits")
        limits.pause("a", 50.0)
    with pytest.raises(HostBusyError), limits.hold("a", 10.0):
        pass


def test_requests_that_need_more_open_files_than_allowed_are_refused_before_one_is_made(site):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings: dict[str, Any] = {
        "urls": {"max_body_bytes": "64KiB"}, "downloads": {"requests": 200},
    }  # fmt: skip
    urls = [f"{site.url}/{n}" for n in range(300)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (800, hard))
        with pytest.raises(errors.ConfigurationError, match="`ulimit -n 928`"):
            fetch_all(urls, **settings)
        assert site.requests.total() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fetch_reasons(urls, **settings) == ["sample"] * 300


def test_two_lists_of_one_dataset_have_different_keys(site):
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for name in ("a.txt", "b.txt"):
        create(store, name, f"{site.url}/{name}".encode())
    assert len({row.key for row in read_list(store)}) == 2
