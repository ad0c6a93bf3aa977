"""The state of environments: taken from one, put into another of the same build, they go on alike."""

import copy
import ctypes
import enum
import functools
import logging
import os
import random
import time
import types
from collections import Counter, OrderedDict, defaultdict

import gymnasium as gym
import numpy as np
import pygame
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import NormalizeReward
from stable_baselines3.common.env_util import make_atari_env, make_vec_env, unwrap_wrapper
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.common.random_state import get_random_state, random_state, seeded_random_state, set_random_state
from sb3_qac.common.vec_env import ale_vec_env
from sb3_qac.common.wrappers import EpisodeReplay
from sb3_qac.resume.checkpoints import load_checkpoint, save_checkpoint
from sb3_qac.resume.state import StateError, equal, get_state, set_state


def play(env, rng, n_steps):
    """:return: what each of so many steps with random actions gives, times of the day left out"""
    steps = []
    for _ in range(n_steps):
        actions = np.array([rng.integers(env.action_space.n) for _ in range(env.num_envs)])
        obs, rewards, dones, infos = env.step(actions)
        for info in infos:
            info.get("episode", {}).pop("t", None)
        steps.append((obs, rewards, dones, infos))
    return steps


def assert_go_on_alike(make_env, folder, before, after):
    """Plays one, takes its state through a file into a second one, and plays both with the same actions."""
    env, other = make_env(), make_env()
    env.reset()
    play(env, np.random.default_rng(1), before)
    path = save_checkpoint(folder, 1, {"env": get_state(env)})
    expected = play(env, np.random.default_rng(2), after)
    other.reset()
    play(other, np.random.default_rng(3), 7)
    set_state(other, load_checkpoint(path).state["env"])
    for step, expected_step in zip(play(other, np.random.default_rng(2), after), expected, strict=True):
        np.testing.assert_equal(step, expected_step)
    assert any(step[2].any() for step in expected), "no episode ended"


