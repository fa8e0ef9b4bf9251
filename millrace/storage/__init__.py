"""Read, write, list and delete objects at a URL, over obstore. Each verb is a function."""

from millrace.storage.clients import make_boto3_client, open_filesystem
from millrace.storage.list import (
    list_fairly,
    list_folders,
    list_objects,
    list_sorted_keys,
    marks_folder,
)
from millrace.storage.locations import Backend, Location
from millrace.storage.open import Store, open_store
from millrace.storage.read import (
    Stat,
    describe_difference,
    exists,
    hash_damaged_file,
    hash_object,
    head,
    read,
    read_and_hash,
    read_range,
    read_views_and_hash,
    stream,
)
from millrace.storage.retry import call_boto3
from millrace.storage.scoped import Right, open_scoped_store, sign_url
from millrace.storage.signed import fetch_stored_sha256, is_etag_md5, matches_stored_checksum
from millrace.storage.spec import Credentials, StoreSettings, StoreSpec, read_spec_from_environment
from millrace.storage.versions import (
    ObjectVersion,
    VersionCount,
    count_versions,
    delete_versions,
    list_versions,
)
from millrace.storage.write import (
    LinkFinder,
    ObjectFailure,
    UnfinishedUpload,
    abort_upload,
    copy,
    create,
    delete,
    delete_one,
    list_uploads,
    measure_upload,
    put,
)
from millrace.storage.writer import open_writer

__all__ = [
    "Backend",
    "Credentials",
    "LinkFinder",
    "Location",
    "ObjectFailure",
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
    "hash_damaged_file",
    "hash_object",
    "head",
    "is_etag_md5",
    "list_fairly",
    "list_folders",
    "list_objects",
    "list_sorted_keys",
    "list_uploads",
    "list_versions",
    "make_boto3_client",
    "marks_folder",
    "matches_stored_checksum",
    "measure_upload",
    "open_filesystem",
    "open_scoped_store",
    "open_store",
    "open_writer",
    "put",
    "read",
    "read_and_hash",
    "read_range",
    "read_spec_from_environment",
    "read_views_and_hash",
    "sign_url",
    "stream",
]
