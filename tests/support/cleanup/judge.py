"""Judge of cleanup rules: the objects that they take, without a line of Millrace.

The names, and what is stronger than a rule, are written down here a second time, from the
documentation; the bucket is listed by whoever asks, and records are read by json.
"""

import heapq
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.oracle import compute_blake3

DATASET = {"shards", "commits", "partitions", "quarantine", "lease"}
WORKERS = DATASET | {"checkpoints", "gathers", "epochs"}


@dataclass(frozen=True)
class Thing:
    """An object: its key, its age, how to read it."""

    key: str
    size: int
    modified: datetime
    read: Callable[[], bytes]

    def read_record(self) -> dict[str, Any]:
        try:
            return json.loads(self.read())["record"]
        except ValueError:
            return {}


class ListedBucket:
    """Bucket of listed objects, as the oracle reads it."""

    def __init__(self, things: Iterable[Thing]) -> None:
        self._things = {thing.key: thing for thing in things}

    def list_names(self) -> list[str]:
        return sorted(self._things)

    def read(self, name: str) -> bytes:
        return self._things[name].read()


@dataclass(frozen=True)
class What:
    kind: str
    scope: str
    version: str = ""
    number: int = -1


def is_good_name(name: str) -> bool:
    parts = name.split("/")
    return all(part and part[0].isalnum() and re.sub(r"[\w.-]", "", part) == "" for part in parts)


def get_hex_digits(digest: str) -> str:
    return digest.removeprefix("blake3:")


def parse_digits(text: str, least: int) -> int | None:
    return int(text) if len(text) >= least and text.isascii() and text.isdigit() else None


def find_kind(key: str) -> What | None:
    """Find the kind of an object by its name, taken apart at its slashes."""
    finders = (_of_worker, _of_gathers, _of_checkpoints, _temporary, _record, _of_dataset)
    return next((found for finder in finders if (found := finder(key))), None)


def _of_worker(key: str) -> What | None:
    match = re.fullmatch(r"(.+)/([^/]+)/(gradient|start_window)-(\d{9,})-(.+)\.(\w+)", key)
    if match is None or not is_good_name(match[1]) or match[2] in WORKERS:
        return None
    run, uid, what, number, rest, ending = match.groups()
    version = rest.removeprefix(f"{uid}-v")
    endings = {"gradient": ("safetensors", "pt"), "start_window": ("json",)}[what]
    if rest != f"{uid}-v{version}" or not is_good_name(version) or ending not in endings:
        return None
    kind = {"gradient": "gradients", "start_window": "start windows"}[what]
    return What(kind, run, version, int(number))


def _of_gathers(key: str) -> What | None:
    match = re.fullmatch(
        r"(.+)/gathers/(.+?)/(?:(chain)/(\d{9,})\.json|(\d{9,})-(\w{64})\.(?:npz|safetensors))", key
    )
    if match is None or not is_good_name(match[1]) or not is_good_name(match[2]):
        return None
    kind, number = ("link", match[4]) if match[3] else ("update", match[5])
    return What(kind, match[1], match[2], int(number))


def _of_checkpoints(key: str) -> What | None:
    match = re.fullmatch(r"(.+?)/checkpoints/step_(\d{9,})/.+", key)
    return (
        What("checkpoints", match[1], "", int(match[2]))
        if match and is_good_name(match[1])
        else None
    )


def _temporary(key: str) -> What | None:
    folder, _, leaf = key.rpartition("/")
    nonce = "[0-9a-f]" * 16
    if re.fullmatch(rf"_probe-{nonce}(\.bin)?|_audit-{nonce}-[a-z]+", leaf):
        return What("temporary", folder)
    if folder.endswith("/lease/clock") and re.fullmatch(nonce, leaf):
        return What("temporary", folder.removesuffix("/lease/clock"))
    if machine := re.fullmatch(r"_machines/(.+)/\d{6,}/.+", key):
        return What("temporary", f"_rentals/{machine[1]}") if is_good_name(machine[1]) else None
    plan = r"_clean/\d+T\d+-\w{8}/(plan\.jsonl|outcome\.json)"
    return What("temporary", "") if re.fullmatch(plan, key) else None


