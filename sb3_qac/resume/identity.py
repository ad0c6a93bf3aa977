"""The identity of a run: the settings that a resumed run must share with its checkpoint."""

import contextlib
import inspect
from collections.abc import Sized
from typing import Any

import torch as th
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.resume.checkpoints import Checkpoint, CheckpointError, checkpoints_in, load_checkpoint
from sb3_qac.resume.state import equal, is_plain

# Arguments of algorithms that do not change the numbers, or that are compared in another way
ARGUMENTS_NOT_COMPARED = frozenset({"policy", "policy_kwargs", "env", "learning_rate", "tensorboard_log", "verbose", "device"})
# Classes that differ from another one only in where they compute
SAME_AS = {"DeviceRolloutBuffer": "RolloutBuffer"}
SCHEDULES = (FloatSchedule, ConstantSchedule, LinearSchedule)
# Arguments of an environment that change only how it is shown
SHOWN = frozenset({"render_mode"})
# Settings of VecNormalize
NORMALIZATION = ("norm_obs", "norm_reward", "norm_obs_keys", "clip_obs", "clip_reward", "gamma", "epsilon")


def training_state(model: BaseAlgorithm) -> tuple[str, ...]:
    """
    :param model: Model
    :return: names of further attributes that change during training; an algorithm lists them in ``training_state``
    """
    return getattr(model, "training_state", ())


def training_settings(model: BaseAlgorithm) -> dict[str, Any]:
    """
    :param model: Model
    :return: the settings that must be equal for one training to resume another
    """
    assert model.env is not None
    spec = spec_of(model.env)
    moving = set(training_state(model))
    arguments = sorted(constructor_arguments(model) - ARGUMENTS_NOT_COMPARED - moving)
    policy = model.policy._get_constructor_parameters()
    normalize = model.get_vec_normalize_env()
    return {
        "algorithm": type(model).__name__,
        "environment": None if spec is None else spec.id,
        "env_kwargs": {} if spec is None else settings({name: spec.kwargs[name] for name in spec.kwargs.keys() - SHOWN}),
        # gymnasium does not keep it among the arguments
        "max_episode_steps": None if spec is None else spec.max_episode_steps,
        "VecNormalize": None if normalize is None else {name: getattr(normalize, name) for name in NORMALIZATION},
        "n_envs": model.n_envs,
        "policy": type(model.policy).__name__,
        **settings({"learning_rate": model.lr_schedule}),
        **settings({name: getattr(model, name) for name in arguments if hasattr(model, name)}),
        # Arguments of the policy, such as layers and optimizer, and those that the policy does not report
        **settings(policy),
        "policy_kwargs": settings({name: value for name, value in model.policy_kwargs.items() if name not in policy}),
        "optimizer": type(model.policy.optimizer).__name__,
    }


def spec_of(env: VecEnv) -> EnvSpec | None:
    """
    :param env: Environments
    :return: the specification of the first one; None if there is none, which SB3 does not ask for
    """
    try:
        spec = env.get_attr("spec")[0]
    except (AttributeError, LookupError, NotImplementedError, TypeError):
        return None
    return spec if isinstance(spec, EnvSpec) else None


def settings(values: dict[str, Any]) -> dict[str, Any]:
    """
    :param values: Arguments by name
    :return: the arguments that can be compared, as plain data: classes by their names, schedules by two of their values
    """
    described: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, type):
            described[name] = SAME_AS.get(value.__name__, value.__name__)
        elif isinstance(value, SCHEDULES):
            described[name] = [float(value(progress)) for progress in (1.0, 0.5)]
        elif is_plain(value):
            described[name] = value
    return described


def falling_schedules(model: BaseAlgorithm) -> list[str]:
    """
    :param model: Model
    :return: names of its schedules that depend on how much of the run is left
    """
    values = {**vars(model), "learning_rate": model.lr_schedule}
    del values["lr_schedule"]
    return sorted(name for name, value in values.items() if isinstance(value, SCHEDULES) and value(1.0) != value(0.5))


def constructor_arguments(obj: Any) -> set[str]:
    """
    :param obj: Any object
    :return: names of all parameters that the constructors of its class and of the base classes have
    """
    return {name for kind in type(obj).__mro__ for name in inspect.signature(kind.__init__).parameters}  # type: ignore[misc]


def different_settings(here: dict[str, Any], there: dict[str, Any]) -> dict[str, str]:
    """
    :param here: Result of ``training_settings``
    :param there: Result of ``training_settings`` at another time
    :return: by name, what has changed in the settings that both have
    """
    return {
        name: f"{name} is {value!r}, and was {there[name]!r}"
        for name, value in here.items()
        if name in there and not equal(value, there[name])
    }


def differences(model: BaseAlgorithm, state: dict[str, Any]) -> list[str]:
    """
    :param model: Model that resumes the run
    :param state: Result of ``model_state``
    :return: the differences in settings that both have
    """
    here, there = training_settings(model), state["training"]
    # An argument that a callback has changed, in a model that `resume` has restored
    changed = {name: value for name, value in state["algorithm"].items() if name in here and equal(value, here[name])}
    different = list(different_settings(here, {**there, **changed}).values())
    if not different:
        now, then = (
            # Without a module's own extra state, which may be anything
            {name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, th.Tensor)}
            for tensors in (model.policy.state_dict(), state["policy"])
        )
        others = [name for name in {**then, **now} if now.get(name) != then.get(name)]
        different = [f"the shape of {name} is {now.get(name)}, and was {then.get(name)}" for name in others]
    return different


def check_same_training(model: BaseAlgorithm, checkpoint: Checkpoint) -> None:
    """
    :param model: Model that resumes the run
    :param checkpoint: Checkpoint to resume from
    :raises CheckpointError: if it belongs to a different run; the message names the newest checkpoint of this one
    """
    different = differences(model, checkpoint.state)
    if not different:
        return
    advice = "There is none of this run in its folder: use another folder."
    for path in reversed(checkpoints_in(checkpoint.path.parent)):
        with contextlib.suppress(CheckpointError):
            if not differences(model, load_checkpoint(path).state):
                advice = f"The newest one of this run there is {path.name}."
                break
    raise CheckpointError(f"{checkpoint.path} is of a different run: {'; '.join(different)}. {advice}")


def check_same_number(what: str, here: Sized, there: Sized, advice: str) -> None:
    """
    :param what: What is counted, such as "log files are open"
    :param here: Items in this process
    :param there: Items in the checkpoint
    :param advice: What to do
    :raises CheckpointError: if the numbers differ
    """
    if len(here) != len(there):
        raise CheckpointError(f"{len(here)} {what}, but {len(there)} were when the checkpoint was written: {advice}.")
