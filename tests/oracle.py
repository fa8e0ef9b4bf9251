"""Oracle: check the results of a run without code of Millrace.

boto3 lists a bucket, and `os.walk` a folder. webdataset reads the shards, and `json` the records.
Names and formats are written down here a second time, as the documentation promises them.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from safetensors.numpy import load as load_tensors
from webdataset.tariterators import group_by_keys, tar_file_expander

BLOCK_SIZE = 2**20
_SHARE_TOLERANCE = 0.3  # relative; ranges of a source are in one split as a whole
_PARTIAL_FILE = re.compile(r"#\d+$")  # unfinished file of a killed process; no store lists it
_SHARD_NAME = re.compile(  # with a part of the digest if the source may have other bytes later
    r"shards/[a-z]+/(?P<split>[a-z]+)/(?P<stem>(?P=split)-\d{5}-\d{6})(-[0-9a-f]{16})?\.\w+"
)
_COMMIT_NAME = re.compile(r"commits/(?P<partition>[a-z]+-\d{5})/(?P<number>\d{6})\.json")
_PARTITION_END_NAME = re.compile(r"commits/(?P<partition>[a-z]+-\d{5})/end\.json")
_METADATA_NAME = re.compile(r"(?P<below>.+/checkpoints/)step_\d{9,}/metadata\.json")
_BLOCK_LIST_NAME = re.compile(r".+/checkpoints/step_\d{9,}/block_digests/[^/]+")


def compute_blake3(data: bytes) -> str:
    """Return the digest of data as in records: BLAKE3; of several blocks, that of their list."""
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
        """Return the names of all objects."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """Bucket in a folder."""

    root: Path

    def list_names(self) -> list[str]:
        found = [Path(at, name) for at, _, names in os.walk(self.root) for name in names]
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """Prefix of a bucket, with a client of boto3."""

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
        response = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
        return response["Body"].read()


@dataclass(slots=True)
class Verdict:
    """Faults of a dataset. A correct dataset has zero counts and no problems.

    Attributes:
        lost: Number of rows of the source that no shard has.
        duplicated: Number of surplus rows in the shards, with those that the source does not have.
        differing: Number of shards and indexes that are missing, surplus, or of other bytes than
            in the reference.
        problems: Contradictions between records and objects, each a sentence.
        digests: Digests of the shards and of their readers' indexes by their names.
        partial_files: Names of unfinished files of killed processes. Readers of the store do not
            see them.
    """

    lost: int = 0
    duplicated: int = 0
    differing: int = 0
    problems: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    partial_files: list[str] = field(default_factory=list)

    @property
    def is_correct(self) -> bool:
        """True if the dataset has no fault."""
        return not (self.lost or self.duplicated or self.differing or self.problems)

    def __str__(self) -> str:
        counts = f"lost {self.lost}, duplicated {self.duplicated}, differing {self.differing}"
        return "; ".join([counts, *self.problems])


def make_row_token(name: str, text: bytes) -> str:
    """Return a token that identifies a row by its unique id and its content."""
    return f"{name} {hashlib.sha256(text).hexdigest()}"


def judge(
    bucket: Bucket,
    dataset: str,
    *,
    rows: Counter[str],
    bad_rows: Counter[str],
    reference: Mapping[str, str] | None,
    val_share: float = 0.0,
) -> Verdict:
    """Compare a finished dataset with its source and with a reference.

    WebDataset shards are read. Shards of other formats must be there beside each of them, as the
    records say. Their contents are those of the reference, which their own readers have read.

    Args:
        bucket: Location of the dataset.
        dataset: Name of the dataset.
        rows: Tokens of the valid rows of the source.
        bad_rows: Lines of the source that make no sample.
        reference: Digests of the shards and indexes of an undisturbed run by their names. None if
            this dataset is the reference.
        val_share: Share of the samples that is requested for the split ``val``.
    """
    verdict = Verdict()
    names = []
    for name in bucket.list_names():
        if not name.startswith(f"{dataset}/"):
            verdict.problems.append(f"{name} is outside of the dataset")
        elif _PARTIAL_FILE.search(name):
            verdict.partial_files.append(name)
        else:
            names.append(name.removeprefix(f"{dataset}/"))
    with ThreadPoolExecutor(4) as pool:
        to_read = [name for name in names if not name.startswith("lease/")]
        read = pool.map(lambda name: (name, bucket.read(f"{dataset}/{name}")), to_read)
        bodies = dict(read)
    verdict.digests = {n: compute_blake3(body) for n, body in bodies.items() if n[:7] == "shards/"}
    shards = {name: bodies[name] for name in verdict.digests if _SHARD_NAME.fullmatch(name)}
    found = {
        name: list(_iterate_row_tokens(name, body))
        for name, body in shards.items()
        if name.endswith(".tar")
    }
    stored = Counter(token for tokens in found.values() for token in tokens)
    verdict.lost = (rows - stored).total()
    verdict.duplicated = (stored - rows).total()
    if reference is not None:
        all_shards = {*reference, *verdict.digests}
        verdict.differing = sum(reference.get(n) != verdict.digests.get(n) for n in all_shards)
    samples = {name: len(tokens) for name, tokens in found.items()}
    verdict.problems += _find_record_faults(
        dataset, bodies, shards, verdict.digests, samples, bad_rows
    )
    val_samples = sum(count for name, count in samples.items() if _read_split(name) == "val")
    share = val_samples / max(1, sum(samples.values()))
    if abs(share - val_share) > _SHARE_TOLERANCE * val_share:
        verdict.problems.append(f"{share:.3f} of the samples are in val, not {val_share}")
    return verdict


def judge_epoch(
    bucket: Bucket, dataset: str, received: Iterable[tuple[str, str]], split: str = "train"
) -> Verdict:
    """Judge the samples that a training loop received in one epoch.

    The tar shards that the manifest names are read by webdataset.

    Args:
        bucket: Bucket of the dataset.
        dataset: Name of the dataset.
        received: Key and text of each sample that was received, by all ranks together.
        split: Split of the samples.
    """
    manifest = _parse_record(bucket.read(f"{dataset}/manifest.json"))
    stored = Counter[tuple[str, str]]()
    for shard in manifest["shards"]:
        if shard["format"] == "webdataset" and shard["split"] == split:
            stream = io.BytesIO(bucket.read(shard["key"]))
            members = tar_file_expander([{"url": shard["key"], "stream": stream}])
            stored.update((one["__key__"], one["txt"].decode()) for one in group_by_keys(members))
    found = Counter(received)
    return Verdict(lost=(stored - found).total(), duplicated=(found - stored).total())


def _iterate_row_tokens(name: str, body: bytes) -> Iterator[str]:
    for sample in group_by_keys(tar_file_expander([{"url": name, "stream": io.BytesIO(body)}])):
        row = json.loads(sample["json"]) if "json" in sample else {}
        number = sample["id"].decode() if "id" in sample else row["id"]
        yield make_row_token(number, sample["txt"] if "txt" in sample else row["text"].encode())


def _find_record_faults(
    dataset: str,
    bodies: dict[str, bytes],
    shards: dict[str, bytes],
    digests: dict[str, str],
    samples: dict[str, int],
    bad_rows: Counter[str],
) -> Iterator[str]:
    """Yield the faults of the plan, the ledger, the manifest and the index, each a sentence."""
    missing = {"plan.json", "manifest.json", "index.json"} - set(bodies)
    if missing:
        yield f"there is no {', '.join(sorted(missing))}"
        return
    by_stem = {_read_stem(name): count for name, count in samples.items()}
    actual = {
        n: {"size": len(b), "digest": digests[n], "samples": by_stem.get(_read_stem(n), -1)}
        for n, b in shards.items()
    }
    plan, manifest = (_parse_record(bodies[f"{name}.json"]) for name in ("plan", "manifest"))

    listed = Counter(shard["key"] for shard in manifest["shards"])
    if listed != Counter(f"{dataset}/{name}" for name in actual):
        yield f"the manifest lists {len(listed)} shards, there are {len(actual)}: not the same"
    for shard in manifest["shards"]:
        expected = actual.get(shard["key"].removeprefix(f"{dataset}/"), {})
        if any(shard[key] != value for key, value in expected.items()):
            yield f"the manifest is wrong about {shard['key']}"
    yield from _find_split_faults(dataset, manifest, samples)

    ordered = [shards.get(s["key"].removeprefix(f"{dataset}/"), b"") for s in manifest["shards"]]
    yield from _find_block_digest_faults(bodies.get("block_digests.bin"), ordered)

    yield from _find_index_faults(bodies, actual)

    entries = [_parse_record(body) for name, body in bodies.items() if _COMMIT_NAME.fullmatch(name)]
    committed = [{**shard, "samples": e["samples"]} for e in entries for shard in e["shards"]]
    for shard in committed:
        expected = actual.get(shard["key"].removeprefix(f"{dataset}/"), {})
        if any(shard[key] != value for key, value in expected.items()):
            yield f"the ledger is wrong about {shard['key']}"
    if Counter(s["key"] for s in committed) != Counter(f"{dataset}/{n}" for n in actual):
        yield "the ledger does not name each shard exactly once"
    yield from _find_partition_faults(plan, entries, bodies)

    yield from _find_quarantine_faults(dataset, bodies, entries, bad_rows)
    if manifest["quarantined"] != bad_rows.total():
        yield f"{bad_rows.total()} bad rows went in, the manifest says {manifest['quarantined']}"


def _find_index_faults(
    bodies: dict[str, bytes], actual: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield the indexes of webdataset that do not list exactly the shards of their splits."""
    tars = {name: stat for name, stat in actual.items() if name.endswith(".tar")}
    folders = {f"shards/webdataset/{split}/" for split in map(_read_split, tars)}
    for folder in ("", *sorted(folders)):
        own = folder or "shards/webdataset/train/"
        index = json.loads(bodies.get(f"{folder}index.json", b'{"shardlist": []}'))["shardlist"]
        if Counter((s["url"], s["nsamples"], s["filesize"]) for s in index) != Counter(
            (name.removeprefix(folder), stat["samples"], stat["size"])
            for name, stat in tars.items()
            if name.startswith(own)
        ):
            yield f"{folder}index.json does not list exactly the shards there are"