class Parts(gym.ObservationWrapper):
    """CartPole's observation as a dictionary."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Dict(
            {name: spaces.Box(-np.inf, np.inf, (2,), np.float32) for name in ("cart", "pole")}
        )

    def observation(self, observation):
        return {"cart": observation[:2], "pole": observation[2:]}


ENVS = {
    "classic control": lambda: make_vec_env("CartPole-v1", 3, seed=0),
    "normalised": lambda: VecNormalize(VecMonitor(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 3))),
    "dictionaries": lambda: VecFrameStack(VecNormalize(make_vec_env("CartPole-v1", 3, seed=0, wrapper_class=Parts)), 2),
    "truncated": lambda: make_vec_env("MountainCar-v0", 2, seed=0),
    "random": lambda: make_vec_env("FrozenLake-v1", 2, seed=0),
    "cards": lambda: make_vec_env("Blackjack-v1", 2, seed=0, wrapper_class=gym.wrappers.FlattenObservation),
    "Box2D": lambda: make_vec_env("LunarLander-v3", 2, seed=0, wrapper_class=EpisodeReplay),
}


@pytest.mark.parametrize("name", ENVS)
def test_environments_go_on_alike(name, tmp_path):
    assert_go_on_alike(ENVS[name], tmp_path, before=70, after=140)


@pytest.mark.slow
def test_stock_atari_games_go_on_alike(tmp_path):
    wrapper_kwargs = dict(action_repeat_probability=0.25)
    assert_go_on_alike(
        lambda: VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", 2, seed=0, wrapper_kwargs=wrapper_kwargs), 2),
        tmp_path,
        before=60,
        after=150,
    )


# With and without FIRE
@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", pytest.param("QbertNoFrameskip-v4", marks=pytest.mark.slow)])
def test_native_atari_games_go_on_alike(env_id, tmp_path, monkeypatch):
    # Several seeds in the steps that are played: from some environments on a later seed than others
    monkeypatch.setattr(ale_vec_env, "STEPS_PER_SEED", 40)
    kwargs = dict(wrapper_kwargs=dict(action_repeat_probability=0.25), vec_env_kwargs=dict(num_threads=1))
    assert_go_on_alike(
        lambda: VecFrameStack(make_ale_vec_env(env_id, 3, seed=0, **kwargs), 2),
        tmp_path,
        before=200,
        after=100,
    )


class Aliases(gym.Env):
    """Some attributes are parts of others."""

    observation_space, action_space = spaces.Box(0, 1000, (3,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.hands, self.state = 0, [[0], [0]], th.zeros(2)
        self.hand, self.position = self.hands[0], self.state[:1]
        return self.observation(), {}

    def observation(self):
        return np.array([*map(sum, self.hands), self.state.sum()], np.float32)

    def step(self, action):
        self.steps += 1
        self.hand.append(int(action))
        self.position += 1 + int(action)
        return self.observation(), float(self.state[0]), False, self.steps >= 50, {}


def test_attributes_that_are_parts_of_others_stay_so(tmp_path):
    assert_go_on_alike(lambda: make_vec_env(Aliases, 2, seed=0), tmp_path, before=20, after=100)


class Hidden:
    """Its counter is in a slot, and its objects have attributes too."""

    __slots__ = ("__dict__", "counter")


@pytest.mark.parametrize(
    "value",
    [
        th.nn.Parameter(th.zeros(2)),
        Hidden(),
        type("Seconds", (float,), {})(5.0),
        # In Python 3.10 its objects need no more memory than those of a class without a value
        type("Count", (int,), {})(5),
        np.array([[1], "x"], dtype=object),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(2, dtype=[("x", "U3")]),
        np.zeros(2, dtype=[("x", float)])[0],
    ],
    ids=lambda value: type(value).__name__,
)
def test_state_outside_attributes_is_refused(value):
    env = gym.make("CartPole-v1").unwrapped
    env.value = value
    with pytest.raises(StateError, match=rf"The state of object\.value \(.*{type(value).__name__}\) cannot be taken"):
        get_state(env)


def test_functions_made_by_functools_are_code():
    env = gym.make("CartPole-v1").unwrapped
    before = get_state(env)
    # As closures are
    env.bonus, env.known = functools.partial(max, [1]), functools.lru_cache(max)
    assert get_state(env).values.keys() == before.values.keys()


def test_structured_arrays_of_numbers_are_kept(tmp_path):
    env, other = (gym.make("CartPole-v1").unwrapped for _ in range(2))
    for each, price in ((env, 5.5), (other, 0.0)):
        each.trades = np.array([(3, price), (4, -price)], dtype=[("day", "i4"), ("price", float)])
        each.prices = each.trades["price"]
    set_state(other, load_checkpoint(save_checkpoint(tmp_path, 1, {"env": get_state(env)})).state["env"])
    np.testing.assert_array_equal(other.trades, env.trades)
    # Still the same memory
    other.trades[0] = (1, 2.0)
    assert other.trades.dtype == env.trades.dtype and other.prices[0] == 2


def test_a_namespace_and_an_ordered_dictionary_are_kept(tmp_path):
    env, other = (gym.make("CartPole-v1").unwrapped for _ in range(2))
    for each, count in ((env, 5), (other, 0)):
        each.counts = types.SimpleNamespace(count=count)
        each.order = OrderedDict([("b", count), ("a", [OrderedDict()])])
    set_state(other, load_checkpoint(save_checkpoint(tmp_path, 1, {"env": get_state(env)})).state["env"])
    assert other.counts.count == 5 and other.order == env.order and type(other.order["a"][0]) is OrderedDict


# Its class has another name in this module
LOCAL = enum.Enum("Lamp", "OFF ON")


class Dice:
    """Its generator is in it only."""

    def __init__(self):
        self.rolls, self.generator = 0, random.Random(0)

    def roll(self):
        self.rolls += 1
        return self.rolls, self.generator.random()


def go_on(env, other, folder):
    set_state(other, load_checkpoint(save_checkpoint(folder, 1, {"env": get_state(env)})).state["env"])


@pytest.mark.parametrize(
    "make",
    [lambda: Dice().roll, lambda: random.Random(0).random, lambda: np.random.default_rng(0).random],
)
def test_the_object_behind_a_method_goes_on(make, tmp_path):
    env, other = Counting(make()), Counting(make())
    env.extra()
    go_on(env, other, tmp_path)
    assert other.extra() == env.extra()


def test_a_list_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(StateError, match=r"object\.extra contains itself"):
        get_state(Counting(loop))


def test_a_replay_goes_on_in_a_monitor_that_refuses_early_resets(tmp_path):
    def make_env():
        return DummyVecEnv([lambda: EpisodeReplay(Monitor(gym.make("CartPole-v1"), allow_early_resets=False))])

    env, other = make_env(), make_env()
    for one in (env, other):
        one.seed(0)
        one.reset()
    play(env, np.random.default_rng(1), 5)
    go_on(env, other, tmp_path)
    for one in (play(env, np.random.default_rng(2), 3), play(other, np.random.default_rng(2), 3)):
        np.testing.assert_equal(one[-1][0], env.envs[0].last_obs[None])


def test_methods_of_objects_that_are_kept_anyway_are_code(tmp_path):
    env, other = Counting(None), Counting(None)
    for one in (env, other):
        one.rules = one.step
        one.moves = [one.step, one.reset, functools.partial(one.step, 1), time.time, dict.fromkeys, "{}".format, np.clip]
    env.rules(0)
    go_on(env, other, tmp_path)
    assert other.count == 1


@pytest.mark.parametrize(
    "extra",
    [
        *([].append, LOCAL.ON, ctypes.CDLL(None), pygame.Rect(0, 0, 1, 1), pygame.Vector2(1, 2)),
    ],
)
def test_state_that_would_not_come_back_is_refused(extra):
    with pytest.raises(StateError, match=r"The state of object\.extra \(.* cannot be taken"):
        get_state(Counting(extra))


def test_what_shows_a_game_or_logs_is_no_state():
    shown = {"screen": pygame.Surface((2, 2)), "clock": pygame.time.Clock(), "sky": pygame.Color("blue")}
    shown["logger"] = logging.getLogger("games")
    assert get_state(Counting(shown)).values.keys() == get_state(Counting(time.time)).values.keys()


def test_a_generator_spawns_the_same_generators_after_a_resume(tmp_path):
    env, other = (Counting(np.random.default_rng(seed)) for seed in (0, 1))
    env.extra.spawn(2)
    go_on(env, other, tmp_path)
    assert other.extra.spawn(1)[0].random() == env.extra.spawn(1)[0].random()
    assert other.extra.random() == env.extra.random()


class DrawsOutside(gym.Wrapper):
    """Draws from the environment's generator."""

    def step(self, action):
        obs, reward, *others = self.env.step(action)
        return obs, reward + self.unwrapped.np_random.random(), *others


