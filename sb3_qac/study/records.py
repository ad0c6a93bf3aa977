"""What the runs of a study left in their folders, and figures of it over seeds."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_qac.common.files import read_json

# Rows of the log that are drawn beside the evaluations
CURVES = {
    "rollout/ep_rew_mean": "return in training",
    "train/entropy_loss": "entropy loss",
    "train/explained_variance": "explained variance",
    "train/value_loss": "value loss",
    "train/policy_loss": "policy loss",
    "train/grad_norm": "gradient norm",
}
# What SB3's PPO calls one of them
SYNONYMS = {"train/policy_gradient_loss": "train/policy_loss"}
CURVES_FILE, DIAGNOSIS_FILE = "curves.csv", "diagnosis.json"
# Of the estimators in a diagnosis, those that are told of in a report
ALL_ACTION, A2C_WEIGHT = "all-action", "sampled, return - V~ (A2C's weight)"
# As in rliable's own examples, where a test of ranks is a thousand times slower than a mean
N_BOOTSTRAP, N_BOOTSTRAP_OF_RANKS = 10_000, 2_000


@dataclass
class Record:
    """
    What one run of a study left.

    :param folder: Its folder
    :param settings: Its settings, versions and machine
    :param status: How far it is
    :param timesteps: Environment steps at each evaluation, shape (n_evaluations,)
    :param returns: Raw returns of its episodes, shape (n_evaluations, n_episodes)
    :param curves: What was logged, by row of the log, indexed by steps
    :param diagnosis: What ``diagnose`` found, at several points of the training; empty if it was not asked
    """

    folder: Path
    settings: dict[str, Any]
    status: dict[str, Any]
    timesteps: np.ndarray
    returns: np.ndarray
    curves: dict[str, pd.Series]
    diagnosis: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.settings["name"]

    @property
    def means(self) -> np.ndarray:
        """Mean return of each evaluation, shape (n_evaluations,)."""
        return self.returns.mean(axis=1)

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return bool(self.status.get("finished"))

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, and was not tried again."""
        return not self.finished and (self.folder / "error.txt").is_file()

    @property
    def stopped(self) -> bool:
        """Whether it ended because its last evaluation reached the return at which it was to stop."""
        goal = self.settings.get("stop_return")
        return self.finished and goal is not None and len(self.means) > 0 and self.means[-1] >= goal

    @property
    def steps_per_second(self) -> float:
        """Environment steps for each second, evaluations included; nan before the first."""
        seconds = self.status.get("seconds", 0.0)
        return self.status["steps"] / seconds if seconds else float("nan")

    def steps_to(self, goal: float) -> int | None:
        """
        :param goal: Mean return of an evaluation
        :return: environment steps at the first evaluation that reached it; None if none did
        """
        reached = self.timesteps[self.means >= goal]
        return int(reached[0]) if len(reached) else None

    def hours_to(self, goal: float) -> float | None:
        """
        :param goal: Mean return of an evaluation
        :return: hours to the first evaluation that reached it, at the mean speed of the run; None if none did
        """
        steps = self.steps_to(goal)
        return None if steps is None else steps / self.steps_per_second / 3600


# The runs of one environment, by what they are replicates of
Groups = dict[str, list[Record]]


def load_study(folder: Path) -> dict[str, Groups]:
    """
    :param folder: Folder of a study
    :return: records of all runs that were started, by environment and group, in the order of their seeds
    :raises ValueError: if there are none
    """
    found = [path.parent for pattern in ("*/run.json", "*/*/run.json") for path in sorted(folder.glob(pattern))]
    # Checkpoints have a file of that name as well
    records = [load_run(path) for path in found if path.name != "checkpoints"]
    if not records:
        raise ValueError(
            f"There is no run of a study in {folder}. `python -m sb3_qac study ... --output {folder}` makes some."
        )
    envs: dict[str, Groups] = {}
    for record in sorted(records, key=lambda record: (record.settings["group"], record.settings["seed"])):
        envs.setdefault(record.settings["env_id"], {}).setdefault(record.settings["group"], []).append(record)
    return dict(sorted(envs.items()))


