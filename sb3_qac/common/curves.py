import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_qac.common.schedules import ScheduledOnPolicyAlgorithm


def _nothing() -> None:
    """Does nothing. Not a lambda, so that a callback can be pickled."""


class CurvesCallback(BaseCallback):
    """
    Logs rows that SB3 does not log, for any on-policy algorithm, without changing its training:

    * ``rollout/value_target``, ``value_prediction``, ``advantage``, ``abs_advantage``: means over the rollout buffer
    * ``rollout/return_min``, ``return_mean``, ``return_max``: returns of the last episode of each environment, over all
      environments; they are raw if a ``Monitor`` records them before rewards are clipped
    * ``train/grad_norm``: norm of the gradient of the last gradient step, before clipping. The algorithms of this package log
      it themselves.
    * ``train/loss``: the whole loss of A2C, which logs only its parts
    """

    model: OnPolicyAlgorithm

    def __init__(self) -> None:
        super().__init__()
        self.grad_norm: float | None = None
        self.last_returns: np.ndarray | None = None
        # A function, because exact resume would put the list of an earlier time in the place of a list
        self._remove_hooks: Callable[[], None] = _nothing

    def _on_training_start(self) -> None:
        n_envs = self.training_env.num_envs
        # A new run, perhaps after another one with this callback, or the same run with another number of environments
        if self.last_returns is None or len(self.last_returns) != n_envs or self.model.num_timesteps == 0:
            self.grad_norm, self.last_returns = None, np.full(n_envs, np.nan)

    def _watch_gradients(self) -> None:
        # Anew for each update, because parameters may be frozen and freed, and an interrupted run had no end
        self._on_training_end()
        parameters = [parameter for parameter in self.model.policy.parameters() if parameter.requires_grad]
        squares: dict[th.Tensor, th.Tensor] = {}

        # Not a method: autograd holds it in C++, where the garbage collector would not see a cycle through the model. After
        # Ctrl-C its environments would live on until the process ends
        def add_gradient(parameter: th.Tensor) -> None:
            assert parameter.grad is not None
            squares[parameter] = parameter.grad.detach().square().sum()

        hooks = [parameter.register_post_accumulate_grad_hook(add_gradient) for parameter in parameters]
        hooks.append(self.model.policy.optimizer.register_step_pre_hook(functools.partial(self._end_gradient, squares)))

        def remove_hooks() -> None:
            for hook in hooks:
                hook.remove()

        self._remove_hooks = remove_hooks

    def _on_training_end(self) -> None:
        self._remove_hooks()

    def _end_gradient(self, squares: dict[th.Tensor, th.Tensor], *_: Any) -> None:
        # TRPO takes the gradients of some parameters away before the step
        kept = [square for parameter, square in squares.items() if parameter.grad is not None]
        self.grad_norm = float(th.stack(kept).sum().sqrt()) if kept else 0.0
        squares.clear()

    def _on_step(self) -> bool:
        assert self.last_returns is not None
        for i, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                self.last_returns[i] = info["episode"]["r"]
        return True

    def _on_rollout_start(self) -> None:
        # Rows logged by the previous update. Another call of `learn` has a new logger, without them
        logged = self.logger.name_to_value
        if self.grad_norm is not None and "train/n_updates" in logged:
            self.logger.record("train/grad_norm", self.grad_norm)
        if isinstance(self.model, A2C) and "train/policy_loss" in logged:
            policy_loss, entropy_loss, value_loss = (logged[f"train/{name}_loss"] for name in ("policy", "entropy", "value"))
            loss = policy_loss + self.model.ent_coef * entropy_loss + self.model.vf_coef * value_loss
            self.logger.record("train/loss", loss)

    def _on_rollout_end(self) -> None:
        if not isinstance(self.model, ScheduledOnPolicyAlgorithm):
            self._watch_gradients()
        assert self.last_returns is not None
        buffer = self.model.rollout_buffer
        if buffer.full:
            self.logger.record("rollout/value_target", float(buffer.returns.mean()))
            self.logger.record("rollout/value_prediction", float(buffer.values.mean()))
            self.logger.record("rollout/advantage", float(buffer.advantages.mean()))
            self.logger.record("rollout/abs_advantage", float(np.abs(buffer.advantages).mean()))
        if not np.isnan(self.last_returns).all():
            for name, function in (("min", np.nanmin), ("mean", np.nanmean), ("max", np.nanmax)):
                self.logger.record(f"rollout/return_{name}", float(function(self.last_returns)))
