"""Parts of a campaign: checks, workers, windows, epochs and summary.

A campaign runs the stages of other packages: it shards, rents, prewarms, trains, publishes and
cleans. This package decides which of them are needed, and with which settings.
"""

from millrace.campaigns.campaign import Campaign, Training
from millrace.campaigns.checks import (
    check_dataset_complete,
    check_publication,
    check_training,
    is_dataset_settled,
)
from millrace.campaigns.committed_training import check_committed_training, commit_training
from millrace.campaigns.lease import CampaignLease, hold_campaign_lease
from millrace.campaigns.local_workers import LocalWorkerProcesses
from millrace.campaigns.prewarm_marker import (
    commit_prewarm_marker,
    delete_prewarm_marker,
    renew_prewarm_marker,
)
from millrace.campaigns.progress import (
    MergedWindows,
    RunAggregator,
    TrainingProgress,
    check_gradients_taken,
    ensure_final_weights_saved,
    has_epoch_ended,
    merge_epoch,
    needs_cooldown,
    read_training_progress,
    repair_final_weights,
)
from millrace.campaigns.settings import LocalWorkerOptions, RentedWorkerOptions, TrainingOptions
from millrace.campaigns.summary import CampaignSummary, PublishedWeights, summarize_campaign
from millrace.campaigns.workers import (
    CampaignWorkers,
    await_workers,
    has_joined_worker,
    has_unreleased_machines,
)

__all__ = [
    "Campaign",
    "CampaignLease",
    "CampaignSummary",
    "CampaignWorkers",
    "LocalWorkerOptions",
    "LocalWorkerProcesses",
    "MergedWindows",
    "PublishedWeights",
    "RentedWorkerOptions",
    "RunAggregator",
    "Training",
    "TrainingOptions",
    "TrainingProgress",
    "await_workers",
    "check_committed_training",
    "check_dataset_complete",
    "check_gradients_taken",
    "check_publication",
    "check_training",
    "commit_prewarm_marker",
    "commit_training",
    "delete_prewarm_marker",
    "ensure_final_weights_saved",
    "has_epoch_ended",
    "has_joined_worker",
    "has_unreleased_machines",
    "hold_campaign_lease",
    "is_dataset_settled",
    "merge_epoch",
    "needs_cooldown",
    "read_training_progress",
    "renew_prewarm_marker",
    "repair_final_weights",
    "summarize_campaign",
]
