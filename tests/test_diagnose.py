"""What diagnoses say of estimators and of critics, where the answer is known."""

import copy
import json
import math
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_qac import QA2C
from sb3_qac.__main__ import main
from sb3_qac.common.minatar import register_minatar_envs
from sb3_qac.common.wrappers import EpisodeReplay
from sb3_qac.diagnose import diagnose_model
from sb3_qac.diagnose.branching import (
    Branches,
    horizon_of,
    judge_branches,
    play_all_actions,
    set_with_new_randomness,
)
from sb3_qac.diagnose.critic import judge_critic
from sb3_qac.diagnose.gradients import (
    A2C_WEIGHT,
    ALL_ACTION,
    ESTIMATORS,
    Batch,
    GradientMoments,
    batch_of,
    estimators_of,
    gradient_of,
    scale_of,
)
from sb3_qac.resume.state import get_state, set_state
from sb3_qac.study import diagnosis
from sb3_qac.study.diagnosis import diagnose_run
from sb3_qac.study.diagnosis_tables import diagnosis_tables
from sb3_qac.study.grid import make_grid, run_study
from sb3_qac.study.loading import load_study
from sb3_qac.study.manager import environments_of
from sb3_qac.study.report import markdown
from sb3_qac.study.snapshots import normalize_as, points_of
from tests.test_qa2c import parameters
from tests.test_qppo import make_model, with_rollout


def moments_of(gradients):
    """:param gradients: By estimator, shape (n_rollouts, n_parameters)"""
    moments = GradientMoments(list(gradients), len(next(iter(gradients.values()))))
    for rollout in zip(*gradients.values(), strict=True):
        moments.add(dict(zip(gradients, rollout, strict=True)))
    return moments.summary()


def test_moments_are_those_of_the_distribution():
    n, n_parameters = 4000, 3
    noise = th.as_tensor(np.random.default_rng(0).standard_normal((2, n, n_parameters)), dtype=th.float32)
    summary = moments_of({"a": th.tensor([3.0, 4.0, 0.0]) + noise[0], "b": th.tensor([0.0, 5.0, 0.0]) + 2 * noise[1]})
    # Of 3 parameters with variance 1 and 4; expected gradients (3, 4, 0) and (0, 5, 0) have the cosine 20 / 25
    for name, variance in (("a", 3.0), ("b", 12.0)):
        assert summary[name]["variance"] == pytest.approx(variance, abs=4 * summary[name]["variance_error"])
        assert summary[name]["gradient_square"] == pytest.approx(25.0, abs=4 * summary[name]["gradient_square_error"])
    assert summary["a"]["cosine"] == pytest.approx(1.0) and summary["a"]["difference"] == 0
    assert summary["b"]["cosine"] == pytest.approx(0.8, abs=4 * summary["b"]["cosine_error"])
    # The variance of an estimated variance of n normal values is 2 / n; the error's own error is a third, for ten blocks
    assert summary["a"]["variance_error"] == pytest.approx(np.sqrt(3 * 2 / n), rel=0.8)


def test_moments_of_a_few_gradients_are_those_of_all_pairs_of_rollouts():
    """By hand, with the errors of a jackknife over blocks, which are single rollouts here."""
    gradients = {"a": th.tensor([[3.0, 0.0], [3.0, 1.0], [2.0, 2.0], [4.0, 1.0]]), "b": th.tensor([[1.0, 1.0]] * 4)}

    def figures_of(name, rollouts):
        mine, reference = gradients[name][rollouts], gradients["a"][rollouts]
        pairs = [(i, j) for i in range(len(rollouts)) for j in range(len(rollouts)) if i != j]

        def expected(x, y):
            return np.mean([float(x[i] @ y[j]) for i, j in pairs])

        square, variance = expected(mine, mine), float(mine.var(dim=0).sum())
        return {
            "gradient_square": square,
            "variance": variance,
            "noise_to_signal": variance / square,
            "cosine": expected(mine, reference) / np.sqrt(square * expected(reference, reference)),
            "difference": np.mean([float((x - y).norm() / y.norm()) for x, y in zip(mine, reference, strict=True)]),
        }

    summary = moments_of(gradients)
    for name in gradients:
        expected = figures_of(name, range(4))
        without = [figures_of(name, [i for i in range(4) if i != left_out]) for left_out in range(4)]
        errors = {f"{figure}_error": np.sqrt(3 * np.var([x[figure] for x in without])) for figure in expected}
        assert summary[name] == pytest.approx({**expected, **errors}, rel=1e-4, abs=1e-6)
    # Between 2 and 20 standard errors from 0
    assert 2 < summary["a"]["gradient_square"] / summary["a"]["gradient_square_error"] < 20


