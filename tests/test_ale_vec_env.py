"""The C++ environments: bit-equal to gymnasium's preprocessing, and a drop-in for SB3's ``make_atari_env``."""

import functools
import gc
import inspect
import os
import signal
import sys
import weakref
from dataclasses import replace
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, TransformReward
from stable_baselines3.common.atari_wrappers import AtariWrapper, ClipRewardEnv, EpisodicLifeEnv, FireResetEnv, WarpFrame
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecTransposeImage

from sb3_qac import QA2C
from sb3_qac.common.env_util import make_ale_vec_env, to_ale_vec_env
from sb3_qac.common.vec_env import AleVecEnv, ale_vec_env
from sb3_qac.common.vec_env.ale_vec_env import FIRE

PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
# With lives, and one whose pixels differ most from SB3; the others are for `make test-slow`
GAMES = [f"{game}NoFrameskip-v4" for game in ("Breakout", "Qbert")]
SLOW_GAMES = [f"{game}NoFrameskip-v4" for game in ("Pong", "SpaceInvaders", "Seaquest", "BeamRider")]
# The time limit of a short game, in frames
SHORT = dict(max_num_frames_per_episode=300)


class Reference:
    """
    gymnasium's ``AtariPreprocessing``, brought to where a game in C++ starts: after FIRE, where there is one, no-ops of one
    frame each, as many as the C++ side says it made.
    """

    def __init__(self, env_id, frame_skip=4, **env_kwargs):
        self.env = AtariPreprocessing(gym.make(env_id, **env_kwargs), noop_max=0, frame_skip=frame_skip)
        self.has_fire = self.env.unwrapped.get_action_meanings()[1] == "FIRE"

    def reset(self, n_frames):
        self.env.reset()
        for frame in range(n_frames):
            self.env.unwrapped.step(1 if frame == 0 and self.has_fire else 0)
        self.env.ale.getScreenGrayscale(self.env.obs_buffer[0])
        self.env.obs_buffer[1].fill(0)
        return self.env._get_obs()

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, reward, terminated or truncated, self.env.ale.lives()


def results_of(envs, method):
    """:return: a list to which ale-py's environments add each result of a method from now on"""
    results, call = [], getattr(envs, method)
    setattr(envs, method, lambda **kwargs: results.append(call(**kwargs)) or results[-1])
    return results


@pytest.mark.parametrize(
    ("env_id", "n_steps"),
    [*((env_id, 400) for env_id in GAMES), *(pytest.param(env_id, 1500, marks=pytest.mark.slow) for env_id in SLOW_GAMES)],
)
def test_games_are_those_of_gymnasium_frame_by_frame(env_id, n_steps):
    compare_with_gymnasium(env_id, n_steps)


def test_games_with_arguments_are_those_of_gymnasium_frame_by_frame():
    arguments = dict(frameskip=1, repeat_action_probability=0.0, full_action_space=True)
    compare_with_gymnasium("ALE/Breakout-v5", n_steps=250, **arguments)


def compare_with_gymnasium(env_id, n_steps, **env_kwargs):
    settings = dict(terminal_on_life_loss=False, clip_reward=False)
    env = AleVecEnv(env_id, n_envs=1, seed=3, **settings, num_threads=1, env_kwargs=env_kwargs)
    reference = Reference(env_id, **env_kwargs)
    assert env.action_space == reference.env.action_space
    resets, steps = results_of(env._envs, "reset"), results_of(env._envs, "recv")
    obs = env.reset()
    expected = reference.reset(int(resets[0][1]["episode_frame_number"][0]))
    np.testing.assert_array_equal(obs[0, 0], expected)

    rng, score, ends = np.random.default_rng(0), 0, 0
    for _ in range(n_steps):
        action = rng.integers(env.action_space.n)
        obs, rewards, dones, infos = env.step(np.array([action]))
        expected, reward, done, lives = reference.step(action)
        score += reward
        assert rewards[0] == reward
        assert dones[0] == done
        if done:
            ends += 1
            assert infos[0]["episode"]["r"] == score
            score = 0
            expected = reference.reset(int(steps[-1][4]["episode_frame_number"][0]))
        else:
            assert infos[0]["lives"] == lives
        np.testing.assert_array_equal(obs[0, 0], expected)
    assert ends > 0
    env.close()


def test_without_frame_skip_an_image_is_one_frame():
    """With it, an image has the brighter pixels of the last two."""
    env, reference = AleVecEnv(PONG, seed=0, frame_skip=1, num_threads=1), Reference(PONG, frame_skip=1)
    resets = results_of(env._envs, "reset")
    env.reset()
    reference.reset(int(resets[0][1]["episode_frame_number"][0]))
    rng = np.random.default_rng(0)
    for action in rng.integers(env.action_space.n, size=100):
        np.testing.assert_array_equal(env.step(np.array([action]))[0][0, 0], reference.step(action)[0])
    env.close()


