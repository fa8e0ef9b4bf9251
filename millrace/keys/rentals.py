"""Keys of rentals, and of the reports of rented machines."""

import re
from dataclasses import dataclass

from millrace.errors import ConfigurationError
from millrace.keys.leases import LeaseKeys
from millrace.keys.names import RESERVED_FOLDERS, check_name, is_valid_name

RENTALS = "_rentals"
"""What is known of rented machines stands under it; nothing that runs on one may write there."""
MACHINES = "_machines"
"""What rented machines say of themselves stands under it."""
INSTALLATION = f"{RENTALS}/installation.json"
"""Who we are among all who rent with the same account: created once."""


@dataclass(frozen=True, slots=True)
class RentalKeys:
    """The objects of one rental: some machines that are rented for one purpose.

    Attributes:
        name: The rental's.
    """

    name: str

    def __post_init__(self) -> None:
        if check_name(
            self.name, what="The rental's name"
        ) != self.name or RESERVED_FOLDERS.intersection(self.name.split("/")):
            raise ConfigurationError(
                f"The rental's name {self.name!r} begins or ends with '/', or has one of "
                f"{', '.join(sorted(RESERVED_FOLDERS))} in it, as objects of ours do: write "
                f"another."
            )

    @property
    def scope(self) -> str:
        """Prefix of the rental's leases."""
        return f"{RENTALS}/{self.name}"

    @property
    def lease(self) -> LeaseKeys:
        """Held by whoever uses the machines, and gives them back."""
        return LeaseKeys(self.scope, "owner")

    @property
    def owner(self) -> str:
        """Overwritten while the owner lives: machines look at it."""
        return f"{self.scope}/owner.txt"

    @property
    def attempts(self) -> str:
        """Prefix of the attempts."""
        return f"{self.scope}/attempts/"

    def attempt(self, number: int) -> str:
        """Return the prefix of all records of one attempt."""
        return f"{self.attempts}{number:06d}-"

    def intent(self, number: int) -> str:
        """Return the key of the intent to rent a machine: created before it is rented."""
        return f"{self.attempt(number)}intent.json"

    def contract(self, number: int) -> str:
        """Return the key of the contract that an attempt came to."""
        return f"{self.attempt(number)}contract.json"

    def detached(self, number: int) -> str:
        """Return the key of the record that a machine stays though it has no owner."""
        return f"{self.attempt(number)}left.json"

    def returned(self, number: int) -> str:
        """Return the key of the record that a machine is given back, or never came."""
        return f"{self.attempt(number)}returned.json"

    def parse(self, key: str) -> tuple[int, str] | None:
        """Return an attempt's number, and ``intent``, ``contract``, ``left`` or ``returned``."""
        pattern = re.escape(self.attempts) + r"([0-9]{6,})-(intent|contract|left|returned)\.json"
        match = re.fullmatch(pattern, key)
        return (int(match[1]), match[2]) if match else None

    def machine(self, number: int) -> str:
        """Return the prefix of all that one machine may write by itself."""
        return f"{MACHINES}/{self.name}/{number:06d}/"


@dataclass(frozen=True, slots=True)
class MachineKeys:
    """Keys of the reports of one rented machine.

    Attributes:
        prefix: Of `RentalKeys.machine`.
    """

    prefix: str

    @property
    def files(self) -> str:
        """Key of the files to write beside the program: the only object that the owner writes."""
        return f"{self.prefix}files.json"

    @property
    def setup(self) -> str:
        """Key of the report on the installation, overwritten; with the last lines printed."""
        return f"{self.prefix}setup.json"

    @property
    def heartbeat(self) -> str:
        """Key of the heartbeat, overwritten while the machine lives."""
        return f"{self.prefix}beat.json"

    @property
    def logs(self) -> str:
        """Prefix of what the program prints."""
        return f"{self.prefix}log/"

    def log(self, number: int) -> str:
        """Return the key of a piece of what the program prints: created once."""
        return f"{self.logs}{number:06d}.txt"

    @property
    def program_exit(self) -> str:
        """Key of the report on how the program ended."""
        return f"{self.prefix}ended.json"


def parse_rental(key: str) -> str | None:
    """Return the rental that an attempt's key belongs to; None if it is none's."""
    name, slash, _ = key.removeprefix(f"{RENTALS}/").rpartition("/attempts/")
    ours = slash and key.startswith(f"{RENTALS}/") and is_valid_name(RentalKeys, name)
    return name if ours else None
