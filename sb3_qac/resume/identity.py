"""The identity of a run: the settings that a resumed run must share with its checkpoint."""

import inspect
from typing import Any

from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.resume.checkpoints import Checkpoint, CheckpointError
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


def training_settings(model: BaseAlgorithm) -> dict[str, Any]:
    """
    :param model: Model
    :return: the settings that must be equal for one training to resume another
    """
    assert model.env is not None
    spec = spec_of(model.env)
    # An algorithm lists attributes that change during training in `training_state`
    moving = getattr(model, "training_state", ())
    arguments = sorted(constructor_arguments(model) - ARGUMENTS_NOT_COMPARED - set(moving))
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


def check_same_training(model: BaseAlgorithm, checkpoint: Checkpoint) -> None:
    """
    :param model: Model that resumes the run
    :param checkpoint: Checkpoint to resume from
    :raises CheckpointError: if it belongs to a different run
    """
    here, state = training_settings(model), checkpoint.state
    # An argument that a callback has changed, in a model that `resume` has restored
    changed = {name: value for name, value in state["algorithm"].items() if name in here and equal(value, here[name])}
    different = different_settings(here, {**state["training"], **changed})
    if different:
        raise CheckpointError(f"{checkpoint.path} is of a different run: {'; '.join(different.values())}. Use another folder.")