def test_rollouts_are_divided_into_blocks_of_the_same_size():
    moments = GradientMoments(["a"], 25)
    for _ in range(25):
        moments.add({"a": th.ones(1)})
    assert moments.counts.sum() == 25 and set(moments.counts) == {2, 3}


def test_estimators_have_the_weights_of_their_names():
    generator = th.Generator().manual_seed(0)
    logits, q_values = (th.randn(5, 3, generator=generator, dtype=th.float64) for _ in range(2))
    actions, returns = th.tensor([[0], [1], [2], [0], [1]]), th.randn(5, 1, generator=generator, dtype=th.float64)
    logits.requires_grad_()
    log_probs = logits.log_softmax(dim=1)
    probs = log_probs.detach().exp()
    values = (probs * q_values).sum(1, keepdim=True)
    taken = th.zeros(5, 3, dtype=th.float64).scatter(1, actions, 1.0)
    q_taken = q_values.gather(1, actions)
    # Of log pi(a|s) for each action
    weights = {
        "all-action": probs * q_values,
        "all-action, baseline": probs * (q_values - values),
        "all-action, beta=1": probs * (q_values - values) + taken * (returns - q_taken),
        "sampled": taken * q_taken,
        "sampled, baseline": taken * (q_taken - values),
        "sampled, return (REINFORCE's weight)": taken * returns,
        "sampled, return - V~ (A2C's weight)": taken * (returns - values),
    }
    assert set(weights) == set(ESTIMATORS)
    batch = Batch(q_values, log_probs, values, actions, returns)
    for name, estimator in ESTIMATORS.items():
        (gradient,) = th.autograd.grad(estimator(batch), [logits], retain_graph=True)
        (expected,) = th.autograd.grad(-(log_probs * weights[name]).sum() / 5, [logits], retain_graph=True)
        th.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_noise_alone_is_not_a_gradient():
    noise = th.as_tensor(np.random.default_rng(0).standard_normal((500, 4)), dtype=th.float32)
    summary = moments_of({"noise": noise})["noise"]
    assert summary["gradient_square"] == pytest.approx(0, abs=4 * summary["gradient_square_error"])
    assert summary["variance"] == pytest.approx(4, rel=0.2)
    assert np.isnan(summary["noise_to_signal"]) and np.isnan(summary["cosine"])


def test_the_slope_tells_a_critic_that_is_right_from_one_that_is_not():
    rng = np.random.default_rng(0)
    n_steps, n_envs, n_actions = 2000, 8, 4
    true_q = rng.standard_normal((n_steps, n_envs, n_actions))
    probs = rng.dirichlet(np.ones(n_actions), (n_steps, n_envs))
    actions = (probs.cumsum(axis=2) < rng.random((n_steps, n_envs, 1))).sum(axis=2)
    returns = np.take_along_axis(true_q, actions[..., None], axis=2)[..., 0] + rng.standard_normal((n_steps, n_envs))
    for critic, slope in ((true_q, 1.0), (2 * true_q, 0.5), (rng.standard_normal(true_q.shape), 0.0), (-true_q, -1.0)):
        judged = judge_critic(critic, probs, actions, returns)
        for name in ("slope", "slope_improbable"):
            # The offsets of V~ between the two critics are noise here, they are independent of the action
            assert judged[name] == pytest.approx(slope, abs=5 * judged[f"{name}_error"])
            assert judged[f"{name}_error"] < 0.1
    assert judge_critic(true_q, probs, actions, returns)["explained_variance"] == pytest.approx(0.5, abs=0.05)


def test_actions_with_less_than_half_of_the_uniform_probability_are_improbable():
    probs = np.tile([0.45, 0.4, 0.14, 0.01], (3, 2, 1))
    judged = judge_critic(np.zeros((3, 2, 4)), probs, np.zeros((3, 2), dtype=int), np.zeros((3, 2)))
    # Less than an eighth
    assert judged["improbable_actions"] == pytest.approx(0.01)
    assert judged["entropy"] == pytest.approx(-(probs[0, 0] * np.log(probs[0, 0])).sum())


class TwoSteps(gym.Env):
    """Episodes of two steps. The reward of the first depends on the action, and so do its size and that of the second."""

    observation_space, action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(3)

    def __init__(self, number):
        self.number = number

    def reset(self, *, seed=None, options=None):
        self.second = False
        return 2 * self.number, {}

    def step(self, action):
        reward = self.number + 1.0 if self.second else (self.number + 1.0) * action
        ended, self.second = self.second, not self.second
        return 2 * self.number + 1, reward, ended, False, {}


