"""Toy environments and helpers that several tests share."""

import random
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

# Terminations and truncations of a ``ScriptedEnv``, for a rollout of six steps
ENDS = [
    pytest.param((), (), id="no end"),
    pytest.param((2,), (), id="termination inside"),
    pytest.param((), (3,), id="time limit inside"),
    pytest.param((1,), (4,), id="both inside"),
    pytest.param((5,), (), id="termination at the last step"),
    pytest.param((), (5,), id="time limit at the last step"),
]


class ScriptedEnv(gym.Env):
    """
    Rewards and ends as written down in advance, whatever the actions; the observation is the number of the step.

    :param rewards: Reward of each step of the whole run
    :param terminations: Steps at which an episode ends for good
    :param truncations: Steps at which a time limit cuts it
    :param n_actions: Number of actions
    """

    def __init__(self, rewards: list[float], terminations: tuple = (), truncations: tuple = (), n_actions: int = 3) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(n_actions)
        self.rewards, self.terminations, self.truncations = rewards, terminations, truncations
        self.t = 0

    def observe(self, ended: bool = False) -> np.ndarray:
        # The last observation of an episode is told apart from the first of the next
        return np.array([self.t + (0.5 if ended else 0.0)], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self.rewards[self.t], self.t in self.terminations, self.t in self.truncations
        self.t += 1
        return self.observe(ended=terminated or truncated), reward, terminated, truncated, {}


class Unrepeatable(gym.Env):
    """Its observations are numbers of the operating system, and its state cannot be read."""

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.t, self.hidden = 0, iter(())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.step(0)[0], {}

    def step(self, action):
        self.t += 1
        return np.array([random.SystemRandom().random()], np.float32), float(action), self.t % 20 == 0, False, {}


class ObservationsOf(gym.Env):
    """
    Episodes of 20 steps with random observations.

    :param space: Observation space, by its name in ``SPACES``
    """

    SPACES: ClassVar[dict[str, spaces.Space]] = {
        "vectors": spaces.Box(-1, 1, (3,)),
        "dictionaries": spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(4)}),
        "images": spaces.Box(0, 255, (48, 40, 3), np.uint8),
        # NatureCNN needs 36 pixels
        "small images": spaces.Box(0, 255, (35, 48, 3), np.uint8),
    }

    def __init__(self, space: str = "vectors", render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = self.SPACES[space], spaces.Discrete(3)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observation_space.sample(), float(action == 1), False, self.t >= 20, {}


class Interrupted(Exception):
    pass


class InterruptAt(BaseCallback):
    """Ends a training without a word, as a kill does, at a number of steps."""

    def __init__(self, step):
        super().__init__()
        self.step = str(step)

    def _on_step(self):
        if self.num_timesteps >= float(self.step):
            raise Interrupted
        return True
