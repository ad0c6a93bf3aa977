"""The record of one run of a study: its settings, how it ended, and its returns."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

# Rows of the log that a report draws
CURVES = {
    "rollout/ep_rew_mean": "return in training",
    "train/entropy_loss": "entropy loss",
    "train/explained_variance": "explained variance",
    "train/value_loss": "value loss",
    "train/policy_loss": "policy loss",
    "train/grad_norm": "gradient norm",
}
# Metrics of the whole run, by their column in `runs.csv`
SUMMARY_METRICS = ("training_return", "entropy", "noise_to_signal", "variance")


@dataclass
class Record:
    """
    One run of a study.

    :param path: Folder of the run, relative to the study's folder: its key in packed data
    :param folder: Folder of the run; for a packed run it may not exist
    :param settings: Its settings, versions and machine
    :param status: ``steps``, ``seconds``, and whether it is ``finished``, ``failed`` or ``lost``
    :param timesteps: Environment steps at each evaluation, shape (n_evaluations,)
    :param returns: Raw returns of its episodes, shape (n_evaluations, n_episodes)
    :param lengths: Lengths of its episodes, shape (n_evaluations, n_episodes); None if they were not kept
    :param curves: Rows of the log, indexed by steps
    :param diagnosis: Result of ``diagnose`` at several points of the run; empty if there is none
    :param metrics: Metrics of the whole run, from the log before it was thinned: see ``SUMMARY_METRICS``
    """

    path: str
    folder: Path
    settings: dict[str, Any]
    status: dict[str, Any]
    timesteps: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray | None = None
    curves: dict[str, pd.Series] = field(default_factory=dict)
    diagnosis: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.settings["name"]

    @property
    def means(self) -> np.ndarray:
        """Mean return of each evaluation, shape (n_evaluations,)."""
        return self.returns.mean(axis=1)

    @property
    def best(self) -> int:
        """Index of the evaluation with the highest mean return. NaN is below all others. There must be one."""
        return int(np.where(np.isnan(self.means), -np.inf, self.means).argmax())

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return bool(self.status.get("finished"))

    @property
    def failed(self) -> bool:
        """Whether it ended with an error and was not retried."""
        return not self.finished and bool(self.status.get("failed"))

    @property
    def stopped(self) -> bool:
        """Whether it ended because its last evaluation reached the stopping return."""
        goal = self.settings.get("stop_return")
        return self.finished and goal is not None and len(self.means) > 0 and self.means[-1] >= goal

    @property
    def state(self) -> str:
        """ "lost", "stopped" (at its return), "finished", "failed" or "unfinished"."""
        if self.status.get("lost"):
            return "lost"
        if self.finished:
            return "stopped" if self.stopped else "finished"
        return "failed" if self.failed else "unfinished"

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second, evaluations included; nan if none is known."""
        steps, seconds = self.status.get("steps", 0), self.status.get("seconds", 0.0)
        return steps / seconds if steps and seconds else float("nan")

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
        :return: hours to the first evaluation that reached it, at the mean speed of the run; None if none did, or the speed is
            not known
        """
        steps = self.steps_to(goal)
        return None if steps is None or math.isnan(self.steps_per_second) else steps / self.steps_per_second / 3600


# The runs of one environment, by algorithm
Groups = dict[str, list[Record]]


def records_of(groups: Mapping[str, Iterable[Record]]) -> list[Record]:
    """
    :param groups: Records by group, or by part of a study
    :return: all of them, in this order
    """
    return [record for records in groups.values() for record in records]
