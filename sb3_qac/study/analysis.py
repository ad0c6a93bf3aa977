"""
The text of a report. Every number in it is computed. A difference is significant if its 95 % interval over seeds excludes 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from rliable import metrics

from sb3_qac.study.records import A2C_WEIGHT, ALL_ACTION, Groups, Record, records_of
from sb3_qac.study.statistics import (
    N_BOOTSTRAP,
    N_BOOTSTRAP_OF_RANKS,
    Difference,
    RelativeReturns,
    bootstrap,
    common_evaluations,
    common_seeds,
    difference,
    groups_left_out,
    planned_steps,
)

# The comparisons that a report makes, with the sentence that introduces each
COMPARISONS = {
    ("all-action", "a2c"): "",
    ("all-action-baseline", "all-action"): " Both have the same expected gradient. With the same seeds and settings their "
    "curves differ through rounding only, which training amplifies.",
    ("beta-loo", "all-action"): " beta-loo corrects the critic's error on the action taken.",
    ("beta-loo", "a2c"): "",
    ("qa2c", "a2c"): "",
    ("qa2c", "ppo"): "",
    ("qppo", "qppo-sampled"): " With the same settings the two differ in the policy's gradient only: from all actions, or "
    "from the one taken.",
    ("qppo", "ppo"): "",
    ("qppo", "a2c"): "",
    ("qppo", "all-action"): "",
    ("qppo", "qa2c"): "",
    ("qppo", "pqn"): "",
}


def statistics(groups: Groups) -> Iterator[str]:
    """
    Interquartile means of the last evaluation that all runs have, and probabilities of improvement, over seeds.

    :param groups: Records of one environment
    :return: lines of Markdown
    """
    compared = common_evaluations(groups)
    steps = _last_step(compared)
    if steps is None:
        yield _nothing_in_common(groups)
        if any(record.stopped for record in records_of(groups)):
            yield "The one at which a run was stopped does not count, since it was selected for its return."
        return
    scores = {group: np.array([[record.means[-1]] for record in records]) for group, records in compared.items()}
    several = {group: values for group, values in scores.items() if len(values) > 1}
    yield f"At {steps:,} steps, {_which(groups)}. Number of seeds: {_list(_counts(compared))}."
    yield ""
    if not several:
        yield "One seed gives no interval."
        return
    estimates, intervals = bootstrap(several, lambda values: np.array([metrics.aggregate_iqm(values)]), N_BOOTSTRAP)
    yield "| group | mean | interquartile mean | 95 % bootstrap interval | standard deviation over seeds |"
    yield "|---|---|---|---|---|"
    for group, values in scores.items():
        if group not in several:
            yield f"| {group} | {values.mean():.2f} | - | - | - |"
            continue
        low, high = intervals[group].ravel()
        yield (
            f"| {group} | {values.mean():.2f} | {estimates[group][0]:.2f} | {low:.2f} to {high:.2f} "
            f"| {np.std(values, ddof=1):.2f} |"
        )
    if len(several) > 1:
        yield ""
        yield from improvements(several)
        yield ""
        yield "The intervals are not corrected for multiple comparisons."
    yield from _few(min(map(len, several.values())))


def _nothing_in_common(groups: Groups) -> str:
    records = records_of(groups)
    if any(record.state == "unfinished" for record in records):
        return "The runs have no evaluation in common yet."
    without = [group for group, of_group in groups.items() if not any(len(record.timesteps) for record in of_group)]
    if len(without) == len(groups):
        return "No run has an evaluation."
    if without and len(without) == len(groups) - 1:
        return f"No run of {_list(without)} has an evaluation, so there is no comparison."
    text = "The runs have no evaluation after the same number of steps, so they are not compared."
    if not any(record.stopped or record.settings.get("eval_from") is not None for record in records):
        text += " With an `--eval-freq` that is a multiple of each algorithm's number of environments they would have."
    return text


def _few(n_seeds: int) -> Iterator[str]:
    if 1 < n_seeds < 5:
        yield ""
        yield f"An interval over {n_seeds} seeds says little: the bootstrap resamples only these {n_seeds} values."


def improvements(scores: dict[str, np.ndarray]) -> Iterator[str]:
    """
    :param scores: By group, shape (n_seeds, n_envs) each
    :return: lines of a Markdown table: for each pair of groups the probability that a run of the first is better than a run of
        the second, averaged over environments
    """
    names = list(scores)
    pairs = {f"{x} over {y}": (scores[x], scores[y]) for i, x in enumerate(names) for y in names[:i]}
    estimates, intervals = bootstrap(pairs, metrics.probability_of_improvement, N_BOOTSTRAP_OF_RANKS)
    yield "| pair | probability of improvement | 95 % bootstrap interval |"
    yield "|---|---|---|"
    for pair in pairs:
        low, high = intervals[pair].ravel()
        yield f"| {pair} | {np.ravel(estimates[pair])[0]:.2f} | {low:.2f} to {high:.2f} |"


def over_environments(envs: dict[str, Groups]) -> Iterator[str]:
    """
    :param envs: Records by environment
    :return: lines of Markdown: probabilities of improvement over all environments, of the groups that have two seeds in
        each; none if there is only one group
    """
    if all(len(groups) < 2 for groups in envs.values()):
        return
    several = [
        {group: records for group, records in groups.items() if len(records) > 1} for groups in common_seeds(envs).values()
    ]
    compared = [common_evaluations(groups) for groups in several]
    if len(compared[0]) < 2:
        yield "Fewer than two groups have two seeds in every environment, so none are compared over environments."
        return
    for env_id, before, groups in zip(envs, several, compared, strict=True):
        if _last_step(groups) is None:
            yield f"{env_id}: {_nothing_in_common(before)}"
            return
    yield (
        f"The mean over {len(envs)} environments, each at the last evaluation that all its runs have, of the seeds that a "
        f"group has in every environment: {_list(_counts(compared[0]))}."
    )
    yield ""
    yield from improvements(
        {group: np.array([[record.means[-1] for record in groups[group]] for groups in compared]).T for group in compared[0]}
    )
    if left_out := groups_left_out(envs, compared[0]):
        yield ""
        yield f"Left out, because they have no two seeds in every environment: {_list(left_out)}."


def relative_table(relative: RelativeReturns) -> Iterator[str]:
    """
    :param relative: Relative returns
    :return: lines of Markdown
    """
    scales = _list([f"{scale:.2f} in {env_id}" for env_id, scale in relative.scales.items()])
    yield (
        f"Returns divided by the mean return of {relative.reference} after {relative.timesteps[-1]:,} steps ({scales}): their "
        "interquartile mean over environments and over the seeds that a group has in every one, with 95 % intervals of the "
        f"stratified bootstrap, which also resamples the seeds of {relative.reference}. Time includes the evaluations; it is "
        "the mean over environments of the median over seeds. Runs on a busy machine are slower."
    )
    yield ""
    yield "| group | seeds | interquartile mean | 95 % bootstrap interval | minutes |"
    yield "|---|---|---|---|---|"
    for group, means in relative.means.items():
        (low, high), minutes = relative.intervals[group][:, -1], relative.minutes[group][-1]
        interval = "-" if np.isnan(low) else f"{low:.2f} to {high:.2f}"
        time = "-" if np.isnan(minutes) else f"{minutes:.1f}"
        yield f"| {group} | {relative.n_seeds[group]} | {means[-1]:.2f} | {interval} | {time} |"
    yield from _few(min((n for n in relative.n_seeds.values() if n > 1), default=1))
    if relative.left_out:
        yield ""
        yield f"Left out, because they have no seed in every environment: {_list(relative.left_out)}."
    if relative.not_positive:
        returns = _list([f"{env_id} ({scale:.2f})" for env_id, scale in relative.not_positive.items()])
        yield ""
        yield f"Left out, because returns cannot be divided by one of {relative.reference} that is not positive: {returns}."


def paragraphs(groups: Groups, goal: float | None) -> Iterator[str]:
    """
    :param groups: Records of one environment
    :param goal: Mean return of an evaluation that counts as solved; None for none
    :return: lines of Markdown: comparisons, the effect of the baseline, and reasons from the diagnoses
    """
    for (name, other), introduction in COMPARISONS.items():
        if {name, other} <= set(groups):
            yield f"**{name} against {other}.**{introduction}"
            yield from _compare(groups[name], groups[other], goal)
            yield ""
    diagnosed = [record for record in records_of(groups) if record.diagnosis]
    if diagnosed:
        yield from _baseline(diagnosed)
        yield ""
        yield from _reasons(groups, diagnosed)


def _compare(ours: Sequence[Record], theirs: Sequence[Record], goal: float | None) -> Iterator[str]:
    pair = {ours[0].settings["group"]: list(ours), theirs[0].settings["group"]: list(theirs)}
    name, other = pair
    if goal is not None:
        yield from _ways_to(pair, goal)
    compared = common_evaluations(pair)
    steps = _last_step(compared)
    if steps is None or len(compared) < 2:
        yield _nothing_in_common(pair)
        return
    ends = [[record.means[-1] for record in compared[group]] for group in pair]
    ways = [[record.means.mean() for record in compared[group]] for group in pair]
    yield (
        f"At {steps:,} steps, {_which(pair)}, {name} returns {np.mean(ends[0]):.2f} and {other} {np.mean(ends[1]):.2f}. "
        f"The difference is {_verdict(difference(*ends))}."
    )
    n_common = len(compared[name][0].timesteps)
    most = max((planned_steps(record) <= steps).sum() for record in records_of(pair))
    which = "all evaluations" if most <= n_common else f"the evaluations that all runs have ({n_common})"
    yield f"Averaged over {which} up to that point, it is {_verdict(difference(*ways))}."
    spreads = [np.std(values, ddof=1) for values in ends if len(values) > 1]
    if spreads:
        yield f"The standard deviation over seeds of one algorithm is {_range(spreads, '.2g')} at that point."


def _ways_to(pair: Groups, goal: float) -> Iterator[str]:
    steps_to: dict[str, Any] = {name: [record.steps_to(goal) for record in records] for name, records in pair.items()}
    hours_to: dict[str, Any] = {name: [record.hours_to(goal) for record in records] for name, records in pair.items()}
    unit, per_hour = _unit_of([hours for of_group in hours_to.values() for hours in of_group if hours is not None])
    for name in pair:
        steps, hours = ([value for value in values[name] if value is not None] for values in (steps_to, hours_to))
        when = f", after {_list([f'{x:,}' for x in steps])} steps" if steps else ""
        # Not known of a run that was killed in its first seconds
        when += f" ({_list([f'{x * per_hour:.1f}' for x in hours])} {unit})" if steps and len(hours) == len(steps) else ""
        yield f"{len(steps)} of {len(pair[name])} runs of {name} reach {goal:g}{when}."
    if all(None not in steps for steps in steps_to.values()):
        name, other = pair
        verdicts = [_verdict(difference(*steps_to.values()), " steps")]
        if all(None not in hours for hours in hours_to.values()):
            times = ([hours * per_hour for hours in of_group] for of_group in hours_to.values())
            verdicts.append(_verdict(difference(*times), f" {unit}"))
        yield f"To reach {goal:g}, the difference ({name} minus {other}) is {', and '.join(verdicts)}."


def _unit_of(hours: Sequence[float]) -> tuple[str, int]:
    """:return: the unit of time in which the longest of these times is at least 1, and how many of it are an hour"""
    longest = max(hours, default=1)
    if longest >= 1:
        return "hours", 1
    return ("minutes", 60) if 60 * longest >= 1 else ("seconds", 3600)


def _baseline(diagnosed: Sequence[Record]) -> Iterator[str]:
    found = [point["estimators"] for record in diagnosed for point in record.diagnosis]
    differences = [x["all-action, baseline"]["difference"] for x in found]
    ratios = _ratios((x["sampled"]["variance"], x["sampled, baseline"]["variance"]) for x in found)
    yield (
        "**What the baseline does.** The probabilities of a state sum to 1, so grad sum_a pi(a|s) V~(s) = V~(s) grad 1 = 0: "
        f"a baseline cannot change the all-action gradient. On {counted(len(found), 'network')} of these runs, the gradients "
        f"with and without it differ by {_range(differences, '.1e')} of their length: rounding errors. "
        + (f"For the sampled estimator, the baseline divides the variance by {_range(ratios, '.3g')}." if ratios else "")
    )


def _ratios(variances: Iterable[tuple[float, float]]) -> list[float]:
    """:return: the ratio of each pair. A policy that has collapsed to one action has no variance, and no ratio."""
    return [one / other for one, other in variances if other > 0]


def _reasons(groups: Groups, diagnosed: Sequence[Record]) -> Iterator[str]:
    # At the start the critic knows nothing yet
    points = [point for record in diagnosed for point in record.diagnosis if point["steps"] > 0]
    if points:
        weight, exact = ([x["estimators"][name] for x in points] for name in (A2C_WEIGHT, ALL_ACTION))
        ratios = _ratios((x["variance"], y["variance"]) for x, y in zip(weight, exact, strict=True))
        yield (
            f"**Why.** On {counted(len(ratios), 'network')} of these runs after the start, the gradient "
            f"with A2C's weight has {_range(ratios, '.3g')} times the variance of the all-action gradient on the same "
            "rollouts. The all-action gradient relies on its critic instead."
            if ratios
            else "**Why.** The gradients of these runs after the start have no variance: the policies are deterministic."
        )
        yield (
            "The cosine between the two expected gradients is 1 if the critic is right. Here it is "
            f"{_resolved(weight, 'cosine', 0.25)}."
        )
        if any(abs(x["cosine"] or 0) > 1 for x in weight):
            yield "It is an estimate, and can be slightly beyond -1 or 1."
        yield (
            "Where the critic predicts a difference of 1 between actions, the returns that followed differ by "
            f"{_resolved([x['critic'] for x in points], 'slope', 0.5)}."
        )
    played = [x["branches"] for x in points if "branches" in x]
    if played:
        yield (
            "Where every action was played from the same states, a difference of 1 between two actions in Q is one in their "
            f"returns of {_resolved(played, 'slope', 0.5)}."
        )
    entropies = {
        group: [record.figures["entropy"] for record in records if record.finished and "entropy" in record.figures]
        for group, records in groups.items()
    }
    means = [f"{np.mean(values):.2f} for {group}" for group, values in entropies.items() if values]
    if means:
        yield f"The mean entropy of the policy in the last tenth of the finished runs is {_list(means)} (nats)."


def _resolved(found: Sequence[dict[str, Any]], name: str, largest_error: float) -> str:
    """:return: range of a figure with its errors, over the networks where the error is small enough"""
    known = [
        (x[name], x[f"{name}_error"])
        for x in found
        if x[name] is not None and x[f"{name}_error"] is not None and x[f"{name}_error"] <= largest_error
    ]
    if not known:
        return f"a figure that is not known (its standard error is above {largest_error:g} on all of them)"
    low, high = (f"{value:.2f} +/- {error:.2f}" for value, error in (min(known), max(known)))
    which = f"on the {len(known)} of {len(found)} where its standard error is at most {largest_error:g}"
    return f"{low} {which}" if low == high else f"{low} to {high} {which}"


def _last_step(compared: Groups) -> int | None:
    """:return: steps of the last evaluation in the result of ``common_evaluations``; None if there is none"""
    timesteps = next(iter(compared.values()))[0].timesteps if compared else np.zeros(0, dtype=int)
    return int(timesteps[-1]) if len(timesteps) else None


def _which(groups: Groups) -> str:
    records = records_of(groups)
    which = "the last evaluation that all runs have"
    if any(record.stopped for record in records):
        which += ", without the evaluations that stopped a run"
    if any(record.failed and len(record.timesteps) for record in records):
        which += ", failed runs with the last that they have"
    reasons = {"unfinished": "has none yet", "failed": "failed before its first"}
    without = [f"{x.name} {reasons.get(x.state, 'has none')}" for x in records if not len(x.timesteps)]
    return f"{which} ({_list(without)})" if without else which


def _counts(groups: Groups) -> list[str]:
    return [f"{len(records)} of {group}" for group, records in groups.items()]


def _verdict(found: Difference, unit: str = "") -> str:
    mean, low, high = (number_as_text(x, "+.3g") for x in (found.mean, found.low, found.high))
    if np.isnan(found.mean):
        return "not a number"
    if np.isnan(found.low):
        return f"{mean}{unit} (no interval: one seed, or no variance)"
    verdict = "significant" if found.significant else "not significant"
    return f"{mean}{unit} (95 % interval {low} to {high} over seeds, Welch; {verdict})"


def _range(values: Sequence[float], form: str) -> str:
    low, high = (number_as_text(x, form) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def number_as_text(value: float, form: str) -> str:
    """
    :param value: A number
    :param form: Format such as "+.3g"
    :return: the number in this format; from 100 on as a whole number, which "g" would write as 1.23e+03
    """
    return f"{value:{form}}" if abs(value) < 99.5 or not form.endswith("g") else f"{value:{form[:-3]},.0f}"


def counted(n: int, noun: str) -> str:
    """
    :param n: Number of things
    :param noun: What one of them is called
    :return: the number with the noun, such as "1 seed" and "2 seeds"
    """
    return f"{n} {noun}{'s' if n > 1 else ''}"


def _list(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
