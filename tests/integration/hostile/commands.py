"""Every command of ``millrace`` over a site that a principal has written to.

`COMMANDS` has a line for each command that the parser knows, or says why a command touches no
bucket: `test_commands` compares the two.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import click
from click.testing import CliRunner

from millrace.checkpoints.cooldown.rosters import commit_roster
from millrace.cleanup import make_confirmation
from millrace.cli import main
from tests.integration.hostile.site import Site

WITHOUT_A_BUCKET = {
    "init": "writes a settings file",
    "dataset import-settings": "translates a settings file",
    "campaign init": "writes a settings file",
    "gradient key": "writes a key to the disk",
    "deploy": "talks to a Prefect server only",
    "setup": "talks to a Prefect server only; --check is the audit's engine",
    "swarm node": "is told by a driver what to read: the flow `prewarm` runs it",
    "campaign worker": "starts a training script: the commands of `gradient` are its engine",
    **{f"dataset {name}": f"is `{name}`" for name in ("init", "plan", "run", "status", "verify")},
    "campaign run": "needs a Prefect server: its steps are flows that run alone",
}

Words = Callable[[Site], list[str]]


def known_commands(group: click.Group = main, before: str = "") -> Iterator[str]:
    """Yield all commands that the parser knows, those of subcommands by two words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from known_commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def settings(site: Site, file: str, /, **values: Any) -> str:
    """Write a settings file (JSON is YAML), and return its path."""
    path = site.folder / file
    path.write_text(json.dumps(values))
    return str(path)


def invoke(site: Site, words: list[str]) -> list[Any]:
    """Run a command in this process, and return its exit code and whether it prints only text.

    Raises:
        RuntimeError: The command ended with a traceback.
    """
    key = site.server
    os.environ |= {
        "AWS_ACCESS_KEY_ID": key.access_key_id,
        "AWS_SECRET_ACCESS_KEY": key.secret_access_key,
        "AWS_ENDPOINT_URL": key.lens,
        "AWS_REGION": "us-east-1",
        "COLUMNS": "200",
    }
    os.chdir(site.folder)
    done = CliRunner().invoke(main, words)
    site.said += done.output.splitlines()
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise RuntimeError(f"{' '.join(words)} ends with a traceback") from done.exception
    odd = {c for c in done.output if c != "\n" and not c.isprintable()}
    return [done.exit_code, sorted(odd)]


def command(name: str, words: Words) -> Callable[[Site], Any]:
    """Return the act of a flow: a command, its exit code, and what is left of our objects."""

    def act(site: Site) -> Any:
        code = _JUDGES.get(name, invoke)(site, words(site))
        left = [
            key
            for key in site.list_unwritten()
            if not key.startswith(("_clean/", "_probe", "_audit"))
        ]
        return [*code, sorted(left)]

    return act


def copy_bucket(site: Site) -> list[Any]:
    """Run `bucket copy` into a folder; return its exit code and whether it prints only text.

    The exit code is 1 where a hostile key cannot be in a folder: the copy names the key.
    """
    code, odd = invoke(site, ["bucket", "copy", _url(site), str(site.folder / "backup")])
    return [0 if site.junk and code == 1 else code, odd]


def judge_dataset(site: Site, words: list[str]) -> list[Any]:
    """Run a command that verifies a dataset; return its exit code and whether it prints only text.

    The exit code is 1 where hostile objects lie beside the shards, which are right: all are named.
    """
    code, odd = invoke(site, words)
    strays = [line for line in site.said if "not in the manifest" in line]
    whole = ("12 shards of 12 as the manifest says", "12 shards verified, 0 made again")
    is_whole = any(text in line for text in whole for line in site.said)
    return [0 if site.junk and code == 1 and strays and is_whole else code, odd]


