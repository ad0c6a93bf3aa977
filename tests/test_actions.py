"""The joint actions of a finite space: their numbers, and their probabilities."""

import itertools
import math

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import make_proba_distribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnv, IdentityEnvMultiBinary, IdentityEnvMultiDiscrete
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_qac import QA2C, QPPO
from sb3_qac.common.actions import JointActions, JointDistribution, n_actions_of
from sb3_qac.common.checks import check_action_space
from sb3_qac.diagnose import diagnose_model
from sb3_qac.pqn import PQN

SPACES = [spaces.Discrete(5), spaces.MultiDiscrete([3, 1, 2]), spaces.MultiBinary(4)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_are_numbered_as_numpy_does(space):
    joint = JointActions(space)
    sizes = {"Discrete": (5,), "MultiDiscrete": (3, 1, 2), "MultiBinary": (2, 2, 2, 2)}[type(space).__name__]
    every = np.array(list(itertools.product(*map(range, sizes))))
    assert joint.n == n_actions_of(space) == len(every)
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
    logits = distribution.proba_distribution_net(latent_dim=3).double()(th.randn(7, 3, dtype=th.float64))
    distribution.proba_distribution(logits)
    ours = distribution if joint.is_discrete else JointDistribution(joint).proba_distribution(logits)
    log_probs = ours.distribution.logits
    for number in range(joint.n):
        action = joint.actions(th.full((7,), number))
        th.testing.assert_close(log_probs[:, number], distribution.log_prob(action.double()))
        th.testing.assert_close(log_probs[:, number], ours.log_prob(action.double()))
    assert (ours.mode() == distribution.mode()).all()
    assert all(space.contains(action.astype(space.dtype)) for action in np.atleast_1d(ours.sample().numpy()))
    th.testing.assert_close(log_probs.exp().sum(dim=1), th.ones(7, dtype=th.float64))
    th.testing.assert_close(-(log_probs.exp() * log_probs).sum(dim=1), distribution.entropy().reshape(7, -1).sum(dim=1))


def model_of(algorithm, env, **kwargs):
    settings = dict(n_steps=16, learning_rate=3e-3, gamma=0.5, seed=0, device="cpu")
    settings |= dict(batch_size=64) if algorithm is not QA2C else dict(n_steps=5)
    settings["policy_kwargs"] = dict(net_arch=[32], optimizer_class=th.optim.Adam)
    return algorithm("MlpPolicy", env, **settings | kwargs)


@pytest.mark.parametrize(
    ("algorithm", "env_class"),
    [
        (PQN, IdentityEnvMultiDiscrete),
        pytest.param(QA2C, IdentityEnvMultiBinary, marks=pytest.mark.slow),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in ((QA2C, IdentityEnvMultiDiscrete), (PQN, IdentityEnvMultiBinary), (QPPO, IdentityEnvMultiDiscrete))
        ),
        pytest.param(QPPO, IdentityEnvMultiBinary, marks=pytest.mark.slow),
    ],
)
def test_joint_actions_are_learned(algorithm, env_class, tmp_path):
    """A step is worth 1 if the action is the observation: 2 x 2 joint actions."""
    env = make_vec_env(env_class, 8, seed=0, env_kwargs=dict(dim=2, ep_length=50))
    model = model_of(algorithm, env).learn(6_000)
    assert evaluate_policy(model, env, 8)[0] > 40
    model.save(tmp_path / "model.zip")
    loaded, obs = algorithm.load(tmp_path / "model.zip", device="cpu"), env.reset()
    actions = model.predict(obs, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], actions)
    assert all(env.action_space.contains(action.astype(env.action_space.dtype)) for action in actions)


@pytest.mark.parametrize("algorithm", [QA2C, QPPO])
@pytest.mark.parametrize(
    "estimator", [dict(beta=0.0), dict(beta=1.0, shrinkage=0.1), dict(policy_gradient="sampled")], ids=str
)
def test_an_update_is_that_of_one_discrete_action_with_the_same_probabilities(algorithm, estimator):
    """The product of three bits, and eight actions: with the same Q, returns and probabilities the loss is the same."""
    if estimator.get("policy_gradient") == "sampled":
        estimator = {"beta": 0.0, "shrinkage": 0.0, **estimator}
    env = make_vec_env(IdentityEnvMultiBinary, 4, seed=0, env_kwargs=dict(dim=3))
    model = model_of(algorithm, env, **estimator).learn(64)
    discrete = model_of(algorithm, make_vec_env(IdentityEnv, 4, seed=0, env_kwargs=dict(dim=8)), **estimator).learn(64)
    numbers = model.policy.joint_actions.numbers(th.as_tensor(model.rollout_buffer.actions))
    found = []
    for each in (model, discrete):
        each.policy.evaluate_all_actions = lambda obs: tables(len(obs))
        each.rollout_buffer.returns = model.rollout_buffer.returns
        if each is discrete:
            each.rollout_buffer.actions = numbers.numpy().astype(np.float32)
        if algorithm is QPPO:
            each.rollout_buffer.all_log_probs, each.sigma = model.rollout_buffer.all_log_probs, None
            each.n_epochs, each.batch_size = 1, 64
        each.train()
        found.append({name: each.logger.name_to_value[f"train/{name}"] for name in ("loss", "policy_loss", "value_loss")})
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6) and found[0]["policy_loss"] != 0


def tables(n_steps):
    """The same Q and probabilities, in the order of the minibatch, for both models."""
    generator = th.Generator().manual_seed(n_steps)
    q_values, logits = (th.randn(1, 8, generator=generator).expand(n_steps, 8).clone().requires_grad_() for _ in range(2))
    return q_values, logits.log_softmax(dim=1)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-1, 1, (2,)), r"must be `Discrete`, or one-dimensional .* Box\(-1.0, 1.0, \(2,\), float32\) was given"),
        (spaces.MultiBinary([2, 2]), r"one-dimensional .*MultiBinary\(\(2, 2\)\) was given"),
        (spaces.MultiDiscrete([[2, 2], [2, 2]]), "(?s)one-dimensional .* was given"),
        (spaces.MultiDiscrete([2, 3], start=[0, 1]), "counted from 0"),
        (spaces.MultiBinary(13), r"at most 4,096, but MultiBinary\(13\) has 8,192"),
        (spaces.MultiDiscrete([200, 200]), "has 40,000"),
    ],
)
def test_spaces_without_a_value_for_each_action_are_refused(space, message):
    with pytest.raises(ValueError, match=message):
        check_action_space(space)
    check_action_space(spaces.MultiBinary(12))


def test_estimators_and_branches_of_joint_actions_are_diagnosed():
    env = make_vec_env(IdentityEnvMultiDiscrete, 4, seed=0, env_kwargs=dict(dim=2, ep_length=20))
    result = diagnose_model(model_of(QPPO, env).learn(64), n_rollouts=4, n_states=8, n_repeats=2)
    assert result["branches"]["states"] == 8 and math.isfinite(result["critic"]["explained_variance"])
