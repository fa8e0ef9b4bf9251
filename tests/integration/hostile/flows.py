"""Flows' engine calls, each over a site that a principal has written to, with a clean result.

What a principal may write follows from `millrace.keys`. A result has only what must be the same
with and without the principal: digests, decisions about objects of ours, what is left of them.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from random import Random
from typing import Any

import pyarrow
import torch
from pyarrow import parquet
from safetensors.torch import save

from millrace import errors
from millrace.audit import AuditedRole, AuditSettings, audit
from millrace.checkpoints import (
    CooldownSettings,
    EpochResult,
    EpochSaver,
    Membership,
    RetentionSettings,
    SavedSource,
    Saver,
    SaveSettings,
    StoreDestination,
    apply_retention,
    copy_checkpoint,
    find_jobs,
    find_newest_verified,
    import_checkpoint,
    plan_retention,
    survey,
    verify,
)
from millrace.cleanup import (
    CleanupKind,
    CleanupSettings,
    CleanVersionsPreset,
    DeleteGatherPreset,
    Rule,
    abort_uploads,
    copy_objects,
    execute,
    find_stale_uploads,
    make_confirmation,
    make_plan,
    plan_wipe,
    survey_wipe,
    wipe,
)
from millrace.cleanup.plans import open_plan
from millrace.datasets import ExecutionSettings as ShardSettings
from millrace.datasets import (
    PipelineSettings,
    ShardingSettings,
    SourceLocation,
    Verification,
    delete_garbage,
    find_datasets,
    plan_garbage,
    read_status,
    shard_dataset,
    verify_dataset,
)
from millrace.gradients import (
    AggregationSettings,
    AggregatorSettings,
    Codec,
    GatherSettings,
    InitialWeights,
    OuterKind,
    OuterOptimizer,
    Participant,
    RegistrationSettings,
    RunSettings,
    TemplarImportSettings,
    TemplarSource,
    WorkerKey,
    aggregate_run,
    catch_up,
    copy_state,
    find_newest_window,
    import_templar_run,
    iterate_scores,
    load_newest_state,
    score_run,
)
from millrace.gradients.progress_events import GradientRefused
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.datasets import DatasetKeys
from millrace.keys.kinds import classify_key
from millrace.keys.rentals import MACHINES
from millrace.progress import Event
from millrace.schemas.chain import ChainLink
from millrace.schemas.gradient import ExclusionReason
from millrace.storage import Store, list_objects, open_store, put
from millrace.swarm import Request, prewarm
from tests.integration.hostile import commands, renting
from tests.integration.hostile.junk import MARKUP, Junk, Kind, Reach
from tests.integration.hostile.site import Flow, Site
from tests.oracle import compute_blake3
from tests.support.cleanup.material import BucketBuilder
from tests.support.swarm.swarms import (
    LIE,
    Agent,
    make_failed,
    make_forging,
    make_settings,
    read_files,
    start_agent,
    stop,
)
from tests.support.templar_gradients import write_payload

FOREIGN = "owner of a foreign bucket"
WORKER = "training worker"
HOST = "rented host"
NODE = "swarm node"
NOW = timedelta(0)
HOSTS = f"{MACHINES}/fleet/000000/"
"""Folder of a rented host."""


# -- datasets


def _source(site: Site) -> None:
    dice = Random(1)
    for number in range(2):
        rows = [f'{{"id": {i}, "text": "{dice.randbytes(200).hex()}"}}\n' for i in range(300)]
        site.put(f"src/data/{number}.jsonl", "".join(rows).encode())


def pipeline(site: Site) -> PipelineSettings:
    return PipelineSettings(
        dataset="sets/words",
        source=SourceLocation(**dict(site.make_spec("src")), include=["data/*.jsonl"]),
        store=site.make_spec("dst"),
        sharding=ShardingSettings(shard_bytes=64 << 10, partition_bytes=128 << 10),
        execution=ShardSettings(workers=0),
    )


def _shard(site: Site) -> Any:
    manifest = shard_dataset(pipeline(site), progress=site.hear).manifest
    return [(shard.key, shard.digest, shard.samples) for shard in manifest.shards]


def _sharded(site: Site) -> None:
    _source(site)
    _shard(site)


def _verify_datasets(site: Site) -> Any:
    store = site.open_store("dst")
    names = find_datasets(store)
    seen = {
        name: _asked(lambda name=name: read_status(store, name).ended_partitions) for name in names
    }
    checked = {
        name: _asked(lambda name=name: _is_whole(verify_dataset(store, name))) for name in names
    }
    for name in names:
        site.said += [f"{name}: status {seen[name]}", f"{name}: verified {checked[name]}"]
        keys = DatasetKeys(name)
        site.blame("dst/", keys.plan, f"{name}: status")
        site.blame("dst/", keys.manifest, f"{name}: verified")
    return [seen["sets/words"], checked["sets/words"]]


def _is_whole(found: Verification) -> bool:
    """Decide whether all objects of a dataset are right, whatever lies beside its shards."""
    return not (found.faults or found.other_faults)


def _collect(site: Site) -> Any:
    store = site.open_store("dst")
    plan = plan_garbage(store, "sets/words", min_age=NOW)
    delete_garbage(store, plan)
    return [
        sorted(site.find_genuine(f"dst/{one.key}" for one in plan.objects)),
        site.list_unwritten(),
    ]


DATASETS = Reach(
    prefixes=("dst/other/", f"dst/{HOSTS}"),
    litter=("dst/", "dst/sets/", "dst/sets/words/", "dst/sets/words/shards/",
            "dst/sets/words/shards/webdataset/", "dst/sets/words/shards/webdataset/train/",
            "dst/sets/words/commits/", "dst/sets/words/commits/train-00000/"),
    scopes=("dst/sets/words/",),
)  # fmt: skip


# -- checkpoints


def _checkpoints(site: Site) -> None:
    for step in (1, 2, 3):
        dice = torch.Generator().manual_seed(step)
        state = {f"w{i}": torch.randn(900, generator=dice) for i in range(4)}
        with Saver(site.open_store(), "runs/one", SaveSettings(part_bytes=4096)) as saver:
            saver.save(state, step=step).result()
    site.put("others/step_5/model.safetensors", save({"w": torch.ones(9)}))


def _verify_checkpoints(site: Site) -> Any:
    store, found = site.open_store(), dict[str, Any]()
    for job in find_jobs(store):
        found[job] = [
            (step, str(seen) if isinstance(seen, errors.CorruptError) else verify(store, seen))
            for step, seen in survey(store, job)
        ]
    for job, seen in found.items():
        for step, damage in seen:
            site.said.append(f"{job} {step}: {damage}")
            site.blame("", CheckpointKeys(job).make_metadata_key(step), f"{job} {step}: ")
    return found["runs/one"]


def _save_checkpoint(site: Site) -> Any:
    wanted = SavedSource(**dict(site.make_spec()), job="runs/one")
    origin, checkpoint = wanted.open()
    saved = copy_checkpoint(
        StoreDestination(origin), checkpoint, StoreDestination(site.open_store("to")), "kept"
    )
    return saved.root


def _import_checkpoint(site: Site) -> Any:
    return import_checkpoint(
        site.make_spec("others"), site.open_store("to"), "imported"
    ).checkpoint.root


def _retain(site: Site) -> Any:
    store = site.open_store()
    plan = plan_retention(store, "runs/one", RetentionSettings(last=1, grace=NOW))
    done = apply_retention(store, plan)
    return [sorted(plan.removed), len(done.failures), site.list_unwritten()]


def _parquet(site: Site) -> None:
    for number in range(2):
        table = pyarrow.table({"text": [f"{number} {n}" * 9 for n in range(300)]})
        body = pyarrow.BufferOutputStream()
        parquet.write_table(table, body, write_page_index=True)
        site.put(f"pages/{number}.parquet", body.getvalue().to_pybytes())


PAGES = Reach(
    prefixes=("pages/other/", HOSTS),
    spares=lambda key: key.endswith(".parquet"),
    litter=("pages/",),
)


CHECKPOINTS = Reach(
    prefixes=("other/", HOSTS),
    litter=("", "runs/", "runs/one/", "runs/one/checkpoints/", "runs/one/epochs/",
            "runs/one/checkpoints/step_000000001/"),
    scopes=("runs/one/", "runs/"),
)  # fmt: skip


# -- housekeeping


def _bucket(site: Site) -> None:
    with ThreadPoolExecutor(16) as pool:
        place = BucketBuilder(site.open_store(), pool)
        for version in ("0.2.1", "0.2.11"):
            for window in range(4):
                for uid in ("w0", "w1"):
                    place.put_gradient("run", uid, window, version)
            for uid in ("w0", "w1"):
                place.put_start_window("run", uid, 0, version)
            place.put_chain("run", version, 3, {1: 0, 2: 0})
        for step in (1, 2, 3):
            place.put_checkpoint("job", step, [f"{step}".encode()])
        place.put_pin("job", 1)
        place.put_dataset("words", 3, orphans=1)
        place.put_dataset("old", 2)
        place.put("mine/x.txt")
        place.wait_for_writes()


RULES = (
    Rule(kinds=(CleanupKind.GRADIENTS,), version="<0.2.11", older_than=NOW),
    Rule(kinds=(CleanupKind.START_WINDOWS,), version="!=0.2.11", older_than=NOW),
    Rule(kinds=(CleanupKind.GATHERS,), keep_last=2, older_than=NOW),
    Rule(kinds=(CleanupKind.CHECKPOINTS,), keep_last=1, older_than=NOW),
    Rule(
        kinds=(CleanupKind.CHECKPOINT_ORPHANS, CleanupKind.DATASET_ORPHANS, CleanupKind.TEMPORARY),
        older_than=NOW,
    ),
    Rule(kinds=(CleanupKind.DATASETS,), name="old", older_than=NOW),
    Rule(kinds=(CleanupKind.JUNK,), older_than=NOW),
)
BUCKET = Reach(
    prefixes=("other/", HOSTS, "run/w1/"),
    spares=lambda key: key.startswith("run/w1/") and key.endswith((".safetensors", ".json"))
    and "//" not in key,
    litter=("", "run/", "run/gathers/", "run/gathers/0.2.1/chain/", "job/", "job/checkpoints/",
            "job/epochs/", "words/", "words/shards/",
            "words/shards/webdataset/", "words/shards/webdataset/train/", "words/commits/",
            "words/commits/train-00000/"),
    scopes=("run/", "job/", "words/", "old/"),
)  # fmt: skip


def _clean_by(site: Site, *rules: Any) -> Any:
    config = CleanupSettings(store=site.make_spec(), rules=rules)
    plan = make_plan(config, progress=site.hear)
    with open_plan(site.open_store(), plan.name) as (_, entries):
        planned = sorted(entry.stat.key for entry in entries)
    done = execute(config, plan.name, progress=site.hear)
    site.said += [f"{one.key}: {one.reason}" for one in done.failures]
    site.said.append(f"{plan.totals.kept} {done.skipped}")
    site.said += [
        f"junk of {one.scope.rstrip('/')}/{one.worker}: {one.objects} objects" for one in done.junk
    ]
    left = [key for key in site.list_unwritten() if not key.startswith("_clean/")]
    return [site.find_genuine(planned), sorted(left)]


def _clean(site: Site) -> Any:
    written = [key for key in site.list_everything() if _is_junk(key)]
    planned, left = _clean_by(site, *RULES)
    if written:
        site.blamed.append(["junk of run/w1: "])
    return [planned, left, [key for key in site.list_everything() if _is_junk(key)]]


def _is_junk(key: str) -> bool:
    """Tell whether a key below the worker's prefix is no name of ours."""
    return key.startswith("run/w1/") and classify_key(key) is None


