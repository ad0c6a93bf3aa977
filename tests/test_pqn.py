"""PQN: its targets, its actions, its update, and that it learns and resumes."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch as th
import yaml
from gymnasium import spaces
from rl_zoo3.utils import ALGOS
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from sb3_qac import PQN, QA2C
from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.common.torch_layers import LeanNatureCNN, SharedMlp
from sb3_qac.diagnose import diagnose_model
from sb3_qac.resume import ExactCheckpointCallback
from sb3_qac.study.diagnosis_tables import diagnosis_tables
from sb3_qac.study.grid import make_grid
from sb3_qac.study.manager import StudyManager
from sb3_qac.zoo import presets
from tests.envs import ENDS, InterruptAt, Interrupted, ScriptedEnv
from tests.test_qa2c import Rows, parameters, update_figures

GAMMA, LAMBDA = 0.9, 0.65
REWARDS = [[1.0, 2.0, -3.0, 4.0, 5.0, 0.5], [-1.0, 0.25, 2.0, 8.0, -4.0, 1.0]]
LEAN = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=dict(layer_norm="all", dtype="bfloat16"))
LAYER_NORM = dict(features_extractor_class=SharedMlp, features_extractor_kwargs=dict(layer_norm=True), net_arch=[])
SMALL = dict(n_steps=8, batch_size=8, n_epochs=2, seed=0, device="cpu")


def with_rollout(model):
    """:return: the model with a rollout to train on"""
    _, callback = model._setup_learn(10**6)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def q_values(model, observations):
    with th.no_grad():
        return model.policy.predict_q_values(th.as_tensor(observations, dtype=th.float32))


@pytest.mark.parametrize(("terminations", "truncations"), ENDS)
def test_returns_of_the_rollout_buffer_are_the_targets_of_q_lambda(terminations, truncations):
    envs = [lambda: ScriptedEnv(REWARDS[0], terminations, truncations), lambda: ScriptedEnv(REWARDS[1])]
    model = PQN("MlpPolicy", DummyVecEnv(envs), gamma=GAMMA, gae_lambda=LAMBDA, **{**SMALL, "n_steps": 6, "batch_size": 6})
    with th.no_grad():
        model.policy.q_net.bias += th.tensor([3.0, -2.0, 7.0])
    with_rollout(model)
    for i, ends in enumerate([(terminations, truncations), ((), ())]):
        returns = np.zeros(7)
        returns[6] = best = q_values(model, [[6.0]]).max().item()
        for t in reversed(range(6)):
            following = LAMBDA * returns[t + 1] + (1 - LAMBDA) * best
            if t in ends[0]:
                following = 0.0
            elif t in ends[1]:
                following = q_values(model, [[t + 1.5]]).max().item()
            returns[t] = REWARDS[i][t] + GAMMA * following
            best = q_values(model, [[float(t)]]).max().item()
        np.testing.assert_allclose(model.rollout_buffer.returns[:, i], returns[:6], rtol=1e-5)


def test_actions_are_greedy_but_for_the_exploration_rate():
    model = PQN("MlpPolicy", DummyVecEnv([lambda: ScriptedEnv(REWARDS[0])]), **SMALL)
    n_actions = model.action_space.n
    obs = np.random.default_rng(0).normal(size=(4000, 1)).astype(np.float32)
    greedy = q_values(model, obs).argmax(dim=1).numpy()
    for rate, tolerance in ((0.0, 0.0), (0.4, 0.03), (1.0, 0.03)):
        model.exploration_rate = rate
        with th.no_grad():
            taken, values, log_probs = model.policy(th.as_tensor(obs))
        # By default, and as SB3's `evaluate_policy` and RL Zoo's `enjoy` ask for them
        for actions in (model.predict(obs)[0], model.predict(obs, deterministic=True)[0]):
            np.testing.assert_array_equal(actions, greedy)
        # Random actions are greedy by chance too
        probs = np.where(np.arange(n_actions) == greedy[:, None], 1 - rate, 0) + rate / n_actions
        for actions in (model.predict(obs, deterministic=False)[0], taken.numpy()):
            frequencies = np.bincount(actions, minlength=n_actions) / len(actions)
            assert frequencies == pytest.approx(probs.mean(axis=0), abs=tolerance)
            assert (actions != greedy).mean() == pytest.approx(rate * (1 - 1 / n_actions), abs=tolerance)
        th.testing.assert_close(values.squeeze(1), q_values(model, obs).max(dim=1).values)
        assert not log_probs.any()
        with th.no_grad():
            q, all_log_probs = model.policy.evaluate_all_actions(th.as_tensor(obs))
        th.testing.assert_close(q, q_values(model, obs))
        np.testing.assert_allclose(all_log_probs.exp(), probs, atol=1e-6)
    with pytest.raises(ValueError, match=r"`exploration_rate` must be .* between 0 and 1, but 1.5"):
        model.exploration_rate = 1.5


def test_exploration_rate_is_logged_with_the_rollout_if_an_evaluation_is_in_between():
    env = make_vec_env("CartPole-v1", 1)
    model = PQN("MlpPolicy", env, exploration_fraction=1.0, **SMALL)
    model.set_logger(Logger(None, [output := Rows()]))
    model.learn(24, EvalCallback(env, eval_freq=8, n_eval_episodes=1, verbose=0))
    rows = [row for row in output.rows if "time/iterations" in row]
    rates = [row["rollout/exploration_rate"] for row in rows]
    assert rates == pytest.approx([1 - 0.99 * i / 3 for i in range(3)])
    assert any("eval/mean_reward" in row for row in output.rows)


def test_exploration_rate_falls_with_the_progress_of_the_training_and_is_saved(tmp_path):
    rates = []

    class Rates(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            rates.append(self.model.exploration_rate)

    arguments = dict(exploration_fraction=0.5, exploration_final_eps=0.2)
    model = PQN("MlpPolicy", make_vec_env("CartPole-v1", 2), **SMALL, **arguments).learn(160, Rates())
    # After each tenth of the training
    assert rates == pytest.approx([1 - 0.8 * min(i / 10 / 0.5, 1) for i in range(10)])
    rates.clear()
    # In a second training too
    model.learn(32, Rates())
    assert rates == pytest.approx([1.0, 0.2])
    model.save(tmp_path / "model")
    assert PQN.load(tmp_path / "model").exploration_rate == model.exploration_rate == pytest.approx(0.2)


@pytest.mark.slow
def test_resumed_training_on_native_atari_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    network = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=dict(features_dim=8, layer_norm="all"))

    def train(folder, stop=10**9):
        env = VecFrameStack(make_ale_vec_env("PongNoFrameskip-v4", n_envs=2, seed=0), 4)
        model = PQN("CnnPolicy", env, "lin_1e-3", policy_kwargs=copy.deepcopy(network), **{**SMALL, "batch_size": 16})
        checkpoints = ExactCheckpointCallback(tmp_path / folder, save_freq=16, verbose=0)
        try:
            return parameters(model.learn(64, [InterruptAt(stop), checkpoints]))
        finally:
            env.close()

    whole = train("whole")
    with pytest.raises(Interrupted):
        train("parts", 40)
    np.testing.assert_array_equal(train("parts"), whole)


def test_learning_rate_ends_at_zero_if_the_last_rollout_exceeds_the_planned_steps():
    # The third rollout ends at 48
    model = PQN("MlpPolicy", make_vec_env("CartPole-v1", 2), learning_rate=lambda progress: 0.1 * progress, **SMALL).learn(40)
    assert [group["lr"] for group in model.policy.optimizer.param_groups] == [0.0]


def test_update_is_a_step_of_regression_on_the_targets_for_each_minibatch():
    """Two minibatches by hand. The targets are those of the rollout, not of the network that has moved."""
    policy_kwargs = dict(LAYER_NORM, optimizer_class=th.optim.SGD)
    arguments = dict(learning_rate=0.05, max_grad_norm=0.5, policy_kwargs=policy_kwargs)
    model = with_rollout(PQN("MlpPolicy", make_vec_env("CartPole-v1", 2, seed=0), **{**SMALL, "n_epochs": 1}, **arguments))
    by_hand, buffer = copy.deepcopy(model.policy), copy.deepcopy(model.rollout_buffer)
    before = parameters(model).copy()
    np.random.seed(0)
    model.train()

    # SB3 flattens the rollout when the first minibatch is drawn
    next(buffer.get(1))
    np.random.seed(0)
    losses, gradient_norms, state_values = [], [], []
    for indices in np.random.permutation(16).reshape(2, 8):
        observations, actions = th.as_tensor(buffer.observations[indices]), th.as_tensor(buffer.actions[indices])
        q = by_hand.predict_q_values(observations)
        state_values.append(q.max(dim=1).values.mean().item())
        errors = th.as_tensor(buffer.returns[indices]) - q.gather(1, actions)
        weights = list(by_hand.parameters())
        losses.append(errors.square().mean())
        gradients = th.autograd.grad(losses[-1], weights)
        norm = th.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        gradient_norms.append(norm)
        with th.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.05 * gradient * min(0.5 / norm, 1)
    expected = th.nn.utils.parameters_to_vector(by_hand.parameters()).detach().numpy()
    np.testing.assert_allclose(parameters(model), expected, atol=1e-6)
    assert np.abs(parameters(model) - before).max() > 1e-3
    figures = dict(value_loss=th.stack(losses).mean().item(), n_updates=1, learning_rate=0.05)
    figures["grad_norm"] = th.stack(gradient_norms).mean().item()
    figures |= dict(state_value=np.mean(state_values), q_target=buffer.returns.mean())
    figures["explained_variance"] = 1 - np.var(buffer.returns - buffer.values) / np.var(buffer.returns)
    assert update_figures(model.logger.name_to_value) == pytest.approx(figures, rel=1e-4)


def test_there_is_no_actor_and_the_optimizer_is_that_of_the_paper():
    model = PQN("CnnPolicy", FakeImageEnv(screen_height=40, screen_width=40, n_channels=1), **SMALL)
    names = [name for name, _ in model.policy.named_parameters()]
    assert {name.partition(".")[0] for name in model.policy.state_dict()} == {
        "features_extractor",
        "q_net",
        "exploration_rate",
    }
    assert not any(hasattr(model.policy, name) for name in ("get_distribution", "evaluate_actions", "action_dist"))
    assert type(model.policy.optimizer) is th.optim.RAdam
    assert len(model.policy.optimizer.param_groups[0]["params"]) == len(names)
    before = parameters(model).copy()
    model.learn(16)
    assert np.isfinite(parameters(model)).all() and (parameters(model) != before).any()
    # Layers such as dropout are on in the updates
    assert model.policy.training
    # SB3's epsilon
    adam = PQN("MlpPolicy", "CartPole-v1", policy_kwargs=dict(optimizer_class=th.optim.Adam), **SMALL).policy.optimizer
    assert type(adam) is th.optim.Adam and adam.defaults["eps"] == 1e-5


POLICIES = [
    pytest.param("MlpPolicy", {}, spaces.Box(-1, 1, (4,)), id="two layers"),
    pytest.param("MlpPolicy", dict(net_arch=dict(pi=[5], vf=[8, 7]), dueling=True), spaces.Box(-1, 1, (4,)), id="dueling"),
    pytest.param("MlpPolicy", LAYER_NORM, spaces.Box(-1, 1, (4,)), id="LayerNorm"),
    pytest.param("CnnPolicy", {}, spaces.Box(0, 255, (1, 40, 40), np.uint8), id="images"),
    pytest.param("CnnPolicy", LEAN, spaces.Box(0, 255, (1, 40, 40), np.uint8), id="pixels"),
    pytest.param("MultiInputPolicy", {}, spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)), id="Dict"),
]


@pytest.mark.parametrize(("name", "policy_kwargs", "observation_space"), POLICIES)
def test_network_and_first_weights_are_those_of_the_critic_of_qa2c(name, policy_kwargs, observation_space, tmp_path):
    arguments = (observation_space, spaces.Discrete(3), lambda _: 1e-3)
    policies = []
    for aliases in (PQN.policy_aliases, QA2C.policy_aliases):
        th.manual_seed(0)
        policies.append(aliases[name](*arguments, **copy.deepcopy(policy_kwargs)))
    policy, actor_critic = policies
    policy.exploration_rate.fill_(0.3)
    policy.save(tmp_path / "policy")
    obs, _ = policy.obs_to_tensor(
        {k: v[None] for k, v in x.items()} if isinstance(x := observation_space.sample(), dict) else x
    )
    with th.no_grad():
        expected = actor_critic.predict_q_values(obs)
        for each in (policy, type(policy).load(tmp_path / "policy")):
            th.testing.assert_close(each.predict_q_values(obs), expected, rtol=0, atol=0)
            th.testing.assert_close(each.predict_values(obs), expected.max(dim=1, keepdim=True).values, rtol=0, atol=0)
            assert each.exploration_rate == policy.exploration_rate


def test_agents_of_before_it_was_public_load():
    """Its policy was that of an actor-critic then, whose actor had been removed."""
    env = FakeImageEnv(screen_height=40, screen_width=40, n_channels=1)
    policy = PQN("CnnPolicy", env, policy_kwargs=dict(net_arch=[8]), **SMALL).policy
    expected = {name: value + 1 for name, value in policy.state_dict().items()}
    older = {name.replace("mlp_extractor.", "mlp_extractor.value_net."): value for name, value in expected.items()}
    older |= {f"{prefix}{name}": value for name, value in older.items() for prefix in ("pi_", "vf_") if "features" in name}
    policy.load_state_dict(older)
    th.testing.assert_close(dict(policy.state_dict()), expected)


def test_resumed_training_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    """Stopped while the exploration rate falls."""

    def train(folder, stop=10**9):
        env = make_vec_env("CartPole-v1", 2, seed=0)
        model = PQN("MlpPolicy", env, lambda progress: 1e-3 * progress, exploration_fraction=0.8, **SMALL)
        return model.learn(300, [InterruptAt(stop), ExactCheckpointCallback(tmp_path / folder, save_freq=100, verbose=0)])

    whole = train("whole")
    with pytest.raises(Interrupted):
        train("parts", 150)
    parts = train("parts")
    np.testing.assert_array_equal(parameters(whole), parameters(parts))
    assert whole.policy.exploration_rate == parts.policy.exploration_rate


def test_environment_and_policy_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match=r"must be `Discrete`, .*but Box.* was given"):
        PQN("MlpPolicy", "Pendulum-v1", **SMALL)
    with pytest.raises(
        ValueError, match=r"`policy` must be 'MlpPolicy', 'CnnPolicy', 'MultiInputPolicy' or a subclass.*ActorCriticPolicy"
    ):
        PQN(ActorCriticPolicy, "CartPole-v1", **SMALL)
    env = IdentityEnv(dim=3)
    env.observation_space = spaces.Discrete(3, start=1)
    with pytest.raises(ValueError, match=r"Discrete\(3, start=1\) is not supported"):
        PQN("MlpPolicy", env, **SMALL)


def test_defaults_are_those_of_cleanrl():
    """Of its ``pqn_atari_envpool.py``, but for the learning rate, which falls to 0 there."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(PQN).parameters.items()}
    expected = dict(learning_rate=2.5e-4, n_steps=128, n_epochs=4, gamma=0.99, gae_lambda=0.65, max_grad_norm=10.0)
    expected |= dict(exploration_initial_eps=1, exploration_final_eps=0.01, exploration_fraction=0.1)
    assert {name: defaults[name] for name in expected} == expected
    # 8 environments and 4 minibatches
    assert PQN("MlpPolicy", make_vec_env("CartPole-v1", 8)).batch_size == 8 * 128 // 4
    # A smaller rollout is one minibatch
    assert PQN("MlpPolicy", "CartPole-v1").batch_size == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(gae_lambda=1.1), "`gae_lambda`.*1.1"),
        (dict(learning_rate="linear"), "`learning_rate` must be a number.*'linear'"),
        (dict(batch_size=2.5), "`batch_size`.*2.5"),
        (dict(policy="QPolicy"), "`policy` must be 'MlpPolicy', 'CnnPolicy' or 'MultiInputPolicy'.*'QPolicy'"),
        (dict(exploration_final_eps=-0.1), "`exploration_final_eps`.*-0.1"),
        (dict(n_epochs=0), "`n_epochs`.*0"),
        (dict(exploration_fraction=0), "`exploration_fraction`.* above 0 and at most 1, but 0"),
        (dict(max_grad_norm=-1), "`max_grad_norm`.*-1"),
        # Not "no clipping": nothing would be learned
        (dict(max_grad_norm=0), "`max_grad_norm`.* above 0, but 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        PQN(**{"policy": "MlpPolicy", "env": "CartPole-v1", **SMALL, **arguments})


def test_bad_arguments_of_load_are_refused_by_name(tmp_path):
    PQN("MlpPolicy", "CartPole-v1", **SMALL).save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"`gamma`.*2"):
        PQN.load(tmp_path / "model", gamma=2)


