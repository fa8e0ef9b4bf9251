"""Entry point of the server process that `VastServer.start` starts."""

import argparse
import asyncio
from pathlib import Path

from millrace.testing.vast.api import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    asyncio.run(serve(parser.parse_args().folder))
