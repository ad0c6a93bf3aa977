"""A run that was stopped continues as if it had not been."""

import contextlib
import csv
import functools
import io
import itertools
import json
import os
import random
import shutil
import signal
import time
import types
import uuid
import zipfile
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
from stable_baselines3.common.logger import HParam, configure
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
from sb3_qac.resume.checkpoints import CheckpointError, checkpoints_in, load_checkpoint, save_checkpoint
from sb3_qac.resume.logs import results_writers
from sb3_qac.resume.state import StateError, get_values, is_constant, objects_in
from sb3_qac.resume.wandb import WandbOutputFormat, restore_wandb, wandb_rows
from sb3_qac.zoo.resume import unfinished_run
from tests.envs import InterruptAt, Interrupted, Unrepeatable
from tests.kill_and_resume import differences, kill_and_resume, run_to_the_end, tensorboard_rows
from tests.wandb_files import wandb_configs, wandb_ids, wandb_parts

pytestmark = pytest.mark.usefixtures("ctrl_c")
# Steps of a rollout of `make_model`
ROLLOUT = 32


def make_model(algorithm=QA2C, folder=None, env_id="CartPole-v1", n_envs=4, normalize=False, **kwargs):
    env = make_vec_env(env_id, n_envs, seed=1, monitor_dir=None if folder is None else str(folder))
    env = VecNormalize(env) if normalize else env
    tensorboard_log = None if folder is None else str(folder / "tensorboard")
    arguments = dict(n_steps=8, learning_rate=1e-3, seed=0, device="cpu", tensorboard_log=tensorboard_log)
    arguments["policy_kwargs"] = dict(net_arch=[8])
    if algorithm in (PPO, QPPO):
        arguments.update(batch_size=16, n_epochs=2)
    if algorithm is REINFORCE:
        del arguments["n_steps"]
    return algorithm("MlpPolicy", env, **{**arguments, **kwargs})


def steps_of(folder):
    """:return: steps of the checkpoints in a folder"""
    return [int(path.name[5:17]) for path in checkpoints_in(folder)]


def interrupted(stop):
    """:return: a context in which a run is interrupted if it stops at a finite step"""
    return pytest.raises(Interrupted) if stop < np.inf else contextlib.nullcontext()


def straight_and_resumed(folder, make=make_model, callbacks=list, stops=(200,), steps=320, order=1, **kwargs):
    """
    :param make: Function that makes the model
    :param callbacks: Function that makes its callbacks, which come before (order 1) or behind (-1) that of the checkpoints
    :param stops: Steps at which the second run is interrupted
    :return: model and callbacks of a run that was never stopped and of one that was; they have the same parameters
    """

    def learn(name, stop=np.inf):
        model, others = make(), callbacks()
        checkpoint = ExactCheckpointCallback(folder / name, save_freq=64, verbose=0)
        with interrupted(stop):
            model.learn(steps, [*others, InterruptAt(stop), checkpoint][::order], **kwargs)
        return model, others

    for stop in stops:
        learn("resumed", stop)
    straight, resumed = learn("straight"), learn("resumed")
    assert_same_parameters(straight[0], resumed[0])
    return straight, resumed


def assert_same_parameters(one, other):
    assert one._n_updates == other._n_updates and one.num_timesteps == other.num_timesteps
    assert same(parameters_of(one), parameters_of(other))
    states = [flatten(model.policy.optimizer.state_dict()["state"]) for model in (one, other)]
    assert states[0].keys() == states[1].keys() and all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


def parameters_of(model):
    return {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}


def same(one, other):
    return all(th.equal(one[name], other[name]) for name in one)


def flatten(states):
    return {(i, name): value for i, state in states.items() for name, value in state.items()}


def read_monitor(path):
    return [row[:2] for row in csv.reader(path.read_text().splitlines()[2:])]


def train(algorithm, folder, stop=np.inf, normalize=False, progress_bar=False):
    """:return: the model; it is the script that a user would run again"""
    model = make_model(algorithm, folder, normalize=normalize)
    eval_env = make_vec_env("CartPole-v1", 2, seed=5)
    eval_env = VecNormalize(eval_env, training=False, norm_reward=False) if normalize else eval_env
    evaluation = EvalCallback(eval_env, n_eval_episodes=2, eval_freq=100, deterministic=False, log_path=folder, verbose=0)
    every = EveryNTimesteps(300, InterruptAt(np.inf))
    checkpoint = ExactCheckpointCallback(folder / "checkpoints", save_freq=200, verbose=0)
    try:
        callbacks = [evaluation, every, InterruptAt(stop), checkpoint, CurvesCallback()]
        return model.learn(1000, callbacks, 7, progress_bar=progress_bar)
    finally:
        model.logger.close()
        model.env.close()


@pytest.mark.filterwarnings("ignore:rich is experimental")
@pytest.mark.parametrize(
    ("algorithm", "normalize", "progress_bar"),
    [(QA2C, True, True), *(pytest.param(each, False, False, marks=pytest.mark.slow) for each in (PPO, REINFORCE))],
)
def test_a_run_continues_exactly(algorithm, normalize, progress_bar, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    straight = train(algorithm, one, normalize=normalize)
    # The second interruption comes before the next checkpoint
    for stop in (450, 470):
        with pytest.raises(Interrupted):
            train(algorithm, other, stop, normalize)
    resumed = train(algorithm, other, normalize=normalize, progress_bar=progress_bar)
    assert_same_parameters(straight, resumed)
    evaluations = [np.load(folder / "evaluations.npz") for folder in (one, other)]
    assert all(np.array_equal(evaluations[0][name], evaluations[1][name]) for name in ("timesteps", "results", "ep_lengths"))
    # One folder of TensorBoard's each, not a second one for each part
    logs = [list((folder / "tensorboard").iterdir()) for folder in (one, other)]
    assert [len(folders) for folders in logs] == [1, 1]
    rows = [tensorboard_rows(folders[0]) for folders in logs]
    assert rows[0] == rows[1] and len(rows[0]) > 20
    for i in range(4):
        monitors = [read_monitor(folder / f"{i}.monitor.csv") for folder in (one, other)]
        assert monitors[0] == monitors[1] and len(monitors[0]) > 5


@pytest.mark.parametrize("algorithm", [QA2C, REINFORCE])
def test_a_finished_run_is_not_repeated(algorithm, tmp_path):
    def learn():
        return make_model(algorithm).learn(320, ExactCheckpointCallback(tmp_path, verbose=0))

    first, before = learn(), checkpoints_in(tmp_path)
    # REINFORCE ends inside a rollout: it plays on from its newest checkpoint to the same end
    again = learn()
    assert_same_parameters(first, again)
    assert checkpoints_in(tmp_path) == before and read_json(tmp_path / "run.json")["finished"]


def test_a_longer_run_continues_a_finished_one(tmp_path):
    make_model().learn(160, ExactCheckpointCallback(tmp_path, verbose=0))
    longer = make_model().learn(320, ExactCheckpointCallback(tmp_path, verbose=0))
    assert_same_parameters(longer, make_model().learn(320))


@pytest.mark.parametrize(
    "kwargs", [dict(learning_rate=LinearSchedule(1e-3, 0.0, 1.0)), dict(clip_range=lambda left: 0.2 * left)]
)
def test_a_longer_run_whose_schedules_follow_the_new_end_warns(kwargs, tmp_path):
    make_model(PPO, **kwargs).learn(32, ExactCheckpointCallback(tmp_path))
    (name,) = kwargs
    with pytest.warns(UserWarning, match=f"`learn` that ends at step 32, and this one ends at step 64: .* {name} follow"):
        make_model(PPO, **kwargs).learn(64, ExactCheckpointCallback(tmp_path))


def test_checkpoints_and_evaluations_do_not_change_a_run(tmp_path):
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1, seed=3), eval_freq=50, deterministic=False, verbose=0)
    checkpoint = ExactCheckpointCallback(tmp_path, save_freq=10**6, keep=100)
    evaluated = make_model().learn(640, [evaluation, checkpoint])
    assert_same_parameters(evaluated, make_model().learn(640))
    # Evaluations at 200, 400 and 600: a checkpoint at the end of the update of each, and at the start and the end
    assert evaluation.last_mean_reward > 0 and steps_of(tmp_path) == [0, 224, 416, 608, 640]


