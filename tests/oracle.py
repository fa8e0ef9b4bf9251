"""Oracle: judges the result of a run without a line of Millrace.

The bucket is listed with boto3 or the folder walked, shards are read by webdataset itself, records
by json. Names and formats are those that the design promises, written down here a second time.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from webdataset.tariterators import group_by_keys, tar_file_expander

BLOCK_SIZE = 2**20
_HALF = re.compile(r"#\d+$")  # what a killed process leaves of a file; no store lists it
_COMMIT = re.compile(r"commits/(?P<partition>[a-z]+-\d{5})-(?P<number>\d{6})\.json")
_END = re.compile(r"commits/(?P<partition>[a-z]+-\d{5})-end\.json")
_METADATA = re.compile(r"(?P<below>.+/checkpoints/)step_\d{9,}/metadata\.json")
_BLOCK_LIST = re.compile(r".+/checkpoints/step_\d{9,}/block_digests/[^/]+")


def compute_blake3(data: bytes) -> str:
    """Return the digest that records have: BLAKE3, with a root if there are several blocks."""
    blocks = compute_block_list(data)
    if len(data) <= BLOCK_SIZE:
        return f"blake3:{blocks.hex()}"
    context = "millrace 2026-11-25 digests of blocks of 1 MiB"
    return f"blake3:{blake3(blocks, derive_key_context=context).hexdigest()}"


def compute_block_list(data: bytes) -> bytes:
    """Return the joined digests of the blocks of 1 MiB, 32 bytes each."""
    starts = range(0, len(data) or 1, BLOCK_SIZE)
    return b"".join(blake3(data[at : at + BLOCK_SIZE]).digest() for at in starts)


class Bucket(Protocol):
    """Location of a dataset."""

    def list_names(self) -> list[str]:
        """Every object there is."""
        ...

    def read(self, name: str) -> bytes:
        """The whole of one."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A bucket that is a folder."""

    root: Path

    def list_names(self) -> list[str]:
        found = [Path(at, name) for at, _, names in os.walk(self.root) for name in names]
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """A prefix of a bucket behind boto3."""

    client: Any
    bucket: str
    prefix: str

    def list_names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/"
        )
        found = [stat["Key"] for page in pages for stat in page.get("Contents", [])]
        return [key.removeprefix(f"{self.prefix}/") for key in found]

    def read(self, name: str) -> bytes:
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
        return answer["Body"].read()


@dataclass(slots=True)
class Verdict:
    """Faults of a dataset; all fields are empty if there are none.

    Attributes:
        lost: Rows of the source that no shard has.
        doubled: Rows that are there once more than they should be; one nobody wrote counts too.
        different: Shards that are missing, too many, or of other bytes than the reference's.
        problems: Records and objects that do not agree, a sentence each.
        digests: Digest of each shard.
        halves: Unfinished files of killed processes, which readers of the store do not see.
    """

    lost: int = 0
    doubled: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    halves: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.different or self.problems)

    def __str__(self) -> str:
        counts = f"lost {self.lost}, doubled {self.doubled}, different {self.different}"
        return "; ".join([counts, *self.problems])


def make_row_token(name: str, text: bytes) -> str:
    """Identity of a row: its unique id, and its content."""
    return f"{name} {hashlib.sha256(text).hexdigest()}"


