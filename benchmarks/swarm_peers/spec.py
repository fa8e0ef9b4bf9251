"""Settings of Millrace for the store of a rig."""

from typing import Any

from pydantic import SecretStr

from millrace.storage import Credentials, StoreSpec


def make_spec(store: dict[str, Any]) -> StoreSpec:
    """Return the settings of a store from the arguments of an ``S3Store``."""
    return StoreSpec(
        url=f"s3://{store['bucket']}",
        endpoint=store["endpoint"],
        region=store["region"],
        credentials=Credentials(
            access_key_id=store["access_key_id"],
            secret_access_key=SecretStr(store["secret_access_key"]),
        ),
    )
