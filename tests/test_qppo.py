"""QPPO as a user of SB3 meets it, and its loss against QA2C's and against the formula."""

import copy
import inspect
import math
import pickle
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv, SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_qac import QA2C, QPPO
from sb3_qac.common.buffers import DeviceRolloutBuffer
from sb3_qac.common.losses import kl_divergence
from sb3_qac.qa2c.policies import ActorCriticQPolicy
from sb3_qac.resume import ExactCheckpointCallback, resume
from sb3_qac.resume.checkpoints import CheckpointError
from sb3_qac.zoo import presets
from tests.envs import InterruptAt, Interrupted, ScriptedEnv
from tests.test_qa2c import DoubleExtractor, Rows, parameters, update_figures

VARIANTS = [
    pytest.param(dict(), id="default"),
    pytest.param(dict(policy_gradient="sampled"), id="sampled"),
    pytest.param(dict(normalize_advantage=False), id="no scale"),
    pytest.param(dict(policy_kwargs=dict(dueling=True)), id="dueling"),
    pytest.param(dict(shrinkage=0.0, ent_coef="lin_0.05", clip_range="lin_0.3"), id="no shrinkage, schedules"),
]
POLICIES = pytest.mark.parametrize(
    ("policy", "env"),
    [
        pytest.param("MlpPolicy", lambda: gym.make("CartPole-v1"), id="vector"),
        pytest.param("MlpPolicy", lambda: gym.make("FrozenLake-v1"), id="discrete"),
        pytest.param("CnnPolicy", lambda: FakeImageEnv(screen_height=40, screen_width=40, n_channels=1), id="image"),
        pytest.param("MultiInputPolicy", lambda: SimpleMultiObsEnv(random_start=True), id="dict"),
    ],
)
DOCS = Path(__file__).parents[1] / "docs"
SMALL = dict(n_steps=8, batch_size=8, n_epochs=2)


def make_model(n_envs=2, env_id="CartPole-v1", algorithm=QPPO, **kwargs):
    return algorithm("MlpPolicy", make_vec_env(env_id, n_envs, seed=0), **{**SMALL, "seed": 0, "device": "cpu", **kwargs})


def with_rollout(model):
    """:return: the model with a rollout to train on"""
    _, callback = model._setup_learn(10**6)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def logged_by(model, n_steps, callback=None):
    """:return: the rows of the log that a training writes, without the prefix of those of the update"""
    rows = Rows()
    model.set_logger(Logger(folder=None, output_formats=[rows]))
    model.learn(n_steps, callback, log_interval=1)
    return [update_figures(row) for row in rows.rows[1:]]


@POLICIES
def test_every_policy_runs(policy, env):
    model = QPPO(policy, make_vec_env(env, n_envs=2), seed=0, **SMALL)
    before = parameters(model).copy()
    model.learn(32)
    assert np.isfinite(parameters(model)).all()
    assert not np.array_equal(parameters(model), before)


# ---- the loss ----


def first_gradient(algorithm, rollout, **kwargs):
    """:return: gradient of the first update on the rollout, in float64, the rollout being that of the policy as it is"""
    policy_kwargs = dict(optimizer_class=th.optim.SGD, features_extractor_class=DoubleExtractor)
    env = make_vec_env("CartPole-v1", 4, seed=0)
    model = algorithm(
        "MlpPolicy", env, n_steps=8, seed=0, learning_rate=1.0, device="cpu", policy_kwargs=policy_kwargs, **kwargs
    )
    model.policy.double()
    model.max_grad_norm = math.inf
    model._setup_learn(10**6)
    vars(model.rollout_buffer).update(copy.deepcopy(vars(rollout)))
    if algorithm is QPPO:
        with th.no_grad():
            evaluated = model.policy.evaluate_all_actions(th.as_tensor(rollout.observations).flatten(0, 1))
        model.rollout_buffer.q_values, model.rollout_buffer.all_log_probs = (each.unflatten(0, (8, 4)) for each in evaluated)
    before = parameters(model).copy()
    model.train()
    return before - parameters(model)


@pytest.fixture(scope="module")
def rollout():
    """The buffer of a QA2C that seed 0 makes, its returns in float64."""
    buffer = with_rollout(
        QA2C("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), n_steps=8, seed=0, device="cpu")
    ).rollout_buffer
    buffer.returns = buffer.returns.astype(np.float64)
    return buffer


@pytest.mark.parametrize("kl_coef", [0.0, 3.0])
@pytest.mark.parametrize(("beta", "shrinkage"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.5, 0.3)])
def test_first_gradient_is_that_of_qa2c(rollout, beta, shrinkage, kl_coef):
    """At pi = pi_old and sigma = 1. The KL penalty has no gradient there."""
    shared = dict(beta=beta, shrinkage=shrinkage, ent_coef=0.02, vf_coef=0.5)
    qa2c = first_gradient(QA2C, rollout, pg_coef=1.0, use_rms_prop=False, **shared)
    mine = first_gradient(QPPO, rollout, batch_size=32, n_epochs=1, kl_coef=kl_coef, normalize_advantage=False, **shared)
    np.testing.assert_allclose(mine, qa2c, rtol=0, atol=1e-10)
    assert np.abs(qa2c).max() > 0.01


