"""Server process of the proxy, which `millrace.testing.r2` starts and describes."""

import asyncio
import base64
import contextlib
import hashlib
import json
import random
import ssl
import time
import xml.etree.ElementTree as ET
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from aiohttp import web
from multidict import CIMultiDict

from millrace.testing import r2_token, sigv4
from millrace.testing.crc64 import Crc64
from millrace.testing.faults import Fault, FaultBox, Faults, NextFault, Plan
from millrace.testing.r2_rules import (
    COUNTED_WRITES,
    R2RefusedError,
    Rules,
    S3Operation,
    check_head,
    check_parts,
    check_payload,
    find_operation,
)
from millrace.testing.upstream import CHUNK, Answer, Upstream, UpstreamError

REMEMBERED_REQUESTS = 100_000
SMALL_BODY = 16 << 20
HOP_BY_HOP = frozenset(
    {
        "connection", "expect", "keep-alive", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
READ_WHOLE = frozenset({"CompleteMultipartUpload", "DeleteObjects"})
HASHED = frozenset({"PutObject", "UploadPart"})
SHA256_HEADER = "x-amz-checksum-sha256"
CRC_HEADER = "x-amz-checksum-crc64nvme"
FAULT_ANSWERS = {
    Fault.ERROR500: (500, "InternalError", "We encountered an internal error. Please try again."),
    Fault.ERROR503: (503, "ServiceUnavailable", "Service is temporarily unavailable."),
    Fault.ERROR429: (429, "TooManyRequests", "Reduce your rate of requests."),
}


class ClientGoneError(Exception):
    """The client closed its connection before the end of its request."""


class CutError(Exception):
    """The body has reached the point of an injected cut."""


@dataclass(slots=True)
class Seen:
    """Record of a request for `R2Proxy.list_requests`."""

    method: str
    path: str
    operation: str
    arrived: float
    status: int | None = None
    fault: str | None = None
    refused: str | None = None
    received: int = 0
    sent: int = 0
    payload: str = ""


class Sha256:
    """Incremental computation of a SHA-256, with the interface of `Crc64`."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._hash = hashlib.sha256()

    def update(self, data: bytes) -> None:
        """Hash the next bytes."""
        self._hash.update(data)

    def encode(self) -> str:
        """Return the SHA-256 as a header value."""
        return base64.b64encode(self._hash.digest()).decode()


class Checksum(Protocol):
    """Incremental computation of a checksum, for comparison with a header."""

    def update(self, data: bytes, /) -> None:
        """Hash the next bytes."""
        ...

    def encode(self) -> str:
        """Return the checksum as a header value."""
        ...


class Delays:
    """Random delays of the answers to GetObject.

    Args:
        share: Share of the answers that are delayed.
        seconds: Delay of an answer.
        seed: Seed of the random choice.
    """

    def __init__(self, share: float = 0.0, seconds: float = 0.0, seed: int = 0) -> None:
        self.share, self.seconds = share, seconds
        self._random = random.Random(seed)

    def draw(self) -> float:
        """Return the delay of one answer in seconds."""
        return self.seconds if self._random.random() < self.share else 0.0


@dataclass(slots=True)
class Asked:
    """State of a request within the proxy."""

    request: web.BaseRequest
    operation: S3Operation
    seen: Seen
    path: str
    query: str
    headers: CIMultiDict[str]
    length: int
    secret: str | None = None
    """Secret of the key that signs requests to the upstream; None if unknown."""
    plan: Plan | None = None
    fired: bool = False

    @property
    def name(self) -> str:
        """``bucket/key`` of the request."""
        return f"{self.operation.bucket}/{self.operation.key}"

    def meets(self, kind: Fault) -> bool:
        """Decide whether a kind of fault is planned for the request."""
        return self.plan is not None and self.plan.kind is kind


class Proxy:
    """Handler of requests by the rules of R2, in front of one upstream."""

    def __init__(self, upstream: str, keys: Mapping[str, str], rules: Rules) -> None:
        """Connect to an upstream, with secrets by the IDs of keys, and the rules."""
        self.upstream = Upstream(upstream)
        self.keys = keys
        self.first_rules = rules
        self.rules = rules
        self.box = FaultBox()
        self.refusals: Counter[str] = Counter()
        self.seen: deque[Seen] = deque(maxlen=REMEMBERED_REQUESTS)
        self.last_write: dict[str, float] = {}
        self.crcs: dict[str, tuple[str, str]] = {}  # ETag and CRC of each object, by bucket/key
        self.release = asyncio.Event()
        self.delays = Delays()
        self.delayed = 0

    def reset(self) -> None:
        """Clear all state, and end stalled requests."""
        self.box.reset()
        self.refusals.clear()
        self.seen.clear()
        self.last_write.clear()
        self.rules = self.first_rules
        self.delays, self.delayed = Delays(), 0
        self.release.set()
        self.release = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of a client."""
        path, _, query = request.raw_path.partition("?")
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in HOP_BY_HOP
        )
        named = find_operation(request.method, path, query, headers)
        seen = Seen(request.method, request.raw_path, named.name, time.monotonic())
        seen.payload = headers.get("x-amz-content-sha256", "")
        self.seen.append(seen)
        length = request.content_length or 0
        asked = Asked(request, named, seen, path, query, headers, length)
        asked.plan = self.box.choose(
            request.method, named.name, asked.name, _list_possible_faults(asked)
        )
        try:
            return await self._answer(asked)
        except R2RefusedError as refused:
            seen.refused = refused.code
            self.refusals[refused.code] += 1
            return await self._refuse(asked, refused.status, refused.code, refused.message)
        except UpstreamError as error:
            if seen.status is not None:
                return _close(request)
            self.refusals["BadGateway"] += 1
            return await self._refuse(asked, 502, "BadGateway", str(error))
        except (ClientGoneError, ConnectionError):
            return _close(request)
        finally:
            if asked.plan is not None and not asked.fired:
                self.box.give_back(asked.plan)

    async def _answer(self, asked: Asked) -> web.StreamResponse:
        plan = asked.plan
        if plan is not None and plan.kind in FAULT_ANSWERS:
            self._fire(asked)
            wait = plan.retry_after if plan.kind is not Fault.ERROR500 else None
            return await self._refuse(asked, *FAULT_ANSWERS[plan.kind], retry_after=wait)
        if plan is not None and plan.kind is Fault.STALL:
            self._fire(asked)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.release.wait(), plan.stall_seconds)
            return _close(asked.request)
        whole = await self._admit(asked)
        if asked.operation.name == "GetObject" and (seconds := self.delays.draw()):
            self.delayed += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.release.wait(), seconds)
        try:
            answer = await self._forward(asked, whole)
        except BaseException as error:
            self.last_write.pop(asked.name, None)
            if not isinstance(error, CutError):
                raise
            self._fire(asked)
            return _close(asked.request)
        self._keep_crc(asked, answer)
        if asked.meets(Fault.LOST):
            self._fire(asked)
            answer.close()
            return _close(asked.request)
        return await self._relay(asked, answer)

    async def _admit(self, asked: Asked) -> bytes | None:
        """Apply the rules, and return the body if they depend on it.

        Raises:
            RefusedError: A rule refuses the request.
        """
        request, asked_for = asked.request, asked.operation
        try:
            signature = sigv4.find_signature(asked.headers, asked.query)
        except sigv4.MalformedError as error:
            raise R2RefusedError(400, "InvalidArgument", str(error)) from error
        if signature is None:
            raise R2RefusedError(401, "Unauthorized", "The request is not signed.")
        has_body = request.method in ("PUT", "POST")
        check_head(asked_for, asked.headers, has_body=has_body, region=signature.region)
        if has_body:
            check_payload(asked.headers, self.rules)
        token = asked.headers.get(sigv4.TOKEN) or asked_for.query.get("X-Amz-Security-Token")
        asked.secret = self.keys.get(signature.access_key_id)
        grant = None if token is None else self._check_token(asked, signature, token)
        whole = await _read_small(asked) if asked_for.name in READ_WHOLE else None
        if grant is not None:
            _check_grant(asked, grant, whole)
        if asked_for.name == "CompleteMultipartUpload" and whole is not None:
            await self._check_upload(asked, signature, whole)
        if asked_for.name in COUNTED_WRITES:
            self._check_pace(asked.name)
        return whole

    def _check_token(self, asked: Asked, signature: sigv4.Signature, token: str) -> r2_token.Grant:
        """Check a temporary credential, and sign the request again with the parent's key."""
        if asked.secret is None:
            raise R2RefusedError(401, "Unauthorized", "The parent's access key id is unknown.")
        try:
            grant = r2_token.verify(
                token,
                access_key_id=signature.access_key_id,
                parent_secret=asked.secret,
                host=asked.headers.get("Host", ""),
            )
        except r2_token.TokenError as error:
            raise R2RefusedError(error.status, error.code, error.message) from error
        covered = signature.presigned or sigv4.TOKEN in signature.signed_headers
        if (
            not covered
            or self._compute_signature(asked, signature, grant.secret) != signature.value
        ):
            message = "The request signature does not match the calculated signature."
            raise R2RefusedError(403, "SignatureDoesNotMatch", message)
        bare, asked.query = sigv4.drop_token(signature, asked.headers, asked.query)
        value = self._compute_signature(asked, bare, asked.secret)
        if signature.presigned:
            kept = [w for w in asked.query.split("&") if not w.startswith("X-Amz-Signature=")]
            asked.query = "&".join([*kept, f"X-Amz-Signature={value}"])
        else:
            asked.headers["Authorization"] = sigv4.make_authorization(bare, value)
        return grant

    def _compute_signature(self, asked: Asked, signature: sigv4.Signature, secret: str) -> str:
        return sigv4.compute(
            secret,
            method=asked.request.method,
            path=asked.path,
            query=asked.query,
            headers=asked.headers,
            signature=signature,
        )

    async def _check_upload(
        self, asked: Asked, signature: sigv4.Signature, completion: bytes
    ) -> None:
        """Check the sizes of the parts in the completion of an upload."""
        if asked.secret is None:
            return
        try:
            numbers = [int(number) for number in _find_texts(completion, "PartNumber")]
        except (ValueError, ET.ParseError):
            return
        sizes = await self._list_part_sizes(asked, signature, asked.secret)
        check_parts([sizes[number] for number in numbers if number in sizes], self.rules)

    async def _list_part_sizes(
        self, asked: Asked, signature: sigv4.Signature, secret: str
    ) -> dict[int, int]:
        upload = asked.operation.query["uploadId"]
        sizes: dict[int, int] = {}
        marker = "0"
        while True:
            query = f"max-parts=1000&part-number-marker={marker}&uploadId={sigv4.encode(upload)}"
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            headers = {
                "host": asked.headers["Host"],
                "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
                "x-amz-date": stamp,
            }
            own = sigv4.Signature(
                access_key_id=signature.access_key_id,
                scope=f"{stamp[:8]}/auto/s3/aws4_request",
                signed_headers=tuple(headers),
                value="",
                presigned=False,
            )
            value = sigv4.compute(
                secret, method="GET", path=asked.path, query=query, headers=headers, signature=own
            )
            headers["authorization"] = sigv4.make_authorization(own, value)
            answer = await self.upstream.send("GET", f"{asked.path}?{query}", headers.items())
            listing = await answer.read()
            if answer.status != 200:
                return {}
            numbers = map(int, _find_texts(listing, "PartNumber"))
            sizes |= zip(numbers, map(int, _find_texts(listing, "Size")), strict=True)
            if "true" not in _find_texts(listing, "IsTruncated"):
                return sizes
            marker = _find_texts(listing, "NextPartNumberMarker")[0]

    def _check_pace(self, name: str) -> None:
        """Refuse a second write to a key within the interval. Record the time of other writes."""
        now, interval = time.monotonic(), self.rules.write_interval
        if now - self.last_write.get(name, -interval) < interval:
            message = "Reduce your concurrent request rate for the same object."
            raise R2RefusedError(429, "TooManyRequests", message)
        if len(self.last_write) > REMEMBERED_REQUESTS:
            recent = self.last_write.items()
            self.last_write = {key: at for key, at in recent if now - at < interval}
        self.last_write[name] = now

    async def _forward(self, asked: Asked, whole: bytes | None) -> Answer:
        """Forward a request to the upstream. The last piece of its body follows all checks."""
        target = f"{asked.path}?{asked.query}" if asked.query else asked.path
        promised = self._find_promises(asked)
        cut_at = asked.length // 2 if asked.meets(Fault.CUT) and asked.length else None
        body = None
        if asked.length or promised:
            pieces = _yield_once(whole) if whole is not None else self._count_received(asked)
            if asked.meets(Fault.DAMAGE):
                pieces = self._damage(asked, pieces)
            body = _check_body(pieces, promised=promised, cut_at=cut_at)
        if promised and not asked.length:
            async for _ in _check_body(_yield_once(b""), promised=promised, cut_at=None):
                pass
        return await self.upstream.send(asked.request.method, target, asked.headers.items(), body)

    def _find_promises(self, asked: Asked) -> list[tuple[str, Checksum]]:
        """Return the checksums in the headers, each with an object that computes it."""
        found: list[tuple[str, Checksum]] = []
        if asked.operation.name in HASHED:
            if promised := asked.headers.get(SHA256_HEADER):
                found.append((promised, Sha256()))
            if self.rules.checks_crc and (promised := asked.headers.get(CRC_HEADER)):
                found.append((promised, Crc64()))
        return found

    def _keep_crc(self, asked: Asked, answer: Answer) -> None:
        """Store the CRC of an object that the upstream has stored."""
        crc = asked.headers.get(CRC_HEADER)
        if asked.operation.name != "PutObject" or answer.status != 200:
            return
        self.crcs.pop(asked.name, None)
        if crc and self.rules.checks_crc:
            self.crcs[asked.name] = (answer.find("etag"), crc)
            if len(self.crcs) > REMEMBERED_REQUESTS:
                self.crcs.pop(next(iter(self.crcs)))

    def _find_checksum_headers(self, asked: Asked, answer: Answer) -> dict[str, str]:
        """Return the headers of the answer that have the CRC; empty without one."""
        crc = None
        if answer.status == 200 and self.rules.checks_crc:
            if asked.operation.name in HASHED:
                crc = asked.headers.get(CRC_HEADER)
            elif asked.headers.get("x-amz-checksum-mode") == "ENABLED":
                etag, crc = self.crcs.get(asked.name, ("", None))
                crc = crc if etag == answer.find("etag") else None
        return {CRC_HEADER: crc, "x-amz-checksum-type": "FULL_OBJECT"} if crc else {}

    async def _damage(self, asked: Asked, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Flip a bit of the first byte."""
        async for piece in pieces:
            if asked.fired or not piece:
                yield piece
            else:
                self._fire(asked)
                yield bytes([piece[0] ^ 1]) + piece[1:]

    async def _count_received(self, asked: Asked) -> AsyncIterator[bytes]:
        async for piece in _read_body(asked.request):
            asked.seen.received += len(piece)
            yield piece

    async def _relay(self, asked: Asked, answer: Answer) -> web.StreamResponse:
        """Send an answer of the upstream to the client, or half of it if a cut is planned."""
        headers = CIMultiDict(
            (name, value) for name, value in answer.headers if name.lower() not in HOP_BY_HOP
        )
        headers.update(self._find_checksum_headers(asked, answer))
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        asked.seen.status = answer.status
        has_body = not answer.bodiless and answer.length != 0
        cut = asked.meets(Fault.CUT) and answer.status in (200, 206) and has_body
        async with contextlib.aclosing(answer.read_chunks()) as pieces:
            await response.prepare(asked.request)
            left = answer.length // 2 if cut and answer.length is not None else None
            async for piece in pieces:
                if cut and left is None:
                    left = len(piece) // 2
                kept = piece[:left]
                asked.seen.sent += len(kept)
                if kept:
                    await response.write(kept)
                if left is not None:
                    left -= len(kept)
                if left == 0:
                    self._fire(asked)
                    return _close(asked.request, response)
        await response.write_eof()
        return response

    def _fire(self, asked: Asked) -> None:
        assert asked.plan is not None
        asked.fired = True
        asked.seen.fault = asked.plan.kind.value
        self.box.fire(asked.plan)

    async def _refuse(
        self,
        asked: Asked,
        status: int,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
    ) -> web.StreamResponse:
        """Answer with an S3 error after the client has sent its whole request."""
        try:
            async for piece in _read_body(asked.request):
                asked.seen.received += len(piece)
        except ClientGoneError:
            return _close(asked.request)
        asked.seen.status = status
        headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        )
        return web.Response(
            status=status, text=body, content_type="application/xml", headers=headers
        )


class Control:
    """Handler of the control port, where tests configure the proxy and query its state."""

    def __init__(self, proxy: Proxy) -> None:
        """Control ``proxy``."""
        self.proxy = proxy

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``POST /VERB``. The bodies of the request and the answer are JSON."""
        given = await request.read()
        body: dict[str, Any] = json.loads(given) if given else {}
        return web.json_response(self._execute(request.path, body))

    def _execute(self, path: str, body: dict[str, Any]) -> Any:
        proxy = self.proxy
        match path:
            case "/faults":
                body["methods"] = tuple(body["methods"])
                body["operations"] = tuple(body["operations"])
                proxy.box.use(Faults(**body))
            case "/fail-next":
                proxy.box.fail_next(NextFault(Fault(body.pop("kind")), **body))
            case "/rules":
                proxy.rules = Rules(**asdict(proxy.rules) | body)
            case "/delays":
                proxy.delays = Delays(**body)
            case "/delayed":
                return proxy.delayed
            case "/reset":
                proxy.reset()
            case "/counts":
                return proxy.box.count_fired()
            case "/pending":
                return proxy.box.count_pending()
            case "/refusals":
                return dict(proxy.refusals)
            case "/requests":
                return [asdict(seen) for seen in proxy.seen]
            case _:
                raise web.HTTPNotFound
        return None


async def serve(
    proxy: Proxy, *, port: int, control_port: int, certificate: tuple[str, str] | None
) -> None:
    """Serve the proxy and its control port on 127.0.0.1 until cancelled, and announce the ports.

    Args:
        proxy: Proxy to serve.
        port: Port of the proxy; 0 means any free port.
        control_port: Control port; 0 means any free port.
        certificate: Paths of a certificate and its key; None for plain HTTP.
    """
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
    options: dict[str, Any] = {
        "access_log": None,
        "auto_decompress": False,
        "read_bufsize": CHUNK,
        "max_line_size": 1 << 16,
        "max_field_size": 1 << 16,
    }
    loop = asyncio.get_running_loop()
    front = web.Server(proxy.handle, **options)
    control = web.Server(Control(proxy).handle, access_log=None)
    ports: list[int] = []
    for server, wanted, tls in ((front, port, context), (control, control_port, None)):
        shutdown: dict[str, Any] = {"ssl_shutdown_timeout": 1.0} if tls is not None else {}
        listening = await loop.create_server(
            server, "127.0.0.1", wanted, ssl=tls, backlog=512, **shutdown
        )
        ports.append(listening.sockets[0].getsockname()[1])
    print(json.dumps({"port": ports[0], "control": ports[1]}), flush=True)
    await asyncio.Event().wait()


def _list_possible_faults(asked: Asked) -> set[Fault]:
    """Return the kinds of faults that can happen to a request."""
    possible = set(Fault)
    if asked.request.method != "GET" and not asked.length:
        possible.remove(Fault.CUT)
    if asked.operation.name not in HASHED or not asked.length:
        possible.remove(Fault.DAMAGE)
    return possible


def _check_grant(asked: Asked, grant: r2_token.Grant, whole: bytes | None) -> None:
    """Check that a temporary credential allows a request.

    Raises:
        RefusedError: The credential does not allow the request.
    """
    wanted = asked.operation
    allowed = wanted.name in grant.operations and wanted.bucket == grant.bucket
    if wanted.key:
        allowed = allowed and grant.allows_key(wanted.key)
    elif wanted.name.startswith("List"):
        allowed = allowed and grant.allows_listing(wanted.query.get("prefix", ""))
    elif wanted.name == "DeleteObjects":
        keys = _find_texts(whole or b"", "Key") if allowed else []
        allowed = allowed and all(map(grant.allows_key, keys))
    source = asked.headers.get("x-amz-copy-source")
    if source is not None:
        bucket, _, key = unquote(source).removeprefix("/").partition("/")
        allowed = allowed and bucket == grant.bucket and grant.allows_key(key.split("?")[0])
    if not allowed:
        raise R2RefusedError(403, "AccessDenied", "Access Denied.")


async def _read_small(asked: Asked) -> bytes:
    if asked.length > SMALL_BODY:
        raise R2RefusedError(400, "EntityTooLarge", "The request is too large.")
    pieces = [piece async for piece in _read_body(asked.request)]
    asked.seen.received += sum(map(len, pieces))
    return b"".join(pieces)


async def _read_body(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """Yield the body of a request. Answer ``Expect: 100-continue`` first."""
    try:
        if request.headers.get("Expect", "").lower() == "100-continue" and not request.get("told"):
            request["told"] = True
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        while piece := await request.content.readany():
            yield piece
    except (web.RequestPayloadError, ConnectionError) as error:
        raise ClientGoneError from error


async def _yield_once(whole: bytes) -> AsyncIterator[bytes]:
    yield whole


async def _check_body(
    pieces: AsyncIterator[bytes],
    *,
    promised: Sequence[tuple[str, Checksum]],
    cut_at: int | None,
) -> AsyncIterator[bytes]:
    """Yield a body, and hold back its last piece until all checksums are correct.

    Args:
        pieces: Pieces of the body.
        promised: Checksums in the headers, each with an object that computes it.
        cut_at: Number of bytes after which `CutError` is raised; None for no cut.

    Raises:
        CutError: The body has reached the cut.
        RefusedError: A checksum differs.
    """
    held = b""
    seen = 0
    async for piece in pieces:
        if held:
            yield held
        held = piece
        seen += len(piece)
        for _, checksum in promised:
            checksum.update(piece)
        if cut_at is not None and seen >= cut_at:
            yield piece[: cut_at - (seen - len(piece))]
            raise CutError
    if any(checksum.encode() != header for header, checksum in promised):
        message = "The checksum you specified did not match the calculated checksum."
        raise R2RefusedError(400, "BadDigest", message)
    if held:
        yield held


def _find_texts(document: bytes, tag: str) -> list[str]:
    """Return the texts of the elements with a name, in any namespace."""
    root = ET.fromstring(document)
    return [one.text or "" for one in root.iter() if one.tag.rpartition("}")[2] == tag]


def _close(
    request: web.BaseRequest, response: web.StreamResponse | None = None
) -> web.StreamResponse:
    """Close the connection of the client: after a started response, else immediately."""
    transport = request.transport
    if transport is not None:
        if response is not None:
            transport.close()
        else:
            transport.abort()
    return response or web.Response(status=500)
