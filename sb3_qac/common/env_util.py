import os
import warnings
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from stable_baselines3.common.atari_wrappers import (
    AtariWrapper,
    ClipRewardEnv,
    EpisodicLifeEnv,
    FireResetEnv,
    MaxAndSkipEnv,
    NoopResetEnv,
    StickyActionEnv,
    WarpFrame,
)
from stable_baselines3.common.env_util import is_wrapped, unwrap_wrapper
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_qac.common.vec_env import AleVecEnv
from sb3_qac.common.vec_env.ale_vec_env import game_arguments, spec_of
from sb3_qac.common.wrappers import NewGameOnReset, wrappers_of

# Wrappers that `make_atari_env` adds. AleVecEnv does their work itself
ATARI_WRAPPERS = (
    *(AtariWrapper, ClipRewardEnv, EpisodicLifeEnv, FireResetEnv, MaxAndSkipEnv, NoopResetEnv, StickyActionEnv, WarpFrame),
    *(Monitor, NewGameOnReset, OrderEnforcing, PassiveEnvChecker),
)


def make_ale_vec_env(
    env_id: str,
    n_envs: int = 1,
    seed: int | None = None,
    # The order of `make_atari_env` ends here: its next argument is `start_index`
    *,
    monitor_dir: str | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
) -> AleVecEnv:
    """
    Make Atari environments that ale-py steps in C++ threads. It replaces SB3's ``make_atari_env``.

    :param env_id: Atari environment without a frame skip of its own: ``"*NoFrameskip-v4"``, or ``"ALE/*-v5"`` with
        ``env_kwargs=dict(frameskip=1)``
    :param n_envs: Number of environments
    :param seed: Seed of the first environment
    :param monitor_dir: Folder for the monitor files; None writes none
    :param wrapper_kwargs: Arguments of SB3's ``AtariWrapper``
    :param env_kwargs: Arguments of the game (see ``AleVecEnv``), and ``render_mode``
    :param vec_env_kwargs: Further arguments of ``AleVecEnv``: ``num_threads``, ``fire_reset``, ``render_mode``
    :return: The environments. As with ``make_atari_env``, stack the frames with ``VecFrameStack(env, 4)``.
    """
    game, settings = dict(env_kwargs or {}), dict(vec_env_kwargs or {})
    if "render_mode" in game:
        settings.setdefault("render_mode", game.pop("render_mode"))
    return AleVecEnv(env_id, n_envs, seed, monitor_dir, env_kwargs=game, **(wrapper_kwargs or {}), **settings)


def to_ale_vec_env(env: VecEnv) -> VecEnv:
    """
    Replace SB3's environments by ale-py's C++ environments with the same settings. In RL Zoo, in a preset or with
    ``-params``::

        vec_env_wrapper: sb3_qac.common.env_util.to_ale_vec_env

    ``env_wrapper`` and ``frame_stack`` stay as they are. Environments with a render mode are not replaced, so that ``enjoy``
    and ``record_video`` show the game in color. SB3's ``make_atari_env`` sets one: call ``make_ale_vec_env`` instead of it.

    :param env: Environments as RL Zoo and SB3 make them: a ``DummyVecEnv`` of ``Monitor``, then ``AtariWrapper``
    :return: An ``AleVecEnv``; or ``env`` itself if it is one, has a render mode, or is a ``SubprocVecEnv``, which RL Zoo makes
        to play with ``--n-envs``
    :raises ValueError: for other environments, if they differ, or if arguments or further wrappers would be lost
    """
    if isinstance(env, AleVecEnv):
        return env
    if isinstance(env, SubprocVecEnv):
        warnings.warn(
            "A SubprocVecEnv is not replaced by an AleVecEnv, which is faster: a DummyVecEnv would be.", stacklevel=2
        )
        return env
    if not isinstance(env, DummyVecEnv) or any(unwrap_wrapper(each, WarpFrame) is None for each in env.envs):
        raise ValueError(f"Only a DummyVecEnv of environments in an `AtariWrapper` can be replaced, but {env} was given.")
    if env.render_mode is not None:
        return env
    settings, *others = map(_settings_of, env.envs)
    for other in others:
        if other != settings:
            raise ValueError(f"The environments of an AleVecEnv are alike, but {settings} and {other} were given.")
    if lost := list(dict.fromkeys(name for each in env.envs for name in _lost_of(each))):
        raise ValueError(
            f"AleVecEnv would leave out {', '.join(lost)} of {settings['env_id']}. "
            "Use SB3's environments, without `to_ale_vec_env`, or do without these."
        )
    # A reset has used the seed, but the game knows it
    seed = env.envs[0].unwrapped._np_random_seed if env._seeds[0] is None else env._seeds[0]
    monitor: Any = unwrap_wrapper(env.envs[0], Monitor)
    is_written = monitor is not None and monitor.results_writer is not None
    monitor_dir = os.path.dirname(monitor.results_writer.file_handler.name) if is_written else None
    env.close()
    return make_ale_vec_env(
        settings.pop("env_id"),
        env.num_envs,
        seed,
        monitor_dir=monitor_dir,
        env_kwargs=settings.pop("env_kwargs"),
        vec_env_kwargs=dict(fire_reset=settings.pop("fire_reset"), render_mode=None),
        wrapper_kwargs=settings,
    )