def judge(
    bucket: Bucket,
    dataset: str,
    *,
    rows: Counter[str],
    bad_rows: int,
    reference: Mapping[str, str] | None,
) -> Verdict:
    """Hold a finished dataset against what went in.

    Args:
        bucket: Where it is.
        dataset: Its name.
        rows: Tokens of the rows that went in.
        bad_rows: How many rows went in that make no sample.
        reference: Digest of each shard of a run that was never disturbed; None: this is it.
    """
    verdict = Verdict()
    names = []
    for name in bucket.list_names():
        if not name.startswith(f"{dataset}/"):
            verdict.problems.append(f"{name} is outside of the dataset")
        elif _HALF.search(name):
            verdict.halves.append(name)
        else:
            names.append(name.removeprefix(f"{dataset}/"))
    with ThreadPoolExecutor(4) as pool:
        wanted = [name for name in names if not name.startswith("lease/")]
        read = pool.map(lambda name: (name, bucket.read(f"{dataset}/{name}")), wanted)
        bodies = dict(read)
    shards = {name: body for name, body in bodies.items() if name.startswith("shards/")}
    verdict.digests = {name: compute_blake3(body) for name, body in shards.items()}
    found = {name: list(_rows(name, body)) for name, body in shards.items()}
    out = Counter(token for tokens in found.values() for token in tokens)
    verdict.lost = (rows - out).total()
    verdict.doubled = (out - rows).total()
    if reference is not None:
        either = {*reference, *verdict.digests}
        verdict.different = sum(reference.get(n) != verdict.digests.get(n) for n in either)
    samples = {name: len(tokens) for name, tokens in found.items()}
    verdict.problems += _records(dataset, bodies, shards, verdict.digests, samples, bad_rows)
    return verdict


def _rows(name: str, body: bytes) -> Iterator[str]:
    for sample in group_by_keys(tar_file_expander([{"url": name, "stream": io.BytesIO(body)}])):
        row = json.loads(sample["json"]) if "json" in sample else {}
        number = sample["id"].decode() if "id" in sample else row["id"]
        yield make_row_token(number, sample["txt"] if "txt" in sample else row["text"].encode())


def _records(
    dataset: str,
    bodies: dict[str, bytes],
    shards: dict[str, bytes],
    digests: dict[str, str],
    samples: dict[str, int],
    bad_rows: int,
) -> Iterator[str]:
    """Yield false statements of the plan, the ledger, the manifest and the index."""
    missing = {"plan.json", "manifest.json", "index.json"} - set(bodies)
    if missing:
        yield f"there is no {', '.join(sorted(missing))}"
        return
    there = {
        n: {"size": len(b), "digest": digests[n], "samples": samples[n]} for n, b in shards.items()
    }
    plan, manifest = (_record(bodies[f"{name}.json"]) for name in ("plan", "manifest"))

    listed = Counter(shard["key"] for shard in manifest["shards"])
    if listed != Counter(f"{dataset}/{name}" for name in there):
        yield f"the manifest lists {len(listed)} shards, there are {len(there)}: not the same"
    for shard in manifest["shards"]:
        what = there.get(shard["key"].removeprefix(f"{dataset}/"), {})
        if any(shard[key] != value for key, value in what.items()):
            yield f"the manifest is wrong about {shard['key']}"
    if sum(manifest["samples"].values()) != sum(samples.values()):
        yield f"the manifest counts {manifest['samples']}, there are {sum(samples.values())}"

    ordered = [shards.get(s["key"].removeprefix(f"{dataset}/"), b"") for s in manifest["shards"]]
    yield from _block_digests(bodies.get("block_digests.bin"), ordered)

    index = json.loads(bodies["index.json"])["shardlist"]
    if Counter((s["url"], s["nsamples"], s["filesize"]) for s in index) != Counter(
        (name, what["samples"], what["size"]) for name, what in there.items()
    ):
        yield "the index does not list exactly the shards there are"

    entries = [_record(body) for name, body in bodies.items() if _COMMIT.fullmatch(name)]
    for entry in entries:
        what = there.get(str(entry["key"]).removeprefix(f"{dataset}/"), {})
        if any(entry[key] != value for key, value in what.items()):
            yield f"the ledger is wrong about {entry['key']}"
    if Counter(e["key"] for e in entries if e["key"]) != Counter(f"{dataset}/{n}" for n in there):
        yield "the ledger does not name each shard exactly once"
    yield from _ends(plan, entries, bodies)

    aside = {n: b.splitlines() for n, b in bodies.items() if n.startswith("quarantine/")}
    counted = sum(len(lines) for lines in aside.values())
    if {f"{dataset}/{name}" for name in aside} != {e["quarantine_key"] for e in entries} - {None}:
        yield "the ledger does not name exactly the quarantines there are"
    if not bad_rows == counted == manifest["quarantined"]:
        yield (
            f"{bad_rows} bad rows went in, {counted} are in quarantine, "
            f"the manifest says {manifest['quarantined']}"
        )


