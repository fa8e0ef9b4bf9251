"""Write the dataset card, ``README.md``, by which ``datasets.load_dataset`` opens the shards.

The card is made from its record and the manifest, so its bytes are the same at each run. The record
is written before the card, and both after the manifest. The last line of a card has the digest of
the lines above, so an edited card is recognised, and is never replaced.

``datasets`` opens all configs of a card with the reader of the first one. So a card has configs of
formats that one reader reads: ``parquet`` and ``pages``, or else ``webdataset``. Without shards of
these, it has one config without files, and ``datasets`` says that there are none.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from millrace import errors
from millrace.datasets.field_names import KEY
from millrace.datasets.formats import FieldType, FormatName
from millrace.datasets.indexes import describe_index
from millrace.datasets.progress_events import CardUploaded
from millrace.datasets.settings import CardSettings
from millrace.digest import compute_digest
from millrace.formatting import clean_text, format_count, format_size
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Progress, ignore_event
from millrace.records import encode_record, fetch
from millrace.schemas.dataset import DatasetCard, DatasetPlan, Manifest, ManifestShard, SourceRecord
from millrace.storage import Store, exists, put, read

_CONFIGS = ((FormatName.PARQUET, FormatName.PAGES), (FormatName.WEBDATASET,))  # by reader
_EXTENSIONS = {FormatName.WEBDATASET: "tar"}  # the others are parquet files
_FEATURES: Mapping[FieldType, dict[str, str]] = {
    FieldType.BYTES: {"dtype": "binary"},
    FieldType.STR: {"dtype": "string"},
    FieldType.JSON: {"dtype": "string"},
    FieldType.INT: {"dtype": "int64"},
    FieldType.FLOAT: {"dtype": "float64"},
    FieldType.UINT16_ARRAY: {"list": "uint16"},
    FieldType.UINT32_ARRAY: {"list": "uint32"},
}
_PARQUET = '`datasets.load_dataset("parquet", ...)`'
_READERS: Mapping[FormatName, str] = {
    FormatName.LITDATA: "`litdata.StreamingDataset`",
    FormatName.MDS: "`streaming.StreamingDataset`",
    FormatName.PAGES: _PARQUET,
    FormatName.PARQUET: _PARQUET,
    FormatName.TOKENS: "`numpy.load`",
    FormatName.WEBDATASET: '`datasets.load_dataset("webdataset", ...)`, `webdataset`',
}
_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")  # of the Hub
_MAX_URL = 2000  # characters
_SEAL = b"<!-- Digest of the text above: %b -->\n"


def make_card(settings: CardSettings, plan: DatasetPlan) -> DatasetCard:
    """Return the record of the card of a dataset."""
    return DatasetCard(source=plan.source, license=settings.license)


def check_readme(store: Store, keys: DatasetKeys) -> None:
    """Check that a ``README.md`` which is not a card of Millrace has not been there before a card.

    One or two requests.

    Raises:
        ConflictError: There is such a ``README.md``, and no record of a card.
    """
    if _has_foreign_readme(store, keys) and not exists(store, keys.card):
        raise errors.ConflictError(
            f"{store.make_url(keys.readme)} was not written by Millrace, and `card` would replace "
            "it. Move it away, or remove `card` from the settings."
        )


def write_card(
    store: Store, card: DatasetCard, manifest: Manifest, *, progress: Progress = ignore_event
) -> str:
    """Write the record of a card, and the card, unless they are there already.

    A card that was edited or replaced since Millrace wrote it stays as it is.

    Returns:
        Sentence about a card that stays; empty if the card of this record is stored.

    Raises:
        ConflictError: There is a ``README.md`` that Millrace did not write, and no record.
    """
    keys = DatasetKeys(manifest.dataset)
    check_readme(store, keys)
    bodies = {keys.card: encode_record(card, nonce=""), keys.readme: render_card(card, manifest)}
    for key, body in bodies.items():
        if describe_index(store, key, body):
            if key == keys.readme and _has_foreign_readme(store, keys):
                return (
                    f"{store.make_url(key)} was edited or replaced since Millrace wrote it, so it "
                    "was left as it is. Remove `card` from the settings to keep the file, or move "
                    "the file away and run again to get the card of Millrace."
                )
            put(store, key, body)
            progress(CardUploaded(key=key))
    return ""


def describe_card_faults(store: Store, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the objects of a card that are at fault, each with a short text.

    A dataset without the record of a card has no card. A card that was edited or replaced since
    Millrace wrote it is not at fault.

    Raises:
        UnavailableError: The store does not answer.
    """
    keys = DatasetKeys(manifest.dataset)
    try:
        card = fetch(store, keys.card, DatasetCard)
    except errors.NotFoundError:
        return
    except errors.CorruptError:
        yield keys.card, "cannot be read"
        return
    reason = describe_index(store, keys.readme, render_card(card, manifest))
    if reason and not _has_foreign_readme(store, keys):
        yield keys.readme, reason


