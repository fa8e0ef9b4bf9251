"""Install mosaicml-streaming, whose own requirements clash with those of Millrace.

mosaicml-streaming requires older versions of libraries than Millrace does (numpy, xxhash). Its
reader and its writer work with the newer ones. So it is installed into a folder without its
requirements, beside those that it imports and an environment for development lacks.
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
    """Install the package into a folder, from PyPI."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*pip, *options, *PACKAGES], check=True)


def prepare_import() -> None:
    """Let this process import the package without its datasets of pictures.

    The folder of `install_mosaicml` must be in ``sys.path``. The import of the datasets fails where
    torchvision was built for another PyTorch than the installed one.
    """
    package = types.ModuleType("streaming")
    package.__path__ = [str(Path(one) / "streaming") for one in sys.path]
    sys.modules["streaming"] = package
