"""List all keys of an S3-compatible bucket unchanged.

obstore fails a whole page for one key with an empty segment, ``.``, ``..`` or a control character.
obstore also drops the slash at the end of a key. boto3 accepts every key, but its parser takes
0.1 ms per key. Therefore boto3 makes the request, and this module parses the body.

Source: "ListObjectsV2", Amazon S3 API reference.
"""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

from obstore.exceptions import GenericError

from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.foreign import compute_deadline, limit_requests
from millrace.storage.open import Store
from millrace.storage.read import Stat
from millrace.storage.retry import call_boto3

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_NOTHING = b"<ListBucketResult/>"


class ExactListing:
    """Pages of a listing with unchanged keys. One request per page of 1,000 keys.

    A foreign store has the time budget of one request for all pages, since they may not end.

    Args:
        store: Store that is compatible with S3.
        prefix: Text that the keys start with.
        after: Key after which the listing begins.
        delimiter: Character that groups keys which have it after the prefix.
    """

    def __init__(self, store: Store, prefix: str, after: str = "", delimiter: str = "") -> None:
        self._store, self._prefix = store, prefix
        self._root = make_full_key(store, "")
        self._deadline = compute_deadline(store)
        self._client = make_boto3_client(store, max_attempts=1, deadline=self._deadline)
        self._client.meta.events.register("before-parse.s3.ListObjectsV2", _bypass_parser)
        self._parameters: dict[str, Any] = {
            "Bucket": store.location.bucket,
            "Prefix": self._root + prefix,
            "EncodingType": "url",
        }
        if after:
            self._parameters["StartAfter"] = self._root + after
        if delimiter:
            self._parameters["Delimiter"] = delimiter

    def fetch_page(self) -> tuple[list[Stat], list[str], bool]:
        """Return the next page: objects, grouped prefixes, and whether there are more pages.

        Raises:
            MillraceError: The request failed, with the errors of `call_boto3`.
            UnavailableError: The listing of a foreign store takes too long.
        """

        def fetch(client: "S3Client") -> tuple[list[Stat], list[str], str]:
            try:
                answer: Any = client.list_objects_v2(**self._parameters)
                return self._parse_page(answer["Body"])
            except (ET.ParseError, KeyError, ValueError) as error:
                # The answer was cut off, or is not a listing. The page is requested again.
                raise GenericError(f"{type(error).__name__}: {error}") from error

        with limit_requests(self._store, self._deadline):
            objects, folders, token = call_boto3(
                self._store, self._prefix, fetch, client=self._client
            )
        self._parameters["ContinuationToken"] = token
        return objects, folders, bool(token)

    def _parse_page(self, body: bytes) -> tuple[list[Stat], list[str], str]:
        """Return objects, grouped prefixes, and the token of the next page, if there is one.

        Raises:
            ParseError, KeyError, ValueError: The body is not a page of a listing.
        """
        page = ET.fromstring(body)  # noqa: S314 - as botocore itself does
        space = page.tag.rpartition("}")[0] + "}" if "}" in page.tag else ""
        if page.tag != f"{space}ListBucketResult":
            raise ValueError(f"the answer is a <{page.tag[:100]}>, not a <ListBucketResult>")
        encoded = page.findtext(f"{space}EncodingType") == "url"
        decode: Callable[[str], str] = unquote_plus if encoded else str
        objects = [self._parse_stat(item, space, decode) for item in page.iter(f"{space}Contents")]
        folders = [
            decode(item.findtext(f"{space}Prefix") or "").removeprefix(self._root)
            for item in page.iter(f"{space}CommonPrefixes")
        ]
        is_last = page.findtext(f"{space}IsTruncated") != "true"
        token = "" if is_last else page.findtext(f"{space}NextContinuationToken") or ""
        if not (is_last or token):
            raise ValueError("the page is not the last one, but has no token of the next page")
        return objects, folders, token

    def _parse_stat(self, item: "ET.Element", space: str, decode: Callable[[str], str]) -> Stat:
        found = {child.tag.removeprefix(space): child.text or "" for child in item}
        size, modified = int(found["Size"]), datetime.fromisoformat(found["LastModified"])
        if size < 0 or modified.tzinfo is None:
            raise ValueError(f"{size} bytes, last modified at {found['LastModified']}")
        key = decode(found["Key"]).removeprefix(self._root)
        return Stat(key, size, found.get("ETag"), modified)


def _bypass_parser(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Hide the body of a successful answer from botocore's parser."""
    if response_dict["status_code"] == 200:
        customized_response_dict["Body"] = response_dict["body"]
        response_dict["body"] = _NOTHING