def _block_digests(joined: bytes | None, ordered: list[bytes]) -> Iterator[str]:
    if joined is None:
        yield "there is no block_digests.bin"
    elif joined != b"".join(map(compute_block_list, ordered)):
        yield "block_digests.bin does not fit the shards"


def _ends(
    plan: dict[str, Any], entries: list[dict[str, Any]], bodies: dict[str, bytes]
) -> Iterator[str]:
    ends = {m["partition"]: _record(body) for n, body in bodies.items() if (m := _END.fullmatch(n))}
    if sorted(ends) != [partition["name"] for partition in plan["partitions"]]:
        yield f"the plan has {len(plan['partitions'])} partitions, {len(ends)} have ended"
    for partition, end in ends.items():
        own = sorted((e for e in entries if e["partition"] == partition), key=lambda e: e["number"])
        if [e["number"] for e in own] != list(range(end["commits"])):
            yield f"the commits of {partition} are not numbered from 0 to {end['commits']}"
        if any(one["next_cursor"] != other["start_cursor"] for one, other in pairwise(own)):
            yield f"the spans of {partition} do not meet"


def judge_checkpoints(bucket: Bucket, job: str = "", *, is_cleaned: bool) -> list[str]:
    """Hold complete checkpoints against their files and the lists of the files' blocks.

    Args:
        bucket: Location of the checkpoints.
        job: Name of the job; empty for all jobs.
        is_cleaned: Whether every list must belong to a file of a checkpoint. A saver that is killed
            leaves lists without a file until a cleaning.

    Returns:
        A sentence for each fault.
    """
    below = f"{job}/checkpoints/" if job else ""
    names = {n for n in bucket.list_names() if n.startswith(below) and not _HALF.search(n)}
    records = {name: match["below"] for name in names if (match := _METADATA.fullmatch(name))}
    with ThreadPoolExecutor(4) as pool:
        bodies = list(pool.map(bucket.read, records))
        parts = {
            (f"{prefix}step_{part['step']:09d}/", part["digest"], part["size"])
            for prefix, body in zip(records.values(), bodies, strict=True)
            for part in _record(body)["parts"]
        }
        found = list(pool.map(lambda part: _judge_file(bucket, names, *part), sorted(parts)))
    needed = {_block_list_name(folder, digest) for folder, digest, size in parts if _is_large(size)}
    strays = {name for name in names if _BLOCK_LIST.fullmatch(name)} - needed
    faults = [fault for fault in found if fault]
    if is_cleaned:
        faults += [f"no large file of a checkpoint has the list {name}" for name in sorted(strays)]
    return faults


def _judge_file(bucket: Bucket, names: set[str], folder: str, digest: str, size: int) -> str:
    """Describe the fault of a file of a checkpoint, or of the list of its blocks."""
    file = f"{folder}parts/{digest.removeprefix('blake3:')}.safetensors"
    blocks = _block_list_name(folder, digest)
    if file not in names:
        return f"there is no {file}"
    body = bucket.read(file)
    if (len(body), compute_blake3(body)) != (size, digest):
        return f"{file} has other bytes than its checkpoint says"
    if not _is_large(size):
        return ""
    if blocks not in names:
        return f"there is no {blocks}"
    fits = bucket.read(blocks) == compute_block_list(body)
    return "" if fits else f"{blocks} does not fit its file"


def _block_list_name(folder: str, digest: str) -> str:
    return f"{folder}block_digests/{digest.removeprefix('blake3:')}.bin"


def _is_large(size: int) -> bool:
    return size > BLOCK_SIZE


def _record(body: bytes) -> dict[str, Any]:
    return json.loads(body)["record"]
