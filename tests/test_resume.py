"""A training that was stopped goes on as if it had not been."""

import contextlib
import csv
import functools
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
import uuid
import zipfile
import zlib
from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import optuna
import pytest
import torch as th
import wandb
import yaml
from filelock import FileLock
from gymnasium import spaces
from matplotlib.figure import Figure
from rl_zoo3.callbacks import RawStatisticsCallback, SaveVecNormalizeCallback, TrialEvalCallback
from rl_zoo3.exp_manager import ExperimentManager
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import HParam, Logger, configure, make_output_format
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm
from wandb.integration.sb3 import WandbCallback

from sb3_qac import QA2C, QPPO, REINFORCE, zoo
from sb3_qac.common.callbacks import ExactCheckpointCallback, resume, wandb_run_id
from sb3_qac.common.curves import CurvesCallback
from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.common.files import read_json
from sb3_qac.common.wrappers import EpisodeReplay
from sb3_qac.qa2c.policies import ActorCriticQPolicy
from sb3_qac.resume import callback as resume_callback
from sb3_qac.resume.checkpoints import CheckpointError, checkpoints_in, load_checkpoint, newest_checkpoint, save_checkpoint
from sb3_qac.resume.logs import pack_log, read_log, rewrite_log, unpack_log
from sb3_qac.resume.state import (
    ObjectState,
    StateError,
    get_state,
    get_values,
    is_constant,
    kind_of,
    objects_in,
    set_state,
    set_values,
)
from sb3_qac.resume.wandb import WandbOutputFormat
from sb3_qac.zoo.resume import unfinished_run
from tests.envs import InterruptAt, Interrupted, Unrepeatable
from tests.kill_and_resume import differences, kill_and_resume, run_to_the_end, tensorboard_rows
from tests.wandb_files import wandb_configs, wandb_ids, wandb_parts

pytestmark = pytest.mark.usefixtures("ctrl_c")


def make_model(algorithm, folder=None, env_id="CartPole-v1", n_envs=4, normalize=False, **kwargs):
    env = make_vec_env(env_id, n_envs, seed=1, monitor_dir=None if folder is None else str(folder))
    env = VecNormalize(env) if normalize else env
    tensorboard_log = None if folder is None else str(folder / "tensorboard")
    arguments = dict(n_steps=8, learning_rate=1e-3, seed=0, device="cpu", tensorboard_log=tensorboard_log)
    if algorithm in (PPO, QPPO):
        arguments.update(batch_size=16, n_epochs=2)
    if algorithm is REINFORCE:
        del arguments["n_steps"]
    return algorithm("MlpPolicy", env, **{**arguments, **kwargs})


def train(algorithm, folder, stop=np.inf, n_steps=2000, normalize=False, progress_bar=False):
    """:return: the model; it is the script that a user would run again"""
    model = make_model(algorithm, folder, normalize=normalize)
    eval_env = make_vec_env("CartPole-v1", 2, seed=5)
    eval_env = VecNormalize(eval_env, training=False, norm_reward=False) if normalize else eval_env
    evaluation = EvalCallback(eval_env, n_eval_episodes=3, eval_freq=200, deterministic=False, log_path=folder, verbose=0)
    every = EveryNTimesteps(500, InterruptAt(np.inf))
    checkpoint = ExactCheckpointCallback(folder / "checkpoints", save_freq=300, verbose=0)
    try:
        return model.learn(
            n_steps, [evaluation, every, InterruptAt(stop), checkpoint, CurvesCallback()], 7, progress_bar=progress_bar
        )
    finally:
        model.logger.close()
        model.env.close()


def train_with_interruptions(algorithm, folder, stops, **kwargs):
    for stop in stops:
        with pytest.raises(Interrupted):
            train(algorithm, folder, stop, **kwargs)
    return train(algorithm, folder, **kwargs)


def assert_same_training(one, one_folder, other, other_folder):
    for get in (lambda model: model.policy.state_dict(), lambda model: flatten(model.policy.optimizer.state_dict()["state"])):
        mine, theirs = get(one), get(other)
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
    assert one.num_timesteps == other.num_timesteps and one._n_updates == other._n_updates
    evaluations = [np.load(folder / "evaluations.npz") for folder in (one_folder, other_folder)]
    assert all(np.array_equal(evaluations[0][name], evaluations[1][name]) for name in ("timesteps", "results", "ep_lengths"))
    # One folder of TensorBoard's each, not a second one for each part
    logs = [list((folder / "tensorboard").iterdir()) for folder in (one_folder, other_folder)]
    assert [len(folders) for folders in logs] == [1, 1]
    rows = [tensorboard_rows(folders[0]) for folders in logs]
    assert rows[0] == rows[1] and len(rows[0]) > 30
    for i in range(4):
        monitors = [read_monitor(folder / f"{i}.monitor.csv") for folder in (one_folder, other_folder)]
        assert monitors[0] == monitors[1] and len(monitors[0]) > 5


def flatten(states):
    return {(i, name): value for i, state in states.items() for name, value in state.items()}


def read_monitor(path):
    return [row[:2] for row in csv.reader(path.read_text().splitlines()[2:])]


@pytest.mark.parametrize("algorithm", [QA2C, QPPO, REINFORCE, A2C, PPO])
def test_a_training_goes_on_exactly(algorithm, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    # The second and the third interruption come before the next checkpoint
    resumed = train_with_interruptions(algorithm, other, stops=(700, 750, 760, 1400))
    assert_same_training(train(algorithm, one), one, resumed, other)


def test_a_training_with_normalisation_goes_on_exactly(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    resumed = train_with_interruptions(QA2C, other, stops=(900,), normalize=True)
    assert_same_training(train(QA2C, one, normalize=True), one, resumed, other)


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_a_progress_bar_may_come(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    with pytest.raises(Interrupted):
        train(QA2C, other, 900)
    assert_same_training(train(QA2C, one), one, train(QA2C, other, progress_bar=True), other)


@pytest.mark.parametrize("algorithm", [QA2C, REINFORCE])
def test_a_finished_training_is_not_repeated(algorithm, tmp_path):
    first = train(algorithm, tmp_path)
    before = sorted(path.name for path in checkpoints_in(tmp_path / "checkpoints"))
    # REINFORCE ends inside a rollout: it plays on from its newest checkpoint to the same end
    again = train(algorithm, tmp_path)
    assert again.num_timesteps == first.num_timesteps
    assert all(map(th.equal, first.policy.state_dict().values(), again.policy.state_dict().values()))
    assert sorted(path.name for path in checkpoints_in(tmp_path / "checkpoints")) == before
    assert json.loads((tmp_path / "checkpoints" / "run.json").read_text())["finished"]


def test_a_longer_training_goes_on_from_a_finished_one(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    train(QA2C, other, n_steps=1500)
    assert_same_training(train(QA2C, one), one, train(QA2C, other), other)


@pytest.mark.parametrize(
    "kwargs", [dict(learning_rate=LinearSchedule(1e-3, 0.0, 1.0)), dict(clip_range=lambda left: 0.2 * left)]
)
def test_a_longer_training_whose_schedules_follow_the_new_end_warns(kwargs, tmp_path):
    make_model(PPO, **kwargs).learn(100, ExactCheckpointCallback(tmp_path))
    (name,) = kwargs
    with pytest.warns(UserWarning, match=f"`learn` that ends at step 100, and this one ends at step 200: .* {name} follow"):
        make_model(PPO, **kwargs).learn(200, ExactCheckpointCallback(tmp_path))


def test_checkpoints_do_not_change_a_training(tmp_path):
    plain = make_model(QA2C).learn(2000)
    with_checkpoints = make_model(QA2C).learn(2000, ExactCheckpointCallback(tmp_path, save_freq=100))
    assert all(map(th.equal, plain.policy.state_dict().values(), with_checkpoints.policy.state_dict().values()))
    assert len(checkpoints_in(tmp_path)) == 3


def test_evaluations_do_not_change_a_training(tmp_path):
    plain = make_model(QA2C).learn(2000)
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1, seed=3), eval_freq=100, deterministic=False, verbose=0)
    evaluated = make_model(QA2C).learn(2000, [evaluation, ExactCheckpointCallback(tmp_path)])
    assert len(evaluation.evaluations_results) == 0 and evaluation.last_mean_reward > 0
    assert all(map(th.equal, plain.policy.state_dict().values(), evaluated.policy.state_dict().values()))


def test_an_evaluation_of_two_trainings_is_resumed_exactly(tmp_path):
    def train_twice(folder, stop):
        eval_env = make_vec_env("CartPole-v1", 2, seed=5)
        evaluation = EvalCallback(eval_env, n_eval_episodes=3, eval_freq=100, deterministic=False, log_path=folder, verbose=0)
        for steps, end in ((400, np.inf), (2000, stop)):
            checkpoint = ExactCheckpointCallback(folder / str(steps), save_freq=300, verbose=0)
            make_model(QA2C).learn(steps, [evaluation, InterruptAt(end), checkpoint])
        return evaluation.evaluations_results

    straight = train_twice(tmp_path / "straight", np.inf)
    with pytest.raises(Interrupted):
        train_twice(tmp_path / "resumed", 1000)
    resumed = train_twice(tmp_path / "resumed", np.inf)
    assert resumed == straight and len(straight) == 6


def test_a_checkpoint_follows_each_evaluation(tmp_path):
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1, seed=3), eval_freq=100, deterministic=False, verbose=0)
    make_model(QA2C).learn(2000, [evaluation, ExactCheckpointCallback(tmp_path, save_freq=10**6, keep=100)])
    steps = [int(path.name[5:17]) for path in checkpoints_in(tmp_path)]
    # Every 400 steps, at the end of the update that the evaluation was in; and at the start and the end
    assert steps == [0, 416, 800, 1216, 1600, 2016]


@pytest.mark.parametrize(("seconds_to_save", "rollouts"), [(0, 10), (10, 16)])
def test_a_checkpoint_is_written_every_few_minutes_at_little_cost_and_the_run_stays_the_same(
    seconds_to_save, rollouts, tmp_path, monkeypatch
):
    spent = [0]

    def save_slowly(*args):
        spent[0] += seconds_to_save
        return save_checkpoint(*args)

    def learn(stop, folder, **kwargs):
        model = make_model(QA2C)
        # One second for each step
        monkeypatch.setattr(resume_callback, "time", types.SimpleNamespace(monotonic=lambda: model.num_timesteps + spent[0]))
        return model.learn(2000, [InterruptAt(stop), ExactCheckpointCallback(folder, keep=99, verbose=0, **kwargs)])

    monkeypatch.setattr(resume_callback, "save_checkpoint", save_slowly)
    straight = learn(np.inf, tmp_path / "straight")
    # A rollout has 32 steps: ten are the first with 300 seconds, and sixteen those with 50 times the 10 of a slow checkpoint
    steps = [int(path.name[5:17]) for path in checkpoints_in(tmp_path / "straight")]
    assert steps == [*range(0, 2000, 32 * rollouts), 2016]
    with pytest.raises(Interrupted):
        learn(1100, tmp_path / "resumed")
    assert checkpoints_in(tmp_path / "resumed")[-1].name.startswith(f"step-{max(step for step in steps if step < 1100):012d}")
    assert same(parameters_of(learn(np.inf, tmp_path / "resumed", save_minutes=999)), parameters_of(straight))


def test_resume_gives_a_model_that_is_ready_to_go_on(tmp_path):
    straight = make_model(QA2C).learn(3200)
    make_model(QA2C).learn(1600, ExactCheckpointCallback(tmp_path))
    model = resume(make_model(QA2C), tmp_path)
    assert model.num_timesteps == 1600
    model.learn(1600, reset_num_timesteps=False)
    assert model.num_timesteps == 3200
    assert all(map(th.equal, straight.policy.state_dict().values(), model.policy.state_dict().values()))
    # And from a file
    assert resume(make_model(QA2C), checkpoints_in(tmp_path)[-1]).num_timesteps == 1600


def test_resume_warns_of_an_end_inside_a_rollout(tmp_path):
    class StopAt100(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 100

    # 100 is in the fourth rollout of 32 steps, and the only checkpoint that of the start
    make_model(QA2C).learn(2000, [StopAt100(), ExactCheckpointCallback(tmp_path)])
    with pytest.warns(UserWarning, match="ended at step 100, after its newest good checkpoint, which is of step 0"):
        assert resume(make_model(QA2C), tmp_path).num_timesteps == 0
    # Asked for by its name, it is what was asked for
    assert resume(make_model(QA2C), checkpoints_in(tmp_path)[-1]).num_timesteps == 0


def test_resume_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=f"There is no checkpoint in {tmp_path}"):
        resume(make_model(QA2C), tmp_path)
    with pytest.raises(CheckpointError, match=r"missing\.safetensors cannot be read"):
        resume(make_model(QA2C), tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make_model(A2C), "algorithm is 'A2C', and was 'QA2C'"),
        (lambda: make_model(QA2C, env_id="Acrobot-v1"), "environment is 'Acrobot-v1', and was 'CartPole-v1'"),
        (lambda: make_model(QA2C, n_envs=2), "n_envs is 2, and was 4"),
        (lambda: make_model(QA2C, gamma=0.5), "gamma is 0.5, and was 0.99"),
        (lambda: make_model(QA2C, baseline=True), "baseline is True, and was False"),
        (lambda: make_model(QA2C, learning_rate=0.1), r"learning_rate is \[0.1, 0.1\], and was \[0.001, 0.001\]"),
    ],
)
def test_the_checkpoint_of_another_training_is_refused(other, message, tmp_path):
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match=f"a different run: .*{message}"):
        resume(other(), tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}.* There is none of this run in its folder"):
        other().learn(200, ExactCheckpointCallback(tmp_path))


class OtherBuffer(RolloutBuffer):
    pass


