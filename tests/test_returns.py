"""The critic's targets in SB3's rollout buffer against a plain loop over the rewards."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_qac import QA2C
from tests.envs import ENDS, ScriptedEnv

GAMMA = 0.9
REWARDS = [[1.0, 2.0, -3.0, 4.0, 5.0, 0.5], [-1.0, 0.25, 2.0, 8.0, -4.0, 1.0]]


def collect(terminations=(), truncations=()):
    """Two environments, the ends in the first, one rollout of six steps, with a critic that is not near zero."""
    env = DummyVecEnv(
        [
            lambda: ScriptedEnv(REWARDS[0], terminations, truncations),
            lambda: ScriptedEnv(REWARDS[1]),
        ]
    )
    model = QA2C("MlpPolicy", env, n_steps=6, gamma=GAMMA, seed=0)
    with th.no_grad():
        model.policy.q_net.bias += th.tensor([3.0, -2.0, 7.0])
    _, callback = model._setup_learn(12)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 6)
    return model


def value_of(model, observation):
    """V~ = sum_a pi(a|s) Q(s, a), from the two heads."""
    with th.no_grad():
        obs = th.tensor([[observation]])
        probs = model.policy.get_distribution(obs).distribution.probs
        return (probs * model.policy.predict_q_values(obs)).sum().item()


def plain_returns(model, rewards, terminations, truncations):
    """R_t = r_t + gamma R_{t+1}; a termination stops it, a time limit bootstraps from the last observation."""
    target = value_of(model, 6.0)
    returns = [0.0] * 6
    for t in reversed(range(6)):
        if t in terminations:
            target = 0.0
        elif t in truncations:
            target = value_of(model, t + 1.5)
        target = rewards[t] + GAMMA * target
        returns[t] = target
    return returns


@pytest.mark.parametrize(("terminations", "truncations"), ENDS)
def test_targets_are_the_n_step_returns(terminations, truncations):
    model = collect(terminations, truncations)
    expected = [
        plain_returns(model, REWARDS[0], terminations, truncations),
        plain_returns(model, REWARDS[1], (), ()),
    ]
    np.testing.assert_allclose(model.rollout_buffer.returns, np.transpose(expected), rtol=1e-5)


def test_time_limit_is_told_from_termination():
    """The two differ by the bootstrap, so a test that could not see it would be worth nothing."""
    cut, ended = collect(truncations=(3,)), collect(terminations=(3,))
    difference = cut.rollout_buffer.returns[3, 0] - ended.rollout_buffer.returns[3, 0]
    assert difference == pytest.approx(GAMMA * value_of(cut, 4.5), rel=1e-5)
    assert abs(difference) > 0.1


def test_buffer_keeps_the_state_values():
    model = collect()
    expected = [[value_of(model, float(t))] * 2 for t in range(6)]
    np.testing.assert_allclose(model.rollout_buffer.values, expected, rtol=1e-5)
