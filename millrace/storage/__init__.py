"""Bytes at a URL: obstore with our defaults. One verb a function, one group of verbs a file."""

from millrace.storage.check import Answer, answer_of, check
from millrace.storage.clients import boto3_client, filesystem
from millrace.storage.list import list_folders, list_objects
from millrace.storage.open import (
    Backend,
    Credentials,
    Location,
    Store,
    StoreSettings,
    StoreSpec,
    from_environment,
    open_store,
)
from millrace.storage.read import (
    Stat,
    difference,
    exists,
    head,
    read,
    read_into,
    read_range,
    stream,
)
from millrace.storage.retry import with_boto3
from millrace.storage.scoped import Right, scoped, signed_url
from millrace.storage.signed import etag_is_md5, kept_sha256
from millrace.storage.versions import (
    Version,
    VersionCount,
    count_versions,
    delete_versions,
    list_versions,
)
from millrace.storage.write import (
    DeleteFailure,
    Upload,
    abort_stale_uploads,
    abort_upload,
    copy,
    create,
    delete,
    delete_one,
    list_uploads,
    open_writer,
    put,
    uploaded,
)

__all__ = [
    "Answer",
    "Backend",
    "Credentials",
    "DeleteFailure",
    "Location",
    "Right",
    "Stat",
    "Store",
    "StoreSettings",
    "StoreSpec",
    "Upload",
    "Version",
    "VersionCount",
    "abort_stale_uploads",
    "abort_upload",
    "answer_of",
    "boto3_client",
    "check",
    "copy",
    "count_versions",
    "create",
    "delete",
    "delete_one",
    "delete_versions",
    "difference",
    "etag_is_md5",
    "exists",
    "filesystem",
    "from_environment",
    "head",
    "kept_sha256",
    "list_folders",
    "list_objects",
    "list_uploads",
    "list_versions",
    "open_store",
    "open_writer",
    "put",
    "read",
    "read_into",
    "read_range",
    "scoped",
    "signed_url",
    "stream",
    "uploaded",
    "with_boto3",
]
