"""Plackett-Luce ratings of workers, by the library openskill."""

from collections.abc import Mapping

from openskill.models import PlackettLuce

from millrace.schemas.scores import ScoringRules, Standing


def make_first_standing(rules: ScoringRules) -> Standing:
    """Return the standing of a worker of which nothing is known."""
    rating = _make_model(rules).rating()
    return Standing(mu=rating.mu, sigma=rating.sigma)


def rate(
    standings: Mapping[str, Standing], improvements: Mapping[str, float], rules: ScoringRules
) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of the ratings after one comparison of some workers.

    Args:
        standings: Standings before it, of all workers that are compared.
        improvements: Relative improvement of the loss by each worker. Equal ones are a draw.
        rules: Rules of the ratings.
    """
    uids = sorted(improvements)
    if len(uids) < 2:
        return {uid: (standings[uid].mu, standings[uid].sigma) for uid in uids}
    model = _make_model(rules)
    teams = [[model.rating(mu=standings[uid].mu, sigma=standings[uid].sigma)] for uid in uids]
    levels = sorted({*improvements.values()}, reverse=True)
    ranks = [float(levels.index(improvements[uid])) for uid in uids]
    rated = model.rate(teams, ranks=ranks)
    return {uid: (team[0].mu, team[0].sigma) for uid, team in zip(uids, rated, strict=True)}


def _make_model(rules: ScoringRules) -> PlackettLuce:
    return PlackettLuce(beta=rules.beta, tau=rules.tau)
