import copy
import dataclasses
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import joblib
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_qac.common.checks import check_choice, check_integer, check_number

FIRE = 1
# After so many steps, an environment gets a new seed at the end of its game. The actions since then determine its state (see
# ``set_state``). For a new seed ale-py reloads the game (some 70 ms): fewer seeds cost less, but make replays longer
STEPS_PER_SEED = 20_000


class AleVecEnv(VecEnv):
    """
    An SB3 ``VecEnv`` of Atari games, which ale-py steps and preprocesses in C++ threads.

    It replaces SB3's ``make_atari_env``: no-ops and FIRE at a reset, frame skip with the maximum of two frames, gray
    84 x 84 images, life loss, clipped rewards, and ``info["episode"]`` with the **raw** score, as from ``Monitor``. The
    parameters have the names of ``AtariWrapper``. The frames are those of gymnasium's ``AtariPreprocessing``, bit for bit;
    docs/ale_vec_env_reference.md tabulates what is different from SB3's wrappers.

    An observation is one frame, channels first. Stack them as usual, with ``VecFrameStack(env, 4)``.

    Code: the environments are ``ale_py.vector_env.AtariVectorEnv``

    :param env_id: Atari environment of gymnasium without a frame skip of its own: ``"*NoFrameskip-v4"``, or ``"ALE/*-v5"``
        with ``env_kwargs=dict(frameskip=1)``
    :param n_envs: Number of environments
    :param seed: Seed of the first environment; the others count up from it; random if None
    :param monitor_dir: Folder for the monitor files, one for each environment; None writes none
    :param noop_max: A game starts with a random number of frames of no-ops and FIRE, less than this; at 0 or 1 with none, or
        with the frame of FIRE
    :param frame_skip: Frames for which an action is repeated
    :param screen_size: Width and height of the images
    :param terminal_on_life_loss: Whether the loss of a life ends an episode (the game continues)
    :param clip_reward: Whether rewards are clipped to their sign
    :param fire_reset: Whether FIRE is pressed at the start of a game and, with ``terminal_on_life_loss``, of a life, if the
        game has that action. At the start of a life it replaces the agent's action, and with sticky actions at the start of a
        game too, where they may have repeated a no-op instead.
    :param action_repeat_probability: Probability that a frame repeats the last action (sticky actions). It must be 0 where the
        environment has such a probability itself
    :param num_threads: Number of C++ threads, 0 for one per core that this process may use
    :param render_mode: "rgb_array" for ``render`` and videos: they show what the agent sees; or None
    :param env_kwargs: Arguments of the game, as for ``gym.make``: ``frameskip``, ``full_action_space``,
        ``repeat_action_probability`` and ``max_num_frames_per_episode``
    :raises ValueError: if the environment is not an Atari game, or skips frames itself, or is given an argument that ale-py's
        C++ environments do not have, or a number is too small
    """

    def __init__(
        self,
        env_id: str,
        n_envs: int = 1,
        seed: int | None = None,
        monitor_dir: str | None = None,
        *,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = 84,
        terminal_on_life_loss: bool = True,
        clip_reward: bool = True,
        fire_reset: bool = True,
        action_repeat_probability: float = 0.0,
        num_threads: int = 0,
        render_mode: str | None = "rgb_array",
        env_kwargs: dict[str, Any] | None = None,
    ) -> None:
        # Not at the top: the wheel of ale-py is not on every platform, and importing sb3_qac works without it
        from ale_py import Action

        check_integer("n_envs", n_envs, minimum=1)
        check_integer("noop_max", noop_max, minimum=0)
        check_integer("frame_skip", frame_skip, minimum=1)
        check_integer("screen_size", screen_size, minimum=1)
        check_integer("num_threads", num_threads, minimum=0)
        if seed is not None:
            # NumPy's largest integer, for the last environment
            check_integer("seed", seed, minimum=0, maximum=2**63 - n_envs)
        check_number("action_repeat_probability", action_repeat_probability, maximum=1)
        check_choice("render_mode", render_mode, (None, "rgb_array"))
        env_kwargs = dict(env_kwargs or {})
        self.spec = spec_of(env_id, env_kwargs)
        game = game_arguments(self.spec)
        if action_repeat_probability > 0 and game["repeat_action_probability"] > 0:
            raise ValueError(
                f"`action_repeat_probability` is {action_repeat_probability}, but {env_id} repeats actions itself, with "
                f"probability {game['repeat_action_probability']}. Leave the argument out, or use an environment named like "
                "'PongNoFrameskip-v4'."
            )
        repeat_action_probability = game["repeat_action_probability"] or action_repeat_probability
        self.terminal_on_life_loss = terminal_on_life_loss
        self.clip_reward = clip_reward
        settings = dict(
            # ale-py would count all cores of the machine, even if a container or `taskset` allows fewer
            num_threads=num_threads or joblib.cpu_count(),
            max_num_frames_per_episode=game["max_num_frames_per_episode"],
            repeat_action_probability=repeat_action_probability,
            full_action_space=game["full_action_space"],
            # SB3's convention: the observation is the first of the next episode, the final one goes into the info
            autoreset_mode="SameStep",
            img_height=screen_size,
            img_width=screen_size,
            stack_num=1,
            frameskip=frame_skip,
            maxpool=frame_skip > 1,
            noop_max=noop_max,
            # We handle lives and clipping. In C++ a lost life would restart the game, or could not be distinguished
            # from the end of the game, and the raw rewards would be lost
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
            use_fire_reset=fire_reset,
        )
        # What a run depends on: it is resumed only with the same
        self._arguments = dict(
            env_id=env_id,
            n_envs=n_envs,
            noop_max=noop_max,
            frame_skip=frame_skip,
            screen_size=screen_size,
            terminal_on_life_loss=terminal_on_life_loss,
            clip_reward=clip_reward,
            action_repeat_probability=action_repeat_probability,
            fire_reset=fire_reset,
            env_kwargs=env_kwargs,
        )
        self._envs_arguments = dict(game=game["game"], num_envs=n_envs, **settings)
        # Its threads do not exist in a forked process
        self._process_id = os.getpid()
        self._envs = self._make_envs()
        has_fire = Action.FIRE in self._envs.ale.get_action_set()[FIRE : FIRE + 1]
        self._fires = fire_reset and has_fire
        # ale-py presses FIRE for one frame, in which a sticky action may be a no-op
        self._fires_in_first_step = self._fires and repeat_action_probability > 0
        self._screen: np.ndarray | None = None
        self.render_mode = render_mode
        # Actions of all environments, one byte each, and the step of each environment's last seed
        self._actions = bytearray()
        self._first_steps = np.zeros(n_envs, dtype=np.int64)
        self._n_steps = 0
        # Actions of the last step, one byte each
        self._sent = b""
        # Whether ale-py's environments have left the state that is kept here, as within a step, and after one that Ctrl-C has
        # interrupted
        self._mid_step = False
        self._state_to_set: dict[str, Any] | None = None

        observation_space = spaces.Box(0, 255, (1, screen_size, screen_size), np.uint8)
        super().__init__(n_envs, observation_space, self._envs.single_action_space)
        # SB3 adds "human", in which its `render` shows the images of "rgb_array"
        self.metadata = {"render_modes": [] if render_mode is None else [render_mode]}

        self._lives = np.zeros(n_envs, dtype=np.int32)
        # Whether the next action is FIRE
        self._must_fire = np.zeros(n_envs, dtype=bool)
        self._returns = np.zeros(n_envs, dtype=np.int64)
        self._first_frames = np.zeros(n_envs, dtype=np.int64)
        self._start_time = time.time()
        self._results_writers: list[ResultsWriter] = []
        if monitor_dir is not None:
            header: dict[str, float | str] = {"t_start": self._start_time, "env_id": env_id}
            self._results_writers = [ResultsWriter(str(Path(monitor_dir, str(i))), header=header) for i in range(n_envs)]
        self._base_seeds = np.zeros(n_envs, dtype=np.int64)
        self._n_seeds = np.zeros(n_envs, dtype=np.int64)
        self.seed(int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed)

    def _make_envs(self) -> Any:
        """:return: ale-py's environments"""
        from ale_py.vector_env import AtariVectorEnv

        return AtariVectorEnv(**self._envs_arguments)

    def _check_usable(self) -> None:
        """
        :raises gym.error.ClosedEnvironmentError: after ``close``
        :raises RuntimeError: in a forked process
        """
        if self._envs is None:
            raise gym.error.ClosedEnvironmentError(f"The environments of {self.spec.id} are closed. Make new ones.")
        if self._process_id != os.getpid():
            # It would wait for ever
            raise RuntimeError(
                f"The environments of {self.spec.id} were made in process {self._process_id}, and this is process "
                f"{os.getpid()}, forked from it, which has none of their threads. Make environments in this process."
            )

    def _discard_interrupted(self) -> None:
        """
        Forget what was interrupted, as by Ctrl-C. ale-py cannot do that: a reset may then return the step before it, or crash,
        and whether results are still to come is not known. So there are new environments.
        """
        if self._mid_step:
            self._envs = self._make_envs()
            self._mid_step = False

    def reset(self) -> VecEnvObs:
        """
        Start new games in all environments, even if the old ones were not over.

        :return: observations, shape (n_envs, 1, screen_size, screen_size)
        """
        self._check_usable()
        self._discard_interrupted()
        given = zip(self._base_seeds.tolist(), self._n_seeds.tolist(), self._seeds, strict=True)
        seeds = [(base_seed, n + 1) if seed is None else (seed, 1) for base_seed, n, seed in given]
        base_seeds, n_seeds = (np.array(column, dtype=np.int64) for column in zip(*seeds, strict=True))
        self._mid_step = True
        obs, info = self._envs.reset(seed=_ale_seeds(base_seeds, n_seeds))
        lives, first_frames = info["lives"], self._frames_before_episode(info)
        first_steps, returns = np.zeros_like(self._first_steps), np.zeros_like(self._returns)
        actions, must_fire = bytearray(), np.full_like(self._must_fire, self._fires_in_first_step)
        # The caller may write to what is returned
        screen = obs.copy()

        # Plain assignments only: a KeyboardInterrupt cannot split them
        self._base_seeds, self._n_seeds, self._first_steps = base_seeds, n_seeds, first_steps
        self._actions, self._n_steps, self._state_to_set = actions, 0, None
        self._lives, self._must_fire, self._returns, self._first_frames = lives, must_fire, returns, first_frames
        self._screen, self._mid_step = screen, False

        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        self._check_usable()
        if self._screen is None:
            raise gym.error.ResetNeeded("Call `reset` before the first step.")
        if self._mid_step:
            # The agent has not seen the step that was interrupted: this one follows the one before it
            self._state_to_set = self.get_state()
        if self._state_to_set is not None:
            self._replay(self._state_to_set)
        if self._must_fire.any():
            actions = np.where(self._must_fire, FIRE, actions)
        given, actions = np.asarray(actions), np.asarray(actions, dtype=np.int64)
        if actions.shape != (self.num_envs,) or (actions != given).any():
            raise ValueError(f"`actions` must be {self.num_envs} integers, one for each environment, but {given} was given.")
        if actions.min() < 0 or actions.max() >= self.action_space.n:  # type: ignore[attr-defined]
            # ale-py's threads would never answer
            raise ValueError(f"Actions must be between 0 and {self.action_space.n - 1}, but {actions} was given.")  # type: ignore[attr-defined]
        self._sent, self._mid_step = actions.astype(np.uint8).tobytes(), True
        self._envs.send(actions)

    def step_wait(self) -> VecEnvStepReturn:
        self._check_usable()
        assert self._mid_step, "`step_wait` comes after `step_async`"
        obs, raw_rewards, terminated, truncated, info = self._envs.recv()
        sent, n_steps = self._sent, self._n_steps + 1
        game_over = terminated | truncated
        infos: list[dict[str, Any]] = [{"lives": lives, "TimeLimit.truncated": False} for lives in info["lives"].tolist()]
        returns, first_frames = self._returns + raw_rewards, self._first_frames
        n_seeds, first_steps, n_dropped = self._n_seeds, self._first_steps, 0

        life_lost = np.zeros_like(game_over)
        if self.terminal_on_life_loss:
            # Like SB3's EpisodicLifeEnv: at 0 lives some games continue for a few frames before they end
            life_lost = (info["lives"] < self._lives) & (info["lives"] > 0) & ~game_over
            for i in np.flatnonzero(life_lost).tolist():
                infos[i]["terminal_observation"] = obs[i].copy()
        ended = np.flatnonzero(game_over).tolist()
        if ended:
            first_frames = self._frames_before_episode(info)
            seconds = round(time.time() - self._start_time, 6)
            for i in ended:
                # ale-py's lives are those of the next game
                infos[i]["lives"] = 0 if terminated[i] else int(self._lives[i])
                infos[i]["terminal_observation"] = info["final_obs"][i]
                infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
                # What `Monitor` reports: raw return, length in frames, seconds since the start
                n_frames = int(first_frames[i] - self._first_frames[i])
                infos[i]["episode"] = {"r": float(returns[i]), "l": n_frames, "t": seconds}
            returns[game_over] = 0
            due = game_over & (n_steps - first_steps >= STEPS_PER_SEED)
            if due.any():
                n_seeds, first_steps = n_seeds + due, np.where(due, n_steps, first_steps)
                options = None if due.all() else {"reset_mask": due}
                obs, info = self._envs.reset(seed=_ale_seeds(self._base_seeds, n_seeds)[due], options=options)
                first_frames = self._frames_before_episode(info)
                # No environment needs the actions before its last seed
                n_dropped = len(self._actions) + len(sent) - (n_steps - int(first_steps.min())) * self.num_envs
        lives = info["lives"]
        must_fire = life_lost & self._fires | game_over & self._fires_in_first_step
        # The caller may write to what is returned
        screen = obs.copy()

        # Plain assignments only: a KeyboardInterrupt cannot split them
        self._actions += sent
        del self._actions[:n_dropped]
        self._n_steps, self._n_seeds, self._first_steps = n_steps, n_seeds, first_steps
        self._lives, self._must_fire, self._returns, self._first_frames = lives, must_fire, returns, first_frames
        self._screen, self._mid_step = screen, False

        for i in ended if self._results_writers else []:
            self._results_writers[i].write_row(infos[i]["episode"])
        rewards = np.sign(raw_rewards) if self.clip_reward else raw_rewards
        return obs, rewards.astype(np.float32), game_over | life_lost, infos

    @staticmethod
    def _frames_before_episode(info: dict[str, np.ndarray]) -> np.ndarray:
        return info["frame_number"].astype(np.int64) - info["episode_frame_number"]

    def get_state(self) -> dict[str, Any]:
        """:return: state for ``set_state``, as plain data"""
        state = self._state_to_set or {
            "base_seeds": self._base_seeds,
            "n_seeds": self._n_seeds,
            "actions": np.frombuffer(bytes(self._actions), dtype=np.uint8).reshape(-1, self.num_envs),
            "first_steps": self._first_steps - self._first_steps.min(),
            "frames": self._screen,
            "lives": self._lives,
            "life_lost": self._must_fire,
            "returns": self._returns,
            "first_frames": self._first_frames,
            "start_time": self._start_time,
            "arguments": self._arguments,
        }
        # Seeds set by the user, which the next reset will use
        return copy.deepcopy({**state, "seeds": self._seeds})

    def set_state(self, state: dict[str, Any]) -> None:
        """
        Bring the environments to a saved state. The state of ale-py's C++ environments cannot be read. But the seed and the
        actions since then determine it, so the actions are played again, before the next step.

        :param state: Result of ``get_state``
        :raises ValueError: if the environments that it was taken from have other arguments
        """
        there = state["arguments"]
        different = [
            f"`{name}` is {value}, and was {there[name]}" for name, value in self._arguments.items() if value != there[name]
        ]
        if different:
            raise ValueError(
                f"{self.spec.id} was trained with other arguments: {', '.join(different)}. Give the earlier ones to resume it."
            )
        actions, n_actions = state["actions"], self.action_space.n  # type: ignore[attr-defined]
        # In a file that may be anybody's. The emulator does not look, and waits forever
        if actions.dtype != np.uint8 or actions.shape[1:] != (self.num_envs,) or (actions >= n_actions).any():
            raise ValueError(f"The saved actions are none of {self.num_envs} environments with {n_actions} actions each.")
        self._state_to_set = state = copy.deepcopy(state)
        self._start_time = state["start_time"]
        self._seeds = state["seeds"]
        self._base_seeds, self._n_seeds = state["base_seeds"], state["n_seeds"]
        self._screen = state["frames"]

    def _replay(self, state: dict[str, Any]) -> None:
        """
        :param state: Result of ``get_state``
        :raises ValueError: if the actions do not reproduce the saved frames
        """
        self._discard_interrupted()
        seeds, actions, first_steps = _ale_seeds(self._base_seeds, self._n_seeds), state["actions"], state["first_steps"]
        self._mid_step = True
        frames, _ = self._envs.reset(seed=seeds)
        for step in range(len(actions) + 1):
            # An environment whose first step is later is stepped along with the others, and reset at that step
            start = first_steps == step
            if start.any() and step > 0:
                frames, _ = self._envs.reset(seed=seeds[start], options={"reset_mask": start})
            if step < len(actions):
                frames = self._envs.step(actions[step].astype(np.int64))[0]
        if not np.array_equal(frames, state["frames"]):
            raise ValueError(
                f"Playing the actions of {self.spec.id} again did not reproduce the saved frames. "
                "Resume with the versions of ale-py and of this package that the run was started with, or with new "
                "episodes (`new_episodes=True` of ExactCheckpointCallback, `--new-episodes` of `study`)."
            )
        self._actions, self._n_steps, self._first_steps = bytearray(actions.tobytes()), len(actions), first_steps.copy()
        self._screen, self._lives, self._first_frames = frames, state["lives"], state["first_frames"]
        self._must_fire, self._returns = state["life_lost"].copy(), state["returns"].copy()
        self._state_to_set, self._mid_step = None, False

    def close(self) -> None:
        if self._process_id != os.getpid():
            # The monitor files and the threads belong to the process that this one was forked from
            return
        for results_writer in self._results_writers:
            results_writer.close()
        self._results_writers = []
        # ale-py ends the threads and frees the emulators with the last reference, not in its `close`
        self._envs = None

    def get_images(self) -> Sequence[np.ndarray | None]:
        """
        :return: what the agents see, as RGB images
        :raises gym.error.ResetNeeded: before the first ``reset``
        """
        if self.render_mode != "rgb_array":
            warnings.warn("No images: make the environments with `render_mode='rgb_array'`.", stacklevel=2)
            return [None] * self.num_envs
        if self._screen is None:
            raise gym.error.ResetNeeded("Call `reset` before the first image.")
        return [np.repeat(frame[0, :, :, None], 3, axis=2) for frame in self._screen]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        # Returns and lengths are reported in the same way as by Monitor
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise NotImplementedError(f"The games run in C++: `{attr_name}` cannot be set on them. Pass it to the constructor.")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        raise NotImplementedError(f"The games run in C++ and have no method `{method_name}`. Use SB3's `make_atari_env`.")


