"""Read environment variables. An empty variable counts as unset.

``set -a; . ./.env`` exports every variable of a file, also the variables without a value.
"""

import os
from collections.abc import Mapping

_PREFIXES = ("AWS_", "GOOGLE_", "HF_")  # read by obstore, boto3 and huggingface_hub themselves


def read_variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return an environment variable; None if it is unset or empty.

    Args:
        name: Name of the variable.
        environ: Variables by their names; by default the environment of the process.
    """
    return (os.environ if environ is None else environ).get(name) or None


def drop_empty_variables() -> None:
    """Remove empty ``AWS_*``, ``GOOGLE_*`` and ``HF_*`` variables from this process's environment.

    The clients of these stores read the variables themselves, and use an empty variable as a value.
    """
    for name in [name for name, value in os.environ.items() if not value]:
        if name.startswith(_PREFIXES):
            os.environ.pop(name, None)