def both(n_envs=2, env_id=PONG, **wrapper_kwargs):
    """The stock stack and ours, as a user makes them."""
    stock = VecTransposeImage(VecFrameStack(make_atari_env(env_id, n_envs, seed=0, wrapper_kwargs=wrapper_kwargs), 4))
    return stock, VecFrameStack(make_ale_vec_env(env_id, n_envs, seed=0, wrapper_kwargs=wrapper_kwargs), 4)


def test_an_argument_by_position_has_the_meaning_it_has_in_make_atari_env():
    stock, ours = (list(inspect.signature(make).parameters.values()) for make in (make_atari_env, make_ale_vec_env))
    by_position = [parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == [parameter.name for parameter in stock[: len(by_position)]]
    assert {parameter.name for parameter in ours} < {parameter.name for parameter in stock}


def test_spaces_are_those_of_make_atari_env():
    stock, ours = both(env_id=BREAKOUT)
    assert ours.observation_space == stock.observation_space
    assert ours.action_space == stock.action_space
    for env in (stock, ours):
        obs = env.reset()
        assert (obs.shape, obs.dtype) == ((2, 4, 84, 84), np.uint8)
        # The stack starts empty but for the newest frame
        assert not obs[:, :3].any() and obs[:, 3].any()
        obs, rewards, dones, infos = env.step(np.zeros(2, dtype=int))
        assert (rewards.dtype, dones.dtype, type(infos), type(infos[0])) == (np.float32, bool, list, dict)
        env.close()


@pytest.mark.slow
def test_a_model_trained_on_one_loads_on_the_other(tmp_path):
    stock, ours = both()
    for here, there in ((stock, ours), (ours, stock)):
        QA2C("MlpPolicy", here, seed=0).learn(10).save(tmp_path / "model")
        QA2C.load(tmp_path / "model", env=there).learn(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(n_envs=0), "`n_envs` must be an integer, at least 1, but 0 was given"),
        (dict(frame_skip=2.5), "`frame_skip` must be an integer, at least 1, but 2.5 was given"),
        (dict(num_threads=-1), "`num_threads` must be an integer, at least 0, but -1 was given"),
        (dict(n_envs=2, seed=2**63 - 1), "`seed` must be an integer, between 0 and 9223372036854775806, but"),
        (dict(action_repeat_probability=2), "`action_repeat_probability` must be a finite number, between 0 and 1, but 2"),
    ],
)
def test_numbers_that_would_end_the_process_or_hang_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AleVecEnv(PONG, **arguments)


def test_actions_that_are_not_one_of_the_game_for_each_environment_are_refused_and_leave_no_trace():
    """ale-py would wait for ever. Recorded actions are played again by an exact resume."""
    env = AleVecEnv(PONG, n_envs=2, seed=0)
    env.reset()
    before = env.get_state()
    for action in (-1, 6):
        with pytest.raises(ValueError, match=rf"Actions must be between 0 and 5, but \[ ?0 +{action}\] was given"):
            env.step(np.array([0, action]))
    for actions in ([0], [[0, 1]], [], [0.5, 1], 3):
        with pytest.raises(ValueError, match="`actions` must be 2 integers, one for each environment, but "):
            env.step(np.array(actions))
    np.testing.assert_array_equal(env.get_state()["actions"], before["actions"])
    env.step(np.array([0.0, 5.0]))


def play(env, n_steps, seed=0):
    """:return: one (reward, done, info) of environment 0 for each step, with random actions"""
    env.reset()
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(n_steps):
        obs, rewards, dones, infos = env.step(rng.integers(env.action_space.n, size=env.num_envs))
        steps.append((obs, rewards[0], dones[0], infos[0]))
    return steps


@pytest.mark.slow
def test_clipped_rewards_come_with_raw_scores():
    clipped_steps, raw_steps = (
        play(make_ale_vec_env("QbertNoFrameskip-v4", 1, seed=0, wrapper_kwargs=dict(clip_reward=clipped)), 700)
        for clipped in (True, False)
    )
    assert {reward for _, reward, _, _ in clipped_steps} == {0.0, 1.0}
    np.testing.assert_array_equal([np.sign(step[1]) for step in raw_steps], [step[1] for step in clipped_steps])
    episodes = [step[3]["episode"] for step in clipped_steps if "episode" in step[3]]
    end = next(i for i, step in enumerate(raw_steps) if "episode" in step[3])
    assert episodes[0]["r"] == sum(step[1] for step in raw_steps[: end + 1]) >= 25
    assert [episode["r"] for episode in episodes] == [step[3]["episode"]["r"] for step in raw_steps if "episode" in step[3]]