def linear_model(env, q_values, **kwargs):
    """:return: a uniform policy with these Q-values, shape (n_states, n_actions)"""
    model = QA2C("MlpPolicy", env, seed=0, device="cpu", policy_kwargs=dict(net_arch=[]), **kwargs)
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.zero_()
        model.policy.q_net.weight.copy_(th.as_tensor(q_values).T)
    return model


def test_the_critic_is_judged_by_the_returns_of_its_own_environment_and_episode():
    numbers = iter(range(2))
    env = make_vec_env(lambda: TwoSteps(next(numbers)), 2)
    # The action of the first step, and half of the reward of the second
    q_values = [[size * (action + 0.5) for action in range(3)] if first else [size] * 3 for size in (1, 2) for first in (1, 0)]
    # Odd, so that rollouts begin within an episode
    model = linear_model(env, q_values, gamma=0.5, n_steps=7)
    right = diagnose_model(model, n_rollouts=10)["critic"]
    assert right["explained_variance"] == pytest.approx(1)
    assert right["entropy"] == pytest.approx(np.log(3))


def test_the_critic_is_not_judged_by_returns_that_it_bootstraps_itself():
    # Rewards are less than 5, but the critic claims 1000
    model = linear_model(make_vec_env(Luck, 2, seed=0), [[1000.0] * 2], gamma=0.5)
    # Five of 50 steps are left out
    assert diagnose_model(model, n_rollouts=10)["critic"]["return_scatter"] < 1000 * 0.5**6


def test_the_baseline_changes_the_sampled_gradient_and_not_the_all_action_one():
    model = QA2C("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    with th.no_grad():
        # As of a critic that has learnt the level of the returns
        model.policy.q_net.bias += 20
    before = [parameter.clone() for parameter in model.policy.parameters()]
    result = diagnose_model(model, n_rollouts=30)
    assert all(th.equal(x, y) for x, y in zip(before, model.policy.parameters(), strict=True))
    estimators = result["estimators"]
    assert list(estimators) == list(ESTIMATORS)
    # Rounding: some 1e-7 of Q-values that are 20, with advantages of some 0.05
    assert estimators["all-action, baseline"]["difference"] < 1e-3
    assert estimators["all-action, baseline"]["variance"] == pytest.approx(estimators[ALL_ACTION]["variance"], rel=1e-3)
    assert estimators["sampled"]["variance"] > 100 * estimators["sampled, baseline"]["variance"]
    # A weight without Q is that of the other estimator plus its correction
    assert estimators["sampled, return - V~ (A2C's weight)"]["variance"] > estimators[ALL_ACTION]["variance"]


def test_a_run_is_diagnosed_at_its_start_and_end(tmp_path):
    settings = dict(n_timesteps=500, eval_freq=500, n_eval_episodes=1, wandb="disabled", device="cpu")
    task1, a2c = make_grid("cartpole", ["task1", "a2c"], [0], tmp_path, **settings)
    assert run_study([task1, a2c]) == {}
    logs = sorted(tmp_path.rglob("events.out.tfevents*"))
    results = diagnose_run(Path(task1.folder), n_rollouts=5, n_points=2)
    assert [result["steps"] for result in results] == [0, 504]
    # It does not log where the training did
    assert len(logs) == 2 and sorted(tmp_path.rglob("events.out.tfevents*")) == logs
    assert json.loads((Path(task1.folder) / "diagnosis.json").read_text()) == results
    # 7 estimators and a critic at each of both points, and their heads
    assert len(list(diagnosis_tables(results))) == 2 * 7 + 2 + 1 + 2 + 2
    with pytest.raises(SystemExit, match=r"is a run of a2c, but only runs of qa2c, qppo and pqn can be diagnosed"):
        main(["diagnose", a2c.folder])


def test_a_run_without_an_actor_is_diagnosed_and_its_report_says_what_is_left_out(tmp_path):
    settings = dict(n_timesteps=512, eval_freq=512, n_eval_episodes=1, wandb="disabled", device="cpu")
    settings["hyperparams"] = dict(n_steps=8, batch_size=64, exploration_final_eps=0.2)
    (run,) = make_grid("cartpole", ["pqn"], [0], tmp_path, **settings)
    assert run_study([run]) == {}
    start, end = diagnose_run(Path(run.folder), n_rollouts=3, n_points=2)
    # The rate of exploration is that of the snapshot, 1 and 0.2
    assert start["critic"]["entropy"] == pytest.approx(math.log(2)) and start["estimators"] == {}
    assert end["critic"]["entropy"] == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1), abs=1e-3)
    text = markdown(load_study(tmp_path), None, None)
    assert "PQN has no actor, and so no first table." in text and "| estimator |" not in text


