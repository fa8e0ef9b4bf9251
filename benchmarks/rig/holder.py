"""The first process of a host's PID namespace. It ends when the process that created it ends.

The owner has the other end of the standard input of this process, and never writes. When the owner
ends in any way, this process reads the end of the file, and ends too. The kernel then kills all
other processes of the namespace. So a killed owner leaves no processes.

The owner starts this file in isolated mode without the module `site`, so that few files are read.
This process prints an empty line after its imports. From then on, mounts may hide those files.
"""

import select
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    print(flush=True)
    select.select([sys.stdin.fileno()], [], [], float(sys.argv[1]))
