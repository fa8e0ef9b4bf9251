"""Keys of a campaign's objects."""

import re
from dataclasses import dataclass

from millrace.keys.gradients import GATHERS
from millrace.keys.leases import MEMBERS, LeaseKeys, make_lease_prefix
from millrace.keys.names import is_valid_name
from millrace.keys.rentals import RentalKeys

_CAMPAIGN = "campaign"
_COMMITTED_TRAINING = f"/{_CAMPAIGN}/training.json"
CAMPAIGN_WORKER_KEY = re.compile(
    rf"(?:(?P<run>run)|model/(?:lease/)?{MEMBERS})/(?P<uid>worker-[0-9]{{1,9}})/"
)
"""Rest of a key after the name of a campaign, below the prefix of any worker."""


@dataclass(frozen=True, slots=True)
class CampaignKeys:
    """Names and keys of all that a campaign makes.

    Attributes:
        name: Name of the campaign: a prefix below the store's URL.
    """

    name: str

    def __post_init__(self) -> None:
        RentalKeys(self.name)  # a campaign's rental has the same name

    @property
    def run(self) -> str:
        """Name of the run of pseudo-gradients and of its chain."""
        return f"{self.name}/run"

    @property
    def job(self) -> str:
        """Name of the job of the checkpoints that epochs end with."""
        return f"{self.name}/model"

    @property
    def lease(self) -> LeaseKeys:
        """Lease of the process that leads the campaign."""
        return LeaseKeys(self.name, _CAMPAIGN)

    @property
    def notes(self) -> str:
        """Prefix of the objects with instructions for workers."""
        return f"{self.name}/{_CAMPAIGN}/"

    @property
    def prewarm_marker(self) -> str:
        """Key of the marker that files are being copied to the machines: deleted afterwards."""
        return f"{self.notes}warming.json"

    @property
    def committed_training(self) -> str:
        """Key of the settings of the training that cannot change: created once.

        The object is ``campaign/training.json``. Its record is a `CommittedTraining`, of the kind
        ``campaign-training``.
        """
        return f"{self.name}{_COMMITTED_TRAINING}"

    def list_read_prefixes(self) -> list[str]:
        """Return the prefixes that a worker reads, except for that of its dataset."""
        return [f"{self.run}/{GATHERS}/", self.notes, f"{self.job}/"]

    def list_write_prefixes(self, number: int | str) -> list[str]:
        """Return the prefixes that a worker writes. No other worker writes there.

        Args:
            number: Number of the worker, or its placeholder ``{slot}``.
        """
        uid = self.make_uid(number)
        return [
            f"{self.run}/{uid}/",
            f"{self.job}/{MEMBERS}/{uid}/",
            f"{make_lease_prefix(self.job)}{MEMBERS}/{uid}/",
        ]

    def make_uid(self, number: int | str) -> str:
        """Return the name of a worker, from its number."""
        return f"worker-{number}"


def parse_campaign(key: str) -> str | None:
    """Return the name of the campaign whose committed training has this key; None for others."""
    name, found, rest = key.rpartition(_COMMITTED_TRAINING)
    ours = found and not rest and is_valid_name(CampaignKeys, name)
    return name if ours else None