@pytest.mark.parametrize(("policy_gradient", "shrinkage"), [("all-action", 0.0), ("all-action", 0.3), ("sampled", 0.3)])
def test_update_and_its_log_are_those_of_the_formula(policy_gradient, shrinkage):
    """Two minibatches by hand, the second with a policy that has moved, from the same rollout and permutation."""
    learning_rate, coefficients = 1.0, dict(kl_coef=0.7, ent_coef=0.2, vf_coef=0.3, beta=0.4, clip_range=0.001)
    policy_kwargs = dict(optimizer_class=th.optim.SGD)
    arguments = dict(n_epochs=1, learning_rate=learning_rate, max_grad_norm=None, policy_kwargs=policy_kwargs, **coefficients)
    model = make_model(policy_gradient=policy_gradient, shrinkage=shrinkage, **arguments)
    with th.no_grad():
        # A critic and a policy that tell actions apart: the first step moves the policy enough to tell it from the rollout's
        model.policy.q_net.weight *= 20
        model.policy.action_net.weight *= 20
    with_rollout(model)
    by_hand = copy.deepcopy(model.policy)
    buffer = copy.deepcopy(model.rollout_buffer)
    np.random.seed(0)
    model.train()

    next(buffer.get(1))
    np.random.seed(0)
    sigmas, figures = [], []
    with th.no_grad():
        old_q_values, old_log_probs = by_hand.evaluate_all_actions(th.as_tensor(buffer.observations))
    for indices in np.random.permutation(16).reshape(2, 8):
        old = old_log_probs[indices]
        actions, returns = th.as_tensor(buffer.actions[indices]).long(), th.as_tensor(buffer.returns[indices])
        q_values, log_probs = by_hand.evaluate_all_actions(th.as_tensor(buffer.observations[indices]))
        probs, q = log_probs.exp(), q_values.detach()
        values = (probs.detach() * q).sum(1, keepdim=True)
        advantages = (q - values) * old.exp() / (old.exp() + shrinkage)
        errors = returns - values - advantages.gather(1, actions)
        if policy_gradient == "all-action":
            mean_squares = (probs.detach() * advantages**2).sum(1).mean() + 0.4 * (errors**2).mean()
        else:
            mean_squares = ((returns - values) ** 2).mean()
        sigmas.append(mean_squares.sqrt() if not sigmas else 0.99 * sigmas[-1] + 0.01 * mean_squares.sqrt())
        ratio = probs.gather(1, actions) / old.exp().gather(1, actions)

        def clipped(weight, ratio=ratio):
            return th.min(ratio * weight, ratio.clamp(0.999, 1.001) * weight).mean()

        if policy_gradient == "all-action":
            gain = (probs * advantages).sum(1).mean() + 0.4 * clipped(errors)
        else:
            gain = clipped(advantages.gather(1, actions) + errors)
        figure = {
            "policy_loss": -gain / sigmas[-1],
            "kl": (old.exp() * (old - log_probs)).sum(1).mean(),
            "entropy_loss": (probs * log_probs).sum(1).mean(),
            "value_loss": ((returns - q_values.gather(1, actions)) ** 2).mean(),
        }
        loss = figure["policy_loss"] + 0.7 * figure["kl"] + 0.2 * figure["entropy_loss"] + 0.3 * figure["value_loss"]
        by_hand.optimizer.zero_grad()
        loss.backward()
        figures.append(
            {
                **figure,
                "loss": loss,
                "clip_fraction": ((ratio < 0.999) | (ratio > 1.001)).float().mean(),
                "grad_norm": th.cat([p.grad.flatten() for p in by_hand.parameters() if p.grad is not None]).norm(),
                "sigma": sigmas[-1],
                "state_value": values.mean(),
                "q_target": returns.mean(),
                "abs_advantage": advantages.abs().mean(),
                # CartPole has two actions
                "action_gap": (q[:, 0] - q[:, 1]).abs().mean(),
            }
        )
        by_hand.optimizer.step()

    mine = th.nn.utils.parameters_to_vector(by_hand.parameters()).detach().numpy()
    np.testing.assert_allclose(parameters(model), mine, rtol=1e-5, atol=1e-6)
    assert model.sigma == pytest.approx(sigmas[-1].item(), rel=1e-5)
    # In the second minibatch some actions have become more probable and others less
    assert ratio.min() < 0.999 and ratio.max() > 1.001
    expected = {name: np.mean([each[name].item() for each in figures]) for name in figures[0]}
    old_q_taken = old_q_values.gather(1, th.as_tensor(buffer.actions).long()).numpy()
    for name, prediction in {"explained_variance": buffer.values, "explained_variance_q": old_q_taken}.items():
        expected[name] = 1 - np.var(buffer.returns - prediction) / np.var(buffer.returns)
    expected |= {"n_updates": 1, "learning_rate": learning_rate, "kl_coef": 0.7, "ent_coef": 0.2, "clip_range": 0.001}
    assert update_figures(model.logger.name_to_value) == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("changed", [dict(beta=0.0), dict(shrinkage=1.0)])
