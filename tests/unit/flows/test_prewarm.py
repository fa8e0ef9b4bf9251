"""Settings of the flow prewarm."""

from typing import Any

import pytest
from prefect.blocks.system import Secret

from flows.prewarm import AgentHosts
from millrace.errors import ConfigurationError

DIGITS, EXPONENT = (
    "1234567890123456",
    "12e4567890123456",
)  # JSON, as one hexadecimal key in a few is


def make_hosts(value: Any) -> AgentHosts:
    key: Secret[Any] = Secret(value=value)
    return AgentHosts.model_validate({"hosts": [{"url": "http://10.0.0.1:7000"}], "node_key": key})


@pytest.mark.parametrize(
    ("value", "key"),
    [(DIGITS, DIGITS), (EXPONENT, EXPONENT), (f'"{DIGITS}"', DIGITS), ("a" * 16, "a" * 16)],
)
def test_a_text_is_the_key_whatever_it_would_be_as_json(value: str, key: str) -> None:
    found = make_hosts(value).find_hosts().key
    assert found is not None
    assert found.get_secret_value() == key


@pytest.mark.parametrize("value", [int(DIGITS), {"key": DIGITS}])
def test_a_key_that_is_no_text_is_a_sentence_without_it(value: object) -> None:
    with pytest.raises(ConfigurationError, match="save the key of the machines as a text") as said:
        make_hosts(value).find_hosts()
    assert DIGITS not in str(said.value)