def test_an_evaluation_of_two_runs_is_resumed_exactly(tmp_path):
    def train_twice(folder, stop):
        eval_env = make_vec_env("CartPole-v1", 2, seed=5)
        evaluation = EvalCallback(eval_env, n_eval_episodes=2, eval_freq=40, deterministic=False, log_path=folder, verbose=0)
        for steps, end in ((160, np.inf), (480, stop)):
            with interrupted(end):
                make_model().learn(steps, [evaluation, InterruptAt(end), ExactCheckpointCallback(folder / str(steps))])
        return evaluation.evaluations_results

    straight = train_twice(tmp_path / "straight", np.inf)
    train_twice(tmp_path / "resumed", 400)
    assert train_twice(tmp_path / "resumed", np.inf) == straight and len(straight) == 4


@pytest.mark.parametrize(("seconds_to_save", "rollouts"), [(0, 10), (10, 16)])
def test_a_checkpoint_is_written_every_few_minutes_at_little_cost(seconds_to_save, rollouts, tmp_path, monkeypatch):
    spent, model = [0], make_model()

    def save_slowly(*args):
        spent[0] += seconds_to_save
        return save_checkpoint(*args)

    monkeypatch.setattr(resume_callback, "save_checkpoint", save_slowly)
    # One second for each step
    monkeypatch.setattr(resume_callback, "time", types.SimpleNamespace(monotonic=lambda: model.num_timesteps + spent[0]))
    model.learn(1100, ExactCheckpointCallback(tmp_path, keep=99, verbose=0))
    # Ten rollouts are the first with 300 seconds, and sixteen those with 50 times the 10 of a slow checkpoint
    assert steps_of(tmp_path) == [*range(0, 1100, ROLLOUT * rollouts), 1120]


def test_resume_gives_a_model_that_is_ready_to_continue(tmp_path):
    make_model().learn(160, ExactCheckpointCallback(tmp_path))
    model = resume(make_model(), tmp_path)
    assert model.num_timesteps == 160
    model.learn(160, reset_num_timesteps=False)
    assert model.num_timesteps == 320 and same(parameters_of(model), parameters_of(make_model().learn(320)))
    # And from a file
    assert resume(make_model(), checkpoints_in(tmp_path)[-1]).num_timesteps == 160
    with pytest.raises(CheckpointError, match=r"missing\.safetensors cannot be read"):
        resume(make_model(), tmp_path / "missing.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*empty"):
        resume(make_model(), tmp_path / "empty")


def test_resume_warns_of_an_end_inside_a_rollout(tmp_path):
    class StopAt100(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 100

    # 100 is in the fourth rollout of 32 steps, and the only checkpoint that of the start
    make_model().learn(2000, [StopAt100(), ExactCheckpointCallback(tmp_path)])
    with pytest.warns(UserWarning, match="ended at step 100, after its newest good checkpoint, which is of step 0"):
        assert resume(make_model(), tmp_path).num_timesteps == 0


class OtherBuffer(RolloutBuffer):
    pass


class WithBonus(A2C):
    """An algorithm of the user's, with two arguments of its own."""

    def __init__(self, *args, bonus=1.0, decay=0.5, **kwargs):
        self.bonus, self.decay = bonus, LinearSchedule(decay, 0.0, 1.0)
        super().__init__(*args, **kwargs)


@pytest.fixture(scope="module")
def checkpoints_of(tmp_path_factory):
    """:return: a function from an algorithm to the folder of a short run"""

    @functools.cache
    def make(algorithm):
        folder = tmp_path_factory.mktemp(algorithm.__name__)
        make_model(algorithm).learn(320 if algorithm is REINFORCE else 32, ExactCheckpointCallback(folder))
        return folder

    return make


@pytest.mark.parametrize(
    ("algorithm", "other", "message"),
    [
        (QA2C, lambda: make_model(A2C), "algorithm is 'A2C', and was 'QA2C'"),
        (QA2C, lambda: make_model(env_id="Acrobot-v1"), "environment is 'Acrobot-v1', and was 'CartPole-v1'"),
        (QA2C, lambda: make_model(n_envs=2), "n_envs is 2, and was 4"),
        (QA2C, lambda: make_model(gamma=0.5), "gamma is 0.5, and was 0.99"),
        (QA2C, lambda: make_model(learning_rate=0.1), r"learning_rate is \[0.1, 0.1\], and was \[0.001, 0.001\]"),
        (REINFORCE, lambda: make_model(REINFORCE, n_episodes=2), "n_episodes is 2, and was 1"),
        (PPO, lambda: make_model(PPO, clip_range=0.1), r"clip_range is \[0.1, 0.1\], and was \[0.2, 0.2\]"),
        (PPO, lambda: make_model(PPO, target_kl=0.1), "target_kl is 0.1, and was None"),
        (A2C, lambda: make_model(A2C, use_rms_prop=False), "optimizer_class is 'Adam', and was 'RMSprop'"),
        (A2C, lambda: make_model(A2C, rollout_buffer_class=OtherBuffer), "rollout_buffer_class is 'OtherBuffer', and was"),
        (A2C, lambda: make_model(A2C, policy_kwargs=dict(net_arch=[9])), r"net_arch is \[9\], and was \[8\]"),
        (WithBonus, lambda: make_model(WithBonus, bonus=2.0), "bonus is 2.0, and was 1.0"),
        (WithBonus, lambda: make_model(WithBonus, decay=0.25), r"decay is \[0.25, 0.125\], and was \[0.5, 0.25\]"),
    ],
)
def test_the_checkpoint_of_a_different_run_is_refused(algorithm, other, message, checkpoints_of):
    with pytest.raises(CheckpointError, match=f"a different run: .*{message}"):
        resume(other(), checkpoints_of(algorithm))


def test_what_does_not_change_the_numbers_may_differ(tmp_path, checkpoints_of):
    shown = make_vec_env("CartPole-v1", 4, env_kwargs=dict(render_mode="rgb_array"))
    model = make_model(verbose=0, stats_window_size=3, tensorboard_log=str(tmp_path))
    model.set_env(shown)
    resumed = resume(model, checkpoints_of(QA2C))
    assert resumed.num_timesteps == 32 and resumed.ep_info_buffer.maxlen == resumed.ep_success_buffer.maxlen == 3


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
def test_a_run_in_another_environment_is_refused(make_env, message, tmp_path):
    QA2C("MlpPolicy", make_env(False), seed=0).learn(10, ExactCheckpointCallback(tmp_path))
    with pytest.raises(CheckpointError, match=f"a different run: .*{message}"):
        resume(QA2C("MlpPolicy", make_env(True), seed=0), tmp_path)


def test_a_refused_resume_leaves_model_callbacks_and_folder_as_they_were(tmp_path):
    make_model().learn(64, ExactCheckpointCallback(tmp_path, verbose=0))
    model = make_model()
    before = parameters_of(model)
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1, seed=5), eval_freq=20, n_eval_episodes=1, verbose=0)
    with pytest.raises(CheckpointError, match=r"The callbacks are \['EvalCallback'\], but .* with \[\]: use the same ones"):
        model.learn(1000, [evaluation, ExactCheckpointCallback(tmp_path, verbose=0)])
    assert same(parameters_of(model), before)
    model.learn(96, evaluation)
    assert evaluation.last_mean_reward > 0
    with FileLock(tmp_path / "lock", blocking=False):
        pass


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
def test_a_batched_environment_of_ones_own_is_resumed_exactly(tmp_path):
    def wrap(n_envs):
        return VecNormalize(VecMonitor(Batch(n_envs)))

    straight_and_resumed(
        tmp_path,
        lambda: QA2C("MlpPolicy", wrap(4), n_steps=8, seed=0, device="cpu"),
        lambda: [EvalCallback(wrap(2), n_eval_episodes=2, eval_freq=20, verbose=0, warn=False)],
    )


