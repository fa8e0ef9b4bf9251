"""Text from outside in reports and at a terminal: it is shown, and does nothing."""

import ast
import base64
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from prefect.server.utilities.user_templates import render_user_template_sync

import tasks
from blocks.setup import _FAILURE_REASON
from millrace.progress_bar import BytesBar
from millrace.swarm.progress_events import NodeLost
from millrace.terminal import echo, echo_text, make_console, make_table
from tasks import reports
from tasks.plot import draw_line, draw_rate, draw_windows
from tests.unit.tasks import hostile

REPORTS = [
    "tasks.auditing.report_audit",
    "tasks.campaign_tasks.report_campaign",
    "tasks.checkpointing.report_checkpoints",
    "tasks.checkpointing.report_copy",
    "tasks.checkpointing.report_import",
    "tasks.cleaning.report_cleaning",
    "tasks.cleaning.report_contents",
    "tasks.cleaning.report_plan",
    "tasks.cleaning.report_uploads",
    "tasks.cooldown.report_epoch",
    "tasks.copying.report_copied_objects",
    "tasks.merging.report_windows",
    "tasks.renting.report_offers",
    "tasks.renting.report_rentals",
    "tasks.scoring.report_scores",
    "tasks.sharding.report_shards",
    "tasks.verifying.report_verifications",
    "tasks.warming.report_nodes",
]
HARMLESS = {"text", "text_special", "code_inline", "strong_open", "strong_close", "softbreak"}
AUTOLINK = re.compile(r"(?i)://|\bwww\.|\w@\w|//\w|[a-z]\.(example|[a-z]{2,})\b")
OURS = "Vast.ai"
LONGEST = 5000  # characters of a block, half of which may be backslashes


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect the artifacts in place of Prefect's API."""
    found: list[dict[str, Any]] = []

    def keep(markdown: str, **more: Any) -> None:
        found.append({"markdown": markdown, **more})

    monkeypatch.setattr(reports, "create_markdown_artifact", keep)
    return found


def parsed(text: str) -> list[Token]:
    """The tokens of Markdown with tables and HTML; each escaped character is one of its own."""
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return parser.disable("text_join").parse(text)


def shape(text: str) -> list[str]:
    return [token.type for token in parsed(text)]


def refuse_harm(text: str) -> None:
    """Fail if a report holds a link, an image of others, HTML, or what a renderer would link."""
    for token in parsed(text):
        assert token.type not in {"html_block", "fence", "code_block", "heading_open", "hr"}
        assert len(token.content) < LONGEST or "data:image" in token.content
        for child in token.children or []:
            if child.type == "image":
                assert str(child.attrs["src"]).startswith("data:image/svg+xml;base64,")
                continue
            assert child.type in HARMLESS, (child, text)
            if child.type == "text":
                assert not AUTOLINK.search(child.content.replace(OURS, "")), (child.content, text)
    for line in text.splitlines():
        assert all(one.isprintable() for one in line), line
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.endswith(" |") or set(row) <= set("|-:") for row in rows)


def find_artifacts(source: str) -> set[str]:
    """Return the functions of Prefect that create artifacts, and that a module names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.alias(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
    return {name for name in found if re.fullmatch("a?create_.*_artifact|Artifact", name)}


@pytest.mark.parametrize(
    "source",
    [
        "from prefect.artifacts import create_table_artifact as create",
        "prefect.artifacts.create_markdown_artifact('# x')",
        "artifacts.acreate_link_artifact('x')",
        "artifacts.Artifact(type='markdown', data='# x').create()",
    ],
)
def test_each_way_to_create_an_artifact_is_found(source: str) -> None:
    assert find_artifacts(source)
    assert not find_artifacts("from tasks.reports import publish_report\npublish_report('x')")


def test_every_report_is_in_the_list_and_none_goes_past_the_helper() -> None:
    assert sorted(hostile.publishing()) == REPORTS
    root = Path(str(tasks.__file__)).parents[1]
    for folder in ("tasks", "flows", "blocks"):
        for path in (root / folder).glob("*.py"):
            artifacts = find_artifacts(path.read_text())
            allowed = {"reports": "markdown", "progress": "progress"}.get(path.stem, "no")
            assert artifacts <= {f"create_{allowed}_artifact"}, path


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_shows_hostile_text_and_nothing_of_it_is_markdown(
    published: list[dict[str, Any]], name: str, last: bool
) -> None:
    hostile.publish(name, "harmless", last)
    usual = published.pop()
    for text in hostile.TEXTS:
        hostile.publish(name, text, last)
        made = published.pop()
        refuse_harm(made["markdown"])
        refuse_harm(made["description"])
        assert shape(made["markdown"]) == shape(usual["markdown"]), (text, made["markdown"])
        assert cells(made["markdown"]) == cells(usual["markdown"])


def cells(text: str) -> list[int]:
    """Count the cells of each line of a table."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows]


def test_a_plain_string_that_is_published_is_escaped(published: list[dict[str, Any]]) -> None:
    for text in hostile.TEXTS:
        reports.publish_report(text, key="x", description=text)
        refuse_harm(published[-1]["markdown"])