class KeepsLog(gym.Wrapper):
    """A list of the wrapper is one of the environment's."""

    def reset(self, **kwargs):
        self.log = self.unwrapped.log = []
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, _, *others = self.env.step(action)
        self.unwrapped.log.append(len(self.log))
        return obs, float(sum(self.log)), *others


def test_a_replay_hides_no_attribute_of_its_environment():
    class WithActions(CartPoleEnv):
        actions, obs = ("left", "right"), "a sentence"

    env = make_vec_env(WithActions, 1, wrapper_class=EpisodeReplay)
    assert env.get_attr("actions") == [("left", "right")] and env.get_attr("obs") == ["a sentence"]


@pytest.mark.parametrize("wrapper", [lambda env: DrawsOutside(EpisodeReplay(env)), lambda env: EpisodeReplay(KeepsLog(env))])
def test_a_replay_leaves_what_is_outside_and_what_belongs_together(wrapper, tmp_path):
    make_env = functools.partial(make_vec_env, "CartPole-v1", 2, seed=0, wrapper_class=wrapper)
    assert_go_on_alike(make_env, tmp_path, before=50, after=70)


class TakesItsItem(gym.Env):
    """Uses its action as `DummyVecEnv` gives it: as a number of NumPy."""

    observation_space, action_space = spaces.Box(0, 255, (1,), np.uint8), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total, self.t = np.zeros(1, np.uint8), 0
        return self.total, {}

    def step(self, action):
        assert action.dtype == self.action_space.dtype
        # A sum with an integer of Python would stay in 8 bits
        self.total = self.total + action
        self.t += 1
        return self.total, 1.0, self.t == 30, False, {}


def test_a_replay_gives_the_actions_as_they_were(tmp_path):
    make_env = functools.partial(DummyVecEnv, [lambda: EpisodeReplay(TakesItsItem())])
    assert_go_on_alike(make_env, tmp_path, before=20, after=20)