def test_results_of_runs_before_one_that_cannot_be_diagnosed_are_printed(monkeypatch, capsys):
    def diagnose_run(folder, *arguments):
        if folder.name == "bad":
            raise ValueError("no run of a study")
        return []

    monkeypatch.setattr(diagnosis, "diagnose_run", diagnose_run)
    with pytest.raises(SystemExit, match="diagnose: no run of a study"):
        main(["diagnose", "one/good", "bad"])
    assert "## one/good" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "function"),
    [("evaluate", "agents.evaluate_agent"), ("video", "video.record_videos"), ("diagnose", "diagnosis.diagnose_run")],
)
def test_json_has_null_where_a_number_is_not_finite(command, function, monkeypatch, capsys):
    monkeypatch.setattr(f"sb3_qac.study.{function}", lambda *arguments: {"some": [1.5, math.nan, -math.inf]})
    assert main([command, "run", "--json"]) == 0
    # NaN and Infinity are no JSON, but Python reads them
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed.get("run", printed) == {"some": [1.5, None, None]}


@pytest.mark.parametrize(
    ("arguments", "estimator"),
    [
        (dict(beta=0.0, shrinkage=0.0), ALL_ACTION),
        (dict(beta=1.0, shrinkage=0.0), "all-action, beta=1"),
        (dict(beta=0.3, shrinkage=0.0), "all-action, beta=0.3"),
        (dict(shrinkage=0.2), "all-action, beta=1, shrinkage=0.2"),
        (dict(beta=0.3, shrinkage=0.2), "all-action, beta=0.3, shrinkage=0.2"),
        (dict(policy_gradient="sampled"), A2C_WEIGHT),
        (dict(policy_gradient="sampled", normalize_advantage=False), A2C_WEIGHT),
    ],
)
def test_an_estimator_is_the_actors_gradient_in_qppos_first_minibatch(arguments, estimator):
    """With the critic's loss and the entropy left out; the KL divergence has no gradient there."""
    only_the_actor = dict(ent_coef=0.0, vf_coef=0.0, max_grad_norm=None, policy_kwargs=dict(optimizer_class=th.optim.SGD))
    model = with_rollout(make_model(batch_size=16, n_epochs=1, learning_rate=1.0, **only_the_actor, **arguments))
    model.sigma = 5.0
    next(model.rollout_buffer.get(16))
    batch = batch_of(model, model.rollout_buffer._get_samples(np.arange(16)))
    gradient = gradient_of(model, estimators_of(model)[estimator](batch) / scale_of(model, batch))
    before = parameters(model).copy()
    model.train()
    np.testing.assert_allclose(before - parameters(model), gradient, rtol=1e-3, atol=1e-6)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "estimator"),
    [
        (dict(beta=1.0), "all-action, beta=1"),
        (dict(beta=0.3, shrinkage=0.2), "all-action, beta=0.3, shrinkage=0.2"),
        (dict(beta=1.0, shrinkage=0.2, baseline=True), "all-action, beta=1, shrinkage=0.2"),
    ],
)
def test_an_estimator_is_the_actors_gradient_in_qa2cs_update(arguments, estimator):
    only_the_actor = dict(ent_coef=0.0, vf_coef=0.0, max_grad_norm=None, policy_kwargs=dict(optimizer_class=th.optim.SGD))
    env = make_vec_env("CartPole-v1", 2, seed=0)
    model = with_rollout(
        QA2C("MlpPolicy", env, learning_rate=1.0, pg_coef=1.0, seed=0, device="cpu", **only_the_actor, **arguments)
    )
    (data,) = model.rollout_buffer.get()
    gradient = gradient_of(model, estimators_of(model)[estimator](batch_of(model, data)))
    before = parameters(model).copy()
    model.train()
    np.testing.assert_allclose(before - parameters(model), gradient, rtol=1e-3, atol=1e-6)
    assert gradient.abs().max() > 1e-3


def test_the_scale_of_a_diagnosis_is_that_of_shrunk_advantages():
    scales = []
    for shrinkage in (0.0, 9.0):
        model = with_rollout(make_model(shrinkage=shrinkage, beta=0.0))
        next(model.rollout_buffer.get(16))
        scales.append(scale_of(model, batch_of(model, model.rollout_buffer._get_samples(np.arange(16)))))
    # By p / (p + 9)
    assert 0 < scales[1] < scales[0] / 10


