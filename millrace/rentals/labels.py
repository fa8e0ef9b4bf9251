"""Label of a rented machine: its installation, its rental and its deadline."""

from dataclasses import dataclass
from datetime import UTC, datetime

from millrace.errors import ConfigurationError
from millrace.keys.names import is_valid_name
from millrace.keys.rentals import RentalKeys

_MAX_LENGTH = 256  # characters; limit of the API
_PREFIX = "millrace"


@dataclass(frozen=True, slots=True)
class Label:
    """Content of a label.

    Attributes:
        installation: Identity of the installation.
        rental: Name of the rental.
        attempt: Number of the attempt.
        deadline: Time by which the machine has to be released.
    """

    installation: str
    rental: str
    attempt: int
    deadline: datetime

    def __str__(self) -> str:
        timestamp = int(self.deadline.timestamp())
        label = (
            f"{make_label_prefix(self.installation)}{self.rental}/{self.attempt:06d}/{timestamp}"
        )
        if len(label) > _MAX_LENGTH:
            raise ConfigurationError(f"The rental's name {self.rental!r} is too long for a label.")
        return label

    @classmethod
    def parse(cls, text: str, installation: str) -> "Label | None":
        """Parse a label; return None for an invalid label, or a label of another installation."""
        if not is_ours(text, installation):
            return None
        rental, _, rest = text.removeprefix(make_label_prefix(installation)).rpartition("/")
        rental, _, attempt = rental.rpartition("/")
        if not (is_valid_name(RentalKeys, rental) and attempt.isdecimal() and rest.isdecimal()):
            return None
        try:
            return cls(installation, rental, int(attempt), datetime.fromtimestamp(int(rest), UTC))
        except (OverflowError, ValueError):
            return None


def is_ours(text: str, installation: str) -> bool:
    """Tell whether a label, valid or not, is of this installation."""
    return text.startswith(make_label_prefix(installation))


def is_foreign(text: str, installation: str) -> bool:
    """Tell whether a label is of another installation."""
    return text.startswith(f"{_PREFIX}/") and not is_ours(text, installation)


def make_label_prefix(installation: str) -> str:
    """Return the beginning of every label of an installation."""
    return f"{_PREFIX}/{installation}/"