@pytest.mark.parametrize(
    ("algorithm", "kwargs", "message"),
    [
        (REINFORCE, dict(n_episodes=2), "n_episodes is 2, and was 1"),
        (REINFORCE, dict(return_to_go=False), "return_to_go is False, and was True"),
        (REINFORCE, dict(normalize_returns=True), "normalize_returns is True, and was False"),
        (PPO, dict(clip_range=0.1), r"clip_range is \[0.1, 0.1\], and was \[0.2, 0.2\]"),
        (PPO, dict(clip_range_vf=0.1), r"clip_range_vf is \[0.1, 0.1\], and was None"),
        (PPO, dict(target_kl=0.1), "target_kl is 0.1, and was None"),
        (A2C, dict(normalize_advantage=True), "normalize_advantage is True, and was False"),
        (A2C, dict(use_rms_prop=False), "optimizer_class is 'Adam', and was 'RMSprop'"),
        (A2C, dict(rms_prop_eps=0.1), "optimizer_kwargs is {.*'eps': 0.1.*}, and was {.*'eps': 1e-05.*}"),
        (A2C, dict(rollout_buffer_class=OtherBuffer), "rollout_buffer_class is 'OtherBuffer', and was 'RolloutBuffer'"),
        (
            A2C,
            dict(policy_kwargs=dict(share_features_extractor=False)),
            "policy_kwargs is {'share_features_extractor': False}, and was {}",
        ),
        (A2C, dict(policy_kwargs=dict(net_arch=[32])), r"net_arch is \[32\], and was {'pi': \[64, 64\], 'vf': \[64, 64\]}"),
        (A2C, dict(policy_kwargs=dict(activation_fn=th.nn.ReLU)), "activation_fn is 'ReLU', and was 'Tanh'"),
    ],
)
def test_a_training_with_another_setting_is_refused(algorithm, kwargs, message, tmp_path):
    make_model(algorithm).learn(100, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match=f"a different run: {message}"):
        resume(make_model(algorithm, **kwargs), tmp_path)


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (lambda changed: make_vec_env("FrozenLake-v1", env_kwargs=dict(is_slippery=not changed)), "'is_slippery': False"),
        (
            lambda changed: make_vec_env("CartPole-v1", env_kwargs=dict(max_episode_steps=20 + changed)),
            "max_episode_steps is 21, and was 20",
        ),
        (
            lambda changed: VecNormalize(make_vec_env("CartPole-v1"), clip_obs=5.0 if changed else 10.0),
            r"VecNormalize is {.*'clip_obs': 5.0.*}, and was {.*'clip_obs': 10.0",
        ),
    ],
)
def test_a_training_in_another_environment_is_refused(make_env, message, tmp_path):
    QA2C("MlpPolicy", make_env(False), seed=0).learn(10, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match=f"a different run: .*{message}"):
        resume(QA2C("MlpPolicy", make_env(True), seed=0), tmp_path)


def test_the_window_of_the_statistics_may_be_another_after_a_resume(tmp_path):
    def model(window):
        return QA2C("MlpPolicy", make_vec_env("CartPole-v1"), seed=0, stats_window_size=window)

    trained = model(5).learn(400, ExactCheckpointCallback(tmp_path))
    resumed = resume(model(3), tmp_path)
    assert list(resumed.ep_info_buffer) == list(trained.ep_info_buffer)[-3:]
    assert resumed.ep_info_buffer.maxlen == resumed.ep_success_buffer.maxlen == 3


def test_an_environment_may_be_shown_another_way(tmp_path):
    QA2C("MlpPolicy", make_vec_env("CartPole-v1"), seed=0).learn(10, ExactCheckpointCallback(tmp_path))
    shown = make_vec_env("CartPole-v1", env_kwargs=dict(render_mode="rgb_array"))
    assert resume(QA2C("MlpPolicy", shown, seed=0), tmp_path).num_timesteps == 10


class Batch(VecEnv):
    """A batched simulator with no more than SB3's ``VecEnv`` asks for."""

    def __init__(self, n_envs):
        super().__init__(n_envs, spaces.Box(-9, 9, (1,)), spaces.Discrete(2))
        # SB3's own have environments under the name `envs`
        self.positions, self.actions, self.t, self.envs = np.zeros((n_envs, 1), np.float32), None, 0, n_envs

    def reset(self):
        self.positions[:] = 0
        return self.positions.copy()

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        self.t += 1
        self.positions += np.where(self.actions, 0.1, -0.1)[:, None]
        obs, dones = self.positions.copy(), np.full(self.num_envs, self.t % 20 == 0)
        if dones.all():
            self.reset()
        infos = [{"terminal_observation": each} if dones.all() else {} for each in obs]
        return self.positions.copy(), obs[:, 0], dones, infos

    def get_attr(self, attr_name, indices=None):
        return [getattr(self, attr_name)] * self.num_envs

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs

    def set_attr(self, *_, **__):
        raise NotImplementedError

    env_method = close = set_attr


@pytest.mark.filterwarnings("ignore:The `render_mode` attribute is not defined")
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: VecNormalize(VecMonitor(env))])
def test_a_batched_environment_of_ones_own_is_resumed_exactly(wrap, tmp_path):
    def train_to(folder, stop):
        model = QA2C("MlpPolicy", wrap(Batch(4)), n_steps=8, seed=0, device="cpu")
        evaluation = EvalCallback(wrap(Batch(2)), eval_freq=20, verbose=0, warn=False)
        callbacks = [evaluation, InterruptAt(stop), ExactCheckpointCallback(folder, save_freq=100, verbose=0)]
        return model.learn(600, callbacks)

    with pytest.raises(Interrupted):
        train_to(tmp_path / "resumed", 400)
    assert same(*(parameters_of(train_to(tmp_path / folder, np.inf)) for folder in ("resumed", "straight")))


class HiddenDraws(gym.Env):
    """An observation is of random numbers from many generators, drawn in ``reset``. The rest of the state cannot be read."""

    observation_space, action_space = spaces.Box(-9, 9, (10,)), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.hidden = iter(range(0))
        self.rng, self.old_rng, self.own = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.parts = types.SimpleNamespace(rngs=[np.random.default_rng(1)], torch=th.Generator())
        self.noise_space = spaces.Dict(a=spaces.Box(0, 1, (1,)), seed=0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        own = [self.np_random.random(), self.rng.random(), self.old_rng.rand(), self.own.random()]
        inside = [self.parts.rngs[0].random(), th.rand(1, generator=self.parts.torch).item(), *self.noise_space.sample()["a"]]
        of_everybody = [random.random(), np.random.rand(), th.rand(1).item()]
        self.obs = np.array(own + inside + of_everybody, np.float32)
        self.hidden = iter(range(20))
        return self.obs, {}

    def step(self, action):
        t = next(self.hidden)
        return self.obs * (1 + t % 3), float(self.obs[t % 10] * action), t == 19, False, {}


def test_an_environment_that_draws_in_reset_from_any_generator_is_resumed_exactly_by_a_replay(tmp_path):
    def train_to(folder, stop):
        env = make_vec_env(HiddenDraws, 3, seed=0, wrapper_class=EpisodeReplay)
        # PPO draws from NumPy's generator, and each action from PyTorch's
        model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
        return model.learn(600, [InterruptAt(stop), ExactCheckpointCallback(folder, save_freq=50, verbose=0)])

    for stop in (250, 330):
        with pytest.raises(Interrupted):
            train_to(tmp_path / "resumed", stop)
    assert same(*(parameters_of(train_to(tmp_path / folder, np.inf)) for folder in ("resumed", "straight")))


class HasEnvironment(BaseCallback):
    """As one that evaluates in a way of its own."""

    def __init__(self, env):
        super().__init__()
        self.env = env

    def _on_training_start(self):
        self.env.reset()

    def _on_step(self):
        return True


def in_processes():
    return make_vec_env("CartPole-v1", 2, seed=0, vec_env_cls=SubprocVecEnv, vec_env_kwargs=dict(start_method="fork"))


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot fork")
@pytest.mark.parametrize(
    ("make_env", "refused_at", "message"),
    [
        (lambda: make_vec_env(Unrepeatable, 2, wrapper_class=EpisodeReplay), 200, "did not reproduce the saved observation"),
        (lambda: make_vec_env(Unrepeatable, 2), 0, "hidden .* cannot be taken"),
        (in_processes, 0, "in other processes"),
    ],
    ids=["replayed", "hidden", "in processes"],
)
def test_a_run_whose_environments_cannot_be_restored_is_resumed_with_new_episodes(make_env, refused_at, message, tmp_path):
    def train_to(stop=np.inf, n_steps=400, **kwargs):
        envs = [VecNormalize(make_env()) for _ in range(3)]
        model = QA2C("MlpPolicy", envs[0], n_steps=8, seed=0, device="cpu")
        evaluation = EvalCallback(envs[1], n_eval_episodes=2, eval_freq=50, verbose=0, warn=False)
        checkpoints = ExactCheckpointCallback(tmp_path, save_freq=1, verbose=0, **kwargs)
        try:
            return model.learn(n_steps, [evaluation, HasEnvironment(envs[2]), InterruptAt(stop), checkpoints])
        finally:
            for env in envs:
                env.close()

    if refused_at > 0:
        with pytest.raises(Interrupted):
            train_to(refused_at)
    with pytest.raises(StateError, match=f"{message}.*ExactCheckpointCallback `new_episodes=True`, or `--new-episodes`"):
        train_to()
    for stop in (250, 300):
        with pytest.raises(Interrupted):
            train_to(stop, new_episodes=True)
    assert train_to(new_episodes=True).num_timesteps == 400
    # There is a checkpoint before each rollout of 16 steps
    at = [240, 288] if refused_at == 0 else [192, 240, 288]
    assert read_json(tmp_path / "run.json")["new_episodes_at"] == at
    # Those that were written with it are asked for by name too
    with pytest.raises(StateError, match=f"({message}|was written with new episodes).* `new_episodes=True`"):
        train_to(n_steps=500)


@pytest.mark.parametrize("written_with", [True, False])
def test_with_new_episodes_everything_but_the_episodes_is_that_of_the_checkpoint(written_with, tmp_path):
    def make():
        return make_model(QA2C, normalize=True)

    make().learn(320, ExactCheckpointCallback(tmp_path, new_episodes=written_with))
    exact = None if written_with else resume(make(), tmp_path)
    state = load_checkpoint(checkpoints_in(tmp_path)[-1]).state
    model = resume(make(), tmp_path, new_episodes=True)
    assert model.num_timesteps == 320 and same(parameters_of(model), state["policy"])
    # The first observations of four episodes are added to the statistics
    of_wrapper = state["env"][0].values if written_with else state["env"].values
    assert model.env.obs_rms.count == pytest.approx(of_wrapper["obs_rms"].values["count"] + 4)
    assert model.env.ret_rms.var == of_wrapper["ret_rms"].values["var"]
    assert model._last_episode_starts.all() and not model.env.returns.any()
    first = model.env.get_original_obs()
    assert np.array_equal(model._last_original_obs, first) and (np.abs(first) <= 0.05).all()
    np.testing.assert_array_equal(model._last_obs, model.env.normalize_obs(first))
    # Not the first episodes of the run again
    start = make()
    for _ in range(2):
        start.env.reset()
        assert not np.isin(first, start.env.get_original_obs()).any()
    np.testing.assert_array_equal(resume(make(), tmp_path, new_episodes=True)._last_obs, model._last_obs)
    if exact is not None:
        assert not np.array_equal(exact._last_obs, model._last_obs)


class Game:
    """What an environment makes anew in each episode."""

    def __init__(self):
        self.steps = 0


class MakesItsGame(gym.Env):
    """Its game is made in ``reset``, and a second one in the middle of an episode."""

    observation_space, action_space = spaces.Box(0, 100, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, late=False):
        self.late, self.bonus = late, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game, self.bonus = Game(), None
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.game.steps += 1 + int(action)
        if self.late and self.game.steps > 4:
            self.bonus = Game()
        return np.array([self.game.steps], np.float32), float(action), self.game.steps >= 20, False, {}


def test_objects_that_environments_make_in_reset_are_resumed(tmp_path):
    """In those of evaluations too, which are not reset before the first evaluation."""

    def train_on(folder, stop):
        evaluation = EvalCallback(DummyVecEnv([lambda: Monitor(MakesItsGame())]), eval_freq=50, log_path=folder, verbose=0)
        callback = [evaluation, InterruptAt(stop), ExactCheckpointCallback(folder, save_freq=20, verbose=0)]
        return QA2C("MlpPolicy", DummyVecEnv([MakesItsGame] * 2), seed=0).learn(400, callback)

    with pytest.raises(Interrupted):
        train_on(tmp_path / "resumed", 300)
    resumed, straight = train_on(tmp_path / "resumed", np.inf), train_on(tmp_path / "straight", np.inf)
    assert all(map(th.equal, resumed.policy.state_dict().values(), straight.policy.state_dict().values()))
    results = [np.load(tmp_path / name / "evaluations.npz")["results"] for name in ("resumed", "straight")]
    np.testing.assert_array_equal(*results)


def test_a_checkpoint_that_the_next_start_would_refuse_is_not_written(tmp_path):
    model = QA2C("MlpPolicy", DummyVecEnv([lambda: MakesItsGame(late=True)]), n_steps=6, seed=0)
    with pytest.warns(UserWarning, match=r"envs\[0\]\.bonus is a .*Game, and was not there when the run started.*`reset`"):
        model.learn(60, ExactCheckpointCallback(tmp_path, save_freq=1))
    again = QA2C("MlpPolicy", DummyVecEnv([lambda: MakesItsGame(late=True)]), n_steps=6, seed=0)
    resume(again, checkpoints_in(tmp_path)[-1])


class LosesItsBonus(MakesItsGame):
    """It has a second game from the start of an episode to its middle."""

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.bonus = Game()
        return obs, info

    def step(self, action):
        result = super().step(action)
        if self.game.steps > 4:
            self.bonus = None
        return result


def test_an_object_that_was_gone_at_a_checkpoint_may_be_there_again_after_a_resume(tmp_path):
    def train_on(folder, n_steps, save_freq):
        model = QA2C("MlpPolicy", DummyVecEnv([LosesItsBonus] * 2), n_steps=5, seed=0)
        model.learn(n_steps, ExactCheckpointCallback(folder, save_freq=save_freq, verbose=0))
        return model

    # A checkpoint that cannot be written is a warning, which fails here
    train_on(tmp_path / "resumed", 10, 1)
    state = load_checkpoint(checkpoints_in(tmp_path / "resumed")[-1]).state
    gone = state["objects"].keys() - dict(objects_in(state["env"], "the environment")).keys()
    assert any("bonus" in place for place in gone)
    resumed, straight = train_on(tmp_path / "resumed", 200, 1), train_on(tmp_path / "straight", 200, 1000)
    assert all(map(th.equal, resumed.policy.state_dict().values(), straight.policy.state_dict().values()))


class HasMoreAndMoreGenerators(MakesItsGame):
    def __init__(self):
        super().__init__()
        self.generators = [np.random.default_rng(0)]

    def step(self, action):
        if len(self.generators) < 3:
            self.generators.append(np.random.default_rng(1))
        return super().step(action)


def test_a_checkpoint_with_a_longer_list_of_generators_is_not_written_because_the_next_start_would_refuse_it(tmp_path):
    def model():
        return QA2C("MlpPolicy", DummyVecEnv([HasMoreAndMoreGenerators]), n_steps=6, seed=0)

    message = r"envs\[0\]\.generators is a list of 3 objects, and was list of 1 objects when the run started"
    with pytest.warns(UserWarning, match=message):
        model().learn(30, ExactCheckpointCallback(tmp_path, save_freq=1))
    assert resume(model(), checkpoints_in(tmp_path)[-1]).num_timesteps == 0


class RecordsWith(BaseCallback):
    """Records with the logger that the user made."""

    def __init__(self, logger):
        super().__init__()
        self.users = [logger]

    def _on_step(self):
        self.users[0].record("steps", self.num_timesteps)
        return True


def test_the_users_own_logger_writes_after_a_resume(tmp_path):
    for steps in (100, 200):
        logger = configure(str(tmp_path / str(steps)), ["csv"])
        model = make_model(QA2C)
        model.set_logger(logger)
        model.learn(steps, [RecordsWith(logger), ExactCheckpointCallback(tmp_path / "checkpoints")], log_interval=1)
        logger.close()
    rows = list(csv.DictReader((tmp_path / "200" / "progress.csv").read_text().splitlines()))
    assert [row["steps"] for row in rows] == [row["time/total_timesteps"] for row in rows] and rows[-1]["steps"] == "224"


class Marked(Logger):
    """A logger of the user's that counts its rows."""

    n_rows = 0

    def __init__(self, folder):
        super().__init__(folder, [make_output_format("csv", folder)])

    def dump(self, step=0):
        self.n_rows += 1
        self.record("rows", self.n_rows)
        super().dump(step)


def test_a_logger_of_the_users_class_stays_one_after_a_resume(tmp_path):
    counts = []
    for steps in (100, 200):
        logger, model = Marked(str(tmp_path / str(steps))), make_model(QA2C)
        model.set_logger(logger)
        model.learn(steps, ExactCheckpointCallback(tmp_path / "checkpoints"), log_interval=1)
        assert isinstance(model.logger, Marked)
        logger.close()
        rows = csv.DictReader((tmp_path / str(steps) / "progress.csv").read_text().splitlines())
        counts.append([int(row["rows"]) for row in rows])
    # 32 steps for each row. The second file begins with the rows of the first one
    assert counts == [[1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3]]


class WithBonus(A2C):
    """An algorithm of the user's, with two arguments of its own."""

    def __init__(self, *args, bonus=1.0, decay=0.5, **kwargs):
        self.bonus, self.decay = bonus, LinearSchedule(decay, 0.0, 1.0)
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(bonus=2.0), "bonus is 2.0, and was 1.0"),
        (dict(decay=0.25), r"decay is \[0.25, 0.125\], and was \[0.5, 0.25\]"),
        (dict(ent_coef=0.5), "ent_coef is 0.5, and was 0.0"),
    ],
)
def test_arguments_of_the_users_own_algorithm_are_compared(kwargs, message, tmp_path):
    make_model(WithBonus).learn(10, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match=f"a different run: {message}"):
        resume(make_model(WithBonus, **kwargs), tmp_path)
    # What does not change the numbers may differ
    resume(make_model(WithBonus, verbose=0, stats_window_size=10, tensorboard_log=str(tmp_path)), tmp_path)


