"""The curves that SB3 does not log."""

import gc
import weakref

import numpy as np
import pytest
import torch as th
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger

from sb3_qac import QA2C, QPPO, REINFORCE
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.common.curves import CurvesCallback
from sb3_qac.common.torch_layers import SharedMlp

ROWS = {f"rollout/{name}" for name in ("value_target", "value_prediction", "advantage", "abs_advantage")}
ROWS |= {f"rollout/return_{name}" for name in ("min", "mean", "max")} | {"train/grad_norm", "train/loss"}


class Rows(KVWriter):
    def __init__(self):
        self.rows = []

    def write(self, key_values, key_excluded, step=0):
        self.rows.append(dict(key_values))

    def close(self):
        pass


def train(algorithm, callback, seed=0, log_interval=1, **kwargs):
    model = algorithm("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=seed), seed=seed, device="cpu", **kwargs)
    rows = Rows()
    model.set_logger(Logger(None, [rows]))
    model.learn(1000, callback, log_interval=log_interval)
    return model, rows.rows


SMALL = dict(n_steps=32, batch_size=64, n_epochs=2)


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [(QA2C, {}), (A2C, {}), (PPO, SMALL), (QPPO, dict(**SMALL, ent_coef="lin_0.02")), (REINFORCE, {})],
)
def test_every_curve_is_there_and_the_training_is_the_same(algorithm, kwargs):
    plain, _ = train(algorithm, None, **kwargs)
    model, rows = train(algorithm, CurvesCallback(), **kwargs)
    assert all(map(th.equal, plain.policy.state_dict().values(), model.policy.state_dict().values()))
    # REINFORCE does not fill SB3's buffer
    expected = {row for row in ROWS if algorithm is not REINFORCE or ("value" not in row and "advantage" not in row)}
    assert expected <= set(rows[-1])
    assert rows[-1]["rollout/return_min"] <= rows[-1]["rollout/return_mean"] <= rows[-1]["rollout/return_max"]


def test_gradients_taken_away_before_the_step_do_not_count():
    """TRPO's critic steps without the gradients of the actor and of the shared layers."""

    class Reference(BaseCallback):
        def _on_training_start(self):
            self.model.policy.optimizer.register_step_pre_hook(self.measure)

        def measure(self, *_):
            gradients = [parameter.grad for parameter in self.model.policy.parameters() if parameter.grad is not None]
            self.grad_norm = th.cat([gradient.flatten() for gradient in gradients]).norm().item()

        def _on_step(self):
            return True

    curves, reference = CurvesCallback(), Reference()
    shared = dict(features_extractor_class=SharedMlp, net_arch=[])
    train(TRPO, [curves, reference], n_steps=32, batch_size=64, policy_kwargs=shared)
    assert curves.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)


def test_frozen_parameters_have_no_gradient():
    class Freeze(BaseCallback):
        def _on_training_start(self):
            self.model.policy.action_net.requires_grad_(False)

        def _on_step(self):
            # Freed in the middle
            self.model.policy.action_net.requires_grad_(self.num_timesteps > 500)
            return True

    frozen, rows = train(A2C, [Freeze(), curves := CurvesCallback()])
    assert rows[-1]["train/grad_norm"] > 0
    curves._watch_gradients()
    assert all(parameter._post_accumulate_grad_hooks for parameter in frozen.policy.parameters())
    frozen.policy.action_net.requires_grad_(False)
    curves._watch_gradients()
    for parameter in frozen.policy.parameters():
        assert bool(parameter._post_accumulate_grad_hooks) == parameter.requires_grad


def test_the_norm_is_that_before_clipping_and_the_loss_that_of_the_parts(monkeypatch):
    norms, clip = [], th.nn.utils.clip_grad_norm_

    def clip_and_keep(*args):
        norms.append(float(clip(*args)))

    monkeypatch.setattr(th.nn.utils, "clip_grad_norm_", clip_and_keep)
    curves = CurvesCallback()
    _, rows = train(A2C, curves, ent_coef=0.1, vf_coef=0.3, max_grad_norm=1e-3)
    assert curves.grad_norm == pytest.approx(norms[-1], rel=1e-5) and norms[-1] > 1e-3
    row = rows[-1]
    parts = row["train/policy_loss"] + 0.1 * row["train/entropy_loss"] + 0.3 * row["train/value_loss"]
    assert row["train/loss"] == pytest.approx(parts)


