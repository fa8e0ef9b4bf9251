"""List all keys of an S3-compatible bucket unchanged.

obstore fails a whole page for one key with an empty segment, ``.``, ``..`` or a control character.
obstore also drops the slash at the end of a key. boto3 accepts every key, but its parser takes
0.1 ms per key. Therefore boto3 makes the request, and this module parses the body.

Source: "ListObjectsV2", Amazon S3 API reference.
"""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote_plus

import botocore.handlers
from obstore.exceptions import GenericError

from millrace.storage.answers import Stat
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.storage.foreign import compute_deadline, limit_requests
from millrace.storage.open import Store
from millrace.storage.retry import call_boto3

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_NOTHING = b"<ListBucketResult/>"
_CHUNK_SIZE = 16 << 10  # bytes that are parsed at once: some 40 keys


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
        _bypass_parsers(self._client)
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
        page = _Page()
        for element in _iterate_children(body):
            page.add(element)
        decode: Callable[[str], str] = (
            unquote_plus if page.texts.get("EncodingType") == "url" else str
        )
        objects = [self._make_stat(item, decode) for item in page.objects]
        folders = [decode(folder).removeprefix(self._root) for folder in page.folders]
        is_last = page.texts.get("IsTruncated") != "true"
        token = "" if is_last else page.texts.get("NextContinuationToken", "")
        if not (is_last or token):
            raise ValueError("the page is not the last one, but has no token of the next page")
        return objects, folders, token

    def _make_stat(self, item: Mapping[str, str], decode: Callable[[str], str]) -> Stat:
        size, modified = int(item["Size"]), datetime.fromisoformat(item["LastModified"])
        if size < 0 or modified.tzinfo is None:
            raise ValueError(f"{size} bytes, last modified at {item['LastModified']}")
        return Stat(decode(item["Key"]).removeprefix(self._root), size, item.get("ETag"), modified)


class _Page:
    """Texts of a page.

    Attributes:
        objects: Texts of the children of each ``Contents``, by their names.
        folders: Grouped prefixes.
        texts: Texts of the other children, by their names.
    """

    def __init__(self) -> None:
        self.objects: list[dict[str, str]] = []
        self.folders: list[str] = []
        self.texts: dict[str, str] = {}

    def add(self, element: "ET.Element") -> None:
        """Add a child of the page."""
        name = _get_name(element)
        if name == "Contents":
            self.objects.append({_get_name(child): child.text or "" for child in element})
        elif name == "CommonPrefixes":
            self.folders += [child.text or "" for child in element if _get_name(child) == "Prefix"]
        else:
            self.texts[name] = element.text or ""


def _iterate_children(body: bytes) -> Iterator["ET.Element"]:
    """Yield the children of the root of a page.

    Only few are in memory at once. A tree of the whole page would start Python's garbage collector
    some ten times, which takes more time than the parser.

    Raises:
        ParseError, ValueError: The body is not a page of a listing.
    """
    parser = cast("Any", ET.XMLPullParser(["start", "end"]))  # as safe as that of botocore
    root, depth = None, 0
    for first in range(0, len(body), _CHUNK_SIZE):
        parser.feed(body[first : first + _CHUNK_SIZE])
        for event, element in cast("Iterator[tuple[str, ET.Element]]", parser.read_events()):
            depth += 1 if event == "start" else -1
            if root is None:
                root = element
                if _get_name(root) != "ListBucketResult":
                    name = root.tag[:100]
                    raise ValueError(f"the answer is a <{name}>, not a <ListBucketResult>")
            elif event == "end" and depth == 1:
                yield element
                root.clear()
    parser.close()
    if depth or root is None:
        raise ValueError("the answer was cut off")


def _get_name(element: "ET.Element") -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def _bypass_parsers(client: "S3Client") -> None:
    """Hide the bodies of successful answers from the two parsers of botocore."""
    events, handlers = client.meta.events, cast("Any", botocore.handlers)
    # It looks for errors in successful answers, as `ExactListing` does itself.
    events.unregister("before-parse.s3.*", getattr(handlers, "_handle_200_error", None))
    events.register("before-parse.s3.ListObjectsV2", _hide_body)


def _hide_body(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    if response_dict["status_code"] == 200:
        customized_response_dict["Body"] = response_dict["body"]
        response_dict["body"] = _NOTHING
