"""
The paragraphs of a report. Every number in them is computed, and a difference is called one only where its interval over
seeds says so.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rliable import metrics

from sb3_qac.study.records import (
    N_BOOTSTRAP,
    N_BOOTSTRAP_OF_RANKS,
    Difference,
    Groups,
    Record,
    bootstrap,
    difference,
    n_common,
)

# Of stock A2C, as published: where, and the mean score. The protocols are not ours.
PUBLISHED = {
    "PongNoFrameskip-v4": {
        "RL Zoo's benchmark.md: 10 million steps, one run, best model": "17.29 +/- 3.21",
        "Schulman et al. 2017 (PPO), table 6: 10 million steps, the last 100 episodes of training, 3 runs": "19.7",
        "OpenAI baselines, Atari at 10 million steps, 6 runs": "1.0",
        "Mnih et al. 2016 (A3C, feed-forward, 1 day), human starts": "11.4",
        "Allen et al. 2017 (Mean Actor-Critic itself)": "10.6",
    },
    "SpaceInvadersNoFrameskip-v4": {
        "RL Zoo's benchmark.md: 10 million steps, one run, best model": "627.2 +/- 202.0",
        "Schulman et al. 2017 (PPO), table 6: 10 million steps, the last 100 episodes of training, 3 runs": "744.5",
        "OpenAI baselines, Atari at 10 million steps, 6 runs": "463.1",
        "Allen et al. 2017 (Mean Actor-Critic itself)": "1173.1",
    },
}
A2C, TASK_1, TASK_2, BETA_1 = "a2c", "task1", "task2", "beta1"


def statistics(groups: Groups) -> Iterator[str]:
    """
    Interquartile means of the last evaluation that all runs have, and probabilities of improvement, over seeds.

    :param groups: Records of one environment
    :return: lines of Markdown
    """
    last = n_common(groups) - 1
    if last < 0:
        yield "No evaluation yet that all runs have."
        return
    scores = {group: np.array([[record.means[last]] for record in records]) for group, records in groups.items()}
    n_seeds = min(len(records) for records in groups.values())
    steps = next(iter(groups.values()))[0].timesteps[last]
    yield f"At {steps:,} steps, the last evaluation that all runs have. The replicate is the seed: {n_seeds} of each."
    yield ""
    if n_seeds < 2:
        yield "One seed gives no interval."
        return
    estimates, intervals = bootstrap(scores, lambda values: np.array([metrics.aggregate_iqm(values)]), N_BOOTSTRAP)
    yield "| group | mean | interquartile mean | 95 % bootstrap interval | standard deviation over seeds |"
    yield "|---|---|---|---|---|"
    for group, values in scores.items():
        low, high = intervals[group].ravel()
        yield (
            f"| {group} | {values.mean():.2f} | {estimates[group][0]:.2f} | {low:.2f} to {high:.2f} "
            f"| {np.std(values, ddof=1):.2f} |"
        )
    yield ""
    yield from improvements(scores)
    if n_seeds < 5:
        yield ""
        yield f"An interval over {n_seeds} seeds says little: the bootstrap can only draw these {n_seeds} again."


def improvements(scores: dict[str, np.ndarray]) -> Iterator[str]:
    """
    :param scores: By group, shape (n_seeds, n_envs) each
    :return: lines of a Markdown table: for each pair of groups the probability that a run of the one does better than a run
        of the other, the mean over environments
    """
    names = list(scores)
    pairs = {f"{x} over {y}": (scores[x], scores[y]) for i, x in enumerate(names) for y in names[:i]}
    if not pairs:
        return
    estimates, intervals = bootstrap(pairs, metrics.probability_of_improvement, N_BOOTSTRAP_OF_RANKS)
    yield "| pair | probability of improvement | 95 % bootstrap interval |"
    yield "|---|---|---|"
    for pair in pairs:
        low, high = intervals[pair].ravel()
        yield f"| {pair} | {np.ravel(estimates[pair])[0]:.2f} | {low:.2f} to {high:.2f} |"


def over_environments(envs: dict[str, Groups]) -> Iterator[str]:
    """
    :param envs: Records by environment
    :return: lines of Markdown: probabilities of improvement over all environments, where groups and seeds are the same
    """
    shapes = {tuple((group, len(records)) for group, records in groups.items()) for groups in envs.values()}
    lasts = {env_id: n_common(groups) - 1 for env_id, groups in envs.items()}
    if len(shapes) > 1 or min(lasts.values()) < 0 or min(n for _, n in next(iter(shapes))) < 2:
        yield "Not all environments have the same runs yet."
        return
    yield f"The mean over {len(envs)} environments, each at the last evaluation that all its runs have."
    yield ""
    yield from improvements(
        {
            group: np.array([[record.means[lasts[env_id]] for record in envs[env_id][group]] for env_id in envs]).T
            for group, _ in next(iter(shapes))
        }
    )


def paragraphs(groups: Groups, goal: float | None) -> Iterator[str]:
    """
    :param groups: Records of one environment
    :param goal: Mean return of an evaluation that counts as solved; None for none
    :return: lines of Markdown: what the study says of task 1 beside A2C, and of the baseline
    """
    comparisons = {
        (A2C, TASK_1): _against_a2c(groups, goal),
        (TASK_1, TASK_2): _tasks_apart(groups),
        (TASK_1, BETA_1): _corrected(groups),
    }
    for names, lines in comparisons.items():
        if n_common(groups) and set(names) <= set(groups):
            yield from lines
            yield ""
    diagnosed = [record for records in groups.values() for record in records if record.diagnosis]
    if diagnosed:
        yield from _baseline(diagnosed)
        yield ""
        yield from _reasons(groups, diagnosed)


def _against_a2c(groups: Groups, goal: float | None) -> Iterator[str]:
    last = n_common(groups) - 1
    ours, stock = groups[TASK_1], groups[A2C]
    end, way = _differences(groups, TASK_1, A2C)
    steps = ours[0].timesteps[last]
    yield (
        f"**Task 1 against A2C.** At {steps:,} steps task 1 returns {_mean(ours, last):.2f} and A2C {_mean(stock, last):.2f}: "
        f"a difference of {_verdict(end)}."
    )
    yield f"Over the whole way there, the mean of all evaluations, it is {_verdict(way)}."
    if goal is None:
        return
    steps_to: dict[str, Any] = {name: [record.steps_to(goal) for record in groups[name]] for name in (A2C, TASK_1)}
    hours_to: dict[str, Any] = {name: [record.hours_to(goal) for record in groups[name]] for name in (A2C, TASK_1)}
    for name in (A2C, TASK_1):
        steps, hours = ([value for value in values[name] if value is not None] for values in (steps_to, hours_to))
        told = f": after {_list([f'{x:,}' for x in steps])} steps, {_list([f'{x:.1f}' for x in hours])} hours" if steps else ""
        yield f"{len(steps)} of {len(groups[name])} runs of {name} reach {goal:g}{told}."
    if None not in [*steps_to[A2C], *steps_to[TASK_1]]:
        yield f"The way of task 1 to {goal:g} is longer by {_verdict(difference(steps_to[TASK_1], steps_to[A2C]), ' steps')};"
        yield f"by {_verdict(difference(hours_to[TASK_1], hours_to[A2C]), ' hours')}."


def _tasks_apart(groups: Groups) -> Iterator[str]:
    last = n_common(groups) - 1
    ones, twos = ([record.means[last] for record in groups[name]] for name in (TASK_1, TASK_2))
    yield f"**Task 2 against task 1.** At the same steps the difference is {_verdict(difference(twos, ones))}."
    spreads = [np.std(values, ddof=1) for values in (ones, twos) if len(values) > 1]
    if spreads:
        yield (
            f"Seeds of one and the same task differ by {_range(spreads, '.2g')} (standard deviation). The two have the same "
            "expected gradient: where their curves part, it is rounding, which chaos makes large, and luck."
        )


def _corrected(groups: Groups) -> Iterator[str]:
    end, way = _differences(groups, BETA_1, TASK_1)
    yield (
        "**What beta=1 changes.** It adds to task 1 what the critic got wrong on the action taken. At the same steps the "
        f"difference to task 1 is {_verdict(end)}; over the whole way there {_verdict(way)}."
    )


def _baseline(diagnosed: Sequence[Record]) -> Iterator[str]:
    found = [point["estimators"] for record in diagnosed for point in record.diagnosis]
    differences = [x["all-action, baseline"]["difference"] for x in found]
    ratios = [x["sampled"]["variance"] / x["sampled, baseline"]["variance"] for x in found]
    yield (
        "**What the baseline does.** The probabilities of a state sum to 1, so grad sum_a pi(a|s) V~(s) = V~(s) grad 1 = 0: "
        f"a baseline cannot change the all-action gradient. Measured on {len(found)} networks of these runs, the gradients "
        f"with and without it differ by {_range(differences, '.1e')} of their length: rounding. The sampled estimator is "
        f"another matter: there the baseline divides the variance by {_range(ratios, '.3g')}."
    )


def _reasons(groups: Groups, diagnosed: Sequence[Record]) -> Iterator[str]:
    points = [point for record in diagnosed for point in record.diagnosis if point["steps"] > 0]
    if points:
        weight, exact = "sampled, return - V~ (A2C's weight)", "all-action"
        ratios = [x["estimators"][weight]["variance"] / x["estimators"][exact]["variance"] for x in points]
        slopes, improbable = (
            [x["critic"][name] for x in points if x["critic"][name] is not None] for name in ("slope", "slope_improbable")
        )
        yield (
            f"**Why.** On the same network and rollouts a gradient with A2C's weight has {_range(ratios, '.3g')} times the "
            "variance of the all-action one. What that one pays is trust in its critic."
        )
        if slopes:
            yield (
                "Where the critic sees a difference of 1 between actions, the returns that followed differ by "
                f"{_range(slopes, '.2g')}"
                + (f", for improbable actions by {_range(improbable, '.2g')}." if improbable else ".")
            )
    entropies = {
        group: [-_end(record.curves["train/entropy_loss"]) for record in records if "train/entropy_loss" in record.curves]
        for group, records in groups.items()
    }
    told = [f"{np.mean(values):.2f} for {group}" for group, values in entropies.items() if values]
    if told:
        yield f"The entropy of the policy over the last tenth of training is {_list(told)} (nats)."


def _end(curve: pd.Series) -> float:
    return float(curve.iloc[-max(len(curve) // 10, 1) :].mean())


def _mean(records: Sequence[Record], evaluation: int) -> float:
    return float(np.mean([record.means[evaluation] for record in records]))


def _differences(groups: Groups, name: str, other: str) -> tuple[Difference, Difference]:
    """:return: at the last evaluation that all runs have, and in the mean of all evaluations up to it"""
    n_evaluations = n_common(groups)
    means, others = ([record.means[:n_evaluations] for record in groups[group]] for group in (name, other))
    return (
        difference([x[-1] for x in means], [x[-1] for x in others]),
        difference([x.mean() for x in means], [x.mean() for x in others]),
    )


def _verdict(found: Difference, unit: str = "") -> str:
    mean, low, high = (f"{x:+,.0f}" if abs(x) >= 100 else f"{x:+.3g}" for x in (found.mean, found.low, found.high))
    if np.isnan(found.low):
        return f"{mean}{unit} (no interval: a single seed, or all alike)"
    verdict = "not due to chance alone" if found.significant else "which chance alone explains as well"
    return f"{mean}{unit} (95 % interval {low} to {high}, Welch, over seeds), {verdict}"


def _range(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _list(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