def _find_split_faults(
    dataset: str, manifest: dict[str, Any], samples: dict[str, int]
) -> Iterator[str]:
    """Yield the contradictions between the manifest's splits and the names of the shards."""
    per_split = Counter[str]()
    for name, count in samples.items():
        per_split[_read_split(name)] += count
    if manifest["samples"] != dict(per_split):
        yield f"the manifest counts {manifest['samples']}, there are {dict(per_split)}"
    for shard in manifest["shards"]:
        if shard["split"] != _read_split(shard["key"].removeprefix(f"{dataset}/")):
            yield f"the manifest says that {shard['key']} is in {shard['split']}"


def _find_quarantine_faults(
    dataset: str, bodies: dict[str, bytes], entries: list[dict[str, Any]], bad_rows: Counter[str]
) -> Iterator[str]:
    """Yield the faults of the quarantined rows, of which each has the original."""
    quarantined = {
        name: [json.loads(line)["data"] for line in body.splitlines()]
        for name, body in bodies.items()
        if name.startswith("quarantine/")
    }
    named = {entry["quarantine_key"] for entry in entries} - {None}
    if {f"{dataset}/{name}" for name in quarantined} != named:
        yield "the ledger does not name exactly the quarantines there are"
    rows = Counter(row for rows in quarantined.values() for row in rows)
    if rows != bad_rows:
        missing, surplus = sorted(bad_rows - rows), sorted(rows - bad_rows)
        yield f"the quarantine lacks {missing}, and has surplus {surplus}"


