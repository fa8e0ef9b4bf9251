"""Find the objects that cleanup rules delete, without code of Millrace.

Names of objects, and what protects them from rules, are written down here a second time, as the
documentation describes them. The caller lists the bucket. `json` reads the records.
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

_ROWS = r"[a-z]+-[0-9]{5,}-[0-9]{6,}(-[0-9a-f]{16})?"
_INDEX = r"shards/[a-z]+/([a-z]+/)?(_?[a-z_]+\.(json|npy|yaml)|_pages/\w+-[0-9a-f]+\.(json|bin))"
_ORPHANS = (
    rf"shards/[a-z]+/[a-z]+/{_ROWS}\.[a-z]+|quarantine/{_ROWS}\.jsonl"
    r"|partitions/([0-9]{5,}/[0-9]{19}\.json|[^/]+\.jsonl?)|transforms/[0-9a-f]{64}\.(py|json)"
)
_DATASET_FILES = re.compile(
    rf"commits/[a-z]+-[0-9]{{5,}}/([0-9]{{6,}}|end)\.json|{_INDEX}|{_ORPHANS}"
)
DATASET_FOLDERS = {"shards", "commits", "partitions", "quarantine", "transforms", "lease"}
JOB_FOLDERS = DATASET_FOLDERS | {"checkpoints"}
RESERVED_FOLDERS = JOB_FOLDERS | {"gathers", "epochs"}


@dataclass(frozen=True)
class ListedObject:
    """Object of a bucket, as a listing describes it.

    Attributes:
        key: Key of the object.
        size: Size of the object in bytes.
        modified: Time of the last write.
        read: Function that returns the bytes of the object.
    """

    key: str
    size: int
    modified: datetime
    read: Callable[[], bytes]

    def read_record(self) -> dict[str, Any]:
        """Return the content of a record; empty if the object is not JSON."""
        try:
            return json.loads(self.read())["record"]
        except ValueError:
            return {}


class ListedBucket:
    """Bucket of listed objects, which the oracle can read."""

    def __init__(self, objects: Iterable[ListedObject]) -> None:
        self._objects = {listed.key: listed for listed in objects}

    def list_names(self) -> list[str]:
        return sorted(self._objects)

    def read(self, name: str) -> bytes:
        return self._objects[name].read()


@dataclass(frozen=True)
class ParsedKey:
    """Contents of the key of an object.

    Attributes:
        kind: Kind of the object.
        scope: Name of the run, the job or the dataset of the object.
        version: Version of the run; empty if the object has none.
        number: Number of the window or the step; -1 if the object has none.
    """

    kind: str
    scope: str
    version: str = ""
    number: int = -1


def is_valid_name(name: str) -> bool:
    """Decide whether Millrace accepts a name of a run, a job, a version or a dataset."""
    parts = name.split("/")
    return all(part and part[0].isalnum() and re.sub(r"[\w.-]", "", part) == "" for part in parts)


def get_hex_digits(digest: str) -> str:
    """Return the hexadecimal digits of a digest."""
    return digest.removeprefix("blake3:")


def _cut(key: str, folder: str) -> str:
    """Return the part of a key below a folder; empty for other keys."""
    return key.removeprefix(folder) if key.startswith(folder) else ""


def parse_digits(text: str, least: int) -> int | None:
    """Return a number of at least so many ASCII digits; None if the text is none."""
    return int(text) if len(text) >= least and text.isascii() and text.isdigit() else None


def parse_key(key: str) -> ParsedKey | None:
    """Return the contents of a key; None if no kind of object has such keys."""
    matchers = (
        _match_worker_object,
        _match_gather_object,
        _match_checkpoint_object,
        _match_temporary_object,
        _match_record,
        _match_dataset_object,
    )
    return next((found for matcher in matchers if (found := matcher(key))), None)


def is_of_nested_store(key: str) -> bool:
    """Decide whether a key is that of an object in a store whose URL is below this one."""
    below = (parse_key(key[slash.end() :]) for slash in re.finditer("/", key))
    return any(parsed and parsed.kind != "gathers" for parsed in below)  # Templar's are at the root


def _match_worker_object(key: str) -> ParsedKey | None:
    match = re.fullmatch(r"(.+)/([^/]+)/(gradient|start_window)-(\d{9,})-(.+)\.(\w+)", key)
    if match is None or not is_valid_name(match[1]) or match[2] in RESERVED_FOLDERS:
        return None
    run, uid, stem, number, rest, ending = match.groups()
    version = rest.removeprefix(f"{uid}-v")
    endings = {"gradient": ("safetensors", "pt"), "start_window": ("json",)}[stem]
    if rest != f"{uid}-v{version}" or not is_valid_name(version) or ending not in endings:
        return None
    kind = {"gradient": "gradients", "start_window": "start windows"}[stem]
    return ParsedKey(kind, run, version, int(number))


def _match_gather_object(key: str) -> ParsedKey | None:
    if templar := re.fullmatch(r"gathers/([\w.]+)/.+\.npz", key):  # at the root of a bucket
        return ParsedKey("gathers", "", templar[1])
    match = re.fullmatch(
        r"(.+)/gathers/(.+?)/(?:(chain)/(\d{9,})\.json|(\d{9,})-(\w{64})\.(?:npz|safetensors))", key
    )
    if match is None or not is_valid_name(match[1]) or not is_valid_name(match[2]):
        return None
    kind, number = ("link", match[4]) if match[3] else ("update", match[5])
    return ParsedKey(kind, match[1], match[2], int(number))


def _match_checkpoint_object(key: str) -> ParsedKey | None:
    match = re.fullmatch(r"(.+?)/checkpoints/step_(\d{9,})/.+", key)
    if match is None or not is_valid_name(match[1]) or JOB_FOLDERS & set(match[1].split("/")):
        return None
    return ParsedKey("checkpoints", match[1], "", int(match[2]))


def _match_temporary_object(key: str) -> ParsedKey | None:
    folder, _, leaf = key.rpartition("/")
    nonce = "[0-9a-f]" * 16
    if re.fullmatch(rf"_probe-{nonce}(\.bin)?|_audit-{nonce}-[a-z]+", leaf):
        return ParsedKey("temporary", folder)
    if folder.endswith("/lease/clock") and re.fullmatch(nonce, leaf):
        return ParsedKey("temporary", folder.removesuffix("/lease/clock"))
    if machine := re.fullmatch(r"_machines/(.+)/\d{6,}/.+", key):
        return (
            ParsedKey("temporary", f"_rentals/{machine[1]}") if is_valid_name(machine[1]) else None
        )
    plan = r"_clean/\d+T\d+-\w{8}/(plan\.jsonl|outcome\.json)"
    return ParsedKey("temporary", "") if re.fullmatch(plan, key) else None


def _match_record(key: str) -> ParsedKey | None:
    if match := re.fullmatch(r"(.+)/campaign/(training|warming)\.json", key):
        return ParsedKey("record", match[1])
    if match := re.fullmatch(r"(_rentals/.+)/(attempts/\d{6,}-\w+(-\d+)?\.json|owner\.txt)", key):
        return ParsedKey("record", match[1])
    if key == "_rentals/installation.json":
        return ParsedKey("record", "")
    match = re.fullmatch(r"(.+?)/(lease/.+\.(json|beat|end)|epochs/.+)", key)
    return ParsedKey("record", match[1]) if match else None


def _match_dataset_object(key: str) -> ParsedKey | None:
    parts = key.split("/")
    depth = next((i for i, part in enumerate(parts) if part in DATASET_FOLDERS), len(parts) - 1)
    name, inside = "/".join(parts[:depth]), "/".join(parts[depth:])
    is_file = inside in {
        "plan.json", "manifest.json", "index.json", "block_digests.bin", "card.json", "README.md"
    } or _DATASET_FILES.fullmatch(inside)  # fmt: skip
    return ParsedKey("dataset", name) if is_file and is_valid_name(name) else None


def parse_version(version: str) -> tuple[int, ...] | None:
    """Return four numbers of a version; None if it does not consist of numbers and dots."""
    parts = version.split(".")
    if not all(part.isdigit() for part in parts):
        return None
    return tuple(int(part) for part in [*parts, "0", "0", "0"][:4])


def is_in_version_range(version: str, specifiers: str) -> bool:
    """Decide whether a version fulfils all of the comma-separated specifiers.

    A version that does not consist of numbers and dots is only compared for equality.
    """
    version_numbers = parse_version(version)
    for clause in specifiers.split(","):
        sign = re.match(r"[<>=!]*", clause)
        assert sign is not None
        other = clause.removeprefix(sign[0])
        other_numbers = parse_version(other)
        if sign[0] in {"", "==", "!="}:
            is_equal = version == other or (
                version_numbers is not None
                and other_numbers is not None
                and version_numbers == other_numbers
            )
            holds = is_equal is (sign[0] != "!=")
        elif version_numbers is None or other_numbers is None:
            holds = False
        else:
            holds = {
                "<": version_numbers < other_numbers,
                ">": version_numbers > other_numbers,
                "<=": version_numbers <= other_numbers,
                ">=": version_numbers >= other_numbers,
            }[sign[0]]
        if not holds:
            return False
    return True


class Judge:
    """Find the objects of a bucket that cleanup rules delete.

    Args:
        objects: All objects of the bucket.
        rules: Rules as in JSON, with `older_than` in hours.
        now: Time of the store's clock.
        pinned: Keys and folders that no rule deletes.
        other_stores: Objects of the other stores that are searched for leases and references.
        path: Path of the bucket's URL; empty for a whole bucket.
    """

    def __init__(
        self,
        objects: Iterable[ListedObject],
        rules: list[dict[str, Any]],
        now: datetime,
        *,
        pinned: Iterable[str] = (),
        other_stores: Iterable[ListedObject] = (),
        path: str = "",
    ) -> None:
        self.objects = {listed.key: listed for listed in objects}
        self.parsed = {key: parse_key(key) for key in self.objects}
        self.rules, self.now, self.pinned, self.path = rules, now, list(pinned), path
        self.all_objects = [*self.objects.values(), *other_stores]
        self.numbers: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        for parsed in filter(None, self.parsed.values()):
            self.numbers[parsed.kind, parsed.scope, parsed.version].add(parsed.number)
        self.heads: dict[tuple[str, str], tuple[int, int] | None] = {}
        self.newest_links: dict[str, int] = {}
        self.leased_scopes = set(self._find_leased_scopes())
        if any("junk" in rule["kinds"] for rule in rules):
            self._find_junk()

    def _find_junk(self) -> None:
        """Mark objects of unknown kinds in the folders of workers' gradients as junk."""
        scopes: dict[str, str] = {}
        for listed in self.all_objects:
            parsed = parse_key(listed.key)
            if parsed and parsed.kind in {"gradients", "start windows"}:
                scopes[listed.key.rpartition("/")[0] + "/"] = parsed.scope
        for key, parsed in self.parsed.items():
            folders = sorted(folder for folder in scopes if key.startswith(folder))
            if parsed is None and folders:
                self.parsed[key] = ParsedKey("junk", scopes[folders[0]])

    def _is_aggregated(self, run: str) -> bool:
        """Decide whether an aggregator holds a lease of any version of a run."""
        versions = {
            match[1]
            for listed in self.all_objects
            if (match := re.fullmatch(rf"{re.escape(run)}/gathers/([^/]+)/chain/.+", listed.key))
        }
        return any(self._is_leased(f"{run}/gathers/{version}") for version in versions)

    def list_deletions(self) -> dict[str, int]:
        """Return the keys that are deleted, with the index of the rule that deletes each."""
        found: dict[str, int] = {}
        for key, known in self.parsed.items():
            parsed = known or ParsedKey("other", key.rpartition("/")[0])
            if known is None and is_of_nested_store(key):
                continue
            is_of_templar = parsed.kind == "gathers" and not parsed.scope
            if (known is None or is_of_templar) and self._is_of_store_above(key):
                continue
            if parsed.kind in {"checkpoints", "dataset", "record"}:
                continue
            rule_index = self._find_first_rule(self._get_rule_kind(parsed), key, parsed)
            if parsed.kind == "junk":
                other = self._find_first_rule("other", key, parsed)
                rule_index = min(
                    (one for one in (rule_index, other) if one is not None), default=None
                )
            if rule_index is not None and not self._is_protected(key, parsed):
                found[key] = rule_index
        scopes = {(parsed.kind, parsed.scope) for parsed in self.parsed.values() if parsed}
        for kind, scope in scopes:
            if kind == "checkpoints":
                found |= self._list_job_deletions(scope)
            if kind == "dataset":
                found |= self._list_dataset_deletions(scope)
        return found

    def _is_of_store_above(self, key: str) -> bool:
        """Decide whether the bucket's URL is a folder of another store that the object is of."""
        return bool(self.path) and is_of_nested_store(f"/{self.path}/{key}")

    def _find_leased_scopes(self) -> Iterable[str]:
        """Yield the scopes that have a lease which its holder has not ended."""
        groups: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for listed in self.all_objects:
            match = re.fullmatch(r"(.+)/(\d{6})\.(json|beat|end)", f"/{listed.key}")
            if match and "/lease/" in match[1]:
                groups[match[1]][int(match[2])].add(match[3])
        for prefix, epochs in groups.items():
            newest = epochs[max(epochs)]
            if "json" in newest and "end" not in newest:  # leases of the tests last for an hour
                yield prefix.partition("/lease/")[0].removeprefix("/")

    def _is_leased(self, scope: str) -> bool:
        """Decide whether a scope, or one above it, has a lease."""
        if self.path and "" in self.leased_scopes:  # of the folder that the URL is
            return True
        return any(
            scope == leased or scope.startswith(f"{leased}/") for leased in self.leased_scopes
        )

    @staticmethod
    def _get_rule_kind(parsed: ParsedKey) -> str:
        return "gathers" if parsed.kind in {"link", "update"} else parsed.kind

    def _is_old_enough(self, rule: dict[str, Any], key: str) -> bool:
        hours = rule.get("older_than", 48)
        return hours == 0 or self.objects[key].modified < self.now - timedelta(hours=hours)

    def _matches_rule(self, rule: dict[str, Any], key: str, scope: str) -> bool:
        return self._is_old_enough(rule, key) and self._is_selected(rule, key, scope)

    @staticmethod
    def _is_selected(rule: dict[str, Any], key: str, scope: str) -> bool:
        """Decide whether a rule would match an object if it were old enough."""
        return (
            key.startswith(rule.get("prefix", ""))
            and key.endswith(rule.get("suffix", ""))
            and rule.get("name", "") in {"", scope}
        )

    def _find_first_rule(self, rule_kind: str, key: str, parsed: ParsedKey) -> int | None:
        """Return the index of the first rule for a kind that matches an object.

        None if a rule before it keeps the object's number, at any age of the object.
        """
        for rule_index, rule in enumerate(self.rules):
            name = "" if rule_kind == "other" else parsed.scope
            if rule_kind not in rule["kinds"] or not self._is_selected(rule, key, name):
                continue
            if parsed.kind == "gathers" and not rule.get("version"):
                continue  # Templar's
            if rule.get("version") and not is_in_version_range(parsed.version, rule["version"]):
                continue
            if rule.get("keep_every") and parsed.number % rule["keep_every"] == 0:
                break
            keep = rule.get("keep_last", 0)
            numbers = self.numbers[parsed.kind, parsed.scope, parsed.version] - {-1}
            last = heapq.nlargest(keep, numbers) if keep else []
            if parsed.number in last:
                break
            if self._is_old_enough(rule, key):
                return rule_index
        return None

    def _is_pinned(self, key: str) -> bool:
        return any(f"{key}/".startswith(f"{pin.rstrip('/')}/") for pin in self.pinned)

    def _has_pins(self, folder: str) -> bool:
        return any(
            pin.startswith(folder) or folder.startswith(f"{pin.rstrip('/')}/")
            for pin in self.pinned
        )

    def _is_protected(self, key: str, parsed: ParsedKey) -> bool:
        """Decide whether a pin, a lease, a machine or the chain of updates protects an object."""
        scope = f"{parsed.scope}/gathers/{parsed.version}" if parsed.version else parsed.scope
        is_of_window = parsed.kind in {"gradients", "start windows"}
        if is_of_window and parsed.number <= self._find_newest_link(scope):
            scope = parsed.scope  # the aggregator has merged the window
        if self._is_pinned(key) or self._is_leased(scope) or self._is_of_open_machine(key):
            return True
        if parsed.kind == "junk" and self._is_aggregated(parsed.scope):
            return True
        if parsed.kind not in {"link", "update"}:
            return False
        if parsed.kind == "link" and parsed.number == 0:
            return True
        chain = parsed.scope, parsed.version
        if chain not in self.heads:
            self.heads[chain] = self._find_head(*chain)
        head = self.heads[chain]
        if head is None:
            return True
        step, window = head
        return parsed.number > step if parsed.kind == "update" else parsed.number >= window

    def _find_newest_link(self, job: str) -> int:
        """Return the number of the newest link of a chain; -1 if there is none."""
        if job not in self.newest_links:
            pattern = re.compile(re.escape(job) + r"/chain/(\d{9,})\.json")
            found = (pattern.fullmatch(listed.key) for listed in self.all_objects)
            self.newest_links[job] = max((int(match[1]) for match in found if match), default=-1)
        return self.newest_links[job]

    def _is_of_open_machine(self, key: str) -> bool:
        """Decide whether an object is in the folder of a machine that is not released."""
        machine = re.fullmatch(r"_machines/(.+)/([0-9]{6,})/.+", key)
        if machine is None:
            return False
        attempt = f"_rentals/{machine[1]}/attempts/{machine[2]}"
        released = f"{attempt}-released.json" in self.objects
        return f"{attempt}-intent.json" in self.objects and not released

    def _find_head(self, run: str, version: str) -> tuple[int, int] | None:
        """Return the step and the window of the newest intact checkpoint of a chain."""
        job = f"{run}/gathers/{version}"
        for step, record in sorted(self._read_checkpoints(job).items(), reverse=True):
            window = record["position"].get("window")
            link = (
                self.objects.get(f"{job}/chain/{window:09d}.json") if window is not None else None
            )
            if link and link.read_record()["step"] == step and self._is_intact(job, record):
                return step, window
        return None

    def _read_checkpoints(self, job: str) -> dict[int, dict[str, Any]]:
        """Return the records of a job's checkpoints by their steps."""
        found: dict[int, dict[str, Any]] = {}
        for key in self.objects:
            match = re.fullmatch(re.escape(job) + r"/checkpoints/step_(\d{9})/metadata.json", key)
            if match:
                found[int(match[1])] = self.objects[key].read_record()
        return found

    def _list_files(self, job: str, record: dict[str, Any]) -> set[str]:
        return {
            f"{job}/checkpoints/step_{part['step']:09d}/parts/{get_hex_digits(part['digest'])}.safetensors"
            for part in record["parts"]
        }

    def _list_block_lists(self, job: str, record: dict[str, Any]) -> set[str]:
        return {
            f"{job}/checkpoints/step_{part['step']:09d}/block_digests/{get_hex_digits(part['digest'])}.bin"
            for part in record["parts"]
            if part["size"] > 2**20
        }

    def _is_intact(self, job: str, record: dict[str, Any]) -> bool:
        """Decide whether all files of a checkpoint exist and have their digests."""
        return all(
            key in self.objects and get_hex_digits(compute_blake3(self.objects[key].read())) in key
            for key in self._list_files(job, record)
        )

    def _list_job_deletions(self, job: str) -> dict[str, int]:
        """Return the objects of a job's checkpoints that are deleted, with their rules."""
        if self._is_leased(job):
            return {}
        found = self._read_checkpoints(job)
        protected_steps = {
            listed.read_record()["step"]
            for listed in self.all_objects
            if re.fullmatch(re.escape(job) + r"/epochs/\d+\.json", listed.key)
            or (listed.key.endswith("/chain/000000000.json") and listed.read_record()["job"] == job)
        }
        for step in sorted(found, reverse=True):
            protected_steps.add(step)
            if self._is_intact(job, found[step]):
                break
        deleted_steps: dict[int, int] = {}
        for rank, step in enumerate(sorted(found, reverse=True)):
            rule_index = None if step in protected_steps else self._find_step_rule(job, rank, step)
            if rule_index is not None:
                deleted_steps[step] = rule_index
        objects = {
            s: self._list_files(job, found[s]) | self._list_block_lists(job, found[s])
            for s in found
        }
        kept = set().union(*(objects[s] for s in found if s not in deleted_steps))
        named = set().union(*objects.values())
        deletions = {
            f"{job}/checkpoints/step_{s:09d}/metadata.json": p for s, p in deleted_steps.items()
        }
        for key, parsed in self.parsed.items():
            if not (
                parsed and parsed.kind == "checkpoints" and parsed.scope == job
            ) or self._is_pinned(key):
                continue
            if key in named - kept:
                deletions[key] = min(deleted_steps.values())
            elif re.search("/(parts|block_digests)/", key) and key not in named:
                folder = re.split("/(?:parts|block_digests)/", key)[0]
                neighbours = [other for other in self.objects if other.startswith(f"{folder}/")]
                for rule_index, rule in enumerate(self.rules):
                    is_young = not all(self._is_old_enough(rule, other) for other in neighbours)
                    if (
                        "checkpoint orphans" in rule["kinds"]
                        and self._matches_rule(rule, key, job)
                        and not is_young
                    ):
                        deletions[key] = rule_index
                        break
        return deletions

    def _find_step_rule(self, job: str, rank: int, step: int) -> int | None:
        """Return the index of the first rule that deletes a checkpoint.

        Args:
            job: Name of the job.
            rank: Number of newer checkpoints.
            step: Step of the checkpoint.
        """
        folder = f"{job}/checkpoints/step_{step:09d}/"
        if f"{folder}pin.json" in self.objects or self._has_pins(folder):
            return None
        for rule_index, rule in enumerate(self.rules):
            every = rule.get("keep_every")
            metadata = f"{folder}metadata.json"
            if "checkpoints" in rule["kinds"] and self._is_selected(rule, metadata, job):
                if rank < rule.get("keep_last", 0) or (every and step % every == 0):
                    break
                if self._is_old_enough(rule, metadata):
                    return rule_index
        return None

    def _list_dataset_deletions(self, name: str) -> dict[str, int]:
        """Return the objects of a dataset that are deleted, with their rules."""
        own_keys = [
            key for key, parsed in self.parsed.items() if parsed == ParsedKey("dataset", name)
        ]
        if f"{name}/card.json" not in self.objects and f"{name}/README.md" in own_keys:
            own_keys.remove(f"{name}/README.md")  # not written by Millrace
        own_keys += [
            key
            for key in self.objects
            if re.fullmatch(
                r"(.+/\d{6}\.(json|beat|end)|clock/\w{16})", _cut(key, f"{name}/lease/")
            )
        ]
        plan = self.objects.get(f"{name}/plan.json")
        if plan is None or self._is_leased(name) or plan.read_record().get("dataset") != name:
            return {}
        for rule_index, rule in enumerate(self.rules):
            if (
                "datasets" in rule["kinds"]
                and rule.get("name", "") in {"", name}
                and f"{name}/".startswith(rule.get("prefix", ""))
                and all(self._is_old_enough(rule, key) for key in own_keys)
            ):
                if not self._has_pins(f"{name}/"):
                    return dict.fromkeys(own_keys, rule_index)
                break
        if f"{name}/manifest.json" not in self.objects:
            return {}
        named = {
            shard["key"]
            for key in own_keys
            if re.search(r"/commits/\w+-\d+/\d+\.json$", key)
            for shard in self.objects[key].read_record()["shards"]
        }
        deletions: dict[str, int] = {}
        for key in own_keys:
            if key in named or not re.fullmatch(_ORPHANS, _cut(key, f"{name}/")):
                continue
            for rule_index, rule in enumerate(self.rules):
                if "dataset orphans" in rule["kinds"] and self._matches_rule(rule, key, name):
                    if not self._is_pinned(key):
                        deletions[key] = rule_index
                    break
        return deletions


def read_time() -> datetime:
    """Return the time of this machine's clock, which dates the files of a folder."""
    return datetime.now(UTC)
