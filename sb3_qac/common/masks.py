"""
Action masks, by sb3-contrib's convention: the ``action_masks()`` of an environment says which actions its state allows, with a
value for each value of each component of an action.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.maskable.utils import EXPECTED_METHOD_NAME, is_masking_supported
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_qac.common.actions import components_of
from sb3_qac.common.buffers import MaskableRolloutBuffer, combined_with
from sb3_qac.common.nested_callbacks import flatten
from sb3_qac.common.schedules import ScheduledOnPolicyAlgorithm, explain_nan

# As in sb3-contrib. It is finite, but its exponential is exactly 0
FORBIDDEN = -1e8


def has_masks(env: GymEnv | None) -> bool:
    """
    :param env: Environments
    :return: whether all of them have ``action_masks``
    """
    try:
        return env is not None and is_masking_supported(env)
    except NotImplementedError:
        # A vectorized environment whose attributes cannot be asked for
        return False


def check_masks(action_masks: Sequence[Any] | np.ndarray, action_space: spaces.Space) -> np.ndarray:
    """
    :param action_masks: The mask of each environment: True, or 1, for what is allowed
    :param action_space: Action space
    :return: the masks, shape (n_envs, n_values): n for ``Discrete(n)``, the sum of nvec for ``MultiDiscrete``, and two for
        each bit of ``MultiBinary``, for 0 and for 1
    :raises ValueError: for a mask of another length or type, or one that allows nothing
    """
    sizes = components_of(action_space)
    starts = np.cumsum((0, *sizes[:-1]))
    checked = np.empty((len(action_masks), sum(sizes)), dtype=bool)
    for index, mask in enumerate(action_masks):
        try:
            values = np.asarray(mask).ravel()
        except ValueError:
            values = np.asarray(None)
        if values.shape != checked[0].shape or not (values.dtype == bool or np.isin(values, (0, 1)).all()):
            raise ValueError(
                f"The action mask of environment {index} must have {sum(sizes)} values for {action_space}, each True or "
                f"False, but it is {mask!r}."
            )
        checked[index] = values
        if not np.logical_or.reduceat(checked[index], starts).all():
            raise ValueError(
                f"The action mask of environment {index} allows no action of {action_space}: {mask!r}. `action_masks` must "
                "allow at least one in every state, also in the one after `reset`."
            )
    return checked


def ask_for_masks(env: VecEnv) -> np.ndarray:
    """
    :param env: Environments that have ``action_masks``
    :return: their masks now, shape (n_envs, n_values)
    :raises ValueError: as ``check_masks``
    """
    return check_masks(env.env_method(EXPECTED_METHOD_NAME), env.action_space)


def mask_distribution(distribution: Distribution, action_masks: th.Tensor) -> Distribution:
    """
    :param distribution: SB3's distribution of finite actions, changed in place
    :param action_masks: Shape (batch_size, n_values)
    :return: the distribution without the actions that are not allowed: their probability is exactly 0, and so is its gradient
    """
    found: Any = distribution.distribution
    if isinstance(distribution, BernoulliDistribution):
        zero, one = action_masks.unflatten(1, (-1, 2)).unbind(2)
        logits = found.logits.masked_fill(~one, FORBIDDEN).masked_fill(~zero, -FORBIDDEN)
    else:
        logits = th.cat([each.logits for each in found], dim=1) if isinstance(found, list) else found.logits
        logits = logits.masked_fill(~action_masks, FORBIDDEN)
    return distribution.proba_distribution(action_logits=logits)


class MaskablePolicy(BasePolicy):
    """
    Policy whose actions can be masked. In a class definition, name this mixin before SB3's actor-critic policy, whose
    distribution it masks.
    """

    # Of the call that is being made, shape (batch_size, n_values); None allows all
    action_masks: th.Tensor | None = None
    # Of the environments of a rollout, as they are now
    rollout_masks: th.Tensor | None = None
    # Of the last states of those whose time limit has just cut them, shape (1, n_values) each, until the value is asked for
    terminal_masks: Sequence[th.Tensor] = ()

    def __getstate__(self) -> dict[str, Any]:
        # A copy that is made within a rollout has no rollout
        return {**super().__getstate__(), "action_masks": None, "rollout_masks": None, "terminal_masks": ()}

    @contextmanager
    def masked(self, action_masks: np.ndarray | th.Tensor | None) -> Iterator[None]:
        """
        Context manager: while active, only these actions are allowed.

        :param action_masks: Shape (batch_size, n_values), or None to allow all
        """
        before = self.action_masks
        self.action_masks = None if action_masks is None else th.as_tensor(action_masks, dtype=th.bool, device=self.device)
        try:
            yield
        finally:
            self.action_masks = before

    def masks_of_rollout(self, of_values: bool = False) -> th.Tensor | None:
        """
        :param of_values: Whether a value is asked for. SB3 first asks for that of each last state which a time limit cuts
        :return: the masks of the call that a rollout makes
        """
        if of_values and self.terminal_masks:
            first, *self.terminal_masks = self.terminal_masks
            return first
        return self.action_masks if self.rollout_masks is None else self.rollout_masks

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Get the policy action from an observation.

        :param observation: the input observation
        :param state: The last hidden states (unused)
        :param episode_start: The last masks of episodes (unused)
        :param deterministic: Whether or not to return deterministic actions.
        :param action_masks: Which actions are allowed, of one observation or of each; None for all
        :return: the model's action and the next hidden state
        :raises ValueError: for masks that do not fit the actions and the observations, or that allow nothing
        """
        if action_masks is not None:
            try:
                of_each: Sequence[Any] | np.ndarray = np.atleast_2d(action_masks)
            except ValueError:
                of_each = [action_masks]
            action_masks = check_masks(of_each, self.action_space)
        with self.masked(action_masks):
            return super().predict(observation, state, episode_start, deterministic)

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Distribution:
        distribution = super()._get_action_dist_from_latent(latent_pi)  # type: ignore[misc]
        action_masks = self.masks_for(len(latent_pi))
        return distribution if action_masks is None else mask_distribution(distribution, action_masks)

    def masks_for(self, n_observations: int) -> th.Tensor | None:
        """
        :param n_observations: Number of observations of the call that is being made
        :return: their masks, or None
        :raises ValueError: if the masks are of another number of observations
        """
        if self.action_masks is not None and len(self.action_masks) != n_observations:
            raise ValueError(
                f"There are action masks of {len(self.action_masks)} observations, but {n_observations} were given."
            )
        return self.action_masks