class Sets(BaseCallback):
    """Changes the model at a step, in its first rollout after it."""

    def __init__(self, step, change):
        super().__init__()
        self.step, self.change = step, change

    def _on_rollout_end(self):
        if self.num_timesteps == self.step:
            self.change(self.model)

    def _on_step(self):
        return True


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_a_callback_has_frozen_or_freed_stay_so(frozen, tmp_path):
    def learn(folder, steps):
        model = make_model(QA2C)
        model.policy.action_net.requires_grad_(frozen)
        change = Sets(64, lambda model: model.policy.action_net.requires_grad_(not frozen))
        return model.learn(steps, [change, ExactCheckpointCallback(folder)])

    straight = learn(tmp_path / "one", 192)
    learn(tmp_path / "other", 96)
    assert_same_parameters(learn(tmp_path / "other", 192), straight)


class ScaledBuffer(RolloutBuffer):
    """Divides rewards by a scale that it keeps from one rollout to the next, in a number and in an object."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale, self.statistics = 1.0, RunningMeanStd(shape=())

    def compute_returns_and_advantage(self, *args, **kwargs):
        self.scale *= 1.1
        self.statistics.update(self.rewards)
        self.rewards /= self.scale * (1 + self.statistics.var)
        super().compute_returns_and_advantage(*args, **kwargs)


class HasMore(QA2C):
    """Trains a module and a number of its own, which it saves as SB3's algorithms do."""

    def _setup_model(self):
        super()._setup_model()
        self.further = th.nn.Linear(1, 1)
        self.further_optimizer = th.optim.Adam(self.further.parameters())
        self.multiplier = th.zeros(1, requires_grad=True)

    def _get_torch_save_params(self):
        names, _ = super()._get_torch_save_params()
        return [*names, "further", "further_optimizer"], ["multiplier"]

    def train(self):
        super().train()
        self.further_optimizer.zero_grad()
        self.further(th.ones(1) * self.num_timesteps).square().sum().backward()
        self.further_optimizer.step()
        with th.no_grad():
            self.multiplier += self.further.bias.detach()
            self.policy.q_net.bias += 0.01 * self.multiplier


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_model(QA2C, rollout_buffer_class=ScaledBuffer),
        lambda: make_model(QPPO, rollout_buffer_class=ScaledBuffer),
        lambda: make_model(HasMore),
    ],
    ids=["buffer", "buffer of QPPO", "modules"],
)
def test_what_users_add_to_an_algorithm_goes_on(make, tmp_path):
    def learn(folder, steps):
        return make().learn(steps, ExactCheckpointCallback(folder, verbose=0))

    straight = learn(tmp_path / "one", 192)
    learn(tmp_path / "other", 96)
    resumed = learn(tmp_path / "other", 192)
    assert_same_parameters(resumed, straight)
    for name in ("further.weight", "multiplier"):
        if hasattr(straight, "further"):
            assert th.equal(recursive_getattr(resumed, name), recursive_getattr(straight, name))


class CountsUpdates(ActorCriticQPolicy):
    """With state of its own that is no tensor."""

    updates = 0

    def evaluate_all_actions(self, obs):
        self.updates += 1
        return super().evaluate_all_actions(obs)

    def get_extra_state(self):
        return {"updates": self.updates}

    def set_extra_state(self, state):
        self.updates = state["updates"]


def test_extra_state_of_a_policy_goes_on(tmp_path):
    for steps in (96, 192):
        model = QA2C(CountsUpdates, make_vec_env("CartPole-v1", 4, seed=1), n_steps=8, seed=0)
        model.learn(steps, ExactCheckpointCallback(tmp_path, verbose=0))
        assert model.policy.updates == steps // 32


@pytest.mark.parametrize("algorithm", (QA2C, QPPO))
@pytest.mark.parametrize("ent_coef", (0.01, "lin_0.01"))
def test_an_entropy_coefficient_that_a_callback_sets_goes_on(tmp_path, algorithm, ent_coef):
    def learn(folder, stop=np.inf):
        change = Sets(64, lambda model: setattr(model, "ent_coef", 0.5))
        model = make_model(algorithm, ent_coef=ent_coef)
        return model.learn(192, [change, ExactCheckpointCallback(folder, save_freq=32, verbose=0), InterruptAt(stop)])

    straight = learn(tmp_path / "one")
    # The second resume is from a checkpoint that the first one has written
    for step in (100, 140):
        with pytest.raises(Interrupted):
            learn(tmp_path / "other", step)
    resumed = learn(tmp_path / "other")
    assert resumed.ent_coef == 0.5
    assert_same_parameters(resumed, straight)


def test_an_argument_that_a_callback_changes_goes_on(tmp_path):
    def learn(folder, steps):
        change = Sets(64, lambda model: setattr(model, "ent_coef", 0.5))
        return make_model(A2C).learn(steps, [change, ExactCheckpointCallback(folder, save_freq=32, verbose=0)])

    straight = learn(tmp_path / "one", 192)
    learn(tmp_path / "other", 96)
    # What was given is still compared
    with pytest.raises(CheckpointError, match=r"a different run: ent_coef is 0\.25, and was 0\.0"):
        resume(make_model(A2C, ent_coef=0.25), tmp_path / "other")
    callbacks = [Sets(None, None), ExactCheckpointCallback(tmp_path / "other", verbose=0)]
    resume(make_model(A2C), tmp_path / "other").learn(128, callbacks)
    resumed = learn(tmp_path / "other", 192)
    assert resumed.ent_coef == 0.5
    assert_same_parameters(resumed, straight)


@pytest.mark.parametrize("algorithm", [QA2C, QPPO])
def test_an_entropy_coefficient_that_a_callback_sets_to_a_function_is_named_in_a_warning(algorithm, tmp_path):
    change = Sets(64, lambda model: setattr(model, "ent_coef", lambda progress: 0.3 * progress))
    with pytest.warns(UserWarning, match=r"do not have ent_coef\."):
        make_model(algorithm).learn(192, [change, ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)])


def test_a_schedule_that_a_callback_replaces_is_named_in_warnings(tmp_path):
    def learn(steps, step):
        change = Sets(step, lambda model: setattr(model, "clip_range", LinearSchedule(0.3, 0.1, 1.0)))
        make_model(PPO).learn(steps, [change, ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)])

    with pytest.warns(
        UserWarning, match=r"do not have clip_range\..*: clip_range is \[0\.3, 0\.2\d*\], and was \[0\.2, 0\.2\]"
    ) as said:
        learn(192, step=64)
    assert len(said) == 1
    with pytest.warns(UserWarning, match=r"not resumed exactly, because .* does not have clip_range: taken from this start"):
        learn(256, step=None)


class Adapts(A2C):
    """An algorithm of the user's, whose attributes are its state."""

    def __init__(self, *args, scale=1.0, **kwargs):
        self.scale, self.factor, self.statistics = scale, 1.0, RunningMeanStd(shape=())
        self.rng, self.history = np.random.default_rng(3), []
        super().__init__(*args, **kwargs)

    def train(self):
        self.factor *= 1.01
        self.scale += self.rng.random()
        self.statistics.update(self.rollout_buffer.rewards.flatten())
        self.history.append(Fraction(1, 1 + len(self.history)))
        self.made_later = {"updates": len(self.history)}
        self.rollout_buffer.advantages *= self.scale * self.factor / (1 + self.statistics.var)
        super().train()


def test_attributes_of_the_users_own_algorithm_go_on(tmp_path):
    def learn(folder, steps):
        return make_model(Adapts).learn(steps, ExactCheckpointCallback(folder, verbose=0))

    straight = learn(tmp_path / "one", 192)
    learn(tmp_path / "other", 96)
    resumed = learn(tmp_path / "other", 192)
    assert_same_parameters(resumed, straight)
    for name in ("factor", "scale", "history", "made_later"):
        assert getattr(resumed, name) == getattr(straight, name)
    assert resumed.rng.random() == straight.rng.random() and resumed.statistics.mean == straight.statistics.mean
    # As without the callback
    assert resume(make_model(Adapts), tmp_path / "other").history == straight.history
    # What has not changed is not written
    assert load_checkpoint(checkpoints_in(tmp_path / "other")[0]).state["algorithm"].keys() == {"statistics", "rng"}


def test_a_network_that_the_users_own_algorithm_does_not_name_is_said_to_be_lost(tmp_path):
    class HasTarget(A2C):
        def _setup_model(self):
            super()._setup_model()
            self.target = th.nn.Linear(1, 1)

    with pytest.warns(UserWarning, match=r"Checkpoints do not have HasTarget\.target.*cannot be taken"):
        make_model(HasTarget).learn(64, ExactCheckpointCallback(tmp_path))
    with pytest.warns(UserWarning) as said:
        make_model(HasTarget).learn(128, ExactCheckpointCallback(tmp_path))
    assert "not resumed exactly, because" in str(said[0].message) and "HasTarget.target" in str(said[0].message)


def test_several_checkpoint_callbacks_are_refused(tmp_path):
    callbacks = [ExactCheckpointCallback(tmp_path / "one"), ExactCheckpointCallback(tmp_path / "other")]
    with pytest.raises(ValueError, match="several `ExactCheckpointCallback`"):
        make_model(A2C).learn(64, callbacks)


def test_checkpoints_that_name_fewer_settings_are_gone_on_from(tmp_path):
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))
    state = load_checkpoint(checkpoints_in(tmp_path)[-1]).state
    for name in ("net_arch", "optimizer_class", "optimizer_kwargs"):
        del state["training"][name]
    save_checkpoint(tmp_path, 200, state)
    assert resume(make_model(QA2C), tmp_path).num_timesteps == 128
    # Other layers are seen by their parameters then
    network = dict(policy_kwargs=dict(net_arch=[32]))
    shape = r"the shape of mlp_extractor.policy_net.0.weight is \(32, 4\), and was \(64, 4\)"
    with pytest.raises(CheckpointError, match=f"a different run: {shape}"):
        resume(make_model(QA2C, **network), tmp_path)


def test_the_newest_checkpoint_of_this_training_is_named(tmp_path):
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path / "qa2c"))
    make_model(A2C).learn(200, ExactCheckpointCallback(tmp_path / "a2c"))
    foreign, own = checkpoints_in(tmp_path / "a2c")[-1], checkpoints_in(tmp_path / "qa2c")[-1]
    shutil.copy(foreign, tmp_path / "qa2c")
    with pytest.raises(CheckpointError, match=f"a different run.*The newest one of this run there is {own.name}"):
        resume(make_model(QA2C), tmp_path / "qa2c")
    assert resume(make_model(QA2C), own).num_timesteps == 128


def test_other_callbacks_are_refused(tmp_path):
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match=r"The callbacks are \['InterruptAt'\], but .* with \[\]"):
        make_model(QA2C).learn(200, [InterruptAt(1000), ExactCheckpointCallback(tmp_path)])


def test_settings_of_callbacks_may_be_changed(tmp_path):
    def make_callbacks(eval_freq, n_eval_episodes, max_episodes):
        evaluation = EvalCallback(
            make_vec_env("CartPole-v1", 1, seed=3), n_eval_episodes=n_eval_episodes, eval_freq=eval_freq, verbose=0
        )
        return [evaluation, StopTrainingOnMaxEpisodes(max_episodes), ExactCheckpointCallback(tmp_path, verbose=0)]

    make_model(QA2C).learn(200, make_callbacks(1000, 1, 1000))
    evaluation, stop, checkpoint = make_callbacks(100, 2, 5)
    model = make_model(QA2C).learn(10_000, [evaluation, stop, checkpoint])
    assert (evaluation.eval_freq, evaluation.n_eval_episodes, stop.max_episodes) == (100, 2, 5)
    # 5 in each of 4 environments, those before the resume included
    assert 20 <= stop.n_episodes < 24 and model.num_timesteps < 10_000


def test_another_number_of_episodes_is_refused_where_evaluations_are_kept_in_one_table(tmp_path):
    def train(n_steps, n_eval_episodes):
        env = make_vec_env("CartPole-v1", 1, seed=3)
        evaluation = EvalCallback(env, n_eval_episodes=n_eval_episodes, eval_freq=50, log_path=tmp_path, verbose=0)
        make_model(QA2C).learn(n_steps, [evaluation, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0)])

    train(320, 1)
    with pytest.raises(CheckpointError, match=r"`n_eval_episodes` of EvalCallback is 2, and was 1.*give the earlier number"):
        train(640, 2)
    train(640, 1)


class RecordsHyperparameters(BaseCallback):
    """As the example in SB3's documentation."""

    def _on_training_start(self):
        self.logger.record(
            "hparams", HParam({"gamma": self.model.gamma}, {"train/value_loss": 0.0}), exclude=("stdout", "log")
        )

    def _on_step(self):
        return True


