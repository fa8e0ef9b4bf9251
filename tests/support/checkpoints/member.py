"""A member as a process: ``python -m tests.support.checkpoints.member SETTINGS NAME [EVENT]``.

It dies at the event, if one is given. Otherwise it uploads nothing before its input ends.
"""

import os
import signal
import sys
from pathlib import Path

from millrace.checkpoints import MemberSettings, end_epoch
from millrace.progress import Event
from millrace.settings import load_settings


def main() -> None:
    settings, name, *deadly = sys.argv[1:]

    def progress(event: Event) -> None:
        if event.name in deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if event.name == "cooldown.racing":
            sys.stdin.read()

    cooled = end_epoch(load_settings(Path(settings), MemberSettings), name, progress=progress)
    print(cooled.outcome, cooled.reason)


if __name__ == "__main__":
    main()
