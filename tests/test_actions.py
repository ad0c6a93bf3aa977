"""The joint actions of a finite space: their numbers, and their probabilities."""

import itertools

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import make_proba_distribution

from sb3_qac.common.actions import JointActions, n_actions_of

SPACES = [spaces.Discrete(5), spaces.MultiDiscrete([3, 1, 2]), spaces.MultiBinary(4)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_are_numbered_as_numpy_does(space):
    joint = JointActions(space)
    sizes = {"Discrete": (5,), "MultiDiscrete": (3, 1, 2), "MultiBinary": (2, 2, 2, 2)}[type(space).__name__]
    every = np.array(list(itertools.product(*map(range, sizes))))
    assert joint.n_actions == n_actions_of(space) == len(every)
    numbers = joint.numbers(th.as_tensor(every))
    assert numbers.tolist() == [[number] for number in np.ravel_multi_index(every.T, sizes)]
    # Steps and environments may come first, and SB3's buffer has floats
    assert joint.numbers(th.as_tensor(every, dtype=th.float32)[None, None]).shape == (1, 1, len(every), 1)
    actions = joint.actions(numbers.squeeze(1))
    assert actions.tolist() == (every[:, 0] if isinstance(space, spaces.Discrete) else every).tolist()
    assert all(space.contains(action.astype(space.dtype)) for action in np.atleast_1d(actions.numpy()))
    # Saved models do not contain it
    assert not joint.state_dict()


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_log_probabilities_of_all_actions_are_sb3s(space):
    th.manual_seed(0)
    joint, distribution = JointActions(space), make_proba_distribution(space)
    net = distribution.proba_distribution_net(latent_dim=3).double()
    distribution.proba_distribution(net(th.randn(7, 3, dtype=th.float64)))
    log_probs = joint.log_probs(distribution)
    for number in range(joint.n_actions):
        action = joint.actions(th.full((7,), number))
        th.testing.assert_close(log_probs[:, number], distribution.log_prob(action.double()))
    th.testing.assert_close(log_probs.exp().sum(dim=1), th.ones(7, dtype=th.float64))
    th.testing.assert_close(-(log_probs.exp() * log_probs).sum(dim=1), distribution.entropy().reshape(7, -1).sum(dim=1))
