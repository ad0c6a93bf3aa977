"""The algorithm as a user of SB3 meets it: it runs, learns, repeats, saves and loads, and refuses what it cannot take."""

import copy
import functools
import inspect
import math
import re
import textwrap
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv, SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule, obs_as_tensor
from stable_baselines3.common.vec_env import DummyVecEnv, VecCheckNan, VecFrameStack
from stable_baselines3.dqn import MlpPolicy as QPolicyOfDQN

from sb3_qac import PQN, QA2C, QPPO, REINFORCE
from sb3_qac.qa2c.policies import ActorCriticQPolicy
from sb3_qac.resume import ExactCheckpointCallback
from tests.envs import InterruptAt, Interrupted, ScriptedEnv

ESTIMATORS = [
    pytest.param(dict(), id="task 1"),
    pytest.param(dict(baseline=True), id="task 2"),
    pytest.param(dict(beta=1.0), id="beta"),
    pytest.param(dict(beta=1.0, shrinkage=0.3), id="shrinkage"),
    pytest.param(dict(beta=0.5, shrinkage=0.3, baseline=True), id="shrinkage with baseline"),
    pytest.param(dict(policy_gradient="sampled"), id="sampled"),
    pytest.param(dict(policy_gradient="sampled", baseline=True), id="sampled with baseline"),
]
# Both have the policies, and with them the checks of spaces
ALGORITHMS = [
    pytest.param(QA2C, id="QA2C"),
    pytest.param(functools.partial(QPPO, n_steps=8, batch_size=8, n_epochs=1), id="QPPO"),
]