def judge_status(site: Site, words: list[str]) -> list[Any]:
    """Run `status` of a URL; return its exit code and whether it prints only text.

    The exit code is 1 where a hostile object has the name of a plan: it is named as a dataset that
    cannot be read, and the dataset beside it is shown.
    """
    code, odd = invoke(site, words)
    is_named = any(" cannot be read: " in line for line in site.said)
    is_shown = any(line.startswith("sets/words: complete") for line in site.said)
    return [0 if site.junk and code == 1 and is_named and is_shown else code, odd]


_JUDGES = {"run": judge_dataset, "verify": judge_dataset, "status": judge_status}


def _url(site: Site, below: str = "") -> str:
    return f"s3://{site.server.bucket}/{site.prefix}{below}".rstrip("/")


def _store(site: Site, below: str = "") -> Any:
    return site.make_spec(below).reveal_secrets()


def _pipeline(site: Site) -> str:
    from tests.integration.hostile.flows import pipeline

    made = pipeline(site)
    source = {
        **site.make_spec("src").reveal_secrets(),
        "kind": "jsonl",
        "include": ["data/*.jsonl"],
    }
    parts = (made.sharding, made.execution)
    sharding, execution = (part.model_dump(mode="json") for part in parts)
    return settings(
        site, "millrace.yaml", dataset=made.dataset, source=source, store=_store(site, "dst"),
        sharding=sharding, execution=execution,
    )  # fmt: skip


def _rules(site: Site) -> str:
    from tests.integration.hostile.flows import RULES

    rules = [rule.model_dump(mode="json") for rule in RULES]
    return settings(site, "clean.yaml", store=_store(site), rules=rules)


def _audit(site: Site) -> str:
    store = _store(site)
    write = store.pop("credentials")
    return settings(site, "audit.yaml", roles={"all": {"store": store, "write_credentials": write}})


def _prewarm(site: Site) -> str:
    host = {"url": "http://127.0.0.1:1", "name": "n0"}
    return settings(
        site, "prewarm.yaml", requests=[{"dataset": "sets/words"}],
        stores={"s": _store(site, "dst")}, root="/unused",
        nodes={"kind": "hosts", "hosts": [host], "key": "0123456789abcdef"},
    )  # fmt: skip


def _wipe(site: Site) -> list[str]:
    name = make_confirmation(site.open_store().location)
    return ["bucket", "wipe", _url(site), "--confirm", name]


def _clear_votes(site: Site) -> list[str]:
    commit_roster(site.open_store(), "runs/one", 1, ["n0"])
    return ["checkpoint", "clear-votes", _url(site), "runs/one", "1", "--yes"]


DATASETS: dict[str, Words] = {
    "plan": lambda site: ["plan", _pipeline(site)],
    "run": lambda site: ["run", _pipeline(site), "--repair"],
    "verify": lambda site: ["verify", _url(site, "dst"), "sets/words"],
    "status": lambda site: ["status", _url(site, "dst")],
    "dataset collect-garbage": lambda site: [
        "dataset",
        "collect-garbage",
        _url(site, "dst"),
        "sets/words",
        "--yes",
        "--min-age",
        "0s",
    ],
    "swarm prewarm": lambda site: ["swarm", "prewarm", _prewarm(site), "--dry-run"],
}
PAGES: dict[str, Words] = {
    "dataset index": lambda site: ["dataset", "index", _url(site, "pages")],
}
CHECKPOINTS: dict[str, Words] = {
    "checkpoint list": lambda site: ["checkpoint", "list", _url(site), "runs/one"],
    "checkpoint verify": lambda site: ["checkpoint", "verify", _url(site), "runs/one"],
    "checkpoint retain": lambda site: [
        "checkpoint",
        "retain",
        _url(site),
        "runs/one",
        "--last",
        "1",
        "--yes",
    ],
    "checkpoint save": lambda site: [
        "checkpoint",
        "save",
        _url(site),
        "runs/one",
        (site.folder / "copy").as_uri(),
    ],
    "checkpoint import": lambda site: [
        "checkpoint",
        "import",
        _url(site, "others"),
        "imported",
        (site.folder / "copy").as_uri(),
    ],
    "checkpoint pin": lambda site: ["checkpoint", "pin", _url(site), "runs/one", "2"],
    "checkpoint unpin": lambda site: ["checkpoint", "unpin", _url(site), "runs/one", "2"],
    "checkpoint probe": lambda site: ["checkpoint", "probe", _url(site), "runs/one"],
    "checkpoint clear-votes": _clear_votes,
}
BUCKETS: dict[str, Words] = {
    "bucket audit": lambda site: ["bucket", "audit", _audit(site)],
    "bucket clean": lambda site: ["bucket", "clean", _rules(site), "--keys", "--yes"],
    "bucket list": lambda site: ["bucket", "list", _url(site)],
    "bucket usage": lambda site: ["bucket", "usage", _url(site), "--depth", "2"],
    "bucket wipe": _wipe,
    "bucket abort-uploads": lambda site: [
        "bucket",
        "abort-uploads",
        _url(site),
        "--older-than",
        "0s",
        "--yes",
    ],
}