def test_sampled_estimator_does_not_depend_on_what_only_the_sum_uses(changed):
    """Its scale is that of its own weights."""
    usual, other = (make_model(policy_gradient="sampled", **kwargs).learn(32) for kwargs in ({}, changed))
    np.testing.assert_array_equal(parameters(other), parameters(usual))
    assert other.sigma == usual.sigma != 1


@pytest.mark.parametrize(
    ("policy", "env"),
    [
        pytest.param("MlpPolicy", lambda: gym.make("CartPole-v1"), id="vector"),
        pytest.param("MultiInputPolicy", lambda: SimpleMultiObsEnv(random_start=True), id="dict"),
    ],
)
def test_old_policy_is_that_of_the_rollout_for_all_actions(policy, env):
    """Without another forward pass. `predict` in a callback does not disturb it."""
    model = QPPO(policy, make_vec_env(env, n_envs=2), seed=0, device="cpu", **SMALL)
    _, callback = model._setup_learn(10**6, lambda local, _: model.predict(local["new_obs"]) is not None)
    buffer = model.rollout_buffer
    model.collect_rollouts(model.env, callback, buffer, model.n_steps)
    minibatch = next(buffer.get())
    with th.no_grad():
        _, log_probs = model.policy.evaluate_all_actions(minibatch.observations)
        q_values, _ = model.policy.evaluate_all_actions(buffer._get_samples(np.arange(16)).observations)
    np.testing.assert_allclose(minibatch.all_old_log_probs, log_probs, rtol=1e-5)
    np.testing.assert_allclose(minibatch.old_log_prob, log_probs.gather(1, minibatch.actions.long()).flatten(), rtol=1e-5)
    # The steps of one environment come before those of the other
    np.testing.assert_allclose(buffer.q_values.transpose(0, 1).flatten(0, 1), q_values, rtol=1e-5, atol=1e-6)