class HiddenDraws(gym.Env):
    """Draws random numbers from generators in many places. The rest of the state cannot be read."""

    observation_space, action_space = spaces.Box(-9, 9, (11,)), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.hidden = iter(range(0))
        self.rng, self.old_rng, self.own = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.parts = types.SimpleNamespace(rngs=[np.random.default_rng(1)], torch=th.Generator())
        self.noise_space = spaces.Dict(a=spaces.Box(0, 1, (1,)), seed=0)
        self.draw, self.queue = np.random.default_rng(4).random, deque([np.random.default_rng(3)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        own = [self.np_random.random(), self.rng.random(), self.old_rng.rand(), self.own.random(), self.draw()]
        inside = [self.parts.rngs[0].random(), th.rand(1, generator=self.parts.torch).item(), *self.noise_space.sample()["a"]]
        of_everybody = [random.random(), np.random.rand(), th.rand(1).item()]
        self.obs = np.array(own + inside + of_everybody, np.float32)
        self.hidden = iter(range(20))
        return self.obs, {}

    def step(self, action):
        t = next(self.hidden)
        return self.obs * (1 + t % 3), float(self.obs[t % 10] * action + self.queue[0].random()), t == 19, False, {}


def test_an_environment_that_draws_from_any_generator_is_resumed_exactly_by_a_replay(tmp_path):
    def make():
        env = make_vec_env(HiddenDraws, 3, seed=0, wrapper_class=EpisodeReplay)
        # PPO draws from NumPy's generator, and each action from PyTorch's
        return PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")

    straight_and_resumed(tmp_path, make, stops=(170, 250))


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
        (lambda: make_vec_env(Unrepeatable, 2, wrapper_class=EpisodeReplay), 100, "did not reproduce the saved observation"),
        (lambda: make_vec_env(Unrepeatable, 2), 0, "hidden .* cannot be taken"),
        pytest.param(in_processes, 0, "in other processes", marks=pytest.mark.slow),
    ],
    ids=["replayed", "hidden", "in processes"],
)
def test_a_run_whose_environments_cannot_be_restored_is_resumed_with_new_episodes(make_env, refused_at, message, tmp_path):
    def train_to(stop=np.inf, n_steps=200, **kwargs):
        envs = [VecNormalize(make_env()) for _ in range(3)]
        model = QA2C("MlpPolicy", envs[0], n_steps=8, seed=0, device="cpu")
        evaluation = EvalCallback(envs[1], n_eval_episodes=2, eval_freq=50, verbose=0, warn=False)
        checkpoints = ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0, **kwargs)
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
    with pytest.raises(Interrupted):
        train_to(150, new_episodes=True)
    assert train_to(new_episodes=True).num_timesteps == 208
    # There is a checkpoint every 32 steps, and one after the evaluation at step 100
    assert read_json(tmp_path / "run.json")["new_episodes_at"] == ([144] if refused_at == 0 else [96, 144])


@pytest.mark.parametrize("written_with", [True, False])
def test_with_new_episodes_everything_but_the_episodes_is_that_of_the_checkpoint(written_with, tmp_path):
    def make():
        return make_model(normalize=True)

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
    else:
        with pytest.raises(StateError, match=r"was written with new episodes.* `new_episodes=True`"):
            resume(make(), tmp_path)


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


class HasMoreAndMoreGenerators(MakesItsGame):
    def __init__(self):
        super().__init__()
        self.generators = [np.random.default_rng(0)]

    def step(self, action):
        if len(self.generators) < 3:
            self.generators.append(np.random.default_rng(1))
        return super().step(action)


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


def test_objects_that_environments_make_in_reset_are_resumed(tmp_path):
    """In those of evaluations too, which are not reset before the first evaluation."""

    def callbacks():
        eval_env = DummyVecEnv([lambda: Monitor(MakesItsGame())])
        return [EvalCallback(eval_env, n_eval_episodes=2, eval_freq=50, log_path=tmp_path, verbose=0)]

    runs = straight_and_resumed(tmp_path, lambda: QA2C("MlpPolicy", DummyVecEnv([MakesItsGame] * 2), seed=0), callbacks)
    straight, resumed = (evaluation.evaluations_results for _, (evaluation,) in runs)
    assert straight == resumed and len(straight) == 3


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (lambda: MakesItsGame(late=True), r"bonus is a .*Game, and was not there when the run started.*`reset`"),
        (HasMoreAndMoreGenerators, "generators is a list of 3 objects, and was list of 1 objects when the run started"),
    ],
)
def test_a_checkpoint_that_the_next_start_would_refuse_is_not_written(make_env, message, tmp_path):
    def model():
        return QA2C("MlpPolicy", DummyVecEnv([make_env]), n_steps=6, seed=0)

    with pytest.warns(UserWarning, match=rf"envs\[0\]\.{message}"):
        model().learn(30, ExactCheckpointCallback(tmp_path, save_freq=1))
    resume(model(), checkpoints_in(tmp_path)[-1])


def test_an_object_that_was_gone_at_a_checkpoint_may_be_there_again_after_a_resume(tmp_path):
    def train_on(folder, n_steps, save_freq):
        model = QA2C("MlpPolicy", DummyVecEnv([LosesItsBonus] * 2), n_steps=5, seed=0)
        return model.learn(n_steps, ExactCheckpointCallback(folder, save_freq=save_freq, verbose=0))

    # A checkpoint that cannot be written is a warning, which fails here
    train_on(tmp_path / "resumed", 10, 1)
    state = load_checkpoint(checkpoints_in(tmp_path / "resumed")[-1]).state
    gone = state["objects"].keys() - dict(objects_in(state["env"], "the environment")).keys()
    assert any("bonus" in place for place in gone)
    assert_same_parameters(train_on(tmp_path / "resumed", 100, 1), train_on(tmp_path / "straight", 100, 1000))


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


def test_parameters_that_a_callback_has_frozen_or_freed_stay_so(tmp_path):
    def make():
        model = make_model()
        model.policy.q_net.requires_grad_(False)
        return model

    def swap(model):
        model.policy.action_net.requires_grad_(False)
        model.policy.q_net.requires_grad_(True)

    straight_and_resumed(tmp_path, make, lambda: [Sets(64, swap)])


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


@pytest.mark.parametrize("algorithm", [QPPO, HasMore])
def test_what_users_add_to_an_algorithm_continues(algorithm, tmp_path):
    (straight, _), (resumed, _) = straight_and_resumed(
        tmp_path, lambda: make_model(algorithm, rollout_buffer_class=ScaledBuffer)
    )
    for name in ("further.weight", "multiplier") if algorithm is HasMore else ():
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


def test_extra_state_of_a_policy_continues(tmp_path):
    for steps in (96, 192):
        model = QA2C(CountsUpdates, make_vec_env("CartPole-v1", 4, seed=1), n_steps=8, seed=0)
        model.learn(steps, ExactCheckpointCallback(tmp_path, verbose=0))
        assert model.policy.updates == steps // 32


@pytest.mark.parametrize(("algorithm", "ent_coef"), [(QA2C, 0.01), (QPPO, "lin_0.01"), (A2C, 0.0)])
def test_an_entropy_coefficient_that_a_callback_sets_continues(tmp_path, algorithm, ent_coef):
    # The second resume is from a checkpoint that the first one has written
    _, (resumed, _) = straight_and_resumed(
        tmp_path,
        lambda: make_model(algorithm, ent_coef=ent_coef),
        lambda: [Sets(64, lambda model: setattr(model, "ent_coef", 0.5))],
        stops=(140, 220),
    )
    assert resumed.ent_coef == 0.5
    if algorithm is A2C:
        # What was given is still compared
        with pytest.raises(CheckpointError, match=r"a different run: ent_coef is 0\.25, and was 0\.0"):
            resume(make_model(A2C, ent_coef=0.25), tmp_path / "resumed")


