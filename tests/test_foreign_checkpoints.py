"""A checkpoint that somebody else has edited runs nothing, writes nowhere else, and fills neither memory nor disk."""

import functools
import math
import os
import random
import shutil
import traceback
import zlib
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3 import A2C
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from sb3_qac import QA2C
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.resume.checkpoints import CheckpointError, checkpoints_in, load_checkpoint, save_checkpoint
from sb3_qac.resume.logs import pack_log, unpack_log
from sb3_qac.resume.state import ObjectState, StateError, get_state, kind_of, set_state

ELSEWHERE = "/elsewhere/evil"
pytestmark = pytest.mark.filterwarnings("ignore:.*is not restored, because the checkpoint has a path there")


def make_model(algorithm=QA2C, env=None, **kwargs):
    env = make_vec_env("CartPole-v1", 4, seed=1) if env is None else env
    return algorithm("MlpPolicy", env, n_steps=8, seed=0, device="cpu", policy_kwargs=dict(net_arch=[8]), **kwargs)


def learn(folder, callbacks=(), model=None, steps=64):
    model = make_model() if model is None else model
    return model.learn(steps, [*callbacks, ExactCheckpointCallback(folder, verbose=0)])


def resume_edited(folder, edit, model=None, callbacks=()):
    """:return: the model after a resume from a checkpoint of step 64 that somebody has edited"""
    state = load_checkpoint(checkpoints_in(folder)[-1]).state
    edit(state)
    save_checkpoint(folder, 200, state)
    return learn(folder, callbacks, model, steps=128)


def parameters_of(model):
    return {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}


def same(one, other):
    return all(th.equal(one[name], other[name]) for name in one)


def test_it_brings_no_model(tmp_path):
    def evaluation():
        paths = dict(log_path=str(tmp_path), best_model_save_path=str(tmp_path))
        return EvalCallback(make_vec_env("CartPole-v1", 1, seed=5), n_eval_episodes=2, eval_freq=15, verbose=0, **paths)

    learn(tmp_path / "checkpoints", [evaluation()])
    best_model = (tmp_path / "best_model.zip").read_bytes()

    def edit(state):
        state["evaluation_files"] = [b"a pickle that runs a command"] * 2
        # No evaluation is better
        state["callbacks"][0][1]["best_mean_reward"] = 10.0**6

    resume_edited(tmp_path / "checkpoints", edit, callbacks=[evaluation()])
    assert (tmp_path / "best_model.zip").read_bytes() == best_model
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [60, 120]


@pytest.mark.parametrize("place", ["../../elsewhere/QA2C_1", "/elsewhere", "../tensorboard/QA2C_1/deeper", ".."])
def test_it_leads_tensorboard_to_no_other_folder(place, tmp_path):
    tensorboard_log = str(tmp_path / "run" / "tensorboard")
    learn(tmp_path / "run" / "checkpoints", model=make_model(tensorboard_log=tensorboard_log))
    place = place.replace("/elsewhere", str(tmp_path / "elsewhere")) if place.startswith("/") else place

    def edit(state):
        assert state["tensorboard"] == ["../tensorboard/QA2C_1"]
        state["tensorboard"] = [place]

    with pytest.warns(UserWarning, match="TensorBoard's rows from here on are in .*/run/tensorboard/QA2C_2"):
        resume_edited(tmp_path / "run" / "checkpoints", edit, make_model(tensorboard_log=tensorboard_log))
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
        with pytest.raises(CheckpointError, match=r"The checkpoint has a log file that is damaged, or more than 100 times"):
            unpack_log(damaged)

    def model():
        return make_model(env=make_vec_env("CartPole-v1", 4, seed=1, monitor_dir=str(tmp_path)))

    trained, resumed = learn(tmp_path / "checkpoints", model=model()), model()
    before = parameters_of(resumed)
    with pytest.raises(CheckpointError, match="more than 100 times as long"):
        resume_edited(tmp_path / "checkpoints", lambda state: state["logs"].__setitem__(0, packed), resumed)
    assert same(parameters_of(resumed), before) and (tmp_path / "0.monitor.csv").stat().st_size < 1000
    for each in (trained, resumed):
        each.env.close()


class SavesIts(BaseCallback):
    """Writes files where its attributes say, in all the ways in which they can."""

    def __init__(self, folder, label="a"):
        super().__init__()
        self.folder, self.label, self.path = str(folder), label, Path(folder)
        self.name = os.path.join(folder, "model")
        self.options, self.saved = {"to": [self.name], "n": 1}, []
        self.save = functools.partial(np.savez, self.name)
        self.counts = Counter()
        self.rng = np.random.default_rng(0)

    def _on_training_start(self):
        # What is not its own
        self.network, self.log = self.model.policy, self.logger
        self.method = self.model.save

    def _on_step(self):
        self.options["n"] += self.rng.integers(1, 2)
        # Below its own folder, as a callback that keeps the last few models
        self.saved.append(os.path.join(self.folder, str(self.num_timesteps)))
        return True