def load_run(folder: Path) -> Record:
    """
    :param folder: Folder of a run
    :return: what it left there
    """
    timesteps, returns = np.zeros(0, dtype=int), np.zeros((0, 1))
    if (folder / "evaluations.npz").is_file():
        evaluations = np.load(folder / "evaluations.npz")
        timesteps, returns = evaluations["timesteps"], evaluations["results"]
    diagnosis = folder / DIAGNOSIS_FILE
    return Record(
        folder=folder,
        settings=json.loads((folder / "run.json").read_text()),
        status=read_json(folder / "status.json"),
        timesteps=timesteps,
        returns=returns,
        curves=load_curves(folder),
        diagnosis=json.loads(diagnosis.read_text()) if diagnosis.is_file() else [],
    )


def load_curves(folder: Path) -> dict[str, pd.Series]:
    """
    Read what TensorBoard has of a run, and keep it as a small CSV file beside; or read that file where it is all there is,
    as in a repository.

    :param folder: Folder of a run
    :return: rows of its log, indexed by steps
    """
    kept = folder / CURVES_FILE
    curves = {}
    for events in sorted({path.parent for path in folder.glob("tensorboard/**/events.out.tfevents.*")}):
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
        accumulator.Reload()
        tags = {SYNONYMS.get(tag, tag): tag for tag in accumulator.Tags()["scalars"]}
        for name in (name for name in CURVES if name in tags):
            scalars = accumulator.Scalars(tags[name])
            curves[name] = pd.Series([scalar.value for scalar in scalars], index=[scalar.step for scalar in scalars])
    if curves:
        pd.DataFrame(curves).rename_axis("step").to_csv(kept, float_format="%.5g")
    if kept.is_file():
        table = pd.read_csv(kept, index_col="step")
        return {tag: table[tag].dropna() for tag in CURVES if tag in table}
    return {}


def standard_error(values: np.ndarray) -> float:
    """
    :param values: Independent values
    :return: standard error of their mean; nan for a single one
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def pooled(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    :param records: Runs of a group
    :return: steps at which all of them have been evaluated, and at each the mean return of all their episodes and its
        standard error as if episodes were independent, shape (n_evaluations,) each. A run that was stopped at a return
        counts with its last evaluation from there on.
    """
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
    return record.returns[-1] if record.stopped and steps > record.timesteps[-1] else None


def common_evaluations(groups: Groups) -> Groups:
    """
    Cut runs to what can be compared. An evaluation at which a run was stopped is left out: it was chosen for its return.

    :param groups: Records of an environment
    :return: the same with those evaluations alone that all runs have. Runs without any are left out, and groups of such.
    """
    begun = {name: [record for record in records if len(record.timesteps)] for name, records in groups.items()}
    begun = {name: records for name, records in begun.items() if records}
    of_runs = [record.timesteps[: -1 if record.stopped else None] for records in begun.values() for record in records]
    common = functools.reduce(np.intersect1d, of_runs) if of_runs else np.zeros(0, dtype=int)
    return {name: [_cut(record, common) for record in records] for name, records in begun.items()}


def _cut(record: Record, timesteps: np.ndarray) -> Record:
    return dataclasses.replace(record, timesteps=timesteps, returns=record.returns[np.isin(record.timesteps, timesteps)])


class Difference(NamedTuple):
    """
    A difference between two means over seeds.

    :param mean: Estimate
    :param low: Lower end of its 95 % interval; nan if there is none
    :param high: Upper end
    """

    mean: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(x: Sequence[float], y: Sequence[float]) -> Difference:
    """
    Welch's interval for the difference of two means: the variances may differ, and few seeds give a wide interval.

    :param x: A figure for each seed
    :param y: The same of another group
    :return: mean of ``x`` less that of ``y``
    """
    from scipy import stats

    mean = float(np.mean(x) - np.mean(y))
    if min(len(x), len(y)) < 2 or np.var(x) + np.var(y) == 0:
        return Difference(mean, float("nan"), float("nan"))
    with warnings.catch_warnings():
        # Of seeds that all have the same figure, such as the worst
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        interval = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    return Difference(mean, float(interval.low), float(interval.high))


def bootstrap(
    scores: dict[str, Any], function: Callable[..., Any], n_repetitions: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """
    :param scores: Scores by name, shape (n_seeds, n_envs) each, or pairs of such
    :param function: What to estimate
    :param n_repetitions: How often to draw seeds
    :return: estimates, and 95 % intervals of the stratified bootstrap over seeds

    Source: Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice"; their library rliable
    """
    from rliable import library

    before = np.random.get_state()
    # rliable draws from numpy's global generator, whatever generator it is given
    np.random.seed(0)
    try:
        return library.get_interval_estimates(scores, function, reps=n_repetitions)
    finally:
        np.random.set_state(before)
