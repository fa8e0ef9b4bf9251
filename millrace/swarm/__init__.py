"""Copy the same files to every node of a cluster, reading each byte from the store once."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.swarm.archives.unpack import Unpacking
    from millrace.swarm.cache_index import CacheCheck
    from millrace.swarm.driver import prewarm
    from millrace.swarm.driving.reports import NodeReport, PrewarmReport
    from millrace.swarm.needed_files import NeededFiles, needs_files
    from millrace.swarm.previews import Preview, preview
    from millrace.swarm.settings import (
        Host,
        Hosts,
        LimitSettings,
        PrewarmOptions,
        PrewarmSettings,
        RayNodes,
        Request,
    )
    from millrace.swarm.waiting import wait_for_path

__all__ = [
    "CacheCheck",
    "Host",
    "Hosts",
    "LimitSettings",
    "NeededFiles",
    "NodeReport",
    "Preview",
    "PrewarmOptions",
    "PrewarmReport",
    "PrewarmSettings",
    "RayNodes",
    "Request",
    "Unpacking",
    "needs_files",
    "preview",
    "prewarm",
    "wait_for_path",
]

_MODULES = {
    "CacheCheck": "cache_index",
    "NeededFiles": "needed_files",
    "NodeReport": "driving.reports",
    "PrewarmReport": "driving.reports",
    "Preview": "previews",
    "Unpacking": "archives.unpack",
    "needs_files": "needed_files",
    "preview": "previews",
    "prewarm": "driver",
    "wait_for_path": "waiting",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: an agent needs neither the settings nor a store.
    if name in __all__:
        from importlib import import_module  # noqa: PLC0415

        return getattr(import_module(f"millrace.swarm.{_MODULES.get(name, 'settings')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