def render_card(card: DatasetCard, manifest: Manifest) -> bytes:
    """Return the bytes of a card: YAML for ``datasets`` and the Hub, and text for people."""
    metadata = yaml.safe_dump(_make_metadata(card, manifest), sort_keys=False, allow_unicode=True)
    content = f"---\n{metadata}---\n\n{_make_text(card, manifest)}\n".encode()
    return content + _make_seal(content)


def _make_seal(content: bytes) -> bytes:
    """Return the last line of a card, which has the digest of the lines above."""
    return _SEAL % compute_digest(content).encode()


def _has_foreign_readme(store: Store, keys: DatasetKeys) -> bool:
    """Decide whether there is a ``README.md`` other than one that Millrace wrote. One request."""
    try:
        body = read(store, keys.readme, max_size=DatasetCard.record_bytes)
    except errors.NotFoundError:
        return False
    except errors.CorruptError:  # larger
        return True
    lines, newline, _ = body.removesuffix(b"\n").rpartition(b"\n")
    content = lines + newline
    return body != content + _make_seal(content)


def _make_metadata(card: DatasetCard, manifest: Manifest) -> dict[str, Any]:
    samples = sum(manifest.samples.values())
    metadata: dict[str, Any] = {"license": card.license} if card.license else {}
    metadata["size_categories"] = [_find_size_category(samples)]
    configs: list[dict[str, Any]] = []
    infos: list[dict[str, Any]] = []
    for name in _select_configs(manifest):
        splits = _group_by_split(manifest, name)
        folder, extension = f"shards/{name}", _EXTENSIONS.get(name, "parquet")
        files: list[dict[str, Any]] = [
            {"split": split, "path": f"{folder}/{split}/*.{extension}"} for split in splits
        ]
        if not card.source.is_reproducible:  # shards that do not count may lie beside the others
            prefix = f"{manifest.dataset}/"
            files = [
                {"split": split, "path": [shard.key.removeprefix(prefix) for shard in own]}
                for split, own in splits.items()
            ]
        configs.append({"config_name": str(name), "data_files": files})
        infos.append(
            {
                "config_name": str(name),
                **_describe_features(name, manifest.fields),
                "splits": [_describe_split(split, own) for split, own in splits.items()],
                "download_size": sum(one.size for own in splits.values() for one in own),
            }
        )
    if not configs:  # without any, `datasets` reads the records and indexes in JSON as samples
        return metadata | {"configs": [{"config_name": "default", "data_files": []}]}
    configs[0]["default"] = True
    return metadata | {"configs": configs, "dataset_info": infos}


def _select_configs(manifest: Manifest) -> list[FormatName]:
    """Return the formats with shards that the first reader reads, of those that read any."""
    present = {shard.format for shard in manifest.shards}
    for formats in _CONFIGS:
        if found := [name for name in formats if name in present]:
            return found
    return []


def _group_by_split(manifest: Manifest, shard_format: str) -> dict[str, list[ManifestShard]]:
    splits: dict[str, list[ManifestShard]] = {}
    for shard in sorted(manifest.shards, key=lambda one: one.key):
        if shard.format == shard_format:
            splits.setdefault(shard.split, []).append(shard)
    return splits