PLAIN = {
    **dict(folder=ELSEWHERE, label="b", path=ELSEWHERE, name=ELSEWHERE, saved=[ELSEWHERE], counts={ELSEWHERE: 1}),
    **dict(options={"to": ["../../evil"], "n": 7}, save=ELSEWHERE, log=None, method=ELSEWHERE),
    **dict(made_up="https://evil.example/", model=None, parent=None, verbose=7, locals={"a": 1}),
}


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_of_a_callback_no_paths_and_settings_are_taken(order, tmp_path):
    def callbacks():
        return [SavesIts(tmp_path / "mine")]

    def learn_with(steps, mine):
        make_model().learn(steps, [*mine, ExactCheckpointCallback(folder, verbose=0)][::order])

    for only_kept in (None, "saved"):
        folder = tmp_path / str(only_kept)
        learn_with(64, callbacks())
        state = load_checkpoint(checkpoints_in(folder)[-1]).state
        _, values = state["callbacks"][0]
        assert values["options"]["n"] == 17 and len(values["saved"]) == 16
        values.update({name: value for name, value in PLAIN.items() if name != only_kept})
        save_checkpoint(folder, 200, state)
        (callback,) = mine = callbacks()
        learn_with(128, mine)
        assert (callback.folder, callback.label, callback.path) == (str(tmp_path / "mine"), "a", tmp_path / "mine")
        assert callback.name == callback.options["to"][0] == callback.save.args[0] == str(tmp_path / "mine" / "model")
        assert callback.options["n"] == 1 + 16 and not callback.counts and not hasattr(callback, "made_up")
        assert callback.verbose == 0 and callback.log is callback.logger and callback.method == callback.model.save
        # Paths in the folder that it was given are its own
        steps = range(4 if only_kept else 68, 129, 4)
        assert callback.saved == [str(tmp_path / "mine" / str(step)) for step in steps]


@pytest.mark.parametrize("name", ["network", "log", "method", "made_up"])
def test_no_objects_are_changed_to_which_a_callback_only_refers(name, tmp_path):
    learn(tmp_path / "checkpoints", [SavesIts(tmp_path)])
    model = make_model()
    kinds = dict(network=model.policy, log=Logger(None, []), method=model.save, made_up=model)
    values = {"dir": ELSEWHERE, "gamma": 0.5, "n_steps": 7}
    values = {"object": ObjectState(kind_of(model), values)} if name == "method" else values

    def edit(state):
        state["callbacks"][0][1][name] = ObjectState(kind_of(kinds[name]), values)

    with pytest.raises(StateError, match=rf"SavesIts\.{name}"):
        resume_edited(tmp_path / "checkpoints", edit, model, [SavesIts(tmp_path)])
    assert model.gamma == 0.99 and model.n_steps == 8 and not hasattr(model.policy, "gamma")


class Named(BaseCallback):
    def __init__(self, path=None):
        super().__init__()
        self.path, self.place, self.found = path, "videos", None

    def _on_step(self):
        return True


@pytest.mark.parametrize(
    "values",
    [{"path": np.str_("evil")}, {"path": b"evil"}, {"place": ".."}, {"_on_step": 5}]
    + [{"found": found} for found in (b"/else\nwhere", np.array(["a", ELSEWHERE]), slice(ELSEWHERE))],
    ids=str,
)
def test_other_kinds_of_text_are_no_paths_and_nothing_hides_a_method(values, tmp_path):
    learn(tmp_path, [Named()])
    callback = Named()
    resume_edited(tmp_path, lambda state: state["callbacks"][0][1].update(values), callbacks=[callback])
    assert (callback.path, callback.place, callback.found) == (None, "videos", None) and "_on_step" not in vars(callback)


class Records(gym.Wrapper):
    """As gymnasium's ``RecordVideo``, with data that checkpoints do not hold."""

    excluded_from_checkpoints = "prices"

    def __init__(self, env, folder):
        super().__init__(env)
        self.video_folder, self.name_prefix, self.word = os.path.abspath(folder), "rl-video", "s/he"
        self.prices = np.zeros(3)

    def step(self, action):
        self.word += "!"
        return super().step(action)


