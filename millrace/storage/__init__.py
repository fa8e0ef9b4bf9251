"""Bytes at a URL: obstore with our defaults. One verb a function, one group of verbs a file."""

from millrace.storage.clients import make_boto3_client, open_filesystem
from millrace.storage.list import list_folders, list_objects
from millrace.storage.open import (
    Backend,
    Credentials,
    Location,
    Store,
    StoreSettings,
    StoreSpec,
    open_store,
    read_spec_from_environment,
)
from millrace.storage.read import (
    Stat,
    describe_difference,
    exists,
    head,
    read,
    read_into,
    read_range,
    stream,
)
from millrace.storage.retry import call_boto3
from millrace.storage.scoped import Right, open_scoped_store, sign_url
from millrace.storage.signed import fetch_stored_sha256, is_etag_md5
from millrace.storage.versions import (
    ObjectVersion,
    VersionCount,
    count_versions,
    delete_versions,
    list_versions,
)
from millrace.storage.write import (
    DeleteFailure,
    UnfinishedUpload,
    abort_upload,
    copy,
    create,
    delete,
    delete_one,
    list_uploads,
    measure_upload,
    open_writer,
    put,
)

__all__ = [
    "Backend",
    "Credentials",
    "DeleteFailure",
    "Location",
    "ObjectVersion",
    "Right",
    "Stat",
    "Store",
    "StoreSettings",
    "StoreSpec",
    "UnfinishedUpload",
    "VersionCount",
    "abort_upload",
    "call_boto3",
    "copy",
    "count_versions",
    "create",
    "delete",
    "delete_one",
    "delete_versions",
    "describe_difference",
    "exists",
    "fetch_stored_sha256",
    "head",
    "is_etag_md5",
    "list_folders",
    "list_objects",
    "list_uploads",
    "list_versions",
    "make_boto3_client",
    "measure_upload",
    "open_filesystem",
    "open_scoped_store",
    "open_store",
    "open_writer",
    "put",
    "read",
    "read_into",
    "read_range",
    "read_spec_from_environment",
    "sign_url",
    "stream",
]
