"""The label of a rented machine: whose it is, and until when, for whoever finds it later."""

from dataclasses import dataclass
from datetime import UTC, datetime

from millrace.errors import ConfigurationError

_LONGEST = 256  # characters, by the API
_OURS = "millrace"


@dataclass(frozen=True, slots=True)
class Label:
    """Content of a label.

    Attributes:
        installation: Whose it is.
        rental: What for.
        attempt: Which of the rental's attempts.
        until: When it has to be back.
    """

    installation: str
    rental: str
    attempt: int
    until: datetime

    def __str__(self) -> str:
        until = int(self.until.timestamp())
        label = f"{prefix(self.installation)}{self.rental}/{self.attempt:06d}/{until}"
        if len(label) > _LONGEST:
            raise ConfigurationError(f"The rental's name {self.rental!r} is too long for a label.")
        return label

    @classmethod
    def parse(cls, text: str, installation: str) -> "Label | None":
        """Parse a label; None if it is not ours, or cannot be read."""
        if not is_ours(text, installation):
            return None
        rental, _, rest = text.removeprefix(prefix(installation)).rpartition("/")
        rental, _, attempt = rental.rpartition("/")
        if not (rental and attempt.isdecimal() and rest.isdecimal()):
            return None
        try:
            return cls(installation, rental, int(attempt), datetime.fromtimestamp(int(rest), UTC))
        except (OverflowError, ValueError):
            return None


def is_ours(text: str, installation: str) -> bool:
    """Tell whether a label is of this installation, readable or not."""
    return text.startswith(prefix(installation))


def prefix(installation: str) -> str:
    """Return the beginning of every label of an installation."""
    return f"{_OURS}/{installation}/"