def test_wrappers_write_where_this_start_says(tmp_path):
    def model(render_mode=None):
        kwargs = dict(wrapper_kwargs=dict(folder=str(tmp_path)), env_kwargs=dict(render_mode=render_mode))
        return make_model(env=make_vec_env("CartPole-v1", 1, seed=0, wrapper_class=Records, **kwargs))

    learn(tmp_path / "checkpoints", model=model())
    changes = {"video_folder": ELSEWHERE, "name_prefix": "../../evil", "prices": np.ones(3)}
    resumed = model("rgb_array")
    resume_edited(tmp_path / "checkpoints", lambda state: state["env"].values["envs"][0].values.update(changes), resumed)
    env = resumed.env.envs[0]
    assert (env.video_folder, env.name_prefix, env.word) == (str(tmp_path), "rl-video", "s/he" + 128 * "!")
    # How it is shown may be another way
    assert not env.prices.any() and env.render_mode == "rgb_array" and env.render() is not None


class Adapts(A2C):
    """An algorithm of the user's, with state in an attribute."""

    factor = 1.0

    def train(self):
        self.factor *= 2
        super().train()


def test_of_a_model_only_its_state_is_taken(tmp_path):
    learn(tmp_path, model=make_model(Adapts))
    model = make_model(Adapts, tensorboard_log=None)
    policy, env = model.policy, model.env

    def edit(state):
        assert state["algorithm"]["factor"] == 4
        state["model"].update(tensorboard_log="evil", verbose=2, train=1, gamma=0.5)
        state["algorithm"].update(tensorboard_log="evil", policy=None, env=None, _logger=None, device="cpu", extra=ELSEWHERE)
        state["rollout_buffer"].update(buffer_size=10**13, n_envs=5)
        state["logger"].update(output_formats={}, dir=ELSEWHERE)

    with pytest.warns(UserWarning, match=r"Adapts\.extra is not restored, because the checkpoint has a path there .*evil"):
        resume_edited(tmp_path, edit, model)
    assert model.tensorboard_log is None and model.policy is policy and model.env is env and model.verbose == 0
    assert "train" not in vars(model) and not hasattr(model, "extra") and model.gamma == 0.99 and model.factor == 16
    assert (model.rollout_buffer.buffer_size, model.rollout_buffer.n_envs) == (model.n_steps, model.n_envs)
    assert model.logger.output_formats == [] and model.logger.dir != ELSEWHERE


class ScaledBuffer(RolloutBuffer):
    def compute_returns_and_advantage(self, *args, **kwargs):
        self.scale = 2 * getattr(self, "scale", 1)
        super().compute_returns_and_advantage(*args, **kwargs)


def test_an_object_that_is_none_of_the_algorithms_is_refused(tmp_path):
    learn(tmp_path, model=make_model(rollout_buffer_class=ScaledBuffer))
    for place in ("algorithm", "rollout_buffer"):
        model = make_model(rollout_buffer_class=ScaledBuffer)
        model.mine = model.rollout_buffer.mine = model.policy
        before = parameters_of(model)
        foreign = ObjectState(kind_of(model.policy), {"training": False})
        with pytest.raises(StateError, match=r"\.mine has no state of its own"):
            resume_edited(tmp_path, lambda state, foreign=foreign, place=place: state[place].update(mine=foreign), model)
        assert same(parameters_of(model), before)


@pytest.mark.parametrize("position", [-1, 625])
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
    elif kind is np.random.MT19937:
        values["state"]["state"]["pos"] = position
    else:
        values["state"]["buffer_pos"] = position
    with pytest.raises(ValueError, match="the position of a random generator must be 0 to"):
        set_state(Holds(), state)


@pytest.mark.parametrize(
    "change",
    [
        *({"objects": 5}, {"iteration": "x"}, {"evaluation_random": {}}, {"left_out": 5}),
        *({"model": {"num_timesteps": math.nan}}, {"model": {"_n_updates": "../x"}}),
    ],
    ids=str,
)
def test_what_would_fail_later_is_refused_at_the_start(change, tmp_path):
    learn(tmp_path)

    def edit(state):
        state.update({name: {**state[name], **value} if name == "model" else value for name, value in change.items()})

    with pytest.raises(CheckpointError, match="cannot be restored"):
        resume_edited(tmp_path, edit)


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
    """An error that says so, and no file elsewhere."""
    rng = random.Random(0)
    learn(tmp_path / "run", [SavesIts(tmp_path / "mine")])
    state = load_checkpoint(checkpoints_in(tmp_path / "run")[-1]).state
    n_refused = 0
    for _ in range(25):
        shutil.rmtree(tmp_path / "run")
        save_checkpoint(tmp_path / "run", 200, damaged(state, rng))
        try:
            learn(tmp_path / "run", [SavesIts(tmp_path / "mine")], steps=68)
        except (CheckpointError, StateError):
            n_refused += 1
        except Exception as error:
            # What the run itself makes of a number or an array that is another one
            trained = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert "_resume" not in trained and "restore_after_start" not in trained
    assert n_refused > 5
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
