"""The first process of a host: it holds the host's processes together, and ends with its owner.

The owner keeps the other end of our standard input and never writes. When it ends, however it
ends, we read the end of the file; and when the first process of a PID namespace ends, the kernel
kills all others in it. So nothing has to be cleaned up after an owner that was killed.

Started as a file, isolated and without site: it imports nothing but what it needs. A line says that
it has read all of that: then the host's own folders may cover the files it came from.
"""

import select
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that end are reaped by the kernel
    print(flush=True)
    select.select([sys.stdin.fileno()], [], [], float(sys.argv[1]))
