"""Record each Ethernet frame of a host's interface into a file, until the process is killed.

``python sniffer.py INTERFACE FILE`` prints a line once it listens.
"""

import socket
import sys
from pathlib import Path

_ALL = 0x0003  # ETH_P_ALL


def main(interface: str, file: str) -> None:
    """Listen."""
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as raw,
        Path(file).open("wb", buffering=0) as out,
    ):
        raw.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE: no frame is lost
        raw.bind((interface, 0))
        print("listening", flush=True)
        while True:
            frame = raw.recv(1 << 17)
            out.write(len(frame).to_bytes(4, "big") + frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