class MaskedEnvs(VecEnvWrapper):
    """
    The environments of a rollout. They tell the policy and the buffer which actions are allowed.

    :param venv: Environments that have ``action_masks``
    :param policy: Policy
    :param rollout_buffer: Buffer
    """

    def __init__(self, venv: VecEnv, policy: MaskablePolicy, rollout_buffer: RolloutBuffer) -> None:
        super().__init__(venv)
        self.policy, self.rollout_buffer = policy, rollout_buffer
        self._ask()

    def _ask(self) -> None:
        self.policy.rollout_masks = th.as_tensor(ask_for_masks(self.venv), device=self.policy.device)

    def reset(self) -> VecEnvObs:
        obs = self.venv.reset()
        self._ask()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        if isinstance(self.rollout_buffer, MaskableRolloutBuffer):
            assert self.policy.rollout_masks is not None
            self.rollout_buffer.add_masks(self.policy.rollout_masks)
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        result = self.venv.step_wait()
        _, _, dones, infos = result
        masks = self.policy.rollout_masks
        assert masks is not None
        # An environment has been reset when SB3 bootstraps from its last state, whose mask is lost: that of the state before
        self.policy.terminal_masks = [
            masks[[i]]
            for i in np.flatnonzero(dones)
            if infos[i].get("TimeLimit.truncated", False) and infos[i].get("terminal_observation") is not None
        ]
        self._ask()
        return result


