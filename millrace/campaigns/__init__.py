"""The whole chain: plan, checks, workers, windows, epochs and summary of a campaign.

A campaign runs the stages of other packages: it shards, rents, prewarms, trains, publishes and
cleans. This package decides which of them are needed, and with which settings.
"""

from millrace.campaigns.campaign import Campaign, Training
from millrace.campaigns.checks import check_dataset_complete, check_training
from millrace.campaigns.lease import hold_campaign_lease
from millrace.campaigns.local_workers import LocalWorkerProcesses
from millrace.campaigns.pinned_plan import check_plan, pin_plan
from millrace.campaigns.progress import (
    MergedWindows,
    TrainingProgress,
    merge_epoch,
    read_training_progress,
)
from millrace.campaigns.settings import LocalWorkers, RentedWorkerRules, TrainingRules
from millrace.campaigns.summary import CampaignSummary, summarize_campaign
from millrace.campaigns.warming import begin_warming, end_warming, is_warming
from millrace.campaigns.workers import (
    CampaignWorkers,
    await_workers,
    has_joined_worker,
    has_unreleased_machines,
)

__all__ = [
    "Campaign",
    "CampaignSummary",
    "CampaignWorkers",
    "LocalWorkerProcesses",
    "LocalWorkers",
    "MergedWindows",
    "RentedWorkerRules",
    "Training",
    "TrainingProgress",
    "TrainingRules",
    "await_workers",
    "begin_warming",
    "check_dataset_complete",
    "check_plan",
    "check_training",
    "end_warming",
    "has_joined_worker",
    "has_unreleased_machines",
    "hold_campaign_lease",
    "is_warming",
    "merge_epoch",
    "pin_plan",
    "read_training_progress",
    "summarize_campaign",
]
