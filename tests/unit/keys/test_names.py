import pytest

from millrace import errors
from millrace.keys.names import check_name


@pytest.mark.parametrize("name", ["", "../up", "a//b", "a b", ".hidden", "a/../b", "x" * 201, "ä"])
def test_a_name_that_some_store_would_change_is_refused(name):
    with pytest.raises(errors.ConfigurationError, match="letters, digits"):
        check_name(name, what="The dataset's name")