def test_hyperparameters_that_wait_for_their_row_are_logged_after_a_resume(tmp_path, capsys):
    """A checkpoint cannot hold them: each start records them again."""
    for folder, stops in (("whole", [np.inf]), ("parts", [100, 1000, np.inf])):
        for stop in stops:
            model = make_model(QA2C, tmp_path / folder, verbose=1)
            callbacks = [
                RecordsHyperparameters(),
                InterruptAt(stop),
                ExactCheckpointCallback(tmp_path / folder / "checkpoints", 64),
            ]
            with contextlib.suppress(Interrupted):
                model.learn(2000, callbacks, log_interval=7)
            model.logger.close()
            model.env.close()
    written = {}
    for folder in ("whole", "parts"):
        events = [EventAccumulator(str(path)) for path in (tmp_path / folder / "tensorboard").rglob("QA2C_*") if path.is_dir()]
        for accumulator in events:
            accumulator.Reload()
        written[folder] = sum("_hparams_/session_start_info" in x.summary_metadata for x in events)
    assert written == {"whole": 1, "parts": 1}


@pytest.mark.skipif(os.name != "posix", reason="Windows needs rights for symbolic links")
def test_tensorboard_goes_on_in_its_folder_where_checkpoints_are_behind_a_symbolic_link(tmp_path):
    disk, home = tmp_path / "disk" / "deep" / "down", tmp_path / "home"
    disk.mkdir(parents=True)
    home.mkdir()
    (home / "logs").symlink_to(disk)
    for steps in (200, 400):
        model = make_model(QA2C, tensorboard_log=str(home / "runs"))
        model.learn(steps, ExactCheckpointCallback(home / "logs" / "checkpoints", verbose=0), log_interval=1)
        model.logger.close()
    assert {path.parent.parent for path in tmp_path.rglob("events.out.tfevents.*")} == {home / "runs"}


class KeepsTheWriter(BaseCallback):
    """As the callbacks in SB3's documentation: it writes to TensorBoard itself."""

    def _on_training_start(self):
        (self.format,) = self.logger.output_formats
        self.writer = self.format.writer

    def _on_step(self):
        self.writer.add_scalar("mine/steps", self.num_timesteps, self.num_timesteps)
        self.writer.add_text("mine/text", str(self.num_timesteps), self.num_timesteps)
        self.format.write({"mine/format": self.num_timesteps}, {"mine/format": ()}, self.num_timesteps)
        return True


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_a_callback_that_keeps_the_writer_of_tensorboard_goes_on_in_the_same_folder(order, tmp_path):
    for stop in (200, 500, np.inf):
        model = make_model(QA2C, tensorboard_log=str(tmp_path / "tensorboard"))
        callbacks = [KeepsTheWriter(), InterruptAt(stop), ExactCheckpointCallback(tmp_path / "checkpoints", 96, verbose=0)]
        with contextlib.suppress(Interrupted):
            model.learn(640, callbacks[::order], log_interval=1)
        model.logger.close()
        model.env.close()
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["QA2C_1"]
    rows = tensorboard_rows(tmp_path / "tensorboard" / "QA2C_1")
    for tag in ("mine/steps", "mine/text/text_summary", "mine/format"):
        assert [step for step, name, _ in rows if name == tag] == list(range(4, 641, 4))
    assert [step for step, name, _ in rows if name == "train/value_loss"] == list(range(64, 641, 32))


def test_another_tensorboard_log_is_gone_on_in_and_said(tmp_path):
    def learn(steps, name):
        model = make_model(QA2C, tensorboard_log=str(tmp_path / name))
        model.learn(steps, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0), log_interval=1)
        model.logger.close()

    learn(320, "first")
    (tmp_path / "second").mkdir()
    with pytest.warns(UserWarning, match="from here on are in .*second/deep/QA2C_1, and those before were in .*first/Q"):
        learn(640, "second/deep")
    learn(960, "second/deep")
    first, second = (tensorboard_rows(tmp_path / name / "QA2C_1") for name in ("first", "second/deep"))
    # The first one is in the row of the second update
    assert {step for step, *_ in first} == set(range(64, 321, 32))
    assert {step for step, *_ in second} == set(range(352, 961, 32))


def test_empty_folders_around_that_of_tensorboard_stay(tmp_path):
    folder = tmp_path / "mine" / "empty"
    for steps in (320, 640):
        model = make_model(QA2C)
        model.set_logger(configure(str(folder / str(steps)), ["tensorboard"]))
        if steps == 640:
            shutil.move(folder / "320", tmp_path)
        with pytest.warns(UserWarning, match="those before") if steps == 640 else contextlib.nullcontext():
            model.learn(steps, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0), log_interval=1)
        model.logger.close()
    assert [path.name for path in folder.iterdir()] == ["640"]


class Doubling(BaseCallback):
    """A setting that is changed by the training, as a schedule's is."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def _on_step(self):
        if self.num_timesteps % 400 == 0:
            self.numbers.append(2 * self.numbers[-1])
        return True


def test_settings_that_a_training_changes_go_on(tmp_path):
    with pytest.raises(Interrupted):
        make_model(QA2C).learn(2000, [Doubling([1]), InterruptAt(1300), ExactCheckpointCallback(tmp_path, save_freq=100)])
    doubling = Doubling([1])
    make_model(QA2C).learn(2000, [doubling, InterruptAt(np.inf), ExactCheckpointCallback(tmp_path, save_freq=100)])
    assert doubling.numbers == [1, 2, 4, 8, 16, 32]


class FiresEvery(BaseCallback):
    """Counts its setting in steps of all environments, as users' callbacks do."""

    def __init__(self):
        super().__init__()
        self.freq, self.fired_at = 40, []

    def _on_training_start(self):
        self.freq //= self.training_env.num_envs

    def _on_step(self):
        if self.n_calls % self.freq == 0:
            self.fired_at.append(self.num_timesteps)
        return True


def test_what_a_callback_computes_at_its_start_before_it_is_not_computed_twice(tmp_path):
    straight, resumed = straight_and_resumed(FiresEvery, tmp_path, 1)
    assert resumed.fired_at == straight.fired_at == list(range(40, 801, 40))


class Registered(BaseCallback):
    """A callback for whose class functions are registered, as for an object inside another callback."""

    seen = 0

    def _on_step(self):
        self.seen += 1
        return True


def test_functions_that_are_registered_for_the_class_of_a_callback_do_not_replace_its_attributes(tmp_path):
    get_values.register(Registered, lambda obj, name, seen: {})
    set_values.register(Registered, lambda obj, values, name: None)
    straight, resumed = straight_and_resumed(Registered, tmp_path, 1)
    assert resumed.seen == straight.seen == 200


def test_other_logs_are_refused(tmp_path):
    def learn(formats):
        model = make_model(QA2C)
        model.set_logger(configure(str(tmp_path), formats))
        try:
            model.learn(100, ExactCheckpointCallback(tmp_path / "checkpoints"))
        finally:
            model.logger.close()

    learn(["csv", "json"])
    with pytest.raises(CheckpointError, match=r"0 CSV logs are open, but 1 were .*: give the logger the same outputs"):
        learn(["log", "json"])
    with pytest.raises(CheckpointError, match="3 log files are open, but 2 were"):
        learn(["csv", "json", "log"])


def test_monitor_files_of_native_environments_go_on(tmp_path):
    def learn(folder, stop=np.inf):
        kwargs = dict(wrapper_kwargs=dict(screen_size=21), vec_env_kwargs=dict(num_threads=1))
        env = VecFrameStack(make_ale_vec_env("BreakoutNoFrameskip-v4", 2, 0, monitor_dir=str(folder), **kwargs), 2)
        callback = [InterruptAt(stop), ExactCheckpointCallback(folder / "checkpoints", save_freq=200)]
        try:
            QA2C("MlpPolicy", env, seed=0, device="cpu").learn(800, callback)
        finally:
            env.close()

    one, other = tmp_path / "one", tmp_path / "other"
    learn(one)
    with pytest.raises(Interrupted):
        learn(other, stop=500)
    # SB3 puts no wrapper of its own around VecFrameStack
    assert len(load_checkpoint(checkpoints_in(other / "checkpoints")[-1]).state["logs"]) == 2
    learn(other)
    for i in range(2):
        monitors = [read_monitor(folder / f"{i}.monitor.csv") for folder in (one, other)]
        assert monitors[0] == monitors[1] and monitors[0]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    straight = make_model(QA2C).learn(2000)
    make_model(QA2C).learn(1000, ExactCheckpointCallback(tmp_path, save_freq=200))
    newest = checkpoints_in(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    model = make_model(QA2C)
    with pytest.warns(UserWarning, match="is damaged.*Going back to the one before"):
        model.learn(2000, ExactCheckpointCallback(tmp_path, save_freq=200))
    assert all(map(th.equal, straight.policy.state_dict().values(), model.policy.state_dict().values()))
    assert newest not in checkpoints_in(tmp_path)


def test_a_full_disk_does_not_stop_a_training(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    callback = ExactCheckpointCallback(tmp_path, save_freq=500)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No checkpoint of step .* No space left") as caught:
        patch.setattr("sb3_qac.resume.callback.save_checkpoint", no_space)
        model = make_model(QA2C).learn(2000, callback)
    # At 0, 512, 1024, 1536 and the end
    assert model.num_timesteps == 2016 and len(caught) == 5
    endings = [str(warning.message).partition("left on device. ")[2] for warning in caught]
    none_yet, others = "there is no checkpoint yet", "the earlier checkpoints stay"
    assert endings == [f"The run continues, and {text}." for text in (none_yet, *[others] * 4)]


def test_a_disk_that_is_full_at_the_end_does_not_lose_the_model(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    class FillDisk(BaseCallback):
        def _on_step(self):
            if self.num_timesteps == 640:
                monkeypatch.setattr(os, "fsync", no_space)
            return True

    with pytest.warns(UserWarning, match="No space left") as caught:
        model = make_model(QA2C).learn(960, [FillDisk(), ExactCheckpointCallback(tmp_path, save_freq=500)])
    assert model.num_timesteps == 960 and not read_json(tmp_path / "run.json")["finished"]
    for warning, start in zip(caught, ("No checkpoint of step 960", "This run has ended"), strict=True):
        assert str(warning.message).startswith(start)
    # Free for the next start
    with FileLock(tmp_path / "lock", blocking=False):
        pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: DQN("MlpPolicy", "CartPole-v1"), "DQN cannot be resumed exactly: only on-policy algorithms"),
        (lambda: RecurrentPPO("MlpLstmPolicy", "CartPole-v1", device="cpu"), "an LSTM cannot be resumed exactly"),
        (lambda: A2C("MlpPolicy", "Pendulum-v1", use_sde=True, device="cpu"), "state-dependent exploration"),
    ],
)
def test_algorithms_with_further_state_are_refused(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        model().learn(100, ExactCheckpointCallback(tmp_path))


def test_environments_whose_state_cannot_be_taken_are_refused_at_the_start(tmp_path):
    with pytest.raises(StateError, match=r"world.*cannot be taken.*EpisodeReplay"):
        make_model(QA2C, env_id="LunarLander-v3").learn(100, ExactCheckpointCallback(tmp_path))


def test_calls_that_continue_each_other_need_folders_of_their_own(tmp_path):
    """The first call of a new start would resume the second one's training, and end at once."""

    def train(folders, first):
        model = make_model(QA2C)
        for folder, reset in zip(folders, (first, False), strict=True):
            model.learn(320, ExactCheckpointCallback(folder, verbose=0), reset_num_timesteps=reset)
        return model

    for first in (True, False):
        folder = tmp_path / f"one_{first}"
        assert train([folder] * 2, first).num_timesteps == 640
        with pytest.raises(
            CheckpointError, match=r"a `learn` that ends at step 640.*at step 320\..* give each its own folder"
        ):
            train([folder] * 2, first)
        apart = [tmp_path / f"first_{first}", tmp_path / f"second_{first}"]
        assert train(apart, first).num_timesteps == train(apart, first).num_timesteps == 640


def test_a_training_may_end_earlier_than_it_was_meant_to(tmp_path):
    with pytest.raises(Interrupted):
        callbacks = [InterruptAt(200), ExactCheckpointCallback(tmp_path, save_freq=64)]
        make_model(QA2C).learn(1000, callbacks, reset_num_timesteps=False)
    callbacks = [InterruptAt(np.inf), ExactCheckpointCallback(tmp_path)]
    assert make_model(QA2C).learn(320, callbacks, reset_num_timesteps=False).num_timesteps == 320


def test_a_callback_that_holds_a_list_of_the_model_holds_it_after_a_resume(tmp_path):
    class Watch(BaseCallback):
        def _on_training_start(self):
            self.episodes = self.model.ep_info_buffer

        def _on_step(self):
            return True

        def _on_rollout_end(self):
            assert self.episodes is self.model.ep_info_buffer

    for callbacks in ([Watch(), ExactCheckpointCallback(tmp_path)], [ExactCheckpointCallback(tmp_path), Watch()]):
        for steps in (200, 400):
            make_model(QA2C).learn(steps, callbacks)
        shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", ["save_freq", "keep"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` .* 0"):
        ExactCheckpointCallback("folder", **{name: 0})


def test_a_refused_start_leaves_the_folder_to_others(tmp_path):
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match="of a different run"):
        make_model(QA2C, gamma=0.5).learn(100, ExactCheckpointCallback(tmp_path))
    program = f"from filelock import FileLock; FileLock({str(tmp_path / 'lock')!r}).acquire(blocking=False)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_number_of_checkpoints_is_whole():
    with pytest.raises(ValueError, match=r"`keep` must be an integer, at least 1, but 1\.5"):
        ExactCheckpointCallback("folder", keep=1.5)


@pytest.mark.parametrize("parent", [lambda child: EveryNTimesteps(100, child), lambda child: [EveryNTimesteps(100, child)]])
def test_as_the_child_of_an_event_it_is_refused(parent, tmp_path):
    """Which tells its child neither of rollouts nor of their ends: there would not be one checkpoint."""
    with pytest.raises(ValueError, match=r"EveryNTimesteps .* `save_freq`"):
        make_model(QA2C).learn(100, parent(ExactCheckpointCallback(tmp_path)))


def test_a_missing_folder_is_asked_for():
    with pytest.raises(ValueError, match="`folder` is missing"):
        make_model(QA2C).learn(100, ExactCheckpointCallback())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/checkpoints cannot be made a folder .*Name another one"):
        make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path / "file" / "checkpoints"))