def _record(key: str) -> What | None:
    for word in ("/lease/", "/epochs/"):
        if word in key:
            return What("record", key.partition(word)[0])
    return None


def _of_dataset(key: str) -> What | None:
    *folders, leaf = key.split("/")
    inner = leaf not in {"plan.json", "manifest.json", "index.json", "block_digests.bin"}
    if inner and (not folders or folders.pop() not in DATASET):
        return None
    if not folders or DATASET & set(folders) or not is_good_name("/".join(folders)):
        return None
    return What("dataset", "/".join(folders))


def parse_numbers(version: str) -> tuple[int, ...] | None:
    parts = version.split(".")
    if not all(part.isdigit() for part in parts):
        return None
    return tuple(int(part) for part in [*parts, "0", "0", "0"][:4])


def is_in_range(version: str, wanted: str) -> bool:
    """Return the sort key of a version, which may have numbers and dots or other text."""
    mine = parse_numbers(version)
    for clause in wanted.split(","):
        sign = re.match(r"[<>=!]*", clause)
        assert sign is not None
        other = clause.removeprefix(sign[0])
        theirs = parse_numbers(other)
        if sign[0] in {"", "==", "!="}:
            same = version == other or (mine is not None and theirs is not None and mine == theirs)
            holds = same is (sign[0] != "!=")
        elif mine is None or theirs is None:
            holds = False
        else:
            holds = {
                "<": mine < theirs,
                ">": mine > theirs,
                "<=": mine <= theirs,
                ">=": mine >= theirs,
            }[sign[0]]
        if not holds:
            return False
    return True