def test_lost_life_ends_an_episode_but_not_the_game():
    steps = play(make_ale_vec_env(BREAKOUT, 1, seed=0), 500)
    whole = play(make_ale_vec_env(BREAKOUT, 1, seed=0, wrapper_kwargs=dict(terminal_on_life_loss=False)), 500)
    lives = [info["lives"] for _, _, _, info in steps]
    ends = [i for i, (_, _, done, _) in enumerate(steps) if done]
    games = [i for i in ends if "episode" in steps[i][3]]
    lost = [i for i in range(1, len(steps)) if 0 < lives[i] < lives[i - 1]]
    assert games and ends == sorted([*lost, *games]) and len(lost) >= 4
    assert all(
        not steps[i][3]["TimeLimit.truncated"] and steps[i][3]["terminal_observation"].shape == (1, 84, 84) for i in ends
    )
    assert all(("episode" in info) == done for _, _, done, info in whole)


def test_every_end_has_its_lives_and_its_reason():
    env = AleVecEnv(BREAKOUT, n_envs=4, seed=0)
    env.reset()
    recv = env._envs.recv
    # Out of lives, but the game goes on for a few frames; over at the time limit too; a life lost; cut by the time limit
    lives, terminated, truncated = [0, 5, 4, 5], [False, True, False, False], [False, True, False, True]

    def step():
        obs, rewards, _, _, info = recv()
        info = {**info, "lives": np.array(lives, dtype=np.int32), "final_obs": obs}
        return obs, rewards, np.array(terminated), np.array(truncated), info

    env._envs.recv = step
    _, _, dones, infos = env.step(np.zeros(4, dtype=int))
    assert dones.tolist() == [False, True, True, True]
    assert [info["lives"] for info in infos] == [0, 0, 4, 5]
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False, False, True]
    assert ["episode" in info for info in infos] == [False, True, False, True]
    env.close()


def test_fire_is_pressed_for_the_agent_at_the_start_of_a_life():
    """Breakout stands still until FIRE: with an agent that never presses it, only that makes lives go by."""
    idle = np.zeros(1, dtype=int)
    lives = {}
    for fire_reset in (True, False):
        env = make_ale_vec_env(BREAKOUT, 1, seed=0, vec_env_kwargs=dict(fire_reset=fire_reset))
        env.reset()
        lives[fire_reset] = min(env.step(idle)[3][0]["lives"] for _ in range(120))
    assert lives[True] < 3
    assert lives[False] == 5


def test_time_limit_is_reported_as_truncation():
    steps = play(make_ale_vec_env(PONG, 1, seed=0, env_kwargs=dict(max_num_frames_per_episode=200)), 120)
    ends = [info for _, _, done, info in steps if done]
    assert len(ends) >= 2
    assert all(info["TimeLimit.truncated"] and info["terminal_observation"].any() for info in ends)
    # ale-py counts the limit from where the no-ops and FIRE of the reset ended, of which there are 30 at most
    assert all(200 <= info["episode"]["l"] < 200 + 4 + 31 for info in ends)


@pytest.mark.parametrize("no_limit", [None, 0])
def test_games_without_a_time_limit_do_not_end_at_once(no_limit):
    env = make_ale_vec_env(PONG, 1, seed=0, env_kwargs=dict(max_num_frames_per_episode=no_limit))
    assert not any(done for _, _, done, _ in play(env, 20))


def test_observations_are_not_overwritten_by_the_next_step():
    # Without VecFrameStack, which copies
    env = make_ale_vec_env(PONG, 1, seed=0)
    given, copies, rng = [env.reset()], [], np.random.default_rng(0)
    for _ in range(30):
        copies.append(given[-1].copy())
        given.append(env.step(rng.integers(6, size=1))[0])
    for obs, copy in zip(given, copies, strict=False):
        np.testing.assert_array_equal(obs, copy)