@pytest.mark.parametrize(
    ("name", "named", "before"), [("clip_range", "clip_range", 0.2), ("lr_schedule", "learning_rate", 0.001)]
)
def test_a_schedule_that_a_callback_replaces_is_named_in_warnings(name, named, before, tmp_path):
    def learn(steps, step):
        change = Sets(step, lambda model: setattr(model, name, LinearSchedule(0.3, 0.1, 1.0)))
        make_model(PPO).learn(steps, [change, ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)])

    message = rf"do not have {named}\..*: {named} is \[0\.3, 0\.2\d*\], and was \[{before}, {before}\]"
    with pytest.warns(UserWarning, match=message) as said:
        learn(192, step=64)
    assert len(said) == 1
    with pytest.warns(UserWarning, match=rf"not resumed exactly, because .* does not have {named}: taken from this start"):
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


def test_attributes_of_the_users_own_algorithm_continue(tmp_path):
    (straight, _), (resumed, _) = straight_and_resumed(tmp_path, lambda: make_model(Adapts))
    for name in ("factor", "scale", "history", "made_later"):
        assert getattr(resumed, name) == getattr(straight, name)
    assert resumed.rng.random() == straight.rng.random() and resumed.statistics.mean == straight.statistics.mean
    # As without the callback
    assert resume(make_model(Adapts), tmp_path / "resumed").history == straight.history


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


def test_settings_of_callbacks_may_be_changed(tmp_path):
    def make_callbacks(eval_freq, n_eval_episodes, max_episodes):
        evaluation = EvalCallback(
            make_vec_env("CartPole-v1", 1, seed=3), n_eval_episodes=n_eval_episodes, eval_freq=eval_freq, verbose=0
        )
        return [evaluation, StopTrainingOnMaxEpisodes(max_episodes), ExactCheckpointCallback(tmp_path, verbose=0)]

    make_model().learn(200, make_callbacks(1000, 1, 1000))
    evaluation, stop, checkpoint = make_callbacks(100, 2, 5)
    model = make_model().learn(10_000, [evaluation, stop, checkpoint])
    assert (evaluation.eval_freq, evaluation.n_eval_episodes, stop.max_episodes) == (100, 2, 5)
    # 5 in each of 4 environments, those before the resume included
    assert 20 <= stop.n_episodes < 24 and model.num_timesteps < 10_000


class RecordsHyperparameters(BaseCallback):
    """As the example in SB3's documentation."""

    def _on_training_start(self):
        self.logger.record(
            "hparams", HParam({"gamma": self.model.gamma}, {"train/value_loss": 0.0}), exclude=("stdout", "log")
        )

    def _on_step(self):
        return True


def test_hyperparameters_that_wait_for_their_row_are_logged_after_a_resume(tmp_path):
    """A checkpoint cannot hold them: each start records them again."""
    for stop in (100, np.inf):
        model = make_model(folder=tmp_path, verbose=1)
        checkpoint = ExactCheckpointCallback(tmp_path / "checkpoints", 64)
        with interrupted(stop):
            model.learn(320, [RecordsHyperparameters(), InterruptAt(stop), checkpoint], log_interval=7)
        model.logger.close()
        model.env.close()
    events = [EventAccumulator(str(path)) for path in (tmp_path / "tensorboard").rglob("QA2C_*") if path.is_dir()]
    for accumulator in events:
        accumulator.Reload()
    assert sum("_hparams_/session_start_info" in accumulator.summary_metadata for accumulator in events) == 1


@pytest.mark.skipif(os.name != "posix", reason="Windows needs rights for symbolic links")
def test_tensorboard_continues_in_its_folder_where_checkpoints_are_behind_a_symbolic_link(tmp_path):
    disk, home = tmp_path / "disk" / "deep" / "down", tmp_path / "home"
    disk.mkdir(parents=True)
    home.mkdir()
    (home / "logs").symlink_to(disk)
    for steps in (64, 128):
        model = make_model(tensorboard_log=str(home / "runs"))
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


@pytest.mark.slow
@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), -1], ids=["before", "behind"])
def test_a_callback_that_keeps_the_writer_of_tensorboard_continues_in_the_same_folder(order, tmp_path):
    for stop in (100, 200, np.inf):
        # In a second of its own: TensorBoard sorts its files by their times
        time.sleep(1)
        model = make_model(tensorboard_log=str(tmp_path / "tensorboard"))
        callbacks = [KeepsTheWriter(), InterruptAt(stop), ExactCheckpointCallback(tmp_path / "checkpoints", 64, verbose=0)]
        with interrupted(stop):
            model.learn(320, callbacks[::order], log_interval=1)
        model.logger.close()
        model.env.close()
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["QA2C_1"]
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "QA2C_1"))
    shown.Reload()
    for tag in ("mine/steps", "mine/format"):
        assert [event.step for event in shown.Scalars(tag)] == list(range(4, 321, 4))
    assert [event.step for event in shown.Tensors("mine/text/text_summary")][-1] == 320
    assert [event.step for event in shown.Scalars("train/value_loss")] == list(range(64, 321, 32))


def test_another_tensorboard_log_is_continued_in_and_said(tmp_path):
    def learn(steps, name):
        model = make_model(tensorboard_log=str(tmp_path / name))
        model.learn(steps, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0), log_interval=1)
        model.logger.close()

    learn(64, "first")
    (tmp_path / "second" / "mine" / "empty").mkdir(parents=True)
    with pytest.warns(UserWarning, match="from here on are in .*second/deep/QA2C_1, and those before were in .*first/Q"):
        learn(128, "second/deep")
    learn(192, "second/deep")
    assert (tmp_path / "second" / "mine" / "empty").is_dir()
    first, second = (tensorboard_rows(tmp_path / name / "QA2C_1") for name in ("first", "second/deep"))
    # The first one is in the row of the second update
    assert {step for step, *_ in first} == {64} and {step for step, *_ in second} == {96, 128, 160, 192}


class Doubling(BaseCallback):
    """A setting that is changed by the run, as a schedule's is."""

    def __init__(self):
        super().__init__()
        self.numbers = [1]

    def _on_step(self):
        if self.num_timesteps % 80 == 0:
            self.numbers.append(2 * self.numbers[-1])
        return True


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


def test_values_of_callbacks_continue(tmp_path):
    (_, straight), (_, resumed) = straight_and_resumed(
        tmp_path, callbacks=lambda: [Doubling(), FiresEvery(), KeepsTrades(), CountsActions()]
    )
    doubling, fires, keeps, counts = resumed
    assert doubling.numbers == [1, 2, 4, 8, 16]
    # What a callback computes at its start before the one of the checkpoints is not computed twice
    assert fires.fired_at == list(range(40, 321, 40))
    assert keeps.trades == straight[2].trades and keeps.trades[-1] == (320, Fraction(80, 3) + 1)
    assert type(keeps.trades[0]) is Trade and keeps.window == slice(70, None)
    assert counts.counts == straight[3].counts and type(counts.counts) is Counts and counts.counts.total == 320


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
        if self.num_timesteps > 100:
            self.phase = "late"
        self.seen.append((self.rollouts, obs.sum(), self.games.total, len(self.visited), self.phase))
        return True


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


class Plots(BaseCallback):
    """As PlottingCallback in SB3's tutorial: a plot from its first step on."""

    def __init__(self):
        super().__init__()
        self._plot, self.axes, self.n_drawn = None, None, 0

    def _on_step(self):
        if self._plot is None:
            fig = Figure()
            (self.axes,) = (fig.subplots(1, 2),)
            (line,) = self.axes[0].plot([], [])
            self._plot = (line, self.axes[0], fig)
        self._plot[0].set_data(range(self.num_timesteps), range(self.num_timesteps))
        self.n_drawn += 1
        return True


