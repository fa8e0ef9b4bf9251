"""The store of a rig, as Millrace's settings name it."""

from typing import Any

from pydantic import SecretStr

from millrace.storage import Credentials, StoreSpec


def spec_of(store: dict[str, Any]) -> StoreSpec:
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