class MaskableOnPolicyAlgorithm(ScheduledOnPolicyAlgorithm):
    """
    On-policy algorithm that uses the action masks of environments that have them, in rollouts and in the evaluations of
    SB3's ``EvalCallback``.
    """

    # Base class of the rollout buffer
    rollout_buffer_base: type[RolloutBuffer] = RolloutBuffer
    use_masking: bool = True
    # Whether the environments of this ``learn`` have masks, and they are used
    _is_masked: bool = False
    # Within ``masks_from``: environments whose masks ``predict`` uses
    predicted_env: VecEnv | None = None

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "use_masking", "_is_masked", "predicted_env"]

    def _setup_model(self) -> None:
        is_dict = isinstance(self.observation_space, spaces.Dict)
        buffer_class = self.rollout_buffer_class or (DictRolloutBuffer if is_dict else RolloutBuffer)
        self.rollout_buffer_class = combined_with(self.rollout_buffer_base, buffer_class)
        super()._setup_model()
        # The class that was given is saved, and is part of the identity of a run
        self.rollout_buffer_class = buffer_class

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        # Once: processes would be asked at each rollout
        self._is_masked = self.use_masking and has_masks(self.env)
        return super()._setup_learn(*args, **kwargs)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        result = super()._init_callback(callback, progress_bar)
        for each in flatten(result):
            if isinstance(each, EvalCallback):
                _mask_evaluation(each)
        return result

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        with self._masked_envs(env, rollout_buffer) as masked_env:
            return super().collect_rollouts(masked_env, callback, rollout_buffer, n_rollout_steps)

    @contextmanager
    def _masked_envs(self, env: VecEnv, rollout_buffer: RolloutBuffer) -> Iterator[VecEnv]:
        """
        Context manager: while active, the policy and the buffer are told the masks of the environments, if these have them.

        :param env: Environments
        :param rollout_buffer: Buffer
        :return: the environments to step
        """
        if not self._is_masked:
            yield env
            return
        policy = self._maskable_policy()
        try:
            yield MaskedEnvs(env, policy, rollout_buffer)
        finally:
            policy.rollout_masks, policy.terminal_masks = None, ()

    def _maskable_policy(self) -> MaskablePolicy:
        if isinstance(self.policy, MaskablePolicy):
            return self.policy
        raise ValueError(
            f"The environment has `action_masks`, but {type(self.policy).__name__} cannot be masked: inherit it from "
            "`sb3_qac.common.masks.MaskablePolicy` too, or call `learn(..., use_masking=False)`."
        )

    def _masked(self, action_masks: th.Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if action_masks is None else self._maskable_policy().masked(action_masks)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Get the policy action from an observation.

        :param observation: the input observation
        :param state: The last hidden states (unused)
        :param episode_start: The last masks of episodes (unused)
        :param deterministic: Whether or not to return deterministic actions.
        :param action_masks: Which actions are allowed, of one observation or of each (sb3-contrib's ``get_action_masks``);
            None for all
        :return: the model's action and the next hidden state
        :raises ValueError: for masks that do not fit the actions and the observations, or that allow nothing
        """
        if action_masks is None and self.predicted_env is not None:
            action_masks = ask_for_masks(self.predicted_env)
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        with explain_nan():
            return self._maskable_policy().predict(observation, state, episode_start, deterministic, action_masks)


def masks_now(model: MaskableOnPolicyAlgorithm, env: VecEnv) -> np.ndarray | None:
    """
    :param model: Model
    :param env: Environments
    :return: the masks of their states, as in the model's rollouts: None if they have none
    """
    return ask_for_masks(env) if model.use_masking and has_masks(env) else None


@contextmanager
def masks_from(env: VecEnv, model: BaseAlgorithm) -> Iterator[None]:
    """
    Context manager: while active, ``model.predict`` asks these environments for action masks, if they have them. So SB3's
    ``evaluate_policy(model, env)`` evaluates with masks. It has no effect for algorithms that do not use masks.

    :param env: Environments that give the observations
    :param model: Model
    """
    if not (isinstance(model, MaskableOnPolicyAlgorithm) and has_masks(env)):
        yield
        return
    before, model.predicted_env = model.predicted_env, env
    try:
        yield
    finally:
        model.predicted_env = before


def _mask_evaluation(evaluation: EvalCallback) -> None:
    """
    :param evaluation: Evaluation that is to use the masks of its environments, if the model can
    """
    # An evaluation may be used in one run after another
    if hasattr(evaluation, "_asks_for_masks"):
        return
    evaluation._asks_for_masks = True  # type: ignore[attr-defined]
    evaluate = evaluation._on_step

    def evaluate_with_masks() -> bool:
        if not getattr(evaluation.model, "use_masking", False):
            return evaluate()
        with masks_from(evaluation.eval_env, evaluation.model):
            return evaluate()

    evaluation._on_step = evaluate_with_masks  # type: ignore[method-assign]