class WatchesEpisodes(BaseCallback):
    """Holds a list of the model."""

    def _on_training_start(self):
        self.episodes = self.model.ep_info_buffer

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        assert self.episodes is self.model.ep_info_buffer


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_what_a_callback_has_made_for_itself_or_refers_to_is_resumed(order, tmp_path):
    def callbacks():
        return [Observer(), Averages(), Plots(), WatchesEpisodes()]

    (_, straight), (_, resumed) = straight_and_resumed(tmp_path, callbacks=callbacks, stops=(150, 220), order=order)
    assert resumed[0].seen == straight[0].seen and len(resumed[0].seen) == 80
    assert {phase for *_, phase in resumed[0].seen} == {"early", "late"}
    assert resumed[1].norms == straight[1].norms and len(set(resumed[1].norms)) == 10
    assert same(resumed[1].average, straight[1].average)
    # References to the parameters are so after a resume
    assert resumed[1].live["q_net.weight"].data_ptr() == resumed[1].model.policy.q_net.weight.data_ptr()
    # The last steps only, in a plot of its own
    assert resumed[2].n_drawn == straight[2].n_drawn == 80
    assert resumed[2]._plot[0].axes is resumed[2].axes[0] and resumed[2]._plot is not straight[2]._plot


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
        make_model().learn(64, [Holder(extra), ExactCheckpointCallback(tmp_path)])


def test_a_callback_whose_state_cannot_be_kept_is_refused_in_a_resumed_run_too(tmp_path):
    make_model().learn(64, [Holder(Games()), ExactCheckpointCallback(tmp_path)])
    with pytest.raises(StateError, match=r"Holder\.extra has no state of its own, but its saved state is that of a .*Games"):
        make_model().learn(128, [Holder(None), ExactCheckpointCallback(tmp_path)])
    with pytest.raises(StateError, match=r"Holder\.extra"):
        make_model().learn(128, [Holder(iter([1])), ExactCheckpointCallback(tmp_path)])


def test_tensors_of_which_only_some_are_the_policys_are_refused(tmp_path):
    callback = Averages()
    callback._on_rollout_start = lambda: callback.live.update(extra=th.ones(1))
    with pytest.raises(StateError, match=r"Averages\.live has tensors of the policy and others: keep them in two attributes"):
        make_model().learn(64, [callback, ExactCheckpointCallback(tmp_path)])


def test_a_counter_that_is_made_late_is_not_written_as_a_plain_dictionary(tmp_path):
    class Late(Holder):
        def _on_step(self):
            self.extra = Counter(a=1)
            return True

    with pytest.warns(UserWarning, match=r"Late\.extra is a collections\.Counter, and was not there when the run started"):
        make_model().learn(96, [Late(None), ExactCheckpointCallback(tmp_path, save_freq=1)])


@dataclass
class Total(BaseCallback):
    """It has no hash, as dataclasses that can be compared."""

    total: float = 0.0

    def __post_init__(self):
        super().__init__()

    def _on_step(self):
        self.total += self.num_timesteps
        return True


class FrozenTeacher(th.nn.Linear):
    pass


def test_a_callback_may_be_a_dataclass_and_hold_what_is_registered_as_without_state(tmp_path):
    get_values.register(FrozenTeacher, lambda obj, name, seen: {})
    for n_steps in (64, 128):
        callback, teacher = Total(), FrozenTeacher(1, 1)
        weight = teacher.weight.clone()
        make_model().learn(n_steps, [callback, Holder(teacher), ExactCheckpointCallback(tmp_path)])
        assert th.equal(teacher.weight, weight)
    # Four environments: 4 + 8 + ... + 128
    assert callback.total == 4 * sum(range(1, 33))


def test_methods_of_displays_and_services_are_no_state():
    bar = tqdm(total=1, disable=True)
    for value in (bar, bar.update, functools.partial(bar.update, 1), (bar, [None, bar.update])):
        assert is_constant(value, set())
    for value in (random.Random(0).random, [bar, 1], None, [], [None]):
        assert not is_constant(value, set())


@pytest.mark.filterwarnings("ignore:rich is experimental", "ignore:.*:optuna.exceptions.ExperimentalWarning")
def test_callbacks_of_sb3_and_rl_zoo_and_wandb_are_taken(tmp_path, monkeypatch):
    # None again after the test
    monkeypatch.setattr(wandb, "run", None)
    often = dict(eval_freq=40, n_eval_episodes=1, verbose=0)

    def callbacks():
        eval_env, trial = make_vec_env("CartPole-v1", 1, seed=3), optuna.create_study().ask()
        return [
            EvalCallback(eval_env, StopTrainingOnRewardThreshold(10**6), StopTrainingOnNoModelImprovement(99), **often),
            TrialEvalCallback(make_vec_env("CartPole-v1", 1, seed=3), trial, **often),
            CheckpointCallback(100, str(tmp_path / "models")),
            SaveVecNormalizeCallback(100, str(tmp_path / "models")),
            RawStatisticsCallback(),
            WandbCallback(model_save_path=str(tmp_path / "wandb"), model_save_freq=100),
            LogEveryNTimesteps(300),
            EveryNTimesteps(200, ConvertCallback(lambda *_: True)),
            *(StopTrainingOnMaxEpisodes(10**6), CurvesCallback()),
        ]

    with wandb.init(mode="disabled"):
        straight_and_resumed(
            tmp_path,
            lambda: make_model(tensorboard_log=str(tmp_path / "tensorboard")),
            callbacks,
            log_interval=None,
            progress_bar=True,
        )
    # The run that was resumed came first
    rows = [tensorboard_rows(tmp_path / "tensorboard" / f"QA2C_{i}") for i in (1, 2)]
    # RawStatisticsCallback counts steps of its own, so TensorBoard has some of its rows twice
    assert set(rows[0]) == set(rows[1]) and any(tag == "raw/rollouts/episodic_return" for _, tag, _ in rows[0])


class RecordsMeans(BaseCallback):
    def _on_rollout_start(self):
        self.logger.record_mean("mean", self.num_timesteps)

    def _on_step(self):
        return True


class LogsItsRollouts(A2C):
    """Records a value between the end of a rollout and its row."""

    def collect_rollouts(self, *args, **kwargs):
        continues = super().collect_rollouts(*args, **kwargs)
        self.logger.record("mine", self.num_timesteps)
        return continues


@pytest.mark.parametrize(
    ("algorithm", "log_interval", "save_freq", "stop"),
    [(LogsItsRollouts, 1, 224, 300), (LogsItsRollouts, 5, 320, 400), (A2C, 5, 224, 500)],
    ids=["each rollout", "checkpoint at a row", "checkpoint between rows"],
)
def test_rows_of_the_log_are_those_of_a_run_that_was_never_stopped(algorithm, log_interval, save_freq, stop, tmp_path):
    def learn(folder, stop=np.inf):
        model = make_model(algorithm)
        model.set_logger(configure(str(folder), ["json"]))
        callbacks = [RecordsMeans(), InterruptAt(stop), ExactCheckpointCallback(folder / "checkpoints", save_freq, verbose=0)]
        with interrupted(stop):
            model.learn(640, callbacks, log_interval)
        model.logger.close()
        rows = map(json.loads, (folder / "progress.json").read_text().splitlines())
        return [{name: value for name, value in row.items() if name not in ("time/fps", "time/time_elapsed")} for row in rows]

    straight = learn(tmp_path / "one")
    learn(tmp_path / "other", stop)
    assert learn(tmp_path / "other") == straight
    assert [row["time/iterations"] for row in straight] == list(range(log_interval, 21, log_interval))


def test_the_users_list_of_callbacks_stays_as_it_is(tmp_path):
    mine = [InterruptAt(np.inf), ExactCheckpointCallback(tmp_path / "list")]
    make_model().learn(32, mine)
    assert len(mine) == 2
    both = CallbackList([InterruptAt(np.inf), ExactCheckpointCallback(tmp_path / "object")])
    for steps in (32, 64):
        make_model().learn(steps, both)
        assert len(both.callbacks) == 2