def test_what_is_shown_is_the_text() -> None:
    for text in (
        "a_b*c [d](e) <f> |g| `h` \\ # 1. &amp; x@y.z http://a.b/c",
        "# x",
        "12. x",
        "- y",
    ):
        (_, inline, _) = MarkdownIt("commonmark").parse(reports.escape(text))
        assert inline.children is not None
        assert "".join(child.content for child in inline.children) == text
    assert reports.format_code("data/train-00000.tar") == "`data/train-00000.tar`"
    assert reports.escape("0.5 s, 1.2 GB: all as it was.") == "0.5 s, 1.2 GB: all as it was."


@pytest.mark.parametrize("text", [*hostile.TEXTS, None])
def test_a_notice_to_a_chat_links_calls_and_draws_nothing(text: str | None) -> None:
    run = SimpleNamespace(state=SimpleNamespace(message=text))
    shown = render_user_template_sync(f"{{{{ {_FAILURE_REASON} }}}}", {"flow_run": run})
    assert len(shown) <= 5 * 500  # of 500 characters, each may be an entity
    assert not re.search(r"(?i)://|\bwww\.|@\w|\]\(|[<>\n\u202a-\u202e\u2066-\u2069]", shown)


def test_long_text_is_cut_and_a_key_keeps_both_ends() -> None:
    assert reports.escape("x" * 1000) == "x" * 299 + "…"
    assert reports.escape("x" * 10_000_000) == "x" * 299 + "…"
    key = reports.format_code(f"begin/{'x' * 1000}/end.tar")
    assert key.startswith("`begin/")
    assert key.endswith("/end.tar`")
    assert len(key) <= 202


def test_a_table_refuses_a_row_of_another_length_and_tells_what_it_hides() -> None:
    with pytest.raises(ValueError, match="3 cells in a table of 2 columns"):
        reports.format_table(("a", "b"), [("1", "2", "3")])
    assert (
        reports.format_table(("a", ">b"), [("x", 1)] * 9, 2).splitlines()[-1] == "| and 7 more |  |"
    )


@pytest.mark.parametrize("uri", ["https://evil.example/x.png", "data:image/svg+xml;base64,x)[y]("])
def test_a_picture_of_others_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="SVG in a data URI only"):
        reports.format_image(uri, "x")


@pytest.mark.parametrize("text", hostile.TEXTS)
def test_a_plot_shows_hostile_text_as_text(text: str) -> None:
    for uri in (
        draw_rate({0: 5}, 1.0, text),
        draw_line({0: 1.0, 1: 2.0}, text, text),
        draw_windows({1: 2}, {1: [1.0]}, text),
    ):
        svg = ET.fromstring(base64.b64decode(uri.partition(",")[2]))
        names = {element.tag.rpartition("}")[2] for element in svg.iter()}
        assert names <= {"svg", "rect", "text", "path", "polyline", "g"}
        assert all(len(element.text or "") <= 100 for element in svg.iter())


@pytest.mark.parametrize("text", hostile.TEXTS)
def test_a_terminal_is_told_nothing_that_it_obeys(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    echo(text)
    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    assert shown[:-1].isprintable()
    echo_text(text, err=True)
    assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


def test_a_table_at_a_terminal_takes_brackets_for_what_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = make_table("name", "why")
    table.add_row("[bold]x[/bold] [link=http://evil.example]y[/link] :smile:", "\x1b[31m\n\u202e")
    make_console().print(table)
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]" in shown.replace("\n", "")
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    bar = BytesBar()
    bar(NodeLost(node="[red]n[/red]\x1b[31m", reason="[/x] \x1b]8;;http://evil.example\x07"))
    told = capsys.readouterr().err
    assert "[red]n[/red]�" in told
    assert "\x1b" not in told


def find_prints(source: str) -> list[str]:
    """Return what a module prints by, other than the helpers of `millrace.terminal`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="print"), args=[_, *_]):
                found.append("print")
            case ast.ImportFrom(module="click"):
                found += [one.name for one in node.names if one.name in {"echo", "secho"}]
            case ast.Attribute(attr="echo" | "secho"):
                found.append(ast.unparse(node))
            case ast.Attribute(attr="write" | "writelines", value=stream):
                found += re.findall(r"\bstd(?:out|err)\b", ast.unparse(stream))
            case ast.Name(id="Console") | ast.Attribute(attr="Console"):
                found.append("Console")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "click.echo(name)", "click.secho(name)", "from click import echo", "print(name)",
        "sys.stdout.write(name)", "sys.stderr.buffer.write(name)", "rich.console.Console()",
    ],
)  # fmt: skip
def test_each_way_to_print_without_a_helper_is_found(source: str) -> None:
    assert find_prints(source)
    assert not find_prints("echo(name)\nmake_console().print(table)\nprint(flush=True)")


def test_commands_print_by_the_helpers_only() -> None:
    root = Path(str(tasks.__file__)).parents[1]
    for path in [*(root / "millrace/cli").rglob("*.py"), root / "flows/campaign_command.py"]:
        assert find_prints(path.read_text()) == [], path
