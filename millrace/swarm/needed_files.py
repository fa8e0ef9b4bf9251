"""Files that tasks and actors of Ray need: their node gets the files before they run.

One actor of the job copies the files to all nodes of the cluster. It runs on the node of the
driver, and the credentials stay there: other nodes get signed URLs. A task asks the actor for its
own node. The first task on a node that has joined has the actor copy the files again, and nodes
that have them only check them.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from millrace import cluster, errors
from millrace.digest import compute_digest, get_hex
from millrace.settings import load_settings
from millrace.swarm.actor import expand_variables
from millrace.swarm.driver import prewarm
from millrace.swarm.settings import PrewarmSettings, RayNodes

F = TypeVar("F", bound=Callable[..., Any])

_CREDENTIALS = ("AWS_", "GOOGLE_", "R2_")  # variables of the driver that the actor gets
_MAX_WAITING = 100  # calls of tasks that wait at once; further ones wait for these
_RESTARTS = 5  # of the actor, by Ray, with the calls that wait for it
_warmed: dict[str, Path] = {}  # roots of the files that this node has, by their names
_started: dict[str, Any] = {}  # actors by their names: Ray ends an actor without a handle


def needs_files(settings: PrewarmSettings | Path | str, *, name: str = "") -> "NeededFiles":
    """Return a decorator of tasks and actors of Ray whose node gets files before they run.

    It stands below `ray.remote`:

        @ray.remote
        @needs_files("prewarm.yaml")
        def evaluate(step): ...

    Args:
        settings: Settings of the prewarm, or the path of their file. A file is read when the first
            task is submitted, on the machine of the driver.
        name: Name of the files in this job; by default one that follows from the settings, or from
            the path. Decorators of one name share one run.

    Raises:
        ConfigurationError: The settings have hosts instead of a Ray cluster, or are no settings.
    """
    if callable(settings):  # the decorator stands without a call
        raise errors.ConfigurationError(
            '`needs_files` takes settings: write @needs_files("prewarm.yaml") below @ray.remote.'
        )
    return NeededFiles(settings, name=name)


class NeededFiles:
    """Decorator of tasks and actors of Ray whose node gets files before they run.

    See `needs_files`, which makes it.

    Attributes:
        name: Name of the files in a job.
    """

    def __init__(self, settings: PrewarmSettings | Path | str, *, name: str = "") -> None:
        if isinstance(settings, PrewarmSettings):
            _check_nodes(settings)
            text = settings.model_dump_json()  # without secrets
        else:
            text = str(settings)
        self._settings: PrewarmSettings | Path | str | None = settings
        self.name = name or get_hex(compute_digest(text.encode()))[:16]

    def __call__(self, target: F) -> F:
        """Return a function, or a class of actors, that waits for the files first.

        Raises:
            ConfigurationError: The decorator stands above `ray.remote`, or the function is async.
        """
        if hasattr(target, "remote") or hasattr(target, "__ray_metadata__"):
            raise errors.ConfigurationError(
                "`needs_files` stands above `ray.remote`: write @ray.remote in the line above it."
            )
        if inspect.iscoroutinefunction(target):
            raise errors.ConfigurationError(
                "A task of Ray is no async function: leave out `async`, or write an actor."
            )
        if inspect.isclass(target):
            cls: Any = target
            cls.__init__ = self._wrap(_make_python_init(cls))
            return cast("F", cls)
        return self._wrap(target)

    def start(self) -> None:
        """Start the actor that copies the files; it begins when a task asks.

        A driver that submits a function of a module calls this before, if the nodes do not have
        the settings file: Ray imports such a function on each node.

        Raises:
            ConfigurationError: This process is not connected to a Ray cluster, or the settings
                cannot be read.
        """
        self._start_actor(_import_connected())

    def warm(self) -> Path:
        """Wait until the node of this process has the files, and return their root.

        Raises:
            ConfigurationError: This process is no task of Ray, or the settings cannot be read.
            MillraceError: The files cannot be copied, as `prewarm` says.
            WorkerError: The node cannot get the files.
        """
        root = _warmed.get(self.name)
        if root is None:
            root = self._ask_actor()
        if not root.is_dir():
            root = self._ask_actor(is_gone=True)
        _warmed[self.name] = root
        return root

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the settings, which only the actor gets."""
        import ray  # noqa: PLC0415

        if ray.is_initialized():  # a task is submitted
            self._find_actor(ray)
            return {"name": self.name, "_settings": None}
        return self.__dict__.copy()

    def _wrap(self, call: F) -> F:
        if inspect.isgeneratorfunction(call):

            @functools.wraps(call)
            def iterate(*args: Any, **kwargs: Any) -> Any:
                self.warm()
                yield from call(*args, **kwargs)

            return cast("F", iterate)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.warm()
            return call(*args, **kwargs)

        return cast("F", run)

    def _ask_actor(self, *, is_gone: bool = False) -> Path:
        """Return the root of the files when this node has them.

        Args:
            is_gone: Whether the node had the files, and has them no more.
        """
        ray = _import_connected()
        node_id = ray.get_runtime_context().get_node_id()
        try:
            root = ray.get(self._find_actor(ray).warm.remote(node_id, is_gone=is_gone))
        except ray.exceptions.RayActorError as error:
            raise errors.WorkerError(
                f"The actor that copies the files of this task has died, also after {_RESTARTS} "
                "restarts: find the reason in the logs of Ray (NodeWarmer), and start the driver "
                "again."
            ) from error
        return expand_variables(root)

    def _find_actor(self, ray: Any) -> Any:
        try:
            return ray.get_actor(self._make_actor_name(ray), namespace=cluster.NAMESPACE)
        except ValueError:
            return self._start_actor(ray)

    def _start_actor(self, ray: Any) -> Any:
        node_id = ray.get_runtime_context().get_node_id()
        options: dict[str, Any] = {
            **cluster.make_node_options({"NodeID": node_id}),
            "name": self._make_actor_name(ray),
            "namespace": cluster.NAMESPACE,
            "get_if_exists": True,
            "max_concurrency": _MAX_WAITING,
            "max_restarts": _RESTARTS,
            "max_task_retries": _RESTARTS,
        }
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(_CREDENTIALS)
        }
        settings = self._load_settings()
        file = None if isinstance(self._settings, PrewarmSettings) else self._settings
        actor = (
            ray.remote(NodeWarmer)
            .options(**options)
            .remote(settings, environment, file and Path(file).absolute())
        )
        _started[options["name"]] = actor
        return actor

    def _make_actor_name(self, ray: Any) -> str:
        return f"millrace-files-{self.name}-{ray.get_runtime_context().get_job_id()}"

    def _load_settings(self) -> PrewarmSettings:
        if self._settings is None:
            raise errors.WorkerError(
                "The actor that copies the files of this task is gone, and only the driver has its "
                "settings: submit the task again."
            )
        if isinstance(self._settings, PrewarmSettings):
            return self._settings
        return _load_file(Path(self._settings).absolute())


