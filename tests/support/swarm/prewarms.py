"""Objects, archives and disks for the tests of a prewarm."""

import hashlib
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.rig.store import RigStore
from millrace.swarm import Request

MIB = 1 << 20


def fill(store: RigStore, prefix: str) -> dict[str, bytes]:
    """Objects of all sizes below a prefix; what a node must then have."""
    sizes = {"large.bin": 9 * MIB + 17, "even.bin": 2 * MIB, "empty": 0, "sub/one": 1}
    sizes |= {f"sub/small-{i:03d}.txt": 700 * i for i in range(60)}
    contents = {
        name: hashlib.shake_256(f"{prefix}{name}".encode()).digest(size)
        for name, size in sizes.items()
    }
    for name, body in contents.items():
        store.put(f"{prefix}/{name}", body)
    store.reset()
    return contents


def below(prefix: str) -> dict[str, object]:
    return {"requests": [Request(prefix=prefix)]}


def tarred(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as opened:
        for name, body in members.items():
            opened.writestr(name, body)
    return out.getvalue()


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
