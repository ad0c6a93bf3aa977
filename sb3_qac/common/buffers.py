import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize


class DeviceRolloutBuffer(RolloutBuffer):
    """
    Rollout buffer that sends a rollout to the device once and draws the minibatches there.

    SB3's rollout buffer collects every minibatch on the CPU and sends it, so with ``n_epochs`` epochs each observation is sent
    ``n_epochs`` times. The minibatches of both are identical, unless the buffer is changed between two of them. On the CPU
    there is nothing to send, and SB3's buffer needs less memory. Not for ``Dict`` observations. Use it with
    ``rollout_buffer_class=DeviceRolloutBuffer`` in any on-policy algorithm.

    :param buffer_size: Max number of element in the buffer
    :param observation_space: Observation space
    :param action_space: Action space
    :param device: PyTorch device, on which a whole rollout must have room
    :param gae_lambda: Factor for trade-off of bias vs variance for Generalized Advantage Estimator
    :param gamma: Discount factor
    :param n_envs: Number of parallel environments
    """

    # The whole rollout in its order, from the first minibatch on
    _rollout: RolloutBufferSamples | None = None

    def reset(self) -> None:
        self._rollout = None
        super().reset()

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> RolloutBufferSamples:
        n_steps = self.buffer_size * self.n_envs
        if self._rollout is None:
            # A slice, unlike indices, does not copy the rollout before it is sent
            self._rollout = super()._get_samples(slice(n_steps), env)  # type: ignore[arg-type]
        indices = th.as_tensor(batch_inds, device=self.device)
        # SB3 flattens everything but observations and actions; QPPO's log probabilities have several entries for each step
        by_step = (data.unflatten(0, (n_steps, -1)) for data in self._rollout)
        return RolloutBufferSamples(*(data[indices].flatten(0, 1) for data in by_step))