def _clean_versions(site: Site) -> Any:
    return _clean_by(site, CleanVersionsPreset(current_version="0.2.11"))


def _delete_gathers(site: Site) -> Any:
    return _clean_by(site, DeleteGatherPreset(version="0.2.1"))


def _wipe(site: Site) -> Any:
    spec = site.make_spec()
    survey_wipe(spec)
    plan = plan_wipe(spec)
    done = wipe(spec, plan.name, confirm=make_confirmation(site.open_store().location))
    site.said += [f"{one.key}: {one.reason}" for one in done.failures]
    return [
        len(done.failures),
        [key for key in site.list_everything() if not key.startswith("_clean/")],
    ]


def _copy(site: Site) -> Any:
    target = open_store((site.folder / "backup").as_uri())
    done = copy_objects(site.open_store(), target)
    site.said += [f"{one.key}: {one.reason}" for one in done.failures] + done.conflicts
    return _list_genuine(site, target)


def _copy_by_command(site: Site) -> Any:
    code = commands.copy_bucket(site)
    return [*code, _list_genuine(site, open_store((site.folder / "backup").as_uri()))]


def _list_genuine(site: Site, copied: Store) -> list[str]:
    foreign = {one.key for one in site.junk}
    return sorted(stat.key for stat in list_objects(copied) if stat.key not in foreign)


