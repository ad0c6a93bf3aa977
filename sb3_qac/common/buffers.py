from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import PyTorchObs, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_qac.common.actions import n_actions_of


class MaskableSamples(NamedTuple):
    """A minibatch of SB3, and the action masks, shape (batch_size, n_values), or None without masks"""

    observations: PyTorchObs
    actions: th.Tensor
    old_values: th.Tensor
    old_log_prob: th.Tensor
    advantages: th.Tensor
    returns: th.Tensor
    action_masks: th.Tensor | None


class AllActionSamples(NamedTuple):
    """The same, and ``log pi(a|s)`` of every action, shape (batch_size, n_actions)"""

    observations: PyTorchObs
    actions: th.Tensor
    old_values: th.Tensor
    old_log_prob: th.Tensor
    advantages: th.Tensor
    returns: th.Tensor
    action_masks: th.Tensor | None
    all_old_log_probs: th.Tensor


class MaskableRolloutBuffer(RolloutBuffer):
    """
    Rollout buffer that also holds action masks. ``combined_with`` combines it with other rollout buffers. The arguments are
    theirs.
    """

    get: Callable[..., Generator[MaskableSamples, None, None]]  # type: ignore[assignment]
    # Shape (buffer_size, n_envs, n_values), also after the update; None without masks
    action_masks: th.Tensor | None = None

    def reset(self) -> None:
        super().reset()
        self.action_masks = None

    def add_masks(self, action_masks: th.Tensor) -> None:
        """
        :param action_masks: Masks of the step that is added next, shape (n_envs, n_values)
        """
        if self.action_masks is None:
            self.action_masks = th.zeros(self.buffer_size, *action_masks.shape, dtype=th.bool)
        self.action_masks[self.pos] = action_masks

    def _at(self, of_steps: th.Tensor, batch_inds: np.ndarray) -> th.Tensor:
        # In minibatches SB3 has the steps of one environment after those of the other
        return of_steps[batch_inds % self.buffer_size, batch_inds // self.buffer_size].to(self.device)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> MaskableSamples:  # type: ignore[override]
        samples = super()._get_samples(batch_inds, env)[: len(RolloutBufferSamples._fields)]
        masks = None if self.action_masks is None else self._at(self.action_masks, batch_inds)
        return MaskableSamples._make((*samples, masks))


class AllActionRolloutBuffer(MaskableRolloutBuffer):
    """
    Rollout buffer that also holds ``Q(s, a)`` and ``log pi(a|s)`` of every action. They are there when the returns are, so
    before SB3 calls ``on_rollout_end``.
    """

    get: Callable[..., Generator[AllActionSamples, None, None]]  # type: ignore[assignment]
    # Returns the next two
    evaluate_rollout: Callable[[], tuple[th.Tensor, th.Tensor]]
    # Shape (buffer_size, n_envs, n_actions) each, also after the update
    q_values: th.Tensor
    all_log_probs: th.Tensor

    def __getstate__(self) -> dict[str, Any]:
        # The function of a rollout of the model, which cannot be pickled
        return {name: value for name, value in vars(self).items() if name != "evaluate_rollout"}

    def reset(self) -> None:
        super().reset()
        self.q_values = self.all_log_probs = th.zeros(self.buffer_size, self.n_envs, n_actions_of(self.action_space))

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        self.q_values, self.all_log_probs = self.evaluate_rollout()

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> AllActionSamples:  # type: ignore[override]
        samples = super()._get_samples(batch_inds, env)
        return AllActionSamples._make((*samples, self._at(self.all_log_probs, batch_inds)))


def combined_with(base_class: type[RolloutBuffer], buffer_class: type[RolloutBuffer]) -> type[RolloutBuffer]:
    """
    :param base_class: Class of rollout buffer that an algorithm needs
    :param buffer_class: Class of rollout buffer that was given
    :return: a class that is both
    :raises ValueError: if the latter is not the class of a rollout buffer
    """
    if not (isinstance(buffer_class, type) and issubclass(buffer_class, RolloutBuffer)):
        raise ValueError(f"`rollout_buffer_class` must be a subclass of SB3's `RolloutBuffer`, but {buffer_class} was given.")
    if issubclass(base_class, buffer_class):
        return base_class
    if issubclass(buffer_class, base_class):
        return buffer_class
    return type(f"{base_class.__name__.removesuffix('RolloutBuffer')}{buffer_class.__name__}", (base_class, buffer_class), {})


class DeviceRolloutBuffer(RolloutBuffer):
    """
    Rollout buffer that sends a rollout to the device once and draws the minibatches there.

    SB3's rollout buffer collects every minibatch on the CPU and sends it, so with ``n_epochs`` epochs each observation is sent
    ``n_epochs`` times. The minibatches of both are identical, unless the buffer is changed between two of them. After the
    update ``observations`` still has the shape (buffer_size, n_envs, ...), where SB3's is (n_envs * buffer_size, ...). For a
    GPU it is kept in pinned memory, which the next rollout overwrites. On the CPU there is nothing to send, and SB3's buffer
    needs less memory.

    Use it with ``rollout_buffer_class=DeviceRolloutBuffer`` in QA2C, QPPO, PQN, A2C, PPO and sb3-contrib's TRPO, which fill
    SB3's ``RolloutBuffer``. Not for algorithms that have a buffer of their own (MaskablePPO, RecurrentPPO) or use none
    (REINFORCE), and not for ``Dict`` observations.

    :param buffer_size: Max number of element in the buffer
    :param observation_space: Observation space
    :param action_space: Action space
    :param device: PyTorch device, on which a whole rollout must have room
    :param gae_lambda: Factor for trade-off of bias vs variance for Generalized Advantage Estimator
    :param gamma: Discount factor
    :param n_envs: Number of parallel environments
    :raises ValueError: for ``Dict`` observations
    """

    # The rollout on the device, each tensor of shape (n_envs * buffer_size, ...)
    _rollout: tuple[th.Tensor, ...] = ()
    # Pinned memory of the observations, which takes long to allocate
    _pinned: th.Tensor | None = None

    def __init__(self, buffer_size: int, observation_space: spaces.Space, *args: Any, **kwargs: Any) -> None:
        if isinstance(observation_space, spaces.Dict):
            raise ValueError(
                f"`DeviceRolloutBuffer` does not take `Dict` observations, but {observation_space} was given. Leave "
                "`rollout_buffer_class` out."
            )
        super().__init__(buffer_size, observation_space, *args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self._rollout = ()
        if self.device.type == "cuda":
            if self._pinned is None:
                self._pinned = th.from_numpy(self.observations).pin_memory()
            self.observations = self._pinned.numpy()

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        assert self.full, "A rollout must be complete before it is used"
        if not self.generator_ready:
            # What SB3 does with all arrays. The observations are the large ones, so they are put into order on the device
            for name in ("actions", "values", "log_probs", "advantages", "returns"):
                setattr(self, name, self.swap_and_flatten(getattr(self, name)))
            self._rollout = self._send()
            self.generator_ready = True
        yield from super().get(batch_size)

    def _send(self) -> tuple[th.Tensor, ...]:
        """:return: the rollout on the device, in the order of ``RolloutBufferSamples``"""
        observations = th.from_numpy(self.observations).to(self.device, non_blocking=True)  # (buffer_size, n_envs, ...)
        others = (self.actions.astype(np.float32, copy=False), self.values, self.log_probs, self.advantages, self.returns)
        return observations.transpose(0, 1).flatten(0, 1), *map(self.to_torch, others)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> RolloutBufferSamples:
        indices = th.as_tensor(batch_inds, device=self.device)
        observations, actions, *others = (data[indices] for data in self._rollout)
        return RolloutBufferSamples(observations, actions, *(data.flatten() for data in others))