def test_two_processes_do_not_share_a_folder(tmp_path):
    program = """
import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(CheckpointError, match="Another process is training in"):
        make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))
    other.communicate()
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))


class SignalAt(BaseCallback):
    def __init__(self, number, times=1):
        super().__init__()
        self.number, self.times = number, times

    def _on_step(self):
        if self.num_timesteps == 100:
            for _ in range(self.times):
                signal.raise_signal(self.number)
        return True


def test_ctrl_c_stops_after_the_update_with_a_checkpoint(tmp_path, capfd):
    straight = make_model(QA2C).learn(2000)
    with pytest.raises(KeyboardInterrupt):
        make_model(QA2C).learn(2000, CallbackList([SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path)]))
    assert "SIGINT: stopping with a checkpoint" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # 100 is in the fourth rollout of 32 steps
    assert [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [0, 128]
    assert not json.loads((tmp_path / "run.json").read_text())["finished"]
    model = make_model(QA2C).learn(2000, [SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path)])
    assert all(map(th.equal, straight.policy.state_dict().values(), model.policy.state_dict().values()))


@pytest.mark.parametrize(("end", "steps"), [(np.inf, [0, 128]), (100, [0])])
def test_ctrl_c_in_the_last_update_is_handled_too(end, steps, tmp_path):
    """``learn`` would come to its end as if nothing had been pressed, and the script would start the next training."""

    class StopAt(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < end

    callback = CallbackList([SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path), StopAt()])
    with pytest.raises(KeyboardInterrupt):
        make_model(QA2C).learn(128, callback)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == steps
    assert not read_json(tmp_path / "run.json")["finished"]
    make_model(QA2C).learn(128, [SignalAt(signal.SIGINT, times=0), ExactCheckpointCallback(tmp_path), StopAt()])
    assert read_json(tmp_path / "run.json")["finished"]


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make_model(QA2C).learn(2000, [SignalAt(signal.SIGINT, times=2), ExactCheckpointCallback(tmp_path)])
    assert [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [0]


def test_after_an_error_in_training_ctrl_c_is_what_it_was(tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two"):
        with pytest.raises(Interrupted):
            make_model(QA2C).learn(2000, [InterruptAt(100), ExactCheckpointCallback(folder)])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_may_let_the_training_go_on(tmp_path):
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        model = make_model(QA2C).learn(2000, [SignalAt(signal.SIGTERM), ExactCheckpointCallback(tmp_path, keep=10)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] and model.num_timesteps == 2016
    assert [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [0, 128, 2016]


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        model = make_model(QA2C).learn(2000, [SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert model.num_timesteps == 2016


def zoo_training(algo, folder):
    """:return: RL Zoo's manager and its model, as the same command makes them each time"""
    zoo.register()
    hyperparams = dict(callback=[{"sb3_qac.common.callbacks.ExactCheckpointCallback": dict(save_freq=64, verbose=0)}])
    hyperparams.update(n_envs=4, n_steps=16, **(dict(batch_size=16, n_epochs=3) if algo == "ppo" else {}))
    manager = ExperimentManager(
        *(types.SimpleNamespace(), algo, "CartPole-v1", str(folder)),
        **dict(n_timesteps=640, eval_freq=-1, seed=0, verbose=0, device="cpu", log_interval=-1, hyperparams=hyperparams),
    )
    return manager, manager.setup_experiment()[0]


def fail():
    raise RuntimeError("out of memory")


def press_ctrl_c_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("algo", ["ppo", "qa2c"])
@pytest.mark.parametrize("interrupt", [fail, press_ctrl_c_twice])
def test_an_update_that_was_interrupted_is_repeated(algo, interrupt, tmp_path):
    """RL Zoo calls ``on_training_end`` then too, with an update half done."""
    straight_manager, straight = zoo_training(algo, tmp_path / "one")
    straight_manager.learn(straight)

    manager, model = zoo_training(algo, tmp_path / "other")
    steps_per_update = 3 * 64 // 16 if algo == "ppo" else 1
    count = itertools.count(1)
    # In a middle minibatch of the fourth of ten updates; QA2C has one only
    last = 3 * steps_per_update + (steps_per_update + 1) // 2
    model.policy.optimizer.register_step_post_hook(lambda *_: interrupt() if next(count) == last else None)
    with pytest.raises(RuntimeError) if interrupt is fail else contextlib.nullcontext():
        manager.learn(model)
    run = Path(manager.save_path, "checkpoints")
    assert not read_json(run / "run.json")["finished"]
    assert load_checkpoint(checkpoints_in(run)[-1]).state["model"]["num_timesteps"] == 3 * 64

    manager, model = zoo_training(algo, tmp_path / "other")
    assert run.parent == Path(manager.save_path)
    manager.learn(model)
    assert read_json(run / "run.json")["finished"]
    assert_same_parameters(model, straight)


def test_an_update_that_qa2c_refused_is_repeated(tmp_path):
    straight_manager, straight = zoo_training("qa2c", tmp_path / "one")
    straight_manager.learn(straight)

    manager, model = zoo_training("qa2c", tmp_path / "other")
    compute, count = model.rollout_buffer.compute_returns_and_advantage, itertools.count(1)

    def compute_nan_once(*args, **kwargs):
        compute(*args, **kwargs)
        if next(count) == 4:
            model.rollout_buffer.returns[:] = np.nan

    model.rollout_buffer.compute_returns_and_advantage = compute_nan_once
    with pytest.raises(ValueError, match="nan"):
        manager.learn(model)
    manager, model = zoo_training("qa2c", tmp_path / "other")
    manager.learn(model)
    assert_same_parameters(model, straight)


def assert_same_parameters(one, other):
    assert one._n_updates == other._n_updates and one.num_timesteps == other.num_timesteps
    assert all(map(th.equal, one.policy.state_dict().values(), other.policy.state_dict().values()))
    states = [flatten(model.policy.optimizer.state_dict()["state"]) for model in (one, other)]
    assert states[0].keys() == states[1].keys() and all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("hidden", [False, True])