def _abort(site: Site) -> Any:
    site.begin_upload("dst/words/x.tar")
    names = [one.key for one in site.junk[:12]]
    for name in names:
        site.begin_upload(name)
    # RGW tells in whole seconds when an upload was begun.
    stale = find_stale_uploads(site.make_spec(), older_than=timedelta(seconds=-5))
    done = abort_uploads(site.make_spec(), stale)
    site.said += [f"{one.key}: {one.reason}" for one in done.failures]
    return [len(done.failures), [key.removeprefix(site.prefix) for key in site.list_uploads()]]


def _audit(site: Site) -> Any:
    spec = site.make_spec()
    role = AuditedRole(
        store=spec.model_copy(update={"credentials": None}), write_credentials=spec.credentials
    )
    found = audit(AuditSettings(roles={"all": role}))
    return [(one.operation, one.verdict) for one in found.findings]


# -- gradients

CAMPAIGN = CampaignKeys("camp")
RUN = RunSettings(
    run=CAMPAIGN.run,
    codec=Codec(k=256, bits=4),
    outer=OuterOptimizer(kind=OuterKind.NESTEROV, lr=0.7),
    gather=GatherSettings(wanted=2, quorum=2, poll_interval=timedelta(milliseconds=50)),
    window_length=timedelta(minutes=4),
    steps=5,
    registration=RegistrationSettings(),
)
KEY = WorkerKey.generate()
STRANGER = "stranger"  # a worker that nobody has named, whose registrations are junk
UIDS = tuple(CAMPAIGN.make_uid(number) for number in range(3))
EVIL = UIDS[2]
LAST = 2


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 10))


