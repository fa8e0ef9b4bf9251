import pytest

from millrace.errors import ConfigurationError
from millrace.keys.templar import (
    TemplarKey,
    TemplarKind,
    make_templar_key,
    parse_templar_key,
)


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("gradient", "0.2.80", 5_123_456, 45), "gradient-5123456-45-v0.2.80.pt"),
        (("debug", "2.1.28", 41, 7), "debug-41-7-v2.1.28.pt"),
        (("checkpoint", "0.2.80", 0, 0), "checkpoint-0-0-v0.2.80.pt"),
        (("aggregator", "0.2.80", 41), "aggregator-41-v0.2.80.pt"),
        (("start_window", "0.2.80"), "start_window_v0.2.80.json"),
        (("peers", "0.2.80", 41), "peers_41_v0.2.80.json"),
        (("gathers", "0.2.8", -1, -1, "a/41.npz"), "gathers/0.2.8/a/41.npz"),
    ],
)
def test_a_key_is_parsed_as_it_was_made(parts, key):
    parts = TemplarKey(TemplarKind(parts[0]), *parts[1:])
    assert make_templar_key(parts) == key
    assert parse_templar_key(key) == parts


@pytest.mark.parametrize(
    "parts",
    [
        ("gradient", "", 1, 1),
        ("gradient", "a/b", 1, 1),
        ("gradient", "1.pt\n", 1, 1),
        ("gradient", "1", -1, 1),
        ("gradient", "1", 1),
        ("gradient", "1", 10**20, 1),
        ("aggregator", "1", 1, 1),
        ("start_window", "1", 1),
        ("peers", "1"),
        ("gathers", "1"),
    ],
)
def test_a_key_that_would_not_be_parsed_is_not_made(parts):
    with pytest.raises(ConfigurationError, match="give a version such as"):
        make_templar_key(TemplarKey(TemplarKind(parts[0]), *parts[1:]))


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