@pytest.mark.slow
def test_native_games_take_a_new_seed_where_one_is_due(monkeypatch):
    monkeypatch.setattr(ale_vec_env, "STEPS_PER_SEED", 100)
    env = make_ale_vec_env("BreakoutNoFrameskip-v4", 2, seed=3, vec_env_kwargs=dict(num_threads=1))
    env.reset()

    def seeds():
        return ale_vec_env._ale_seeds(env._base_seeds, env._n_seeds)

    np.testing.assert_array_equal(seeds(), [3, 4])
    ends = play(env, np.random.default_rng(0), 400)
    state = env.get_state()
    assert (state["n_seeds"] > 1).all() and len(set(seeds()) | {3, 4}) == 4
    # The actions that are kept are those since the oldest seed
    assert len(state["actions"]) == len(ends) - (env._first_steps.min())
    # A seed of the user's starts the count anew
    env.seed(8)
    env.reset()
    np.testing.assert_array_equal(seeds(), [8, 9])
    assert len(env.get_state()["actions"]) == 0


@pytest.mark.slow
def test_native_games_are_played_again_only_where_they_go_on_and_start_alike_after_a_reset(tmp_path, monkeypatch):
    """As evaluations do: their environments are reset first."""
    kwargs = dict(vec_env_kwargs=dict(num_threads=1))
    env, other = (make_ale_vec_env("BreakoutNoFrameskip-v4", 2, seed=seed, **kwargs) for seed in (0, 5))
    # Before the first reset, and in the middle of games
    for _ in range(2):
        go_on(env, other, tmp_path)
        # Not yet played again, it has the same state
        np.testing.assert_equal(get_state(other).values, get_state(env).values)
        with monkeypatch.context() as patch:
            patch.setattr(other, "_replay", lambda state: pytest.fail("played again"))
            np.testing.assert_array_equal(env.reset(), other.reset())
        for step, expected_step in zip(*(play(games, np.random.default_rng(0), 30) for games in (other, env)), strict=True):
            np.testing.assert_equal(step, expected_step)

    state = get_state(env)
    state.values["games"]["frames"] = state.values["games"]["frames"] ^ 1
    set_state(other, state)
    with pytest.raises(ValueError, match="did not reproduce the saved frames"):
        other.step(np.zeros(2, dtype=int))


class Counting(gym.Env):
    """Environment that counts in an attribute, with one more of a given kind."""

    observation_space, action_space = spaces.Box(0, 1000, (1,)), spaces.Discrete(2)

    def __init__(self, extra):
        self.count, self.extra = 0, extra

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([0.0], dtype=np.float32), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count], dtype=np.float32), 0.0, self.count % 10 == 0, False, {}


class Board(Counting):
    """Its row is a view of its board, and the copy of it is made and left by the game."""

    def __init__(self):
        super().__init__(None)
        self.board = np.zeros((3, 4))
        self.row = self.board[1]
        self.before = self.row

    def step(self, action):
        # Alternately its own array and a view of the board
        self.before = self.row.copy() if self.count % 2 else self.row
        self.row += 1
        self.board[2] += self.before
        return super().step(action)


@pytest.mark.parametrize("n_steps", [3, 4])
def test_attributes_that_are_views_of_one_array_are_so_again(n_steps, tmp_path):
    env, other = Board(), Board()
    for _ in range(n_steps):
        env.step(0)
    set_state(other, load_checkpoint(save_checkpoint(tmp_path, 1, {"env": get_state(env)})).state["env"])
    for _ in range(5):
        np.testing.assert_array_equal(other.board, env.board)
        np.testing.assert_array_equal(other.row, other.board[1])
        np.testing.assert_array_equal(other.before, env.before)
        env.step(0), other.step(0)


class Part:
    def __init__(self):
        self.values = np.zeros(3)
        self.generator = random.Random(0)
        self.legacy = np.random.RandomState(0)


def test_objects_inside_an_environment_go_on(tmp_path):
    env, other = Counting(Part()), Counting(Part())
    env.extra.values[1] = 5
    env.extra.generator.random(), env.extra.legacy.rand(), env.action_space.sample()
    path = save_checkpoint(tmp_path, 1, {"env": get_state(env)})
    expected = env.extra.generator.random(), env.extra.legacy.rand()
    set_state(other, load_checkpoint(path).state["env"])
    np.testing.assert_array_equal(other.extra.values, [0, 5, 0])
    assert (other.extra.generator.random(), other.extra.legacy.rand()) == expected