def _change(model: torch.nn.Module, window: int, uid: str) -> None:
    dice = torch.Generator().manual_seed(1000 * window + ord(uid[-1]))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=dice), alpha=0.01)


def aggregator(site: Site) -> AggregatorSettings:
    return AggregatorSettings(
        run=RUN,
        store=site.make_spec(),
        workers=UIDS,
        initial_weights=InitialWeights(job="first"),
        initial_weights_store=site.make_spec(),
        until=LAST,
        aggregation=AggregationSettings(every=1),
    )


def _first(site: Site) -> None:
    with Saver(site.open_store(), "first") as saver:
        saver.save(dict(_model().named_parameters()), step=7).result()


def _templar(site: Site) -> None:
    _first(site)
    for window, uid in product((40, 41), (1, 7)):
        changes = {name: torch.randn_like(one) for name, one in _model().named_parameters()}
        body = write_payload(changes, k=64, window=window).save()
        put(site.open_store(), f"templar/gradient-{window}-{uid}-v2.1.28.pt", body)


def _import(site: Site) -> Any:
    """Make a chain of the gradients of two workers of a Templar run."""
    settings = TemplarImportSettings(
        run=RUN.model_copy(update={"run": "runs/imported"}),
        store=site.make_spec(),
        initial_weights=InitialWeights(job="first"),
        initial_weights_store=site.make_spec(),
        templar=TemplarSource(
            store=site.make_spec("templar"), version="2.1.28", first_window=40, last_window=41, k=64
        ),
    )
    links = import_templar_run(settings, progress=site.hear)
    return [(link.window, link.step, sorted(link.taken), link.state) for link in links]


