"""
Checks of arguments: each raises a ``ValueError`` that names the argument (``name``), the value given, what is allowed, and
what to do.
"""

import math
import numbers
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

# With so many a step of QPPO takes 17 times as long as with 16, with four times as many 70 times (small networks, one core)
MAX_ACTIONS = 4096


def check_actions_from_zero(action_space: spaces.Space) -> None:
    """The actions must count from 0. SB3 would send actions from 0 anyway."""
    start = np.asarray(getattr(action_space, "start", 0))
    if start.any():
        raise ValueError(
            f"The action space {action_space} starts at {start.tolist()}, but actions are counted from 0 here. "
            "Wrap the environment with `gymnasium.wrappers.TransformAction`, "
            f"an action space that starts at 0 and `lambda action: action + {start.tolist()}`."
        )


def check_action_space(action_space: spaces.Space) -> None:
    """The action space must be finite, one-dimensional and not too large, and count from 0."""
    # Not at the top: it imports PyTorch, and `--help` needs other checks
    from sb3_qac.common.actions import n_actions_of

    is_grid = len(action_space.shape or ()) > 1
    if is_grid or not isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ValueError(
            "The critic has one value per action, so the action space must be `Discrete`, or one-dimensional `MultiDiscrete` "
            f"or `MultiBinary`, but {action_space} was given. Use PPO of stable_baselines3, or wrap the environment."
        )
    check_actions_from_zero(action_space)
    if (n_actions := n_actions_of(action_space)) > MAX_ACTIONS:
        raise ValueError(
            f"The critic has one value per joint action, at most {MAX_ACTIONS:,}, but {action_space} has {n_actions:,}. Use "
            "PPO of stable_baselines3, or wrap the environment to leave out or merge actions."
        )


def check_observation_space(observation_space: spaces.Space, dict_policy: bool) -> None:
    """A policy must support the observation space, and this one must if it is for dict observations (``dict_policy``)."""
    parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
    for part in parts:
        is_known = isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
        is_number = isinstance(part, spaces.Box) and part.shape == ()
        # SB3 makes one-hot vectors of discrete ones, and would fail at the first observation that is too large
        is_grid = isinstance(part, spaces.MultiDiscrete) and part.nvec.ndim > 1
        if not is_known or is_number or is_grid or np.any(getattr(part, "start", 0)):
            raise ValueError(
                f"The observation space {part} is not supported: it must be Box with at least one dimension, Discrete or "
                "MultiDiscrete (counted from 0, with at most one dimension), MultiBinary or a Dict of those. Wrap the "
                "environment, for instance with `gymnasium.wrappers.FlattenObservation`."
            )
    if dict_policy and not isinstance(observation_space, spaces.Dict):
        raise ValueError(
            f"'MultiInputPolicy' takes dict observations, but {observation_space} was given. "
            "Use 'CnnPolicy' for images and 'MlpPolicy' for the rest."
        )


def check_number(name: str, value: Any, minimum: float = 0.0, maximum: float = math.inf, above: bool = False) -> None:
    """The value must be a finite number between the two limits, and not the minimum if it must be ``above``."""
    try:
        allowed = math.isfinite(value) and minimum <= value <= maximum and not (above and value == minimum)
    except (TypeError, OverflowError):
        allowed = False
    if not allowed:
        if (minimum, maximum) == (-math.inf, math.inf):
            limits = ""
        elif above:
            limits = f", above {minimum:g}" + (f" and at most {maximum:g}" if maximum < math.inf else "")
        else:
            limits = f", at least {minimum:g}" if maximum == math.inf else f", between {minimum:g} and {maximum:g}"
        raise ValueError(f"`{name}` must be a finite number{limits}, but {value!r} was given.")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """The value must be an integer (Python's or NumPy's) between the two limits."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"`{name}` must be an integer, {limits}, but {value!r} was given.")


def check_seed(name: str, value: Any) -> None:
    """The value must be a seed that NumPy takes."""
    check_integer(name, value, minimum=0, maximum=2**32 - 1)


def check_max_grad_norm(value: Any) -> float:
    """:return: the limit of the gradient's norm; infinity if None was given, which means no clipping"""
    if value is None or value == math.inf:
        return math.inf
    check_number("max_grad_norm", value, above=True)
    return value


def check_device(device: str) -> None:
    """There must be such a device, unless it is "auto". SB3 would use the CPU instead of a GPU that is not there."""
    # Not at the top: commands check numbers before they import PyTorch, which takes seconds
    import torch as th

    if device == "auto":
        return
    try:
        found = th.device(device)
        # A device that is no GPU of CUDA, such as "mps", is tried. "meta" has no numbers
        works = found.type in ("cpu", "cuda") or th.zeros(1, device=found).item() == 0
    except (RuntimeError, AssertionError):
        works = False
    if not works:
        raise ValueError(f"`device` must be 'auto', 'cpu' or 'cuda', perhaps 'cuda:0', but {device!r} was given.")
    n_gpus = th.cuda.device_count() if th.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= n_gpus:
        finds = f"no GPU after 'cuda:{n_gpus - 1}'" if n_gpus else "no GPU"
        raise ValueError(f"`device` is {device!r}, but PyTorch finds {finds}. Use 'cpu', or 'auto' for a GPU if there is one.")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """The value must be one of the choices."""
    if value not in choices:
        allowed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ValueError(f"`{name}` must be {allowed}, but {value!r} was given.")


def check_policy_class(policy_class: Any, base_class: type, aliases: Iterable[str]) -> None:
    """The policy's class must be the base class or inherit from it; the message has the aliases of those that can be used."""
    if not isinstance(policy_class, type) or not issubclass(policy_class, base_class):
        raise ValueError(
            f"`policy` must be {', '.join(map(repr, aliases))} or a subclass of {base_class.__name__}, "
            f"but {policy_class!r} was given. An agent that is loaded must have such a policy too."
        )


def warn_of_truncated_minibatch(batch_size: int, n_steps: int, n_envs: int) -> None:
    """The same warning as in PPO, for a constructor: it reveals mistakes in the three."""
    if truncated := n_steps * n_envs % batch_size:
        warnings.warn(
            f"`batch_size` is {batch_size}, but the rollout has `n_steps * n_envs` = {n_steps} * {n_envs} "
            f"steps: the last minibatch of each epoch is truncated to {truncated}. "
            "We recommend a `batch_size` that is a factor of `n_steps * n_envs`.",
            stacklevel=3,
        )


def check_finite(terms: dict[str, float]) -> None:
    """The losses and statistics of an update must be finite. RL Zoo prunes an optimization trial where this fails."""
    diverged = {name: value for name, value in terms.items() if not math.isfinite(value)}
    if diverged:
        raise ValueError(
            f"Training diverged ({', '.join(f'{name} is {value}' for name, value in diverged.items())}): "
            "this update was not made, the parameters are those of the last good one. "
            "Lower `learning_rate`, or normalize observations and rewards (`VecNormalize`); to see whether "
            "the environment sends NaN or infinity, wrap it with `VecCheckNan(env, raise_exception=True)`."
        )
