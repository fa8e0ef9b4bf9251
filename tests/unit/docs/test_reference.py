"""The reference in docs/ says what the code says."""

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from pydantic import BaseModel

import millrace.cli.campaign
import millrace.cli.dataset
from docs.generate import REFERENCE, ROOT, find_stale_pages, generate_pages, write_pages
from docs.generator.commands import list_command_paths
from docs.generator.flows import describe_cron, find_command
from docs.generator.schemas import make_schema
from docs.generator.settings_files import FILES, SettingsFile
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cleanup import make_cleaning_outcome_key, make_cleaning_plan_key
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.datasets import (
    CommitName,
    DatasetKeys,
    make_page_index_key,
    make_page_layouts_key,
    make_seek_point_key,
)
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.keys.leases import COLLECTOR, PLAN_REMOVAL, RUNS, LeaseKeys, make_clock_probe_key
from millrace.keys.members import make_member_lease
from millrace.keys.probes import make_audit_probe_key, make_write_probe_key
from millrace.keys.rentals import INSTALLATION, MachineKeys, RentalKeys
from millrace.keys.templar import TemplarKey, TemplarKind, make_templar_key
from millrace.swarm.driving import agent_client

PAGES = sorted(REFERENCE.glob("*.md"))
DIGEST = f"blake3:{'0' * 64}"


def test_no_page_is_stale():
    assert find_stale_pages() == [], "docs is stale: run make docs"


def test_a_page_that_differs_or_is_missing_is_named(tmp_path: Path):
    pages = generate_pages()
    write_pages(tmp_path)
    assert find_stale_pages(tmp_path) == []
    guide = pages["guides/datasets.md"]
    (tmp_path / "guides/datasets.md").write_text(guide.replace("row group |", "row |", 1))
    (tmp_path / "reference/cli.md").write_text("old")
    (tmp_path / "reference/schemas/rent.schema.json").unlink()
    assert find_stale_pages(tmp_path) == [
        "guides/datasets.md", "reference/cli.md", "reference/schemas/rent.schema.json"
    ]  # fmt: skip


def test_every_command_option_setting_and_parameter_has_a_description():
    rows = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.search(r"(?<!\\)\|\s*\|$", line)
    ]
    assert rows == []


def test_every_link_leads_to_a_heading():
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", page.read_text())
        for target in re.findall(r"\]\(([^)]+)\)", text):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.is_file(), target
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
            assert not anchor or anchor in anchors, target


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("millrace.yaml", millrace.cli.dataset._TEMPLATE),
        ("campaign.yaml", millrace.cli.campaign._TEMPLATE),
    ],
    ids=["millrace.yaml", "campaign.yaml"],
)
def test_a_template_fits_its_schema_with_and_without_variables(name: str, template: str):
    schema = Draft202012Validator(make_schema(find_model(name)))
    settings = yaml.safe_load(template)
    schema.validate(settings)
    schema.validate(replace_numbers(settings))
    with pytest.raises(ValidationError):
        schema.validate(settings | {"unknown": 1})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_schema_is_valid_and_its_defaults_fit_it(file: SettingsFile):
    schema = make_schema(file.model)
    Draft202012Validator.check_schema(schema)
    checked = 0
    for definition in [schema, *schema["$defs"].values()]:
        for name, field in definition.get("properties", {}).items():
            if "default" in field:
                Draft202012Validator(field | {"$defs": schema["$defs"]}).validate(field["default"])
                checked += 1
            assert "description" in field or "$ref" in field or name == "$ref", name
    assert checked > 5


def test_a_schedule_in_words():
    assert describe_cron("*/10 * * * *", "UTC") == "every 10 minutes"
    assert describe_cron("47 5 * * 1", "UTC") == "every Monday at 05:47 UTC"
    assert describe_cron("7 2 * * *", "UTC") == "every day at 02:07 UTC"
    with pytest.raises(ValueError, match="no words"):
        describe_cron("0 0 1 * *", "UTC")


