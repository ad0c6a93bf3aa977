from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.core import ActType, ObsType
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.env_util import unwrap_wrapper


class EpisodeReplay(gym.Wrapper):
    """
    Makes exact resume possible on an environment whose state cannot be read, such as those of Box2D and MuJoCo. The reset and
    the actions determine an episode, so the wrapper keeps them and plays them again. Put it outside all wrappers but those
    whose state outlives an episode, such as gymnasium's ``NormalizeReward``, which belong outside of it::

        env = make_vec_env("LunarLander-v3", n_envs=8, wrapper_class=EpisodeReplay)

    or in RL Zoo's presets ``env_wrapper: sb3_qac.common.wrappers.EpisodeReplay``. The environment has to draw its random
    numbers from ``np_random``, as gymnasium requires.

    :param env: Environment
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.reset_arguments: dict[str, Any] = {}
        self.random_state: Mapping[str, Any] = {}
        # Not `actions` and `obs`, which would hide attributes of the environment from `VecEnv.get_attr`
        self.episode_actions: list[np.ndarray] = []
        self.last_obs: Any = None

    def reset(self, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        self.reset_arguments, self.episode_actions = kwargs, []
        self.random_state = self.unwrapped.np_random.bit_generator.state
        self.last_obs, info = self.env.reset(**kwargs)
        return self.last_obs, info

    def step(self, action: ActType) -> tuple[ObsType, Any, bool, bool, dict[str, Any]]:
        self.episode_actions.append(np.array(action))
        self.last_obs, reward, terminated, truncated, info = self.env.step(action)
        return self.last_obs, reward, terminated, truncated, info


class NewGameOnReset(gym.Wrapper):
    """
    Makes every evaluation of an Atari game start with a new game. Put it outside SB3's ``AtariWrapper``, as the presets do.

    If the loss of a life ends an episode, ``AtariWrapper`` continues the unfinished game at any ``reset``. That is right after
    a lost life, but ``EvalCallback`` also resets at the start of an evaluation: its first games would have been begun by an
    older policy, and would include its scores. With this wrapper only a reset right after the end of an episode can continue a
    game. Training does not change.

    :param env: Environment
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.episode_over = False

    def reset(self, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        lives = unwrap_wrapper(self.env, EpisodicLifeEnv)
        if lives is not None and not self.episode_over:
            lives.was_real_done = True  # type: ignore[attr-defined]
        self.episode_over = False
        return self.env.reset(**kwargs)

    def step(self, action: ActType) -> tuple[ObsType, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.episode_over = terminated or truncated
        return obs, reward, terminated, truncated, info


def layers(env: gym.Env) -> list[gym.Wrapper]:
    """
    :param env: Environment
    :return: its wrappers, from the outside in
    """
    found = []
    while isinstance(env, gym.Wrapper):
        found.append(env)
        env = env.env
    return found
