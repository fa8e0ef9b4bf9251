"""The function that computes losses, as settings name it."""

from pathlib import Path

import pytest

from millrace.errors import ConfigurationError
from millrace.gradients import load_compute_loss

FILE = """
def make():
    return lambda weights, window, uid: float(window)


def fail():
    raise OSError("no model here")


def number():
    return 5


value = 7
"""


def test_a_file_beside_the_settings_has_the_function(tmp_path: Path):
    (tmp_path / "loss.py").write_text(FILE)
    assert load_compute_loss("./loss.py:make", tmp_path)({}, 3, None) == 3.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("loss", "names no function: write module:function"),
        ("./loss.py:", "names no function"),
        ("./none.py:make", "none.py cannot be loaded: there is no file"),
        ("no_such_module:make", "no_such_module cannot be loaded: No module named"),
        ("./loss.py:absent", "has no function absent"),
        ("./loss.py:value", "has no function value"),
        ("./loss.py:fail", "failed: no model here"),
        ("./loss.py:number", "returned int: let it return a function"),
        ("./broken.py:make", "broken.py cannot be loaded: "),
    ],
)
def test_what_is_no_function_is_a_sentence(tmp_path: Path, name: str, sentence: str):
    (tmp_path / "loss.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def make(:")
    with pytest.raises(ConfigurationError, match=sentence):
        load_compute_loss(name, tmp_path)
