"""The tables of counts that a soak prints."""

from tests.soak.tally import Tally
from tests.soak.targets import BOUNDARIES, COMPLETE, Victim, combinations


def never_fired(tally: Tally) -> list[str]:
    """The combinations of boundary and victim that did not happen."""
    return [f"{b} of {v}" for b, v in combinations() if not tally.kills[b, v]]


def kill_table(tally: Tally) -> str:
    """Kills by boundary and victim, and what came of them."""
    rows = [f"{'SIGKILL at':<18}" + "".join(f"{victim:>8}" for victim in Victim)]
    there = set(combinations())
    for boundary in (*BOUNDARIES, COMPLETE):
        cells = [tally.kills[boundary, v] if (boundary, v) in there else "-" for v in Victim]
        note = "   (complete: not counted)" if boundary == COMPLETE else ""
        rows.append(f"{boundary:<18}" + "".join(f"{cell:>8}" for cell in cells) + note)
    where = ", ".join(f"{n} on {place}" for place, n in sorted(tally.places.items()))
    rows.append(f"{tally.cases} datasets; {where}; {tally.halves} unfinished files collected")
    return "\n".join([*rows, *tally.wrong])


def fault_table(fired: dict[str, int], tally: Tally) -> str:
    """Faults by kind, and what came of them."""
    rows = [f"{'fault':<18}{'fired':>8}", *(f"{kind:<18}{n:>8}" for kind, n in fired.items())]
    rows.append(f"{tally.cases} datasets; {tally.counted} SIGKILLs")
    return "\n".join([*rows, *tally.wrong])


def result(what: str, tally: Tally) -> str:
    """The line that says whether all is well."""
    return (
        f"{what}, lost {tally.lost}, doubled {tally.doubled}, different {tally.different}"
        + f", wrong {len(tally.wrong)}" * bool(tally.wrong)
    )
