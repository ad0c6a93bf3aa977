"""The state of environments: what Python attributes do not show, and what is kept where the episodes begin anew."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd as GymRunningMeanStd
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_qac.common.random_state import random_state, seeded_random_state
from sb3_qac.common.vec_env import AleVecEnv
from sb3_qac.common.wrappers import EpisodeReplay, wrappers_of
from sb3_qac.resume.state import (
    ObjectState,
    StateError,
    equal,
    get_plain_attributes,
    get_state,
    get_values,
    items_by_key,
    kind_of,
    set_attributes,
    set_state,
    set_values,
)

NEW_EPISODES = (
    "To resume without the state of the environments, with new episodes, give ExactCheckpointCallback `new_episodes=True`, or "
    "`--new-episodes` to `study`."
)


def take_environments(env: VecEnv, name: str, seen: set[int], new_episodes: bool = False) -> Any:
    """
    :param env: Environments
    :param name: What to call them in errors
    :param seen: Set to which the identities of the environments and of all objects inside them are added
    :param new_episodes: Whether a resume begins new episodes
    :return: the state of the environments; with new episodes a list of that of each ``VecEnvWrapper``, from the outside in,
        such as the statistics of ``VecNormalize``
    :raises StateError: if it cannot be taken
    """
    if not new_episodes:
        # What others have too is not left out
        own: set[int] = set()
        with naming_new_episodes():
            state = get_state(env, name, own)
        seen |= own
        return state
    everything = list(environments_in(env))
    seen.update(map(id, everything))
    states = []
    for wrapper in everything:
        if isinstance(wrapper, VecEnvWrapper):
            try:
                states.append(get_state(wrapper, name, set(seen)))
            except StateError as error:
                warnings.warn(f"A resume will begin {type(wrapper).__name__} anew: {error}", stacklevel=2)
    return states


def restore_environments(env: VecEnv, state: Any, name: str) -> None:
    """
    :param env: Environments that were made in the same way, and reset once
    :param state: Result of ``take_environments``
    :param name: What to call them in errors
    :raises StateError: if the state is not there, or does not fit them
    """
    with naming_new_episodes():
        if isinstance(state, list):
            raise StateError(f"The checkpoint does not have the state of {name}, because it was written with new episodes")
        set_state(env, state, name)


def begin_new_episodes(env: VecEnv, state: Any, seeds: Sequence[int] | None) -> VecEnvObs:
    """
    Restore the state of each ``VecEnvWrapper``, and reset the environments with other seeds than at the start of the run: with
    the same ones they would repeat its episodes.

    :param env: Environments
    :param state: Result of ``take_environments``
    :param seeds: Numbers from which the seed is computed; None for a random one
    :return: the first observations
    """
    saved = list(state) if isinstance(state, list) else []
    while isinstance(state, ObjectState):
        saved.append(state)
        state = state.values.get("venv")
    for wrapper in environments_in(env):
        found = next((i for i, of_wrapper in enumerate(saved) if of_wrapper.kind == kind_of(wrapper)), None)
        if isinstance(wrapper, VecEnvWrapper) and found is not None:
            values = saved.pop(found).values
            set_values(wrapper, {key: value for key, value in values.items() if key != "venv"}, type(wrapper).__name__)
    # Half of it: with the number of the environment added, NumPy takes 32 bits
    seed = int(np.random.SeedSequence(seeds).generate_state(1)[0] // 2)
    env.seed(seed)
    with random_state(seeded_random_state(seed)):
        return env.reset()


def environments_in(env: VecEnv) -> Iterator[VecEnv | gym.Env]:
    """
    :param env: Environments
    :return: each ``VecEnvWrapper``, from the outside in, the environments in them, and the single ones with their wrappers, as
        far as they are in this process
    """
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv
    yield env
    for single in items_by_key(getattr(env, "envs", None)).values():
        if isinstance(single, gym.Env):
            yield from (*wrappers_of(single), single.unwrapped)


@contextlib.contextmanager
def naming_new_episodes() -> Iterator[None]:
    """
    Context manager: while active, the state of environments is taken or set.

    :raises StateError: in the place of each error about that state, with the way to resume without it
    """
    try:
        yield
    except ValueError as error:
        raise StateError(f"{str(error).rstrip('.')}. {NEW_EPISODES}") from error


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


@get_values.register
def _(obj: EpisodeReplay, name: str, seen: set[int]) -> dict[str, Any]:
    for layer in wrappers_of(obj.env):
        for key, value in vars(layer).items():
            if isinstance(value, GymRunningMeanStd | RunningMeanStd):
                # Playing the episode again would add to them once more
                raise StateError(
                    f"{type(layer).__name__} is inside {name}, which cannot restore its `{key}` ({kind_of(value)}) by playing "
                    "the episode again. Put it outside EpisodeReplay, or use VecNormalize."
                )
    # The replay restores everything inside, so nothing else needs to save it
    seen.update(map(id, (*wrappers_of(obj.env), obj.unwrapped)))
    actions = obj.episode_actions
    return {
        "reset_arguments": obj.reset_arguments,
        "random_state": obj.random_state,
        "generator_states": obj.generator_states,
        # A wrapper outside may have drawn from them too
        "generators": [get_state(generator, f"{name}.generators", seen) for generator in obj.env_generators()],
        # One array is written and read faster than thousands
        "actions": np.stack(actions) if len({(action.shape, action.dtype) for action in actions}) == 1 else list(actions),
        "obs": obj.last_obs,
        # Counters that a reset does not clear, such as Monitor's
        "layers": [get_plain_attributes(layer) for layer in wrappers_of(obj.env)],
    }


@set_values.register
def _(obj: EpisodeReplay, values: dict[str, Any], name: str) -> None:
    if not values["random_state"]:
        return  # It was never reset
    for layer in wrappers_of(obj.env):
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
    for layer, attributes in zip(wrappers_of(obj.env), values["layers"], strict=True):
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
            "generator": get_state(obj._np_random, f"{name}.np_random", seen),
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
