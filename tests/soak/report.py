"""Format the counts that a soak prints."""

from tests.soak.tally import Tally
from tests.soak.targets import BOUNDARIES, COMPLETE, Victim, list_combinations


def list_missing_kills(tally: Tally) -> list[str]:
    """Return the combinations of a boundary and a victim that were not killed."""
    return [
        f"{boundary} of {victim}"
        for boundary, victim in list_combinations()
        if not tally.kills[boundary, victim]
    ]


def format_kill_table(tally: Tally) -> str:
    """Return a table of the kills by boundary and victim, and the faults."""
    rows = [f"{'SIGKILL at':<18}" + "".join(f"{victim:>8}" for victim in Victim)]
    possible = set(list_combinations())
    for boundary in (*BOUNDARIES, COMPLETE):
        cells = [
            tally.kills[boundary, victim] if (boundary, victim) in possible else "-"
            for victim in Victim
        ]
        note = "   (complete: not counted)" if boundary == COMPLETE else ""
        rows.append(f"{boundary:<18}" + "".join(f"{cell:>8}" for cell in cells) + note)
    where = ", ".join(f"{count} on {store}" for store, count in sorted(tally.stores.items()))
    rows.append(
        f"{tally.cases} datasets; {where}; {tally.partial_files} unfinished files collected"
    )
    return "\n".join([*rows, *tally.wrong])


def format_fault_table(fired: dict[str, int], tally: Tally) -> str:
    """Return a table of the injected faults by kind, and the faults of datasets."""
    rows = [
        f"{'fault':<18}{'fired':>8}",
        *(f"{kind:<18}{count:>8}" for kind, count in fired.items()),
    ]
    rows.append(f"{tally.cases} datasets; {tally.counted} SIGKILLs")
    return "\n".join([*rows, *tally.wrong])


def format_result(what: str, tally: Tally) -> str:
    """Return a line with the counts of faults."""
    return (
        f"{what}, lost {tally.lost}, duplicated {tally.duplicated}, differing {tally.differing}"
        + f", wrong {len(tally.wrong)}" * bool(tally.wrong)
    )
