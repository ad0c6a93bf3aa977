"""The state of a model: taken from one model, and set in another that was made in the same way."""

import copy
import os
import time
import warnings
from collections import deque
from collections.abc import Container
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import recursive_getattr

from sb3_qac.common.files import read_json
from sb3_qac.common.random_state import set_random_state
from sb3_qac.resume.checkpoints import CheckpointError, load_checkpoint, newest_checkpoint, restoring
from sb3_qac.resume.environments import begin_new_episodes, restore_environments, take_environments
from sb3_qac.resume.identity import (
    SCHEDULES,
    check_same_training,
    constructor_arguments,
    training_settings,
)
from sb3_qac.resume.state import (
    StateError,
    check_objects,
    get_attributes,
    is_plain,
    items_by_key,
    restore_attributes,
)

SelfOnPolicyAlgorithm = TypeVar("SelfOnPolicyAlgorithm", bound=OnPolicyAlgorithm)
# State of a model's training, without its policy
MODEL_ATTRIBUTES = (
    "num_timesteps",
    "_n_updates",
    "_episode_num",
    "_current_progress_remaining",
    "_num_timesteps_at_start",
    "ep_info_buffer",
    "ep_success_buffer",
    "_last_obs",
    "_last_episode_starts",
    "_last_original_obs",
)
# Further ones of SB3's: parts that have their state elsewhere, and what each start sets or is compared in another way
MODEL_ATTRIBUTES_SKIPPED = frozenset(
    "env _vec_normalize_env observation_space action_space policy rollout_buffer policy_kwargs rollout_buffer_kwargs verbose "
    "tensorboard_log seed start_time learning_rate _total_timesteps _custom_logger _stats_window_size use_masking "
    "_is_masked".split()
)
COUNTERS = ("num_timesteps", "_n_updates", "_episode_num", "_num_timesteps_at_start")
# Of a rollout buffer: those of the model, and how far the rollout has come
BUFFER_ATTRIBUTES_SKIPPED = frozenset(
    "observation_space action_space device buffer_size n_envs obs_shape action_dim pos full generator_ready".split()
)


def check_supported(model: BaseAlgorithm) -> None:
    """
    :param model: Model to train
    :raises ValueError: if it cannot be resumed exactly
    """
    if not isinstance(model, OnPolicyAlgorithm):
        raise ValueError(
            f"{type(model).__name__} cannot be resumed exactly: only on-policy algorithms can, such as QA2C, A2C and PPO."
        )
    if model.use_sde or hasattr(model, "_last_lstm_states"):
        raise ValueError("A run with generalized state-dependent exploration or an LSTM cannot be resumed exactly.")


def network_of(model: OnPolicyAlgorithm) -> list[Any]:
    """
    :param model: Model
    :return: the model, the parts of its policy, and its optimizer
    """
    return [model, model.policy.optimizer, *model.policy.modules(), *model.policy.parameters()]


def parts_of(model: OnPolicyAlgorithm) -> list[Any]:
    """
    :param model: Model
    :return: the model and the objects that belong to it
    """
    return [*network_of(model), *(value for value in vars(model).values() if not is_plain(value))]


def without_settings(obj: Any, values: dict[str, Any], skipped: Container[str]) -> dict[str, Any]:
    """
    :param obj: A callback or a model
    :param values: State of its attributes by name, maybe from the checkpoint of somebody else
    :param skipped: Names of attributes that no checkpoint holds
    :return: the state without those, and without strings among the arguments of the constructor, because they may be paths
    """
    arguments = constructor_arguments(obj)
    return {
        name: value
        for name, value in values.items()
        # Those of NumPy and bytes may be paths too
        if name not in skipped
        and not (name in arguments and any(isinstance(each, str | bytes) for each in (value, vars(obj).get(name))))
    }


def names_kept_elsewhere(model: BaseAlgorithm) -> set[str]:
    """
    :param model: Model
    :return: names of its attributes that are not of the user's own, or that the checkpoint has in another place
    """
    modules, tensors = model._get_torch_save_params()
    saved = {name.partition(".")[0] for name in (*modules, *tensors)}
    schedules = {name for name, value in vars(model).items() if isinstance(value, SCHEDULES)}
    return {*MODEL_ATTRIBUTES, *MODEL_ATTRIBUTES_SKIPPED, *getattr(model, "training_state", ()), *saved, *schedules}