class Rows(KVWriter):
    """A logger's output that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def write(self, key_values, key_excluded, step=0) -> None:
        self.rows.append(dict(key_values))

    def close(self) -> None:
        pass


class DoubleExtractor(FlattenExtractor):
    """SB3 makes observations float32."""

    def forward(self, observations):
        return super().forward(observations.double())


def parameters(model) -> np.ndarray:
    return th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().numpy()


def update_figures(row) -> dict[str, float]:
    """:return: what a row of the log says of the update, without the prefix of its names"""
    return {name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")}


def test_readme_line_runs_on_atari():
    """Importing sb3_qac is all it takes for the id to be known, and the defaults are those of task 1."""
    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=2), 4)
    model = QA2C("CnnPolicy", env).learn(20)
    assert model.num_timesteps == 20
    optimizer = model.policy.optimizer
    assert type(optimizer).__name__ == "RMSpropTFLike"
    assert {name: optimizer.defaults[name] for name in ("lr", "alpha", "eps")} == dict(lr=1.5e-3, alpha=0.99, eps=1e-5)
    defaults = dict(n_steps=5, gamma=0.99, gae_lambda=1.0, pg_coef=0.1, vf_coef=0.5, ent_coef=0.001, max_grad_norm=0.5)
    assert {name: getattr(model, name) for name in defaults} == defaults
    assert (model.baseline, model.policy_gradient, model.beta, model.shrinkage) == (False, "all-action", 0.0, 0.0)


@pytest.mark.parametrize(
    ("policy", "env"),
    [
        pytest.param("MlpPolicy", lambda: gym.make("CartPole-v1"), id="vector"),
        pytest.param("MlpPolicy", lambda: gym.make("FrozenLake-v1"), id="discrete"),
        pytest.param("CnnPolicy", lambda: FakeImageEnv(screen_height=40, screen_width=40, n_channels=1), id="image"),
        pytest.param("MultiInputPolicy", lambda: SimpleMultiObsEnv(random_start=True), id="dict"),
    ],
)
def test_every_policy_runs(policy, env):
    model = QA2C(policy, make_vec_env(env, n_envs=2), seed=0)
    before = parameters(model).copy()
    model.learn(30)
    assert np.isfinite(parameters(model)).all()
    assert not np.array_equal(parameters(model), before)


@pytest.mark.parametrize(
    "estimator",
    [
        {},
        pytest.param(dict(beta=1.0), marks=pytest.mark.slow),
        pytest.param(dict(policy_gradient="sampled", baseline=True), marks=pytest.mark.slow),
    ],
)
def test_learns_the_identity(estimator):
    """An untrained policy scores some 50 of 100. With more actions the pure estimator may settle on wrong ones."""
    env = DummyVecEnv([lambda: IdentityEnv(2)] * 4)
    for seed, each in enumerate(env.envs):
        # Its states are drawn from it
        each.action_space.seed(seed)
    model = QA2C("MlpPolicy", env, gamma=0.0, pg_coef=1.0, ent_coef=0.05, seed=0, device="cpu", **estimator)
    untrained, _ = evaluate_policy(model, env, n_eval_episodes=2, warn=False)
    model.learn(4_000)
    trained, _ = evaluate_policy(model, env, n_eval_episodes=2, warn=False)
    assert untrained < 70 < 95 < trained


@pytest.mark.parametrize(
    ("shrinkage", "dueling", "learns"),
    [
        pytest.param(0.0, False, False, id="neither", marks=pytest.mark.slow),
        pytest.param(1.0, False, True, id="shrinkage", marks=pytest.mark.slow),
        pytest.param(0.0, True, True, id="dueling", marks=pytest.mark.slow),
    ],
)
def test_an_action_that_is_wrongly_avoided_is_found_with_shrinkage_or_a_dueling_head(shrinkage, dueling, learns):
    """V~ grows, and the Q of an action that is no longer taken stays behind (docs/algorithm.md)."""
    optimizer = dict(optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.99, eps=1e-5))
    arguments = dict(learning_rate=2e-3, gamma=0.4, pg_coef=1.0, beta=1.0, shrinkage=shrinkage, seed=0, device="cpu")
    env = DummyVecEnv([lambda: IdentityEnv(4)])
    model = QA2C("MlpPolicy", env, policy_kwargs=dict(**optimizer, dueling=dueling), **arguments).learn(1_200)
    actions, _ = model.predict(np.arange(4), deterministic=True)
    assert (actions.tolist() == [0, 1, 2, 3]) is learns


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_update_and_its_log_are_those_of_the_formula(estimator):
    """One plain gradient step on the formula, by hand and in float64, from the same rollout."""
    learning_rate, coefficients = 0.01, dict(pg_coef=0.3, ent_coef=0.2, vf_coef=0.7)
    model = QA2C(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=2, seed=0),
        learning_rate=learning_rate,
        max_grad_norm=1e9,
        use_rms_prop=False,
        policy_kwargs=dict(optimizer_class=th.optim.SGD, features_extractor_class=DoubleExtractor),
        seed=0,
        device="cpu",
        **coefficients,
        **estimator,
    )
    model.policy.double()
    with th.no_grad():
        # A critic and a policy that tell actions apart
        model.policy.q_net.weight *= 20
        model.policy.action_net.weight *= 20
    _, callback = model._setup_learn(10)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    model.rollout_buffer.returns = model.rollout_buffer.returns.astype(np.float64)
    before = parameters(model).copy()

    observations = th.as_tensor(model.rollout_buffer.observations).reshape(10, -1)
    actions = th.as_tensor(model.rollout_buffer.actions).long().reshape(10, 1)
    returns = th.as_tensor(model.rollout_buffer.returns).reshape(10, 1)
    q_values, log_probs = model.policy.evaluate_all_actions(observations)
    probs, q = log_probs.exp(), q_values.detach()
    values = (probs.detach() * q).sum(1, keepdim=True)
    shrunk_q = values + (q - values) * probs.detach() / (probs.detach() + model.shrinkage)
    weights = shrunk_q - values if model.baseline else shrunk_q
    if model.policy_gradient == "all-action":
        gain = (probs * weights).sum(1).mean()
        gain = gain + model.beta * (log_probs * (returns - shrunk_q)).gather(1, actions).mean()
    else:
        gain = (log_probs * weights).gather(1, actions).mean()
    entropy_loss = (probs * log_probs).sum(1).mean()
    value_loss = ((returns - q_values.gather(1, actions)) ** 2).mean()
    loss = -0.3 * gain + 0.2 * entropy_loss + 0.7 * value_loss
    gradient = th.cat([g.flatten() for g in th.autograd.grad(loss, list(model.policy.parameters()))]).numpy()

    model.train()
    np.testing.assert_allclose(parameters(model), before - learning_rate * gradient, rtol=0, atol=1e-12)
    expected = {
        "loss": loss.item(),
        "policy_loss": -gain.item(),
        "value_loss": value_loss.item(),
        "entropy_loss": entropy_loss.item(),
        "grad_norm": np.linalg.norm(gradient),
        "state_value": values.mean().item(),
        "q_target": returns.mean().item(),
        "abs_advantage": (shrunk_q - values).abs().mean().item(),
        # CartPole has two actions
        "action_gap": (q[:, 0] - q[:, 1]).abs().mean().item(),
        "explained_variance": 1 - ((returns - values).var() / returns.var()).item(),
        "explained_variance_q": 1 - ((returns - q.gather(1, actions)).var() / returns.var()).item(),
        "n_updates": 1,
        "learning_rate": learning_rate,
        "ent_coef": 0.2,
    }
    assert update_figures(model.logger.name_to_value) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_much_shrinkage_leaves_the_gradient_of_a2c():
    """Its weight R - V~ on the action taken, with half of it where ``beta`` is a half."""
    policy_kwargs = dict(optimizer_class=th.optim.SGD, features_extractor_class=DoubleExtractor)
    arguments = dict(
        learning_rate=1.0, max_grad_norm=None, ent_coef=0.0, vf_coef=0.0, pg_coef=1.0, policy_kwargs=policy_kwargs
    )
    env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
    model = QA2C("MlpPolicy", env, seed=0, device="cpu", beta=0.5, shrinkage=1e15, **arguments)
    model.policy.double()
    _, callback = model._setup_learn(10)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    model.rollout_buffer.returns = model.rollout_buffer.returns.astype(np.float64)
    (data,) = model.rollout_buffer.get()
    values, log_prob, _ = model.policy.evaluate_actions(data.observations, data.actions.flatten())
    loss = -0.5 * (log_prob * (data.returns - values.flatten().detach())).mean()
    gradient = th.autograd.grad(loss, list(model.policy.parameters()), allow_unused=True, materialize_grads=True)
    before = parameters(model).copy()
    model.train()
    expected = np.concatenate([each.flatten() for each in gradient])
    np.testing.assert_allclose(before - parameters(model), expected, rtol=0, atol=1e-12)
    assert np.abs(expected).max() > 0.01


def test_tasks_1_and_2_take_the_same_first_update():
    first, second = (QA2C("MlpPolicy", "CartPole-v1", seed=0, baseline=baseline).learn(5) for baseline in (False, True))
    np.testing.assert_allclose(parameters(first), parameters(second), rtol=1e-5, atol=1e-7)


def test_explained_variance_of_q_is_that_of_v_where_there_is_one_action():
    """With one action Q is V~, so the two logged figures have to agree (rows of a rollout are shuffled for the update)."""
    rng = np.random.default_rng(0)
    env = DummyVecEnv([lambda: ScriptedEnv(list(rng.normal(size=40)), n_actions=1)] * 3)
    rows = Rows()
    model = QA2C("MlpPolicy", env, seed=0)
    model.set_logger(Logger(folder=None, output_formats=[rows]))
    model.learn(45, log_interval=1)
    logged = [(row["train/explained_variance"], row["train/explained_variance_q"]) for row in rows.rows[1:]]
    assert len(logged) == 2
    np.testing.assert_allclose(*zip(*logged, strict=True), rtol=1e-4)
    assert all(abs(value) > 1e-3 for value, _ in logged)


def test_log_has_the_names_of_sb3_and_figures_that_agree():
    rows = Rows()
    model = QA2C("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4, seed=0), baseline=True, seed=0)
    model.set_logger(Logger(folder=None, output_formats=[rows]))
    model.learn(200, log_interval=1)
    row = update_figures(rows.rows[-1])
    assert set(row) == {
        *("policy_loss", "value_loss", "entropy_loss", "loss", "explained_variance", "explained_variance_q", "grad_norm"),
        *("learning_rate", "ent_coef", "n_updates", "state_value", "q_target", "abs_advantage", "action_gap"),
    }
    total = model.pg_coef * row["policy_loss"] + model.ent_coef * row["entropy_loss"] + model.vf_coef * row["value_loss"]
    assert row["loss"] == pytest.approx(total, rel=1e-5)
    assert row["policy_loss"] == pytest.approx(0, abs=1e-5)  # sum_a pi A = 0: task 2's loss says nothing
    assert row["abs_advantage"] > 0 and row["action_gap"] > 0 and row["grad_norm"] > 0
    assert -np.log(2) - 1e-6 <= row["entropy_loss"] < 0


def test_same_seed_gives_the_same_parameters_bit_for_bit():
    runs = [parameters(QA2C("MlpPolicy", "CartPole-v1", seed=3).learn(100)) for _ in range(2)]
    np.testing.assert_array_equal(*runs)
    other = parameters(QA2C("MlpPolicy", "CartPole-v1", seed=4).learn(100))
    assert not np.array_equal(runs[0], other)


@pytest.mark.parametrize("policy_kwargs", [dict(), dict(share_features_extractor=False, net_arch=dict(pi=[8], vf=[16]))])
def test_loaded_model_predicts_and_updates_as_the_saved_one(tmp_path, policy_kwargs):
    env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
    model = QA2C(
        "MlpPolicy", env, seed=0, baseline=True, beta=0.5, shrinkage=0.2, pg_coef=0.7, policy_kwargs=policy_kwargs
    ).learn(50)
    model.save(tmp_path / "model")
    loaded = QA2C.load(tmp_path / "model", env=env)

    for name in ("baseline", "beta", "shrinkage", "pg_coef", "policy_gradient", "n_steps", "ent_coef", "vf_coef"):
        assert getattr(loaded, name) == getattr(model, name)
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.testing.assert_array_equal(*(m.predict(observations, deterministic=True)[0] for m in (model, loaded)))
    tensor = obs_as_tensor(observations, model.device)
    th.testing.assert_close(model.policy.predict_q_values(tensor), loaded.policy.predict_q_values(tensor), rtol=0, atol=0)
    saved_state, loaded_state = model.policy.optimizer.state_dict(), loaded.policy.optimizer.state_dict()
    assert saved_state["state"].keys() == loaded_state["state"].keys() != set()
    for key, state in saved_state["state"].items():
        th.testing.assert_close(state["square_avg"], loaded_state["state"][key]["square_avg"], rtol=0, atol=0)

    # The same rollout for both, then the next update; it takes the rollout in a random order
    _, callback = model._setup_learn(10)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    loaded._setup_learn(10)
    loaded.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    loaded._current_progress_remaining = model._current_progress_remaining
    before = parameters(model).copy()
    for each in (model, loaded):
        np.random.seed(0)
        each.train()
    np.testing.assert_array_equal(parameters(model), parameters(loaded))
    assert not np.array_equal(parameters(model), before)


def test_set_parameters_restores_policy_and_optimizer(tmp_path):
    def square_averages():
        return [state["square_avg"].clone() for state in model.policy.optimizer.state_dict()["state"].values()]

    model = QA2C("MlpPolicy", "CartPole-v1", seed=0).learn(20)
    model.save(tmp_path / "model")
    saved, averages = parameters(model).copy(), square_averages()
    model.learn(20)
    assert not np.array_equal(parameters(model), saved)
    assert not all(map(th.equal, square_averages(), averages))
    model.set_parameters(str(tmp_path / "model"))
    np.testing.assert_array_equal(parameters(model), saved)
    assert all(map(th.equal, square_averages(), averages))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_callers_policy_kwargs_are_left_alone(algorithm):
    """SB3's A2C writes its optimizer into the dict it was given, which a second model would then inherit."""
    policy_kwargs = dict(net_arch=[8])
    algorithm("MlpPolicy", "CartPole-v1", policy_kwargs=policy_kwargs)
    assert policy_kwargs == dict(net_arch=[8])


