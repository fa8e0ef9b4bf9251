"""A campaign and its training, which make the settings of each stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic

from millrace.campaigns.settings import LocalWorkerOptions, RentedWorkerOptions, TrainingOptions
from millrace.campaigns.worker import SharedWorkerSettings, make_training_program
from millrace.cleanup import CleanupKind, Rule
from millrace.gradients import AggregationSettings, AggregatorSettings, RunSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.rentals import LedgerSettings, MachineSettings, RentalSettings
from millrace.schemas.rental import MoneyLimits
from millrace.storage import StoreSpec

_PREWARM_TIMEOUT = timedelta(hours=1)  # longest wait of workers after the marker's last renewal
_COOLDOWN_RESERVE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Training:
    """Training of a campaign: its options, its dataset, and its store.

    Attributes:
        campaign: Name of the campaign.
        dataset: Path of the dataset below the store.
        options: Settings of the training.
        read_store: Store of the campaign, with read credentials.
        write_store: Store of the campaign, with write credentials.
        initial_weights_store: Store with the weights that the run begins with; None for the store
            of the campaign.
        mirrors: Mirrors of the store, with read credentials. Only workers on this machine read
            them: rented machines have credentials for the store alone.
    """

    campaign: str
    dataset: str
    options: TrainingOptions
    read_store: StoreSpec
    write_store: StoreSpec
    initial_weights_store: StoreSpec | None = None
    mirrors: tuple[StoreSpec, ...] = ()

    @property
    def keys(self) -> CampaignKeys:
        """Names of the campaign's objects."""
        return CampaignKeys(self.campaign)

    @property
    def epoch_job(self) -> str:
        """Job of the checkpoints that epochs end with, which the workers save."""
        return self.keys.job

    @property
    def weights_job(self) -> str:
        """Job of the checkpoints of the run's weights, which the aggregator saves."""
        return self.run.chain_keys.job

    @property
    def last_window(self) -> int:
        """Number of the last window of the run."""
        return self.find_last_window(self.options.epochs - 1)

    @property
    def run(self) -> RunSettings:
        """Settings that all workers of the run share."""
        return RunSettings(
            run=self.keys.run, windows=self.last_window, **self.options.run.model_dump()
        )

    @property
    def initial_weights_url(self) -> str:
        """URL of the store with the initial weights; empty for the store of the campaign."""
        store = self.initial_weights_store
        return "" if store is None or store.url == self.read_store.url else store.url

    @property
    def uids(self) -> list[str]:
        """Names of all workers."""
        return [self.keys.make_uid(number) for number in range(self.options.workers)]

    @property
    def quorum(self) -> int:
        """Number of workers that are enough to open the first window."""
        return min(max(1, self.run.gather.quorum), self.options.workers)

    @property
    def prewarm_timeout(self) -> timedelta | None:
        """Longest wait of the workers for a prewarm whose marker is not renewed.

        None if nothing is prewarmed.
        """
        machines = self.options.machines
        waits = isinstance(machines, RentedWorkerOptions) and machines.prewarm
        return _PREWARM_TIMEOUT if waits else None

    @property
    def worker_settings(self) -> SharedWorkerSettings:
        """Settings that all workers share."""
        machines = self.options.machines
        is_local = isinstance(machines, LocalWorkerOptions)
        return SharedWorkerSettings(
            campaign=self.campaign,
            run=self.run,
            training=self.options,
            dataset=self.dataset,
            data_folder=machines.data_folder if is_local else Path("data"),
            prewarm_timeout=self.prewarm_timeout,
        )

    @property
    def cooldown_timeout(self) -> timedelta:
        """Longest time that a cooldown may take."""
        cooldown = self.options.cooldown
        return cooldown.time * (cooldown.extensions + 2) + _COOLDOWN_RESERVE

    def find_last_window(self, epoch: int) -> int:
        """Return the number of the last window of an epoch."""
        return (epoch + 1) * self.options.windows_per_epoch

    @property
    def aggregator_settings(self) -> AggregatorSettings:
        """Settings of the aggregator that begins the run."""
        return AggregatorSettings(
            run=self.run,
            store=self.write_store,
            workers=tuple(self.uids),
            initial_weights=self.options.initial_weights,
            initial_weights_store=self.initial_weights_store,
            aggregation=self.options.aggregation,
        )

    @property
    def aggregation_until_idle(self) -> AggregationSettings:
        """Options of an aggregator that stops at the first window without a gradient."""
        return self.options.aggregation.model_copy(update={"idle": 1})

    def make_rental(self, ledger: LedgerSettings) -> RentalSettings:
        """Return the settings of the rental of the workers' machines.

        Args:
            ledger: Ledger of rentals, and the account that pays.
        """
        machines = self.options.machines
        assert isinstance(machines, RentedWorkerOptions)
        program, storage_grants = make_training_program(
            self.worker_settings, self.write_store, machines
        )
        settings = MachineSettings(
            request=machines.request,
            program=program,
            machines=self.options.workers,
            storage_grants=storage_grants,
            role_arn=machines.role_arn,
            timeouts=machines.timeouts,
        )
        return RentalSettings.make(self.campaign, ledger, settings)


@dataclass(frozen=True, slots=True)
class Campaign:
    """A campaign, with its plan as the engine takes it.

    Attributes:
        name: Name of the campaign: a prefix below the store's URL.
        read_store: Store of the campaign, with read credentials.
        write_store: Store of the campaign, with write credentials.
        dataset: Path of the dataset below the store; None without one.
        training: Training; None without one.
        cleaning_rules: Rules for the cleaning at the end; None for the default.
        rentals: Limits of the costs of the campaign's rentals, by their names.
        started_at: Time by `monotonic` when this process began to lead the campaign.
    """

    name: str
    read_store: StoreSpec
    write_store: StoreSpec
    dataset: str | None = None
    training: Training | None = None
    cleaning_rules: Sequence[Rule] | None = None
    rentals: Mapping[str, MoneyLimits] = field(default_factory=dict[str, MoneyLimits])
    started_at: float = field(default_factory=monotonic)

    @property
    def keys(self) -> CampaignKeys:
        """Names of the campaign's objects."""
        return CampaignKeys(self.name)

    def make_cleaning_rules(self) -> list[Rule]:
        """Return the rules for the cleaning: by default the gradients, which are merged, go.

        A rule without a name and a prefix is for the objects of the campaign's run and of its job.
        """
        if self.cleaning_rules is None:
            gradients = (CleanupKind.GRADIENTS,)
            return [Rule(kinds=gradients, older_than=timedelta(0), name=self.keys.run)]
        rules: list[Rule] = []
        for rule in self.cleaning_rules:
            prefixes = [rule.prefix]
            if not rule.name and not rule.prefix:
                prefixes = [f"{self.keys.run}/", f"{self.keys.job}/"]
            rules += (rule.model_copy(update={"prefix": prefix}) for prefix in prefixes)
        return rules
