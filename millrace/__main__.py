"""Start the command ``millrace``.

This module imports as little as it can: Ctrl-C while the rest is imported prints no traceback.
"""

import sys


def main() -> None:
    """Run the command ``millrace``."""
    try:
        from millrace.cli import main as command  # noqa: PLC0415

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
