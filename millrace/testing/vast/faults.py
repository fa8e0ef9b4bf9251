"""Faults that the server injects, and errors that it answers."""

from typing import Any

CONTROL = "/-/"
"""Prefix of the paths that only `VastServer` requests."""
INTERVALS = {"create": 4.5, "destroy": 3.0, "list": 1.0, "search": 6.0, "show": 2.0, "label": 1.0}
REFUSALS: dict[str, tuple[int, Any]] = {
    "error500": (500, {"success": False, "error": "internal", "msg": "oops"}),
    "error502": (502, "<html>Bad Gateway</html>"),
    "text429": (429, "API requests too frequent endpoint threshold=4.5"),
    "json429": (429, {"detail": "Too many requests"}),
    "not found": (404, {"success": False, "error": "not_found", "msg": "no such page"}),
    "no credit": (400, {"success": False, "error": "insufficient_credit", "msg": "add credit"}),
    "empty": (200, {}),
    "forbidden": (403, {"success": False, "error": "forbidden", "msg": "the key lacks a right"}),
    "retired": (410, {"success": False, "error": "deprecated_endpoint", "msg": "use another"}),
    "quota": (429, {"success": False, "error": "search_quota_exceeded", "msg": "daily"}),
}
LISTS: dict[str, Any] = {  # answers to a listing of instances, with status 200
    "unsuccessful list": {
        "success": False, "error": "db", "msg": "timeout", "instances": [], "total_instances": 0,
    },
    "null list": {"success": True, "instances": None, "total_instances": 0},
    "no list": {"success": True, "total_instances": 0},
    "object list": {"success": True, "instances": {}, "total_instances": 0},
    "bare list": [],
}  # fmt: skip
FAULTS = {
    *REFUSALS, *LISTS, "lost", "lost, listed late", "cut", "slow", "trickle", "refused", "part",
    "gone", "low bid", "low bid, 400",
}  # fmt: skip


class VastRefusedError(Exception):
    """A request is answered with an error.

    Args:
        status: Status of the answer.
        body: Body of the answer, as text or as JSON.
    """

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def make_refusal(status: int, code: str, said: str) -> VastRefusedError:
    """Return an error with a body in the form of the API."""
    return VastRefusedError(status, {"success": False, "error": code, "msg": said})
