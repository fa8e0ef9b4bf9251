import pytest

from millrace.errors import ConfigurationError
from millrace.keys.templar import (
    TemplarKey,
    TemplarKind,
    make_templar_gradient_key,
    parse_templar_key,
)


def test_the_key_of_a_gradient_is_parsed_as_it_was_made():
    key = make_templar_gradient_key("0.2.80", 5_123_456, 45)
    assert key == "gradient-5123456-45-v0.2.80.pt"
    assert parse_templar_key(key) == TemplarKey(TemplarKind.GRADIENT, "0.2.80", 5_123_456, 45)


@pytest.mark.parametrize(
    ("version", "window", "uid"),
    [("", 1, 1), ("a/b", 1, 1), ("1.pt\n", 1, 1), ("1", -1, 1), ("1", 1, -1), ("1", 10**20, 1)],
)
def test_a_key_that_would_not_be_parsed_is_not_made(version, window, uid):
    with pytest.raises(ConfigurationError, match="give a version such as"):
        make_templar_gradient_key(version, window, uid)


@pytest.mark.parametrize(
    "key",
    [
        "gradient-1-v0.2.80.pt",
        "gradient-1-2-3-v0.2.80.pt",
        "gradient-01-2-v0.2.80.pt",
        "gradient-1-2-v0.2.80.safetensors",
        "gradient-٣-2-v0.2.80.pt",
        "aggregator-1-2-v0.2.80.pt",
        "start_window-1-v0.2.80.json",
        "start_window_v0.2.80.pt",
        "peers_v0.2.80.json",
        "gathers/0.2.80/1.pt",
        "run/gradient-1-2-v0.2.80.pt",
        "checkpoints/2.1.28/_LATEST.json",
        "",
    ],
)
def test_other_keys_are_none_of_templars(key):
    assert parse_templar_key(key) is None
