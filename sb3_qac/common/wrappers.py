import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.core import ActType, ObsType
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.env_util import unwrap_wrapper

from sb3_qac.common.random_state import (
    find_generators,
    generator_state,
    generators_at,
    get_random_state,
    same_random_state,
)

# Steps of an environment that are watched for draws from global generators: reading their states takes longer than some steps
CHECKED_STEPS = 1000


class EpisodeReplay(gym.Wrapper):
    """
    Makes exact resume possible on an environment whose state cannot be read, such as those of Box2D and MuJoCo. The reset and
    the actions determine an episode, so the wrapper keeps them and plays them again. Put it outside all wrappers but those
    whose state outlives an episode, such as gymnasium's ``NormalizeReward``, which belong outside of it::

        env = make_vec_env("LunarLander-v3", n_envs=8, wrapper_class=EpisodeReplay)

    or in RL Zoo's presets ``env_wrapper: sb3_qac.common.wrappers.EpisodeReplay``. The environment may draw random numbers from
    ``np_random``, as gymnasium requires, and from generators that its constructor makes; in ``reset`` also from the global
    generators of Python, NumPy and PyTorch. If it draws from these in ``step``, a warning says so. It must not draw from a
    generator that it shares with another environment or that is a variable of a module.

    :param env: Environment
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.reset_arguments: dict[str, Any] = {}
        # At the last reset: the global generators, and those of the environment
        self.random_state: dict[str, Any] = {}
        self.generator_states: list[dict[str, Any]] = []
        # Not `actions` and `obs`, which would hide attributes of the environment from `VecEnv.get_attr`
        self.episode_actions: list[np.ndarray] = []
        self.last_obs: Any = None
        self._places_of_generators = find_generators(env)
        self._steps_to_check = CHECKED_STEPS

    def env_generators(self) -> list[Any]:
        """:return: the random generators of the environment, its wrappers and its spaces"""
        return generators_at(self._places_of_generators)

    def reset(self, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        self.reset_arguments, self.episode_actions = kwargs, []
        self.random_state = get_random_state(with_gpus=False)
        self.generator_states = list(map(generator_state, self.env_generators()))
        self.last_obs, info = self.env.reset(**kwargs)
        return self.last_obs, info

    def step(self, action: ActType) -> tuple[ObsType, Any, bool, bool, dict[str, Any]]:
        self.episode_actions.append(np.array(action))
        before = get_random_state(with_gpus=False) if self._steps_to_check > 0 else None
        self.last_obs, reward, terminated, truncated, info = self.env.step(action)
        if before is not None:
            self._warn_of_draws(before)
        return self.last_obs, reward, terminated, truncated, info

    def _warn_of_draws(self, before: dict[str, Any]) -> None:
        """:param before: The global generators before a step. Between two steps others draw from them too"""
        self._steps_to_check -= 1
        if not same_random_state(before, get_random_state(with_gpus=False)):
            self._steps_to_check = 0
            warnings.warn(
                f"{self.unwrapped} draws from a global random generator of Python, NumPy or PyTorch in `step`. If something "
                "else draws from it too, such as another environment, EpisodeReplay cannot repeat the episode, and the run "
                "resumes with new episodes only (`new_episodes`). Draw from `self.np_random` instead.",
                stacklevel=2,
            )


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


def wrappers_of(env: gym.Env) -> list[gym.Wrapper]:
    """
    :param env: Environment
    :return: its wrappers, from the outside in
    """
    found = []
    while isinstance(env, gym.Wrapper):
        found.append(env)
        env = env.env
    return found
