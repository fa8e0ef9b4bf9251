"""Reports of a run that has ended."""

import pytest

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.datasets import ShardFault, ShardReport, Verification
from millrace.deletion import ObjectFailure
from millrace.digest import compute_digest
from millrace.schemas.dataset import Manifest, ManifestShard, SourceRecord
from millrace.swarm import NodeReport, PrewarmReport
from tasks import checkpointing, cleaning, reports, sharding, stages, verifying, warming
from tasks.formatting import format_duration, format_size, make_artifact_key
from tasks.sharding import ShardingResult
from tasks.warming import PrewarmResult

DIGEST = "blake3:" + "0" * 64


def report(**changes: object) -> ShardReport:
    shards = tuple(
        ManifestShard(
            format="webdataset",
            key=f"words/shards/{n}.tar",
            split="train",
            samples=5,
            size=9,
            digest=DIGEST,
        )
        for n in range(3)
    )
    manifest = Manifest(
        dataset="words", plan_digest=compute_digest(b""), formats=("webdataset",), shards=shards,
        samples={"train": 15, "val": 0}, size=27_000_000, quarantined=2,
    )  # fmt: skip
    source = SourceRecord(
        kind="jsonl", url="s3://raw/words", settings={}, files=1, size=9, digest=DIGEST
    )
    made = ShardReport(
        url="s3://bucket/words", manifest_key="words/manifest.json", manifest=manifest,
        source=source,
        partitions=2, seconds=2.0, new_shards=2, new_samples=10, new_bytes=20_000_000,
    )  # fmt: skip
    return type(made)(**{name: changes.get(name, getattr(made, name)) for name in made.__slots__})


def test_the_report_says_what_there_is_and_what_this_run_did() -> None:
    text = sharding.describe_shards(ShardingResult(report(), {0: 20_000_000}))
    assert text.startswith("**words** is complete: 15 samples in 3 shards, 27.0 MB. This run made ")
    assert "2 shards of them in 2.0 s, 10.0 MB/s." in text
    assert "| Format `webdataset` | 3 shards, 15 samples, 27 bytes |" in text
    assert "| Rows in quarantine | 2 (below `s3://bucket/words/quarantine/`) |" in text
    assert "| Asset | `s3://bucket/words` |" in text
    assert "](data:image/svg+xml;base64," in text


def test_the_report_has_the_warnings_of_the_run() -> None:
    text = sharding.describe_shards(ShardingResult(report(warnings=("Look at *this*.",)), {}))
    assert "**Warning:** Look at \\*this\\*." in text


def test_a_run_that_found_all_done_says_so_without_a_picture() -> None:
    text = sharding.describe_shards(ShardingResult(report(new_shards=0, new_bytes=0), {}))
    assert "All shards were there before this run." in text
    assert "data:image" not in text


def test_an_empty_dataset_is_reported_as_one_that_was_allowed() -> None:
    made = report(new_shards=0, new_samples=0, new_bytes=0)
    empty = made.manifest.model_copy(update={"shards": (), "samples": {"train": 0}, "size": 0})
    nothing = report(manifest=empty, new_shards=0, new_samples=0, new_bytes=0)
    text = sharding.describe_shards(ShardingResult(nothing, {}))
    assert text.startswith("**words** is complete: 0 samples in 0 shards, 0 bytes.")
    assert "The dataset was allowed to be empty." in text
    assert "before this run" not in text


def verified(job: str, *faults: str) -> checkpointing.CheckpointVerification:
    return checkpointing.CheckpointVerification(job, 5, 1, 9, faults)


def test_a_verification_of_no_checkpoint_says_that_nothing_was_verified() -> None:
    text = checkpointing.describe_verification("s3://bucket", [], VerifyDepth.DIGESTS)
    assert text == "`s3://bucket` has no checkpoint, so nothing was verified."
    text = checkpointing.describe_verification("s3://bucket", [verified("a")], VerifyDepth.SIZES)
    assert "1 checkpoint, all as they were saved; sizes were compared." in text


def test_a_named_job_without_a_checkpoint_fails_a_verification() -> None:
    checkpointing.check_verification("s3://bucket", [], [])
    checkpointing.check_verification("s3://bucket", ["a"], [verified("a")])
    with pytest.raises(errors.NotFoundError, match=r"s3://bucket has no checkpoint of typo, b:"):
        checkpointing.check_verification("s3://bucket", ["typo", "a", "b"], [verified("a")])
    with pytest.raises(errors.CorruptError, match=r"1 checkpoint \(a step 5\)"):
        checkpointing.check_verification("s3://bucket", ["typo"], [verified("a", "missing")])


def test_a_verification_names_each_shard_at_fault() -> None:
    found = {
        "words": Verification(
            3, 27, (ShardFault("words/shards/1.tar", "missing"),), includes_digests=True
        ),
        "others": Verification(1, 9, (), includes_digests=True),
    }
    text = verifying.describe_verifications("s3://bucket", found)
    assert text.startswith("`s3://bucket`: 2 complete datasets, 1 shard at fault.")
    assert "| `words/shards/1.tar` | missing |" in text
    found["others"] = Verification(
        1, 9, (), True, (ShardFault("others/block_digests.bin", "missing"),)
    )
    text = verifying.describe_verifications("s3://bucket", found)
    assert "1 shard at fault, 1 other object at fault." in text
    assert "| `others/block_digests.bin` | missing |" in text
    del found["words"]
    text = verifying.describe_verifications("s3://bucket", found)
    assert "every shard is there, 1 other object at fault." in text