class RolloutAtItsEnd(BaseCallback):
    """Copies the rollout that callbacks see."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        self.buffer = copy.deepcopy(self.model.rollout_buffer)


@pytest.mark.parametrize("buffer_class", [RolloutBuffer, DeviceRolloutBuffer])
def test_what_sb3_keeps_of_a_rollout_is_as_in_ppo(buffer_class):
    """At its end, where what QPPO adds is there too, and after the update."""
    at_end, after = [], []
    for algorithm in (PPO, QPPO):
        callback = RolloutAtItsEnd()
        model = make_model(algorithm=algorithm, rollout_buffer_class=buffer_class).learn(32, callback)
        at_end.append(callback.buffer)
        after.append(model.rollout_buffer)
    for ppo, mine in (at_end, after):
        for name, array in vars(ppo).items():
            if isinstance(array, np.ndarray):
                assert getattr(mine, name).shape == array.shape, name
        assert mine.q_values.shape == mine.all_log_probs.shape == (8, 2, 2)
    taken = np.take_along_axis(at_end[1].all_log_probs.numpy(), at_end[1].actions.astype(int), axis=-1)
    np.testing.assert_allclose(taken[..., 0], at_end[1].log_probs, rtol=1e-5)
    assert th.equal(after[1].all_log_probs, at_end[1].all_log_probs)


class ScaledRewards(RolloutBuffer):
    """A buffer of the user's: it has an argument, changes the rewards, and its minibatches have a further field."""

    def __init__(self, *args, scale, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def add(self, obs, action, reward, *args):
        super().add(obs, action, self.scale * reward, *args)

    def _get_samples(self, batch_inds, env=None):
        return (*super()._get_samples(batch_inds, env), batch_inds)


def test_rollout_buffer_of_the_users_is_used(tmp_path):
    def make(scale):
        return make_model(rollout_buffer_class=ScaledRewards, rollout_buffer_kwargs=dict(scale=scale))

    make(1.0).learn(32).save(tmp_path / "model")
    assert QPPO.load(tmp_path / "model", device="cpu").rollout_buffer_class is ScaledRewards
    np.testing.assert_array_equal(parameters(make(1.0).learn(32)), parameters(make_model().learn(32)))
    assert make(3.0).learn(16).rollout_buffer.returns.mean() > 2 * make(1.0).learn(16).rollout_buffer.returns.mean()


class OwnForward(ActorCriticQPolicy):
    def forward(self, obs, deterministic=False):
        actions = self.get_distribution(obs).get_actions(deterministic)
        values, log_prob, _ = self.evaluate_actions(obs, actions)
        return actions, values, log_prob


@pytest.mark.parametrize(
    ("policy", "env", "calls_policy"),
    [
        pytest.param("MlpPolicy", lambda: gym.make("CartPole-v1"), True, id="callback"),
        pytest.param("MultiInputPolicy", lambda: SimpleMultiObsEnv(random_start=True), True, id="callback, dict"),
        pytest.param(OwnForward, lambda: gym.make("CartPole-v1"), False, id="forward of its own"),
    ],
)
def test_policy_that_was_called_otherwise_in_a_rollout_trains_all_the_same(policy, env, calls_policy):
    """A callback may call the policy, and a policy may have a `forward` of its own."""

    def train(policy, callback=None):
        # Adam would make steps of full size of gradients that are rounding errors
        policy_kwargs = dict(optimizer_class=th.optim.SGD)
        # SB3's environment draws its images when it is made
        np.random.seed(0)
        env_ = make_vec_env(env, n_envs=2, seed=0)
        model = QPPO(policy, env_, seed=0, device="cpu", learning_rate=0.05, policy_kwargs=policy_kwargs, **SMALL)
        model.learn(32, callback)
        return parameters(model)

    def call(local, _):
        return local["self"].policy(local["obs_tensor"], deterministic=True) is not None

    usual = train("MlpPolicy" if policy is OwnForward else policy)
    np.testing.assert_allclose(train(policy, call if calls_policy else None), usual, rtol=1e-4, atol=1e-6)


class ReadMinibatches(BaseCallback):
    """Reads all minibatches of each rollout, or only draws the same random numbers."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        if self.reads:
            assert sum(len(minibatch.returns) for minibatch in buffer.get(4)) == buffer.buffer_size * buffer.n_envs
        else:
            np.random.permutation(buffer.buffer_size * buffer.n_envs)


@pytest.mark.parametrize(
    ("policy", "env", "buffer_class"),
    [
        ("MlpPolicy", lambda: gym.make("CartPole-v1"), DeviceRolloutBuffer),
        # Its observations are single numbers
        ("MlpPolicy", lambda: gym.make("FrozenLake-v1"), RolloutBuffer),
        ("MultiInputPolicy", lambda: SimpleMultiObsEnv(random_start=True), None),
    ],
)
def test_callback_that_reads_the_minibatches_of_a_rollout_changes_nothing(policy, env, buffer_class):
    def train(reads):
        np.random.seed(0)
        env_ = make_vec_env(env, n_envs=3, seed=0)
        model = QPPO(policy, env_, seed=0, device="cpu", rollout_buffer_class=buffer_class, **SMALL)
        return parameters(model.learn(48, ReadMinibatches(reads)))

    np.testing.assert_array_equal(train(reads=True), train(reads=False))


def test_kl_term_pulls_back_to_the_policy_of_the_rollout():
    logits = th.randn(6, 4, dtype=th.float64, generator=th.Generator().manual_seed(0))
    old = th.log_softmax(logits, dim=1)
    for shift in (0.0, 0.5):
        moved = (logits + shift * th.eye(6, 4, dtype=th.float64)).requires_grad_()
        kl = kl_divergence(old, th.log_softmax(moved, dim=1))
        kl.backward()
        # With p the old probabilities and q those of the moved logits, the gradient is (q - p) / batch_size
        expected = (th.softmax(moved, 1) - old.exp()).detach() / 6
        np.testing.assert_allclose(moved.grad, expected, rtol=0, atol=1e-12)
        if shift == 0:
            assert kl.item() == pytest.approx(0, abs=1e-12)
        else:
            assert kl.item() > 1e-3 and moved.grad.abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_actor_loss_leaves_no_gradient_on_the_critic(variant):
    """Without the critic's loss, the critic's part of the network stays as it was and the actor's moves."""
    model = make_model(vf_coef=0.0, **{"ent_coef": 0.1, **variant})
    critic = {name: p.clone() for name, p in model.policy.named_parameters() if "value" in name or "q_net" in name}
    actor = {name: p.clone() for name, p in model.policy.named_parameters() if "policy_net" in name or "action_net" in name}
    model.learn(32)
    now = dict(model.policy.named_parameters())
    assert (len(critic), len(actor)) == (4 + len(list(model.policy.q_net.parameters())), 6)
    assert all(th.equal(now[name], p) for name, p in critic.items())
    assert not any(th.equal(now[name], p) for name, p in actor.items())


@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_no_nan_where_all_q_values_are_equal(variant):
    """No rewards and a head of zeros: advantages and errors are all zero, the entropy bonus is all there is to learn from."""
    env = DummyVecEnv([lambda: ScriptedEnv([0.0] * 100)] * 2)
    model = QPPO("MlpPolicy", env, seed=0, **SMALL, **variant)
    for parameter in model.policy.q_net.parameters():
        th.nn.init.zeros_(parameter)
    row = logged_by(model, 64)[-1]
    assert all(math.isfinite(value) for name, value in row.items() if not name.startswith("explained"))
    assert np.isfinite(parameters(model)).all()
    assert row["abs_advantage"] == 0 and row["policy_loss"] == pytest.approx(0, abs=1e-6)


def test_first_minibatch_sets_sigma_and_the_next_ones_move_it_slowly():
    model = with_rollout(make_model(batch_size=16, n_epochs=1, beta=0.5, shrinkage=0.0, learning_rate=0.0))
    model.train()
    buffer = model.rollout_buffer
    with th.no_grad():
        q_values, log_probs = model.policy.evaluate_all_actions(th.as_tensor(buffer.observations))
    probs, q = log_probs.exp().numpy(), q_values.numpy()
    advantages = q - (probs * q).sum(axis=1, keepdims=True)
    errors = buffer.returns - np.take_along_axis(q, buffer.actions, axis=1)
    first = math.sqrt((probs * advantages**2).sum(axis=1).mean() + 0.5 * (errors**2).mean())
    assert model.sigma == pytest.approx(first, rel=1e-5)
    # All of the next minibatch is ten times as large
    _, callback = model._setup_learn(10**6)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    with th.no_grad():
        for parameter in model.policy.q_net.parameters():
            parameter *= 10
    model.rollout_buffer.returns *= 10
    model.train()
    assert 1.05 * first < model.sigma < 1.2 * first


@pytest.mark.parametrize("policy_gradient", ["all-action", "sampled"])
def test_sigma_min_is_a_bound_that_matters_only_where_sigma_would_be_smaller(policy_gradient):
    def trained(sigma_min):
        return make_model(policy_gradient=policy_gradient, sigma_min=sigma_min).learn(32)

    usual = trained(1e-8)
    np.testing.assert_array_equal(parameters(trained(usual.sigma / 10)), parameters(usual))
    bounded = trained(usual.sigma * 10)
    assert bounded.sigma == pytest.approx(usual.sigma * 10)
    assert not np.array_equal(parameters(bounded), parameters(usual))


def test_bounded_sigma_makes_the_policy_gradient_vanish_with_the_advantages():
    """Without rewards, errors of the critic are all that there is. Divided by their own size they would move the policy."""

    def first_step(scale, sigma_min):
        kwargs = dict(policy_kwargs=dict(optimizer_class=th.optim.SGD), max_grad_norm=None, learning_rate=1.0)
        model = with_rollout(
            make_model(batch_size=16, n_epochs=1, shrinkage=0.0, sigma_min=sigma_min, ent_coef=0.0, vf_coef=0.0, **kwargs)
        )
        with th.no_grad():
            for parameter in model.policy.q_net.parameters():
                parameter *= scale
        model.rollout_buffer.returns *= scale
        before = parameters(model)
        model.train()
        return np.abs(parameters(model) - before).max()

    assert first_step(1e-3, 1e-8) == pytest.approx(first_step(1.0, 1e-8), rel=1e-3)
    assert first_step(1e-3, 100.0) == pytest.approx(1e-3 * first_step(1.0, 100.0), rel=1e-2)


def test_last_smaller_minibatch_is_used():
    """12 steps in minibatches of 8 and 4: all 12 count, each minibatch for one gradient step, as in SB3's PPO."""
    with pytest.warns(UserWarning, match=r"`batch_size` is 8.*6 \* 2 steps.*last minibatch of each epoch is truncated to 4"):
        model = make_model(n_steps=6, n_epochs=3)
    sizes, evaluate = [], model.policy.evaluate_all_actions

    def evaluate_and_count(observations):
        sizes.append(len(observations))
        return evaluate(observations)

    model.policy.evaluate_all_actions = evaluate_and_count
    model.learn(12)
    assert sizes == 3 * [8, 4]
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {6}


@pytest.mark.filterwarnings("error:.*truncated")
@pytest.mark.parametrize(("n_envs", "n_steps", "batch_size"), [(3, 64, 128), (2, 7, 14)])
def test_default_minibatch_fits_the_rollout(n_envs, n_steps, batch_size, tmp_path):
    model = QPPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs), n_steps=n_steps, device="cpu")
    model.save(tmp_path / "model")
    assert model.batch_size == QPPO.load(tmp_path / "model", device="cpu").batch_size == batch_size


