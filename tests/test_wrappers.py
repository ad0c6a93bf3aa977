"""Evaluations of Atari games start with new games, in RL Zoo too, and training is as before."""

import types

import gymnasium as gym
import numpy as np
import pytest
import yaml
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_qac import zoo
from sb3_qac.common.vec_env import AleVecEnv
from sb3_qac.common.wrappers import NewGameOnReset

BREAKOUT, LIVES = "BreakoutNoFrameskip-v4", 5
# At the start of a game up to 30 no-ops, and 4 frames each for FIRE and for the action after it
FRAMES_OF_RESET = 30 + 4 + 4
NATIVE = dict(vec_env_wrapper="sb3_qac.common.env_util.to_ale_vec_env")


class RandomActions:
    """A model, for ``evaluate_policy``."""

    def __init__(self, action_space):
        self.action_space, self.rng = action_space, np.random.default_rng(0)

    def predict(self, observations, state=None, **_):
        return self.rng.integers(self.action_space.n, size=len(observations)), state


def make_breakout():
    return NewGameOnReset(AtariWrapper(gym.make(BREAKOUT)))


def play_until_a_life_is_lost(env):
    while not env.step(env.action_space.sample())[2]:
        pass


def test_a_reset_after_a_lost_life_goes_on_with_the_game_and_any_other_starts_a_new_one():
    env = make_breakout()
    ale = env.unwrapped.ale
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(2):
        play_until_a_life_is_lost(env)
        frames = ale.getEpisodeFrameNumber()
        env.reset()
        assert (ale.lives(), ale.getEpisodeFrameNumber() > frames) == (LIVES - 1, True)
        # As an evaluation that starts right after the reset of the one before
        env.reset()
        assert ale.lives() == LIVES and ale.getEpisodeFrameNumber() <= FRAMES_OF_RESET
        # and one that starts within a life
        play_until_a_life_is_lost(env)
        env.reset()
        env.step(0)
        env.reset()
        assert ale.lives() == LIVES and ale.getEpisodeFrameNumber() <= FRAMES_OF_RESET


@pytest.mark.slow
def test_training_steps_are_those_without_the_wrapper():
    ours = make_vec_env(BREAKOUT, 2, seed=0, wrapper_class=lambda env: NewGameOnReset(AtariWrapper(env)))
    stock = make_vec_env(BREAKOUT, 2, seed=0, wrapper_class=AtariWrapper)
    np.testing.assert_array_equal(ours.reset(), stock.reset())
    rng, ends = np.random.default_rng(0), 0
    for _ in range(250):
        actions = rng.integers(4, size=2)
        for found, expected in zip(ours.step(actions)[:3], stock.step(actions)[:3], strict=True):
            np.testing.assert_array_equal(found, expected)
        ends += sum("episode" in info for info in ours.buf_infos)
    assert ends > 0


def test_presets_of_the_comparison_have_the_same_environments():
    wrappers = [yaml.safe_load(zoo.presets(algo).read_text())["atari"]["env_wrapper"] for algo in ("qa2c", "a2c")]
    assert wrappers[0] == wrappers[1] and "sb3_qac.common.wrappers.NewGameOnReset" in wrappers[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environments", [pytest.param({}, id="SB3"), pytest.param(NATIVE, id="native", marks=pytest.mark.slow)]
)
def test_every_evaluation_in_rl_zoo_plays_whole_new_games(environments, tmp_path):
    from rl_zoo3.exp_manager import ExperimentManager

    zoo.register()
    manager = ExperimentManager(
        types.SimpleNamespace(),
        "qa2c",
        BREAKOUT,
        str(tmp_path),
        eval_freq=10_000,
        n_eval_envs=2,
        hyperparams=dict(n_envs=1, **environments),
        verbose=0,
    )
    model, _ = manager.setup_experiment()
    (evaluation,) = [callback for callback in manager.callbacks if isinstance(callback, EvalCallback)]
    env = evaluation.eval_env
    assert isinstance(env.unwrapped, AleVecEnv) == bool(environments)

    player = RandomActions(env.action_space)
    for _ in range(2):
        # Of each game: steps, and episodes, one for each life
        steps, episodes, games = np.zeros(2, int), np.zeros(2, int), []

        def count(scope, _, steps=steps, episodes=episodes, games=games):
            i = scope["i"]
            steps[i] += 1
            episodes[i] += scope["done"]
            if "episode" in scope["info"]:
                games.append((steps[i], episodes[i], scope["info"]["episode"]["l"]))
                steps[i] = episodes[i] = 0

        # The second environment plays two games; the first one is left within its second one
        returns, _ = evaluate_policy(player, env, n_eval_episodes=3, callback=count, return_episode_rewards=True)
        assert len(games) == len(returns) == 3
        for n_steps, n_episodes, n_frames in games:
            assert n_episodes == LIVES
            # What the monitor counted is of this evaluation: at each life's start, three steps at most are the wrapper's
            assert 4 * n_steps - 4 <= n_frames <= 4 * (n_steps + 3 * LIVES) + FRAMES_OF_RESET
    model.env.close()
    env.close()