def _read_split(name: str) -> str:
    """Return the split in the name of a shard: ``shards/FORMAT/SPLIT/SPLIT-...-NUMBER.tar``."""
    return name.split("/")[2]


def _read_stem(name: str) -> str:
    """Return the part of a shard's name that is the same in every format."""
    match = _SHARD_NAME.fullmatch(name)
    assert match is not None
    return match["stem"]


def _find_block_digest_faults(joined: bytes | None, ordered: list[bytes]) -> Iterator[str]:
    if joined is None:
        yield "there is no block_digests.bin"
    elif joined != b"".join(map(compute_block_list, ordered)):
        yield "block_digests.bin does not fit the shards"


def _find_partition_faults(
    plan: dict[str, Any], entries: list[dict[str, Any]], bodies: dict[str, bytes]
) -> Iterator[str]:
    ends = {
        match["partition"]: _parse_record(body)
        for n, body in bodies.items()
        if (match := _PARTITION_END_NAME.fullmatch(n))
    }
    if sorted(ends) != [partition["name"] for partition in plan["partitions"]]:
        yield f"the plan has {len(plan['partitions'])} partitions, {len(ends)} have ended"
    for partition, end in ends.items():
        commits = sorted(
            (e for e in entries if e["partition"] == partition), key=lambda e: e["number"]
        )
        if [e["number"] for e in commits] != list(range(end["commits"])):
            yield f"the commits of {partition} are not numbered from 0 to {end['commits']}"
        if any(
            previous["next_cursor"] != following["start_cursor"]
            for previous, following in pairwise(commits)
        ):
            yield f"the spans of {partition} do not meet"