def test_what_a_step_takes_and_returns_belongs_to_the_caller():
    """Who writes to it changes nothing else: wrappers that work in place, and one array for the actions of all steps."""
    env, untouched, resumed = (make_ale_vec_env(BREAKOUT, 1, seed=0) for _ in range(3))
    env.reset()[:] = 1
    untouched.reset()
    actions, rng, n_lost = np.zeros(1, dtype=int), np.random.default_rng(0), 0
    for _ in range(80):
        actions[:] = rng.integers(4, size=1)
        expected = without_times(untouched.step(actions.copy()))
        env.step_async(actions)
        actions[:] = 1
        obs, *others = env.step_wait()
        np.testing.assert_array_equal(obs, expected[0])
        obs[:] = 1
        np.testing.assert_equal(without_times((obs, *others))[1:], expected[1:])
        np.testing.assert_array_equal(env.get_images(), untouched.get_images())
        n_lost += sum("terminal_observation" in info and "episode" not in info for info in others[2])
    assert n_lost > 0
    for state in (env.get_state(), env.get_state()):
        resumed.set_state(state)
        for name, value in untouched.get_state().items():
            if name != "start_time":
                np.testing.assert_equal(state[name], value)
            if isinstance(value, np.ndarray) and name != "actions":
                state[name][:] = 1
    step = without_times(untouched.step(actions))
    np.testing.assert_equal(without_times(env.step(actions)), step)
    np.testing.assert_equal(without_times(resumed.step(actions)), step)


def frames(env, n_steps=30):
    """:return: what ``n_steps`` of random actions show; Pong's first image tells nothing of the no-ops before it"""
    return np.stack([obs for obs, *_ in play(env, n_steps)])


def test_same_seed_same_games_and_seeds_are_used_once():
    env, other = (make_ale_vec_env(PONG, 1, seed=5) for _ in range(2))
    first = frames(env)
    np.testing.assert_array_equal(frames(other), first)
    assert not np.array_equal(frames(env), first)
    env.seed(5)
    np.testing.assert_array_equal(frames(env), first)
    # Large ones are taken too, and without a seed there is a random one
    assert not np.array_equal(frames(make_ale_vec_env(PONG, 2, seed=2**32 - 3))[:, 1:], first)
    seeds = [make_ale_vec_env(PONG).get_state()["seeds"] for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_reset_starts_new_games():
    """SB3's life-loss wrapper goes on with an unfinished game; here scores of one evaluation never enter the next."""
    env = make_ale_vec_env(PONG, 1, seed=0, env_kwargs=SHORT)
    play(env, 50)
    env.reset()
    rng, score, n_steps, dones, infos = np.random.default_rng(1), 0.0, 0, [False], [{}]
    while not dones[0]:
        _, rewards, dones, infos = env.step(rng.integers(6, size=1))
        score += rewards[0]
        n_steps += 1
    # Pong's rewards are their own sign. Four frames a step, the last one perhaps cut short, after 30 of the reset at most
    assert infos[0]["episode"]["r"] == score
    assert 4 * (n_steps - 1) < infos[0]["episode"]["l"] <= 4 * n_steps + 30


@pytest.mark.slow
def test_evaluate_policy_does_not_warn_and_counts_whole_games(recwarn):
    env = VecFrameStack(make_ale_vec_env(PONG, 2, seed=0, env_kwargs=SHORT), 4)
    model = QA2C("MlpPolicy", env, seed=0)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=2, deterministic=False, return_episode_rewards=True)
    assert all(-21 <= score <= 21 for score in returns) and min(lengths) >= 300
    assert [warning for warning in recwarn if "Monitor" in str(warning.message)] == []
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(AtariWrapper) == [False, False]


def test_monitor_files_are_those_that_sb3_reads(tmp_path):
    env = make_ale_vec_env(PONG, 2, seed=0, monitor_dir=str(tmp_path), env_kwargs=SHORT)
    scores = [info["episode"]["r"] for *_, info in play(env, 100) if "episode" in info]
    env.close()
    results = load_results(str(tmp_path))
    assert len(list(tmp_path.glob("*.monitor.csv"))) == 2
    assert set(scores) <= set(results["r"]) and len(results) >= 2
    assert results["t"].min() > 0


def test_images_show_what_the_agent_sees():
    env = make_ale_vec_env(PONG, 2, seed=0)
    with pytest.raises(gym.error.ResetNeeded, match="Call `reset` before the first image"):
        env.render()
    obs = env.reset()
    images = env.get_images()
    assert [image.shape for image in images] == [(84, 84, 3)] * 2
    np.testing.assert_array_equal(images[1][:, :, 2], obs[1, 0])
    assert env.render("rgb_array").shape == (168, 84, 3)
    assert env.metadata["render_modes"] == ["rgb_array"]
    without = make_ale_vec_env(PONG, 2, seed=0, env_kwargs=dict(render_mode=None))
    with pytest.warns(UserWarning, match="No images: make the environments with `render_mode='rgb_array'`"):
        assert without.get_images() == [None, None]


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v1", "not an Atari game.*make_vec_env"),
        ("ALE/Pong-v5", r"skips 4 frames itself.*PongNoFrameskip-v4.*env_kwargs=dict\(frameskip=1\)"),
        ("Pong-v4", r"skips \(2, 5\) frames itself"),
    ],
)
def test_environments_that_cannot_be_used_are_refused(env_id, message):
    with pytest.raises(ValueError, match=message):
        make_ale_vec_env(env_id)