class MaskingPolicy(ActorCriticQPolicy):
    """Never takes the last action."""

    def _get_action_dist_from_latent(self, latent_pi):
        mask = th.arange(self.action_space.n) == self.action_space.n - 1
        return self.action_dist.proba_distribution(self.action_net(latent_pi).masked_fill(mask, -np.inf))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policy_may_mask_actions_with_minus_infinity(algorithm):
    """As with SB3's A2C and PPO."""
    model = algorithm(MaskingPolicy, IdentityEnv(3), ent_coef=0.01, beta=1.0, seed=0)
    before = parameters(model).copy()
    model.learn(20)
    assert np.isfinite(parameters(model)).all()
    assert not np.array_equal(parameters(model), before)
    assert model.rollout_buffer.actions.max() < 2


class OwnNetworks(th.nn.Module):
    """The example of SB3's guide, with other sizes for the two networks."""

    def __init__(self, features_dim):
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = 5, 7
        self.policy_net, self.value_net = th.nn.Linear(features_dim, 5), th.nn.Linear(features_dim, 7)

    def forward(self, features):
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features):
        return self.policy_net(features)

    def forward_critic(self, features):
        return self.value_net(features)


class OwnNetworksPolicy(ActorCriticQPolicy):
    def _build_mlp_extractor(self):
        self.mlp_extractor = OwnNetworks(self.features_dim)