def test_what_can_no_longer_be_kept_of_a_callback_is_left_out_and_said(tmp_path):
    class Breaking(Holder):
        def __init__(self):
            super().__init__(None)
            self.rng = np.random.default_rng(0)

        def _on_step(self):
            if self.num_timesteps == 160:
                # Its generator is the callback's, which is kept
                self.extra = types.SimpleNamespace(rng=self.rng, unknown=object())
            self.drawn = self.rng.random()
            return True

    def learn(steps):
        callback = Breaking()
        make_model().learn(steps, [callback, ExactCheckpointCallback(tmp_path, save_freq=64)])
        return callback

    with pytest.warns(
        UserWarning, match=r"Checkpoints do not have Breaking\.extra\..*: The state of .*unknown .* cannot be"
    ) as said:
        drawn = learn(320).drawn
    assert len(said) == 1 and steps_of(tmp_path) == [192, 256, 320]
    with pytest.warns(UserWarning, match=r"not resumed exactly, because .* does not have Breaking\.extra: taken from"):
        callback = learn(320)
    assert callback.drawn == drawn and callback.extra is None


def tree_with_parents():
    root = {"children": []}
    root["children"].append({"parent": root})
    return root


def nested(levels):
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize("value", [tree_with_parents(), nested(400)], ids=["contains itself", "400 levels deep"])
def test_data_that_no_checkpoint_can_hold_is_left_out_and_named(value, tmp_path):
    class Collects(Holder):
        def _on_step(self):
            self.extra = value if self.num_timesteps > 160 else None
            return True

    with pytest.warns(UserWarning, match=r"Checkpoints do not have Collects\.extra\."):
        make_model().learn(320, [Collects(None), ExactCheckpointCallback(tmp_path, save_freq=64, verbose=0)])
    assert steps_of(tmp_path)[-1] == 320
    with pytest.raises(StateError, match=r"Holder\."):
        make_model().learn(64, [Holder(value), ExactCheckpointCallback(tmp_path / "start", verbose=0)])


def test_what_can_no_longer_be_read_of_an_environment_does_not_stop_a_run(tmp_path):
    def change(model):
        model.env.envs[0].unwrapped.extra = object()

    with pytest.warns(UserWarning, match=r"No checkpoint of step .*extra .* The run continues") as caught:
        model = make_model().learn(320, [Sets(160, change), ExactCheckpointCallback(tmp_path, save_freq=64)])
    # At 192, 256 and the end
    assert model.num_timesteps == 320 and len(caught) == 3 and steps_of(tmp_path) == [0, 64, 128]


def test_a_run_that_changes_its_working_folder_keeps_its_checkpoints_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Moves(BaseCallback):
        def _on_step(self):
            os.makedirs("deeper", exist_ok=True)
            os.chdir(tmp_path / "deeper")
            return True

    make_model().learn(64, [Moves(), ExactCheckpointCallback("run", verbose=0)])
    assert steps_of(tmp_path / "run") == [0, 64] and not (tmp_path / "deeper" / "run").exists()


def test_other_logs_are_refused(tmp_path):
    def learn(formats):
        model = make_model()
        model.set_logger(configure(str(tmp_path), formats))
        try:
            model.learn(32, ExactCheckpointCallback(tmp_path / "checkpoints"))
        finally:
            model.logger.close()

    learn(["csv", "json"])
    with pytest.raises(CheckpointError, match=r"0 CSV logs are open, but 1 were .*: give the environments and the logger"):
        learn(["log", "json"])
    with pytest.raises(CheckpointError, match="3 log files are open, but 2 were"):
        learn(["csv", "json", "log"])


def test_monitor_files_of_all_kinds_of_environments_are_found(tmp_path):
    kwargs = dict(wrapper_kwargs=dict(screen_size=21), vec_env_kwargs=dict(num_threads=1))
    native = VecFrameStack(make_ale_vec_env("BreakoutNoFrameskip-v4", 2, 0, monitor_dir=str(tmp_path / "a"), **kwargs), 2)
    stock = VecNormalize(make_vec_env("CartPole-v1", 2, monitor_dir=str(tmp_path / "b")))
    batched = VecMonitor(DummyVecEnv([lambda: gym.make("CartPole-v1")]), str(tmp_path / "c"))
    names = [[Path(writer.file_handler.name).name for writer in results_writers(env)] for env in (native, stock, batched)]
    for env in (native, stock, batched):
        env.close()
    assert names == [["0.monitor.csv", "1.monitor.csv"]] * 2 + [["c.monitor.csv"]]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    make_model().learn(160, ExactCheckpointCallback(tmp_path, save_freq=64))
    newest = checkpoints_in(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    model = make_model()
    with pytest.warns(UserWarning, match="is damaged.*Going back to the one before"):
        model.learn(320, ExactCheckpointCallback(tmp_path, save_freq=64))
    assert_same_parameters(model, make_model().learn(320))
    assert newest not in checkpoints_in(tmp_path)


def test_a_full_disk_does_not_stop_a_run(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No checkpoint of step .* No space left") as caught:
        patch.setattr("sb3_qac.resume.callback.save_checkpoint", no_space)
        model = make_model().learn(160, ExactCheckpointCallback(tmp_path, save_freq=64))
    # At 0, 64, 128 and the end
    assert model.num_timesteps == 160
    endings = [str(warning.message).partition("left on device. ")[2] for warning in caught]
    none_yet, others = "there is no checkpoint yet", "the earlier checkpoints stay"
    assert endings == [f"The run continues, and {text}." for text in (none_yet, *[others] * 3)]


def test_a_disk_that_is_full_at_the_end_does_not_lose_the_model(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    class FillDisk(BaseCallback):
        def _on_step(self):
            if self.num_timesteps == 64:
                monkeypatch.setattr(os, "fsync", no_space)
            return True

    with pytest.warns(UserWarning, match="No space left") as caught:
        model = make_model().learn(96, [FillDisk(), ExactCheckpointCallback(tmp_path, save_freq=500)])
    assert model.num_timesteps == 96 and not read_json(tmp_path / "run.json")["finished"]
    for warning, start in zip(caught, ("No checkpoint of step 96", "This run has ended"), strict=True):
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
        (lambda: make_model(env_id="LunarLander-v3"), "world.*cannot be taken.*EpisodeReplay"),
    ],
)
def test_what_cannot_be_resumed_is_refused_at_the_start(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        model().learn(100, ExactCheckpointCallback(tmp_path))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda folder: ExactCheckpointCallback(folder, save_freq=0), "`save_freq` .* 0"),
        (lambda folder: ExactCheckpointCallback(folder, keep=0), "`keep` .* 0"),
        (lambda folder: ExactCheckpointCallback(folder, keep=1.5), r"`keep` must be an integer, at least 1, but 1\.5"),
        (lambda folder: ExactCheckpointCallback(), "`folder` is missing"),
        (lambda folder: ExactCheckpointCallback(folder / "file" / "run"), "file/run cannot be made a folder .*Name another"),
        (
            lambda folder: [ExactCheckpointCallback(folder), ExactCheckpointCallback(folder)],
            "several `ExactCheckpointCallback`",
        ),
        # It tells its child neither of rollouts nor of their ends: there would not be one checkpoint
        (lambda folder: EveryNTimesteps(100, ExactCheckpointCallback(folder)), r"EveryNTimesteps .* `save_freq`"),
    ],
)
def test_a_callback_that_would_write_no_checkpoints_is_refused(callback, message, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        make_model().learn(100, callback(tmp_path))


@pytest.mark.parametrize("first", [True, False])
def test_calls_that_continue_each_other_need_folders_of_their_own(first, tmp_path):
    """The first call of a new start would resume the second one's run, and end at once."""

    def train(folders):
        model = make_model()
        for folder, reset in zip(folders, (first, False), strict=True):
            model.learn(64, ExactCheckpointCallback(folder, verbose=0), reset_num_timesteps=reset)
        return model

    assert train([tmp_path / "one"] * 2).num_timesteps == 128
    with pytest.raises(CheckpointError, match=r"a `learn` that ends at step 128.*at step 64\..* give each its own folder"):
        train([tmp_path / "one"] * 2)
    apart = [tmp_path / "first", tmp_path / "second"]
    # The second time, the first call finds its run finished
    assert_same_parameters(train(apart), train(apart))


def test_a_run_may_end_earlier_than_it_was_meant_to(tmp_path):
    for stop, steps in ((200, 1000), (np.inf, 320)):
        callbacks = [InterruptAt(stop), ExactCheckpointCallback(tmp_path, save_freq=64)]
        model = make_model()
        with interrupted(stop):
            model.learn(steps, callbacks, reset_num_timesteps=False)
    assert model.num_timesteps == 320


def test_two_processes_do_not_share_a_folder(tmp_path):
    with FileLock(tmp_path / "lock"), pytest.raises(CheckpointError, match="Another process is training in"):
        make_model().learn(32, ExactCheckpointCallback(tmp_path))
    make_model().learn(32, ExactCheckpointCallback(tmp_path))


def test_a_callback_writes_checkpoints_in_another_run_too(tmp_path):
    callback = ExactCheckpointCallback(tmp_path / "first", save_freq=64, keep=10, verbose=0)
    make_model().learn(160, callback)
    callback.folder = tmp_path / "second"
    make_model().learn(160, callback)
    assert steps_of(tmp_path / "first") == steps_of(tmp_path / "second") == [0, 64, 128, 160]


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
    with pytest.raises(KeyboardInterrupt):
        make_model().learn(320, CallbackList([SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path)]))
    assert "SIGINT: stopping with a checkpoint" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # 100 is in the fourth rollout of 32 steps
    assert steps_of(tmp_path) == [0, 128] and not read_json(tmp_path / "run.json")["finished"]
    model = make_model().learn(320, [SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path)])
    assert_same_parameters(model, make_model().learn(320))


