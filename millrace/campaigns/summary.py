"""Summary of a campaign, by what is committed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from time import monotonic

from millrace import gradients
from millrace.campaigns.campaign import Campaign, Training
from millrace.campaigns.progress import read_epoch_end
from millrace.campaigns.worker import read_median_metric
from millrace.cleanup import CleanupPlan, CleanupResult
from millrace.gradients import ChainLink
from millrace.keys.datasets import DatasetKeys
from millrace.records import fetch
from millrace.rentals import compute_recorded_cost, list_attempts
from millrace.rentals.ledger import Attempt
from millrace.schemas.dataset import Manifest
from millrace.storage import Store, exists, list_objects, open_store

_CLOCK_TOLERANCE = timedelta(minutes=1)  # of a leader's clock against that of the store


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Destination of the final weights.

    Attributes:
        url: URL of the bucket or of the repository.
        job: Job of the checkpoint there.
        step: Step of the checkpoint.
    """

    url: str
    job: str
    step: int


@dataclass(frozen=True, slots=True)
class CampaignSummary:
    """Summary of a campaign so far, by what is committed.

    Attributes:
        name: Name of the campaign.
        url: URL of its store.
        samples: Samples of its dataset; 0 if it has none, or the dataset is not complete.
        shards: Shards of its dataset, likewise.
        windows: Number of windows in which a gradient was merged.
        uncounted_windows: Number of windows at the beginning whose links were cleaned. What they
            had is in no other number.
        step: Step of the weights.
        gradients: Number of gradients that were taken.
        sent_bytes: Bytes of the gradients.
        dense_bytes: Bytes of the same changes in float32.
        losses: Loss of the weights by the median worker, by the number of the window before.
        epoch_steps: Step of the checkpoint of each ended epoch; None where it has none.
        machines: Number of machines that were rented.
        dollars: Cost of the machines.
        published: Destination of the final weights; None before they are published.
        deleted_objects: Number of objects that this run has deleted.
        seconds: Duration of this run.
    """

    name: str
    url: str
    samples: int = 0
    shards: int = 0
    windows: int = 0
    uncounted_windows: int = 0
    step: int = 0
    gradients: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    losses: Mapping[int, float] = field(default_factory=dict[int, float])
    epoch_steps: Mapping[int, int | None] = field(default_factory=dict[int, int | None])
    machines: int = 0
    dollars: float = 0.0
    published: PublishedWeights | None = None
    deleted_objects: int = 0
    seconds: float = 0.0


def summarize_campaign(
    campaign: Campaign,
    cleaned: CleanupResult | CleanupPlan | None = None,
    published: PublishedWeights | None = None,
) -> CampaignSummary:
    """Summarize a campaign so far.

    Args:
        campaign: Campaign.
        cleaned: Result of its cleaning, if there was one.
        published: Destination of the final weights, if they were published.
    """
    deleted_objects = cleaned.deleted_objects if isinstance(cleaned, CleanupResult) else 0
    seconds = round(monotonic() - campaign.started_at, 1)
    store, dataset = open_store(campaign.read_store, make_folder=False), campaign.dataset
    found = CampaignSummary(
        campaign.name,
        store.url,
        published=published,
        deleted_objects=deleted_objects,
        seconds=seconds,
    )
    if dataset is not None and exists(store, DatasetKeys(dataset).manifest):
        manifest = fetch(store, DatasetKeys(dataset).manifest, Manifest)
        samples = sum(manifest.samples.values())
        found = replace(found, samples=samples, shards=len(manifest.shards))
    if campaign.training is not None:
        found = _add_training(found, store, campaign.training)
    now = datetime.now(UTC)
    costs = [
        compute_recorded_cost(store, one, None, now, campaign.rentals.get(name))
        for name in {campaign.name, *campaign.rentals}
        for one in _list_own_attempts(store, campaign, name)
        if one.contract is not None
    ]
    return replace(found, machines=len(costs), dollars=sum(costs))


def _list_own_attempts(store: Store, campaign: Campaign, rental: str) -> list[Attempt]:
    """Return the attempts of a rental since the campaign was first led.

    Earlier campaigns with the same dataset have rented machines under the same name to shard it.
    """
    attempts = list_attempts(store, rental)
    if rental == campaign.name:
        return attempts
    led = [stat.last_modified for stat in list_objects(store, campaign.keys.lease.prefix)]
    began = min(led, default=datetime.now(UTC)).astimezone(UTC) - _CLOCK_TOLERANCE
    return [one for one in attempts if one.intent.started_at >= began]


def _add_training(found: CampaignSummary, store: Store, training: Training) -> CampaignSummary:
    run = training.run
    last = gradients.find_newest_window(store, run.chain_keys)
    if last < 0:
        return found
    found = _add_windows(found, gradients.iterate_kept_links(store, run.chain_keys))
    reported = read_median_metric(store, run.gradient_keys, training.uids, "loss", until=last + 1)
    epochs, job = range(training.options.epochs), training.epoch_job
    ends = {epoch: read_epoch_end(store, job, epoch) for epoch in epochs}
    return replace(
        found,
        losses={window - 1: value for window, value in reported.items()},
        epoch_steps={epoch: end.step if end.root else None for epoch, end in ends.items() if end},
    )


def _add_windows(found: CampaignSummary, windows: Iterable[ChainLink]) -> CampaignSummary:
    """Add the sums of windows to a summary. One link at a time is in memory: it can have 1 MB."""
    merged = taken = sent_bytes = 0
    first: int | None = None
    last: ChainLink | None = None
    for last in windows:
        first = last.window if first is None else first
        merged += bool(last.taken)
        taken += len(last.taken)
        sent_bytes += sum(one.size for one in last.taken.values())
    if first is None or last is None:
        return found
    values = sum(math.prod(shape) for shape in last.shapes)
    return replace(
        found,
        windows=merged,
        uncounted_windows=first - 1,
        step=last.step,
        gradients=taken,
        sent_bytes=sent_bytes,
        dense_bytes=4 * values * taken,
    )