@pytest.mark.parametrize("arguments", [dict(mode=1, difficulty=1), dict(misspelt=1)])
def test_arguments_of_a_game_that_ale_py_does_not_have_in_cpp_are_refused_by_name(arguments, monkeypatch):
    spec = gym.spec(PONG)
    monkeypatch.setitem(gym.registry, "Pong2-v0", replace(spec, id="Pong2-v0", kwargs={**spec.kwargs, **arguments}))
    for env_id, env_kwargs in (("Pong2-v0", {}), (PONG, arguments)):
        message = f"AleVecEnv has no {', '.join(arguments)}, which {env_id} is given. Use SB3's `make_atari_env`"
        with pytest.raises(ValueError, match=message):
            make_ale_vec_env(env_id, env_kwargs=env_kwargs)


def test_a_game_with_a_time_limit_of_its_own_is_refused(monkeypatch):
    monkeypatch.setitem(gym.registry, "Pong3-v0", replace(gym.spec(PONG), id="Pong3-v0", max_episode_steps=40))
    with pytest.raises(ValueError, match="AleVecEnv has no max_episode_steps, which Pong3-v0 is given"):
        make_ale_vec_env("Pong3-v0")


@pytest.mark.parametrize("after_reset", [False, True])
def test_environments_of_rl_zoo_are_replaced_by_their_like(after_reset, tmp_path):
    wrapper_kwargs = dict(terminal_on_life_loss=False, clip_reward=False, noop_max=7, frame_skip=2, screen_size=42)
    env_kwargs = dict(render_mode=None, frameskip=1, full_action_space=True)
    arguments = dict(n_envs=1, seed=4, monitor_dir=str(tmp_path), wrapper_kwargs=wrapper_kwargs, env_kwargs=env_kwargs)
    stock = make_atari_env("ALE/Breakout-v5", **arguments)
    if after_reset:
        stock.reset()
        stock.reset()
    replaced, ours = to_ale_vec_env(stock), make_ale_vec_env("ALE/Breakout-v5", **{**arguments, "monitor_dir": None})
    assert isinstance(replaced, AleVecEnv) and replaced.action_space == stock.action_space == spaces.Discrete(18)
    for (obs, *step), (expected_obs, *expected) in zip(play(replaced, 20), play(ours, 20), strict=True):
        np.testing.assert_array_equal(obs, expected_obs)
        assert step == expected
    assert (replaced.terminal_on_life_loss, replaced.clip_reward) == (False, False)
    replaced.close()
    assert len(list(tmp_path.glob("*.monitor.csv"))) == 1


def test_a_render_mode_that_the_screens_do_not_have_is_refused():
    with pytest.raises(ValueError, match="`render_mode` must be None or 'rgb_array', but 'human' was given"):
        make_ale_vec_env(PONG, vec_env_kwargs=dict(render_mode="human"))


@pytest.mark.parametrize("fire", [True, False])
def test_fire_is_pressed_if_it_was_before(fire, monkeypatch):
    def wrapped(env):
        env = EpisodicLifeEnv(env)
        return WarpFrame(FireResetEnv(env) if fire else env)

    env = make_vec_env(BREAKOUT, 1, wrapper_class=wrapped)
    env.render_mode = None
    made = Mock()
    monkeypatch.setattr("sb3_qac.common.env_util.make_ale_vec_env", made)
    to_ale_vec_env(env)
    given = made.call_args.kwargs
    assert given["wrapper_kwargs"]["terminal_on_life_loss"] and given["vec_env_kwargs"]["fire_reset"] == fire


def test_environments_that_would_do_something_else_are_not_replaced():
    class Sign(ClipRewardEnv):
        def reward(self, reward):
            return -super().reward(reward)

    for wrapper, lost in (
        (lambda env: Sign(WarpFrame(env)), "Sign"),
        (lambda env: TransformReward(AtariWrapper(env), lambda reward: 2 * reward), "TransformReward"),
        (lambda env: WarpFrame(env, 84, 110), "the shape 84 x 110"),
    ):
        env = make_vec_env(BREAKOUT, 1, wrapper_class=wrapper)
        env.render_mode = None
        with pytest.raises(ValueError, match=f"AleVecEnv would leave out {lost}"):
            to_ale_vec_env(env)
    env = make_vec_env(BREAKOUT, 2, wrapper_class=AtariWrapper)
    env.render_mode, env.envs[1] = None, TransformReward(env.envs[1], lambda reward: 2 * reward)
    with pytest.raises(ValueError, match="AleVecEnv would leave out TransformReward"):
        to_ale_vec_env(env)