TEMPLAR = Reach(
    prefixes=("templar/", "templar/gradient-40-"),  # names that the listing of a window shows
    spares=lambda key: key.endswith(("-1-v2.1.28.pt", "-7-v2.1.28.pt")),
)


def _aggregate(site: Site) -> Any:
    """Merge two windows of three workers, of which the third sends junk, and first."""
    torch.set_num_threads(1)
    store, refused = site.open_store(), threading.Event()

    def heard(event: Event) -> None:
        site.hear(event)
        if isinstance(event, GradientRefused) and event.uid == EVIL:
            refused.set()

    made: list[ChainLink] = []
    sent: dict[int, str] = {}  # words that the report must have about what was sent in a window

    def work() -> None:
        made.extend(aggregate_run(aggregator(site), progress=heard))

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        while find_newest_window(store, RUN.chain_keys) < 0 and not working.done():
            threading.Event().wait(0.05)
        everybody = {uid: Participant.join(RUN, uid, store, store, key=KEY) for uid in UIDS[:2]}
        models = {uid: _model() for uid in everybody}
        for window in range(1, LAST + 1):
            turns = {uid: next(one.iterate_windows()) for uid, one in everybody.items()}
            refused.clear()
            key = RUN.gradient_keys.make_gradient_key(EVIL, window)
            genuine = site.genuine.get(RUN.gradient_keys.make_gradient_key(UIDS[0], window), b"")
            if junk := site.strike(key, genuine, UIDS[0]):
                sent[window] = ExclusionReason.TOO_LARGE if junk.kind is Kind.GIANT else ""
                while not refused.wait(0.05) and not working.done():
                    pass
            assert all(turn.number == window for turn in turns.values())
            for uid, one in everybody.items():
                one.load(models[uid])
                _change(models[uid], window, uid)
                one.submit(models[uid])
            while find_newest_window(store, RUN.chain_keys) < window and not working.done():
                threading.Event().wait(0.05)
        working.result()
    _tell_of_links(site, made, sent)
    return [(link.window, link.step, sorted(link.taken), link.state) for link in made]


def _tell_of_links(site: Site, links: Sequence[ChainLink], sent: Mapping[int, str]) -> None:
    """Tell which workers were excluded, and why.

    Of a worker that has sent something, it does not tell that nothing came.

    Args:
        site: The site.
        links: Links of the chain.
        sent: Reason to refuse what the third worker has sent in a window; empty for any.
    """
    silent = {ExclusionReason.MISSING, ExclusionReason.UNAVAILABLE, ExclusionReason.QUORUM}
    for link in links:
        for uid, one in link.excluded.items():
            told = "silent" if one.reason in silent else "refused"
            site.said.append(f"window {link.window}: {uid} is {told}: {one.reason}, {one.sentence}")
        if link.window in sent:
            site.blamed.append([f"window {link.window}: {EVIL} is refused", sent[link.window]])


GRADIENTS = Reach(
    prefixes=(
        RUN.gradient_keys.make_worker_prefix(EVIL),
        RUN.gradient_keys.make_worker_prefix(STRANGER),
    ),
    spares=lambda key: RUN.gradient_keys.parse(key) is not None,  # written when the window is open
    ghosts=UIDS[:1],
)


def _merged(site: Site) -> None:
    _first(site)
    _aggregate(site)