def test_truncated_minibatches_are_warned_of():
    with pytest.warns(UserWarning, match="`batch_size` is 12, but the rollout has .* = 8 . 2 steps.*truncated to 4"):
        PQN("MlpPolicy", make_vec_env("CartPole-v1", 2), **{**SMALL, "batch_size": 12})


def test_constructor_begins_as_that_of_ppo():
    ours, ppo = (list(inspect.signature(kind).parameters) for kind in (PQN, PPO))
    assert ours[:8] == ppo[:8] and "gae_lambda" == ours[7]


def test_weights_are_prepared_once_for_a_rollout(monkeypatch):
    model = PQN("CnnPolicy", FakeImageEnv(screen_height=40, screen_width=40, n_channels=1), policy_kwargs=LEAN, **SMALL)
    conversions, convert = [], LeanNatureCNN._convert
    monkeypatch.setattr(LeanNatureCNN, "_convert", lambda *arguments: conversions.append(1) or convert(*arguments))
    with_rollout(model)
    assert len(conversions) == 1


def test_critic_and_branches_are_diagnosed_at_the_exploration_rate_of_the_model():
    """The reward is 1 for the action that has the number of the state, and the critic knows it."""
    env = make_vec_env(IdentityEnv, 4, seed=0, env_kwargs=dict(dim=2, ep_length=10))
    model = PQN("MlpPolicy", env, gamma=0.0, policy_kwargs=dict(net_arch=[]), **SMALL)
    with th.no_grad():
        model.policy.q_net.weight.copy_(th.eye(2))
        model.policy.exploration_rate.fill_(0.4)
    result = diagnose_model(model, n_rollouts=20, n_states=8, n_repeats=2)
    assert model.policy.exploration_rate == pytest.approx(0.4) and result["estimators"] == {}
    # The probabilities are 0.8 and 0.2
    assert result["critic"]["entropy"] == pytest.approx(-0.8 * np.log(0.8) - 0.2 * np.log(0.2), abs=1e-3)
    assert result["critic"]["improbable_actions"] == pytest.approx(0.2, abs=1e-3)
    assert result["critic"]["explained_variance"] == result["branches"]["right_signs"] == pytest.approx(1)
    assert result["critic"]["slope"] == pytest.approx(1, abs=3 * result["critic"]["slope_error"])
    assert result["branches"]["slope"] == pytest.approx(1)
    table, _, row, _, branches, *_ = diagnosis_tables([result])
    assert table.startswith("| steps | entropy") and row.startswith("| 0 |") and branches.startswith("| steps | states")