class Phase(enum.Enum):
    DAY, NIGHT = 1, 2


class Doors(enum.Flag):
    LEFT, RIGHT = 1, 2


@pytest.mark.parametrize(
    ("at_the_start", "then"),
    [
        (Phase.DAY, Phase.NIGHT),
        (Doors(0), Doors.LEFT | Doors.RIGHT),
        (Counter(), Counter(a=2)),
        ([Phase.DAY, Phase.NIGHT], [Phase.NIGHT, Phase.DAY]),
        ({}, {"left": Doors.LEFT}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(list), defaultdict(list, a=[1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_members_of_enums_and_further_dictionaries_go_on_as_what_they_are(at_the_start, then, tmp_path):
    env, other = ([Counting(copy.copy(at_the_start)) for _ in range(2)] for _ in range(2))
    for one in env:
        one.extra = then
    vec_env, other_vec_env = (DummyVecEnv([lambda one=one: one for one in envs]) for envs in (env, other))
    path = save_checkpoint(tmp_path, 1, {"env": get_state(vec_env)})
    set_state(other_vec_env, load_checkpoint(path).state["env"])
    for one in other:
        assert one.extra == then and type(one.extra) is type(then)
        if isinstance(then, defaultdict):
            assert one.extra["new"] == []


class Bag(dict):
    """A dictionary with attributes, which are not what is in it."""

    total = 0


class AttributeDict(dict):
    """A dictionary whose items are its attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


@pytest.mark.parametrize("kind", [Bag, AttributeDict])
def test_a_dictionary_of_the_users_class_goes_on_with_its_attributes(kind, tmp_path):
    env, other = Counting(kind(a=1)), Counting(kind(a=1))
    env.extra.update(b=2)
    env.extra.total = 3
    set_state(other, load_checkpoint(save_checkpoint(tmp_path, 1, {"env": get_state(env)})).state["env"])
    assert other.extra == env.extra and type(other.extra) is kind and other.extra.total == 3


def test_tensors_in_containers_are_restored_on_their_device(tmp_path):
    """A checkpoint has all tensors on the CPU. The device `meta` stands for a GPU."""

    def containers(device):
        learned = th.ones(1, device=device, requires_grad=True)
        return {"list": [th.ones(2, device=device), learned], "dict": {"a": th.ones(3, device=device)}}

    env, other = Counting(containers("cpu")), Counting(containers("meta"))
    set_state(other, load_checkpoint(save_checkpoint(tmp_path, 1, {"env": get_state(env)})).state["env"])
    restored = other.extra
    assert restored["list"][0].device.type == restored["dict"]["a"].device.type == "meta"
    assert [tensor.requires_grad for tensor in restored["list"]] == [False, True]


@pytest.mark.parametrize(
    "extra",
    [
        *(th.nn.ReLU().__dict__.keys(), iter([1]), {"inside": object()}),
        # They would come back as lists and dictionaries of another kind
        *(Bag(inside=object()), {"inside": defaultdict(int)}, [Counter(a=1)]),
    ],
)
def test_state_that_cannot_be_seen_is_refused_with_its_place(extra):
    with pytest.raises(StateError, match=r"The state of env\.envs\[0\]\.extra.* cannot be taken.*EpisodeReplay"):
        get_state(DummyVecEnv([lambda: Counting(extra)]), "env")


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot fork")
def test_environments_in_other_processes_are_refused():
    env = make_vec_env("CartPole-v1", 1, vec_env_cls=SubprocVecEnv, vec_env_kwargs=dict(start_method="fork"))
    try:
        with pytest.raises(StateError, match=r"other processes .SubprocVecEnv.*Use a DummyVecEnv"):
            get_state(env)
    finally:
        env.close()


def test_an_environment_built_otherwise_is_refused():
    with pytest.raises(StateError, match=r"is a .*Counting, but its saved state is that of a .*CartPole"):
        set_state(Counting(0), get_state(gym.make("CartPole-v1").unwrapped))
    with pytest.raises(StateError, match="does not have the 2 items"):
        set_state(make_vec_env("CartPole-v1", 3), get_state(make_vec_env("CartPole-v1", 2)))
    other = VecNormalize(make_vec_env("CartPole-v1", 1, wrapper_class=Parts), norm_obs_keys=["cart"])
    with pytest.raises(StateError, match=r"obs_rms does not have the 2 items"):
        set_state(other, get_state(VecNormalize(make_vec_env("CartPole-v1", 1, wrapper_class=Parts))))


def test_statistics_of_all_episodes_are_kept_outside_of_a_replay_and_refused_inside(tmp_path):
    """Playing an episode again would add it to them a second time."""
    inside = make_vec_env("CartPole-v1", 1, seed=0, wrapper_class=lambda env: EpisodeReplay(NormalizeReward(env)))
    with pytest.raises(
        StateError, match=r"NormalizeReward is inside env\.envs\[0\].*`return_rms` .*Put it outside EpisodeReplay"
    ):
        get_state(inside, "env")
    # What gymnasium and SB3 add to an environment is restored
    get_state(make_vec_env("CartPole-v1", 1, wrapper_class=EpisodeReplay), "env")
    assert_go_on_alike(
        lambda: make_vec_env("CartPole-v1", 2, seed=0, wrapper_class=lambda env: NormalizeReward(EpisodeReplay(env))),
        tmp_path,
        before=50,
        after=100,
    )


class Described:
    def __init__(self):
        self.metadata, self.spec = {"turn": 0}, [0]
        # Not state, as in descriptions of other packages
        self.reset_infos = types.MappingProxyType({})


def test_attributes_of_an_object_are_kept_whose_names_environments_use_for_descriptions(tmp_path):
    env, other = Counting(Described()), Counting(Described())
    env.extra.metadata["turn"], env.extra.spec[0] = 5, 6
    set_state(other, load_checkpoint(save_checkpoint(tmp_path, 1, {"env": get_state(env)})).state["env"])
    assert other.extra.metadata == {"turn": 5} and other.extra.spec == [6]


class Unrepeatable(Counting):
    def step(self, action):
        return np.array([random.SystemRandom().random()]), 0.0, False, False, {}


class OnlyOnce(Counting):
    """Has state that a reset does not clear, with which the replay takes another way."""

    def step(self, action):
        self.count += 1
        return [["one"][self.count - 1]], 0.0, False, False, {}


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Unrepeatable, ": the environment draws"), (OnlyOnce, r" \(IndexError: .*\): .*, has state that a reset")],
)
def test_an_episode_that_does_not_repeat_itself_is_refused(kind, what):
    env = EpisodeReplay(kind(0))
    env.reset(seed=0)
    env.step(0)
    with pytest.raises(StateError, match=f"did not reproduce the saved observation{what}"):
        set_state(env, get_state(env))


@pytest.mark.parametrize("draw_one", [random.random, np.random.normal, lambda: th.rand(1)])
def test_an_environment_that_draws_from_a_global_generator_in_a_step_is_warned_of_once(draw_one):
    class Draws(Counting):
        def step(self, action):
            draw_one()
            return super().step(action)

    env = EpisodeReplay(Draws(0))
    env.reset()
    with pytest.warns(UserWarning, match=r"Draws.* draws from a global random generator .* in `step`.*`self\.np_random`"):
        env.step(0)
    # Warnings are errors here
    env.step(0)


def test_each_action_of_an_episode_takes_the_bytes_of_its_number(tmp_path):
    env = DummyVecEnv([lambda: EpisodeReplay(CartPoleEnv())] * 2)

    def size_after(n_steps):
        env.reset()
        for one in env.envs:
            one.episode_actions = [np.array(0)] * n_steps
        return save_checkpoint(tmp_path, 1, {"env": get_state(env)}).stat().st_size

    # Two environments. The header has some more digits
    assert 0 <= size_after(5000) - size_after(1000) - 2 * 4000 * np.dtype(int).itemsize < 100


class HasPrices(gym.Wrapper):
    """A wrapper with data that never change."""

    excluded_from_checkpoints = ("prices",)

    def __init__(self, env, prices):
        super().__init__(env)
        self.prices, self.position = prices, 0


@pytest.mark.parametrize("outside", [lambda env: env, EpisodeReplay])
def test_data_that_a_class_excludes_are_not_in_the_checkpoint_and_stay_in_the_environment(outside, tmp_path):
    prices = np.random.default_rng(0).random(100_000)
    env, other = (DummyVecEnv([lambda: outside(HasPrices(CartPoleEnv(), prices.copy()))] * 4) for _ in range(2))
    for one in (env, other):
        one.reset()
    for single in env.envs:
        unwrap_wrapper(single, HasPrices).position = 7
    path = save_checkpoint(tmp_path, 1, {"env": get_state(env)})
    assert path.stat().st_size < prices.nbytes
    set_state(other, load_checkpoint(path).state["env"])
    restored = unwrap_wrapper(other.envs[0], HasPrices)
    assert restored.position == 7 and np.array_equal(restored.prices, prices)


def test_a_replay_gives_actions_of_different_lengths(tmp_path):
    class Lengths(Counting):
        def step(self, action):
            self.count += 10 * len(action) + action.sum()
            return np.array([self.count]), 0.0, False, False, {}

    env, other = EpisodeReplay(Lengths(0)), EpisodeReplay(Lengths(0))
    env.reset()
    for action in ([1], [2, 3]):
        env.step(np.array(action))
    go_on(env, other, tmp_path)
    assert other.last_obs == env.last_obs == [36]


def draw():
    return random.random(), np.random.rand(), th.rand(1).item()


def test_random_states_apart_from_each_other():
    outside = get_random_state()
    expected = draw(), draw()
    set_random_state(outside)
    apart = seeded_random_state(0)
    first = draw()
    with random_state(apart):
        inside = draw()
    assert (first, draw()) == expected
    again = seeded_random_state(0)
    with random_state(again):
        pass
    with random_state(again):
        assert draw() == inside
    with random_state(apart):
        assert draw() != inside


def test_random_state_survives_an_error():
    outside = get_random_state()
    expected = draw()
    set_random_state(outside)
    with pytest.raises(RuntimeError), random_state(seeded_random_state(1)):
        draw()
        raise RuntimeError
    assert draw() == expected


@pytest.mark.parametrize(
    "value", [[(32, 8, 4), (64, 3)], [np.zeros(2), np.zeros(3)], [{"weights": np.zeros(2)}], {"layers": ([1, [2, 3]],)}]
)
def test_lists_of_unequal_lengths_are_equal_where_their_items_are(value):
    """Such as layers in ``policy_kwargs``: a run with them is the same one when it is resumed."""
    assert equal(value, copy.deepcopy(value))
    assert not equal(value, [value]) and not equal([value, 1], [value, 2]) and not equal([value], [value, value])
    assert not equal({"a": value}, {"b": value}) and not equal({"a": value}, [value])


def test_a_generator_of_another_kind_is_refused():
    """It would take the state without an error if the two kinds had the same format."""
    of_pcg64 = get_state(np.random.default_rng(0))
    with pytest.raises(StateError, match="is a Philox generator, but its saved state is that of a PCG64"):
        set_state(np.random.Generator(np.random.Philox(0)), of_pcg64)


def test_the_parts_of_a_space_draw_what_they_would_have_drawn():
    def make(seed):
        return spaces.Dict(a=spaces.Discrete(1000), b=spaces.Tuple([spaces.Box(-1, 1)]), seed=seed)

    one, other = make(0), make(1)
    set_state(other, get_state(one))
    assert other["a"].sample() == one["a"].sample() and other["b"][0].sample() == one["b"][0].sample()


def test_a_generator_that_is_made_later_is_made_for_its_state():
    """As gymnasium's environments do with their first reset."""
    one, other = types.SimpleNamespace(rng=np.random.default_rng(5)), types.SimpleNamespace(rng=None)
    set_state(other, get_state(one))
    assert other.rng.random() == one.rng.random()


def test_a_generator_of_the_operating_system_has_no_state():
    class Draws(gym.Env):
        def __init__(self):
            self.own, self.both = random.SystemRandom(), [random.SystemRandom(), random.Random(1)]

    env, other = Draws(), Draws()
    env.both[1].random()
    set_state(other, get_state(env))
    assert other.both[1].random() == env.both[1].random()