def test_environments_that_differ_are_not_replaced_by_the_first():
    def make(env_id, **settings):
        return lambda: AtariWrapper(Monitor(gym.make(env_id)), **settings)

    for other, different in ((make(BREAKOUT), BREAKOUT), (make(PONG, clip_reward=False), "'clip_reward': False")):
        with pytest.raises(ValueError, match=f"are alike, but .*{PONG}.* and .*{different}"):
            to_ale_vec_env(DummyVecEnv([make(PONG), other]))


def test_a_monitor_around_the_wrapper_is_not_replaced_by_one_that_records_something_else():
    env = DummyVecEnv([lambda: Monitor(AtariWrapper(gym.make(BREAKOUT)))])
    with pytest.raises(ValueError, match="AleVecEnv would leave out the Monitor around AtariWrapper"):
        to_ale_vec_env(env)


@pytest.mark.slow
def test_sticky_actions_of_a_game_are_those_of_the_argument():
    """``PongNoFrameskip-v0`` repeats actions with a probability of 0.25."""
    of_game, of_argument, of_game_argument, without = (
        frames(AleVecEnv(env_id, 1, seed=5, **arguments))
        for env_id, arguments in (
            ("PongNoFrameskip-v0", {}),
            (PONG, dict(action_repeat_probability=0.25)),
            (PONG, dict(env_kwargs=dict(repeat_action_probability=0.25))),
            (PONG, {}),
        )
    )
    np.testing.assert_array_equal(of_game, of_argument)
    np.testing.assert_array_equal(of_game, of_game_argument)
    assert not np.array_equal(of_game, without)


def test_sticky_actions_of_two_sources_are_refused():
    message = "`action_repeat_probability` is 0.5, but PongNoFrameskip-v0 repeats actions itself, with probability 0.25"
    with pytest.raises(ValueError, match=message):
        AleVecEnv("PongNoFrameskip-v0", action_repeat_probability=0.5)


@pytest.mark.slow
def test_the_ball_is_launched_at_the_start_of_a_game_with_sticky_actions():
    n_envs = 6
    env = AleVecEnv(BREAKOUT, n_envs, seed=0, action_repeat_probability=0.5)
    still = np.ones(n_envs, dtype=bool)
    before = env.reset()
    for _ in range(8):
        obs, *_ = env.step(np.zeros(n_envs, dtype=np.int64))
        still &= (obs == before).all(axis=(1, 2, 3))
        before = obs
    # FIRE is pressed in five frames. With only one of them, half of the games would stand still
    assert still.mean() < 0.2
    env.close()


@pytest.mark.parametrize(("probability", "first_action"), [(0.0, "NOOP"), (0.25, "FIRE")])
def test_a_game_after_another_one_starts_with_fire_where_actions_are_sticky(probability, first_action):
    """Without sticky actions, ale-py's own press of FIRE in the reset cannot fail."""
    env = AleVecEnv(BREAKOUT, 1, seed=0, action_repeat_probability=probability)
    idle, sent, send = np.zeros(1, dtype=int), [], env._envs.send
    env._envs.send = lambda actions: sent.append(*actions) or send(actions)
    env.reset()
    while "episode" not in env.step(idle)[3][0]:
        pass
    env.step(idle)
    assert gym.make(BREAKOUT).unwrapped.get_action_meanings()[sent[-1]] == first_action
    env.close()


def test_environments_to_look_at_are_left_as_they_are():
    env = make_atari_env(PONG, 1, env_kwargs=dict(render_mode="rgb_array"))
    assert to_ale_vec_env(env) is env


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mode=1), f"AleVecEnv has no mode, which {PONG} is given"),
        (dict(frameskip=2), f"{PONG} skips 2 frames itself"),
        (dict(max_episode_steps=1000), f"AleVecEnv would leave out (Patched)?TimeLimit of {PONG}.*Use SB3's environments"),
    ],
)
def test_environments_that_would_lose_arguments_are_not_replaced(arguments, message):
    env = make_atari_env(PONG, 1, env_kwargs=dict(render_mode=None, **arguments))
    with pytest.raises(ValueError, match=message):
        to_ale_vec_env(env)


@pytest.mark.parametrize(
    ("arguments", "lost"),
    [
        (dict(info_keywords=("lives",)), r"info_keywords=\('lives',\)"),
        (dict(override_existing=False), "override_existing=False"),
    ],
)
def test_environments_that_would_lose_arguments_of_their_monitor_are_not_replaced(arguments, lost, tmp_path):
    env = make_atari_env(PONG, 1, env_kwargs=dict(render_mode=None), monitor_dir=str(tmp_path), monitor_kwargs=arguments)
    with pytest.raises(ValueError, match=f"AleVecEnv would leave out {lost} of {PONG}"):
        to_ale_vec_env(env)
    env.close()