def _settings_of(env: gym.Env) -> dict[str, Any]:
    """
    :param env: Environment in an ``AtariWrapper``
    :return: Its ID, the arguments of the game that the ID alone does not give, those that the wrapper was made with, and
        whether FIRE is pressed
    """
    assert env.spec is not None
    own, given = gym.spec(env.spec.id).kwargs, env.spec.kwargs
    settings: dict[str, Any] = dict(
        env_id=env.spec.id,
        env_kwargs={k: v for k, v in given.items() if k != "render_mode" and (k not in own or own[k] != v)},
        fire_reset=is_wrapped(env, FireResetEnv),
        terminal_on_life_loss=is_wrapped(env, EpisodicLifeEnv),
        clip_reward=is_wrapped(env, ClipRewardEnv),
        noop_max=0,
        frame_skip=1,
    )
    game_arguments(spec_of(env.spec.id, settings["env_kwargs"]))
    for name, wrapper_class, attribute in (
        ("noop_max", NoopResetEnv, "noop_max"),
        ("frame_skip", MaxAndSkipEnv, "_skip"),
        ("screen_size", WarpFrame, "width"),
        ("action_repeat_probability", StickyActionEnv, "action_repeat_probability"),
    ):
        wrapper = unwrap_wrapper(env, wrapper_class)
        if wrapper is not None:
            settings[name] = getattr(wrapper, attribute)
    return settings


def _lost_of(env: gym.Env) -> list[str]:
    """
    :param env: Environment in an ``AtariWrapper``
    :return: What an ``AleVecEnv`` would not do: wrappers, and arguments of ``WarpFrame`` and ``Monitor``
    """
    # A subclass may do something else
    lost = [type(layer).__name__ for layer in wrappers_of(env) if type(layer) not in ATARI_WRAPPERS]
    screen: Any = unwrap_wrapper(env, WarpFrame)
    if screen.width != screen.height:
        lost.append(f"the shape {screen.width} x {screen.height} of the images, which would be square,")
    monitor: Any = unwrap_wrapper(env, Monitor)
    if monitor is None:
        return lost
    lost += [f"{name}={value!r}" for name in ("info_keywords", "reset_keywords") if (value := getattr(monitor, name))]
    if any(isinstance(layer, MaxAndSkipEnv | EpisodicLifeEnv | ClipRewardEnv) for layer in wrappers_of(monitor.env)):
        # Its rows have clipped returns of single lives
        lost.append("the Monitor around AtariWrapper, instead of inside it,")
    if monitor.results_writer is not None and monitor.results_writer.file_handler.mode.startswith("a"):
        lost.append("override_existing=False")
    return lost
