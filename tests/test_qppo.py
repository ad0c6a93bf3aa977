"""QPPO as a user of SB3 meets it, and its loss against QA2C's and against the formula."""

import copy
import inspect
import math

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv, SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_qac import QA2C, QPPO
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.common.checkpoints import CheckpointError
from sb3_qac.common.losses import kl_divergence
from sb3_qac.qppo import qppo
from tests.envs import ScriptedEnv
from tests.test_qa2c import TWO, VECTOR, Rows, SpacesEnv, parameters
from tests.test_zoo import python

VARIANTS = [
    pytest.param(dict(), id="default"),
    pytest.param(dict(policy_gradient="sampled"), id="sampled"),
    pytest.param(dict(advantage_scale="critic"), id="scale of the critic"),
    pytest.param(dict(advantage_scale=None, target_kl=0.01), id="no scale, adaptive KL"),
]
SMALL = dict(n_steps=8, batch_size=8, n_epochs=2)


def make_model(n_envs=2, env_id="CartPole-v1", **kwargs):
    return QPPO("MlpPolicy", make_vec_env(env_id, n_envs, seed=0), **{**SMALL, "seed": 0, "device": "cpu", **kwargs})


def with_rollout(model):
    """:return: the model with a rollout to train on"""
    _, callback = model._setup_learn(10**6)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def logged_by(model, n_steps):
    """:return: the rows of the log that a training writes, without the prefix of those of the update"""
    rows = Rows()
    model.set_logger(Logger(folder=None, output_formats=[rows]))
    model.learn(n_steps, log_interval=1)
    return [{name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")} for row in rows.rows[1:]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("policy", "env"),
    [
        pytest.param("MlpPolicy", lambda: gym.make("CartPole-v1"), id="vector"),
        pytest.param("MlpPolicy", lambda: gym.make("FrozenLake-v1"), id="discrete"),
        pytest.param("CnnPolicy", lambda: FakeImageEnv(screen_height=40, screen_width=40, n_channels=1), id="image"),
        pytest.param("MultiInputPolicy", lambda: SimpleMultiObsEnv(random_start=True), id="dict"),
    ],
)
def test_every_policy_runs_with_every_variant(policy, env, variant):
    model = QPPO(policy, make_vec_env(env, n_envs=2), seed=0, **SMALL, **variant)
    before = parameters(model).copy()
    model.learn(32)
    assert np.isfinite(parameters(model)).all()
    assert not np.array_equal(parameters(model), before)


# ---- the loss ----


def first_gradient(algorithm, rollout, **kwargs):
    """:return: gradient of the first update on the rollout, in float64, the rollout being that of the policy as it is"""
    policy_kwargs = dict(optimizer_class=th.optim.SGD)
    env = make_vec_env("CartPole-v1", 4, seed=0)
    model = algorithm(
        "MlpPolicy", env, n_steps=8, seed=0, learning_rate=1.0, device="cpu", policy_kwargs=policy_kwargs, **kwargs
    )
    model.policy.double()
    model.max_grad_norm = math.inf
    model._setup_learn(10**6)
    model.rollout_buffer = copy.deepcopy(rollout)
    before = parameters(model).copy()
    model.train()
    return before - parameters(model)


@pytest.fixture(scope="module")
def rollout():
    """The buffer of a QA2C that seed 0 makes, its numbers in float64."""
    buffer = with_rollout(QA2C("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), n_steps=8, seed=0, device="cpu")).rollout_buffer
    buffer.observations = buffer.observations.astype(np.float64)
    buffer.returns = buffer.returns.astype(np.float64)
    return buffer


@pytest.mark.parametrize("kl_coef", [0.0, 3.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_first_gradient_is_that_of_qa2c(rollout, beta, kl_coef):
    """At pi = pi_old and sigma = 1. The KL penalty has no gradient there."""
    shared = dict(beta=beta, ent_coef=0.02, vf_coef=0.5)
    qa2c = first_gradient(QA2C, rollout, pg_coef=1.0, use_rms_prop=False, **shared)
    mine = first_gradient(QPPO, rollout, batch_size=32, n_epochs=1, kl_coef=kl_coef, advantage_scale=None, **shared)
    np.testing.assert_allclose(mine, qa2c, rtol=0, atol=1e-10)
    assert np.abs(qa2c).max() > 0.01
