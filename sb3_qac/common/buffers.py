from collections.abc import Generator
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize


class DeviceRolloutBuffer(RolloutBuffer):
    """
    Rollout buffer that sends a rollout to the device once and draws the minibatches there.

    SB3's rollout buffer collects every minibatch on the CPU and sends it, so with ``n_epochs`` epochs each observation is sent
    ``n_epochs`` times. The minibatches of both are identical, unless the buffer is changed between two of them. After the
    update ``observations`` still has the shape (buffer_size, n_envs, ...), where SB3's is (n_envs * buffer_size, ...). For a
    GPU it is kept in pinned memory, which the next rollout overwrites. On the CPU there is nothing to send, and SB3's buffer
    needs less memory.

    Use it with ``rollout_buffer_class=DeviceRolloutBuffer`` in QA2C, QPPO, A2C, PPO and sb3-contrib's TRPO, which fill SB3's
    ``RolloutBuffer``. Not for algorithms that have a buffer of their own (MaskablePPO, RecurrentPPO) or use none (REINFORCE),
    and not for ``Dict`` observations.

    :param buffer_size: Max number of element in the buffer
    :param observation_space: Observation space
    :param action_space: Action space
    :param device: PyTorch device, on which a whole rollout must have room
    :param gae_lambda: Factor for trade-off of bias vs variance for Generalized Advantage Estimator
    :param gamma: Discount factor
    :param n_envs: Number of parallel environments
    :raises ValueError: for ``Dict`` observations
    """

    # The rollout on the device, each tensor of shape (n_envs * buffer_size, ...), and the log probabilities that were sent
    _rollout: tuple[th.Tensor, ...] = ()
    _sent: np.ndarray | None = None
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
        self._rollout, self._sent = (), None
        if self.device.type == "cuda":
            if self._pinned is None:
                self._pinned = th.from_numpy(self.observations).pin_memory()
            self.observations = self._pinned.numpy()

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        assert self.full, "A rollout must be complete before it is used"
        # QPPO replaces the log probabilities, maybe after a callback has read minibatches
        if self._sent is not self.log_probs:
            # What SB3 does with all arrays. The observations are the large ones, so they are put into order on the device
            if not self.generator_ready:
                for name in ("actions", "values", "log_probs", "advantages", "returns"):
                    setattr(self, name, self.swap_and_flatten(getattr(self, name)))
                self.generator_ready = True
            self._rollout, self._sent = self._send(), self.log_probs
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