def own_state(model: OnPolicyAlgorithm, seen: set[int], left_out: dict[str, str]) -> dict[str, Any]:
    """
    :param model: Model
    :param seen: Identities of the objects inside its environment
    :param left_out: Attributes whose state cannot be taken are added to it, with the reason
    :return: the state of its further attributes, such as those of an algorithm of the user's
    """
    seen = {*seen, *map(id, network_of(model))}
    values = get_attributes(model, type(model).__name__, seen, names_kept_elsewhere(model), left_out)
    return without_settings(model, values, ())


def buffer_state(model: OnPolicyAlgorithm, seen: set[int]) -> dict[str, Any]:
    """
    :param model: Model, between two updates
    :param seen: Identities of objects that its rollout buffer may refer to but does not own
    :return: what a rollout buffer of another class keeps from one rollout to the next, such as a scale of the rewards; none of
        the rollout itself, which the next one overwrites
    """
    # REINFORCE has none
    buffer = getattr(model, "rollout_buffer", None)
    if buffer is None:
        return {}
    n_items = (buffer.buffer_size, buffer.buffer_size * buffer.n_envs)

    def is_of_rollout(value: Any) -> bool:
        items = items_by_key(value)
        if items:
            return all(map(is_of_rollout, items.values()))
        return isinstance(value, np.ndarray | th.Tensor) and value.ndim > 0 and len(value) in n_items

    skipped = {name for name, value in vars(buffer).items() if is_of_rollout(value)}
    return get_attributes(buffer, "the rollout buffer", seen, BUFFER_ATTRIBUTES_SKIPPED | skipped)


def further_modules(model: OnPolicyAlgorithm) -> tuple[dict[str, Any], dict[str, th.Tensor]]:
    """
    :param model: Model
    :return: what an algorithm names for ``save`` besides the policy: modules and optimizers, and tensors, by name
    """
    modules, tensors = model._get_torch_save_params()
    further = [name for name in modules if name not in ("policy", "policy.optimizer")]
    return {name: recursive_getattr(model, name) for name in further}, {
        name: recursive_getattr(model, name) for name in tensors
    }


def model_state(
    model: OnPolicyAlgorithm,
    seen: set[int],
    left_out: dict[str, str],
    new_episodes: bool,
) -> dict[str, Any]:
    """
    :param model: Model, between two updates
    :param seen: Set to which the identities of the environment and of all objects inside it are added
    :param left_out: Dictionary to which attributes of the model are added whose state cannot be taken, with the reason
    :param new_episodes: Whether a resume begins new episodes
    :return: the identity of the run, and everything that the next update depends on, as plain data
    """
    assert model.env is not None
    seen_in_env: set[int] = set()
    env = take_environments(model.env, "the environment", seen_in_env, new_episodes)
    seen |= seen_in_env
    modules, tensors = further_modules(model)
    return {
        "training": training_settings(model),
        "model": {name: getattr(model, name) for name in (*MODEL_ATTRIBUTES, *getattr(model, "training_state", ()))},
        "elapsed": time.time_ns() - model.start_time,
        # Copies: parts of the policy share parameters, which it does itself
        "policy": {
            name: value.clone() if isinstance(value, th.Tensor) else copy.deepcopy(value)
            for name, value in model.policy.state_dict().items()
        },
        # A callback may freeze layers and free them
        "frozen": [name for name, parameter in model.policy.named_parameters() if not parameter.requires_grad],
        "optimizer": model.policy.optimizer.state_dict(),
        "modules": {name: copy.deepcopy(module.state_dict()) for name, module in modules.items()},
        "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "rollout_buffer": buffer_state(model, {*seen_in_env, *map(id, parts_of(model))}),
        "algorithm": own_state(model, seen_in_env, left_out),
        "env": env,
    }