def judge_checkpoints(bucket: Bucket, job: str = "", *, is_cleaned: bool) -> list[str]:
    """Compare complete checkpoints with their files and the lists of the files' blocks.

    Args:
        bucket: Location of the checkpoints.
        job: Name of the job; empty for all jobs.
        is_cleaned: Whether every list must belong to a file of a checkpoint. A saver that is killed
            leaves lists without a file until a cleaning.

    Returns:
        A sentence for each fault.
    """
    prefix = f"{job}/checkpoints/" if job else ""
    names = {n for n in bucket.list_names() if n.startswith(prefix) and not _PARTIAL_FILE.search(n)}
    records = {name: match["below"] for name in names if (match := _METADATA_NAME.fullmatch(name))}
    with ThreadPoolExecutor(4) as pool:
        bodies = list(pool.map(bucket.read, records))
        parts = {
            (f"{prefix}step_{part['step']:09d}/", part["digest"], part["size"])
            for prefix, body in zip(records.values(), bodies, strict=True)
            for part in _parse_record(body)["parts"]
        }
        found = list(pool.map(lambda part: _find_file_fault(bucket, names, *part), sorted(parts)))
    needed = {
        _make_block_list_name(folder, digest)
        for folder, digest, size in parts
        if _has_block_list(size)
    }
    unreferenced = {name for name in names if _BLOCK_LIST_NAME.fullmatch(name)} - needed
    faults = [fault for fault in found if fault]
    if is_cleaned:
        faults += [
            f"no large file of a checkpoint has the list {name}" for name in sorted(unreferenced)
        ]
    return faults


def read_checkpoints(bucket: Bucket, job: str) -> dict[int, dict[str, Any]]:
    """Return the metadata of a job's complete checkpoints by their steps."""
    prefix = f"{job}/checkpoints/"
    records = [
        _parse_record(bucket.read(name))
        for name in bucket.list_names()
        if (match := _METADATA_NAME.fullmatch(name)) and match["below"] == prefix
    ]
    return {record["step"]: record for record in records}


def compute_weights_digest(bucket: Bucket, checkpoint: dict[str, Any]) -> str:
    """Return the digest of a checkpoint's weights and moments as in the links of a chain."""
    files = [
        bucket.read(
            f"{checkpoint['job']}/checkpoints/step_{part['step']:09d}/parts/"
            f"{part['digest'].removeprefix('blake3:')}.safetensors"
        )
        for part in checkpoint["parts"]
    ]
    tensors: dict[str, np.ndarray] = {}
    for name, record in checkpoint["tensors"].items():
        if name.startswith(("weights.", "moments.")):
            tensors[name] = np.full(record["shape"], np.nan, "<f4")
            for chunk in record["chunks"]:
                box = tuple(
                    slice(at, at + size)
                    for at, size in zip(chunk["start"], chunk["shape"], strict=True)
                )
                tensors[name][box] = load_tensors(files[chunk["part"]])[chunk["name"]]
    contents = {
        name: compute_blake3(
            _dump_record({"shape": list(tensor.shape), "content": compute_blake3(tensor.tobytes())})
        )
        for name, tensor in tensors.items()
    }
    return compute_blake3(_dump_record(contents))


def _dump_record(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def _find_file_fault(bucket: Bucket, names: set[str], folder: str, digest: str, size: int) -> str:
    """Return the fault of a file of a checkpoint or of its block list; empty if it has none."""
    file = f"{folder}parts/{digest.removeprefix('blake3:')}.safetensors"
    blocks = _make_block_list_name(folder, digest)
    if file not in names:
        return f"there is no {file}"
    body = bucket.read(file)
    if (len(body), compute_blake3(body)) != (size, digest):
        return f"{file} has other bytes than its checkpoint says"
    if not _has_block_list(size):
        return ""
    if blocks not in names:
        return f"there is no {blocks}"
    fits = bucket.read(blocks) == compute_block_list(body)
    return "" if fits else f"{blocks} does not fit its file"


def _make_block_list_name(folder: str, digest: str) -> str:
    return f"{folder}block_digests/{digest.removeprefix('blake3:')}.bin"


def _has_block_list(size: int) -> bool:
    return size > BLOCK_SIZE


def _parse_record(body: bytes) -> dict[str, Any]:
    return json.loads(body)["record"]
