"""``DeviceRolloutBuffer``: a rollout is sent to the device once, and everything else is as with SB3's buffer."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_qac import PQN, QA2C, QPPO
from sb3_qac.common.buffers import DeviceRolloutBuffer
from sb3_qac.resume import ExactCheckpointCallback


def settings_of(algorithm):
    """Three minibatches in each epoch, the last of them smaller"""
    minibatches = dict(n_steps=14, batch_size=6) if algorithm in (PPO, QPPO, PQN, TRPO) else {}
    epochs = dict(n_epochs=3) if algorithm in (PPO, QPPO, PQN) else {}
    return dict(policy="MlpPolicy", env="CartPole-v1", seed=0, device="cpu", **minibatches, **epochs)


@pytest.mark.filterwarnings("ignore:.*truncated:UserWarning")
@pytest.mark.parametrize("algorithm", [A2C, PPO, TRPO, PQN, QA2C, QPPO])
def test_training_is_identical_to_that_with_the_buffer_of_sb3(algorithm):
    expected = algorithm(**settings_of(algorithm), rollout_buffer_class=RolloutBuffer).learn(60)
    model = algorithm(**settings_of(algorithm), rollout_buffer_class=DeviceRolloutBuffer).learn(60)

    for parameter, expected_parameter in zip(model.policy.parameters(), expected.policy.parameters(), strict=True):
        assert th.equal(parameter, expected_parameter)


@pytest.mark.filterwarnings("ignore:.*truncated:UserWarning")
def test_a_rollout_is_sent_once_for_all_epochs(monkeypatch):
    sent = []
    send = DeviceRolloutBuffer._send
    monkeypatch.setattr(DeviceRolloutBuffer, "_send", lambda self: sent.append(self.pos) or send(self))

    # Two rollouts of 14 steps, three epochs each
    PPO(**settings_of(PPO), rollout_buffer_class=DeviceRolloutBuffer).learn(28)

    assert sent == [14, 14]


def same_minibatches(device, n_envs):
    """:return: pairs of minibatches, of SB3's buffer and of ours, from two rollouts"""
    space = spaces.Box(0, 255, (1, 6, 6), np.uint8)
    buffers = [kind(4, space, spaces.Discrete(2), device, n_envs=n_envs) for kind in (RolloutBuffer, DeviceRolloutBuffer)]
    # In the second rollout nothing of the first may be left
    for rollout in range(2):
        minibatches = []
        for buffer in buffers:
            rng = np.random.default_rng(rollout)
            buffer.reset()
            while not buffer.full:
                obs = rng.integers(0, 256, (n_envs, *space.shape), dtype=np.uint8)
                actions, value = rng.integers(0, 2, n_envs), th.from_numpy(rng.random(n_envs))
                buffer.add(obs, actions, rng.random(n_envs), np.zeros(n_envs), value, value.log())
            buffer.compute_returns_and_advantage(th.zeros(n_envs), np.zeros(n_envs))
            np.random.seed(0)
            # Two epochs
            minibatches.append([*buffer.get(3), *buffer.get(3)])
        yield from zip(*minibatches, strict=True)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_every_minibatch_is_that_of_the_buffer_of_sb3(n_envs):
    for expected, drawn in same_minibatches("cpu", n_envs):
        for name, tensor in expected._asdict().items():
            assert th.equal(getattr(drawn, name), tensor), name
            assert getattr(drawn, name).dtype == tensor.dtype


def test_training_is_resumed_with_the_other_buffer(tmp_path):
    """Such as on a machine without a GPU."""
    for buffer_class in (DeviceRolloutBuffer, None):
        model = PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, device="cpu", rollout_buffer_class=buffer_class)
        model.learn(32, ExactCheckpointCallback(tmp_path, verbose=0))
        assert model.num_timesteps == 32


def test_a_rollout_that_is_not_complete_is_refused_and_can_be_completed():
    space = spaces.Box(-1, 1, (1,))
    buffer = DeviceRolloutBuffer(2, space, spaces.Discrete(2), device="cpu")
    for value in (1.0, 2.0):
        with pytest.raises(AssertionError):
            next(buffer.get())
        buffer.add(np.zeros((1, 1)), np.zeros(1), np.zeros(1), np.zeros(1), th.tensor([value]), th.zeros(1))
    (minibatch,) = buffer.get()
    assert sorted(minibatch.old_values.tolist()) == [1, 2]


def test_dict_observations_are_refused():
    space = spaces.Dict({"one": spaces.Box(-1, 1, (1,))})
    with pytest.raises(ValueError, match=r"does not take `Dict` observations, but Dict.*Leave `rollout_buffer_class` out"):
        DeviceRolloutBuffer(2, space, spaces.Discrete(2), device="cpu")


def test_minibatches_hold_each_image_of_the_rollout_once():
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = DeviceRolloutBuffer(4, space, spaces.Discrete(2), device="cpu", n_envs=2)
    images = np.random.default_rng(0).integers(0, 256, (4, 2, *space.shape), dtype=np.uint8)
    for obs in images:
        buffer.add(obs, np.zeros(2, int), np.zeros(2), np.zeros(2), th.zeros(2), th.zeros(2))

    minibatches = list(buffer.get(3))

    assert [minibatch.observations.shape for minibatch in minibatches] == [(n, *space.shape) for n in (3, 3, 2)]
    drawn = th.cat([minibatch.observations for minibatch in minibatches]).numpy()
    assert drawn.dtype == np.uint8
    assert sorted(image.tobytes() for image in drawn) == sorted(image.tobytes() for image in images.reshape(8, *space.shape))
