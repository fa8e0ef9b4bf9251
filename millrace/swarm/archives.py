"""Archives of a run: each is unpacked while it arrives, and gets its folder when it is whole."""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from millrace.errors import ConfigurationError
from millrace.swarm.landing import OURS, Arriving, Landing
from millrace.swarm.pieces import Catalogue, File


class Archives:
    """Unpacks a catalogue's archives below a root.

    Args:
        root: The folder that nothing is written outside of.
        catalogue: What the archives are among.
        landing: Where their bytes arrive.
        limits: ``bytes`` and ``members`` that one may unpack to.
    """

    def __init__(
        self, root: Path, catalogue: Catalogue, landing: Landing, limits: dict[str, int]
    ) -> None:
        self._root, self._catalogue, self._landing = root.resolve(), catalogue, landing
        self._limits = limits

    def unpack(self, number: int) -> None:
        """Unpack one archive; returns when its folder is there.

        Raises:
            ChangedError: The run has ended before.
            ConfigurationError: Its folder is there already, and we did not make it.
            ArchiveError: It holds what must not be unpacked.
        """
        file = self._catalogue.files[number]
        into = self._root / file.into
        if os.path.lexists(into):
            self._check_ours(file, into)
            self._landing.wait_final(number)
            return
        into.parent.mkdir(parents=True, exist_ok=True)
        if not into.parent.resolve().is_relative_to(self._root):
            raise ConfigurationError(
                f"{into} leads out of {self._root} through a link: nothing was written there."
            )
        name = hashlib.sha256(file.into.encode()).hexdigest()[:16]
        half = into.parent / f".{name}.{self._catalogue.id}.unpacking"
        shutil.rmtree(half, ignore_errors=True)  # of a run that was killed
        half.mkdir()
        try:
            self._fill(number, file, half)
            self._landing.wait_final(number)  # it is what it should be
            self._note(file)
            half.rename(into)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise

    def _fill(self, number: int, file: File, half: Path) -> None:
        from millrace.swarm.unpack import Limits, Unpacking, unpack  # noqa: PLC0415

        method, limits = Unpacking(file.unpack), Limits(**self._limits)
        if method is Unpacking.ZIP:  # its directory is at its end
            self._landing.wait_final(number)
            archive: Path | Arriving = self._root / file.path
        else:
            archive = self._landing.sequential(number)
        unpack(archive, method, half, limits=limits, mode=file.mode, owner=file.owner)

    @property
    def _record(self) -> Path:
        return self._root / OURS / "unpacked.jsonl"

    def _check_ours(self, file: File, into: Path) -> None:
        made: list[dict[str, str]] = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._record.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    made.append(json.loads(line))
        if _entry(file) not in made:
            raise ConfigurationError(
                f"{into} is there already, and was not unpacked by us from {file.origin} as it is "
                "now: move it away, or unpack into another folder. It was not touched."
            )

    def _note(self, file: File) -> None:
        with self._record.open("a") as record:
            record.write(f"\n{json.dumps(_entry(file))}\n")
            record.flush()
            os.fsync(record.fileno())


def _entry(file: File) -> dict[str, str]:
    return {"into": file.into, "origin": file.origin, "etag": file.etag}