def _catch_up(site: Site) -> Any:
    """Bring a worker to the newest weights, from the chain."""
    store = site.open_store()
    one = Participant.join(RUN, "late", store, store, key=KEY)
    one.catch_up()
    model = _model()
    one.load(model)
    weights = b"".join(w.detach().numpy().tobytes() for w in model.parameters())
    return [find_newest_window(store, RUN.chain_keys), hashlib.sha256(weights).hexdigest()]


def _score(site: Site) -> Any:
    """Score the workers of the merged windows."""
    store = site.open_store()

    def compute_loss(weights: Mapping[str, torch.Tensor], window: int, uid: str | None) -> float:
        return 1.0 + sum(float(values.abs().sum()) for values in weights.values())

    scores = list(score_run(store, RUN.chain_keys, compute_loss))
    assert list(iterate_scores(store, RUN.chain_keys)) == scores
    return [(one.evidence.window, sorted(one.standings)) for one in scores]


def _scored(site: Site) -> None:
    _merged(site)
    _score(site)


def _forge(site: Site) -> None:
    """Have the aggregator commit a last link that follows the one before, and claims too much."""
    key = RUN.chain_keys.make_link_key(LAST)
    envelope = json.loads(site.genuine[key])
    link = envelope["record"]
    update = link["updates"][0]
    match site.dice.choice(
        ["size", "shapes", "names", "key", "bomb", "lr", "state", "taken", "sum_factor"]
    ):
        case "size":
            update["size"] = 5 << 30
        case "shapes":
            link["shapes"] = [[10**6, 10**6] for _ in link["shapes"]]
        case "names":
            link["names"] = [f"{name}{MARKUP}" for name in link["names"]]
        case "key":
            update["key"] = site.dice.choice(
                ["", "/", "a//b", "../../x", key, RUN.chain_keys.prefix]
            )
        case "bomb":
            body = (1 << 40).to_bytes(8, "little") + bytes(1000)  # of a header of a terabyte
            digest = compute_blake3(body)
            update |= {
                "key": f"{RUN.chain_keys.prefix}bomb.safetensors",
                "size": len(body),
                "digest": digest,
            }
            site.plant([Junk(Kind.CHAIN, update["key"], body)])
        case "lr":
            link["outer"]["lr"] = 1e30
        case "sum_factor":
            next(iter(link["taken"].values()))["sum_factor"] = 1e300
        case "state":
            link["state"] = "blake3:" + "0" * 64
        case _:
            link["taken"] = {"late": next(iter(link["taken"].values()))}
    site.plant([Junk(Kind.CHAIN, key, json.dumps(envelope).encode())])


def _follow(site: Site) -> Any:
    """Bring a late worker to weights that the chain proves, or to an error that names the chain."""
    if site.reach is not None and site.dice.random() < 0.5:
        _forge(site)
    keys = map(RUN.chain_keys.make_link_key, range(LAST + 1))
    links = [json.loads(site.genuine[key]) for key in keys if key in site.genuine]
    store = site.open_store()
    try:
        load_newest_state(store, RUN.chain_keys)
        state = copy_state(dict(_model().named_parameters()))
        catch_up(store, RUN.chain_keys, state)
    except errors.MillraceError as error:
        site.said.append(str(error))
        return "proved" if RUN.run in str(error) else f"the chain is not named: {error}"
    digest = state.digest()
    proved = not links or digest in {link["record"]["state"] for link in links}
    return "proved" if proved else f"weights that no link has: {digest}"


AGGREGATOR = Reach(prefixes=(RUN.chain_keys.links, RUN.chain_keys.prefix))

CHAIN = Reach(
    prefixes=tuple(RUN.gradient_keys.make_worker_prefix(uid) for uid in UIDS),
    litter=(
        RUN.chain_keys.prefix,
        RUN.chain_keys.links,
        RUN.chain_keys.scores,
        f"{RUN.chain_keys.job}/checkpoints/",
    ),
    ghosts=UIDS[:1],
)


# -- the end of an epoch