def test_an_interruption_in_learn_of_a_subclass_is_not_an_end(hidden, tmp_path):
    class Cautious(QA2C):
        def learn(self, total_timesteps, callback, **kwargs):
            try:
                return super().learn(total_timesteps, callback, **kwargs)
            finally:
                callback.on_training_end()

    model = make_model(Cautious)
    model.policy.optimizer.register_step_post_hook(lambda *_: fail())
    with pytest.raises(RuntimeError):
        if hidden:
            # An error that is being handled when the training starts is none of the training
            try:
                raise KeyError
            except KeyError:
                model.learn(100, ExactCheckpointCallback(tmp_path))
        else:
            model.learn(100, ExactCheckpointCallback(tmp_path))
    assert not read_json(tmp_path / "run.json")["finished"]
    assert [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [0]


def test_a_training_in_an_error_handler_comes_to_its_end(tmp_path):
    try:
        raise KeyError
    except KeyError:
        make_model(QA2C).learn(64, ExactCheckpointCallback(tmp_path))
    assert read_json(tmp_path / "run.json")["finished"]
    assert [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [0, 64]


class Games:
    """State in an object of its own, with a generator."""

    def __init__(self):
        self.generator = th.Generator().manual_seed(0)
        self.total = 0.0


class Observer(BaseCallback):
    """Plays an environment of its own with random actions, and writes down what it saw."""

    def __init__(self):
        super().__init__()
        self.env = make_vec_env("CartPole-v1", 2, seed=7)
        self.generators = [np.random.default_rng(seed) for seed in range(2)]
        self.games, self.visited, self.phase = Games(), set(), "early"
        self.rollouts = 0
        self.seen = []

    def _on_training_start(self):
        # References to what is not its own
        self.network, self.weights = self.model.policy.mlp_extractor, list(self.model.policy.parameters())
        self.first_env, self.others = self.training_env.envs[0], [self.training_env, self.model.policy]
        self.file, self.functions = io.StringIO(), {"square": np.square, "len": len}
        self.env.reset()

    def _on_rollout_start(self):
        self.rollouts += 1

    def _on_step(self):
        actions = np.array([generator.integers(2) for generator in self.generators])
        obs, _, _, _ = self.env.step(actions)
        self.games.total += th.rand(1, generator=self.games.generator).item()
        self.visited.add(int(10 * obs[0, 0]))
        if self.num_timesteps > 500:
            self.phase = "late"
        self.seen.append((self.rollouts, obs.sum(), self.games.total, len(self.visited), self.phase))
        return True


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_what_a_callback_has_made_for_itself_is_resumed(order, tmp_path):
    def learn(folder, stop=np.inf):
        observer = Observer()
        checkpoint = ExactCheckpointCallback(folder, save_freq=300, verbose=0)
        make_model(QA2C).learn(1600, [*[observer, InterruptAt(stop), checkpoint][::order]])
        return observer

    straight = learn(tmp_path / "one")
    for stop in (700, 1100):
        with pytest.raises(Interrupted):
            learn(tmp_path / "other", stop)
    resumed = learn(tmp_path / "other")
    assert resumed.seen == straight.seen and len(resumed.seen) == 400
    assert {phase for *_, phase in resumed.seen} == {"early", "late"}


class Holder(BaseCallback):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def _on_step(self):
        return True


@pytest.mark.parametrize(
    "extra", [[Games(), Games()], th.nn.Linear(1, 1), {"a": object()}, iter([1])], ids=["list", "network", "dict", "iterator"]
)
def test_a_callback_whose_state_cannot_be_kept_is_refused_at_the_start(extra, tmp_path):
    with pytest.raises(StateError, match=r"The state of Holder\.extra.* cannot be taken.*use numbers, arrays or random"):
        make_model(QA2C).learn(64, [Holder(extra), ExactCheckpointCallback(tmp_path)])
    # In a resumed training too
    make_model(QA2C).learn(64, [Holder(1), ExactCheckpointCallback(tmp_path)])
    with pytest.raises(StateError, match=r"The state of Holder\.extra.* cannot be taken"):
        make_model(QA2C).learn(128, [Holder(extra), ExactCheckpointCallback(tmp_path)])


class Averages(BaseCallback):
    """Averages the parameters, which it refers to."""

    def _init_callback(self):
        self.live = self.model.policy.state_dict()
        self.average = {name: tensor.clone() for name, tensor in self.live.items()}
        self.norms = []

    def _on_rollout_start(self):
        for name, tensor in self.average.items():
            tensor.lerp_(self.live[name], 0.1)
        self.norms.append(float(self.live["q_net.weight"].norm()))

    def _on_step(self):
        return True


class Counts(dict):
    total = 0


class CountsActions(BaseCallback):
    """Counts in a dictionary with an attribute."""

    def __init__(self):
        super().__init__()
        self.counts = Counts()

    def _on_step(self):
        for action in self.locals["actions"].tolist():
            self.counts[action] = self.counts.get(action, 0) + 1
            self.counts.total += 1
        return True


def straight_and_resumed(kind, folder, order):
    """:return: the callback of a class after a training, and after one that was interrupted"""

    def learn(name, stop=np.inf):
        callback, checkpoint = kind(), ExactCheckpointCallback(folder / name, save_freq=100, verbose=0)
        make_model(QA2C).learn(800, [callback, InterruptAt(stop), checkpoint][::order])
        return callback

    with pytest.raises(Interrupted):
        learn("resumed", stop=450)
    return learn("straight"), learn("resumed")


class Trade(NamedTuple):
    step: int
    price: Fraction


class KeepsTrades(BaseCallback):
    """It has values that are no numbers from its first step on."""

    def __init__(self):
        super().__init__()
        self.trades, self.window = [], None

    def _on_step(self):
        before = self.trades[-1].price if self.trades else Fraction(1)
        self.trades.append(Trade(self.num_timesteps, before + Fraction(1, 3)))
        self.window = slice(max(0, len(self.trades) - 10), None)
        return True


def test_values_that_a_callback_gets_later_are_resumed(tmp_path):
    straight, resumed = straight_and_resumed(KeepsTrades, tmp_path, 1)
    assert resumed.trades == straight.trades and resumed.trades[-1] == (800, Fraction(200, 3) + 1)
    assert type(resumed.trades[0]) is Trade and resumed.window == slice(190, None)


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_references_to_the_parameters_are_so_after_a_resume(order, tmp_path):
    straight, resumed = straight_and_resumed(Averages, tmp_path, order)
    assert resumed.norms == straight.norms and len(set(resumed.norms)) > 20
    assert all(map(th.equal, resumed.average.values(), straight.average.values()))
    parameter = resumed.model.policy.q_net.weight
    assert resumed.live["q_net.weight"].data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_a_dictionary_of_the_users_class_is_resumed_with_its_attributes(order, tmp_path):
    straight, resumed = straight_and_resumed(CountsActions, tmp_path, order)
    assert resumed.counts == straight.counts and type(resumed.counts) is Counts
    assert resumed.counts.total == straight.counts.total == 800


def test_tensors_of_which_only_some_are_the_policys_are_refused(tmp_path):
    callback = Averages()
    callback._on_rollout_start = lambda: callback.live.update(extra=th.ones(1))
    with pytest.raises(StateError, match=r"Averages\.live has tensors of the policy and others: keep them in two attributes"):
        make_model(QA2C).learn(64, [callback, ExactCheckpointCallback(tmp_path)])


def test_a_counter_that_is_made_late_is_not_written_as_a_plain_dictionary(tmp_path):
    class Late(Holder):
        def _on_step(self):
            self.extra = Counter(a=1)
            return True

    with pytest.warns(UserWarning, match=r"Late\.extra is a collections\.Counter, and was not there when the run started"):
        make_model(QA2C).learn(96, [Late(None), ExactCheckpointCallback(tmp_path, save_freq=1)])


@dataclass
class Total(BaseCallback):
    """It has no hash, as dataclasses that can be compared."""

    total: float = 0.0

    def __post_init__(self):
        super().__init__()

    def _on_step(self):
        self.total += self.num_timesteps
        return True


def test_a_callback_may_be_a_dataclass(tmp_path):
    for n_steps in (64, 128):
        callback = Total()
        make_model(QA2C).learn(n_steps, [callback, ExactCheckpointCallback(tmp_path)])
    # Four environments: 4 + 8 + ... + 128
    assert callback.total == 4 * sum(range(1, 33))


class FrozenTeacher(th.nn.Linear):
    pass


def test_a_class_may_be_registered_as_one_without_state(tmp_path):
    get_values.register(FrozenTeacher, lambda obj, name, seen: {})
    for n_steps in (64, 128):
        teacher = FrozenTeacher(1, 1)
        weight = teacher.weight.clone()
        make_model(QA2C).learn(n_steps, [Holder(teacher), ExactCheckpointCallback(tmp_path)])
        assert th.equal(teacher.weight, weight)


def test_methods_of_displays_and_services_are_no_state():
    bar = tqdm(total=1, disable=True)
    for value in (bar, bar.update, functools.partial(bar.update, 1), (bar, [None, bar.update])):
        assert is_constant(value, set())
    for value in (random.Random(0).random, [bar, 1], None, [], [None]):
        assert not is_constant(value, set())


def test_a_part_of_a_callback_that_is_missing_is_asked_for(tmp_path):
    make_model(QA2C).learn(64, [Holder(Games()), ExactCheckpointCallback(tmp_path)])
    with pytest.raises(StateError, match=r"Holder\.extra has no state of its own, but its saved state is that of a .*Games"):
        make_model(QA2C).learn(128, [Holder(None), ExactCheckpointCallback(tmp_path)])


@pytest.mark.filterwarnings("ignore:rich is experimental", "ignore:.*:optuna.exceptions.ExperimentalWarning")
def test_callbacks_of_sb3_and_rl_zoo_and_wandb_are_taken(tmp_path, monkeypatch):
    # None again after the test
    monkeypatch.setattr(wandb, "run", None)

    def eval_env():
        return make_vec_env("CartPole-v1", 1, seed=3)

    def learn(folder, stop=np.inf):
        trial = optuna.create_study().ask()
        often = dict(eval_freq=50, n_eval_episodes=1, verbose=0)
        every = [
            EvalCallback(eval_env(), StopTrainingOnRewardThreshold(10**6), StopTrainingOnNoModelImprovement(99), **often),
            TrialEvalCallback(eval_env(), trial, **often),
            CheckpointCallback(100, str(folder / "models")),
            SaveVecNormalizeCallback(100, str(folder / "models")),
            RawStatisticsCallback(),
            WandbCallback(model_save_path=str(folder / "wandb"), model_save_freq=100),
            LogEveryNTimesteps(300),
            EveryNTimesteps(200, ConvertCallback(lambda *_: True)),
            *(StopTrainingOnMaxEpisodes(10**6), CurvesCallback(), InterruptAt(stop)),
            ExactCheckpointCallback(folder / "checkpoints", save_freq=100, verbose=0),
        ]
        model = make_model(QA2C, folder)
        try:
            return model.learn(600, every, None, progress_bar=True)
        finally:
            model.logger.close()
            model.env.close()

    with wandb.init(mode="disabled"):
        straight = learn(tmp_path / "one")
        with pytest.raises(Interrupted):
            learn(tmp_path / "other", stop=420)
        assert_same_parameters(learn(tmp_path / "other"), straight)
    rows = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        (logs,) = (folder / "tensorboard").iterdir()
        rows.append(tensorboard_rows(logs))
    assert rows[0] == rows[1] and any(tag == "raw/rollouts/episodic_return" for _, tag, _ in rows[0])


def test_what_a_callback_records_before_a_rollout_is_in_a_row_once(tmp_path):
    class Recorder(BaseCallback):
        def _on_rollout_start(self):
            self.logger.record_mean("mean", self.num_timesteps)

        def _on_step(self):
            return True

    def learn(folder, stop=np.inf):
        model = make_model(QA2C)
        model.set_logger(configure(str(folder), ["json"]))
        try:
            callback = [Recorder(), InterruptAt(stop), ExactCheckpointCallback(folder / "checkpoints", 320)]
            model.learn(640, callback, log_interval=5)
        finally:
            model.logger.close()

    learn(tmp_path / "one")
    with pytest.raises(Interrupted):
        learn(tmp_path / "other", stop=400)
    learn(tmp_path / "other")
    rows = [(tmp_path / name / "progress.json").read_text().splitlines() for name in ("one", "other")]
    assert [json.loads(row)["mean"] for row in rows[0]] == [json.loads(row)["mean"] for row in rows[1]]


class LogsItsRollouts(A2C):
    """Records a value between the end of a rollout and its row."""

    def collect_rollouts(self, *args, **kwargs):
        goes_on = super().collect_rollouts(*args, **kwargs)
        self.logger.record("mine", self.num_timesteps)
        return goes_on


@pytest.mark.parametrize("log_interval", [1, 5])
def test_what_an_algorithm_records_after_a_rollout_is_in_its_row(log_interval, tmp_path):
    def learn(folder, steps):
        model = make_model(LogsItsRollouts)
        model.set_logger(configure(str(folder), ["json"]))
        model.learn(steps, ExactCheckpointCallback(folder / "checkpoints", verbose=0), log_interval)
        model.logger.close()
        rows = map(json.loads, (folder / "progress.json").read_text().splitlines())
        return [(row["time/iterations"], row["time/total_timesteps"], row["mine"]) for row in rows]

    straight = learn(tmp_path / "one", 640)
    # At iteration 10 of 20
    learn(tmp_path / "other", 320)
    assert learn(tmp_path / "other", 640) == straight == [(i, 32 * i, 32 * i) for i in range(log_interval, 21, log_interval)]


def test_the_users_list_of_callbacks_stays_as_it_is(tmp_path):
    mine = [InterruptAt(np.inf), ExactCheckpointCallback(tmp_path / "list")]
    make_model(QA2C).learn(64, mine)
    assert len(mine) == 2
    both = CallbackList([InterruptAt(np.inf), ExactCheckpointCallback(tmp_path / "object")])
    make_model(QA2C).learn(64, both)
    assert len(both.callbacks) == 2
    make_model(QA2C).learn(128, both)
    assert len(both.callbacks) == 2


def test_what_can_no_longer_be_kept_of_a_callback_is_left_out_and_said(tmp_path):
    class Breaking(Holder):
        def __init__(self):
            super().__init__(None)
            self.rng = np.random.default_rng(0)

        def _on_step(self):
            if self.num_timesteps == 640:
                # Its generator is the callback's, which is kept
                self.extra = types.SimpleNamespace(rng=self.rng, unknown=object())
            self.drawn = self.rng.random()
            return True

    def learn(steps):
        callback = Breaking()
        make_model(QA2C).learn(steps, [callback, ExactCheckpointCallback(tmp_path, save_freq=200)])
        return callback

    with pytest.warns(
        UserWarning, match=r"Checkpoints do not have Breaking\.extra\..*: The state of .*unknown .* cannot be"
    ) as said:
        drawn = learn(1000).drawn
    assert len(said) == 1 and [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [672, 896, 1024]
    with pytest.warns(UserWarning, match=r"not resumed exactly, because .* does not have Breaking\.extra: taken from"):
        callback = learn(1000)
    assert callback.drawn == drawn and callback.extra is None


def tree_with_parents():
    root = {"children": []}
    root["children"].append({"parent": root})
    return root


def nested(levels):
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize(
    "value", [tree_with_parents(), nested(400), 10**5000], ids=["contains itself", "400 levels deep", "5,000 digits"]
)
def test_data_that_no_checkpoint_can_hold_is_left_out_and_named(value, tmp_path):
    class Collects(Holder):
        def _on_step(self):
            self.extra = value if self.num_timesteps > 640 else None
            return True

    with pytest.warns(UserWarning, match=r"Checkpoints do not have Collects\.extra\."):
        make_model(QA2C).learn(1000, [Collects(None), ExactCheckpointCallback(tmp_path, save_freq=200, verbose=0)])
    assert newest_checkpoint(tmp_path).path.name.startswith("step-000000001024")
    with pytest.raises(StateError, match=r"Holder\."):
        make_model(QA2C).learn(64, [Holder(value), ExactCheckpointCallback(tmp_path / "start", verbose=0)])


def test_a_run_that_changes_its_working_folder_keeps_its_checkpoints_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Moves(BaseCallback):
        def _on_step(self):
            os.makedirs("deeper", exist_ok=True)
            os.chdir(tmp_path / "deeper")
            return True

    make_model(QA2C).learn(128, [Moves(), ExactCheckpointCallback("run", verbose=0)])
    assert newest_checkpoint(tmp_path / "run").path.name.startswith("step-000000000128")
    assert not (tmp_path / "deeper" / "run").exists()


def test_an_optimizer_that_the_run_replaces_is_named_in_training_and_refused_at_a_resume(tmp_path):
    class Replaces(BaseCallback):
        def _on_rollout_start(self):
            if self.num_timesteps == 96:
                self.model.policy.optimizer = th.optim.SGD(self.model.policy.parameters(), 1e-3, momentum=0.9)

        def _on_step(self):
            return True

    with pytest.warns(UserWarning, match="do not have optimizer.*optimizer is 'SGD', and was 'RMSprop"):
        make_model(QA2C).learn(160, [Replaces(), ExactCheckpointCallback(tmp_path, verbose=0)])
    with pytest.raises(StateError, match=r"The optimizer's settings are .*nesterov.*: it is of another class"):
        make_model(QA2C).learn(320, [Replaces(), ExactCheckpointCallback(tmp_path, verbose=0)])


def test_what_can_no_longer_be_read_of_an_environment_does_not_stop_a_training(tmp_path):
    def change(model):
        model.env.envs[0].unwrapped.extra = object()

    with pytest.warns(UserWarning, match=r"No checkpoint of step .*extra .* The run continues") as caught:
        model = make_model(QA2C).learn(1000, [Sets(640, change), ExactCheckpointCallback(tmp_path, save_freq=200)])
    assert model.num_timesteps == 1024
    # Rollouts are of 32 steps. At 640, 864 and the end
    assert len(caught) == 3 and [int(path.name[5:17]) for path in checkpoints_in(tmp_path)] == [0, 224, 448]


class Plots(BaseCallback):
    """As PlottingCallback in SB3's tutorial: a plot from its first step on."""

    def __init__(self):
        super().__init__()
        self._plot, self.axes, self.n_drawn = None, None, 0

    def _on_step(self):
        if self._plot is None:
            fig = Figure()
            (self.axes,) = (fig.subplots(2, 2),)
            (line,) = self.axes[0, 0].plot([], [])
            self._plot = (line, self.axes[0, 0], fig)
        self._plot[0].set_data(range(self.num_timesteps), range(self.num_timesteps))
        self.n_drawn += 1
        return True


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_a_callback_that_plots_has_checkpoints(order, tmp_path):
    straight, resumed = straight_and_resumed(Plots, tmp_path, order)
    assert resumed.n_drawn == straight.n_drawn == 200
    # The last steps only, in a plot of its own
    assert resumed._plot[0].axes is resumed.axes[0, 0] and resumed._plot is not straight._plot


def test_a_signal_inside_a_write_to_stderr_is_no_error(tmp_path, monkeypatch, capfd):
    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Busy())
    with pytest.raises(KeyboardInterrupt):
        make_model(QA2C).learn(2000, [SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path)])
    assert "SIGINT: stopping with a checkpoint" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "stack", "seed"),
    [("qa2c", "native", 0), ("a2c", "stock", 1), ("qppo", "native", 2), ("ppo", "native", 3), ("reinforce", "stock", 4)],
)
def test_killed_trainings_go_on_exactly(algo, stack, seed, tmp_path):
    """The short version of kill_and_resume.py: two kills at random moments, some inside the writing of a checkpoint."""
    seconds = run_to_the_end(algo, stack, tmp_path / "reference", 2000)
    # Half as long at most: on a machine that has become less busy it would come to its end before the first kill
    kills = kill_and_resume(algo, stack, tmp_path / "killed", 2000, 2, seconds / 2, random.Random(seed))
    assert differences(tmp_path / "reference", tmp_path / "killed") == []
    assert kills


def zoo_arguments(*arguments):
    callback = "callback:{'sb3_qac.common.callbacks.ExactCheckpointCallback': dict(save_freq=400)}"
    return [
        *("--algo", "qa2c", "--env", "CartPole-v1", "--n-timesteps", "4000", "--device", "cpu", "--num-threads", "1"),
        *("--eval-freq", "1600", "--log-interval", "10", "--log-folder", "logs", "--hyperparams", callback, *arguments),
    ]


def start_and_kill(command, folder, number, environment, step):
    """Kills the command once there is a checkpoint of that step."""
    child = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(folder.glob(f"logs/qa2c/CartPole-v1_*/checkpoints/step-*{step:05d}.*")):
        assert child.poll() is None, child.stderr.read().decode()
        time.sleep(0.01)
    child.send_signal(number)
    child.communicate()
    return child.returncode


def test_a_zoo_command_run_again_goes_on_with_its_seed_in_the_same_folder_and_wandb_run(tmp_path, rl_zoo, offline_wandb):
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for folder in (reference, killed):
        folder.mkdir()
    # Without a seed: RL Zoo draws another one in each process
    command = [sys.executable, "-m", "rl_zoo3.train", *zoo_arguments("--track")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert start_and_kill(command, killed, signal.SIGKILL, environment, step=2000) == -signal.SIGKILL
    run = killed / "logs" / "qa2c" / "CartPole-v1_1"
    seed = read_json(run / "checkpoints" / "run.json")["seed"]
    # What does not change the numbers may change
    output = subprocess.run(
        [*command, "--verbose", "0"], cwd=killed, env=environment, check=True, capture_output=True, text=True
    )
    assert f"Seed: {seed}, from the run" in output.stdout and "Resuming from step" in output.stdout
    assert dict(yaml.load((run / "CartPole-v1" / "args.yml").read_text(), Loader=yaml.UnsafeLoader))["seed"] == seed
    assert read_json(run / "checkpoints" / "run.json").items() >= {"seed": seed, "finished": True}.items()
    # W&B may have lost that of the process that was killed
    assert wandb_configs(killed)[-1]["seed"] == seed

    # As if it had been given, and the training never stopped
    rl_zoo("train", *zoo_arguments("--track", "--seed", seed), cwd=reference)
    # Its service has written everything when it has ended
    wandb.teardown()
    assert [path.name for path in (killed / "logs" / "qa2c").iterdir()] == ["CartPole-v1_1"]
    runs = [reference / "logs" / "qa2c" / "CartPole-v1_1", run]
    evaluations = [np.load(run / "evaluations.npz") for run in runs]
    assert all(np.array_equal(evaluations[0][name], evaluations[1][name]) for name in ("timesteps", "results", "ep_lengths"))
    models = [QA2C.load(run / "CartPole-v1.zip", device="cpu") for run in runs]
    assert models[0].seed == models[1].seed == seed
    assert_same_parameters(*models)
    for i in range(8):
        monitors = [read_monitor(run / f"{i}.monitor.csv") for run in runs]
        assert monitors[0] == monitors[1] and monitors[0]

    (rows,), parts = wandb_parts(reference), wandb_parts(killed)
    for row in itertools.chain(rows, *parts):
        for name in ("time/fps", "_timestamp", "_runtime"):
            row.pop(name, None)
    # The last part has them all, with W&B's steps as if there had been one process; those before were cut short
    assert parts[-1] == rows and len(rows) > 8
    assert all(part == rows[: len(part)] for part in parts)
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert wandb_ids(killed) == {wandb_run_id(run / "checkpoints")} and len(parts) == 2


def test_only_an_unfinished_run_of_the_same_command_is_gone_on_with(tmp_path):
    run_file = {"hyperparams": None, "seed": 1, "num_timesteps": 100, "wandb": None}

    def run(number, command, finished):
        folder = tmp_path / f"CartPole-v1_{number}" / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({**run_file, "command": command, "finished": finished}))

    command = ["train.py", "--algo", "qa2c", "--seed", "1"]
    run(1, command, False)
    run(2, [*command[:-1], "2"], False)
    run(3, command, True)
    with zipfile.ZipFile(tmp_path / "CartPole-v1_3" / "CartPole-v1.zip", "w") as agent:
        agent.writestr("data", "{}")
    (tmp_path / "CartPole-v1_4").mkdir()
    run(10, [*command, "--progress"], False)
    assert unfinished_run(tmp_path, "CartPole-v1", command).name == "CartPole-v1_10"
    with FileLock(tmp_path / "CartPole-v1_10" / "checkpoints" / "lock"):
        assert unfinished_run(tmp_path, "CartPole-v1", command).name == "CartPole-v1_1"
    # With RL Zoo's `--uuid`
    run(f"11_{uuid.uuid4()}", [*command, "--uuid"], False)
    run("12_other", [*command, "--uuid"], False)
    assert unfinished_run(tmp_path, "CartPole-v1", [*command, "--uuid"]).name.startswith("CartPole-v1_11_")
    assert unfinished_run(tmp_path, "CartPole-v1", command[:-2]) is None
    assert unfinished_run(tmp_path, "Acrobot-v1", command) is None
    assert unfinished_run(tmp_path / "missing", "CartPole-v1", command) is None