def test_gradients_need_not_be_clipped():
    model = PQN("MlpPolicy", "CartPole-v1", **{**SMALL, "max_grad_norm": None})
    assert model.learn(model.n_steps).max_grad_norm == math.inf


def test_non_finite_loss_keeps_the_last_good_update():
    model = PQN("MlpPolicy", DummyVecEnv([lambda: ScriptedEnv([1.0] * 8 + [float("nan")] * 10)]), **SMALL).learn(8)
    last_good = parameters(model).copy()
    with pytest.raises(ValueError, match="value_loss is nan"):
        model.learn(8, reset_num_timesteps=False)
    np.testing.assert_array_equal(parameters(model), last_good)


ENVS = [name for name in yaml.safe_load(presets("pqn").read_text()) if "-v" in name]


@pytest.mark.parametrize(
    "env_id", [name if "MinAtar" in name else pytest.param(name, marks=pytest.mark.slow) for name in ENVS]
)
def test_a_study_trains_it_with_its_presets(env_id, tmp_path):
    pytest.importorskip("minatar")
    settings = dict(deterministic=False, wandb="disabled", device="cpu")
    run, other = make_grid(env_id, ["pqn", "a2c"], [0], tmp_path, n_eval_episodes=1, **settings)
    assert run.deterministic and not other.deterministic
    model, _ = (manager := StudyManager(run)).setup_experiment()
    for env in manager.envs:
        env.close()
    assert type(model) is PQN is ALGOS["pqn"]
    (evaluation,) = [callback for callback in manager.callbacks if isinstance(callback, EvalCallback)]
    # It explores in training only
    assert evaluation.deterministic
    # On MinAtar the setting without the normalization of the paper is ahead over the five games
    normalized = any(isinstance(module, th.nn.LayerNorm | th.nn.GroupNorm) for module in model.policy.modules())
    assert normalized == (not env_id.startswith("MinAtar"))
    assert (model.n_steps * model.n_envs) % model.batch_size == 0 and model.lr_schedule(0) == 0