def test_other_environments_cannot_be_replaced():
    with pytest.raises(ValueError, match="AtariWrapper"):
        to_ale_vec_env(make_vec_env("CartPole-v1"))


def test_processes_in_which_rl_zoo_plays_stay():
    """Its `enjoy` makes them for `--n-envs`, and calls the wrapper of the preset."""
    env = make_atari_env(PONG, 1, vec_env_cls=SubprocVecEnv, vec_env_kwargs=dict(start_method="fork"))
    with pytest.warns(UserWarning, match="A SubprocVecEnv is not replaced by an AleVecEnv"):
        assert to_ale_vec_env(env) is env
    env.close()


def interrupted_and_not(when):
    """:return: equal environments, but in the first a step was sent and its results are lost, as by Ctrl-C"""
    env, other = make_ale_vec_env(BREAKOUT, 1, seed=0), make_ale_vec_env(BREAKOUT, 1, seed=0)
    for each in (env, other):
        play(each, 10)
    env.step_async(np.full(env.num_envs, FIRE))
    if when == "after the results":
        env._envs.recv()
    return env, other


INTERRUPTED = pytest.mark.parametrize(
    "when", ["before the results", pytest.param("after the results", marks=pytest.mark.slow)]
)


@INTERRUPTED
def test_a_reset_after_an_interrupted_step_starts_the_next_games(when):
    env, other = interrupted_and_not(when)
    np.testing.assert_array_equal(frames(env), frames(other))


@INTERRUPTED
def test_a_step_after_an_interrupted_one_follows_the_step_before_it(when):
    env, other = interrupted_and_not(when)
    for action in (0, 2, 3, 2):
        for result, expected in zip(env.step([action]), other.step([action]), strict=True):
            np.testing.assert_equal(result, expected)
    np.testing.assert_equal(env.get_state(), {**other.get_state(), "start_time": env.get_state()["start_time"]})


def interrupt_at_call(env, number, action):
    """
    A step that is interrupted at the call with this number in ``step_wait``, as by Ctrl-C.

    :return: number of calls that it got to
    """
    code, n_calls = AleVecEnv.step_wait.__code__, 0

    def interrupt(frame, event, _):
        nonlocal n_calls
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and caller is not None and caller.f_code is code:
            n_calls += 1
            if n_calls == number:
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        env.step(action)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return n_calls


def without_times(results):
    observations, rewards, dones, infos = results
    return observations, rewards, dones, [{**info, "episode": {**info.get("episode", {}), "t": 0}} for info in infos]


@pytest.mark.slow
def test_an_interrupted_step_is_dropped_or_made_completely(monkeypatch):
    """In a step that ends a game and takes a new seed. What follows can be resumed."""
    monkeypatch.setattr(ale_vec_env, "STEPS_PER_SEED", 20)
    actions = np.random.default_rng(0).integers(4, size=(400, 1))

    def make():
        return make_ale_vec_env(BREAKOUT, 1, seed=0, env_kwargs=dict(max_num_frames_per_episode=100))

    env = make()
    env.reset()
    for last in range(len(actions)):
        before = env.get_state()
        if any("episode" in info for info in env.step(actions[last])[3]):
            break
    assert env.get_state()["n_seeds"].max() == 2

    def results_after(state, n_steps):
        other = make()
        other.set_state(state)
        return [without_times(other.step(action)) for action in actions[last + 1 - n_steps : last + 4]][n_steps:]

    env = make()
    env.set_state(before)
    n_calls = interrupt_at_call(env, 10**9, actions[last])
    assert n_calls > 20
    # The last call, and one behind the results
    for number, expected in ((12, results_after(before, 0)), (n_calls, results_after(before, 1))):
        env = make()
        env.set_state(before)
        assert interrupt_at_call(env, number, actions[last]) == number
        state = env.get_state()
        after = [without_times(env.step(action)) for action in actions[last + 1 : last + 4]]
        np.testing.assert_equal(after, expected)
        np.testing.assert_equal(results_after(state, 0), after)


