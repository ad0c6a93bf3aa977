"""The global random generators of Python, NumPy and PyTorch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th


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


def get_random_state() -> dict[str, Any]:
    """:return: states of the global generators of Python, NumPy, and PyTorch on every device"""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": th.get_rng_state(),
        "cuda": th.cuda.get_rng_state_all() if th.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """
    :param state: Result of ``get_random_state``
    """
    random.setstate(state["python"])
    np.random.set_state(checked(state["numpy"]))
    th.set_rng_state(state["torch"])
    # A training may be resumed on a machine with fewer GPUs, or none
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


@contextmanager
def random_state(state: dict[str, Any]) -> Iterator[None]:
    """
    Within it, the global generators have the state ``state``, which advances as numbers are drawn.

    :param state: Result of ``get_random_state`` or ``seeded_random_state``; updated at the end
    """
    outside = get_random_state()
    set_random_state(state)
    try:
        yield
    finally:
        state.update(get_random_state())
        set_random_state(outside)
