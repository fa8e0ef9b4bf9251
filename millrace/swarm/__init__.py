"""Warm every node of a cluster with the same files, with one copy out of the store."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.swarm.drive import NodeReport, Preview, PrewarmReport, preview, prewarm
    from millrace.swarm.made import CacheCheck
    from millrace.swarm.settings import (
        Host,
        Hosts,
        LimitSettings,
        PrewarmSettings,
        RayNodes,
        Request,
    )
    from millrace.swarm.unpack import Unpacking
    from millrace.swarm.waiting import ready

__all__ = [
    "CacheCheck",
    "Host",
    "Hosts",
    "LimitSettings",
    "NodeReport",
    "Preview",
    "PrewarmReport",
    "PrewarmSettings",
    "RayNodes",
    "Request",
    "Unpacking",
    "preview",
    "prewarm",
    "ready",
]

_ROOMS = {
    "CacheCheck": "made",
    "NodeReport": "drive",
    "PrewarmReport": "drive",
    "Preview": "drive",
    "Unpacking": "unpack",
    "preview": "drive",
    "prewarm": "drive",
    "ready": "waiting",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: an agent needs neither the settings nor a store.
    if name in __all__:
        from importlib import import_module  # noqa: PLC0415

        return getattr(import_module(f"millrace.swarm.{_ROOMS.get(name, 'settings')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
