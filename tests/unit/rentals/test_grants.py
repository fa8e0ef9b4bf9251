"""Locations that a rented machine may use."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace.rentals.grants import GrantKind, list_grants
from millrace.storage import Credentials, StoreSpec, open_store
from millrace.storage.clients import make_full_key
from tests.support.rentals.parts import make_attempt, make_settings


@pytest.mark.parametrize("prefix", ["runs", "runs#a", "runs?a", "50%", "a b", "a%23b/c"])
def test_a_machine_may_read_the_source_whatever_its_prefix(tmp_path: Path, prefix: str) -> None:
    pair = Credentials(access_key_id="a", secret_access_key=SecretStr("hidden"))
    source = StoreSpec(url="s3://bucket", credentials=pair).with_prefix(prefix)
    settings = make_settings(tmp_path, source=source)
    grants = list_grants(open_store(settings.store), settings, make_attempt())
    grant = grants[GrantKind.SOURCE]
    areas = [make_full_key(grant.store, granted) for granted in grant.prefixes]
    assert (grant.store.location.bucket, areas) == ("bucket", [f"{prefix}/"])