# ---- what is logged ----


@pytest.mark.parametrize("policy_gradient", ["all-action", "sampled"])
def test_log_has_the_names_of_sb3_and_figures_that_agree(policy_gradient):
    model = make_model(policy_gradient=policy_gradient, batch_size=16, n_epochs=1, kl_coef=0.5)
    row = logged_by(model, 64)[-1]
    assert set(row) == {
        *("policy_loss", "value_loss", "entropy_loss", "loss", "explained_variance", "explained_variance_q", "grad_norm"),
        *("learning_rate", "n_updates", "state_value", "q_target", "abs_advantage", "action_gap"),
        *("kl", "kl_coef", "ent_coef", "clip_fraction", "clip_range", "sigma"),
    }
    total = row["policy_loss"] + 0.5 * row["kl"] + model.ent_coef * row["entropy_loss"] + model.vf_coef * row["value_loss"]
    assert row["loss"] == pytest.approx(total, rel=1e-5)
    # One minibatch: pi is still pi_old
    assert row["kl"] == pytest.approx(0, abs=1e-6) and row["clip_fraction"] == 0
    assert row["abs_advantage"] > 0 and row["action_gap"] > 0 and row["grad_norm"] > 0 and row["sigma"] > 0
    assert -np.log(2) - 1e-6 <= row["entropy_loss"] < 0


