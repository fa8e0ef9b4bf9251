from pathlib import Path

import pytest

from millrace.testing.mosaicml import install_mosaicml


@pytest.fixture(scope="session")
def mosaicml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of mosaicml-streaming."""
    folder = tmp_path_factory.mktemp("mosaicml")
    install_mosaicml(folder)
    return folder
