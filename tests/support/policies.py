"""Stores whose credentials lack a right."""

import secrets

from millrace.storage import Right, Store, StoreSpec, open_store
from millrace.storage.scoped import make_session_policy
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW


def open_without(rgw: RGW, spec: StoreSpec, action: str, prefixes: list[str]) -> Store:
    """Open a bucket with the rights to write below prefixes, but for one action of S3.

    Args:
        rgw: Server of the bucket.
        spec: Bucket.
        action: Action that is denied, such as ``s3:PutObject``; empty for none.
        prefixes: Prefixes of the keys in the bucket.
    """
    bucket = open_store(spec).location.bucket
    statements = make_session_policy(bucket, prefixes, Right.WRITE)["Statement"]
    for statement in statements:
        statement["Action"] = [one for one in statement["Action"] if one != action]
    key = rgw.assume_role(
        rgw.create_role(f"role-{secrets.token_hex(4)}"),
        *(one for one in statements if one["Action"]),
    )
    return open_store(spec.model_copy(update={"credentials": make_credentials(key)}))
