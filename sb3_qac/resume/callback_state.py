"""The state of the callbacks of a run."""

import copy
from collections.abc import Iterator
from typing import Any

import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn

from sb3_qac.resume.identity import constructor_arguments
from sb3_qac.resume.model import without_settings
from sb3_qac.resume.state import StateError, equal, get_attributes, get_plain_attributes, get_values, items_by_key

# Attributes of callbacks that belong to this process, and one that SB3's StopTrainingOnMaxEpisodes computes from a setting
CALLBACK_ATTRIBUTES_SKIPPED = frozenset({"model", "parent", "locals", "globals", "verbose", "_total_max_episodes"})


@get_values.register
def _(obj: BaseCallback, name: str, seen: set[int]) -> dict[str, Any]:
    return get_attributes(obj, name, seen, CALLBACK_ATTRIBUTES_SKIPPED)


def callback_state(
    callback: BaseCallback,
    settings: dict[str, Any],
    seen: set[int],
    policy: nn.Module,
    left_out: dict[str, str] | None = None,
) -> dict[str, Any]:
    """
    :param callback: A callback
    :param settings: Result of ``callback_settings``
    :param seen: Identities of objects that it may refer to but does not own
    :param policy: Policy, to whose tensors it may refer too
    :param left_out: If given, attributes whose state cannot be taken are left out, and added to it with the reason
    :return: the state of its attributes by name, without settings that have not changed
    :raises StateError: if the state of an attribute cannot be taken; the message names the attribute
    """
    name, skipped = type(callback).__name__, set(CALLBACK_ATTRIBUTES_SKIPPED)
    for key, value in vars(callback).items():
        try:
            if refers_to(policy, value, f"{name}.{key}"):
                skipped.add(key)
        except StateError as error:
            if left_out is None:
                raise
            left_out[f"{name}.{key}"] = str(error)
            skipped.add(key)
    values = get_attributes(callback, name, seen, skipped, left_out)
    changed = {key: value for key, value in values.items() if not (key in settings and equal(value, settings[key]))}
    kept = without_settings(callback, changed, CALLBACK_ATTRIBUTES_SKIPPED)
    if left_out is not None:
        reason = "it is a string among the arguments of the constructor, and these are taken from each start"
        left_out.update({f"{name}.{key}": reason for key in changed.keys() - kept.keys()})
    return kept


def refers_to(policy: nn.Module, value: Any, name: str) -> bool:
    """
    :param policy: Policy
    :param value: Value of a callback's attribute
    :param name: What to call it in errors
    :return: Whether its tensors are those of the policy, as in the result of ``policy.state_dict()``
    :raises StateError: if only some are
    """
    try:
        tensors = list(_tensors_in(value))
    except RecursionError:
        # `get_attributes` names it
        tensors = []
    if not tensors:
        return False
    own = {tensor.untyped_storage().data_ptr() for tensor in (*policy.parameters(), *policy.buffers()) if tensor.numel() > 0}
    shared = {tensor.untyped_storage().data_ptr() in own for tensor in tensors}
    if len(shared) > 1:
        raise StateError(f"{name} has tensors of the policy and others: keep them in two attributes, or clone the policy's.")
    return shared.pop()


def _tensors_in(value: Any) -> Iterator[th.Tensor]:
    if isinstance(value, th.Tensor):
        yield value
    for item in items_by_key(value).values():
        yield from _tensors_in(item)


def callback_settings(callback: BaseCallback) -> dict[str, Any]:
    """
    :param callback: A callback that has not been called yet
    :return: its attributes named like a parameter of its constructor, and its strings, such as paths
    """
    parameters = constructor_arguments(callback)
    attributes = get_plain_attributes(callback).items()
    return copy.deepcopy({name: value for name, value in attributes if name in parameters or isinstance(value, str)})
