"""Keys of rentals, and of the reports of rented machines."""

import re
from dataclasses import dataclass

from millrace.errors import ConfigurationError
from millrace.keys.leases import LeaseKeys
from millrace.keys.names import NAME_PATTERN, RESERVED_FOLDERS, check_name, is_valid_name

RENTALS = "_rentals"
"""Folder of the owner's records on rented machines. No rented machine may write there."""
MACHINES = "_machines"
"""Folder of the reports that rented machines write about themselves."""
MACHINE_KEY = re.compile(rf"{MACHINES}/(?P<rental>{NAME_PATTERN})/[0-9]{{6,18}}/.+")
"""Key of a report of any machine, by which `classify_key` recognises it."""
_ATTEMPTS = "attempts"
_ATTEMPT_KINDS = "intent|contract|raised-[0-9]{6,18}|detached|released"
RENTAL_KEY = re.compile(
    rf"(?P<scope>{RENTALS}/{NAME_PATTERN})/"
    rf"(?:attempts/[0-9]{{6,18}}-(?:{_ATTEMPT_KINDS})\.json|owner\.txt)"
    rf"|{RENTALS}/installation\.json"
)
"""Key of a record of any rental, by which `classify_key` recognises it."""
_NESTED_KEY = re.compile(
    rf"(?P<prefix>(?:(?!{MACHINES}/)[^/]*/)*)(?P<key>(?:{MACHINES}|{RENTALS})/.*)", re.DOTALL
)
INSTALLATION = f"{RENTALS}/installation.json"
"""Key of the name of this installation, which tells its machines from others of the account."""
MAX_ATTEMPTS = 100_000
"""Largest number of attempts of a rental, for all slots. The first of the six digits of their
numbers is 0."""
_OWNER_FILE = "owner.txt"
_CONFLICTING_PART = re.compile(
    rf"^installation\.json(?![^/])|(?<=/)(?:0[0-9]{{5}}|{re.escape(_OWNER_FILE)})(?![^/])"
)  # part of a rental's name that names an object, or a machine's folder, of another rental


@dataclass(frozen=True, slots=True)
class RentalKeys:
    """Keys of one rental: machines that are rented for one purpose.

    Attributes:
        name: Name of the rental.
    """

    name: str

    def __post_init__(self) -> None:
        reserved = RESERVED_FOLDERS | {_ATTEMPTS}
        if check_name(self.name, what="The rental's name") != self.name or reserved.intersection(
            self.name.split("/")
        ):
            raise ConfigurationError(
                f"The rental's name {self.name!r} begins or ends with '/', or has a reserved "
                f"folder in it ({', '.join(sorted(reserved))}): choose another name."
            )

    @property
    def scope(self) -> str:
        """Scope of the rental's lease, and prefix of its records."""
        return f"{RENTALS}/{self.name}"

    @property
    def lease(self) -> LeaseKeys:
        """Lease of the owner: the process that rents and releases the machines."""
        return LeaseKeys(self.scope, "owner")

    @property
    def owner(self) -> str:
        """Key of the owner's heartbeat, which machines read: overwritten while the owner lives."""
        return f"{self.scope}/{_OWNER_FILE}"

    @property
    def attempts(self) -> str:
        """Prefix of the attempts to rent a machine."""
        return f"{self.scope}/{_ATTEMPTS}/"

    def make_attempt_prefix(self, number: int) -> str:
        """Return the prefix of all records of one attempt."""
        return f"{self.attempts}{number:06d}-"

    def make_intent_key(self, number: int) -> str:
        """Return the key of the intent of an attempt: created before the machine is rented."""
        return f"{self.make_attempt_prefix(number)}intent.json"

    def make_contract_key(self, number: int) -> str:
        """Return the key of the contract that resulted from an attempt."""
        return f"{self.make_attempt_prefix(number)}contract.json"

    def make_raised_key(self, number: int, price_number: int) -> str:
        """Return the key of a raised price of a machine. Each price is higher than the last one."""
        return f"{self.make_attempt_prefix(number)}raised-{price_number:06d}.json"

    def make_detached_key(self, number: int) -> str:
        """Return the key of the record that a machine keeps running without an owner."""
        return f"{self.make_attempt_prefix(number)}detached.json"

    def make_released_key(self, number: int) -> str:
        """Return the key of the record that a machine was released, or was never rented."""
        return f"{self.make_attempt_prefix(number)}released.json"

    def parse(self, key: str) -> tuple[int, str] | None:
        """Return the attempt and the kind of a record's key; None for other keys.

        Kinds are ``intent``, ``contract``, ``detached`` and ``released``, and ``raised-000000``
        with the number of a raised price.
        """
        match = re.fullmatch(
            re.escape(self.attempts) + rf"([0-9]{{6,18}})-({_ATTEMPT_KINDS})\.json", key
        )
        return (int(match[1]), match[2]) if match else None

    def make_machine_prefix(self, number: int) -> str:
        """Return the prefix of all objects that one machine may write."""
        return f"{MACHINES}/{self.name}/{number:06d}/"