class Judge:
    """Says what rules take.

    Args:
        things: All objects.
        rules: As JSON has them, with `older_than` in hours.
        now: By the store's clock.
        pinned: Keys and folders.
        beside: Objects of places beside it.
    """

    def __init__(
        self,
        things: Iterable[Thing],
        rules: list[dict[str, Any]],
        now: datetime,
        *,
        pinned: Iterable[str] = (),
        beside: Iterable[Thing] = (),
    ) -> None:
        self.things = {thing.key: thing for thing in things}
        self.what = {key: find_kind(key) for key in self.things}
        self.rules, self.now, self.pinned = rules, now, list(pinned)
        self.everywhere = [*self.things.values(), *beside]
        self.numbers: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        for what in filter(None, self.what.values()):
            self.numbers[what.kind, what.scope, what.version].add(what.number)
        self.heads: dict[tuple[str, str], tuple[int, int] | None] = {}
        self.held = set(self._held())
        if any("junk" in rule["kinds"] for rule in rules):
            self._tell_junk()

    def _tell_junk(self) -> None:
        """Tell what workers have left below folders that hold their gradients."""
        own: dict[str, str] = {}
        for thing in self.everywhere:
            what = find_kind(thing.key)
            if what and what.kind in {"gradients", "start windows"}:
                own[thing.key.rpartition("/")[0] + "/"] = what.scope
        for key, what in self.what.items():
            above = sorted(folder for folder in own if key.startswith(folder))
            if what is None and above:
                self.what[key] = What("junk", own[above[0]])

    def _aggregated(self, run: str) -> bool:
        """Decide whether an aggregator works on any version of a run."""
        versions = {
            match[1]
            for thing in self.everywhere
            if (match := re.fullmatch(rf"{re.escape(run)}/gathers/([^/]+)/chain/.+", thing.key))
        }
        return any(self._live(f"{run}/gathers/{version}") for version in versions)

    def list_taken(self) -> dict[str, int]:
        """Each key that goes, and the place of the rule that takes it."""
        found: dict[str, int] = {}
        for key, is_what in self.what.items():
            what = is_what or What("other", key.rpartition("/")[0])
            if what.kind in {"checkpoints", "dataset", "record"}:
                continue
            place = self._first(self._about(what), key, what)
            if what.kind == "junk":
                other = self._first("other", key, what)
                place = min((one for one in (place, other) if one is not None), default=None)
            if place is not None and not self._stays(key, what):
                found[key] = place
        scopes = {(what.kind, what.scope) for what in self.what.values() if what}
        for kind, scope in scopes:
            if kind == "checkpoints":
                found |= self._of_job(scope)
            if kind == "dataset":
                found |= self._of_dataset(scope)
        return found

    def _held(self) -> Iterable[str]:
        groups: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for thing in self.everywhere:
            match = re.fullmatch(r"(.+)/(\d{6})\.(json|beat|end)", thing.key)
            if match and "/lease/" in thing.key:
                groups[match[1]][int(match[2])].add(match[3])
        for prefix, epochs in groups.items():
            newest = epochs[max(epochs)]
            if "json" in newest and "end" not in newest:  # all of the tests' last for an hour
                yield prefix.partition("/lease/")[0]

    def _live(self, scope: str) -> bool:
        return any(scope == held or scope.startswith(f"{held}/") for held in self.held)

    @staticmethod
    def _about(what: What) -> str:
        return "gathers" if what.kind in {"link", "update"} else what.kind

    def _old(self, rule: dict[str, Any], key: str) -> bool:
        hours = rule.get("older_than", 48)
        return hours == 0 or self.things[key].modified < self.now - timedelta(hours=hours)

    def _fits(self, rule: dict[str, Any], key: str, scope: str) -> bool:
        return (
            self._old(rule, key)
            and key.startswith(rule.get("prefix", ""))
            and key.endswith(rule.get("suffix", ""))
            and rule.get("name", "") in {"", scope}
        )

    def _first(self, about: str, key: str, what: What) -> int | None:
        for place, rule in enumerate(self.rules):
            name = "" if about == "other" else what.scope
            if about not in rule["kinds"] or not self._fits(rule, key, name):
                continue
            if rule.get("version") and not is_in_range(what.version, rule["version"]):
                continue
            if rule.get("keep_every") and what.number % rule["keep_every"] == 0:
                continue
            keep = rule.get("keep_last", 0)
            alike = self.numbers[what.kind, what.scope, what.version]
            last = heapq.nlargest(keep, alike) if keep else []
            if what.number not in last:
                return place
        return None

    def _pins(self, key: str) -> bool:
        return any(f"{key}/".startswith(f"{pin.rstrip('/')}/") for pin in self.pinned)

    def _pins_in(self, folder: str) -> bool:
        return any(
            pin.startswith(folder) or folder.startswith(f"{pin.rstrip('/')}/")
            for pin in self.pinned
        )

    def _stays(self, key: str, what: What) -> bool:
        scope = f"{what.scope}/gathers/{what.version}" if what.version else what.scope
        if self._pins(key) or self._live(scope):
            return True
        if what.kind == "junk" and self._aggregated(what.scope):
            return True
        if what.kind not in {"link", "update"}:
            return False
        if what.kind == "link" and what.number == 0:
            return True
        chain = what.scope, what.version
        if chain not in self.heads:
            self.heads[chain] = self._head(*chain)
        head = self.heads[chain]
        if head is None:
            return True
        step, window = head
        return what.number > step if what.kind == "update" else what.number >= window

    def _head(self, run: str, version: str) -> tuple[int, int] | None:
        job = f"{run}/gathers/{version}"
        for step, record in sorted(self._checkpoints(job).items(), reverse=True):
            window = record["position"].get("window")
            link = self.things.get(f"{job}/chain/{window:09d}.json") if window is not None else None
            if link and link.read_record()["step"] == step and self._whole(job, record):
                return step, window
        return None

    def _checkpoints(self, job: str) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for key in self.things:
            match = re.fullmatch(re.escape(job) + r"/checkpoints/step_(\d{9})/metadata.json", key)
            if match:
                found[int(match[1])] = self.things[key].read_record()
        return found

    def _files(self, job: str, record: dict[str, Any]) -> set[str]:
        return {
            f"{job}/checkpoints/step_{part['step']:09d}/parts/{get_hex_digits(part['digest'])}.safetensors"
            for part in record["parts"]
        }

    def _lists(self, job: str, record: dict[str, Any]) -> set[str]:
        return {
            f"{job}/checkpoints/step_{part['step']:09d}/block_digests/{get_hex_digits(part['digest'])}.bin"
            for part in record["parts"]
            if part["size"] > 2**20
        }

    def _whole(self, job: str, record: dict[str, Any]) -> bool:
        return all(
            key in self.things and get_hex_digits(compute_blake3(self.things[key].read())) in key
            for key in self._files(job, record)
        )

    def _of_job(self, job: str) -> dict[str, int]:
        if self._live(job):
            return {}
        found = self._checkpoints(job)
        stays = {
            thing.read_record()["step"]
            for thing in self.everywhere
            if re.fullmatch(re.escape(job) + r"/epochs/\d+\.json", thing.key)
            or (thing.key.endswith("/chain/000000000.json") and thing.read_record()["job"] == job)
        }
        for step in sorted(found, reverse=True):
            stays.add(step)
            if self._whole(job, found[step]):
                break
        going: dict[int, int] = {}
        for rank, step in enumerate(sorted(found, reverse=True)):
            place = None if step in stays else self._taking_step(job, rank, step)
            if place is not None:
                going[step] = place
        objects = {s: self._files(job, found[s]) | self._lists(job, found[s]) for s in found}
        kept = set().union(*(objects[s] for s in found if s not in going))
        named = set().union(*objects.values())
        taken = {f"{job}/checkpoints/step_{s:09d}/metadata.json": p for s, p in going.items()}
        for key, what in self.what.items():
            if not (what and what.kind == "checkpoints" and what.scope == job) or self._pins(key):
                continue
            if key in named - kept:
                taken[key] = min(going.values())
            elif re.search("/(parts|block_digests)/", key) and key not in named:
                folder = re.split("/(?:parts|block_digests)/", key)[0]
                beside = [other for other in self.things if other.startswith(f"{folder}/")]
                for place, rule in enumerate(self.rules):
                    young = not all(self._old(rule, other) for other in beside)
                    if (
                        "checkpoint orphans" in rule["kinds"]
                        and self._fits(rule, key, job)
                        and not young
                    ):
                        taken[key] = place
                        break
        return taken

    def _taking_step(self, job: str, rank: int, step: int) -> int | None:
        folder = f"{job}/checkpoints/step_{step:09d}/"
        if f"{folder}pin.json" in self.things or self._pins_in(folder):
            return None
        for place, rule in enumerate(self.rules):
            every = rule.get("keep_every")
            if (
                "checkpoints" in rule["kinds"]
                and self._fits(rule, f"{folder}metadata.json", job)
                and rank >= rule.get("keep_last", 0)
                and not (every and step % every == 0)
            ):
                return place
        return None

    def _of_dataset(self, name: str) -> dict[str, int]:
        own = [key for key, what in self.what.items() if what == What("dataset", name)]
        own += [key for key in self.things if key.startswith(f"{name}/lease/")]
        plan = self.things.get(f"{name}/plan.json")
        if plan is None or self._live(name) or plan.read_record().get("dataset") != name:
            return {}
        for place, rule in enumerate(self.rules):
            if (
                "datasets" in rule["kinds"]
                and rule.get("name", "") in {"", name}
                and f"{name}/".startswith(rule.get("prefix", ""))
                and all(self._old(rule, key) for key in own)
            ):
                if not self._pins_in(f"{name}/"):
                    return dict.fromkeys(own, place)
                break
        if f"{name}/manifest.json" not in self.things:
            return {}
        named = {
            self.things[key].read_record()["key"]
            for key in own
            if re.search(r"/commits/\w+-\d+-\d+\.json$", key)
        }
        taken: dict[str, int] = {}
        for key in own:
            if key.split("/")[-2] not in {"shards", "quarantine", "partitions"} or key in named:
                continue
            for place, rule in enumerate(self.rules):
                if "dataset orphans" in rule["kinds"] and self._fits(rule, key, name):
                    if not self._pins(key):
                        taken[key] = place
                    break
        return taken


def read_time() -> datetime:
    """Return the time by this machine's clock, which is that of a folder."""
    return datetime.now(UTC)
