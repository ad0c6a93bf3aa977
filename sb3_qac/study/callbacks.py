"""Callbacks of a run of a study."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.utils import safe_mean

from sb3_qac.common.files import read_json, write_atomically
from sb3_qac.common.torch_layers import constant_weights


class EvaluateFromReturn(BaseCallback):
    """
    Switches an evaluation off until training goes well: whole games of a weak agent cost much time, and say little. From then
    on it takes place at the same steps as without this callback. If training never goes well, there is one at its end.

    :param evaluation: The evaluation
    :param from_return: Mean return of the last training episodes, as many as an evaluation has (or as
        ``stats_window_size`` keeps), at which it is switched on
    """

    def __init__(self, evaluation: EvalCallback, from_return: float) -> None:
        super().__init__()
        self.evaluation, self.eval_freq, self.from_return = evaluation, evaluation.eval_freq, from_return
        self.switched_on = self.at_end = False
        # Zero is SB3's value for no evaluation
        evaluation.eval_freq = 0

    def _on_step(self) -> bool:
        if not self.switched_on:
            episodes = self.model.ep_info_buffer
            assert episodes is not None and episodes.maxlen is not None
            n_episodes = min(self.evaluation.n_eval_episodes, episodes.maxlen)
            returns = [episode["r"] for episode in list(episodes)[-n_episodes:]]
            self.switched_on = len(returns) == n_episodes and float(np.mean(returns)) >= self.from_return
        # Also after a resume, which restores only what has changed in this callback
        self.evaluation.eval_freq = self.eval_freq if self.switched_on else 0
        if not self.switched_on and not self.at_end and self.model.num_timesteps >= self.model._total_timesteps:
            # At this step, not at each of the rest of the last rollout
            self.at_end, self.evaluation.eval_freq = True, 1
        return True


class StatusCallback(BaseCallback):
    """
    Keeps the status of a run in a file.

    :param path: JSON file
    :param evaluation: Evaluation whose last result is written to it
    """

    def __init__(self, path: Path, evaluation: EvalCallback) -> None:
        super().__init__()
        self.path, self.evaluation = path, evaluation
        self.ended = False
        self.before = self.start = self.last_step = 0.0

    def _on_training_start(self) -> None:
        # A resume restores the attributes that were in the checkpoint. The steps after it are made again, so their time does
        # not count. The update before the checkpoint is not counted either, and checkpoints of early versions have no last
        # step.
        self.before += max(0.0, self.last_step - self.start)
        self.first_step = self.model.num_timesteps
        self.start = self.written = self.last_step = time.monotonic()
        # The callback of the checkpoints has started before
        self.new_episodes_at = self.checkpoint_file().get("new_episodes_at", [])
        # The caller may be handling an exception, which is not one of this run
        self.exception, self.ended = id(sys.exc_info()[1]), False
        self.write(finished=False)

    def _on_step(self) -> bool:
        self.last_step = time.monotonic()
        if self.last_step - self.written > 2:
            self.write(finished=False)
        return True

    def _on_training_end(self) -> None:
        # Only if learn ended normally, not if it was interrupted
        if id(sys.exc_info()[1]) == self.exception:
            self.ended = self.checkpoint_file().get("finished", True)

    def checkpoint_file(self) -> dict[str, Any]:
        """:return: what ``ExactCheckpointCallback`` has written about the run; nothing if it cannot be resumed"""
        return read_json(self.path.parent / "checkpoints" / "run.json")

    def update(self) -> None:
        """Write how far the run has come, if it has begun. Called when it has ended, in whatever way."""
        # Unlike the attributes above, a resume does not restore this one before the training starts
        if self.locals:
            # It must not hide why the run has ended
            with contextlib.suppress(OSError):
                self.write(finished=False)

    def finish(self) -> None:
        """Write that the run has finished. Called once its model is saved."""
        self.write(finished=True)

    def write(self, finished: bool) -> None:
        """:param finished: Whether the run has ended"""
        self.written = time.monotonic()
        seconds = self.written - self.start
        status = {
            "steps": self.model.num_timesteps,
            "total": self.model._total_timesteps,
            "seconds": self.before + seconds,
            "steps_per_second": (self.model.num_timesteps - self.first_step) / max(seconds, 1e-9),
            "training_return": self.training_return(),
            "last_evaluation": self.last_evaluation(),
            "finished": finished,
            "new_episodes_at": self.new_episodes_at,
        }
        write_atomically(self.path, json.dumps(status).encode())

    def training_return(self) -> float | None:
        """:return: mean return of the last training episodes, SB3's ``rollout/ep_rew_mean``, if there was one"""
        episodes = self.model.ep_info_buffer
        return float(safe_mean([episode["r"] for episode in episodes])) if episodes else None

    def last_evaluation(self) -> dict[str, Any] | None:
        """:return: steps and mean return of the last evaluation, if there was one"""
        if not self.evaluation.evaluations_timesteps:
            return None
        results = self.evaluation.evaluations_results[-1]
        return {"steps": self.evaluation.evaluations_timesteps[-1], "mean_return": float(np.mean(results))}


class ConstantWeightsCallback(BaseCallback):
    """Makes the features extractor prepare its weights once per rollout, as in QA2C, for on-policy algorithms of SB3."""

    def __init__(self) -> None:
        super().__init__()
        self._rollout = contextlib.ExitStack()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self._rollout.close()
        self._rollout.enter_context(constant_weights(self.model.policy))

    def _on_rollout_end(self) -> None:
        self._rollout.close()

    def _on_training_end(self) -> None:
        self._rollout.close()
