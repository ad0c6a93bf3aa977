"""The actions of a finite space, numbered: the critic has a value for each of them, and the actor's sum goes over all."""

import math

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution
from torch import nn


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
    one_hot: th.Tensor

    def __init__(self, action_space: spaces.Space) -> None:
        super().__init__()
        sizes = components_of(action_space)
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        self.n = math.prod(sizes)
        values = np.stack(np.unravel_index(np.arange(self.n), sizes), axis=1)  # (n, n_components)
        columns = values + np.cumsum((0, *sizes[:-1]))
        # Whether an action has a value, shape (n_values, n); of a bit only 1 has a logit, that of 0 is 0. Not for ``Discrete``
        if self.is_discrete:
            one_hot = np.empty((0, self.n))
        elif isinstance(action_space, spaces.MultiBinary):
            one_hot = values.T
        else:
            one_hot = np.eye(sum(sizes))[:, columns].sum(axis=2)
        # Not in saved models, which have them from the space
        for name, array in {
            "strides": np.cumprod((1, *sizes[:0:-1]))[::-1].copy(),
            "components": values,
            # Of each component of each action, among the values of all components one after the other
            "columns": columns,
            "one_hot": one_hot.astype(np.float32),
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


class JointDistribution(CategoricalDistribution):
    """
    Distribution of the actions of a ``MultiDiscrete`` or ``MultiBinary`` space, whose components are independent as in SB3's:
    ``pi(a|s) = prod_i pi_i(a_i|s)``. It has the parameters of SB3's distribution, but is one distribution over all joint
    actions: its ``distribution.logits`` are their log probabilities, shape (batch_size, n_actions).

    :param joint_actions: The joint actions
    """

    def __init__(self, joint_actions: JointActions) -> None:
        super().__init__(joint_actions.n)
        self.joint_actions = joint_actions

    def proba_distribution(self, action_logits: th.Tensor) -> "JointDistribution":
        return self.of_joint_logits(self.joint_logits(action_logits))

    def joint_logits(self, action_logits: th.Tensor) -> th.Tensor:
        """
        :param action_logits: Parameters of SB3's distribution, shape (batch_size, n_values), or (batch_size, n_bits)
        :return: logits of the joint actions: the sum over their components, shape (batch_size, n_actions)
        """
        return action_logits @ self.joint_actions.one_hot.to(action_logits.dtype)

    def of_joint_logits(self, joint_logits: th.Tensor) -> "JointDistribution":
        """
        :param joint_logits: Shape (batch_size, n_actions)
        :return: the distribution with these logits
        """
        super().proba_distribution(joint_logits)
        return self

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        return super().log_prob(self.joint_actions.numbers(actions).squeeze(-1))

    def sample(self) -> th.Tensor:
        return self.joint_actions.actions(super().sample())

    def mode(self) -> th.Tensor:
        return self.joint_actions.actions(super().mode())