def _aggregate(site: Site) -> str:
    from tests.integration.hostile.flows import aggregator

    made = aggregator(site)
    return settings(
        site, "aggregate.yaml", run=made.run.model_dump(mode="json"), store=_store(site),
        workers=made.workers, until=made.until, aggregation={"every": 1},
    )  # fmt: skip


def _catch_up(site: Site) -> list[str]:
    from tests.integration.hostile.flows import RUN

    to = (site.folder / "to").as_uri()
    return ["gradient", "catch-up", _url(site), RUN.run, "--version", RUN.version, "--to", to]


def _score(site: Site) -> list[str]:
    from tests.integration.hostile.flows import RUN

    (site.folder / "loss.py").write_text("def make():\n    return lambda *_: 1.0\n")
    file = settings(
        site, "score.yaml", store=_store(site), run=RUN.run, version=RUN.version,
        loss="./loss.py:make",
    )  # fmt: skip
    return ["gradient", "score", file]


def _show_standings(site: Site) -> list[str]:
    from tests.integration.hostile.flows import RUN

    return ["gradient", "standings", _url(site), RUN.run, "--version", RUN.version]


def _show_roster(site: Site) -> list[str]:
    from tests.integration.hostile.flows import RUN

    return ["gradient", "roster", _url(site), RUN.run, "--version", RUN.version]


def _cool_down(site: Site) -> list[str]:
    from tests.integration.hostile.flows import CAMPAIGN, UIDS

    source = {**_store(site), "job": "first"}
    file = settings(
        site, "cooldown.yaml", store=_store(site), job=CAMPAIGN.job, epoch=1, source=source
    )
    return ["checkpoint", "cooldown", file, "--member", UIDS[0]]


def _import(site: Site) -> list[str]:
    from tests.integration.hostile.flows import RUN

    run = RUN.model_copy(update={"run": "runs/imported"})
    file = settings(
        site, "import.yaml", run=run.model_dump(mode="json"), store=_store(site),
        initial_weights={"job": "first"}, templar={
            "store": _store(site, "templar"), "version": "2.1.28", "first_window": 40,
            "last_window": 41, "k": 64,
        },
    )  # fmt: skip
    return ["gradient", "import", file]


IMPORTED: dict[str, Words] = {"gradient import": _import}
"""Commands over the bucket of a Templar run."""
SCORED: dict[str, Words] = {"gradient standings": _show_standings}
"""Commands over a run whose windows have scores."""
RUNS: dict[str, Words] = {
    "gradient aggregate": lambda site: ["gradient", "aggregate", _aggregate(site)],
    "gradient catch-up": _catch_up,
    "gradient roster": _show_roster,
    "gradient score": _score,
    "checkpoint cooldown": _cool_down,
}