@pytest.mark.parametrize("share_features_extractor", [True, False])
def test_a_policy_may_have_networks_of_its_own(share_features_extractor, tmp_path):
    policy_kwargs = dict(share_features_extractor=share_features_extractor)
    model = QA2C(OwnNetworksPolicy, "CartPole-v1", policy_kwargs=policy_kwargs, seed=0).learn(20)
    model.save(tmp_path / "model")
    loaded = QA2C.load(tmp_path / "model")
    np.testing.assert_array_equal(parameters(model), parameters(loaded))
    assert loaded.policy.q_net.in_features == 7


class SpacesEnv(gym.Env):
    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


VECTOR, TWO = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
GRID = spaces.MultiDiscrete([[3, 4], [2, 2]])


@pytest.mark.parametrize(
    ("policy", "observation_space", "action_space", "message"),
    [
        pytest.param("MlpPolicy", VECTOR, VECTOR, r"Discrete.*Box.*PPO", id="continuous actions"),
        pytest.param("MlpPolicy", VECTOR, spaces.MultiBinary([2, 3]), r"one-dimensional.*PPO", id="a grid of actions"),
        pytest.param("MlpPolicy", VECTOR, spaces.Discrete(2, start=1), "starts at 1.*TransformAction", id="actions from 1"),
        pytest.param("MlpPolicy", spaces.Tuple((TWO, TWO)), TWO, "Tuple.*FlattenObservation", id="tuple observations"),
        pytest.param("MlpPolicy", spaces.Box(-1, 1, ()), TWO, "at least one dimension", id="a number without a dimension"),
        pytest.param("MlpPolicy", spaces.Discrete(2, start=1), TWO, r"Discrete\(2, start=1\).*from 0", id="states from 1"),
        pytest.param("MultiInputPolicy", spaces.Dict(a=VECTOR, b=GRID), TWO, "one dimension", id="grid in a dict"),
        pytest.param("MultiInputPolicy", VECTOR, TWO, "dict observations.*'MlpPolicy'", id="vector for MultiInputPolicy"),
        pytest.param(ActorCriticQPolicy, spaces.Dict(a=VECTOR), TWO, "MultiInputPolicy", id="dict for the class"),
        pytest.param(ActorCriticPolicy, VECTOR, TWO, "'MlpPolicy'.*ActorCriticQPolicy.*ActorCriticPolicy'", id="A2C's policy"),
    ],
)
def test_spaces_that_cannot_be_used_are_refused_with_the_cure(policy, observation_space, action_space, message):
    with pytest.raises(ValueError, match=message):
        QA2C(policy, SpacesEnv(observation_space, action_space))