def test_wandb_run_id_of_a_new_folder_is_none(tmp_path):
    assert wandb_run_id(tmp_path) is None
    make_model(QA2C).learn(100, ExactCheckpointCallback(tmp_path))
    assert wandb_run_id(tmp_path) is None


class WandbRun:
    """W&B's side of a run, as its service has it: rows below the current step are dropped, with a warning for each."""

    def __init__(self, starting_step=0):
        self.starting_step = self.step = starting_step
        self.rows, self.n_warnings = {}, 0

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row, step=None, commit=None):
        if step is not None and step < self.step:
            self.n_warnings += 1
            return
        step = self.step if step is None else step
        self.rows.setdefault(step, {}).update(row)
        self.step = step + 1


def write_rows(output_format, values):
    for value in values:
        output_format.write({"x": value}, {"x": ()}, step=10 * (value // 2))


def test_rows_that_wandb_has_are_not_logged_again_and_others_are(tmp_path):
    run = WandbRun()
    written = WandbOutputFormat(run, tmp_path / "rows.jsonl")
    write_rows(written, range(8))
    content = read_log(written.file)
    # Two rows may have the same step of the training
    assert run.rows == {i: {"x": i, "global_step": 10 * (i // 2)} for i in range(8)}
    write_rows(written, range(8, 12))
    written.close()

    # W&B has a row less than the checkpoint, as many, or some of those behind it
    for n_there in (7, 8, 10):
        resumed_run = WandbRun(n_there)
        resumed = WandbOutputFormat(resumed_run, tmp_path / "rows.jsonl")
        rewrite_log(resumed.file, content)
        resumed.log_again()
        write_rows(resumed, range(8, 12))
        resumed.close()
        assert {i: row["x"] for i, row in resumed_run.rows.items()} == {i: i for i in range(n_there, 12)}
        assert resumed_run.n_warnings == 0


@pytest.fixture
def wandb_run_class():
    settings = types.SimpleNamespace(sync_tensorboard=False)
    return type("Run", (WandbRun,), dict(id="one", project="p", entity="e", disabled=False, settings=settings))


def test_wandb_gets_each_row_once_when_learn_is_called_again_in_the_same_process(tmp_path, monkeypatch, wandb_run_class):
    run = wandb_run_class()
    monkeypatch.setattr(wandb, "run", run)
    model = make_model(QA2C)
    for end, n_steps in ((300, 640), (np.inf, 640), (np.inf, 1280)):
        with pytest.raises(Interrupted) if end == 300 else contextlib.nullcontext():
            model.learn(n_steps, [InterruptAt(end), ExactCheckpointCallback(tmp_path, save_freq=100)], log_interval=2)
        model.logger.close()
    assert [row["global_step"] for row in run.rows.values()] == list(range(64, 1281, 64))

    # Another run has none of them
    monkeypatch.setattr(wandb, "run", type(run)())
    model.learn(1280, [InterruptAt(np.inf), ExactCheckpointCallback(tmp_path)], log_interval=2)
    assert wandb.run.rows == run.rows


def learn_with_wandb(run, end, folder, monkeypatch, callback=ExactCheckpointCallback):
    """Until it is killed at a step: a row for every 64 steps, and a checkpoint for every 128."""
    monkeypatch.setattr(wandb, "run", run)
    model = make_model(QA2C)
    with pytest.raises(Interrupted) if end < np.inf else contextlib.nullcontext():
        model.learn(960, [InterruptAt(end), callback(folder, save_freq=100)], log_interval=2)
    model.logger.close()
    return None if run is None else [row["global_step"] for row in run.rows.values()]


@pytest.mark.parametrize("same_run", [False, True])
def test_a_training_is_resumed_without_wandb_and_again_with_it(same_run, tmp_path, monkeypatch, wandb_run_class):
    first = learn_with_wandb(wandb_run_class(), 300, tmp_path, monkeypatch)
    assert first == list(range(64, 256 + 1, 64))
    learn_with_wandb(None, 600, tmp_path, monkeypatch)
    # The rows from the first start on to its checkpoint of step 512 are for nobody
    last = list(range(512 + 64, 960 + 1, 64))
    run = wandb_run_class(starting_step=len(first) if same_run else 0)
    assert learn_with_wandb(run, np.inf, tmp_path, monkeypatch) == (last if same_run else [*first, *last])
    assert run.n_warnings == 0


def test_rows_of_the_users_own_do_not_crowd_ours_out(tmp_path):
    run = WandbRun()
    output_format = WandbOutputFormat(run, tmp_path / "rows.jsonl")
    for i in range(4):
        run.log({"mine": i}), run.log({"mine": i})
        write_rows(output_format, [i])
    output_format.close()
    assert run.n_warnings == 0 and [row["x"] for row in run.rows.values() if "x" in row] == list(range(4))


def test_wandb_itself_has_each_row_under_its_number(tmp_path, monkeypatch):
    """The same with W&B: its service, offline."""
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setenv("WANDB_SILENT", "true")
    content = b""
    for start in (0, 8):
        with wandb.init(mode="offline", project="p", id="one-run", dir=str(tmp_path)) as run:
            output_format = WandbOutputFormat(run, tmp_path / "rows.jsonl")
            rewrite_log(output_format.file, content)
            output_format.log_again()
            if start:
                run.log({"mine": 1})
            write_rows(output_format, range(start, start + 8))
            content = read_log(output_format.file)
            output_format.close()
    # Its service has written everything when it has ended
    wandb.teardown()
    parts = [[(row["_step"], row["x"]) for row in part if "x" in row] for part in wandb_parts(tmp_path)]
    assert parts == [[(i, i) for i in range(8)], [(i, i) for i in range(8)] + [(i + 1, i) for i in range(8, 16)]]


def parameters_of(model):
    return {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}


def same(one, other):
    return all(th.equal(one[name], other[name]) for name in one)


def test_a_learn_that_follows_a_finished_one_is_the_same_after_a_new_start(tmp_path):
    """The process was killed between two calls of `learn`, so the first finds its training finished."""

    def first(folder):
        return make_model(QA2C).learn(320, ExactCheckpointCallback(folder, verbose=0))

    def second(model, folder):
        return model.learn(320, ExactCheckpointCallback(folder, verbose=0), reset_num_timesteps=False)

    whole = parameters_of(second(first(tmp_path / "whole"), tmp_path / "whole, second"))
    first(tmp_path / "killed")
    assert same(parameters_of(second(first(tmp_path / "killed"), tmp_path / "killed, second")), whole)


def test_a_refused_resume_leaves_the_model_and_the_callbacks_as_they_were(tmp_path):
    make_model(QA2C).learn(320, ExactCheckpointCallback(tmp_path, verbose=0))
    model = make_model(QA2C)
    before = parameters_of(model)
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1, seed=5), eval_freq=20, n_eval_episodes=1, verbose=0)
    with pytest.raises(CheckpointError, match="use the same ones"):
        model.learn(1000, [evaluation, ExactCheckpointCallback(tmp_path, verbose=0)])
    assert same(parameters_of(model), before)
    model.learn(320, evaluation)
    assert evaluation.last_mean_reward > 0


def test_a_callback_writes_checkpoints_in_another_training_too(tmp_path):
    callback = ExactCheckpointCallback(tmp_path / "first", save_freq=96, keep=10, verbose=0)
    make_model(QA2C).learn(320, callback)
    callback.folder = tmp_path / "second"
    make_model(QA2C).learn(320, callback)
    first, second = ([path.name.split(".")[0] for path in checkpoints_in(tmp_path / name)] for name in ("first", "second"))
    assert first == second and len(first) == 5


def test_an_evaluation_writes_its_files_again_where_they_are_of_after_the_checkpoint(tmp_path):
    """A checkpoint does not hold them, so that the one of somebody else cannot bring a model."""

    def learn(folder, stop=np.inf):
        env = make_vec_env("CartPole-v1", 2, seed=5)
        paths = dict(log_path=str(folder), best_model_save_path=str(folder))
        evaluation = EvalCallback(env, n_eval_episodes=2, eval_freq=50, verbose=0, **paths)
        evaluation.best_mean_reward = 0.0
        callbacks = [evaluation, InterruptAt(stop), ExactCheckpointCallback(folder / "checkpoints", verbose=0)]
        try:
            make_model(QA2C).learn(1000, callbacks)
        finally:
            written = np.load(folder / "evaluations.npz"), QA2C.load(folder / "best_model.zip", device="cpu")
        return written

    one, other = tmp_path / "one", tmp_path / "other"
    evaluations, best = learn(one)
    # After the second evaluation, in the same step
    with pytest.raises(Interrupted):
        learn(other, stop=400)
    newest = load_checkpoint(checkpoints_in(other / "checkpoints")[-1]).state
    assert newest["model"]["num_timesteps"] == 224 and np.load(other / "evaluations.npz")["timesteps"].tolist() == [200, 400]
    resumed, resumed_best = learn(other)
    assert evaluations["timesteps"].tolist() == [200, 400, 600, 800, 1000]
    assert all(np.array_equal(resumed[name], evaluations[name]) for name in ("timesteps", "results", "ep_lengths"))
    assert_same_parameters(resumed_best, best)


def test_a_missing_best_model_is_named(tmp_path):
    def learn(steps):
        env = make_vec_env("CartPole-v1", 1, seed=5)
        evaluation = EvalCallback(env, n_eval_episodes=1, eval_freq=20, verbose=0, best_model_save_path=tmp_path)
        make_model(QA2C).learn(steps, [evaluation, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0)])

    learn(160)
    (tmp_path / "best_model.zip").unlink()
    with pytest.warns(UserWarning, match=r"There is no best_model\.zip in .* until an evaluation is better than \d"):
        learn(320)


def resume_edited(folder, edit, model=None, callbacks=()):
    """:return: the model after a resume from a checkpoint of step 128 that somebody has edited"""
    state = load_checkpoint(checkpoints_in(folder)[-1]).state
    edit(state)
    save_checkpoint(folder, 200, state)
    model = make_model(QA2C) if model is None else model
    return model.learn(320, [*callbacks, ExactCheckpointCallback(folder, verbose=0)])


def test_a_checkpoint_of_somebody_else_brings_no_model(tmp_path):
    def evaluation():
        paths = dict(log_path=str(tmp_path), best_model_save_path=str(tmp_path))
        return EvalCallback(make_vec_env("CartPole-v1", 1, seed=5), eval_freq=30, verbose=0, **paths)

    make_model(QA2C).learn(128, [evaluation(), ExactCheckpointCallback(tmp_path / "checkpoints")])
    files = {path: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()}
    assert {path.name for path in files} == {"evaluations.npz", "best_model.zip"}

    def edit(state):
        assert not any(content in map(bytes, flat_bytes(state)) for content in files.values())
        state["evaluation_files"] = [b"a pickle that runs a command"] * 2
        # No evaluation is better
        state["callbacks"][0][1]["best_mean_reward"] = 10.0**6

    resume_edited(tmp_path / "checkpoints", edit, callbacks=[evaluation()])
    assert (tmp_path / "best_model.zip").read_bytes() == files[tmp_path / "best_model.zip"]
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [120, 240]


def flat_bytes(state):
    """:return: all bytes in the state, at any depth"""
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [state] if isinstance(state, bytes) else [found for item in items for found in flat_bytes(item)]


@pytest.mark.parametrize(
    "place", ["../../elsewhere/QA2C_1", "/elsewhere", "../tensorboard/QA2C_1/deeper", "..", "../tensorboard/new"]
)
def test_a_checkpoint_of_somebody_else_leads_tensorboard_to_no_other_folder(place, tmp_path):
    tensorboard_log = str(tmp_path / "run" / "tensorboard")
    make_model(QA2C, tensorboard_log=tensorboard_log).learn(128, ExactCheckpointCallback(tmp_path / "run" / "checkpoints"))
    place = place.replace("/elsewhere", str(tmp_path / "elsewhere")) if place.startswith("/") else place

    def edit(state):
        assert state["tensorboard"] == ["../tensorboard/QA2C_1"]
        state["tensorboard"] = [place]

    with pytest.warns(UserWarning, match="TensorBoard's rows from here on are in .*/run/tensorboard/QA2C_2"):
        resume_edited(tmp_path / "run" / "checkpoints", edit, make_model(QA2C, tensorboard_log=tensorboard_log))
    folders = {path.parent.relative_to(tmp_path / "run") for path in tmp_path.rglob("events.out.tfevents.*")}
    assert folders == {Path("tensorboard/QA2C_1"), Path("tensorboard/QA2C_2")}
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_logs_become_what_they_were_and_not_much_longer_than_their_part_of_the_checkpoint(tmp_path):
    for content in (b"", b"r,l,t\n1.0,2,0.3\n", bytes(10**7), os.urandom(10**5)):
        assert unpack_log(pack_log(content)) == content
    packed = zlib.compress(bytes(10**7), 1)
    # zlib makes it a thousand times as short
    assert len(packed) < 10**5 and len(pack_log(bytes(10**7))) >= 10**5
    for damaged in (packed, zlib.compress(b"text")[:-1], b"text", b""):
        with pytest.raises(CheckpointError, match=r"The checkpoint has a .*log file"):
            unpack_log(damaged)

    folder = tmp_path / "checkpoints"
    first, model = make_model(QA2C, tmp_path), make_model(QA2C, tmp_path)
    first.learn(128, ExactCheckpointCallback(folder))
    before = parameters_of(model)
    with pytest.raises(CheckpointError, match="more than 100 times as long"):
        resume_edited(folder, lambda state: state["logs"].__setitem__(0, packed), model)
    assert same(parameters_of(model), before) and (tmp_path / "0.monitor.csv").stat().st_size < 1000
    for trained in (first, model):
        trained.logger.close()
        trained.env.close()


class SavesIts(BaseCallback):
    """Writes files where its attributes say, in all the ways in which they can."""

    def __init__(self, folder, label="a"):
        super().__init__()
        self.folder, self.label, self.path = str(folder), label, Path(folder)
        self.name = os.path.join(folder, "model")
        self.options, self.saved = {"to": [self.name], "n": 1}, []
        self.save = functools.partial(np.savez, self.name)
        self.counts = Counter()

    def _on_training_start(self):
        # What is not its own
        self.network, self.log = self.model.policy, self.logger
        self.method = self.model.save

    def _on_step(self):
        self.options["n"] += 1
        # Below its own folder, as a callback that keeps the last few models
        self.saved.append(os.path.join(self.folder, str(self.num_timesteps)))
        return True


def hostile(state, values):
    """:return: what a state would set; objects stand for those of the same class in this process"""
    state["callbacks"][0][1].update(values)


ELSEWHERE = "/elsewhere/evil"
PLAIN = {
    **dict(folder=ELSEWHERE, label="b", path=ELSEWHERE, name=ELSEWHERE, saved=[ELSEWHERE], counts={ELSEWHERE: 1}),
    **dict(
        options={"to": ["../../evil"], "n": 7}, save=ELSEWHERE, log=None, method=ELSEWHERE, made_up="https://evil.example/"
    ),
    **dict(model=None, parent=None, verbose=7, locals={"a": 1}),
}


@pytest.mark.filterwarnings("ignore:.*is not restored, because the checkpoint has a path there")
@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_of_a_callback_no_paths_and_settings_are_taken(order, tmp_path):
    def callbacks(steps):
        return [SavesIts(tmp_path / "mine"), Sets(steps, None)][::order]

    def edit(state):
        (values,) = [values for name, values in state["callbacks"] if name == "SavesIts"]
        assert values["options"]["n"] == 33 and len(values["saved"]) == 32
        values.update({name: value for name, value in PLAIN.items() if name != only_kept})

    for only_kept in (None, "saved"):
        folder = tmp_path / str(only_kept)
        make_model(QA2C).learn(128, [*callbacks(None), ExactCheckpointCallback(folder, verbose=0)])
        mine = callbacks(None)
        resume_edited(folder, edit, callbacks=mine)
        (callback,) = [callback for callback in mine if isinstance(callback, SavesIts)]
        assert (callback.folder, callback.label, callback.path) == (str(tmp_path / "mine"), "a", tmp_path / "mine")
        assert callback.name == callback.options["to"][0] == callback.save.args[0] == str(tmp_path / "mine" / "model")
        assert callback.options["n"] == 1 + 48 and not callback.counts and not hasattr(callback, "made_up")
        assert callback.verbose == 0 and callback.log is callback.logger and callback.method == callback.model.save
        # Paths in the folder that it was given are its own
        steps = range(4 if only_kept else 132, 321, 4)
        assert callback.saved == [str(tmp_path / "mine" / str(step)) for step in steps]


@pytest.mark.parametrize("name", ["network", "log", "method", "model", "made_up"])
def test_no_objects_are_changed_to_which_a_callback_only_refers(name, tmp_path):
    make_model(QA2C).learn(128, [SavesIts(tmp_path), ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0)])
    model = make_model(QA2C)
    kinds = dict(network=model.policy, log=Logger(None, []), method=model.save, model=model, made_up=model)
    values = {"dir": ELSEWHERE, "gamma": 0.5, "n_steps": 7}
    values = {"object": ObjectState(kind_of(model), values)} if name == "method" else values

    def edit(state):
        state["callbacks"][0][1][name] = ObjectState(kind_of(kinds[name]), values)

    with pytest.raises(StateError, match=rf"SavesIts\.{name}") if name != "model" else contextlib.nullcontext():
        resume_edited(tmp_path / "checkpoints", edit, model, [SavesIts(tmp_path)])
    assert model.gamma == 0.99 and model.n_steps == 8 and not hasattr(model.policy, "gamma")


class Records(gym.Wrapper):
    """As gymnasium's ``RecordVideo``."""

    def __init__(self, env, folder):
        super().__init__(env)
        self.video_folder, self.name_prefix, self.word = os.path.abspath(folder), "rl-video", "s/he"

    def step(self, action):
        self.word += "!"
        return super().step(action)


@pytest.mark.filterwarnings("ignore:.*is not restored, because the checkpoint has a path there")
@pytest.mark.parametrize("change", [{"video_folder": ELSEWHERE}, {"video_folder": "evil"}, {"name_prefix": "../../evil"}])
def test_wrappers_write_where_this_start_says(change, tmp_path):
    def model():
        env = make_vec_env("CartPole-v1", 1, seed=0, wrapper_class=Records, wrapper_kwargs=dict(folder=str(tmp_path)))
        return QA2C("MlpPolicy", env, seed=0)

    model().learn(128, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0))

    def edit(state):
        records = state["env"].values["envs"][0]
        assert records.kind == kind_of(model().env.envs[0])
        records.values.update(change)

    env = resume_edited(tmp_path / "checkpoints", edit, model()).env.envs[0]
    assert (env.video_folder, env.name_prefix, env.word) == (str(tmp_path), "rl-video", "s/he" + 320 * "!")