@pytest.mark.parametrize("folders", [None, ("a", "a"), ("a", "b")], ids=["no checkpoints", "resumed", "in another folder"])
def test_a_training_goes_on_after_ctrl_c_in_the_middle_of_an_update(folders, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    model = A2C("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), seed=0, device="cpu")
    curves = CurvesCallback()
    one, other = ([ExactCheckpointCallback(tmp_path / name)] for name in folders) if folders else ([], [])
    hook = model.policy.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.learn(100, [curves, *one])
    hook.remove()
    model.learn(100, [curves, *other])
    assert curves.grad_norm > 0


def test_a_model_whose_training_was_interrupted_is_freed():
    class Interrupt(BaseCallback):
        def _on_step(self):
            if self.num_timesteps > 200:
                raise KeyboardInterrupt
            return True

    model = A2C("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), seed=0, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        model.learn(400, [Interrupt(), CurvesCallback()])
    model = weakref.ref(model)
    gc.collect()
    assert model() is None


def test_rows_are_of_the_last_update_before_they_are_written():
    _, rows = train(A2C, CurvesCallback(), ent_coef=0.1, vf_coef=0.3, log_interval=7)
    every_update = train(A2C, CurvesCallback(), ent_coef=0.1, vf_coef=0.3)[1]
    for row, same in zip(rows, every_update[6::7], strict=False):
        parts = row["train/policy_loss"] + 0.1 * row["train/entropy_loss"] + 0.3 * row["train/value_loss"]
        assert row["train/loss"] == pytest.approx(parts)
        assert row["train/grad_norm"] == same["train/grad_norm"]


def test_a_callback_starts_anew_with_a_second_training():
    callback = CurvesCallback()
    train(A2C, callback)
    model = QPPO("MlpPolicy", make_vec_env("CartPole-v1", 6, seed=0), device="cpu", ent_coef="lin_0.02", **SMALL)
    model.learn(64, callback)
    assert len(callback.last_returns) == 6


def test_returns_are_of_the_last_episode_of_each_environment():
    curves = CurvesCallback()
    model, rows = train(A2C, curves, seed=1)
    returns = [[] for _ in range(4)]

    assert curves.last_returns.shape == (4,)
    for i, monitor in enumerate(model.env.envs):
        returns[i] = monitor.get_wrapper_attr("get_episode_rewards")()
        assert curves.last_returns[i] == returns[i][-1]
    for name, function in {"min": np.min, "mean": np.mean, "max": np.max}.items():
        assert rows[-1][f"rollout/return_{name}"] == pytest.approx(function(curves.last_returns))
    assert np.mean(curves.last_returns) != np.median(curves.last_returns)


def test_values_and_advantages_are_means_over_the_last_rollout():
    model, rows = train(A2C, CurvesCallback())
    buffer = model.rollout_buffer
    expected = {
        "value_target": buffer.returns.mean(),
        "value_prediction": buffer.values.mean(),
        "advantage": buffer.advantages.mean(),
        "abs_advantage": np.abs(buffer.advantages).mean(),
    }
    assert {name: rows[-1][f"rollout/{name}"] for name in expected} == pytest.approx(expected)
    assert len(set(expected.values())) == 4


def test_a_training_may_continue_with_another_number_of_environments(tmp_path):
    callback = CurvesCallback()
    model, _ = train(QA2C, callback)
    model.save(tmp_path / "model")
    for n_envs in (6, 2):
        model = QA2C.load(tmp_path / "model", env=make_vec_env("CartPole-v1", n_envs), device="cpu")
        model.learn(100, callback, reset_num_timesteps=False)
        assert len(callback.last_returns) == n_envs
