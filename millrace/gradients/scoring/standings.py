"""Standings of the workers of a run, window after window: pure functions of the evidence."""

import math
from collections.abc import Iterable, Mapping

from millrace.digest import compute_digest, dump_canonical_json, get_hex
from millrace.gradients.scoring import formulas
from millrace.gradients.scoring.ratings import make_first_standing, rate
from millrace.schemas.gradient import ABSENT_WINDOWS
from millrace.schemas.scores import ScoreFormula, ScoringRules, Standing, WindowEvidence


def update_standings(
    standings: Mapping[str, Standing], evidence: WindowEvidence, rules: ScoringRules
) -> dict[str, Standing]:
    """Return the standings after a window.

    A copy sets its sender back to the standing of a new worker, whatever it had earned. The
    original is rated as any other gradient.

    Args:
        standings: Standings before the window. Workers of the window that are missing are new.
        evidence: Findings of the window.
        rules: Rules of the scores.
    """
    first = make_first_standing(rules)
    made = dict.fromkeys(sorted({*evidence.valid, *evidence.missing}), first) | dict(standings)
    for uid in evidence.missing:
        made[uid] = made[uid].model_copy(update={"missed": made[uid].missed + 1})
    absentees = {*evidence.absent}
    for uid in standings.keys() - evidence.missing:
        absent = standings[uid].absent + 1 if uid in absentees else 0
        missed = standings[uid].missed + (absent > 0 and absent % ABSENT_WINDOWS == 0)
        made[uid] = standings[uid].model_copy(update={"missed": missed, "absent": absent})
    for uid in evidence.valid:
        made[uid] = made[uid].model_copy(update={"missed": 0})
    rated = {uid: one for uid, one in evidence.evaluations.items() if uid not in evidence.copies}
    ratings = rate(made, {uid: one.random.improvement for uid, one in rated.items()}, rules)
    for uid, evaluation in sorted(rated.items()):
        better = formulas.compare_data_use(
            evaluation.own.improvement, evaluation.random.improvement
        )
        mu, sigma = ratings[uid]
        made[uid] = made[uid].model_copy(
            update={
                "mu": mu,
                "sigma": sigma,
                "use": formulas.update_average(made[uid].use, better, rules.decay),
                "evaluations": made[uid].evaluations + 1,
                "evaluated": evidence.window,
            }
        )
    for uid in evidence.copies:
        made[uid] = first.model_copy(update={"evaluated": made[uid].evaluated})
    scores = {uid: compute_standing_score(one, rules) for uid, one in made.items()}
    weights = formulas.share_by_squares(scores)
    return {
        uid: made[uid].model_copy(update={"score": scores[uid], "weight": weights[uid]})
        for uid in sorted(made)
    }


def compute_standing_score(standing: Standing, rules: ScoringRules) -> float:
    """Return the score of a worker, from everything else in its standing."""
    use, evaluations = standing.use, standing.evaluations
    match rules.formula:
        case ScoreFormula.PROVEN:
            proof = formulas.compute_proof(use, evaluations, rules.decay)
            score = max(0.0, standing.mu) * proof
        case ScoreFormula.TEMPLAR:
            counts = evaluations < rules.warmup or use >= rules.least_use
            score = formulas.compute_score(standing.ordinal, use) if counts else 0.0
    return score * formulas.get_miss_factor(standing.missed)


def choose_workers(
    standings: Mapping[str, Standing], workers: Iterable[str], window: int, count: int, seed: str
) -> list[str]:
    """Choose the workers of a window that are evaluated.

    Nobody can know the choice before the seed. A worker is the more likely to be chosen, the more
    windows have passed since its last evaluation.

    Args:
        standings: Standings before the window.
        workers: Workers with a valid gradient that is no copy.
        window: Number of the window.
        count: Number of workers to choose.
        seed: Digest that is not known before the window ends, such as that of its link.
    """

    def compute_priority(uid: str) -> tuple[float, str]:
        waited = window - (standings[uid].evaluated if uid in standings else 0)
        drawn = get_hex(compute_digest(dump_canonical_json({"seed": seed, "uid": uid})))
        # The largest of u ** (1 / waited) is a draw with weights (Efraimidis and Spirakis 2006).
        uniform = (int(drawn[:13], 16) + 1) / (1 << 52)
        return math.log(uniform) / max(waited, 1), uid

    return sorted(sorted(workers, key=compute_priority, reverse=True)[:count])