def test_qppo_refuses_spaces_too():
    with pytest.raises(ValueError, match=r"Discrete.*Box.*PPO"):
        QPPO("MlpPolicy", SpacesEnv(VECTOR, VECTOR))
    with pytest.raises(ValueError, match=r"Tuple.*FlattenObservation"):
        QPPO("MlpPolicy", SpacesEnv(spaces.Tuple((TWO, TWO)), TWO))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_images_are_asked_for_by_the_cnn_policy(algorithm):
    with pytest.raises(AssertionError, match="MlpPolicy"):
        algorithm("CnnPolicy", "CartPole-v1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(pg_coef=-0.1), "`pg_coef` must be.*at least 0.*-0.1"),
        (dict(ent_coef="0.01"), "`ent_coef` must be.*such as 'lin_0.03', but '0.01'"),
        (dict(vf_coef=float("nan")), "`vf_coef`.*nan"),
        (dict(beta="much"), "`beta`.*'much'"),
        (dict(shrinkage=-0.1), "`shrinkage` must be.*at least 0.*-0.1"),
        (dict(max_grad_norm=-1), "`max_grad_norm`"),
        (dict(gamma=1.1), "`gamma`.*between 0 and 1.*1.1"),
        (dict(gae_lambda=-0.1), "`gae_lambda`"),
        (dict(n_steps=2.5), "`n_steps` must be an integer, at least 1, but 2.5"),
        (dict(baseline="no"), "`baseline` must be False or True, but 'no' was given"),
        (dict(policy_gradient="expected"), "'all-action' or 'sampled', but 'expected'"),
        (dict(policy_gradient="sampled", beta=1.0), "`beta`.*1.0.*cannot go with 'sampled'"),
        (dict(policy_gradient="sampled", shrinkage=0.1), "`shrinkage`.*0.1.*cannot go with 'sampled'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        QA2C("MlpPolicy", "CartPole-v1", **arguments)


def test_bad_arguments_of_load_are_refused_by_name(tmp_path):
    QA2C("MlpPolicy", "CartPole-v1").save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"`beta` must be a finite number, at least 0, but -1"):
        QA2C.load(tmp_path / "model", beta=-1)


def test_non_finite_loss_keeps_the_last_good_update():
    good_steps = 10
    env = DummyVecEnv([lambda: ScriptedEnv([1.0] * good_steps + [math.inf] * 10)])
    model = QA2C("MlpPolicy", env, seed=0, n_steps=5)
    model.learn(good_steps)
    last_good, optimizer_state = parameters(model).copy(), repr(model.policy.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"value_loss is (nan|inf).*VecCheckNan"):
        model.learn(5, reset_num_timesteps=False)
    np.testing.assert_array_equal(parameters(model), last_good)
    assert repr(model.policy.optimizer.state_dict()["state"]) in optimizer_state


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, PQN])
def test_gpu_is_only_advised_against_with_the_mlp_policy(algorithm):
    model = algorithm("MlpPolicy", "CartPole-v1")
    model.device = th.device("cuda")
    with pytest.warns(UserWarning, match="primarily intended to run on the CPU"):
        model._maybe_recommend_cpu()
    model = algorithm("CnnPolicy", FakeImageEnv(screen_height=40, screen_width=40, n_channels=1))
    model.device = th.device("cuda")
    # Warnings are errors
    model._maybe_recommend_cpu()