@pytest.mark.parametrize("ent_coef", ["lin_0.2", lambda progress: 0.2 * progress])
def test_entropy_coefficient_falls_with_the_progress_of_the_training(ent_coef):
    model = make_model(ent_coef=ent_coef, batch_size=16, n_epochs=1, kl_coef=0.5)
    rows = logged_by(model, 64)
    # Each update follows a rollout of 16 of the 64 steps; the last one is not written any more
    assert [row["ent_coef"] for row in rows] == pytest.approx([0.2 * remaining for remaining in (0.75, 0.5, 0.25)])
    for row in rows:
        total = row["policy_loss"] + 0.5 * row["kl"] + row["ent_coef"] * row["entropy_loss"] + 0.5 * row["value_loss"]
        assert row["loss"] == pytest.approx(total, rel=1e-5)
    constant = logged_by(make_model(ent_coef=0.15, batch_size=16, n_epochs=1, kl_coef=0.5), 32)
    assert rows[0]["loss"] == pytest.approx(constant[0]["loss"], rel=1e-6)


def test_schedules_end_at_the_planned_steps_if_the_last_rollout_exceeds_them():
    def falling(progress):
        assert 0 <= progress <= 1
        return 0.2 * progress

    # The third rollout ends at 48
    model = make_model(ent_coef=falling, clip_range=falling, learning_rate=falling).learn(40)
    assert model.num_timesteps == 48
    assert [group["lr"] for group in model.policy.optimizer.param_groups] == [0.0]


@pytest.mark.parametrize("name", ["ent_coef", "clip_range", "learning_rate"])
def test_schedule_that_becomes_negative_is_refused_by_its_name(name, value=-0.5):
    model = make_model(**{name: lambda progress: 0.1 if progress > 0.6 else value})
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number, at least 0, but {value}"):
        model.learn(64)
    assert model.num_timesteps == 32


def test_logged_advantages_are_shrunk_and_the_action_gap_is_that_of_q():
    without, much = (logged_by(make_model(batch_size=16, n_epochs=1, shrinkage=s), 32)[0] for s in (0.0, 9.0))
    assert much["action_gap"] == without["action_gap"] > 0
    # By p / (p + 9)
    assert 0 < much["abs_advantage"] < without["abs_advantage"] / 10


def test_logged_kl_is_that_of_the_last_epoch():
    """In the first minibatch of a rollout it is zero."""
    epochs = [logged_by(make_model(n_epochs=n, batch_size=16, learning_rate=1e-2), 32)[0]["kl"] for n in (1, 2, 3)]
    assert epochs[0] == pytest.approx(0, abs=1e-6)
    assert 10 * epochs[0] < epochs[1] < epochs[2]


# ---- learning, repeating, saving, resuming ----


@pytest.mark.parametrize("policy_gradient", ["all-action", "sampled"])
def test_learns_the_identity(policy_gradient):
    """An untrained policy scores some 50 of 100."""
    env = DummyVecEnv([lambda: IdentityEnv(2)] * 4)
    arguments = dict(n_steps=16, batch_size=32, learning_rate=2e-3, gamma=0.0, policy_gradient=policy_gradient)
    model = QPPO("MlpPolicy", env, seed=0, device="cpu", **arguments)
    untrained, _ = evaluate_policy(model, env, n_eval_episodes=2, warn=False)
    model.learn(1_000)
    trained, _ = evaluate_policy(model, env, n_eval_episodes=2, warn=False)
    assert untrained < 70 < 95 < trained


