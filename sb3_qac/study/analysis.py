"""The tables of a report. A difference is significant if its 95 % interval over seeds excludes 0."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sb3_qac.study.records import Groups, Record, records_of
from sb3_qac.study.statistics import (
    N_BOOTSTRAP,
    N_BOOTSTRAP_OF_RANKS,
    RelativeReturns,
    bootstrap,
    common_evaluations,
    common_seeds,
    difference,
    groups_left_out,
    interquartile_mean,
    mean_with_error,
    probability_of_improvement,
)


def runs_table(groups: Groups, goal: float | None) -> Iterator[str]:
    """
    :param groups: Records of one environment
    :param goal: Mean return of an evaluation that counts as solved; None for none
    :return: lines of a Markdown table, a row for each run
    """
    to_goal = "" if goal is None else f" steps to {goal:g} | hours to {goal:g} |"
    yield f"| run | state | steps | last evaluation | best evaluation |{to_goal} last 100 episodes of training | steps/s |"
    yield "|---" * (7 if goal is None else 9) + "|"
    for record in records_of(groups):
        last = best = "-"
        if len(record.timesteps):
            last, best = (mean_with_error(record.returns[i], 2) for i in (-1, record.best))
            best += f" at {record.timesteps[record.best]:,}"
        cells = [record.name, record.state, f"{record.status.get('steps', 0):,}", last, best]
        if goal is not None:
            reached, hours = record.steps_to(goal), record.hours_to(goal)
            cells += [
                "not reached" if reached is None else f"{reached:,}",
                "-" if hours is None else number_as_text(hours, ".2g"),
            ]
        training = record.metrics.get("training_return")
        cells += ["-" if training is None else f"{training:.2f}"]
        cells += ["-" if math.isnan(record.steps_per_second) else f"{record.steps_per_second:,.0f}"]
        yield f"| {' | '.join(cells)} |"


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
    estimates, intervals = bootstrap({name: (x,) for name, x in several.items()}, interquartile_mean, N_BOOTSTRAP)
    yield "| group | mean | interquartile mean | 95 % bootstrap interval | standard deviation over seeds |"
    yield "|---|---|---|---|---|"
    for group, values in scores.items():
        if group not in several:
            yield f"| {group} | {values.mean():.2f} | - | - | - |"
            continue
        low, high = intervals[group]
        yield (
            f"| {group} | {values.mean():.2f} | {estimates[group]:.2f} | {low:.2f} to {high:.2f} "
            f"| {np.std(values, ddof=1):.2f} |"
        )
    if len(several) > 1:
        yield ""
        yield from improvements(several)
        yield ""
        yield "The intervals are not corrected for multiple comparisons."
    yield from _few(min(map(len, several.values())))


def _nothing_in_common(groups: Groups) -> str:
    if any(record.state == "unfinished" for record in records_of(groups)):
        return "The runs have no evaluation in common yet."
    if not any(len(record.timesteps) for record in records_of(groups)):
        return "No run has an evaluation."
    return (
        "The runs have no evaluation after the same number of steps, so they are not compared. Compare their `eval_freq` and "
        "`stop_return`; `eval_freq` should be a multiple of each algorithm's number of environments."
    )


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
    pairs = {f"{x} over {y}": (scores[x], scores[y]) for x, y in _pairs(list(scores))}
    estimates, intervals = bootstrap(pairs, probability_of_improvement, N_BOOTSTRAP_OF_RANKS)
    yield "| pair | probability of improvement | 95 % bootstrap interval |"
    yield "|---|---|---|"
    for pair in pairs:
        low, high = intervals[pair]
        yield f"| {pair} | {estimates[pair]:.2f} | {low:.2f} to {high:.2f} |"


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(x, y) for i, x in enumerate(names) for y in names[:i]]


def differences(groups: Groups, goal: float | None) -> Iterator[str]:
    """
    :param groups: Records of one environment
    :param goal: Mean return of an evaluation that counts as solved; None for none
    :return: lines of Markdown with a table: for each pair of groups the differences of their means over seeds, with Welch's
        95 % intervals; none if there is only one group
    """
    if len(groups) < 2:
        return
    yield (
        "The mean over seeds of the first group minus that of the second: in the last evaluation that all runs of the pair "
        "have, and averaged over all evaluations up to it that they have. In parentheses Welch's 95 % interval over seeds; "
        "there is none for a single seed, or without variance."
    )
    yield ""
    to_goal = "" if goal is None else f" steps to {goal:g} | hours to {goal:g} |"
    yield f"| pair | at steps | difference | averaged |{to_goal}"
    yield "|---" * (4 if goal is None else 6) + "|"
    for x, y in _pairs(list(groups)):
        pair = {name: groups[name] for name in (x, y)}
        compared = common_evaluations(pair)
        steps = _last_step(compared) if len(compared) == 2 else None
        cells = ["-", "-", "-"]
        if steps is not None:
            cells = [
                f"{steps:,}",
                _differ(compared, lambda run: run.means[-1]),
                _differ(compared, lambda run: run.means.mean()),
            ]
        if goal is not None:
            cells += [_differ(pair, lambda run: run.steps_to(goal)), _differ(pair, lambda run: run.hours_to(goal))]
        yield f"| {x} minus {y} | {' | '.join(cells)} |"


def _differ(pair: Groups, value: Callable[[Record], Any]) -> str:
    """:return: the difference of the means of a value of each run, with its interval; "-" if a run has no such value"""
    x, y = ([value(record) for record in records] for records in pair.values())
    if None in [*x, *y]:
        return "-"
    found = difference(x, y)
    if np.isnan(found.mean):
        return "not a number"
    mean, low, high = (number_as_text(x, "+.3g") for x in found)
    return mean if np.isnan(found.low) else f"{mean} ({low} to {high})"


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


def _last_step(compared: Groups) -> int | None:
    """:return: steps of the last evaluation in the result of ``common_evaluations``; None if there is none"""
    timesteps = next(iter(compared.values()))[0].timesteps if compared else np.zeros(0, dtype=int)
    return int(timesteps[-1]) if len(timesteps) else None


def _which(groups: Groups) -> str:
    records = records_of(groups)
    which = "the last evaluation that all runs have"
    if any(record.stopped for record in records):
        which += ", without the evaluations that stopped a run"
    without = [f"{record.name} ({record.state})" for record in records if not len(record.timesteps)]
    return f"{which} (none: {', '.join(without)})" if without else which


def _counts(groups: Groups) -> list[str]:
    return [f"{len(records)} of {group}" for group, records in groups.items()]


def number_as_text(value: float, form: str) -> str:
    """
    :param value: A number
    :param form: Format such as "+.3g"
    :return: the number in this format; from 100 on as a whole number, which "g" would write as 1.23e+03
    """
    return f"{value:{form}}" if abs(value) < 99.5 or not form.endswith("g") else f"{value:{form[:-3]},.0f}"


def _list(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