def _describe_split(split: str, shards: Sequence[ManifestShard]) -> dict[str, Any]:
    """Return the numbers of a split, which ``datasets`` compares after it has read all samples."""
    return {
        "name": split,
        "num_bytes": sum(one.size for one in shards),
        "num_examples": sum(one.samples for one in shards),
    }


def _describe_features(name: FormatName, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a format with their types; nothing for a format without types."""
    if name is FormatName.WEBDATASET:
        return {}
    columns = {field: field for field in fields}
    if name is FormatName.PAGES:
        # pyarrow is imported only for what needs it.
        from millrace.datasets.formats.parquet import name_page_columns  # noqa: PLC0415

        columns = name_page_columns(fields)
    features = [{"name": KEY, "dtype": "string"}]
    features += [
        {"name": columns[field], **_FEATURES[FieldType(kind)]}
        for field, kind in sorted(fields.items())
    ]
    return {"features": features}


def _find_size_category(samples: int) -> str:
    limits = [1000 * 10**power for power in range(len(_SIZES))]
    if samples < limits[0]:
        return f"n<{_SIZES[0]}"
    for (_, low), (limit, high) in pairwise(zip(limits, _SIZES, strict=True)):
        if samples < limit:
            return f"{low}<n<{high}"
    return f"n>{_SIZES[-1]}"


def _make_text(card: DatasetCard, manifest: Manifest) -> str:
    samples = format_count(sum(manifest.samples.values()), "sample")
    shards = format_count(len(manifest.shards), "shard")
    size = format_size(manifest.size)
    parts = [
        f"# {manifest.dataset}",
        f"This dataset has {samples} in {shards}, {size}. Each format has all samples.",
        _format_table(
            ("split", "samples"), [(name, f"{n:,}") for name, n in manifest.samples.items()]
        ),
        _format_table(("format", "folder", "shards", "bytes", "read by"), _list_formats(manifest)),
        "## Source",
        _describe_source(card.source),
    ]
    if steps := card.source.settings.get("transforms", {}).get("steps"):
        kinds = ", ".join(f"`{step['kind']}`" for step in steps)
        parts.append(f"Transforms of the samples, in their order: {kinds}.")
    if manifest.dropped:
        parts.append(f"They dropped {format_count(manifest.dropped, 'row')} of the source.")
    if manifest.quarantined:
        count = format_count(manifest.quarantined, "row")
        parts.append(f"{count} of the source made no sample.")
    if card.license:
        parts += ["## License", f"`{card.license}`"]
    parts.append(
        "Millrace wrote this file, and writes it again if its settings change, unless the file was "
        "edited. `manifest.json` has the digest of every shard."
    )
    return "\n\n".join(parts) + "\n"


def _list_formats(manifest: Manifest) -> list[tuple[str, ...]]:
    configs = _select_configs(manifest)
    rows: list[tuple[str, ...]] = []
    for name in map(FormatName, manifest.formats):
        own = [shard for shard in manifest.shards if shard.format == name]
        size = f"{sum(one.size for one in own):,}"
        reader = f'`datasets.load_dataset(FOLDER, "{name}")`'
        if name not in configs:
            reader = _READERS[name]
        rows.append((f"`{name}`", f"`shards/{name}/`", f"{len(own):,}", size, reader))
    return rows


def _describe_source(source: SourceRecord) -> str:
    return (
        f"The samples were made of {format_count(source.files, 'file')} "
        f"({format_size(source.size)}) of the kind `{source.kind}`, at "
        f"{_format_code(source.url)}. The digest of the paths, sizes and ETags of these files is "
        f"`{source.digest}`."
    )


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_code(text: str) -> str:
    """Return a text as code of Markdown, also if it has backticks."""
    text = clean_text(text, _MAX_URL)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " * bool(longest)
    return f"{fence}{space}{text}{space}{fence}"
