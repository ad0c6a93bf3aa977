"""Statistics over the seeds of a study. They use records, not files."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sb3_qac.study.records import Groups, Record, records_of

# As in rliable's own examples
N_BOOTSTRAP, N_BOOTSTRAP_OF_RANKS = 10_000, 2_000
# Probability that an interval does not contain the estimated value
ALPHA = 1 - 0.95
# How far the steps between two evaluations may be from those that were planned, relative to these
PLANNED_WITHIN = 0.01


def standard_error(values: np.ndarray) -> float:
    """
    :param values: Independent values
    :return: standard error of their mean; nan for a single one
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def mean_with_error(values: np.ndarray, digits: int) -> str:
    """
    :param values: Independent values
    :param digits: Decimal places
    :return: their mean with its standard error, without it for a single value, "-" for none
    """
    if not len(values):
        return "-"
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} +/- {standard_error(values):.{digits}f}" if len(values) > 1 else mean


def pooled(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    :param records: Runs of a group
    :return: steps at which all runs have been evaluated; for each, the mean return over all their episodes, and its standard
        error as if episodes were independent; shape (n_evaluations,) each. After a run failed or was stopped at a return, its
        last evaluation is used. Runs without any evaluation are left out.
    """
    records = [record for record in records if len(record.timesteps)]
    seen = sorted({int(steps) for record in records for steps in record.timesteps})
    evaluations = [(steps, [_returns_at(record, steps) for record in records]) for steps in seen]
    known = {
        steps: np.concatenate([x for x in returns if x is not None])
        for steps, returns in evaluations
        if all(x is not None for x in returns)
    }
    means, errors = ([function(x) for x in known.values()] for function in (np.mean, standard_error))
    return np.array(list(known), dtype=int), np.array(means), np.array(errors)


def _returns_at(record: Record, steps: int) -> np.ndarray | None:
    if steps in record.timesteps:
        return record.returns[list(record.timesteps).index(steps)]
    return record.returns[-1] if (record.failed or record.stopped) and steps > record.timesteps[-1] else None


def common_evaluations(groups: Groups) -> Groups:
    """
    Reduce runs to comparable evaluations. An evaluation at which a run was stopped is left out, since it was selected for its
    return. A run that failed counts with its last evaluation from then on.

    :param groups: Records of an environment
    :return: the same runs with only the evaluations that all of them have, at the steps for which they were planned. Runs
        without any evaluation, and groups of only such runs, are left out.
    """
    begun = {name: [record for record in records if len(record.timesteps)] for name, records in groups.items()}
    begun = {name: records for name, records in begun.items() if records}
    records = records_of(begun)
    planned = [planned_steps(record)[: -1 if record.stopped else None] for record in records]
    everywhere = functools.reduce(np.union1d, planned, np.zeros(0, dtype=int))
    counted = [
        np.union1d(steps, everywhere[everywhere > steps[-1]]) if record.failed else steps
        for record, steps in zip(records, planned, strict=True)
    ]
    common = functools.reduce(np.intersect1d, counted, everywhere)
    return {name: [evaluations_at(record, common) for record in of_group] for name, of_group in begun.items()}


def common_seeds(envs: dict[str, Groups]) -> dict[str, Groups]:
    """
    Reduce runs to the seeds that their group has in every environment, so that groups can be compared over environments.

    :param envs: Records by environment
    :return: the evaluated runs with these seeds. Groups without such a seed are left out.
    """
    seeds = [
        {name: {record.settings["seed"] for record in records if len(record.timesteps)} for name, records in groups.items()}
        for groups in envs.values()
    ]
    common = {name: set.intersection(*(of_env.get(name, set()) for of_env in seeds)) for name in seeds[0]}
    return {
        env_id: {
            name: [record for record in groups[name] if record.settings["seed"] in kept]
            for name, kept in common.items()
            if kept
        }
        for env_id, groups in envs.items()
    }


def groups_left_out(envs: dict[str, Groups], compared: Groups) -> list[str]:
    """
    :param envs: Records by environment
    :param compared: Records of the groups that are compared over environments
    :return: names of the other groups, sorted
    """
    return sorted({name for groups in envs.values() for name in groups} - compared.keys())


def planned_steps(record: Record) -> np.ndarray:
    """
    :param record: Record of a run
    :return: the steps for which its evaluations were planned, multiples of ``eval_freq``. As all environments are stepped at
        once, an evaluation may take place somewhat earlier: with 128 of them at 99,968 instead of 100,000 steps.
    """
    eval_freq = record.settings.get("eval_freq")
    if not eval_freq or not len(record.timesteps):
        return record.timesteps
    # The first evaluation may have been a later one, see `eval_from`
    between = min([*np.diff(record.timesteps), record.timesteps[0] / np.ceil(record.timesteps[0] / eval_freq)])
    if abs(between - eval_freq) > PLANNED_WITHIN * eval_freq:
        return record.timesteps
    return np.rint(record.timesteps / between).astype(int) * eval_freq


def evaluations_at(record: Record, steps: np.ndarray) -> Record:
    """
    :param record: Record of a run
    :param steps: Planned steps of evaluations that it has, or that follow its last one
    :return: the record with only these evaluations
    """
    indices = np.searchsorted(planned_steps(record), steps, side="right") - 1
    return dataclasses.replace(record, timesteps=steps, returns=record.returns[indices])


class Difference(NamedTuple):
    """
    A difference between two means over seeds. It is significant if its interval leaves out 0.

    :param mean: Estimate
    :param low: Lower end of its 95 % interval; nan if there is none
    :param high: Upper end
    """

    mean: float
    low: float
    high: float


def difference(x: Sequence[float], y: Sequence[float]) -> Difference:
    """
    Welch's interval for the difference of two means: the variances may differ, and few seeds give a wide interval.

    :param x: A value for each seed
    :param y: The same for another group
    :return: mean of ``x`` minus mean of ``y``
    """
    from scipy import stats

    mean = float(np.mean(x) - np.mean(y))
    # Not by their variances: equal values may differ from their mean by a rounding error
    if min(len(x), len(y)) < 2 or max(np.ptp(x), np.ptp(y)) == 0:
        return Difference(mean, float("nan"), float("nan"))
    with warnings.catch_warnings():
        # Raised if all seeds have the same value, such as the worst possible return
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        interval = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    return Difference(mean, float(interval.low), float(interval.high))


def bootstrap(
    scores: Mapping[str, Sequence[np.ndarray]], function: Callable[..., np.ndarray], n_resamples: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """
    The stratified bootstrap over seeds. A resample draws the seeds of each group anew in each environment. Resamples and
    intervals are those of the library rliable, which calls the function for one resample after the other.

    Source: Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice"

    :param scores: By name, the scores of the groups of which the function is computed, shape (n_seeds, n_envs, ...) each
    :param function: What to estimate, from scores of shape (n_resamples, n_seeds, n_envs, ...); shape (n_resamples, ...)
    :param n_resamples: Number of resamples
    :return: estimates, and their 95 % intervals, shape (2, ...) each, by name
    """
    generator = np.random.RandomState(0)
    estimates, intervals = {}, {}
    for name, groups in scores.items():
        seeds = _draw_seeds([x.shape[:2] for x in groups], n_resamples, generator)
        resamples = [x[of_group, np.arange(x.shape[1])] for x, of_group in zip(groups, seeds, strict=True)]
        estimates[name] = function(*(x[None] for x in groups))[0]
        intervals[name] = np.percentile(function(*resamples), (100 * ALPHA / 2, 100 * (1 - ALPHA / 2)), axis=0)
    return estimates, intervals


def _draw_seeds(shapes: Sequence[tuple[int, ...]], n_resamples: int, generator: np.random.RandomState) -> list[np.ndarray]:
    """:return: indices of seeds for groups of these numbers of seeds and environments, with a dimension for resamples first"""
    if len(set(shapes)) == 1:
        # The same numbers as below, in a hundredth of the time
        return list(generator.randint(shapes[0][0], size=(n_resamples, len(shapes), *shapes[0])).swapaxes(0, 1))
    drawn = [[generator.randint(shape[0], size=shape) for shape in shapes] for _ in range(n_resamples)]
    return [np.stack(of_group) for of_group in zip(*drawn, strict=True)]


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """
    :param scores: Shape (n_resamples, n_seeds, n_envs, ...)
    :return: means without the lowest and the highest quarter of the seeds and environments, shape (n_resamples, ...)
    """
    from scipy import stats

    return stats.trim_mean(scores.reshape(len(scores), -1, *scores.shape[3:]), 0.25, axis=1)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """
    :param x: Shape (n_resamples, n_seeds, n_envs)
    :param y: The same of another group, which may have another number of seeds
    :return: probabilities that a seed of ``x`` has a higher score than one of ``y``, averaged over environments, where equal
        scores count as a half; shape (n_resamples,)
    """
    # The signs are not numbers where scores are not
    wins = (np.sign(x[:, :, None] - y[:, None]) + 1).sum(axis=(1, 2)) / 2
    return (wins / (x.shape[1] * y.shape[1])).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class RelativeReturns:
    """
    Returns of evaluations, divided in each environment by the mean return of a reference group in the last one: their
    interquartile mean over seeds and environments.

    :param reference: Name of the reference group
    :param scales: What was divided by, by environment
    :param timesteps: Environment steps of the evaluations that all runs have, shape (n_evaluations,)
    :param n_seeds: Number of seeds, by group
    :param means: Interquartile means by group, shape (n_evaluations,)
    :param intervals: Their 95 % intervals, which include the variation of the reference, shape (2, n_evaluations); nan for a
        single seed of the group or of the reference, and where they are unbounded because seeds of the reference returned 0
    :param minutes: Minutes of training to each evaluation by group, shape (n_evaluations,): the mean over environments of the
        median over seeds; nan if they are not known
    :param left_out: Groups without a seed that they have in every environment
    :param not_positive: Mean returns of the reference where they are not positive, by environment: it is left out
    """

    reference: str
    scales: dict[str, float]
    timesteps: np.ndarray
    n_seeds: dict[str, int]
    means: dict[str, np.ndarray]
    intervals: dict[str, np.ndarray]
    minutes: dict[str, np.ndarray]
    left_out: list[str]
    not_positive: dict[str, float]


def relative_returns(envs: dict[str, Groups], reference: str) -> RelativeReturns:
    """
    :param envs: Records by environment
    :param reference: Group with which all are compared
    :return: the interquartile means of the relative returns, of the seeds that each group has in every environment
    :raises ValueError: if the reference is left out, its mean return is positive nowhere, or the environments have no
        evaluation at the same steps
    """
    compared = [common_evaluations(groups) for groups in common_seeds(envs).values()]
    n_seeds = {name: len(records) for name, records in compared[0].items()}
    if reference not in n_seeds:
        raise ValueError(
            f"`reference` must be a group with a seed that was evaluated in every environment, but {reference!r} was given. "
            f"There is {', '.join(n_seeds) or 'none'}."
        )
    steps = functools.reduce(np.intersect1d, [groups[reference][0].timesteps for groups in compared])
    if not len(steps):
        raise ValueError("The runs have no evaluation in common, so their returns cannot be compared with `reference`.")
    returns = {
        name: np.array([[_means_at(record, steps) for record in groups[name]] for groups in compared]).swapaxes(0, 1)
        for name in n_seeds
    }
    scales = returns[reference][..., -1].mean(axis=0)
    not_positive = {env_id: float(scale) for env_id, scale in zip(envs, scales, strict=True) if not scale > 0}
    if len(not_positive) == len(envs):
        listed = ", ".join(f"{scale:.2f} in {env_id}" for env_id, scale in not_positive.items())
        raise ValueError(
            f"Returns are divided by those of `reference`, which must be positive, but {reference} returns {listed}."
        )
    if not_positive:
        # The others may have more evaluations in common
        others = relative_returns({env_id: envs[env_id] for env_id in envs if env_id not in not_positive}, reference)
        return dataclasses.replace(others, not_positive={**not_positive, **others.not_positive})
    # The returns of the reference are an estimate too, so they are resampled with those that are divided by them
    means, intervals = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, values in returns.items():
        groups = {name: (values,) if name == reference else (values, returns[reference])}
        # A resample of the reference may have a mean of 0 or less
        with np.errstate(divide="ignore", invalid="ignore"):
            mean, interval = bootstrap(groups, _relative_means, N_BOOTSTRAP_OF_RANKS)
        means |= mean
        # It is unbounded if seeds of the reference returned nothing
        known = np.isfinite(interval[name]).all(axis=0) & (min(n_seeds[name], n_seeds[reference]) > 1)
        intervals[name] = np.where(known, interval[name], np.nan)
    seconds = {
        name: np.mean([np.median([1 / record.steps_per_second for record in groups[name]]) for groups in compared])
        for name in n_seeds
    }
    return RelativeReturns(
        reference,
        dict(zip(envs, scales.tolist(), strict=True)),
        steps,
        n_seeds,
        means,
        intervals,
        {name: steps * of_step / 60 for name, of_step in seconds.items()},
        groups_left_out(envs, compared[0]),
        {},
    )


def _means_at(record: Record, steps: np.ndarray) -> np.ndarray:
    """:return: mean returns of a record's evaluations at exactly these steps"""
    return record.means[np.searchsorted(record.timesteps, steps)]


def _relative_means(returns: np.ndarray, reference: np.ndarray | None = None) -> np.ndarray:
    """
    :param returns: Shape (n_resamples, n_seeds, n_envs, n_evaluations)
    :param reference: Those of the reference; None for the same
    :return: interquartile means of the returns, divided by the reference's mean return in the last evaluation of each
        environment, shape (n_resamples, n_evaluations)
    """
    # Returns have no ratio to a reference that returns nothing or less: infinite
    scales = np.maximum((returns if reference is None else reference)[..., -1].mean(axis=1), 0)
    return interquartile_mean(returns / scales[:, None, :, None])