def test_constructor_has_the_arguments_of_a2c():
    """
    All but those of continuous actions, and ``normalize_advantage``: a factor on the actor's weights is `pg_coef`. In A2C's
    order, by position as far as A2C has no others between them, and by name from there on.
    """
    a2c, qa2c = (list(inspect.signature(cls).parameters) for cls in (A2C, QA2C))
    left_out = ["use_sde", "sde_sample_freq", "normalize_advantage"]
    own = ["pg_coef", "baseline", "policy_gradient", "beta", "shrinkage"]
    assert qa2c[-1] == a2c[-1] == "_init_setup_model"
    assert qa2c[:-1] == [name for name in a2c[:-1] if name not in left_out] + own
    parameters_of_qa2c = inspect.signature(QA2C).parameters.values()
    by_position = [parameter.name for parameter in parameters_of_qa2c if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == a2c[: a2c.index("use_sde")]
    assert re.findall(r":param (\w+):", QA2C.__doc__) == qa2c


def test_example_of_the_docstring_runs():
    # Not `__doc__`, whose indentation Python removes from 3.13 on
    example = re.search(r"::\n\n((?: {4}.*\n)+)", inspect.getdoc(QA2C)).group(1)
    scope = dict(QA2C=QA2C, make_vec_env=make_vec_env)
    exec(textwrap.dedent(example), scope)
    assert scope["model"].learn(80).num_timesteps == 80
    assert (scope["model"].n_envs, scope["model"].beta, scope["model"].ent_coef) == (8, 1.0, 0.0)


def test_optimizer_kwargs_without_a_class_are_those_of_the_default_optimizer():
    policy_kwargs = dict(optimizer_kwargs=dict(alpha=0.9, weight_decay=0.1))
    optimizer = QA2C("MlpPolicy", "CartPole-v1", rms_prop_eps=1e-3, policy_kwargs=policy_kwargs).policy.optimizer
    assert type(optimizer).__name__ == "RMSpropTFLike"
    expected = dict(alpha=0.9, weight_decay=0.1, eps=1e-3)
    assert {name: optimizer.defaults[name] for name in expected} == expected
    assert policy_kwargs == dict(optimizer_kwargs=dict(alpha=0.9, weight_decay=0.1))


def test_without_rms_prop_the_optimizer_is_the_adam_of_sb3s_policies():
    optimizers = [algorithm("MlpPolicy", "CartPole-v1", use_rms_prop=False).policy.optimizer for algorithm in (A2C, QA2C)]
    assert [type(optimizer) for optimizer in optimizers] == [th.optim.Adam] * 2
    assert optimizers[1].defaults == {**optimizers[0].defaults, "lr": 1.5e-3}


@pytest.mark.parametrize(
    "algorithm",
    [
        QA2C,
        functools.partial(QPPO, n_steps=8, batch_size=8, n_epochs=1),
        functools.partial(PQN, n_steps=8, batch_size=8, n_epochs=1),
        REINFORCE,
    ],
)
def test_dropout_is_on_in_updates_only(algorithm):
    model = algorithm("MlpPolicy", "CartPole-v1", seed=0)
    seen = set()
    # Gradients are needed in updates only
    model.policy.features_extractor.register_forward_hook(lambda m, *_: seen.add((m.training, th.is_grad_enabled())))
    model.learn(100)
    assert seen == {(True, True), (False, False)}


def test_gradients_are_not_clipped_without_a_limit(tmp_path):
    """As with a limit that is never reached, and the norm is logged."""

    def train(limit):
        rows = Rows()
        model = QA2C("MlpPolicy", "CartPole-v1", seed=0, max_grad_norm=limit, ent_coef=1.0)
        model.set_logger(Logger(folder=None, output_formats=[rows]))
        model.learn(20, log_interval=1)
        assert rows.rows[-1]["train/grad_norm"] > 0
        return model

    unlimited = train(None)
    np.testing.assert_array_equal(parameters(unlimited), parameters(train(1e9)))
    assert not np.array_equal(parameters(unlimited), parameters(train(1e-3)))
    unlimited.save(tmp_path / "model")
    assert QA2C.load(tmp_path / "model").max_grad_norm == float("inf")


def test_saved_agent_of_before_the_parameters_were_in_a2c_s_order_loads():
    folder = Path(__file__).parent.parent / "results" / "pong" / "agent" / "qa2c" / "PongNoFrameskip-v4_1"
    model = QA2C.load(folder / "PongNoFrameskip-v4.zip")
    found = (model.n_steps, model.pg_coef, model.ent_coef, model.max_grad_norm, model.baseline)
    assert found == (5, 0.1, 0.001, 0.5, False)
    assert model.policy.action_net.out_features == 6


# ---- what all algorithms have in common ----


@pytest.mark.parametrize(
    ("policy", "algorithm"), [("MlPolicy", QA2C), (None, QPPO), ("MlPolicy", REINFORCE), (QPolicyOfDQN, REINFORCE)]
)
def test_unknown_policy_is_refused_with_those_that_can_be_used(policy, algorithm):
    with pytest.raises(ValueError, match=r"`policy` must be 'MlpPolicy', 'CnnPolicy'.*but .* was given"):
        algorithm(policy, "CartPole-v1")


@pytest.mark.parametrize(("algorithm", "other"), [(QA2C, A2C), (QPPO, PPO), (PQN, PPO)])
def test_an_agent_whose_critic_has_one_value_per_state_cannot_be_loaded(other, algorithm, tmp_path):
    """RL Zoo's ``-i`` loads an agent too, and then no policy is given."""
    other("MlpPolicy", "CartPole-v1", device="cpu").save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"ActorCriticPolicy'> was given\. An agent that is loaded must have such a policy"):
        algorithm.load(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("algorithm", [PQN, QA2C, QPPO, REINFORCE])
def test_learning_rate_may_be_a_number_of_numpy_or_the_name_of_a_schedule_of_rl_zoo(algorithm, tmp_path):
    for given, halfway in ((np.float32(0.25), 0.25), ("lin_0.25", 0.125)):
        algorithm("MlpPolicy", make_vec_env("CartPole-v1", 8), given, device="cpu").save(tmp_path / "model")
        assert algorithm.load(tmp_path / "model", device="cpu").lr_schedule(0.5) == halfway


@pytest.mark.parametrize("ent_coef", ["lin_0.2", LinearSchedule(0.2, 0.0, 1.0)])
def test_entropy_coefficient_falls_with_the_progress_of_the_training(ent_coef, tmp_path):
    QA2C("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), ent_coef=ent_coef, seed=0, device="cpu").save(tmp_path / "model")
    model = QA2C.load(tmp_path / "model", make_vec_env("CartPole-v1", 4, seed=0), device="cpu")
    rows = Rows()
    model.set_logger(Logger(folder=None, output_formats=[rows]))
    model.learn(80, log_interval=1)
    # Each update follows a rollout of 20 of the 80 steps; the last one is not written any more
    logged = [update_figures(row) for row in rows.rows[1:]]
    assert [row["ent_coef"] for row in logged] == pytest.approx([0.2 * remaining for remaining in (0.75, 0.5, 0.25)])
    for row in logged:
        total = 0.1 * row["policy_loss"] + row["ent_coef"] * row["entropy_loss"] + 0.5 * row["value_loss"]
        assert row["loss"] == pytest.approx(total, rel=1e-5)


class FallingEntropyCoefficient(BaseCallback):
    """As users of SB3 write it."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        self.model.ent_coef = np.float64(self.model.ent_coef * 0.5)


@pytest.mark.parametrize("algorithm", [QA2C, functools.partial(QPPO, n_steps=8, batch_size=8, n_epochs=1)])
def test_entropy_coefficient_that_a_callback_changes_is_resumed(algorithm, tmp_path, recwarn):
    def train(folder, stop=math.inf):
        model = algorithm("MlpPolicy", make_vec_env("CartPole-v1", 2, seed=0), ent_coef=0.5, seed=0, device="cpu")
        checkpoints = ExactCheckpointCallback(tmp_path / folder, save_freq=16, verbose=0)
        return model.learn(160, [FallingEntropyCoefficient(), InterruptAt(stop), checkpoints])

    whole = train("whole")
    for stop in (60, 110):
        with pytest.raises(Interrupted):
            train("parts", stop)
    parts = train("parts")
    assert parts.ent_coef == whole.ent_coef == 0.5 ** (1 + whole._n_updates // getattr(whole, "n_epochs", 1))
    np.testing.assert_array_equal(parameters(whole), parameters(parts))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("algorithm", "value"), [(QA2C, -1e-3), (QA2C, float("nan")), (QPPO, None), (QPPO, "log_1e-3"), (REINFORCE, "1e-3")]
)
def test_other_learning_rates_are_refused_by_name(value, algorithm):
    with pytest.raises(ValueError, match=f"`learning_rate` must be.*{value}"):
        algorithm("MlpPolicy", make_vec_env("CartPole-v1", 8), value)


@pytest.mark.parametrize("schedule", [lambda progress: 1e-3 * progress, lambda progress: 1e-3 * progress**0.5])
def test_learning_rate_ends_at_the_planned_steps_if_the_last_rollout_exceeds_them(schedule):
    """SB3's progress is negative then, so that RL Zoo's `lin_` gives a negative rate, and a root is a complex number."""
    model = QA2C("MlpPolicy", make_vec_env("CartPole-v1", 2, seed=0), schedule, seed=0, device="cpu").learn(15)
    assert model.num_timesteps > 15
    assert model.policy.optimizer.param_groups[0]["lr"] == 0


def test_learning_rate_that_becomes_negative_is_refused(value=-0.5):
    model = QA2C("MlpPolicy", "CartPole-v1", lambda progress: 1e-3 if progress > 0.6 else value, n_steps=10, device="cpu")
    with pytest.raises(ValueError, match=f"`learning_rate` must be a finite number, at least 0, but {value}"):
        model.learn(20)
    assert np.isfinite(parameters(model)).all()


@pytest.mark.parametrize("use_rms_prop", [True, False])
@pytest.mark.parametrize(
    "policy_kwargs",
    [None, dict(net_arch=[8]), dict(optimizer_kwargs=dict(weight_decay=0.1)), dict(optimizer_class=th.optim.RMSprop)],
    ids=str,
)
def test_load_takes_the_policy_kwargs_of_the_constructor(policy_kwargs, use_rms_prop, tmp_path):
    arguments = dict(policy_kwargs=policy_kwargs, use_rms_prop=use_rms_prop, rms_prop_eps=1e-4)
    saved = QA2C("MlpPolicy", "CartPole-v1", device="cpu", **arguments)
    saved.save(tmp_path / "model")
    for same in (policy_kwargs, saved.policy_kwargs):
        loaded = QA2C.load(tmp_path / "model", device="cpu", policy_kwargs=same)
        assert type(loaded.policy.optimizer) is type(saved.policy.optimizer)
        assert loaded.policy.optimizer_kwargs == saved.policy.optimizer_kwargs
    for other in (dict(net_arch=[16]), dict(optimizer_class=th.optim.SGD), dict(optimizer_kwargs=dict(eps=1e-3))):
        with pytest.raises(ValueError, match=r"has the policy_kwargs \{.*, but \{.*were given: leave them out"):
            QA2C.load(tmp_path / "model", device="cpu", policy_kwargs=other)


EVERY_ALGORITHM = [*ALGORITHMS, pytest.param(REINFORCE, id="REINFORCE")]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_an_observation_that_is_nan_is_an_error_that_says_how_to_find_it(algorithm, first):
    class NanFrom(ScriptedEnv):
        def observe(self, ended=False):
            return super().observe(ended) * (np.nan if self.t >= first else 1)

    message = r"NaN among its parameters.*`VecCheckNan\(env, raise_exception=True\)`"
    env = DummyVecEnv([lambda: NanFrom([1.0] * 20, terminations=(8, 17))])
    model = algorithm("MlpPolicy", env, seed=0, device="cpu")
    with pytest.raises(ValueError, match=message):
        model.learn(16)
    assert model.num_timesteps == first
    with pytest.raises(ValueError, match=message):
        model.predict(np.full((1, 1), np.nan, dtype=np.float32))
    # What is found with it is said as it is, as is any other error
    with pytest.raises(ValueError, match=r"found .* in observations"):
        algorithm("MlpPolicy", VecCheckNan(env, raise_exception=True), device="cpu").learn(16)


@pytest.mark.parametrize("policy", ["CnnPolicy", "MultiInputPolicy"])
@pytest.mark.parametrize("algorithm", [*EVERY_ALGORITHM, PQN])
def test_images_that_are_too_small_are_refused_with_the_smallest_size(algorithm, policy):
    def make(height, width):
        env = FakeImageEnv(screen_height=height, screen_width=width, n_channels=1)
        if policy == "MultiInputPolicy":
            env = TransformObservation(env, lambda obs: dict(image=obs), spaces.Dict(image=env.observation_space))
        return algorithm(policy, env, device="cpu")

    make(36, 36)
    for size in ((35, 36), (36, 35)):
        with pytest.raises(ValueError, match=r"too small.*NatureCNN.* at least 36 x 36.*ResizeObservation.*'MlpPolicy'"):
            make(*size)
    # Another error of the network stays what it is
    with pytest.raises(RuntimeError, match=r"^mine$"):
        kwargs = dict(features_extractor_class=Mock(side_effect=RuntimeError("mine")))
        algorithm("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, device="cpu")
