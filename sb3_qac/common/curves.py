from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm


def _nothing() -> None:
    """Does nothing. Not a lambda, so that a callback can be pickled."""


class CurvesCallback(BaseCallback):
    """
    Logs rows that SB3 does not log, for any on-policy algorithm, without changing its training:

    * ``rollout/value_target``, ``value_prediction``, ``advantage``, ``abs_advantage``: means over the rollout buffer
    * ``rollout/return_min``, ``return_mean``, ``return_max``: returns of the last episode of each environment, over all
      environments; they are raw if a ``Monitor`` records them before rewards are clipped
    * ``train/grad_norm``: norm of the gradient of the last gradient step, before clipping
    * ``train/loss``: the whole loss of A2C, which logs only its parts

    If the algorithm logs a row of the same name itself, its own row is kept.
    """

    model: OnPolicyAlgorithm

    def __init__(self) -> None:
        super().__init__()
        self.grad_norm: float | None = None
        self.last_returns: np.ndarray | None = None
        # Rows that the algorithm does not log itself; a list, so that it is kept in checkpoints
        self.own_rows: list[str] = []
        # Squared norm of the gradient of each parameter in the current gradient step
        self._squares: dict[th.Tensor, th.Tensor] = {}
        # A function, because exact resume would put the list of an earlier time in the place of a list
        self._remove_hooks: Callable[[], None] = _nothing

    def _init_callback(self) -> None:
        # An update that was interrupted leaves some
        self._squares = {}

    def _on_training_start(self) -> None:
        n_envs = self.training_env.num_envs
        if self.last_returns is None or self.model.num_timesteps == 0:
            # A new run, perhaps after another one with this callback
            self.grad_norm, self.own_rows, self.last_returns = None, [], None
        if self.last_returns is None or len(self.last_returns) != n_envs:
            # The same run may continue with another number of environments
            self.last_returns = np.full(n_envs, np.nan)

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

        self._squares = squares
        hooks = [parameter.register_post_accumulate_grad_hook(add_gradient) for parameter in parameters]
        hooks.append(self.model.policy.optimizer.register_step_pre_hook(self._end_gradient))

        def remove_hooks() -> None:
            for hook in hooks:
                hook.remove()

        self._remove_hooks = remove_hooks

    def _on_training_end(self) -> None:
        self._remove_hooks()

    def _end_gradient(self, *_: Any) -> None:
        # TRPO takes the gradients of some parameters away before the step
        squares = [square for parameter, square in self._squares.items() if parameter.grad is not None]
        self.grad_norm = float(th.stack(squares).sum().sqrt()) if squares else 0.0
        self._squares.clear()

    def _on_step(self) -> bool:
        assert self.last_returns is not None
        for i, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                self.last_returns[i] = info["episode"]["r"]
        return True

    def _on_rollout_start(self) -> None:
        # Rows logged by the previous update
        logged = self.logger.name_to_value
        # Another call of `learn` has a new logger, without the rows of the last update
        if self.grad_norm is not None and "train/n_updates" in logged:
            self._record("train/grad_norm", self.grad_norm)
        parts = ("policy_loss", "entropy_loss", "value_loss")
        if self._is_own("train/loss") and all(f"train/{name}" in logged for name in parts):
            policy_loss, entropy_loss, value_loss = (logged[f"train/{name}"] for name in parts)
            self._record("train/loss", policy_loss + self.model.ent_coef * entropy_loss + self.model.vf_coef * value_loss)

    def _is_own(self, name: str) -> bool:
        # An existing row is the algorithm's, or one of ours from an earlier update that is not yet written
        return name in self.own_rows or name not in self.logger.name_to_value

    def _record(self, name: str, value: float) -> None:
        if self._is_own(name):
            if name not in self.own_rows:
                self.own_rows.append(name)
            self.logger.record(name, value)

    def _on_rollout_end(self) -> None:
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
