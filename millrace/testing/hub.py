"""Stand-in of the Hugging Face Hub: the part of its HTTP API that commits and reads files.

The server is a separate process on 127.0.0.1. It keeps repositories of models and datasets in
memory, with branches, commits (``parentCommit``), trees, uploads by Git LFS (checked by SHA-256)
and downloads by range. A ``.gitignore`` has the names of files that clients do not upload. There
are two tokens: `WRITER` can write, `READER` can only read. Source: the requests of the package
``huggingface_hub``, and "Hub API Endpoints" of the Hub's documentation.

``huggingface_hub`` transfers large files by Xet if it can. This server issues the tokens, and names
a folder of the repository as the storage (``local://``). The package ``hf_xet`` of the client
writes and reads that folder. A commit finds its files in the shards of the folder, as the Hub does.
Files uploaded by Xet can be read by Xet only: there is no bridge to Git LFS.
"""

import argparse
import asyncio
import base64
import contextlib
import fnmatch
import hashlib
import itertools
import json
import re
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from aiohttp import web

from millrace.testing.faults import Fault, FaultBox, Faults
from millrace.testing.process import Child, ask, start_module

WRITER, READER = "hf_writer", "hf_reader"
CONTROL = "/-/"
LFS_FROM = 10 << 20  # smallest size in bytes of a file of any name that LFS stores
CUT = 0  # status of a fault that closes the connection in the middle of the answer
_STATUSES = {Fault.ERROR500: 500, Fault.ERROR503: 503, Fault.ERROR429: 429}