def test_qppo_is_diagnosed_with_its_own_beta():
    result = diagnose_model(make_model(beta=0.25, shrinkage=0.0), n_rollouts=3)
    assert list(result["estimators"]) == [*ESTIMATORS, "all-action, beta=0.25"]
    assert result["scale"] > 0 and "branches" not in result
    assert diagnose_model(QA2C("MlpPolicy", "CartPole-v1", device="cpu"), n_rollouts=3)["scale"] == 1
    # Its own is A2C's weight, whatever its shrinkage
    assert list(estimators_of(make_model(policy_gradient="sampled"))) == list(ESTIMATORS)


def test_three_rollouts_are_the_fewest():
    model = QA2C("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    # With one left out, a gradient's square needs two others
    with pytest.raises(ValueError, match="`n_rollouts` must be a finite number, at least 3, but 2 was given"):
        diagnose_model(model, n_rollouts=2)
    assert diagnose_model(model, n_rollouts=3)["n_rollouts"] == 3


@pytest.mark.slow
def test_a_snapshot_of_normalised_environments_is_judged_on_environments_that_normalise_alike(tmp_path):
    settings = dict(n_timesteps=800, eval_freq=800, n_eval_episodes=1, wandb="disabled", device="cpu")
    (run,) = make_grid("Acrobot-v1", ["task1"], [0], tmp_path, **settings)
    assert run_study([run]) == {}
    first, *_, last = sorted(Path(run.folder, "snapshots").glob("*.zip"))
    with environments_of(run) as env:
        normalize_as(last, env)
        # A count for every observation of 800 steps in 16 environments, and of their resets, on top of the initial 1e-4
        assert env.obs_rms.count == pytest.approx(816 + 1e-4) and not env.training
        obs = env.reset()
        assert np.abs(obs - env.unnormalize_obs(obs)).max() > 0.1
        normalize_as(first, env)
        assert env.obs_rms.count == pytest.approx(16 + 1e-4)
    assert [result["steps"] for result in diagnose_run(Path(run.folder), n_rollouts=3, n_points=2)] == [0, 800]
    last.with_suffix(".pkl").unlink()
    with pytest.raises(ValueError, match=f"their statistics are missing: {last.with_suffix('.pkl')}"):
        diagnose_run(Path(run.folder), n_rollouts=3, n_points=2)


def test_points_are_spread_from_the_first_to_the_last():
    snapshots = [Path(str(i)) for i in range(11)]
    assert points_of(snapshots, 3) == [Path("0"), Path("5"), Path("10")]
    assert points_of(snapshots[:2], 3) == snapshots[:2]
    # The trained network
    assert points_of(snapshots, 1) == [Path("10")] and points_of([], 1) == []


# ---- every action played on purpose ----

VALUES = np.random.default_rng(0).standard_normal((4, 3))


class Contexts(gym.Env):
    """What an action is worth depends on a context, which is drawn anew at each step whatever the action."""

    observation_space, action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.context = int(self.np_random.integers(4))
        return self.context, {}

    def step(self, action):
        reward = VALUES[self.context, action]
        self.context = int(self.np_random.integers(4))
        return self.context, reward, bool(self.np_random.random() < 0.2), False, {}


def test_actions_played_on_purpose_differ_by_what_they_are_worth_and_by_nothing_else():
    model = QA2C("MlpPolicy", make_vec_env(Contexts, 3, seed=0), seed=0, device="cpu")
    branches = play_all_actions(model, n_states=10, n_repeats=2)
    # A multiple of three environments
    assert branches.returns.shape == (2, 12, 3) and branches.q_values.shape == branches.probs.shape == (12, 3)
    worth = VALUES - VALUES[:, :1]
    differences = branches.returns - branches.returns[..., :1]
    contexts = [int(np.abs(worth - row).max(axis=1).argmin()) for row in differences[0]]
    for of_repeat in differences:
        np.testing.assert_allclose(of_repeat, worth[contexts], rtol=0, atol=1e-5)
    with th.no_grad():
        q_values, _ = model.policy.evaluate_all_actions(th.as_tensor(contexts))
    np.testing.assert_allclose(branches.q_values, q_values, rtol=1e-5, atol=1e-6)
    assert len(set(contexts)) > 1
    # The rest of the episode has other luck in each repeat
    assert (np.abs(branches.returns[0] - branches.returns[1]) > 1e-3).mean() > 0.8
    # It is the same for all actions, so nothing of it is left in the differences
    judged = judge_branches(branches)
    pairs = [worth[contexts, i] - worth[contexts, j] for i, j in ((0, 1), (0, 2), (1, 2))]
    assert judged["halves"] == 1 and judged["return_difference"] == pytest.approx(np.sqrt(np.mean(np.square(pairs))), rel=1e-4)


def test_the_policy_plays_after_the_action_and_its_returns_are_discounted_to_the_end_of_the_episode():
    numbers = iter(range(2))
    model = linear_model(make_vec_env(lambda: TwoSteps(next(numbers)), 2), np.zeros((4, 3)), gamma=0.5)
    branches = play_all_actions(model, n_states=6, n_repeats=2)
    for i, returns in enumerate(branches.returns.swapaxes(0, 1)):
        size = 1 + i % 2
        first, second = [size * (action + 0.5) for action in range(3)], [size] * 3
        assert returns.tolist() in ([first] * 2, [second] * 2)


class LastAction(gym.Env):
    """Each step has the reward of its action. The observation is the action before."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    n_steps = 0

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.n_steps += 1
        return int(action), float(action), False, False, {}


def test_states_and_returns_are_those_of_the_policy_as_it_draws_its_actions():
    model = linear_model(make_vec_env(LastAction, 50), [[0.0, 0.0], [1.0, 1.0]], gamma=0.1)
    with th.no_grad():
        # Probabilities of 1/4 and 3/4
        model.policy.action_net.bias.copy_(th.tensor([0.0, math.log(3)]))
    branches = play_all_actions(model, n_states=100, n_repeats=2)
    # Q is 1 where the last action is 1
    assert branches.q_values[:, 0].mean() == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 100))
    # Of two steps, because the third weighs 0.01
    assert horizon_of(0.1) == 2
    share = (branches.returns[..., 1].mean() - 1) / 0.1
    assert share == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 200))


def test_the_walk_goes_on_from_the_state_that_was_played_from():
    env = make_vec_env(LastAction, 1)
    play_all_actions(linear_model(env, np.zeros((2, 2))), n_states=1, n_repeats=2, seed=5)
    assert env.envs[0].unwrapped.n_steps == np.random.default_rng(5).integers(horizon_of(0.99))


def minatar():
    pytest.importorskip("minatar")
    register_minatar_envs()
    return make_vec_env("MinAtar/Breakout-v1", 2, seed=3)


@pytest.mark.parametrize(
    "make_env",
    [
        pytest.param(minatar, id="MinAtar"),
        pytest.param(
            lambda: VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", 2, seed=3), 4), id="Atari", marks=pytest.mark.slow
        ),
        pytest.param(lambda: VecNormalize(make_vec_env("CartPole-v1", 2, seed=3)), id="normalised"),
    ],
)
def test_a_state_is_played_from_again_and_again_and_stays_as_it_was(make_env):
    rng = np.random.default_rng(0)
    branched, other = make_env(), make_env()
    before, purpose, after = (rng.integers(branched.action_space.n, size=(n, 2)) for n in (15, 40, 15))
    for env in (branched, other):
        env.reset()
        for actions in before:
            env.step(actions)
    state, played = get_state(branched), []
    for seed in (1, 1, 2):
        set_with_new_randomness(branched, state, np.random.default_rng(seed))
        played.append([branched.step(actions) for actions in purpose])
    # The same seed shows the same game
    for (obs, rewards, dones, _), (same_obs, same_rewards, same_dones, _) in zip(*played[:2], strict=True):
        np.testing.assert_array_equal(obs, same_obs)
        assert rewards.tolist() == same_rewards.tolist() and dones.tolist() == same_dones.tolist()
    set_state(branched, copy.deepcopy(state))
    for actions in after:
        for one, two in zip(branched.step(actions)[:3], other.step(actions)[:3], strict=True):
            np.testing.assert_array_equal(one, two)


def test_another_seed_gives_another_game():
    env = minatar()
    env.reset()
    state, shown = get_state(env), []
    for seed in (1, 2):
        set_with_new_randomness(env, state, np.random.default_rng(seed))
        shown.append([env.step([0, 0])[0] for _ in range(60)])
    assert not np.array_equal(*shown)


def test_sticky_actions_of_the_emulator_are_the_same_in_a_repeat_and_others_in_the_next():
    env = make_atari_env("ALE/Pong-v5", 1, seed=0)
    env.reset()
    for _ in range(15):
        env.step([0])
    state, shown = get_state(env), []
    up, down = 2, 3
    for seed, before in (1, up), (1, down), (2, up):
        # The action that the emulator would repeat is not part of a state
        for _ in range(3):
            env.step([before])
        set_with_new_randomness(env, state, np.random.default_rng(seed))
        shown.append(np.array([env.step([action])[0] for action in 10 * [up, down, 0]]))
    np.testing.assert_array_equal(*shown[:2])
    assert not np.array_equal(shown[0], shown[2])


class Luck(gym.Env):
    """Rewards are luck."""

    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, self.np_random.normal(), False, False, {}


@pytest.mark.parametrize("wrapper", [None, EpisodeReplay])
def test_repeats_differ_in_luck_and_actions_do_not(wrapper):
    env = make_vec_env(Luck, 2, seed=0, wrapper_class=wrapper)
    returns = play_all_actions(QA2C("MlpPolicy", env, gamma=0, device="cpu"), n_states=2, n_repeats=3).returns
    np.testing.assert_array_equal(returns[..., 0], returns[..., 1])
    # Neither two repeats nor two environments have the same
    assert len(np.unique(returns[..., 0])) == 6


class OwnLuck(Luck):
    """Rewards are the luck of another generator. An episode has five steps, which the observation counts."""

    observation_space = gym.spaces.Box(0, 5, (1,))

    def __init__(self, kind):
        self.kind, self.steps = kind, 0
        self.generator = {
            "Philox": lambda: np.random.Generator(np.random.Philox(0)),
            "torch": lambda: th.Generator().manual_seed(0),
            "space": lambda: gym.spaces.Tuple([gym.spaces.Box(-1, 1)], seed=0),
        }[kind]()

    def _observation(self):
        return np.full(1, self.steps, dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        if self.kind == "torch":
            reward = th.rand((), generator=self.generator).item()
        else:
            is_space = self.kind == "space"
            reward = self.generator.sample()[0].item() if is_space else self.generator.normal()
        return self._observation(), reward, self.steps == 5, False, {}


@pytest.mark.parametrize("kind", ["Philox", "torch", "space"])
def test_every_kind_of_generator_brings_other_luck_in_each_repeat(kind):
    env = make_vec_env(lambda: OwnLuck(kind), 1)
    returns = play_all_actions(QA2C("MlpPolicy", env, gamma=0, device="cpu"), n_states=1, n_repeats=3).returns
    np.testing.assert_array_equal(returns[..., 0], returns[..., 1])
    assert len(np.unique(returns[..., 0])) == 3


def test_states_are_taken_throughout_an_episode_also_without_discounted_rewards():
    """With ``gamma=0`` the horizon is one step. The five states of an episode have five Q-values each."""
    env = make_vec_env(lambda: OwnLuck("Philox"), 1)
    branches = play_all_actions(QA2C("MlpPolicy", env, gamma=0, seed=0, device="cpu"), n_states=12, n_repeats=2)
    assert len(np.unique(branches.q_values[:, 0])) > 2


def branches_of(true_q, critic, probs, noise):
    """:return: four repeats with independent noise"""
    return Branches(critic, probs, true_q + noise * np.random.default_rng(1).standard_normal((4, *true_q.shape)))


def test_slope_correlation_and_signs_tell_how_good_the_critic_is():
    rng = np.random.default_rng(0)
    n_states, n_actions = 500, 4
    true_q, other_q = rng.standard_normal((2, n_states, n_actions))
    probs = rng.dirichlet(np.ones(n_actions), n_states)
    # The value of the state does not matter
    level = 10 * rng.standard_normal((n_states, 1))
    cases = [
        (true_q + level, 1.0, 1.0),
        (2 * true_q, 0.5, 1.0),
        (other_q, 0.0, 0.0),
        (-true_q, -1.0, -1.0),
        # Half of its variance has nothing to do with the returns
        (true_q + other_q, 0.5, np.sqrt(0.5)),
    ]
    for critic, slope, correlation in cases:
        judged = judge_branches(branches_of(true_q, critic, probs, noise=1.0))
        for name, expected in (("slope", slope), ("slope_improbable", slope), ("correlation", correlation)):
            assert judged[name] == pytest.approx(expected, abs=5 * judged[f"{name}_error"])
            assert judged[f"{name}_error"] < 0.1
        # Differences of two values with variance 1
        assert judged["return_difference"] == pytest.approx(np.sqrt(2), abs=5 * judged["return_difference_error"])
    # Without noise every sign is right, or every one wrong
    for critic, right in ((3 * true_q, 1.0), (-true_q, 0.0)):
        judged = judge_branches(branches_of(true_q, critic, probs, noise=0.0))
        assert judged["right_signs"] == judged["right_signs_improbable"] == right and judged["halves"] == 1
    assert (judged["states"], judged["repeats"]) == (500, 4)


def test_pairs_with_one_improbable_action_are_judged_on_their_own():
    """Actions 2 and 3 are improbable. Q is right about 0 and 1, and about 2 and 3, and wrong about the other four pairs."""
    q_values, returns = np.array([[1.0, 0.0, 4.0, 3.0]]), np.array([[4.0, 3.0, 1.0, 0.0]])
    judged = judge_branches(Branches(q_values, np.array([[0.45, 0.43, 0.08, 0.04]]), np.stack([returns] * 2)))
    assert judged["right_signs"] == pytest.approx(2 / 6) and judged["right_signs_improbable"] == pytest.approx(1 / 5)


def test_the_error_is_that_of_many_samples_of_states():
    rng = np.random.default_rng(0)
    slopes, errors = [], []
    for _ in range(100):
        true_q, critic = rng.standard_normal((2, 40, 3))
        returns = (true_q + critic) + rng.standard_normal((2, 40, 3))
        judged = judge_branches(Branches(critic, np.full((40, 3), 1 / 3), returns))
        slopes.append(judged["slope"])
        errors.append(judged["slope_error"])
    assert np.mean(slopes) == pytest.approx(1, abs=0.05)
    assert np.mean(errors) == pytest.approx(np.std(slopes), rel=0.25)


def test_what_the_data_do_not_determine_is_not_a_number():
    """No difference between actions; and all actions are probable."""
    probs = np.full((5, 2), 0.5)
    judged = judge_branches(Branches(np.zeros((5, 2)), probs, np.ones((2, 5, 2))))
    assert all(np.isnan(judged[name]) for name in ("slope", "correlation", "right_signs", "halves", "slope_improbable"))


def test_rewards_of_little_weight_are_left_out():
    assert 0.99 ** horizon_of(0.99) <= 0.01 < 0.99 ** (horizon_of(0.99) - 1)
    assert (horizon_of(0.0), horizon_of(1.0), horizon_of(0.9999)) == (1, 1000, 1000)


class Stop(Exception):
    pass


@pytest.fixture
def begun(tmp_path):
    """A run with a snapshot."""
    (run,) = make_grid("pong", ["task1"], [0], tmp_path)
    (Path(run.folder) / "snapshots").mkdir(parents=True)
    (Path(run.folder) / "snapshots" / "0.zip").touch()
    (Path(run.folder) / "run.json").write_text(json.dumps(vars(run)))
    return run


@pytest.mark.parametrize(("n_states", "native"), [(0, True), (8, False)])
def test_states_are_cloned_in_sb3s_environments(n_states, native, begun, monkeypatch):
    """The native ones can only play their actions again."""

    def environments(run):
        assert run.native == native
        raise Stop

    monkeypatch.setattr(diagnosis, "environments_of", environments)
    with pytest.raises(Stop):
        diagnose_run(Path(begun.folder), n_states=n_states)


def test_a_run_is_diagnosed_with_as_many_environments_as_it_was_trained_in(begun, monkeypatch):
    """Its preset may have another number now, on which the noise of a step depends."""

    def environments(run):
        assert run.hyperparams["n_envs"] == 3
        raise Stop

    config = Path(begun.folder, begun.env_id, "config.yml")
    config.parent.mkdir()
    config.write_text("n_envs: 3\n")
    monkeypatch.setattr(diagnosis, "check_same_environments", lambda run, folder: None)
    monkeypatch.setattr(diagnosis, "environments_of", environments)
    with pytest.raises(Stop):
        diagnose_run(Path(begun.folder))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(begun, monkeypatch):
    monkeypatch.setattr(diagnosis, "environments_of", lambda run: pytest.fail("A measurement began"))
    # The tests may run as a user who may write everywhere
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(
        SystemExit, match=r"^diagnose: .*task1_seed-0 cannot be written \(Permission denied\)\. Name another one\.$"
    ):
        main(["diagnose", begun.folder])


@pytest.mark.parametrize(
    ("argument", "least"), [("rollouts", 3), ("points", 1), ("threads", 1), ("states", 0), ("repeats", 2)]
)
def test_numbers_that_are_too_small_are_refused(argument, least, tmp_path):
    with pytest.raises(ValueError, match=f"`{argument}` must be a finite number, at least {least}"):
        diagnose_run(tmp_path, **{f"n_{argument}": least - 1})