def _cool_down(site: Site) -> Any:
    """End an epoch with two members; the third worker of the campaign only writes junk."""
    torch.set_num_threads(1)
    store, job = site.open_store(), CAMPAIGN.job
    states = [dict(_model().named_parameters()) for _ in range(2)]

    def one(uid: str, state: dict[str, torch.nn.Parameter]) -> EpochResult:
        with (
            Membership(store, job, uid) as member,
            EpochSaver(member, CooldownSettings(), progress=site.hear) as saver,
        ):
            member.wait_for_members(2, 0, timedelta(minutes=2))
            return saver.end(state, epoch=0, step=5, seed=7)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(one, UIDS[:2], states))
    site.said += [f"{cooled.outcome} {cooled.reason}" for cooled in ended]
    found = find_newest_verified(store, job)
    durable = [cooled.is_durable for cooled in ended]
    return [durable, [cooled.epoch and cooled.epoch.root for cooled in ended], found and found.root]


def _ended(site: Site) -> None:
    _first(site)
    _cool_down(site)


EPOCH = Reach(
    prefixes=tuple(prefix for prefix in CAMPAIGN.list_write_prefixes(2) if EVIL in prefix),
    ghosts=UIDS[:2],
)


# -- files on every node


def _prewarm(site: Site) -> Any:
    """Bring a dataset to three nodes, one of which lies in what it sends or tells."""
    with ExitStack() as stack:
        told = site.folder / "lies"
        forged = site.dice.choice([None, *FORGED]) if site.reach is not None else ""
        lie = f"{LIE}{_NOTING.format(path=str(told))}" if forged is None else ""
        code = make_forging(forged) if forged else lie
        agents: list[Agent] = []
        for number in range(3):
            root = site.folder / f"n{number}"
            agents.append(start_agent(f"n{number}", root, code=code if number == 2 else ""))
            stack.callback(stop, agents[-1])
        wanted = make_settings(
            site.make_spec("dst"),
            agents,
            requests=[Request(dataset="sets/words")],
            min_node_share=0.5,
        )
        report = prewarm(wanted, progress=site.hear)
        site.said += [
            f"{node.name} is {'trusted' if node.trusted else 'not trusted'}: {node.reason}"
            for node in report.nodes
        ]
        if told.exists():
            site.read += [Kind.MESSAGE] * told.stat().st_size
            if all(node.failures for node in report.nodes[:2]):  # the word of one is not believed
                site.blamed.append(["n2 is not trusted"])
        if forged:
            site.read.append(Kind.MESSAGE)
        if forged and forged not in FORGIVEN:
            site.blamed.append(["n2 is trusted: ", "which no agent of this version"])
        return [
            [node.ready for node in report.nodes[:2]],
            [
                sorted((name, hashlib.sha256(body).hexdigest()) for name, body in files.items())
                for files in (read_files(agent.root) for agent in agents[:2])
            ],
        ]


_NOTING = """
_send_wrong = server._send_file

def note_wrong(*arguments):
    with open({path!r}, "a") as file:
        file.write("x")
    _send_wrong(*arguments)

server._send_file = note_wrong
"""
"""Has a node that sends wrong bytes note each time that it does."""
_DIGEST = f"blake3:{0:064x}"
FORGED = [
    [{}], ["x"], {"type": "piece-written"}, [None], 7, [{"type": []}],
    [{"type": "files-ready", "files": [99]}],
    [{"type": "piece-written", "piece": 10**6, "source": "", "digest": _DIGEST, "size": 1}],
    [{"type": "digest-mismatch", "file": 0, "digest": _DIGEST}],
    [make_failed(reason=MARKUP, status="x")],
    "[{'type': 'read-retried', 'reason': 'x' * (3 << 20)}]",
]  # fmt: skip
FORGIVEN = FORGED[8:9]
"""Wrong answers that a node may give by chance. It is asked again, and may then be right."""


RENTED = Reach(())  # written by the flow itself, when its machines run


WITHOUT_A_RUN = {
    "campaign": "needs a Prefect server: its steps are flows that run alone",
    "await-machines": "a stage of a campaign: it waits for machines as `rent-machines` does",
}


def _nothing(_: Site) -> None:
    pass