class HubServer:
    """Running server, started by `HubServer.start`. As a context manager, it stops at the exit.

    Attributes:
        endpoint: URL of the server, ``http://127.0.0.1:PORT``.
    """

    def __init__(self, child: Child, port: int) -> None:
        """Represent a server that is already running. Use `start` to start one."""
        self.endpoint = f"http://127.0.0.1:{port}"
        self._child = child
        self._names = itertools.count()

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Start a server, and return when it accepts requests."""
        folder.mkdir(parents=True, exist_ok=True)
        xet = folder / "xet"
        child = start_module("millrace.testing.hub", str(xet), log=folder / "hub.log")
        return cls(child, child.read_announcement()["port"])

    def make_repo(self, *, dataset: bool = False) -> str:
        """Create a repository with one commit, and return its name.

        Args:
            dataset: Whether the repository is a dataset; by default it is a model.
        """
        name = f"person/repo-{next(self._names)}"
        self._ask("repo", {"name": "datasets/" * dataset + name})
        return name

    def fail_next(
        self,
        count: int,
        status: int,
        path: str = ".*",
        *,
        after: bool = False,
        retry_after: int | None = None,
        skip: int = 0,
    ) -> None:
        """Fail the next requests with a matching path.

        Args:
            count: Number of requests; 0 removes all errors that have not fired.
            status: Status of the error.
            path: Regular expression that matches the whole path.
            after: Whether the request is carried out before the error, as if the answer was lost.
            retry_after: Header ``Retry-After`` in seconds; None for no header.
            skip: Number of matching requests that succeed before the first error.
        """
        self._ask(
            "fail",
            {
                "count": count, "status": status, "path": path, "after": after,
                "retry_after": retry_after, "skip": skip,
            },
        )  # fmt: skip

    def cut_next(self, count: int, path: str = ".*") -> None:
        """Close the connection midway through the next answers to requests with a matching path.

        Args:
            count: Number of answers.
            path: Regular expression that matches the whole path.
        """
        self._ask("fail", {"count": count, "status": CUT, "path": path, "after": True})

    def set_faults(self, faults: Faults) -> None:
        """Inject random faults into reads, with a generator that starts from their seed."""
        self._ask("faults", asdict(faults))

    def count_fired(self) -> dict[str, int]:
        """Return the number of faults of `set_faults` of each kind that fired."""
        return self._ask("fired", {})

    def gate(self, repo: str) -> None:
        """Gate a dataset: refuse all requests, as before the acceptance of its conditions."""
        self._ask("gate", {"repo": f"datasets/{repo}"})

    def count_commits(self, repo: str, branch: str = "main") -> int:
        """Return the number of commits of a branch."""
        return self._ask("commits", {"repo": repo, "branch": branch})["count"]

    def list_branches(self, repo: str) -> list[str]:
        """Return the names of the branches of a repository."""
        return self._ask("branches", {"repo": repo})["names"]

    def count_unfired(self) -> int:
        """Return the number of errors of `fail_next` that have not fired."""
        return self._ask("unfired", {})["count"]

    def count_uploads(self, repo: str) -> int:
        """Return the number of files uploaded by LFS, and of uploads by Xet, to a repository."""
        return self._ask("uploads", {"repo": repo})["count"]

    def count_sent_bytes(self, repo: str) -> int:
        """Return the number of bytes sent from the files of a repository."""
        return self._ask("sent", {"repo": repo})["count"]

    def flip(self, repo: str, path: str) -> None:
        """Flip a bit of a file that LFS or Xet stores."""
        self._ask("flip", {"repo": repo, "path": path})

    def move_xet(self, repo: str, url: str) -> None:
        """Set the URL of the Xet storage of a repository."""
        self._ask("move", {"repo": repo, "url": url})

    def commit_behind(self, repo: str) -> None:
        """Insert a commit of another client right before the next commit."""
        self._ask("behind", {"repo": repo})

    def _ask(self, verb: str, body: dict[str, Any]) -> Any:
        return ask(f"{self.endpoint}{CONTROL}{verb}", body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()


@dataclass(frozen=True)
class _XetFile:
    """File in a Xet storage.

    Attributes:
        digest: SHA-256 of the bytes.
        name: Name of the file in the storage: the root of a Merkle tree.
        size: Size in bytes.
        xorbs: Names of the objects with the chunks.
    """

    digest: str
    name: str
    size: int
    xorbs: tuple[str, ...]


def _read_shard(shard: bytes) -> Iterator[_XetFile]:
    """Yield the files of a shard. Source: "Shard Format" of the specification of Xet.

    A shard has a header of 48 bytes, and rows of 48 bytes for each file: a row for the file, a row
    for each range of chunks, the same number of rows with digests of the ranges if a flag is set,
    and a row with the SHA-256 if another flag is set. A row of ones ends the list.
    """
    rows = iter(struct.iter_unpack("<4QIIII", shard[48 : len(shard) // 48 * 48]))
    for *words, flags, count, _, _ in rows:
        if words == [2**64 - 1] * 4:
            return
        ranges = list(itertools.islice(rows, count))
        if flags & 1 << 31:
            list(itertools.islice(rows, count))
        digest = next(rows)[:4] if flags & 1 << 30 else ()
        yield _XetFile(
            _format_hash(digest),
            _format_hash(words),
            sum(each[5] for each in ranges),
            tuple(_format_hash(each[:4]) for each in ranges),
        )


def _format_hash(words: Iterable[int]) -> str:
    return "".join(f"{word:016x}" for word in words)


@dataclass(frozen=True)
class _File:
    """File of a commit.

    Attributes:
        content: Bytes of the file; empty for a file of Xet.
        lfs: SHA-256 of a file that LFS or Xet stores; None for other files.
        xet: File in the Xet storage; None for other files.
    """

    content: bytes
    lfs: str | None = None
    xet: _XetFile | None = None

    @property
    def size(self) -> int:
        return self.xet.size if self.xet else len(self.content)

    @property
    def oid(self) -> str:
        header = f"blob {len(self.content)}\0".encode()
        return hashlib.sha1(header + self.content).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": self.size,
            "oid": self.oid,
        }
        if self.lfs:
            entry["lfs"] = {"oid": self.lfs, "size": self.size, "pointerSize": 134}
        if self.xet:
            entry["xetHash"] = self.xet.name
        return entry


@dataclass(frozen=True)
class _Commit:
    sha: str
    files: dict[str, _File]


@dataclass
class _Repo:
    branches: dict[str, list[_Commit]]
    xet: Path
    xet_url: str
    kept: dict[str, bytes] = field(default_factory=dict[str, bytes])
    uploads: int = 0
    sent: int = 0
    behind: bool = False
    is_gated: bool = False

    def at(self, revision: str) -> _Commit:
        if revision in self.branches:
            return self.branches[revision][-1]
        for commits in self.branches.values():
            for commit in commits:
                if commit.sha == revision:
                    return commit
        raise _make_error(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def find_xet(self, digest: str) -> _XetFile | None:
        """Return the file with a SHA-256 from the Xet storage, or None."""
        files = itertools.chain.from_iterable(
            _read_shard(shard.read_bytes()) for shard in self.xet.glob("xet/xorbs/shards/*.mdb")
        )
        return next((file for file in files if file.digest == digest), None)

    def commit(self, branch: str, files: dict[str, _File]) -> _Commit:
        commits = self.branches[branch]
        names = "".join(f"{path}{file.oid}" for path, file in sorted(files.items()))
        sha = hashlib.sha1(f"{commits[-1].sha}{names}{len(commits)}".encode()).hexdigest()
        commits.append(_Commit(sha, files))
        return commits[-1]


def _make_error(status: int, code: str, message: str) -> web.HTTPException:
    kinds = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 403: web.HTTPForbidden}
    kinds |= {404: web.HTTPNotFound, 409: web.HTTPConflict, 412: web.HTTPPreconditionFailed}
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return kinds[status](
        headers=headers, text=json.dumps({"error": message}), content_type="application/json"
    )


@dataclass
class _Failing:
    count: int
    status: int
    path: str
    after: bool
    retry_after: int | None = None
    skip: int = 0


@dataclass
class _HubApplication:
    xet: Path
    repos: dict[str, _Repo] = field(default_factory=dict[str, _Repo])
    failing: list[_Failing] = field(default_factory=list[_Failing])
    box: FaultBox = field(default_factory=FaultBox)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._inject_failures])
        repo = "{owner:[^/]+}/{name:[^/]+}"
        api = f"/api/{{kind:models|datasets}}/{repo}"
        routes = [
            web.post(CONTROL + "{verb}", self.control),
            web.post("/api/validate-yaml", self.validate_card),
            web.get(api, self.info),
            web.get(f"{api}/revision/{{revision}}", self.info),
            web.post(f"{api}/paths-info/{{revision}}", self.describe_paths),
            web.post(f"{api}/super-squash/{{revision}}", self.squash),
            web.get(f"{api}/tree/{{revision}}", self.tree),
            web.get(f"{api}/tree/{{revision}}/{{path:.*}}", self.tree),
            web.post(f"{api}/preupload/{{revision}}", self.preupload),
            web.post(f"{api}/commit/{{revision}}", self.commit),
            web.post(f"{api}/branch/{{branch}}", self.make_branch),
            web.delete(f"{api}/branch/{{branch}}", self.delete_branch),
            web.get(f"{api}/xet-write-token/{{revision}}", self.write_by_xet),
            web.get(f"{api}/xet-read-token/{{revision}}", self.read_by_xet),
        ]
        for page in (f"/{{kind:datasets}}/{repo}", f"/{repo}"):
            routes += [
                web.post(f"{page}.git/info/lfs/objects/batch", self.batch),
                web.put(f"/lfs{page}/{{oid}}", self.upload),
                web.get(f"{page}/resolve/{{revision}}/{{path:.*}}", self.resolve),
            ]
        app.add_routes(routes)
        return app

    @web.middleware
    async def _inject_failures(self, request: web.Request, handler: Any) -> web.StreamResponse:
        for failing in self.failing:
            meant = failing.count and not request.path.startswith(CONTROL)
            if meant and re.fullmatch(failing.path, request.path):
                if failing.skip:
                    failing.skip -= 1
                    continue
                failing.count -= 1
                answer = None
                if failing.after:
                    with contextlib.suppress(web.HTTPException):
                        answer = await handler(request)
                await request.read()
                if failing.status == CUT:
                    return await _cut(request, answer, sent=0.5)
                return _make_failure(failing.status, failing.retry_after)
        if request.path.startswith(CONTROL):
            return await handler(request)
        return await self._inject_faults(request, handler)

    async def _inject_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer a request, with a fault if `HubServer.set_faults` chooses one."""
        possible = (
            set(Fault) - {Fault.DAMAGE} if request.method in {"GET", "HEAD"} else set[Fault]()
        )
        plan = self.box.choose(request.method, "", request.path, possible)
        if plan is None:
            return await handler(request)
        self.box.fire(plan)
        if status := _STATUSES.get(plan.kind):
            return _make_failure(status, plan.retry_after)
        if plan.kind is Fault.STALL:
            await asyncio.sleep(plan.stall_seconds)
        answer = None
        with contextlib.suppress(web.HTTPException):
            answer = await handler(request)
        return await _cut(request, answer, sent=0.5 if plan.kind is Fault.CUT else 0.0)

    # -- API of clients

    def _find_repo(self, request: web.Request, *, write: bool = False) -> _Repo:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in {WRITER, READER}:
            raise _make_error(401, "", "Invalid credentials in Authorization header")
        repo = self.repos.get(_read_name(request))
        if repo is None:
            raise _make_error(404, "RepoNotFound", "Repository not found")
        if repo.is_gated:
            raise _make_error(403, "GatedRepo", "Access to this dataset is restricted")
        if write and token != WRITER:
            raise _make_error(403, "", "You have read access but not the required permissions")
        return repo

    async def info(self, request: web.Request) -> web.Response:
        commit = self._find_repo(request).at(unquote(request.match_info.get("revision", "main")))
        name = _read_name(request)
        return web.json_response({"id": name, "modelId": name, "sha": commit.sha, "siblings": []})

    async def validate_card(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"errors": [], "warnings": []})

    async def tree(self, request: web.Request) -> web.Response:
        commit = self._find_repo(request).at(unquote(request.match_info["revision"]))
        path = request.match_info.get("path", "")
        prefix = f"{path}/" if path else ""
        below = {name: file for name, file in commit.files.items() if name.startswith(prefix)}
        if prefix and not below:
            raise _make_error(404, "EntryNotFound", f"{path} does not exist on this revision")
        deep = request.query.get("recursive", "").lower() in {"true", "1"}
        entries: dict[str, dict[str, Any]] = {}
        for name, file in sorted(below.items()):
            head, slash, _ = name.removeprefix(prefix).partition("/")
            if slash and not deep:
                folder = prefix + head
                entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
            else:
                entries[name] = file.entry(name)
        return web.json_response(list(entries.values()))

    async def describe_paths(self, request: web.Request) -> web.Response:
        commit = self._find_repo(request).at(unquote(request.match_info["revision"]))
        if request.content_type == "application/json":
            paths = (await request.json())["paths"]
        else:
            paths = map(str, (await request.post()).getall("paths", []))
        entries: list[dict[str, Any]] = []
        for path in paths:
            if path in commit.files:
                entries.append(commit.files[path].entry(path))
            elif any(name.startswith(f"{path}/") for name in commit.files):
                entries.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        return web.json_response(entries)

    async def squash(self, request: web.Request) -> web.Response:
        """Replace the commits of a branch by one commit. The old commits are deleted."""
        repo, branch = self._find_repo(request, write=True), unquote(request.match_info["revision"])
        files = repo.at(branch).files
        repo.commit(branch, files)
        repo.branches[branch] = repo.branches[branch][-1:]
        return web.json_response({})

    async def preupload(self, request: web.Request) -> web.Response:
        repo, body = self._find_repo(request, write=True), await request.json()
        here = repo.at(unquote(request.match_info["revision"])).files.get(".gitignore")
        rules = body.get("gitIgnore") or (here.content.decode() if here else "")
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if _is_stored_by_lfs(one["path"], one["size"]) else "regular",
                "shouldIgnore": _is_ignored(one["path"], rules),
            }
            for one in body["files"]
        ]
        return web.json_response({"files": files})

    async def batch(self, request: web.Request) -> web.Response:
        repo = self._find_repo(request, write=True)
        name = _read_name(request)
        objects: list[dict[str, Any]] = []
        for one in (await request.json())["objects"]:
            entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in repo.kept:
                href = f"http://{request.host}/lfs/{name}/{one['oid']}"
                entry["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(entry)
        return web.json_response({"transfer": "basic", "objects": objects})

    async def upload(self, request: web.Request) -> web.Response:
        repo = self.repos[_read_name(request)]
        body = await request.read()
        if hashlib.sha256(body).hexdigest() != request.match_info["oid"]:
            raise _make_error(400, "", "These bytes have another SHA-256")
        repo.kept[request.match_info["oid"]] = body
        repo.uploads += 1
        return web.Response()

    async def write_by_xet(self, request: web.Request) -> web.Response:
        repo = self._find_repo(request, write=True)
        repo.uploads += 1
        return self._issue_xet_token(repo, 3600)

    async def read_by_xet(self, request: web.Request) -> web.Response:
        # hf_xet reuses no token with such a short lifetime.
        return self._issue_xet_token(self._find_repo(request), 30)

    def _issue_xet_token(self, repo: _Repo, seconds: int) -> web.Response:
        expiry = int(time.time()) + seconds
        headers = {
            "X-Xet-Cas-Url": repo.xet_url,
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": str(expiry),
        }
        body = {"casUrl": repo.xet_url, "accessToken": "xet", "exp": expiry}
        return web.json_response(body, headers=headers)

    async def commit(self, request: web.Request) -> web.Response:
        repo, branch = self._find_repo(request, write=True), unquote(request.match_info["revision"])
        lines = [json.loads(line) for line in (await request.read()).splitlines()]
        head = repo.at(branch)
        if repo.behind:
            repo.behind = False
            head = repo.commit(branch, {**head.files, "README.md": _File(b"somebody else's")})
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != head.sha:
            raise _make_error(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = _File(base64.b64decode(value["content"]))
                case "lfsFile":
                    if value["oid"] in repo.kept:
                        files[value["path"]] = _File(repo.kept[value["oid"]], value["oid"])
                    elif xet := repo.find_xet(value["oid"]):
                        files[value["path"]] = _File(b"", value["oid"], xet)
                    else:
                        raise _make_error(400, "", f"LFS has no {value['oid']}")
                case "deletedFile":
                    if files.pop(value["path"], None) is None:
                        raise _make_error(404, "EntryNotFound", f"There is no {value['path']}")
                case other:
                    raise _make_error(400, "", f"{other} is not understood here")
        made = repo.commit(branch, files)
        name = _read_name(request)
        url = f"http://{request.host}/{name}/commit/{made.sha}"
        return web.json_response({"success": True, "commitOid": made.sha, "commitUrl": url})

    async def make_branch(self, request: web.Request) -> web.Response:
        repo, branch = self._find_repo(request, write=True), unquote(request.match_info["branch"])
        if branch in repo.branches:
            raise _make_error(409, "", "It exists")
        start = (await request.json()).get("startingPoint", "main")
        repo.branches[branch] = [repo.at(start)]
        return web.json_response({})

    async def delete_branch(self, request: web.Request) -> web.Response:
        repo, branch = self._find_repo(request, write=True), unquote(request.match_info["branch"])
        if repo.branches.pop(branch, None) is None:
            raise _make_error(404, "RevisionNotFound", "No such branch")
        return web.json_response({})

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        repo = self._find_repo(request)
        commit = repo.at(unquote(request.match_info["revision"]))
        path = unquote(request.match_info["path"])
        file = commit.files.get(path)
        if file is None:
            raise _make_error(404, "EntryNotFound", f"{path} does not exist on this revision")
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{file.oid}"', "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{file.lfs}"', "X-Linked-Size": str(file.size)}
        if file.xet:
            name = _read_name(request)
            route = f"http://{request.host}/api/models/{name}/xet-read-token/{commit.sha}"
            headers |= {"X-Xet-Hash": file.xet.name, "X-Xet-Refresh-Route": route}
            if request.method != "HEAD":
                raise _make_error(400, "", "This file can be read by Xet only")
            return web.Response(headers=headers)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        sends = request.method != "HEAD"
        if span is None:
            repo.sent += sends * len(file.content)
            return web.Response(body=file.content, headers=headers)
        first, last = int(span[1]), int(span[2] or len(file.content) - 1)
        body = file.content[first : last + 1]
        repo.sent += sends * len(body)
        headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(file.content)}"
        return web.Response(status=206, body=body, headers=headers)

    # -- API of tests

    async def control(self, request: web.Request) -> web.Response:
        body = await request.json()
        match request.match_info["verb"]:
            case "repo":
                first = _Commit("0" * 40, {".gitattributes": _File(b"*.safetensors filter=lfs\n")})
                folder = self.xet / body["name"]
                folder.mkdir(parents=True)
                url = f"local://{folder}"
                self.repos[body["name"]] = _Repo({"main": [first]}, folder, url)
            case "gate":
                self.repos[body["repo"]].is_gated = True
            case "commits":
                repo = self.repos[body["repo"]]
                return web.json_response({"count": len(repo.branches[body["branch"]])})
            case "branches":
                return web.json_response({"names": list(self.repos[body["repo"]].branches)})
            case "uploads" | "sent" as counted:
                return web.json_response({"count": getattr(self.repos[body["repo"]], counted)})
            case "flip":
                repo = self.repos[body["repo"]]
                files = repo.at("main").files
                file = files[body["path"]]
                if file.xet:
                    xorb = repo.xet / f"xet/xorbs/xorbs/default.{file.xet.xorbs[0]}"
                    xorb.chmod(0o644)
                    xorb.write_bytes(_flip_bit(xorb.read_bytes(), 1000))
                else:
                    files[body["path"]] = _File(_flip_bit(file.content, 0), file.lfs)
            case "move":
                self.repos[body["repo"]].xet_url = body["url"]
            case "behind":
                self.repos[body["repo"]].behind = True
            case verb:
                return web.json_response(self._control_faults(verb, body))
        return web.json_response({})

    def _control_faults(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Configure faults, or return their counts."""
        match verb:
            case "fail":
                self.failing = [one for one in self.failing if one.count and body["count"]]
                self.failing.append(_Failing(**body))
            case "faults":
                self.box.use(Faults(**body))
            case "fired":
                return self.box.count_fired()
            case "unfired":
                return {"count": sum(one.count for one in self.failing)}
            case _:
                raise _make_error(404, "", verb)
        return {}


def _read_name(request: web.Request) -> str:
    """Return the name of the repository in a request, with ``datasets/`` before a dataset's."""
    prefix = "datasets/" * (request.match_info.get("kind") == "datasets")
    return f"{prefix}{request.match_info['owner']}/{request.match_info['name']}"


def _make_failure(status: int, retry_after: float | None) -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": f"{retry_after:.0f}"}
    return web.json_response({"error": "injected"}, status=status, headers=headers)


async def _cut(
    request: web.Request, answer: web.StreamResponse | None, sent: float
) -> web.StreamResponse:
    """Send a share of the body of an answer, and close the connection."""
    body = answer.body if isinstance(answer, web.Response) else None
    started = web.StreamResponse()
    if answer is not None and isinstance(body, bytes) and sent and body:
        started = web.StreamResponse(status=answer.status, headers=answer.headers)
        started.content_length = len(body)
        await started.prepare(request)
        await started.write(body[: int(len(body) * sent)])
    if request.transport is not None:
        request.transport.close()
    return started


def _flip_bit(body: bytes, index: int) -> bytes:
    return body[:index] + bytes([body[index] ^ 1]) + body[index + 1 :]


def _is_ignored(path: str, rules: str) -> bool:
    """Decide whether a rule of a ``.gitignore`` matches the name of a file. Folders are ignored."""
    return any(fnmatch.fnmatch(path.rpartition("/")[2], rule) for rule in rules.splitlines())


def _is_stored_by_lfs(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".bin")) or size >= LFS_FROM


async def _serve(xet: Path) -> None:
    runner = web.AppRunner(_HubApplication(xet).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"port": port}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run a server until the process ends. A line of JSON on stdout has its port."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.testing.hub", description=main.__doc__
    )
    parser.add_argument("xet", type=Path, help="folder of the Xet storages")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args().xet))


if __name__ == "__main__":
    main()