@dataclass(frozen=True, slots=True)
class MachineKeys:
    """Keys of the reports of one rented machine.

    Attributes:
        prefix: Prefix of the machine, from `RentalKeys.make_machine_prefix`.
    """

    prefix: str

    @property
    def files(self) -> str:
        """Key of the files that the machine needs, written by the owner."""
        return f"{self.prefix}files.json"

    def make_token_key(self, kind: str) -> str:
        """Return the key of an access token of Google, encrypted: overwritten by the owner.

        Args:
            kind: Purpose of the token: ``reports``, ``read``, ``write`` or ``source``.
        """
        return f"{self.prefix}token-{kind}.txt"

    @property
    def setup(self) -> str:
        """Key of the report on the installation, with its last lines of output: overwritten."""
        return f"{self.prefix}setup.json"

    @property
    def heartbeat(self) -> str:
        """Key of the machine's heartbeat: overwritten while the machine runs."""
        return f"{self.prefix}beat.json"

    @property
    def logs(self) -> str:
        """Prefix of the program's output."""
        return f"{self.prefix}log/"

    def make_log_key(self, number: int) -> str:
        """Return the key of one piece of the program's output: created once."""
        return f"{self.logs}{number:06d}.txt"

    @property
    def program_exit(self) -> str:
        """Key of the report on how the program ended."""
        return f"{self.prefix}ended.json"


def check_rental_name(name: str) -> str:
    """Return the name of a new rental, checked to share no folder with another rental.

    A machine of the rental ``wiki/000000`` could write into the folder of the first machine of
    ``wiki``. `RentalKeys` accepts such names, so that existing rentals can be released.

    Args:
        name: Name to check.

    Raises:
        ConfigurationError: The name is invalid, or a part of it is the name of an object.
    """
    RentalKeys(name)
    if conflict := _CONFLICTING_PART.search(name):
        raise ConfigurationError(
            f"The rental's name {name!r} has the part {conflict[0]!r}, which is the name of an "
            "object or a folder of other rentals: choose another name."
        )
    return name


def split_nested_key(key: str) -> tuple[str, str]:
    """Split the key of a rental's object into the prefix of its store, and its key in that store.

    A store can be a prefix of another store. The prefix is empty in the rental's own store, and for
    the keys of other objects. A machine can write any name below its own prefix, so such a name is
    no record of a rental.
    """
    match = _NESTED_KEY.fullmatch(key)
    return (match["prefix"], match["key"]) if match else ("", key)


def parse_attempt(key: str) -> tuple[RentalKeys, int, str] | None:
    """Return the rental, the attempt and the kind of a record's key; None for other keys.

    Kinds are those of `RentalKeys.parse`.
    """
    name, slash, _ = key.removeprefix(f"{RENTALS}/").rpartition("/attempts/")
    if not (slash and key.startswith(f"{RENTALS}/") and is_valid_name(RentalKeys, name)):
        return None
    keys = RentalKeys(name)
    parsed = keys.parse(key)
    return (keys, *parsed) if parsed else None


def parse_price_number(kind: str) -> int | None:
    """Return the number of a raised price from the kind of its record; None for other kinds."""
    stem, _, digits = kind.partition("-")
    return int(digits) if stem == "raised" else None


def is_installation_key(key: str) -> bool:
    """Tell whether a key is `INSTALLATION`, in a store or in a store that is a prefix of it."""
    return split_nested_key(key)[1] == INSTALLATION


class AttemptSurvey:
    """Survey of the attempts in a listing: in the ledger of a store, and of stores below it."""

    def __init__(self) -> None:
        self._found: dict[str, set[tuple[str, RentalKeys, int]]] = {
            "intent": set(),
            "released": set(),
        }

    def note_key(self, key: str) -> None:
        """Record which attempt a key opens or closes, if any."""
        prefix, inner_key = split_nested_key(key)
        parsed = parse_attempt(inner_key)
        if parsed is not None and parsed[2] in self._found:
            keys, number, part = parsed
            self._found[part].add((prefix, keys, number))

    def find_open(self) -> set[tuple[str, RentalKeys, int]]:
        """Return the attempts without a release: prefix of the store, rental and number."""
        return self._found["intent"] - self._found["released"]
