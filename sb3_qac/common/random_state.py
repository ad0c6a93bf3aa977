"""The random generators of Python, NumPy and PyTorch: the global ones, and those that an object has."""

import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, th.Generator)


def checked(state: Any) -> Any:
    """
    :param state: State of a generator of NumPy, from a file that may be anybody's
    :return: the state
    :raises ValueError: if it would make NumPy, which does not look, read outside of the generator's numbers
    """
    parts = [state, state.get("state")] if isinstance(state, dict) else [{"pos": state[2]}]
    for name, size in (("pos", 624), ("buffer_pos", 4)):
        if any(isinstance(part, dict) and not 0 <= part.get(name, 0) <= size for part in parts):
            raise ValueError(f"the position of a random generator must be 0 to {size}")
    return state


def get_random_state(with_gpus: bool = True) -> dict[str, Any]:
    """
    :param with_gpus: Whether to include PyTorch's generators on GPUs, which takes memory there if nothing else uses them
    :return: states of the global generators of Python, NumPy and PyTorch
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": th.get_rng_state(),
        "cuda": th.cuda.get_rng_state_all() if with_gpus and th.cuda.is_available() else [],
    }


def same_random_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """
    :param one: Result of ``get_random_state``
    :param other: Another one
    :return: Whether the generators on the CPU have the same states
    """
    (_, keys, *others), (_, other_keys, *other_others) = one["numpy"], other["numpy"]
    same_numpy = np.array_equal(keys, other_keys) and others == other_others
    return same_numpy and one["python"] == other["python"] and th.equal(one["torch"], other["torch"])


def generator_state(generator: Any) -> dict[str, Any]:
    """
    :param generator: One of ``GENERATORS``
    :return: its state, as plain data
    """
    if isinstance(generator, np.random.Generator):
        seeds = generator.bit_generator.seed_seq
        # From which `spawn` makes further generators
        known = {"seeds": seeds.state} if isinstance(seeds, np.random.SeedSequence) else {}
        return {"state": generator.bit_generator.state} | known
    return {"state": generator.getstate() if isinstance(generator, random.Random) else generator.get_state()}


def is_generator(value: Any) -> bool:
    """
    :param value: Anything
    :return: Whether it is a random generator that has a state
    """
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def find_generators(env: gym.Env) -> list[tuple[Any, Any]]:
    """
    :param env: Environment
    :return: places of random generators in its attributes and those of its wrappers and spaces, at any depth: the dictionary
        or list that has it, and its key or index there, because a reset may replace it
    """
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    left: list[Any] = [env]
    while left:
        obj = left.pop()
        if id(obj) in seen or isinstance(obj, type | types.ModuleType):
            continue
        seen.add(id(obj))
        if isinstance(obj, gym.Env | spaces.Space):
            # gymnasium makes it when it is first used
            _ = obj.np_random
        if isinstance(obj, gym.Env):
            # They may be attributes of the class
            left += [getattr(obj, name, None) for name in ("observation_space", "action_space")]
        inside = obj if isinstance(obj, dict | list | tuple | deque) else getattr(obj, "__dict__", {})
        for key, value in inside.items() if isinstance(inside, dict) else enumerate(inside):
            if is_generator(value):
                found.append((inside, key))
            elif isinstance(value, types.MethodType | types.BuiltinMethodType):
                # Such as `rng.random`
                left.append((value.__self__,))
            elif isinstance(value, dict | list | tuple | deque) or hasattr(value, "__dict__"):
                left.append(value)
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """
    :param state: Result of ``get_random_state``
    """
    random.setstate(state["python"])
    np.random.set_state(checked(state["numpy"]))
    th.set_rng_state(state["torch"])
    # A run may be resumed on a machine with fewer GPUs, or none
    if len(state["cuda"]) <= th.cuda.device_count():
        th.cuda.set_rng_state_all(state["cuda"])


def seeded_random_state(seed: int | None) -> dict[str, Any]:
    """
    :param seed: Seed; at random if None
    :return: the states that the global generators would have with this seed; the generators themselves do not change
    """
    words = [int(word) for word in np.random.SeedSequence(seed).generate_state(3)]
    return {
        "python": random.Random(words[0]).getstate(),
        "numpy": np.random.RandomState(words[1]).get_state(),
        "torch": th.Generator().manual_seed(words[2]).get_state(),
        "cuda": [
            th.Generator(f"cuda:{i}").manual_seed(words[2]).get_state()
            for i in range(th.cuda.device_count() if th.cuda.is_available() else 0)
        ],
    }


def generators_at(places: Iterable[tuple[Any, Any]]) -> list[Any]:
    """
    :param places: Result of ``find_generators``
    :return: the generators that are there now
    """
    found = []
    for container, key in places:
        with suppress(LookupError):
            found.append(container[key])
    return list(filter(is_generator, found))


@contextmanager
def random_state(state: dict[str, Any]) -> Iterator[None]:
    """
    Context manager: while active, the global generators have the state ``state``, which advances as numbers are drawn.

    :param state: Result of ``get_random_state`` or ``seeded_random_state``; updated at the end
    """
    outside = get_random_state()
    set_random_state(state)
    try:
        yield
    finally:
        state.update(get_random_state())
        set_random_state(outside)