def test_a_verification_of_no_dataset_says_that_nothing_was_verified() -> None:
    text = verifying.describe_verifications("s3://bucket", {})
    assert text == "`s3://bucket` has no complete dataset, so nothing was verified."


def test_an_unreadable_manifest_is_a_fault_and_no_shard_of_it_is_called_there() -> None:
    error = errors.CorruptError("s3://bucket/words/manifest.json is damaged.")
    found = {
        "others": Verification(1, 9, (), includes_digests=True),
        "words": verifying.make_failed_verification("words", error, with_digests=False),
    }
    text = verifying.describe_verifications("s3://bucket", found)
    assert text.startswith("`s3://bucket`: 2 complete datasets, 1 other object at fault.")
    assert f"| `words/manifest.json` | {reports.escape(str(error))} |" in text


def test_the_report_of_a_verification_that_an_error_has_ended_says_so() -> None:
    said = "**The run ended before all was verified:** no answer"
    found = {"words": Verification(1, 9, (), includes_digests=True)}
    assert said in verifying.describe_verifications("s3://bucket", found, "no answer")
    text = checkpointing.describe_verification(
        "s3://bucket", [verified("a")], VerifyDepth.SIZES, "no answer"
    )
    assert said in text


def test_the_newest_stages_are_shown() -> None:
    runs = [stages.StageRun(f"run-{n}", "Completed", "", 1.0, None) for n in range(203)]
    assert "are not shown" not in stages.format_stages(runs[:200])
    text = stages.format_stages(runs)
    assert "run-202" in text
    assert "run-2 " not in text
    assert "3 earlier runs are not shown." in text


def test_words() -> None:
    assert [format_size(n) for n in (999, 1_500, 2e9)] == ["999 bytes", "1.5 kB", "2.0 GB"]
    assert [format_duration(s) for s in (3.14, 252, 7300)] == ["3.1 s", "4 min 12 s", "2 h 1 min"]
    assert [format_duration(s) for s in (0, 0.049, 0.05)] == ["0.0 s", "less than 0.1 s", "0.1 s"]
    assert make_artifact_key("shards", "Fine_Web/2024") == "shards-fine-web-2024"


def node(name: str, **changes: object) -> NodeReport:
    values: dict[str, object] = {
        "name": name, "ready": True, "reason": "", "cached": 0, "from_store": 3_000_000,
        "from_peers": 7_000_000, "failures": 1, "seconds": 2.5, "trusted": True,
        "id": name,
    }  # fmt: skip
    return NodeReport(**(values | changes))  # pyright: ignore[reportArgumentType]


def test_the_report_of_a_swarm_names_every_node() -> None:
    lost = node("n1", ready=False, reason="it no longer answers", trusted=False)
    report = PrewarmReport(
        files=2, size=10_000_000, unverified=1, unconfirmed=1, driver_bytes=0,
        seconds=4.0, startup=1.0, nodes=(node("n0"), lost), direct="it gave more", curve=(),
        refused=("The block digests of s3://b/text were not used: missing.",),
    )  # fmt: skip
    text = warming.describe_nodes(PrewarmResult(report, {0: 20_000_000}))
    assert text.startswith("**1 of 2 nodes** has all of 2 files, 10.0 MB, after 4.0 s. 6.0 MB left")
    assert "| `n0` | yes | 0 bytes | 3.0 MB | 7.0 MB | 1 | 2.5 |" in text
    assert "| `n1` | no: it no longer answers (gave wrong bytes) |" in text
    assert "1 file unverified at the source" in text
    assert "Of 1 of them a part was read by one node alone" in text
    assert "Nodes also read from the store what others had: it gave more." in text
    assert "The block digests of " in text
    assert " were not used: missing." in text
    assert "](data:image/svg+xml;base64," in text


def test_a_link_goes_to_a_plain_web_page_only() -> None:
    page = "https://huggingface.co/team/model/tree/main"
    assert reports.format_link("hf://team/model@main", page).endswith(f"]({page})")
    for url in ("javascript:alert(1)", "https://x/a)b", "https://x/ y", "file:///x", "//x"):
        with pytest.raises(ValueError, match="plain web pages"):
            reports.format_link("x", url)


@pytest.mark.parametrize(("has_given_up", "others"), [(True, "not all tried"), (False, "deleted")])
def test_the_error_of_a_cleaning_says_what_became_of_the_other_objects(
    has_given_up: bool, others: str
):
    failures = (ObjectFailure("a/b", "denied"),)
    with pytest.raises(errors.MillraceError, match=rf"The other objects were {others}\."):
        cleaning.raise_failures("file:///a", failures, has_given_up=has_given_up)