def test_train_and_enjoy_commands_of_rl_zoo(tmp_path, rl_zoo):
    settings = ["--algo", "pqn", "--env", "CartPole-v1", "-n", 200]
    rl_zoo("train", *settings, "--eval-freq", -1, "-f", "logs", cwd=tmp_path)
    assert "Loading logs/pqn" in rl_zoo("enjoy", *settings, "-f", "logs", "--no-render", cwd=tmp_path)


def test_learns_the_identity():
    """An untrained policy scores some 50 of 100."""
    env = DummyVecEnv([lambda: IdentityEnv(2)] * 4)
    arguments = dict(n_steps=16, batch_size=32, gamma=0.0, learning_rate=1e-3, policy_kwargs=LAYER_NORM, seed=0)
    model = PQN("MlpPolicy", env, **arguments)
    untrained, _ = evaluate_policy(model, env, n_eval_episodes=5, warn=False)
    model.learn(2_000)
    trained, _ = evaluate_policy(model, env, n_eval_episodes=5, warn=False)
    assert untrained < 70 < 95 < trained


@pytest.mark.slow
def test_learns_cartpole():
    """With the settings of the preset. An untrained policy stands for some 20 steps."""
    env = make_vec_env("CartPole-v1", 8, seed=0)
    arguments = dict(n_steps=64, batch_size=128, gae_lambda=0.95, exploration_fraction=0.5, exploration_final_eps=0.05)
    arguments.update(learning_rate=lambda progress: 1e-3 * progress, policy_kwargs=LAYER_NORM, seed=0, device="cpu")
    model = PQN("MlpPolicy", VecNormalize(env, norm_obs=False), **arguments).learn(60_000)
    returns, _ = evaluate_policy(model, env, n_eval_episodes=20, warn=False)
    assert returns > 450