def test_same_seed_gives_the_same_parameters_bit_for_bit():
    runs = [parameters(make_model(seed=3).learn(64)) for _ in range(2)]
    np.testing.assert_array_equal(*runs)
    assert not np.array_equal(runs[0], parameters(make_model(seed=4).learn(64)))


def test_loaded_model_updates_as_the_saved_one(tmp_path):
    model = make_model(kl_coef=0.5, beta=0.3, clip_range=lambda progress: 0.1 * progress).learn(32)
    model.save(tmp_path / "model")
    loaded = QPPO.load(tmp_path / "model", env=model.env)
    assert loaded.sigma == model.sigma is not None
    names = ("kl_coef", "beta", "policy_gradient", "normalize_advantage", "n_epochs", "batch_size", "max_grad_norm")
    assert all(getattr(loaded, name) == getattr(model, name) for name in names)
    assert loaded.clip_range(0.5) == model.clip_range(0.5) == 0.05

    with_rollout(model)
    loaded._setup_learn(10**6)
    loaded.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    loaded._current_progress_remaining = model._current_progress_remaining
    for each in (model, loaded):
        np.random.seed(0)
        each.train()
    np.testing.assert_array_equal(parameters(model), parameters(loaded))
    assert loaded.sigma == model.sigma


@pytest.mark.parametrize("variant", [{}, dict(ent_coef="lin_0.05", clip_range="lin_0.3", shrinkage=0.0)])
def test_resumed_training_is_the_uninterrupted_one_bit_for_bit(variant, tmp_path):
    """With everything that moves, such as sigma."""

    def train(folder, stop=math.inf):
        model = make_model(n_steps=16, batch_size=12, n_epochs=3, **variant)
        checkpoints = ExactCheckpointCallback(tmp_path / folder, save_freq=100, verbose=0)
        return model.learn(256, [InterruptAt(stop), checkpoints])

    with pytest.warns(UserWarning, match="truncated"):
        whole = train("whole")
        with pytest.raises(Interrupted):
            train("parts", 150)
        parts = train("parts")
    np.testing.assert_array_equal(parameters(whole), parameters(parts))
    assert (whole.sigma, whole._n_updates) == (parts.sigma, parts._n_updates)


def test_training_with_another_coefficient_is_not_resumed(tmp_path):
    for kl_coef, beta, error in [(1.0, 1.0, None), (0.5, 1.0, "kl_coef is 0.5"), (1.0, 0.5, "beta is 0.5")]:
        model, callback = make_model(kl_coef=kl_coef, beta=beta), ExactCheckpointCallback(tmp_path, verbose=0)
        if error is None:
            model.learn(32, callback)
        else:
            with pytest.raises(CheckpointError, match=error):
                model.learn(32, callback)


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("ent_coef", 0.02, lambda progress: 5.0),
        ("clip_range", lambda progress: 0.02 * progress, lambda progress: 5.0),
        ("learning_rate", "lin_0.02", "lin_0.03"),
    ],
)
def test_training_with_another_schedule_is_not_resumed(name, before, now, tmp_path):
    make_model(**{name: before}).learn(16, ExactCheckpointCallback(tmp_path, verbose=0))
    with pytest.raises(CheckpointError, match=f"{name} is "):
        resume(make_model(**{name: now}), tmp_path)


@pytest.mark.parametrize("name", ["ent_coef", "clip_range", "learning_rate"])
def test_training_with_the_same_schedule_written_in_another_way_is_resumed(name, tmp_path):
    make_model(**{name: "lin_0.03"}).learn(32, ExactCheckpointCallback(tmp_path, verbose=0))
    for same in ("lin_3e-2", LinearSchedule(0.03, 0.0, 1.0), lambda progress: 0.03 * progress):
        assert resume(make_model(**{name: same}), tmp_path).num_timesteps == 32


# ---- bad input ----


