"""The actions of a finite space, numbered: the critic has a value for each of them, and the actor's sum goes over all."""

import math
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from torch import nn
from torch.nn import functional as F


def components_of(action_space: spaces.Space) -> tuple[int, ...]:
    """
    :param action_space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    :return: how many values each component of an action has: (n,) for ``Discrete(n)``, nvec for ``MultiDiscrete(nvec)``,
        (2, ..., 2) for ``MultiBinary(n)``
    """
    if isinstance(action_space, spaces.Discrete):
        return (int(action_space.n),)
    if isinstance(action_space, spaces.MultiDiscrete):
        return tuple(map(int, action_space.nvec))
    assert isinstance(action_space, spaces.MultiBinary)
    return (2,) * int(action_space.shape[0])


def n_actions_of(action_space: spaces.Space) -> int:
    """
    :param action_space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    :return: number of joint actions: the product over its components
    """
    return math.prod(components_of(action_space))


class JointActions(nn.Module):
    """
    The joint actions of a ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` space. They are numbered as
    ``numpy.ravel_multi_index`` does: the last component changes fastest. An action of ``Discrete`` is its own number.

    :param action_space: Action space

    ``n`` is their number, and ``components`` has the components of each, shape (n, n_components).
    """

    strides: th.Tensor
    components: th.Tensor
    columns: th.Tensor

    def __init__(self, action_space: spaces.Space) -> None:
        super().__init__()
        sizes = components_of(action_space)
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        self.n = math.prod(sizes)
        values = np.stack(np.unravel_index(np.arange(self.n), sizes), axis=1)  # (n, n_components)
        # Not in saved models, which have them from the space
        for name, array in {
            "strides": np.cumprod((1, *sizes[:0:-1]))[::-1].copy(),
            "components": values,
            # Of each component of each action, among the values of all components one after the other
            "columns": values + np.cumsum((0, *sizes[:-1])),
        }.items():
            self.register_buffer(name, th.as_tensor(array), persistent=False)

    def numbers(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: Actions as in SB3's rollout buffer, shape (..., n_components)
        :return: their numbers, shape (..., 1)
        """
        if self.is_discrete:
            return actions.long()
        return (actions.long() * self.strides).sum(dim=-1, keepdim=True)

    def actions(self, numbers: th.Tensor) -> th.Tensor:
        """
        :param numbers: Numbers of actions, shape (batch_size,)
        :return: the actions as the policy returns them, shape (batch_size,) for ``Discrete``, else (batch_size, n_components)
        """
        return numbers if self.is_discrete else self.components[numbers]

    def allowed(self, action_masks: th.Tensor | None) -> th.Tensor | None:
        """
        :param action_masks: Which values of each component are allowed, shape (batch_size, n_values); None for all
        :return: which joint actions are: those of allowed values, shape (batch_size, n_actions); None for all
        """
        return None if action_masks is None else action_masks[:, self.columns].all(dim=2)

    def log_probs(self, distribution: Any) -> th.Tensor:
        """
        :param distribution: SB3's distribution of the actions, ``log pi(a|s) = sum_i log pi_i(a_i|s)``
        :return: ``log pi(a|s)`` of every joint action, shape (batch_size, n_actions)
        """
        found = distribution.distribution
        if self.is_discrete:
            # ``Categorical`` normalizes its logits: they are the log probabilities
            return found.logits
        if isinstance(found, list):
            of_values = th.cat([component.logits for component in found], dim=1)
        else:
            # Of 0 and of 1 for each bit
            of_values = F.logsigmoid(th.stack((-found.logits, found.logits), dim=2)).flatten(1)
        return of_values[:, self.columns].sum(dim=2)