def test_of_a_model_only_its_state_is_taken(tmp_path):
    make_model(Adapts).learn(128, ExactCheckpointCallback(tmp_path, verbose=0))
    model = make_model(Adapts, tensorboard_log=None)
    policy, env = model.policy, model.env

    def edit(state):
        assert state["algorithm"]["factor"] == 1.01**4
        state["model"].update(tensorboard_log="evil", verbose=2, train=1, gamma=0.5)
        state["algorithm"].update(tensorboard_log="evil", policy=None, env=None, _logger=None, device="cpu", extra=ELSEWHERE)

    with pytest.warns(UserWarning, match=r"Adapts\.extra is not restored, because the checkpoint has a path there .*evil"):
        resume_edited(tmp_path, edit, model)
    assert model.tensorboard_log is None and model.policy is policy and model.env is env and model.verbose == 0
    assert "train" not in vars(model) and not hasattr(model, "extra") and model.gamma == 0.99 and model.factor == 1.01**10


def test_an_object_that_is_none_of_the_algorithms_is_refused(tmp_path):
    make_model(QA2C, rollout_buffer_class=ScaledBuffer).learn(128, ExactCheckpointCallback(tmp_path, verbose=0))
    for place in ("algorithm", "rollout_buffer"):
        model = make_model(QA2C, rollout_buffer_class=ScaledBuffer)
        model.mine = model.rollout_buffer.mine = model.policy
        before = parameters_of(model)
        foreign = ObjectState(kind_of(model.policy), {"training": False})
        with pytest.raises(StateError, match=r"\.mine has no state of its own"):
            resume_edited(tmp_path, lambda state, foreign=foreign, place=place: state[place].update(mine=foreign), model)
        assert same(parameters_of(model), before)


def test_only_what_a_logger_has_recorded_is_taken(tmp_path):
    make_model(QA2C).learn(128, ExactCheckpointCallback(tmp_path, verbose=0))
    model = make_model(QA2C)
    resume_edited(tmp_path, lambda state: state["logger"].update(output_formats={}, dir=ELSEWHERE), model)
    assert model.logger.output_formats == [] and model.logger.dir != ELSEWHERE


@pytest.mark.parametrize("position", [-1, 625, 10**9])
@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.Philox, np.random.RandomState])
def test_a_position_outside_of_a_generators_numbers_is_refused(kind, position):
    """NumPy takes it, and the process dies when it draws."""

    class Holds(gym.Env):
        def __init__(self):
            self.rng = kind(0) if kind is np.random.RandomState else np.random.Generator(kind(0))

    state = get_state(Holds())
    values = state.values["rng"].values
    if kind is np.random.RandomState:
        values["state"] = (*values["state"][:2], position, *values["state"][3:])
    else:
        (values["state"]["state"] if kind is np.random.MT19937 else values["state"])[
            "pos" if kind is np.random.MT19937 else "buffer_pos"
        ] = position
    with pytest.raises(ValueError, match="the position of a random generator must be 0 to"):
        set_state(Holds(), state)


def damaged(value, rng):
    """:return: a copy of plain data in which one thing is missing or another one"""
    if isinstance(value, ObjectState) and rng.random() < 0.9:
        return ObjectState(value.kind, damaged(value.values, rng))
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        return rest if rng.random() < 0.2 else {**rest, key: damaged(value[key], rng)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.9:
        i = rng.randrange(len(value))
        return type(value)([*value[:i], damaged(value[i], rng), *value[i + 1 :]])
    return rng.choice(
        [None, -1, 10**12, "text", b"bytes", [], {}, ELSEWHERE, np.zeros(3), th.zeros(2, 2), ObjectState("a.B", {})]
    )


@pytest.mark.filterwarnings("ignore")
def test_damage_that_nobody_has_seen_is_refused_or_does_no_harm(tmp_path):
    """As of an edited checkpoint: an error that says so, and no file elsewhere."""
    rng = random.Random(0)

    def callbacks():
        return [SavesIts(tmp_path / "mine"), Observer(), ExactCheckpointCallback(tmp_path / "run", verbose=0)]

    make_model(QA2C).learn(128, callbacks())
    (tmp_path / "run" / "run.json").unlink()
    state = load_checkpoint(checkpoints_in(tmp_path / "run")[-1]).state
    n_refused = 0
    for _ in range(40):
        shutil.rmtree(tmp_path / "run")
        save_checkpoint(tmp_path / "run", 200, damaged(state, rng))
        model = make_model(QA2C)
        try:
            model.learn(132, callbacks())
        except (CheckpointError, StateError):
            n_refused += 1
        except Exception as error:
            # What the training itself makes of a number or an array that is another one
            trained = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert "_resume" not in trained and "restore_after_start" not in trained
    assert n_refused > 10
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


class Priced(gym.Wrapper):
    excluded_from_checkpoints = ("prices",)

    def __init__(self, env):
        super().__init__(env)
        self.prices = np.zeros(3)


class Named(BaseCallback):
    def __init__(self, path=None):
        super().__init__()
        self.path, self.place, self.found = path, "videos", None

    def _on_step(self):
        return True


@pytest.mark.filterwarnings("ignore:.*is not restored, because the checkpoint has a path there")
@pytest.mark.parametrize(
    "values",
    [{"path": np.str_("evil")}, {"path": b"evil"}, {"place": ".."}]
    + [{"found": found} for found in (b"/elsewhere/evil", np.array(["a", ELSEWHERE]), np.array([ELSEWHERE.encode()]))]
    + [{"_on_step": 5}],
    ids=str,
)
def test_other_kinds_of_text_are_no_paths_and_nothing_hides_a_method(values, tmp_path):
    make_model(QA2C).learn(128, [Named(), ExactCheckpointCallback(tmp_path, verbose=0)])
    callback = Named()
    resume_edited(tmp_path, lambda state: state["callbacks"][0][1].update(values), callbacks=[callback])
    assert (callback.path, callback.place, callback.found) == (None, "videos", None) and "_on_step" not in vars(callback)


def test_what_checkpoints_do_not_hold_of_an_environment_is_not_taken(tmp_path):
    def model(render_mode=None):
        kwargs = dict(wrapper_class=Priced, env_kwargs={"render_mode": render_mode})
        return QA2C("MlpPolicy", make_vec_env("CartPole-v1", 1, seed=0, **kwargs), seed=0)

    model().learn(128, ExactCheckpointCallback(tmp_path, verbose=0))

    def edit(state):
        state["env"].values["envs"][0].values["prices"] = np.ones(3)

    env = resume_edited(tmp_path, edit, model("rgb_array")).env
    assert not env.envs[0].prices.any()
    # How it is shown may be another way
    assert env.render_mode == env.envs[0].render_mode == "rgb_array" and env.envs[0].render() is not None


def test_paths_that_a_checkpoint_hides_in_other_data_are_not_set(tmp_path):
    hidden = dict(
        table=np.array([("/elsewhere", 1)], dtype=[("file", "U80"), ("n", "i4")]),
        part=slice("/elsewhere"),
        raw=b"/else\nwhere",
    )

    class Writes(BaseCallback):
        def __init__(self):
            super().__init__()
            self.table, self.part, self.raw = np.array([("mine", 1)], dtype=hidden["table"].dtype), slice("mine"), b"mine"

        def _on_step(self):
            return True

    make_model(QA2C).learn(128, [Writes(), ExactCheckpointCallback(tmp_path, verbose=0)])
    checkpoint = newest_checkpoint(tmp_path)
    checkpoint.state["callbacks"][0][1].update(hidden)
    save_checkpoint(tmp_path, 128, checkpoint.state)
    callback = Writes()
    with pytest.warns(UserWarning, match="is not restored, because the checkpoint has a path there") as said:
        make_model(QA2C).learn(192, [callback, ExactCheckpointCallback(tmp_path, verbose=0)])
    assert len([warning for warning in said if "has a path there" in str(warning.message)]) >= 3
    assert callback.table["file"][0] == "mine" and callback.part.stop == "mine" and callback.raw == b"mine"


@pytest.mark.parametrize(
    "change",
    [{"objects": 5}, {"iteration": "x"}, {"new_episodes_at": [np.zeros(2)]}, {"evaluation_random": {}}, {"left_out": 5}],
    ids=str,
)
def test_what_would_fail_later_is_refused_at_the_start(change, tmp_path):
    make_model(QA2C).learn(128, ExactCheckpointCallback(tmp_path, verbose=0))
    with pytest.raises(CheckpointError, match="cannot be restored"):
        resume_edited(tmp_path, lambda state: state.update(change))


@pytest.mark.parametrize(
    "change",
    [
        *({"num_timesteps": math.nan}, {"_n_updates": "x"}, {"_current_progress_remaining": None}, {"_last_obs": None}),
        *({"_last_obs": np.zeros((2, 7))}, {"_last_episode_starts": "abc"}, {"_last_episode_starts": np.zeros(2)}),
    ],
    ids=str,
)
def test_a_rollout_begins_with_counters_and_observations_of_the_model_only(change, tmp_path):
    make_model(QA2C).learn(128, ExactCheckpointCallback(tmp_path, verbose=0))
    (name,) = change
    with pytest.raises(CheckpointError, match=f"cannot be restored .*{name}"):
        resume_edited(tmp_path, lambda state: state["model"].update(change))


def test_a_rollout_buffer_keeps_the_sizes_of_the_model(tmp_path):
    make_model(QA2C).learn(128, ExactCheckpointCallback(tmp_path, verbose=0))
    model = make_model(QA2C)
    resume_edited(tmp_path, lambda state: state["rollout_buffer"].update(buffer_size=10**13, n_envs=5), model)
    assert (model.rollout_buffer.buffer_size, model.rollout_buffer.n_envs) == (model.n_steps, model.n_envs)


class DrawsInAnotherPlace(gym.Wrapper):
    """From generators that are in a deque, and behind a method."""

    def __init__(self, env):
        super().__init__(env)
        self.generators, self.draw = deque([np.random.default_rng(3)]), np.random.default_rng(4).random

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs + np.float32(0.1 * self.draw()), info

    def step(self, action):
        obs, *others = self.env.step(action)
        return obs + np.float32(0.1 * self.generators[0].random()), *others


def test_an_episode_is_replayed_with_generators_in_any_place(tmp_path):
    def model():
        env = make_vec_env("CartPole-v1", 2, seed=0, wrapper_class=lambda env: EpisodeReplay(DrawsInAnotherPlace(env)))
        return QA2C("MlpPolicy", env, n_steps=8, seed=0)

    through = model().learn(320)
    with pytest.raises(Interrupted):
        model().learn(320, [InterruptAt(200), ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)])
    resumed = model().learn(320, [InterruptAt(np.inf), ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)])
    assert_same_parameters(through, resumed)
