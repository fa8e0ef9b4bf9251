"""A member as a process: ``python -m tests.support.checkpoints.member SETTINGS NAME [KIND]``.

It dies at an event of the kind, if one is given. Otherwise it uploads nothing before its input
ends.
"""

import os
import signal
import sys
from pathlib import Path

from millrace.checkpoints import MemberSettings, end_epoch
from millrace.checkpoints.progress_events import UploadStarted
from millrace.progress import Event
from millrace.settings import load_settings


def main() -> None:
    settings, name, *deadly = sys.argv[1:]

    def progress(event: Event) -> None:
        if event.kind in deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(event, UploadStarted):
            sys.stdin.read()

    cooled = end_epoch(load_settings(Path(settings), MemberSettings), name, progress=progress)
    print(cooled.outcome, cooled.reason)


if __name__ == "__main__":
    main()
