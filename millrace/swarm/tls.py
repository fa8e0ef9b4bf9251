"""Encryption between the machines of a swarm: TLS 1.3 with pinned certificates.

An agent makes a key and a self-signed certificate when it starts, and both end with its process.
No authority signs the certificate, and no name in it is checked: only its fingerprint counts. The
driver verifies the fingerprint with `prove` and `check_proof`, which need the key of the node. Then
the driver sends the fingerprint to the other nodes. `PinnedConnection` compares the fingerprint
before it sends a byte.

Over loopback, agents accept plain HTTP too.
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
_RECORDS = 64 * 1024  # bytes that are encrypted at a time; they fit into a processor cache
_NOT_TLS = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
}
"""Reasons of OpenSSL for an answer that is not TLS."""

CLOSED_ERRORS = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that the other side has closed."""


class TlsError(OSError):
    """The other side does not encrypt, or is not the expected agent."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certificate of an agent.

    Attributes:
        context: Context of its server side.
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.
    """

    context: ssl.SSLContext
    fingerprint: str


def make_certificate() -> Certificate:
    """Make a key (P-256) and a self-signed certificate."""
    from cryptography import x509  # noqa: PLC0415 - not needed on loopback, which saves 7 MB
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "millrace agent")])
    # The dates are not checked, since clocks of rented machines may be wrong.
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
    context.num_tickets = 0  # no resumed sessions: each connection shows the certificate
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:  # readable for the owner only
        file = Path(folder) / "agent.pem"
        file.write_bytes(private + public)
        context.load_cert_chain(file)  # OpenSSL reads keys from files only
    found = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(context, hashlib.sha256(found).hexdigest())


def prove(key: bytes, nonce: str, identity: str, fingerprint: str) -> str:
    """Return the HMAC with which an agent proves its identity and certificate.

    Args:
        key: Key of the node.
        nonce: Random text from the driver.
        identity: Identity of the agent.
        fingerprint: Fingerprint of the certificate; empty for plain HTTP over loopback. No agent
            sends such a proof over a network, so an attacker cannot force a driver to use plain
            HTTP.
    """
    text = f"millrace agent certificate\n{nonce}\n{identity}\n{fingerprint}"
    return hmac.digest(key, text.encode(), "sha256").hex()


def check_proof(
    proof: object, key: bytes, nonce: str, identity: str, fingerprint: str, *, at: str
) -> None:
    """Check the proof of an agent (`prove`).

    Args:
        proof: Proof in the answer; any JSON value.
        key: Key of the node.
        nonce: Random text that the driver sent.
        identity: Identity that the agent states.
        fingerprint: Fingerprint of the certificate of the connection; empty for plain HTTP.
        at: Address of the agent, for the error.

    Raises:
        TlsError: The process at this address does not have the key of the node.
    """
    due = prove(key, nonce, identity, fingerprint)
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), due.encode()):
        raise TlsError(
            f"the server at {at} cannot prove that it is the agent with this node key: another "
            "program answers there, or intercepts the connection. No key and no address of an "
            "object was sent to it. Check the address and the network"
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
    """Tell whether an accepted connection is encrypted, or stays on this machine."""
    return isinstance(sock, ssl.SSLSocket) or is_loopback(str(sock.getsockname()[0]))


def is_hello(sock: socket.socket) -> bool:
    """Wait for the first byte of an accepted connection, and tell whether it begins with TLS."""
    return sock.recv(1, socket.MSG_PEEK) == _HANDSHAKE_RECORD


class PinnedConnection(http.client.HTTPSConnection):
    """Connection to a server with a pinned certificate.

    Args:
        host: Name or address of the server.
        port: Port of the server.
        timeout: Seconds that a connection attempt, or an answer, may take.
        fingerprint: Fingerprint of the expected certificate; None accepts any certificate.

    Attributes:
        fingerprint: Fingerprint of the certificate that the server has shown.
    """

    def __init__(self, host: str, port: int, *, timeout: float, fingerprint: str | None) -> None:
        super().__init__(host, port, timeout=timeout, context=_client_context())
        self._expected = fingerprint
        self.fingerprint = ""

    def connect(self) -> None:
        """Connect, and compare the certificate.

        Raises:
            TlsError: The server has another certificate, or does not encrypt.
        """
        at = f"{self.host}:{self.port}"
        try:
            super().connect()
        except ssl.SSLError as error:
            self.close()
            if error.reason in _NOT_TLS:
                raise TlsError(
                    f"the server at {at} does not encrypt (TLS): it is no agent, or one of an "
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
                "run began: nothing was sent to it. Check the network, and run it again"
            )


@cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `PinnedConnection` compares the fingerprint
    return context


@cache
def store_context(authorities: str | None) -> ssl.SSLContext:
    """Return the context for connections to stores. It is cached, since it takes 30 ms to make.

    Args:
        authorities: Certificate authorities to trust, PEM; by default those of the system.
    """
    return ssl.create_default_context(cadata=authorities)


def send_file(to: ssl.SSLSocket, descriptor: int, start: int, size: int) -> None:
    """Send a range of a file over an encrypted connection.

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
    """Shut a connection down, which another thread may use at the same time.

    `ssl.SSLSocket.shutdown` removes the encryption first. Then bytes that another thread sends at
    that moment would not be encrypted.
    """
    if isinstance(sock, ssl.SSLSocket):
        socket.socket.shutdown(sock, how)
    else:
        sock.shutdown(how)