class NodeWarmer:
    """Actor that copies files to all nodes of its cluster, one run at a time.

    Args:
        settings: Settings of the prewarm.
        environment: Variables of the driver with credentials for stores. Ray starts actors in the
            environment of their node.
        file: File of the settings. It is read again for a later run if it was changed.
    """

    def __init__(
        self, settings: PrewarmSettings, environment: Mapping[str, str], file: Path | None = None
    ) -> None:
        os.environ.update(environment)
        self._settings, self._lock = settings, threading.Lock()
        self._file = file
        self._changed: int | None = _find_change(file)
        self._reasons: dict[str, str] = {}  # by node; empty if the node has the files
        self._runs = 0  # that have ended
        self._error: Exception | None = None

    def warm(self, node_id: str, *, is_gone: bool = False) -> str:
        """Wait until a node has the files, and return the root of the settings.

        Args:
            node_id: Identity of the node in the cluster.
            is_gone: Whether the node had the files, and has them no more.

        Raises:
            MillraceError: The files cannot be copied, as `prewarm` says.
            WorkerError: The node cannot get the files.
        """
        seen = self._runs
        with self._lock:
            if is_gone and self._runs == seen:
                self._reasons.pop(node_id, None)
            if self._reasons.get(node_id) != "":
                if self._runs > seen and self._error is not None:
                    raise self._error  # of the run that this call has waited for
                if self._runs == seen or node_id not in self._reasons:
                    self._run()
            reason = self._reasons.get(node_id, "it was not in the cluster at the end of the run")
        if reason:
            raise errors.WorkerError(f"The node of the task did not get its files: {reason}.")
        return str(self._settings.root)

    def _run(self) -> None:
        self._error = None
        try:
            changed = _find_change(self._file)
            if self._file is not None and changed != self._changed:
                self._settings, self._changed = _load_file(self._file), changed
            report = prewarm(self._settings)
        except Exception as error:
            self._error = error
            raise
        finally:
            self._runs += 1
        self._reasons = {node.id: "" if node.ready else node.reason for node in report.nodes}


def _load_file(file: Path) -> PrewarmSettings:
    settings = load_settings(file, PrewarmSettings)
    _check_nodes(settings)
    return settings


def _find_change(file: Path | None) -> int | None:
    """Return the time in ns when a file was changed; None if there is none."""
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None


def _make_python_init(cls: Any) -> Callable[..., None]:
    """Return the ``__init__`` of a class as a function of Python, which Ray needs."""
    init = cls.__init__
    if inspect.isfunction(init):
        return init

    def run(actor: Any, *args: Any, **kwargs: Any) -> None:
        init(actor, *args, **kwargs)

    return run


def _check_nodes(settings: PrewarmSettings) -> None:
    if not isinstance(settings.nodes, RayNodes):
        raise errors.ConfigurationError(
            "The files of Ray tasks go to the nodes of their cluster: leave out `hosts`."
        )


def _import_connected() -> Any:
    """Return the module ``ray`` of a process that is connected to a cluster."""
    import ray  # noqa: PLC0415

    if not ray.is_initialized():
        raise errors.ConfigurationError(
            "Files are copied for tasks and actors of Ray: call `ray.init`, and submit the "
            "function with `.remote(...)`."
        )
    return ray