@pytest.mark.parametrize(("end", "steps"), [(np.inf, [0, 128]), (100, [0])])
def test_ctrl_c_in_the_last_update_is_handled_too(end, steps, tmp_path):
    """``learn`` would come to its end as if nothing had been pressed, and the script would start the next run."""

    class StopAt(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < end

    callback = CallbackList([SignalAt(signal.SIGINT), ExactCheckpointCallback(tmp_path), StopAt()])
    with pytest.raises(KeyboardInterrupt):
        make_model().learn(128, callback)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert steps_of(tmp_path) == steps and not read_json(tmp_path / "run.json")["finished"]
    make_model().learn(128, [SignalAt(signal.SIGINT, times=0), ExactCheckpointCallback(tmp_path), StopAt()])
    assert read_json(tmp_path / "run.json")["finished"]


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make_model().learn(320, [SignalAt(signal.SIGINT, times=2), ExactCheckpointCallback(tmp_path)])
    assert steps_of(tmp_path) == [0]


def test_after_an_error_in_a_run_ctrl_c_is_what_it_was(tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two"):
        with pytest.raises(Interrupted):
            make_model().learn(320, [InterruptAt(100), ExactCheckpointCallback(folder)])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_may_let_the_run_continue(tmp_path):
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        make_model().learn(320, [SignalAt(signal.SIGTERM), ExactCheckpointCallback(tmp_path, keep=10)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] and steps_of(tmp_path) == [0, 128, 320]


def zoo_run(algo, folder):
    """:return: RL Zoo's manager and its model, as the same command makes them each time"""
    zoo.register()
    hyperparams = dict(callback=[{"sb3_qac.common.callbacks.ExactCheckpointCallback": dict(save_freq=64, verbose=0)}])
    hyperparams.update(n_envs=4, n_steps=16, **(dict(batch_size=16, n_epochs=3) if algo == "ppo" else {}))
    manager = ExperimentManager(
        *(types.SimpleNamespace(), algo, "CartPole-v1", str(folder)),
        **dict(n_timesteps=320, eval_freq=-1, seed=0, verbose=0, device="cpu", log_interval=-1, hyperparams=hyperparams),
    )
    return manager, manager.setup_experiment()[0]


def fail():
    raise RuntimeError("out of memory")


def press_ctrl_c_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("algo", "interrupt"), [("ppo", press_ctrl_c_twice), ("qa2c", fail)])
def test_an_update_that_was_interrupted_is_repeated(algo, interrupt, tmp_path):
    """RL Zoo calls ``on_training_end`` then too, with an update half done."""
    straight_manager, straight = zoo_run(algo, tmp_path / "one")
    straight_manager.learn(straight)

    manager, model = zoo_run(algo, tmp_path / "other")
    steps_per_update = 3 * 64 // 16 if algo == "ppo" else 1
    count = itertools.count(1)
    # In a middle minibatch of the fourth of five updates; QA2C has one only
    last = 3 * steps_per_update + (steps_per_update + 1) // 2
    model.policy.optimizer.register_step_post_hook(lambda *_: interrupt() if next(count) == last else None)
    with pytest.raises(RuntimeError) if interrupt is fail else contextlib.nullcontext():
        manager.learn(model)
    run = Path(manager.save_path, "checkpoints")
    assert not read_json(run / "run.json")["finished"] and steps_of(run)[-1] == 3 * 64

    manager, model = zoo_run(algo, tmp_path / "other")
    assert run.parent == Path(manager.save_path)
    manager.learn(model)
    assert read_json(run / "run.json")["finished"]
    assert_same_parameters(model, straight)


def test_in_an_error_handler_an_interruption_is_not_an_end_and_an_end_is_one(tmp_path):
    class Cautious(QA2C):
        def learn(self, total_timesteps, callback, **kwargs):
            try:
                return super().learn(total_timesteps, callback, **kwargs)
            finally:
                callback.on_training_end()

    for folder, interrupt, steps in (("failed", fail, [0]), ("finished", lambda: None, [0, 64])):
        model = make_model(Cautious)
        model.policy.optimizer.register_step_post_hook(lambda *_, interrupt=interrupt: interrupt())
        with pytest.raises(RuntimeError) if interrupt is fail else contextlib.nullcontext():
            # An error that is being handled when the run starts is none of the run
            try:
                raise KeyError
            except KeyError:
                model.learn(64, ExactCheckpointCallback(tmp_path / folder))
        assert read_json(tmp_path / folder / "run.json")["finished"] == (folder == "finished")
        assert steps_of(tmp_path / folder) == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "stack", "seed"),
    [("qa2c", "native", 0), ("a2c", "stock", 1), ("qppo", "native", 2), ("ppo", "native", 3), ("reinforce", "stock", 4)],
)
def test_killed_runs_continue_exactly(algo, stack, seed, tmp_path):
    """The short version of kill_and_resume.py: two kills at random moments, some inside the writing of a checkpoint."""
    seconds = run_to_the_end(algo, stack, tmp_path / "reference", 2000)
    # Half as long at most: on a machine that has become less busy it would come to its end before the first kill
    kills = kill_and_resume(algo, stack, tmp_path / "killed", 2000, 2, seconds / 2, random.Random(seed))
    assert differences(tmp_path / "reference", tmp_path / "killed") == []
    assert kills


def zoo_arguments(*arguments):
    callback = "callback:{'sb3_qac.common.callbacks.ExactCheckpointCallback': dict(save_freq=400)}"
    return [
        *("--algo", "qa2c", "--env", "CartPole-v1", "--n-timesteps", "1600", "--device", "cpu", "--num-threads", "1"),
        *("--eval-freq", "800", "--eval-episodes", "2", "--log-interval", "10", "--log-folder", "logs", "--track"),
        *("--hyperparams", callback, *arguments),
    ]