@pytest.mark.slow
def test_an_interrupted_reset_starts_the_same_games_when_it_is_called_again(monkeypatch):
    env, other = make_ale_vec_env(BREAKOUT, 1, seed=0), make_ale_vec_env(BREAKOUT, 1, seed=0)

    def interrupt(*args, reset, **kwargs):
        reset(*args, **kwargs)
        raise KeyboardInterrupt

    def interrupted_reset():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(env._envs, "reset", functools.partial(interrupt, reset=env._envs.reset))
            env.reset()

    interrupted_reset()
    np.testing.assert_array_equal(env.reset(), other.reset())
    for each in (env, other):
        for _ in range(10):
            each.step([FIRE])
    # Without another reset, the old games continue
    interrupted_reset()
    np.testing.assert_equal(without_times(env.step([2])), without_times(other.step([2])))
    np.testing.assert_array_equal(env.reset(), other.reset())


def test_closed_environments_have_no_threads_and_no_emulators_and_say_so():
    def n_threads():
        return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0

    # Environments of other tests end their threads too
    gc.collect()
    before = n_threads()
    env = AleVecEnv(PONG, num_threads=1)
    env.reset()
    assert n_threads() == before + 1 or before == 0
    emulators = weakref.ref(env._envs)
    env.step_async(np.zeros(1, dtype=int))
    for _ in range(2):
        env.close()
        assert n_threads() == before and emulators() is None
        for call in (env.reset, env.step_wait, lambda: env.step(np.zeros(1, dtype=int))):
            with pytest.raises(
                gym.error.ClosedEnvironmentError, match=f"The environments of {PONG} are closed. Make new ones"
            ):
                call()


def test_a_step_before_the_first_reset_is_refused():
    env = make_ale_vec_env(PONG, 1, seed=0)
    for _ in range(2):
        with pytest.raises(gym.error.ResetNeeded, match="Call `reset`"):
            env.step([0])


def test_a_restored_state_has_its_images_and_takes_a_new_seed():
    env, other = make_ale_vec_env(PONG, 1, seed=0), make_ale_vec_env(PONG, 1, seed=1)
    play(env, 50)
    other.reset()
    other.set_state(env.get_state())
    np.testing.assert_array_equal(other.get_images()[0], env.get_images()[0])
    other.seed(123)
    assert other.get_state()["seeds"] == [123]


def test_a_restored_state_is_still_there_after_an_interrupted_replay(monkeypatch):
    other = make_ale_vec_env(BREAKOUT, 1, seed=0)
    play(other, 10)
    env = make_ale_vec_env(BREAKOUT, 1, seed=1)
    env.set_state(other.get_state())
    with monkeypatch.context() as patch:
        patch.setattr(env._envs, "step", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            env.step([0])
    np.testing.assert_equal(env.get_state(), other.get_state())
    np.testing.assert_array_equal(env.step([0])[0], other.step([0])[0])


def test_the_state_of_environments_with_another_argument_is_refused():
    env = make_ale_vec_env(PONG, 1, seed=0)
    env.reset()
    other = make_ale_vec_env(BREAKOUT, 2, wrapper_kwargs=dict(frame_skip=2))
    different = rf"`env_id` is {BREAKOUT}, and was {PONG}, `n_envs` is 2, and was 1, `frame_skip` is 2, and was 4"
    with pytest.raises(ValueError, match=f" was trained with other arguments: {different}"):
        other.set_state(env.get_state())


def test_actions_that_the_game_does_not_have_are_not_replayed():
    """As of an edited checkpoint: ale-py would wait for an environment that has stopped."""
    env = AleVecEnv("BreakoutNoFrameskip-v4", n_envs=2)
    env.seed(0)
    env.reset()
    env.step(np.zeros(2, dtype=np.int64))
    state = env.get_state()
    for actions in (np.full_like(state["actions"], 4), state["actions"].astype(np.int64), state["actions"][:, :1]):
        with pytest.raises(ValueError, match="The saved actions are none of 2 environments with 4 actions each"):
            env.set_state({**state, "actions": actions})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot keep a process on a core")
def test_a_process_on_one_core_gets_one_thread():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        gc.collect()
        before = len(os.listdir("/proc/self/task"))
        env = AleVecEnv(PONG, 2)
        assert len(os.listdir("/proc/self/task")) == before + 1
        env.close()
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_environments_of_the_parent_are_refused_in_a_forked_process():
    env, other = (make_ale_vec_env(PONG, 1, seed=0) for _ in range(2))
    for each in (env, other):
        each.reset()
    child = os.fork()
    if child == 0:
        # Not for ever, where it waits for threads that are not there
        signal.alarm(60)
        refused, expected = 0, f"made in process {os.getppid()}, and this is process {os.getpid()}, forked from it"
        try:
            for call in (env.reset, env.step_wait, lambda: env.step([0])):
                try:
                    call()
                except RuntimeError as error:
                    refused += expected in str(error)
            env.close()
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    np.testing.assert_array_equal(env.step([0])[0], other.step([0])[0])
