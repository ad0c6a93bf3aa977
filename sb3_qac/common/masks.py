"""
Action masks, by sb3-contrib's convention: the ``action_masks()`` of an environment says which actions its state allows, with a
value for each value of each component of an action.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.utils import EXPECTED_METHOD_NAME
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_qac.common.actions import JointDistribution, components_of
from sb3_qac.common.buffers import MaskableRolloutBuffer, combined_with
from sb3_qac.common.nested_callbacks import flatten
from sb3_qac.common.schedules import ScheduledOnPolicyAlgorithm, explain_nan
from sb3_qac.common.torch_layers import constant_weights

# As in sb3-contrib. It is finite, but its exponential is exactly 0
FORBIDDEN = -1e8


def has_masks(env: GymEnv) -> bool:
    """
    :param env: Environment or environments
    :return: whether they have a method ``action_masks``
    :raises ValueError: if some have it and others do not
    """
    if not isinstance(env, VecEnv):
        return _has_masks(env.get_wrapper_attr)
    if isinstance(env.unwrapped, SubprocVecEnv):
        # They would send the method, and with it the environment
        return env.has_attr(EXPECTED_METHOD_NAME)
    found = [_has_masks(lambda name, i=i: env.get_attr(name, [i])[0]) for i in range(env.num_envs)]
    if any(found) and not all(found):
        raise ValueError(f"Of {len(found)} environments, only {np.flatnonzero(found).tolist()} have `action_masks`.")
    return all(found)


def _has_masks(get_attribute: Any) -> bool:
    try:
        return callable(get_attribute(EXPECTED_METHOD_NAME))
    except (AttributeError, NotImplementedError):
        return False


def check_masks(action_masks: Sequence[Any] | np.ndarray, action_space: spaces.Space) -> np.ndarray:
    """
    :param action_masks: The mask of each environment: True, or 1, for what is allowed
    :param action_space: Action space
    :return: the masks, shape (n_envs, n_values): n for ``Discrete(n)``, the sum of nvec for ``MultiDiscrete``, and two for
        each bit of ``MultiBinary``, for 0 and for 1
    :raises ValueError: for actions that are not finite, a mask of another length or type, or one that allows nothing
    """
    if isinstance(action_space, spaces.Box):
        raise ValueError(f"Only finite actions can be masked, but the action space is {action_space}.")
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


def ask_for_masks(env: GymEnv) -> np.ndarray:
    """
    :param env: Environments that have ``action_masks``
    :return: their masks now, shape (n_envs, n_values)
    :raises ValueError: as ``check_masks``
    """
    if isinstance(env, VecEnv):
        return check_masks(env.env_method(EXPECTED_METHOD_NAME), env.action_space)
    return check_masks([env.get_wrapper_attr(EXPECTED_METHOD_NAME)()], env.action_space)


def mask_distribution(distribution: Distribution, logits: th.Tensor, action_masks: th.Tensor) -> Distribution:
    """
    :param distribution: SB3's distribution of finite actions
    :param logits: Its parameters, shape (batch_size, n_values), or (batch_size, n_bits)
    :param action_masks: Shape (batch_size, n_values)
    :return: the distribution without what is not allowed: there probability and gradient are exactly 0
    """
    forbidden = max(FORBIDDEN, th.finfo(logits.dtype).min)
    if isinstance(distribution, JointDistribution):
        joint_logits = distribution.joint_logits(logits)
        allowed: Any = distribution.joint_actions.allowed(action_masks)
        return distribution.of_joint_logits(joint_logits.where(allowed, forbidden))
    if isinstance(distribution, BernoulliDistribution):
        zero, one = action_masks.unflatten(1, (-1, 2)).unbind(2)
        logits = logits.masked_fill(~one, forbidden).masked_fill(~zero, -forbidden)
    else:
        logits = logits.masked_fill(~action_masks, forbidden)
    return distribution.proba_distribution(action_logits=logits)


class MaskablePolicy(BasePolicy):
    """
    Policy whose actions can be masked. In a class definition, name this mixin before SB3's actor-critic policy, whose
    distribution it masks.
    """

    # Of the next call, shape (batch_size, n_values); None allows all
    action_masks: th.Tensor | None
    # In a rollout: of the last states of environments that a time limit has cut, whose values SB3 asks for first
    terminal_masks: Sequence[th.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Here and not in the class: what a compiled policy reads must be where it is set
        self.action_masks, self.terminal_masks = None, ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "action_masks": None, "terminal_masks": ()}

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

    def masks_for(self, n_observations: int) -> th.Tensor | None:
        """
        :param n_observations: Number of observations of the call that is being made
        :return: their masks, or None
        :raises ValueError: if the masks are of another number of observations
        """
        action_masks = self.action_masks
        if self.terminal_masks:
            action_masks, *self.terminal_masks = self.terminal_masks
        if action_masks is not None and len(action_masks) != n_observations:
            raise ValueError(f"There are action masks of {len(action_masks)} observations, but {n_observations} were given.")
        return action_masks

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
        if action_masks is not None:
            action_masks = check_masks(self._of_each(action_masks), self.action_space)
        with self.masked(action_masks):
            return super().predict(observation, state, episode_start, deterministic)

    def _of_each(self, action_masks: Any) -> Any:
        """:return: the masks of one observation or several, one after the other"""
        n_values = 1 if isinstance(self.action_space, spaces.Box) else sum(components_of(self.action_space))
        try:
            masks = np.asarray(action_masks)
        except ValueError:
            return [action_masks]
        return masks.reshape(-1, n_values) if masks.size and masks.size % n_values == 0 else np.atleast_2d(masks)

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Distribution:
        action_masks = self.masks_for(len(latent_pi))
        if action_masks is None:
            return super()._get_action_dist_from_latent(latent_pi)  # type: ignore[misc]
        distribution: Any = self.action_dist
        return mask_distribution(distribution, self.action_net(latent_pi), action_masks)  # type: ignore[operator]


class TellsMasks:
    """
    The callback of a rollout, and around it what tells the policy and the buffer the masks: after the callback, which may
    change the environments. While the callback runs the policy has none, so that its own calls are not masked.

    :param callback: Callback
    :param env: Environments that have ``action_masks``
    :param policy: Policy
    :param rollout_buffer: Buffer
    """

    def __init__(self, callback: BaseCallback, env: VecEnv, policy: MaskablePolicy, rollout_buffer: RolloutBuffer) -> None:
        self.callback, self.env, self.policy, self.rollout_buffer = callback, env, policy, rollout_buffer
        self.locals: dict[str, Any] = {}

    def ask(self) -> None:
        """Ask the environments for the masks of their states."""
        self.policy.action_masks = th.as_tensor(ask_for_masks(self.env), device=self.policy.device)

    def on_rollout_start(self) -> None:
        self.callback.on_rollout_start()
        self.ask()

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self.locals = locals_
        self.callback.update_locals(locals_)

    def on_step(self) -> bool:
        masks, self.policy.action_masks = self.policy.action_masks, None
        assert masks is not None
        if isinstance(self.rollout_buffer, MaskableRolloutBuffer):
            self.rollout_buffer.add_masks(masks)
        if not self.callback.on_step():
            return False
        infos = self.locals["infos"]
        # Such an environment has been reset, so the mask of its last state is lost: that of the state before
        self.policy.terminal_masks = [
            masks[[i]]
            for i in np.flatnonzero(self.locals["dones"])
            if infos[i].get("TimeLimit.truncated", False) and infos[i].get("terminal_observation") is not None
        ]
        self.ask()
        return True

    def on_rollout_end(self) -> None:
        self.policy.action_masks, self.policy.terminal_masks = None, ()
        self.callback.on_rollout_end()


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

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "use_masking", "_is_masked"]

    def _setup_model(self) -> None:
        is_dict = isinstance(self.observation_space, spaces.Dict)
        buffer_class = self.rollout_buffer_class or (DictRolloutBuffer if is_dict else RolloutBuffer)
        self.rollout_buffer_class = combined_with(self.rollout_buffer_base, buffer_class)
        super()._setup_model()
        # The class that was given is saved, and is part of the identity of a run
        self.rollout_buffer_class = buffer_class

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        # Once: processes would be asked at each rollout
        is_finite = not isinstance(self.action_space, spaces.Box)
        self._is_masked = self.use_masking and is_finite and self.env is not None and has_masks(self.env)
        return super()._setup_learn(*args, **kwargs)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        result = super()._init_callback(callback, progress_bar)
        for each in flatten(result):
            # sb3-contrib's asks for the masks itself
            if self.use_masking and isinstance(each, EvalCallback) and not isinstance(each, MaskableEvalCallback):
                each.model = with_masks(self, each.eval_env)
        return result

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        # The weights are the same for the whole rollout
        with constant_weights(self.policy), self._masking(env, callback, rollout_buffer) as around:
            return super().collect_rollouts(env, around, rollout_buffer, n_rollout_steps)

    @contextmanager
    def _masking(self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer) -> Iterator[Any]:
        """
        Context manager: while active, the policy and the buffer are told the masks of the environments, if these have them.

        :param env: Environments
        :param callback: Callback of the rollout
        :param rollout_buffer: Buffer
        :return: what the rollout is to call as its callback
        """
        if not self._is_masked:
            yield callback
            return
        policy = self._maskable_policy()
        try:
            yield TellsMasks(callback, env, policy, rollout_buffer)
        finally:
            policy.action_masks, policy.terminal_masks = None, ()

    def _maskable_policy(self) -> MaskablePolicy:
        if isinstance(self.policy, MaskablePolicy):
            return self.policy
        raise ValueError(
            f"The environment has `action_masks`, but {type(self.policy).__name__} cannot be masked: inherit it from "
            "`sb3_qac.common.masks.MaskablePolicy` too, or call `learn(..., use_masking=False)`."
        )

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
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        with explain_nan():
            return self._maskable_policy().predict(observation, state, episode_start, deterministic, action_masks)


class _WithMasks:
    """A model that asks environments for the masks of each prediction; everything else is the model's."""

    def __init__(self, model: Any, env: GymEnv) -> None:
        vars(self).update(_model=model, _env=env)

    def __getattr__(self, name: str) -> Any:
        if name in ("_model", "_env"):
            # Not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def predict(self, *args: Any, **kwargs: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        return self._model.predict(*args, **{"action_masks": ask_for_masks(self._env), **kwargs})


def with_masks(model: BaseAlgorithm, env: GymEnv) -> Any:
    """
    A model that predicts with action masks, for code that knows nothing of them, such as SB3's
    ``evaluate_policy(with_masks(model, env), env)``.

    :param model: Model
    :param env: Environments that give the observations
    :return: the model; if it takes masks and the environments have them, within an object that asks for them
    """
    return _WithMasks(model, env) if isinstance(model, MaskableOnPolicyAlgorithm) and has_masks(env) else model