def restore_model(model: BaseAlgorithm, state: dict[str, Any], new_episodes: bool = False) -> None:
    """
    :param model: Model made in the same way as the trained one; its environments were reset once
    :param state: Result of ``model_state``
    :param new_episodes: Whether the environments begin new episodes
    :raises StateError: if the state of the environments cannot be restored
    """
    assert isinstance(model, OnPolicyAlgorithm) and model.env is not None
    seen: set[int] = set()
    take_environments(model.env, "the environment", seen, new_episodes)
    here = buffer_state(model, {*seen, *map(id, parts_of(model))}), own_state(model, seen, {})
    algorithm = without_settings(model, state["algorithm"], names_kept_elsewhere(model))
    # First, because what differs is refused, and then the model stays as it is
    counters = {name: int(state["model"][name]) for name in COUNTERS}
    if min(counters.values()) < 0:
        raise CheckpointError(f"The counters of a model are at least 0, but those of the checkpoint are {counters}.")
    _check_same_optimizer(model, state["optimizer"])
    check_objects(here[0], state["rollout_buffer"], "the rollout buffer")
    check_objects(here[1], algorithm, type(model).__name__)
    if new_episodes:
        steps = state["model"]["num_timesteps"]
        first_obs = begin_new_episodes(model.env, state["env"], None if model.seed is None else (model.seed, steps, 0))
    else:
        restore_environments(model.env, state["env"], "the environment")
    model.policy.load_state_dict(state["policy"])
    for name, parameter in model.policy.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
    model.policy.optimizer.load_state_dict(state["optimizer"])
    modules, tensors = further_modules(model)
    for name, values in state["modules"].items():
        modules[name].load_state_dict(values)
    for name, tensor in state["tensors"].items():
        tensors[name].data.copy_(tensor)
    if state["rollout_buffer"]:
        kept = {name: value for name, value in state["rollout_buffer"].items() if name not in BUFFER_ATTRIBUTES_SKIPPED}
        restore_attributes(model.rollout_buffer, kept, "the rollout buffer")
    restore_attributes(model, algorithm, type(model).__name__)
    # Only these: the checkpoint may be from somebody else. `ent_coef` is in it only if a callback had set it
    names = (*MODEL_ATTRIBUTES, *getattr(model, "training_state", ()), *({"ent_coef"} & state["model"].keys()))
    vars(model).update({**{name: state["model"][name] for name in names}, **counters})
    if new_episodes:
        model._last_obs = first_obs  # type: ignore[assignment]
        model._last_episode_starts = np.ones(model.n_envs, dtype=bool)
        normalize = model.get_vec_normalize_env()
        model._last_original_obs = None if normalize is None else normalize.get_original_obs()
    for name in ("ep_info_buffer", "ep_success_buffer"):
        # The saved ones have the length of the earlier `stats_window_size`. If it is the same, a callback may refer to them
        if (saved := getattr(model, name)).maxlen != model._stats_window_size:
            setattr(model, name, deque(saved, maxlen=model._stats_window_size))
    model.start_time = time.time_ns() - state["elapsed"]


def _check_same_optimizer(model: BaseAlgorithm, state: dict[str, Any]) -> None:
    now, then = (
        [sorted(group.keys() - {"params"}) for group in groups]
        for groups in (model.policy.optimizer.param_groups, state["param_groups"])
    )
    if now != then:
        raise StateError(
            f"The optimizer's settings are {now}, and were {then}: it is of another class, or has other groups of parameters. "
            "If the run replaces its optimizer, replace it before `learn`."
        )


def resume(model: SelfOnPolicyAlgorithm, path: str | os.PathLike, new_episodes: bool = False) -> SelfOnPolicyAlgorithm:
    """
    Restore a run's state in a model, ready to resume it.

    With an ``ExactCheckpointCallback`` in the same folder, call ``learn`` with the original arguments to play the rest.
    Without it, ``model.learn(remaining_steps, reset_num_timesteps=False)`` gives the same numbers, but in new log files.

    :param model: A model made in the same way as the one that was trained, and its environments too
    :param path: A checkpoint, or a folder, whose newest good checkpoint is used. A warning is given if the run ended
        after it: inside a rollout, or if newer checkpoints are damaged.
    :param new_episodes: Whether the environments begin new episodes, as with ``ExactCheckpointCallback``
    :return: The model: parameters, optimizer, counters, environments and random generators are those of the checkpoint
    :raises CheckpointError: if there is no checkpoint, it is damaged, or it belongs to a different run
    """
    check_supported(model)
    path = Path(path)
    checkpoint = load_checkpoint(path) if not path.is_dir() else newest_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"There is no checkpoint in {path}.")
    if model._last_obs is None:
        assert model.env is not None
        model.env.reset()
    with restoring(checkpoint):
        check_same_training(model, checkpoint)
        restore_model(model, checkpoint.state, new_episodes)
        set_random_state(checkpoint.state["random"])
    run = read_json(path / "run.json") if path.is_dir() else {}
    if run.get("finished") and run.get("num_timesteps", 0) > model.num_timesteps:
        warnings.warn(
            f"The run in {path} ended at step {run['num_timesteps']}, after its newest good checkpoint, which is of step "
            f"{model.num_timesteps}: the model has that state. `learn` with ExactCheckpointCallback plays the rest.",
            stacklevel=2,
        )
    return model
