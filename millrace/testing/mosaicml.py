"""Installation of mosaicml-streaming, whose requirements conflict with those of Millrace.

mosaicml-streaming requires older versions of libraries than Millrace does (numpy, xxhash). Its
reader and its writer also work with the newer versions. It is therefore installed into a separate
folder without its requirements, together with imported packages that the `dev` extra lacks.
"""

import subprocess
import sys
import types
from pathlib import Path

PACKAGES = (
    "mosaicml-streaming==0.13.0",
    "brotli==1.2.1",
    "catalogue==2.0.10",
    "cramjam==2.14.0",
    "python-snappy==0.7.3",
    "regex",
    "tqdm",
    "transformers==5.24.0",
    "zstd==1.5.7.2",
)


def install_mosaicml(folder: Path) -> None:
    """Install the package from PyPI into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*pip, *options, *PACKAGES], check=True)


def prepare_import() -> None:
    """Make the package importable in this process without its image datasets.

    The folder of `install_mosaicml` must be in ``sys.path``. The image datasets import torchvision,
    which fails if it was built for another version of PyTorch.
    """
    package = types.ModuleType("streaming")
    package.__path__ = [str(Path(one) / "streaming") for one in sys.path]
    sys.modules["streaming"] = package