# RL Zoo gives TensorBoard's folder a name with the time
@pytest.mark.filterwarnings("ignore:TensorBoard's rows from here on are in")
def test_a_zoo_command_run_again_continues_with_its_seed_in_the_same_folder_and_wandb_run(
    tmp_path, rl_zoo, offline_wandb, monkeypatch
):
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for folder in (reference, killed):
        folder.mkdir()

    def interrupt(callback):
        if callback.num_timesteps >= 1000:
            raise Interrupted
        return True

    # Without a seed: RL Zoo draws one
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(ExactCheckpointCallback, "_on_step", interrupt)
        rl_zoo("train", *zoo_arguments(), cwd=killed)
    wandb.teardown()
    run = killed / "logs" / "qa2c" / "CartPole-v1_1"
    seed = read_json(run / "checkpoints" / "run.json")["seed"]
    # What does not change the numbers may change
    output = rl_zoo("train", *zoo_arguments("--verbose", "0"), cwd=killed)
    wandb.teardown()
    assert f"Seed: {seed}, from the run" in output and "Resuming from step" in output
    assert dict(yaml.load((run / "CartPole-v1" / "args.yml").read_text(), Loader=yaml.UnsafeLoader))["seed"] == seed
    assert read_json(run / "checkpoints" / "run.json").items() >= {"seed": seed, "finished": True}.items()
    assert [config["seed"] for config in wandb_configs(killed)] == [seed, seed]

    # As if it had been given, and the run never stopped, in another process
    monkeypatch.delenv("WANDB_RUN_ID")
    monkeypatch.setattr("sb3_qac.zoo.resume._resumed_wandb_run", None)
    rl_zoo("train", *zoo_arguments("--seed", seed), cwd=reference)
    # Its service has written everything when it has ended
    wandb.teardown()
    assert [path.name for path in (killed / "logs" / "qa2c").iterdir()] == ["CartPole-v1_1"]
    runs = [reference / "logs" / "qa2c" / "CartPole-v1_1", run]
    evaluations = [np.load(run / "evaluations.npz") for run in runs]
    assert all(np.array_equal(evaluations[0][name], evaluations[1][name]) for name in ("timesteps", "results", "ep_lengths"))
    models = [QA2C.load(run / "CartPole-v1.zip", device="cpu") for run in runs]
    assert models[0].seed == models[1].seed == seed
    assert_same_parameters(*models)
    (rows,), parts = wandb_parts(reference), wandb_parts(killed)
    for row in itertools.chain(rows, *parts):
        for name in ("time/fps", "_timestamp", "_runtime"):
            row.pop(name, None)
    # The last part has them all, as if there had been one process; those before were cut short
    assert parts[-1] == rows and len(rows) == 4
    assert all(part == rows[: len(part)] for part in parts)
    assert [row["_step"] for row in rows] == [row["global_step"] for row in rows]
    assert wandb_ids(killed) == {wandb_run_id(run / "checkpoints")} and len(parts) == 2


def test_only_an_unfinished_run_of_the_same_command_is_continued(tmp_path):
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


class WandbRun:
    """W&B's side of a run: rows below the current step are dropped, with a warning for each."""

    id, project, entity, disabled = "one", "p", "e", False
    settings = types.SimpleNamespace(sync_tensorboard=False)

    def __init__(self, step=0):
        self.step, self.rows, self.n_warnings = step, {}, 0

    def log(self, row, step):
        if step < self.step:
            self.n_warnings += 1
            return
        self.step = step
        self.rows.setdefault(step, {}).update(row)


def test_wandb_gets_each_row_once(tmp_path, monkeypatch):
    def learn(run, stop=np.inf):
        """With a row for every 64 steps, and a checkpoint for every 128."""
        monkeypatch.setattr(wandb, "run", run)
        model = make_model()
        with interrupted(stop):
            model.learn(640, [InterruptAt(stop), ExactCheckpointCallback(tmp_path, save_freq=128)], log_interval=2)
        model.logger.close()

    run = WandbRun()
    assert wandb_run_id(tmp_path) is None
    learn(run, 300)
    assert list(run.rows) == [64, 128, 192, 256] and wandb_run_id(tmp_path) == "one"
    # W&B has rows after the checkpoint, of step 256, or lost some before it
    first = dict(run.rows)
    learn(run, 500)
    resumed, lost = WandbRun(step=449), WandbRun(step=129)
    shutil.copytree(tmp_path, tmp_path / "copy")
    learn(resumed)
    for name in ("run.json", *(path.name for path in checkpoints_in(tmp_path))):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.copytree(tmp_path / "copy", tmp_path, dirs_exist_ok=True)
    learn(lost)
    assert list(resumed.rows) == [512, 576, 640] and list(lost.rows) == list(range(192, 641, 64))
    assert lost.rows[192]["train/value_loss"] == first[192]["train/value_loss"]
    assert resumed.n_warnings == lost.n_warnings == run.n_warnings == 0


def test_wandb_itself_has_each_row_under_its_step(tmp_path, monkeypatch):
    """The same with W&B: its service, offline."""
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = None
    for start in (0, 8):
        with wandb.init(mode="offline", project="p", id="one-run", dir=str(tmp_path)) as run:
            logger = types.SimpleNamespace(output_formats=[WandbOutputFormat(run)])
            restore_wandb(logger, rows)
            for value in range(start, start + 8):
                # Two rows may have the same step
                logger.output_formats[0].write({f"x{value % 2}": value}, {f"x{value % 2}": ()}, step=10 * (value // 2))
            rows = wandb_rows(logger)
    # Its service has written everything when it has ended
    wandb.teardown()
    parts = [[(row["_step"], row["x0"], row["x1"]) for row in part] for part in wandb_parts(tmp_path)]
    expected = [(10 * i, 2 * i, 2 * i + 1) for i in range(8)]
    assert parts == [expected[:4], expected]


def test_an_evaluation_writes_its_files_again_where_they_are_of_after_the_checkpoint(tmp_path):
    """A checkpoint does not hold them, so that the one of somebody else cannot bring a model."""

    def learn(folder, stop=np.inf):
        env = make_vec_env("CartPole-v1", 2, seed=5)
        paths = dict(log_path=str(folder), best_model_save_path=str(folder))
        evaluation = EvalCallback(env, n_eval_episodes=2, eval_freq=25, verbose=0, **paths)
        evaluation.best_mean_reward = 0.0
        callbacks = [evaluation, InterruptAt(stop), ExactCheckpointCallback(folder / "checkpoints", verbose=0)]
        with interrupted(stop):
            make_model().learn(400, callbacks)
        return np.load(folder / "evaluations.npz"), QA2C.load(folder / "best_model.zip", device="cpu")

    one, other = tmp_path / "one", tmp_path / "other"
    evaluations, best = learn(one)
    # After the second evaluation, in the same step
    learn(other, stop=200)
    assert steps_of(other / "checkpoints")[-1] == 128
    assert np.load(other / "evaluations.npz")["timesteps"].tolist() == [100, 200]
    resumed, resumed_best = learn(other)
    assert evaluations["timesteps"].tolist() == [100, 200, 300, 400]
    assert all(np.array_equal(resumed[name], evaluations[name]) for name in ("timesteps", "results", "ep_lengths"))
    assert_same_parameters(resumed_best, best)


def test_another_number_of_episodes_is_refused_where_evaluations_are_kept_in_one_table(tmp_path):
    def train(n_steps, n_eval_episodes):
        env = make_vec_env("CartPole-v1", 1, seed=3)
        evaluation = EvalCallback(env, n_eval_episodes=n_eval_episodes, eval_freq=50, log_path=tmp_path, verbose=0)
        make_model(QA2C).learn(n_steps, [evaluation, ExactCheckpointCallback(tmp_path / "checkpoints", verbose=0)])

    train(320, 1)
    with pytest.raises(CheckpointError, match=r"`n_eval_episodes` of EvalCallback is 2, and was 1.*give the earlier number"):
        train(640, 2)
    train(640, 1)