def test_every_flow_has_a_command_in_the_table():
    flows = [
        one["name"] for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    ]
    rows = re.findall(
        r"^\| \[`([\w-]+)`\]\(.+?\) \| \[`(millrace [\w -]+)`\]\(.+?\)(.*) \|$",
        (REFERENCE / "flows.md").read_text(),
        re.M,
    )
    assert [flow for flow, _, _ in rows] == flows
    assert {command for _, command, _ in rows} <= set(list_command_paths())
    found = {flow: command + rest for flow, command, rest in rows}
    assert found["verify-checkpoints"] == "millrace checkpoint verify"
    assert found["abort-uploads"] == "millrace bucket abort-uploads"
    assert found["shard-dataset"] == "millrace dataset run"
    for flow, preset in (("clean-versions", "clean_versions"), ("delete-gathers", "delete_gather")):
        assert found[flow] == f"millrace bucket clean with `preset: {preset}` in `clean.yaml`"
    with pytest.raises(LookupError, match="no command for the flow"):
        find_command("verify-nothing")


def test_every_name_that_the_code_builds_is_documented():
    text = (REFERENCE / "object-names.md").read_text()
    names = re.findall(r"^\| `(.+?)` \|", text, re.M)
    patterns = [
        re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(name)) + (".*" if name[-1] == "/" else ""))
        for name in names
    ]
    built = list(build_names())
    unknown = [key for key in built if not any(each.fullmatch(key) for each in patterns)]
    assert unknown == []
    unused = [
        name
        for name, each in zip(names, patterns, strict=True)
        if not any(each.fullmatch(key) for key in built)
    ]
    assert unused == []


def test_every_name_of_the_glossary_is_in_the_code():
    text = (REFERENCE / "glossary.md").read_text()
    words = {
        word
        for top in ("millrace", "flows", "blocks", "tasks")
        for file in (ROOT / top).rglob("*.py")
        for word in re.findall(r"\w+", file.read_text())
    }
    cells = re.findall(r"\| ([^|]+) \|$", text, re.M)
    found = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(found) > 60
    for name in found:
        if name.startswith("millrace."):
            path = ROOT / name.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), name
        elif " " not in name:
            assert words.issuperset(re.findall(r"\w+", name.rpartition(".")[2])), name


def find_model(name: str) -> type[BaseModel]:
    return next(file.model for file in FILES if file.name == name)


def replace_numbers(value: object) -> object:
    """The same settings with a variable for each number."""
    match value:
        case dict():
            return {name: replace_numbers(each) for name, each in value.items()}
        case list():
            return [replace_numbers(each) for each in value]
        case int() | float():
            return "${NUMBER:-1}"
        case _:
            return value