FLOWS: dict[str, Flow] = {
    flow.name: flow
    for flow in (
        Flow("shard-dataset", FOREIGN, _source, _shard,
             Reach(("src/", "dst/other/"), lambda key: key.endswith(".jsonl"),
                   litter=("dst/", "dst/sets/words/"))),
        Flow("verify-datasets", HOST, _sharded, _verify_datasets, DATASETS),
        Flow("collect-garbage", HOST, _sharded, _collect, DATASETS),
        Flow("verify-checkpoints", HOST, _checkpoints, _verify_checkpoints, CHECKPOINTS),
        Flow("save-checkpoint", FOREIGN, _checkpoints, _save_checkpoint, CHECKPOINTS),
        Flow("import-checkpoint", FOREIGN, _checkpoints, _import_checkpoint, CHECKPOINTS),
        Flow("retain", HOST, _checkpoints, _retain, CHECKPOINTS),
        Flow("clean-bucket", WORKER, _bucket, _clean, BUCKET),
        Flow("clean-versions", WORKER, _bucket, _clean_versions, BUCKET),
        Flow("delete-gathers", WORKER, _bucket, _delete_gathers, BUCKET),
        Flow("wipe-bucket", FOREIGN, _bucket, _wipe, BUCKET),
        Flow("copy-bucket", FOREIGN, _bucket, _copy, BUCKET),
        Flow("millrace bucket copy", FOREIGN, _bucket, _copy_by_command, BUCKET),
        Flow("abort-uploads", FOREIGN, _bucket, _abort, BUCKET),
        Flow("audit-access", FOREIGN, _bucket, _audit, BUCKET),
        Flow("aggregate-gradients", WORKER, _first, _aggregate, GRADIENTS, count=20),
        Flow("catch-up", WORKER, _merged, _catch_up, CHAIN),
        Flow("score-gradients", WORKER, _merged, _score, CHAIN),
        Flow("import-gradients", FOREIGN, _templar, _import, TEMPLAR),
        Flow("follow-chain", "aggregator", _merged, _follow, AGGREGATOR, count=4),
        Flow("rent-machines", HOST, _nothing, renting.provision, RENTED),
        Flow("reap-machines", HOST, _nothing, renting.reap_instances, RENTED),
        Flow("release-machines", HOST, _nothing, renting.release_machines, RENTED),
        Flow("list-machines", HOST, _nothing, renting.list_machines, RENTED),
        Flow("cooldown", WORKER, _nothing, _cool_down, EPOCH),
        Flow("prewarm", NODE, _sharded, _prewarm, DATASETS),
        *(Flow(f"millrace machine {name}", HOST, _nothing, renting.command(name), RENTED)
          for name in renting.COMMANDS),
        *(Flow(f"millrace {name}", WORKER, _merged, commands.command(name, words), CHAIN)
          for name, words in commands.RUNS.items()),
        *(Flow(f"millrace {name}", FOREIGN, _templar, commands.command(name, words), TEMPLAR)
          for name, words in commands.IMPORTED.items()),
        *(Flow(f"millrace {name}", WORKER, _scored, commands.command(name, words), CHAIN)
          for name, words in commands.SCORED.items()),
        *(Flow(f"millrace {name}", HOST, _sharded, commands.command(name, words), DATASETS)
          for name, words in commands.DATASETS.items()),
        *(Flow(f"millrace {name}", FOREIGN, _parquet, commands.command(name, words), PAGES)
          for name, words in commands.PAGES.items()),
        *(Flow(f"millrace {name}", HOST, _checkpoints, commands.command(name, words), CHECKPOINTS)
          for name, words in commands.CHECKPOINTS.items()),
        *(Flow(f"millrace {name}", WORKER, _bucket, commands.command(name, words), BUCKET)
          for name, words in commands.BUCKETS.items()),
    )
}  # fmt: skip


def _asked(call: Any) -> Any:
    """Return what a call returns, or the error of ours that it raises."""
    try:
        return call()
    except errors.MillraceError as error:
        return f"{type(error).__name__}: {error}"