# Spaces that cannot be used: tests/test_qa2c.py
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(ent_coef="lin_-0.1"), "`ent_coef` must be.*such as 'lin_0.03', but 'lin_-0.1'"),
        (dict(ent_coef=None), "`ent_coef`.*None"),
        (dict(vf_coef=float("nan")), "`vf_coef`.*nan"),
        (dict(kl_coef=-0.5), "`kl_coef`.*-0.5"),
        (dict(beta="much"), "`beta`.*'much'"),
        (dict(shrinkage=10**400), "`shrinkage` must be a finite number"),
        (dict(max_grad_norm="all"), "`max_grad_norm`.*'all'"),
        (dict(clip_range="log_0.2"), "`clip_range`.*'log_0.2'"),
        (dict(gamma=1.1), "`gamma`.*between 0 and 1.*1.1"),
        (dict(gae_lambda=-0.1), "`gae_lambda`"),
        (dict(n_steps=0), "`n_steps` must be an integer, at least 1, but 0"),
        (dict(batch_size=2.5), "`batch_size`.*2.5"),
        (dict(n_epochs=True), "`n_epochs`.*True"),
        (dict(policy_gradient="expected"), "'all-action' or 'sampled', but 'expected'"),
        (dict(sigma_min=0.0), "`sigma_min` must be a finite number, at least 1e-08, but 0.0"),
        (dict(normalize_advantage="std"), "`normalize_advantage`.*False or True, but 'std'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(**arguments)


def test_bad_arguments_of_load_are_refused_by_name(tmp_path):
    make_model().save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"`beta` must be a finite number, at least 0, but -1"):
        QPPO.load(tmp_path / "model", beta=-1)


def test_non_finite_loss_keeps_the_last_good_update():
    env = DummyVecEnv([lambda: ScriptedEnv([1.0] * 8 + [math.nan] * 10)])
    model = QPPO("MlpPolicy", env, seed=0, **SMALL)
    model.learn(8)
    last_good, sigma = parameters(model).copy(), model.sigma
    with pytest.raises(ValueError, match=r"value_loss is (nan|inf).*VecCheckNan"):
        model.learn(8, reset_num_timesteps=False)
    np.testing.assert_array_equal(parameters(model), last_good)
    assert model.sigma == sigma


def test_constructor_takes_the_arguments_of_ppo_in_its_order():
    ppo, mine = (inspect.signature(cls).parameters for cls in (PPO, QPPO))
    positional = [name for name, parameter in mine.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == list(ppo)[: len(positional)]
    without = {"use_sde", "sde_sample_freq", "clip_range_vf", "target_kl"}
    assert set(mine) == set(ppo) - without | {"kl_coef", "beta", "shrinkage", "policy_gradient", "sigma_min"}
    assert re.findall(r":param (\w+):", QPPO.__doc__) == list(mine)


def test_defaults_are_those_of_the_page_and_of_the_preset_for_atari():
    defaults = {name: parameter.default for name, parameter in inspect.signature(QPPO).parameters.items()}
    (line,) = re.findall(r"The defaults are for Atari games with 16 environments: (.+?)\. ", (DOCS / "qppo.md").read_text())
    said = {name: float(value) for name, value in re.findall(r"`(\w+)=([^`]+)`", line)}
    assert len(said) == len(line.split(", "))
    # It depends on the rollout
    defaults["batch_size"] = QPPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=16), device="cpu").batch_size
    assert {name: defaults[name] for name in said} == said
    preset = yaml.safe_load(presets("qppo").read_text())["atari"]
    # Both fall in the preset
    shared = said.keys() & preset.keys() - {"learning_rate", "ent_coef"}
    assert {name: preset[name] for name in shared} == {name: said[name] for name in shared}


def test_gradients_are_not_clipped_without_a_limit(tmp_path):
    unlimited, large, small = (parameters(make_model(max_grad_norm=limit).learn(32)) for limit in (None, 1e9, 1e-3))
    np.testing.assert_array_equal(unlimited, large)
    assert not np.array_equal(unlimited, small)
    make_model(max_grad_norm=None).save(tmp_path / "model")
    assert QPPO.load(tmp_path / "model").max_grad_norm == math.inf


def test_train_command_of_rl_zoo(tmp_path, rl_zoo):
    arguments = ["--algo", "qppo", "--env", "CartPole-v1", "-n", 600, "--eval-freq", 300, "--seed", 0]
    rl_zoo("train", *arguments, cwd=tmp_path)
    run = tmp_path / "logs" / "qppo" / "CartPole-v1_1"
    assert len(np.load(run / "evaluations.npz")["timesteps"]) == 2
    model = QPPO.load(run / "CartPole-v1.zip")
    assert type(model) is QPPO and model.sigma > 0


def test_sigma_begins_anew_after_a_training_without_a_scale(tmp_path):
    model = make_model(normalize_advantage=False).learn(64)
    assert model.sigma is None
    model.save(tmp_path / "model")
    scaled = QPPO.load(tmp_path / "model", env=model.env, normalize_advantage=True, device="cpu")
    assert scaled.sigma is None and scaled.learn(64).sigma > 0


def test_a_trained_model_and_its_buffer_can_be_pickled():
    model = QPPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").learn(8)
    buffer = pickle.loads(pickle.dumps(model)).rollout_buffer
    assert th.equal(buffer.all_log_probs, model.rollout_buffer.all_log_probs)