def _ale_seeds(base_seeds: np.ndarray, n_seeds: np.ndarray) -> np.ndarray:
    """
    :param base_seeds: Seed that each environment was given, shape (n_envs,)
    :param n_seeds: How many seeds each has had since then, shape (n_envs,)
    :return: the last seed of each, within the range of C++'s int32
    """
    return np.array(
        [
            seed % 2**31 if k == 1 else np.random.SeedSequence((seed % 2**32, k)).generate_state(1)[0] % 2**31
            for seed, k in zip(base_seeds.tolist(), n_seeds.tolist(), strict=True)
        ],
        dtype=np.int64,
    )


def is_atari(spec: gym.envs.registration.EnvSpec) -> bool:
    """:return: whether it is an Atari game"""
    return "AtariEnv" in str(spec.entry_point)


def spec_of(env_id: str, env_kwargs: dict[str, Any]) -> gym.envs.registration.EnvSpec:
    """
    :param env_id: Environment of gymnasium
    :param env_kwargs: Arguments of the environment
    :return: gymnasium's specification of the environment with these arguments
    """
    spec = gym.spec(env_id)
    return dataclasses.replace(spec, kwargs={**spec.kwargs, **env_kwargs})


def game_arguments(spec: gym.envs.registration.EnvSpec) -> dict[str, Any]:
    """
    :param spec: gymnasium's specification of the environment
    :return: Arguments of ale-py's ``AtariEnv``
    :raises ValueError: if it is not an Atari game, skips frames itself, or has arguments that C++ does not support
    """
    if not is_atari(spec):
        raise ValueError(f"{spec.id} is not an Atari game ({spec.entry_point}). Use SB3's `make_vec_env`.")
    defaults = {"repeat_action_probability": 0.25, "full_action_space": False, "max_num_frames_per_episode": 108_000}
    game = {**defaults, **spec.kwargs}
    unknown = [name for name in spec.kwargs if name not in (*defaults, "game", "frameskip")]
    unknown += [name for name in ("max_episode_steps", "additional_wrappers") if getattr(spec, name)]
    if unknown:
        raise ValueError(f"AleVecEnv has no {', '.join(unknown)}, which {spec.id} is given. Use SB3's `make_atari_env`.")
    if game.get("frameskip", 4) != 1:
        raise ValueError(
            f"{spec.id} skips {game.get('frameskip', 4)} frames itself, but the preprocessing has to see every frame. "
            "Use an environment named like 'PongNoFrameskip-v4', or give `env_kwargs=dict(frameskip=1)`."
        )
    if (game["max_num_frames_per_episode"] or 0) <= 0:
        # No limit for `AtariEnv`, but each game would end at once in `AtariVectorEnv`
        game["max_num_frames_per_episode"] = 2**31 - 1
    return game
