"""Rules of R2 that refuse requests which other S3 servers accept, checked on the headers.

Source: Cloudflare R2 documentation, "S3 API compatibility" and "Error codes".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

MIB = 1 << 20
METADATA_LIMIT = 8192
REGIONS = frozenset({"", "auto", "us-east-1", "wnam", "enam", "weur", "eeur", "apac", "oc"})

REFUSED_HEADERS = (
    "x-amz-acl", "x-amz-grant-", "x-amz-tagging", "x-amz-object-lock-",
    "x-amz-bucket-object-lock-", "x-amz-bypass-governance-retention", "x-amz-website-redirect-",
    "x-amz-server-side-encryption-aws-kms-", "x-amz-server-side-encryption-context",
    "x-amz-server-side-encryption-bucket-key-",
)  # fmt: skip
REFUSED_SUBRESOURCES = frozenset(
    {
        "accelerate", "acl", "analytics", "attributes", "inventory", "legal-hold", "logging",
        "metrics", "notification", "object-lock", "ownershipControls", "policy", "policyStatus",
        "publicAccessBlock", "replication", "requestPayment", "restore", "retention", "select",
        "tagging", "torrent", "versionId", "versioning", "versions", "website",
    }
)  # fmt: skip
BUCKET_SUBRESOURCES = ("delete", "location", "uploads", "cors", "lifecycle", "encryption")
BUCKET_OPERATIONS = {
    ("HEAD", ""): "HeadBucket",
    ("GET", ""): "ListObjectsV1",
    ("PUT", ""): "CreateBucket",
    ("DELETE", ""): "DeleteBucket",
    ("POST", "delete"): "DeleteObjects",
    ("GET", "location"): "GetBucketLocation",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "cors"): "GetBucketCors",
    ("PUT", "cors"): "PutBucketCors",
    ("DELETE", "cors"): "DeleteBucketCors",
    ("GET", "lifecycle"): "GetBucketLifecycle",
    ("PUT", "lifecycle"): "PutBucketLifecycle",
    ("GET", "encryption"): "GetBucketEncryption",
}
OBJECT_OPERATIONS = {
    ("GET", ""): "GetObject",
    ("HEAD", ""): "HeadObject",
    ("PUT", ""): "PutObject",
    ("DELETE", ""): "DeleteObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("GET", "uploadId"): "ListParts",
    ("PUT", "uploadId"): "UploadPart",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
}
COUNTED_WRITES = frozenset({"PutObject", "CopyObject", "CompleteMultipartUpload"})


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that a test can change."""

    min_part: int = 5 * MIB
    """Smallest size of the parts of a multipart upload, except the last, in bytes."""
    write_interval: float = 1.0
    """Minimum seconds between two writes to one key; 0 means no limit."""
    checks_crc: bool = True
    """True to check, store and repeat ``x-amz-checksum-crc64nvme``; False to ignore it."""
    accepts_unsigned: bool = True
    """False to refuse UNSIGNED-PAYLOAD (403), as a policy of an S3 bucket can."""


class R2RefusedError(Exception):
    """A request is refused with an S3 error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class S3Operation:
    """S3 operation of a request."""

    name: str
    bucket: str
    key: str
    query: Mapping[str, str]


def find_operation(method: str, path: str, query: str, headers: Mapping[str, str]) -> S3Operation:
    """Return the operation of a path-style request."""
    bucket, _, key = unquote(path).removeprefix("/").partition("/")
    fields = dict(parse_qsl(query, keep_blank_values=True))
    if not bucket:
        name = "ListBuckets" if method == "GET" else "Unknown"
    elif not key:
        name = _name_bucket_operation(method, fields)
    else:
        name = _name_object_operation(method, fields, copies="x-amz-copy-source" in headers)
    return S3Operation(name, bucket, key, fields)


def check_head(
    asked: S3Operation, headers: Mapping[str, str], *, has_body: bool, region: str
) -> None:
    """Check the headers of a request by the rules that hold for all credentials.

    Raises:
        RefusedError: A rule refuses the request.
    """
    refused = [name for name in headers if name.lower().startswith(REFUSED_HEADERS)]
    refused += [name for name in asked.query if name in REFUSED_SUBRESOURCES]
    if "kms" in headers.get("x-amz-server-side-encryption", ""):
        refused.append("x-amz-server-side-encryption")
    if asked.name == "Unknown":
        refused.append("This operation")
    if refused:
        raise R2RefusedError(501, "NotImplemented", f"{refused[0]} is not implemented.")
    if (
        "aws-chunked" in headers.get("content-encoding", "")
        or headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        or "x-amz-trailer" in headers
    ):
        message = "STREAMING payloads and trailing checksums are not implemented."
        raise R2RefusedError(501, "NotImplemented", message)
    if region not in REGIONS:
        raise R2RefusedError(400, "InvalidRegionName", f"The region name '{region}' is not valid.")
    if has_body and "content-length" not in headers and "x-amz-copy-source" not in headers:
        raise R2RefusedError(411, "MissingContentLength", "Content-Length is required.")
    custom = [(name, headers[name]) for name in headers if name.lower().startswith("x-amz-meta-")]
    if sum(len(name) - len("x-amz-meta-") + len(value) for name, value in custom) > METADATA_LIMIT:
        raise R2RefusedError(400, "MetadataTooLarge", "Custom metadata exceeds 8,192 bytes.")


def check_payload(headers: Mapping[str, str], rules: Rules) -> None:
    """Check that a body is signed, if the rules require it.

    Raises:
        RefusedError: The body is not signed.
    """
    if headers.get("x-amz-content-sha256") == "UNSIGNED-PAYLOAD" and not rules.accepts_unsigned:
        raise R2RefusedError(403, "AccessDenied", "The body must be signed.")


def check_parts(sizes: Sequence[int], rules: Rules) -> None:
    """Check the sizes of the parts of a multipart upload.

    Args:
        sizes: Sizes of the parts in bytes, in order.
        rules: Rules with the smallest size.

    Raises:
        RefusedError: A part is too small, or parts have different sizes.
    """
    if not sizes:
        return
    *leading, last = sizes
    if any(size < rules.min_part for size in leading):
        message = "Your proposed upload is smaller than the minimum allowed object size."
        raise R2RefusedError(400, "EntityTooSmall", message)
    if len(set(leading)) > 1 or (leading and last > leading[0]):
        message = "All non-trailing parts must have the same length."
        raise R2RefusedError(400, "InvalidPart", message)


def _name_bucket_operation(method: str, query: Mapping[str, str]) -> str:
    if query.get("list-type") == "2" and method == "GET":
        return "ListObjectsV2"
    subresource = next((name for name in BUCKET_SUBRESOURCES if name in query), "")
    return BUCKET_OPERATIONS.get((method, subresource), "Unknown")


def _name_object_operation(method: str, query: Mapping[str, str], *, copies: bool) -> str:
    subresource = next((name for name in ("uploadId", "uploads") if name in query), "")
    if copies and method == "PUT":
        return "UploadPartCopy" if subresource else "CopyObject"
    return OBJECT_OPERATIONS.get((method, subresource), "Unknown")
