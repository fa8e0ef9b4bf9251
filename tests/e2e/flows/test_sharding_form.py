"""Parquet files become shards of two formats, as a person does it in a browser."""

import re
from pathlib import Path

import pyarrow
from playwright.sync_api import Page, expect
from pyarrow import parquet

from tests.e2e.flows.test_form import MAX_HEIGHT, WIDTH, started
from tests.prefect_server import PrefectServer, Worker
from tests.support.flows.browser import (
    choose,
    find_field,
    open_artifact,
    open_run_form,
    press,
    read_refusal,
)

ROWS = 600


def write_tables(folder: Path) -> None:
    """Write files of parquet, and one beside them that is left out."""
    folder.mkdir()
    for number in range(3):
        rows = range(number * ROWS // 3, (number + 1) * ROWS // 3)
        table = pyarrow.table({"text": [f"caption {n}" for n in rows], "number": list(rows)})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=50)
    (folder / "README.md").write_text("# Captions\n")


def test_parquet_becomes_two_formats_by_the_form_and_the_report_counts_them(
    deployed: PrefectServer, worker: Worker, page: Page, tmp_path: Path
) -> None:
    source, out = tmp_path / "captions", tmp_path / "out"
    write_tables(source)
    refused: list[str] = []
    page.on(
        "response", lambda answer: answer.status >= 400 and refused.append(read_refusal(answer))
    )
    page.set_viewport_size({"width": WIDTH, "height": MAX_HEIGHT})
    open_run_form(deployed, page, "shard-dataset")

    find_field(page, "Dataset").get_by_role("textbox").fill("captions")
    choose(page, "Kind", "parquet")
    for label, kind, url in (
        ("URL", "Text", source.as_uri()),
        ("Destination", "Name or URL", out.as_uri()),
    ):
        find_field(page, label).get_by_role("button", name=kind, exact=True).click()
        find_field(page, label).get_by_role("textbox").fill(url)
    find_field(page, "Sharding").get_by_role("button", name="Sharding settings").click()
    expect(find_field(page, "Formats")).to_contain_text("Each has all samples")
    choose(page, "Formats", "litdata")
    expect(find_field(page, "Formats")).to_contain_text("webdataset")
    expect(find_field(page, "Dataset").get_by_role("textbox")).to_have_value("captions")
    page.screenshot(path=tmp_path / "form.png", full_page=True)

    press(page, "Submit", lambda: started(deployed, out.as_uri()), refused)
    run = started(deployed, out.as_uri())
    assert run is not None
    state = deployed.wait(run, "Completed", "Failed").state
    assert state is not None
    assert state.name == "Completed", state.message
    open_artifact(deployed, page, run, "progress-captions")
    expect(page.get_by_text(re.compile(r"(\d+) of \1 partitions? ended"))).to_be_visible()
    expect(page.get_by_text("100%").first).to_be_visible()
    page.screenshot(path=tmp_path / "progress.png", full_page=True)

    open_artifact(deployed, page, run, "The dataset captions, complete")
    expect(page.get_by_text("captions is complete: 600 samples in 6 shards")).to_be_visible()
    for name in ("webdataset", "litdata"):
        row = page.get_by_role("row").filter(has_text=f"Format {name}")
        expect(row).to_contain_text("3 shards, 600 samples, ")
    expect(page.get_by_role("img", name="rate in MB/s")).to_be_visible()
    page.screenshot(path=tmp_path / "report.png", full_page=True)
