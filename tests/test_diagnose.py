"""What diagnoses say of estimators and of critics, where the answer is known."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th

from sb3_qac import QA2C
from sb3_qac.common.returns import discounted_returns
from sb3_qac.study.diagnose import (
    ALL_ACTION,
    ESTIMATORS,
    GradientMoments,
    diagnose_model,
    diagnose_run,
    judge_critic,
    tables,
)
from sb3_qac.study.grid import make_grid, run_study
from sb3_qac.study.manager import environments_of
from sb3_qac.study.snapshots import normalize_as, points_of


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


def test_noise_alone_is_not_a_gradient():
    noise = th.as_tensor(np.random.default_rng(0).standard_normal((500, 4)), dtype=th.float32)
    summary = moments_of({"noise": noise})["noise"]
    assert summary["gradient_square"] == pytest.approx(0, abs=4 * summary["gradient_square_error"])
    assert summary["variance"] == pytest.approx(4, rel=0.2)
    assert np.isnan(summary["noise_to_signal"]) and np.isnan(summary["cosine"])


def test_returns_end_with_their_episodes():
    rewards = np.array([[1.0], [2.0], [4.0]])
    dones = np.array([[False], [True], [False]])
    # The second step is the last of its episode, the third one goes on
    returns = discounted_returns(rewards, dones, np.array([16.0]), gamma=0.5)
    np.testing.assert_array_equal(returns, [[2.0], [2.0], [12.0]])


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
    settings = dict(n_timesteps=2000, eval_freq=2000, n_eval_episodes=2, wandb="disabled", device="cpu")
    task1, a2c = make_grid("cartpole", ["task1", "a2c"], [0], tmp_path, **settings)
    assert run_study([task1, a2c]) == {}
    results = diagnose_run(Path(task1.folder), n_rollouts=5, n_points=2)
    assert [result["steps"] for result in results] == [0, 2000]
    assert json.loads((Path(task1.folder) / "diagnosis.json").read_text()) == results
    # 7 estimators and a critic at each of both points, and their heads
    assert len(list(tables(results))) == 2 * 7 + 2 + 1 + 2 + 2
    command = [sys.executable, "-m", "sb3_qac", "diagnose", a2c.folder]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "has no critic Q(s, a)" in result.stderr and "Traceback" not in result.stderr


def test_three_rollouts_are_the_fewest():
    model = QA2C("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    # With one left out, a gradient's square needs two others
    with pytest.raises(ValueError, match="`n_rollouts` must be a finite number, at least 3, but 2 was given"):
        diagnose_model(model, n_rollouts=2)
    assert diagnose_model(model, n_rollouts=3)["n_rollouts"] == 3


def test_a_snapshot_of_normalised_environments_is_judged_on_environments_that_normalise_alike(tmp_path):
    settings = dict(n_timesteps=2000, eval_freq=2000, n_eval_episodes=1, wandb="disabled", device="cpu")
    (run,) = make_grid("Acrobot-v1", ["task1"], [0], tmp_path, **settings)
    assert run_study([run]) == {}
    first, *_, last = sorted(Path(run.folder, "snapshots").glob("*.zip"))
    with environments_of(run) as env:
        normalize_as(last, env)
        # A count for every observation of 2,000 steps in 16 environments, and of their resets, on top of the initial 1e-4
        assert env.obs_rms.count == pytest.approx(2016 + 1e-4) and not env.training
        obs = env.reset()
        assert np.abs(obs - env.unnormalize_obs(obs)).max() > 0.1
        normalize_as(first, env)
        assert env.obs_rms.count == pytest.approx(16 + 1e-4)
    assert [result["steps"] for result in diagnose_run(Path(run.folder), n_rollouts=3, n_points=2)] == [0, 2000]
    last.with_suffix(".pkl").unlink()
    with pytest.raises(ValueError, match=f"their statistics are missing: {last.with_suffix('.pkl')}"):
        diagnose_run(Path(run.folder), n_rollouts=3, n_points=2)


def test_points_are_spread_from_the_first_to_the_last():
    snapshots = [Path(str(i)) for i in range(11)]
    assert points_of(snapshots, 3) == [Path("0"), Path("5"), Path("10")]
    assert points_of(snapshots[:2], 3) == snapshots[:2]
