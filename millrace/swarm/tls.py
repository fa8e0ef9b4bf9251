"""Encryption between the machines of a swarm: TLS 1.3 with certificates that are pinned.

An agent makes a key and a self-signed certificate when it starts, and both end with its process.
No authority signs the certificate, and no name in it is checked: what counts is its fingerprint.
The driver learns the fingerprint by `prove` and `check_proof`, which need the key of the node. The
other nodes are told it by the driver. `PinnedConnection` compares it before it sends a byte.

Within one machine, over loopback, agents accept plain HTTP too.
"""

import datetime
import hashlib
import hmac
import http.client
import ipaddress
import os
import socket
import ssl
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

_HANDSHAKE_RECORD = b"\x16"  # first byte of every TLS connection, and of no HTTP request
_RECORDS = 64 * 1024  # bytes that are encrypted at a time; they stay in the processor's cache
_NOT_TLS = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
}
"""Reasons that OpenSSL gives for an answer that is no TLS."""

CLOSED_ERRORS = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that the other side has closed."""


class TlsError(OSError):
    """The other side does not encrypt, or is not the agent that it should be."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of an agent.

    Attributes:
        context: Context of its server side.
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.
    """

    context: ssl.SSLContext
    fingerprint: str


def make_certificate() -> Certificate:
    """Make a key (P-256) and a certificate that it signs itself."""
    from cryptography import x509  # noqa: PLC0415 - loopback does without it, and 7 MB less
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "millrace agent")])
    # Nobody checks the dates: clocks of rented machines are wrong.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # sessions are not resumed: each connection shows the certificate
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:  # only its owner reads it
        file = Path(folder) / "agent.pem"
        file.write_bytes(private + public)
        context.load_cert_chain(file)  # OpenSSL reads keys from files only
    found = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(context, hashlib.sha256(found).hexdigest())


def prove(key: bytes, nonce: str, identity: str, fingerprint: str) -> str:
    """Return the HMAC by which an agent vouches for its certificate.

    Args:
        key: Key of the node.
        nonce: Random text of the driver that asks.
        identity: Identity of the agent.
        fingerprint: Fingerprint of its certificate; empty for plain HTTP within a machine. No agent
            proves that over a network, so that nobody between can make a driver speak plainly.
    """
    text = f"millrace agent certificate\n{nonce}\n{identity}\n{fingerprint}"
    return hmac.digest(key, text.encode(), "sha256").hex()


def check_proof(
    proof: object, key: bytes, nonce: str, identity: str, fingerprint: str, *, at: str
) -> None:
    """Check that an agent with the key of the node is at the other end of a connection.

    Raises:
        TlsError: It has not: something else has answered.
    """
    due = prove(key, nonce, identity, fingerprint)
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), due.encode()):
        raise TlsError(
            f"what answers at {at} cannot prove that it is the agent with this node key: "
            "something else answers there, or listens between. No key and no address of an "
            "object was sent to it. Check the address, and the network between"
        )


def is_loopback(host: str) -> bool:
    """Tell whether an address, or ``localhost``, leads to this machine only."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_secured(sock: socket.socket) -> bool:
    """Tell whether what an accepted connection carries stays on this machine, or is encrypted."""
    return isinstance(sock, ssl.SSLSocket) or is_loopback(str(sock.getsockname()[0]))


def is_hello(sock: socket.socket) -> bool:
    """Wait for the first byte of an accepted connection, and tell whether TLS begins with it."""
    return sock.recv(1, socket.MSG_PEEK) == _HANDSHAKE_RECORD


class PinnedConnection(http.client.HTTPSConnection):
    """A connection that sends nothing but to the owner of one certificate.

    Args:
        host: Name or address.
        port: Port.
        timeout: Seconds that connecting, or an answer, may take.
        fingerprint: Fingerprint of the certificate; None accepts each, and only `fingerprint`
            tells which it was.
    """

    def __init__(self, host: str, port: int, *, timeout: float, fingerprint: str | None) -> None:
        super().__init__(host, port, timeout=timeout, context=_client_context())
        self._expected = fingerprint
        self.fingerprint = ""

    def connect(self) -> None:
        """Connect, and compare the certificate.

        Raises:
            TlsError: It is another, or none.
        """
        at = f"{self.host}:{self.port}"
        try:
            super().connect()
        except ssl.SSLError as error:
            self.close()
            if error.reason in _NOT_TLS:
                raise TlsError(
                    f"what listens at {at} does not encrypt (TLS): it is no agent, or one of an "
                    "older version. Start `millrace swarm node` of this version there"
                ) from error
            raise
        except BaseException:
            self.close()
            raise
        shown = cast("ssl.SSLSocket", self.sock).getpeercert(binary_form=True)
        self.fingerprint = hashlib.sha256(shown or b"").hexdigest()
        if self._expected is not None and self.fingerprint != self._expected:
            self.close()
            raise TlsError(
                f"the certificate shown at {at} is not the one that the agent there had when the "
                "run began: nothing was sent to it"
            )


@cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no authority: `PinnedConnection` compares
    return context


@cache
def store_context(authorities: str | None) -> ssl.SSLContext:
    """Return the context that verifies stores, made once: reading the authorities takes 30 ms.

    Args:
        authorities: Certificate authorities to trust, PEM; the system's by default.
    """
    return ssl.create_default_context(cadata=authorities)


def send_file(to: ssl.SSLSocket, descriptor: int, start: int, size: int) -> None:
    """Send a range of a file, encrypted.

    Raises:
        OSError: The connection broke, or took less than 64 KiB within its timeout.
    """
    buffer = memoryview(bytearray(min(_RECORDS, size)))
    end = start + size
    while start < end:
        got = os.preadv(descriptor, [buffer[: end - start]], start)
        if not got:
            raise OSError("The file is shorter than the piece.")
        to.sendall(buffer[:got])
        start += got


def shut(sock: socket.socket, how: int) -> None:
    """Shut a connection down, also while another thread uses it.

    `ssl.SSLSocket.shutdown` forgets the encryption first: what another thread sends at that moment
    would go out in the clear.
    """
    if isinstance(sock, ssl.SSLSocket):
        socket.socket.shutdown(sock, how)
    else:
        sock.shutdown(how)