def build_names():
    """Each name that `millrace.keys` builds."""
    dataset, name = DatasetKeys("data/wiki"), CommitName("train-00000", 3)
    lease = LeaseKeys(dataset.dataset, "train-00000")
    yield from (dataset.plan, dataset.plan_removed, dataset.manifest, dataset.index)
    yield from (dataset.block_digests, dataset.card, dataset.readme)
    yield from (
        dataset.make_sample_list_key("train-00000", DIGEST),
        *(
            dataset.make_transform_key(DIGEST, e)
            for e in ("py", "json", "csv", "tsv", "jsonl", "parquet")
        ),
        make_seek_point_key(dataset.make_seek_points_folder(3), 7),
        dataset.make_member_index_key(3),
        dataset.make_file_digests_key("0" * 32),
        dataset.make_shard_key("webdataset", "train", name, "tar"),
        dataset.make_shard_key("webdataset", "train", name, "tar", DIGEST),
        f"{dataset.make_shards_prefix('mds', 'train')}index.json",
        *(
            f"{dataset.make_shards_prefix('pages', 'train')}{name}"
            for name in ("_shard_sizes.json", "_metadata.yaml")
        ),
        f"{dataset.make_shards_prefix('pages', 'train')}{make_page_index_key('text', 1)}",
        f"{dataset.make_shards_prefix('pages', 'train')}{make_page_layouts_key('text', DIGEST)}",
    )
    yield from (
        dataset.make_commit_key(name),
        dataset.make_end_key("train-00000"),
        dataset.make_quarantine_key(name),
        dataset.make_quarantine_key(name, DIGEST),
    )
    yield from (lease.make_term_key(1), lease.make_beat_key(1), lease.make_end_key(1))
    yield LeaseKeys(dataset.dataset, f"{RUNS}/0123").make_term_key(1)
    yield LeaseKeys(dataset.dataset, COLLECTOR).make_term_key(1)
    yield LeaseKeys(dataset.dataset, PLAN_REMOVAL).make_term_key(1)
    job = CheckpointKeys("jobs/one")
    yield from (
        job.make_part_key(1, DIGEST),
        job.make_metadata_key(1),
        job.make_share_key(1, "a", 1, 0),
        job.make_pin_key(1),
    )
    yield job.make_block_list_key(1, DIGEST)
    yield from (
        job.make_quarantine_key(1, DIGEST),
        job.make_damaged_key(1, DIGEST),
        job.make_epoch_key(1),
    )
    cooldown = CooldownKeys("jobs/one", 1)
    yield from (
        cooldown.roster,
        cooldown.make_vote_key("a"),
        cooldown.make_late_vote_key("a"),
        cooldown.make_result_key("a"),
    )
    yield from (cooldown.make_draft_key("a"), cooldown.make_part_key("a", DIGEST))
    yield make_member_lease("jobs/one", "a").make_term_key(1)
    gradients, chain = GradientKeys("runs/one", "1"), ChainKeys("runs/one", "1")
    yield from (gradients.make_gradient_key("w", 1), gradients.make_start_window_key("w", 1))
    yield gradients.make_registration_key("w", 1)
    yield from (chain.make_link_key(1), chain.make_opening_key(1), chain.make_update_key(1, DIGEST))
    yield chain.make_scores_key(1)
    yield CheckpointKeys(chain.job).make_metadata_key(1)
    yield LeaseKeys(chain.job, "aggregator").make_beat_key(1)
    for kind in TemplarKind:
        has_window = kind not in {TemplarKind.START_WINDOW, TemplarKind.GATHERS}
        has_worker = kind in {TemplarKind.GRADIENT, TemplarKind.DEBUG, TemplarKind.CHECKPOINT}
        rest = "41.npz" if kind is TemplarKind.GATHERS else ""
        window, uid = 41 if has_window else -1, 7 if has_worker else -1
        yield make_templar_key(TemplarKey(kind, "0.2.80", window, uid, rest))
    campaign = CampaignKeys("camp")
    yield from (
        campaign.committed_training,
        campaign.prewarm_marker,
        campaign.lease.make_term_key(1),
    )
    yield from (f"{campaign.run}/w/x", f"{campaign.job}/epochs/000001.json")
    rental = RentalKeys("fleet")
    yield from (
        INSTALLATION,
        rental.owner,
        rental.lease.make_term_key(1),
        rental.make_intent_key(1),
    )
    yield from (
        rental.make_contract_key(1),
        rental.make_raised_key(1, 0),
        rental.make_detached_key(1),
        rental.make_released_key(1),
    )
    machine = MachineKeys(rental.make_machine_prefix(1))
    yield from (machine.files, machine.setup, machine.heartbeat, machine.program_exit)
    yield from (machine.make_log_key(1), machine.make_token_key("read"))
    yield from (make_cleaning_plan_key("20261124-ab"), make_cleaning_outcome_key("20261124-ab"))
    yield make_clock_probe_key("data/wiki", "h")
    yield from (make_write_probe_key("a", "b"), make_audit_probe_key("a", "b", "get"))


def test_the_pages_name_the_time_after_which_a_silent_node_is_lost() -> None:
    page = (ROOT / "docs/design/swarm-nodes.md").read_text()
    assert page.count(f"does not answer for {agent_client._ANSWER_TIMEOUT:g} s") == 2
