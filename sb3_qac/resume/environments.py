"""The state of environments that Python attributes do not show."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd as GymRunningMeanStd
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_qac.common.random_state import random_state
from sb3_qac.common.vec_env import AleVecEnv
from sb3_qac.common.wrappers import EpisodeReplay, layers
from sb3_qac.resume.state import (
    StateError,
    _state_of,
    equal,
    get_plain_attributes,
    get_values,
    kind_of,
    set_attributes,
    set_state,
    set_values,
)


@get_values.register
def _(obj: SubprocVecEnv, name: str, seen: set[int]) -> dict[str, Any]:
    raise StateError(
        f"{name} runs its environments in other processes (SubprocVecEnv), where their state cannot be taken. "
        "Use a DummyVecEnv, or for Atari an AleVecEnv."
    )


@get_values.register
def _(obj: AleVecEnv, name: str, seen: set[int]) -> dict[str, Any]:
    return {"games": obj.get_state(), "action_space": get_values(obj.action_space, name, seen)}


@set_values.register
def _(obj: AleVecEnv, values: dict[str, Any], name: str) -> None:
    obj.set_state(values["games"])
    set_values(obj.action_space, values["action_space"], name)


def check_layer(layer: gym.Wrapper, name: str) -> None:
    """
    :param layer: Wrapper inside an ``EpisodeReplay``
    :param name: What to call the latter in errors
    :raises StateError: if it has statistics that outlive an episode. Playing the episode again would add to them once more
    """
    for key, value in vars(layer).items():
        if isinstance(value, GymRunningMeanStd | RunningMeanStd):
            raise StateError(
                f"{type(layer).__name__} is inside {name}, which cannot restore its `{key}` ({kind_of(value)}) by playing the "
                "episode again. Put it outside EpisodeReplay. In a study, and for running statistics, use VecNormalize."
            )


@get_values.register
def _(obj: EpisodeReplay, name: str, seen: set[int]) -> dict[str, Any]:
    for layer in layers(obj.env):
        check_layer(layer, name)
    # The replay restores everything inside, so nothing else needs to save it
    seen.update(map(id, (*layers(obj.env), obj.unwrapped)))
    actions = obj.episode_actions
    return {
        "reset_arguments": obj.reset_arguments,
        "random_state": obj.random_state,
        "generator_states": obj.generator_states,
        # A wrapper outside may have drawn from them too
        "generators": [_state_of(generator, f"{name}.generators", seen) for generator in obj.env_generators()],
        # One array is written and read faster than thousands
        "actions": np.stack(actions) if len({(action.shape, action.dtype) for action in actions}) == 1 else list(actions),
        "obs": obj.last_obs,
        # Counters that a reset does not clear, such as Monitor's
        "layers": [get_plain_attributes(layer) for layer in layers(obj.env)],
    }


@set_values.register
def _(obj: EpisodeReplay, values: dict[str, Any], name: str) -> None:
    if not values["random_state"]:
        return  # It was never reset
    for layer in layers(obj.env):
        if isinstance(layer, Monitor):
            # With `allow_early_resets=False` it refuses a reset within an episode, such as the one that has just begun
            layer.needs_reset = True
    error = ""
    try:
        # A copy, because it advances as numbers are drawn
        with random_state(dict(values["random_state"])):
            for generator, state in zip(obj.env_generators(), values["generator_states"], strict=True):
                set_values(generator, state, f"{name}.generators")
            obj.reset(**values["reset_arguments"])
            for action in values["actions"]:
                # A number as `DummyVecEnv` gives it, of NumPy
                obj.step(action[()])
    except Exception as raised:
        # An environment that went another way may raise anything
        error = f" ({type(raised).__name__}: {raised})"
    if error or not equal(obj.last_obs, values["obs"]):
        raise StateError(
            f"Playing the actions of {name} again did not reproduce the saved observation{error}: the environment draws "
            "random numbers that EpisodeReplay does not keep, has state that a reset does not clear, or is another version."
        )
    for generator, state in zip(obj.env_generators(), values["generators"], strict=True):
        set_state(generator, state, f"{name}.generators")
    for layer, attributes in zip(layers(obj.env), values["layers"], strict=True):
        # What the replay has restored may be part of something else
        set_attributes(layer, {key: value for key, value in attributes.items() if not equal(value, vars(layer).get(key))})


try:
    from ale_py.env import AtariEnv
except ImportError:  # its wheel is not on every platform
    pass
else:
    from ale_py import ALEState

    @get_values.register
    def _(obj: AtariEnv, name: str, seen: set[int]) -> dict[str, Any]:
        # Includes the emulator's random generator, from which sticky actions are drawn
        emulator = obj.clone_state(include_rng=True).__getstate__()
        return {
            "emulator": emulator,
            "generator": _state_of(obj._np_random, f"{name}.np_random", seen),
            "action_space": get_values(obj.action_space, name, seen),
            "observation_space": get_values(obj.observation_space, name, seen),
        }

    @set_values.register
    def _(obj: AtariEnv, values: dict[str, Any], name: str) -> None:
        state = ALEState.__new__(ALEState)
        state.__setstate__(values["emulator"])
        obj.restore_state(state)
        if values["generator"] is not None:
            set_state(obj.np_random, values["generator"], f"{name}.np_random")
        set_values(obj.action_space, values["action_space"], name)
        set_values(obj.observation_space, values["observation_space"], name)
