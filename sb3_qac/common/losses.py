"""
The losses of actor-critics with an action-value critic, as functions of tensors.

Notation: ``pi(a|s)`` is the policy and ``Q(s, a)`` the critic. Together they imply a value of the state,
``V~(s) = sum_a pi(a|s) Q(s, a)``. Every loss is to be minimized and is a mean over the batch.
"""

import math

import torch as th
from torch.nn import functional as F


def state_values(action_probs: th.Tensor, q_values: th.Tensor) -> th.Tensor:
    """
    Value of each state under the policy, ``V~(s) = sum_a pi(a|s) Q(s, a)``.

    :param action_probs: ``pi(a|s)``, shape (batch_size, n_actions)
    :param q_values: ``Q(s, a)``, shape (batch_size, n_actions)
    :return: ``V~(s)``, shape (batch_size, 1), the shape that SB3 uses for state values
    """
    return (action_probs * q_values).sum(dim=1, keepdim=True)


def all_action_policy_loss(log_probs: th.Tensor, weights: th.Tensor) -> th.Tensor:
    """
    All-action policy gradient: the expectation over actions is taken exactly, ``-mean_s sum_a pi(a|s) w(s, a)``.

    The sampled actions are not used. The weights are detached here. Otherwise the actor loss would push the critic's values
    up, and with ``w = Q - V~`` its gradient would be exactly zero.

    Paper: Mean Actor-Critic, Allen et al. 2017, https://arxiv.org/abs/1709.00503

    :param log_probs: ``log pi(a|s)`` of every action, shape (batch_size, n_actions)
    :param weights: ``Q(s, a)`` or an advantage, shape (batch_size, n_actions)
    :return: scalar loss
    """
    return -(log_probs.exp() * weights.detach()).sum(dim=1).mean()


def sampled_policy_loss(log_prob: th.Tensor, weight: th.Tensor) -> th.Tensor:
    """
    Policy gradient estimated on the action that was taken, ``-mean_s log pi(a_t|s_t) w(s_t, a_t)``.

    :param log_prob: ``log pi(a_t|s_t)`` of the action taken, shape (batch_size, 1)
    :param weight: its weight, detached here, shape (batch_size, 1)
    :return: scalar loss
    """
    return -(log_prob * weight.detach()).mean()


def clipped_policy_loss(ratio: th.Tensor, weight: th.Tensor, clip_range: float) -> th.Tensor:
    """
    PPO's clipped loss on the action that was taken, ``-mean_s min(ratio w, clip(ratio, 1 - clip_range, 1 + clip_range) w)``.

    At ``ratio = 1`` it has the same gradient as ``sampled_policy_loss``.

    Paper: Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347

    :param ratio: ``pi(a_t|s_t) / pi_old(a_t|s_t)`` of the action taken, shape (batch_size, 1)
    :param weight: its weight, detached here, shape (batch_size, 1)
    :param clip_range: how far from 1 the ratio may move before it is clipped
    :return: scalar loss
    """
    weight = weight.detach()
    return -th.min(ratio * weight, ratio.clamp(1 - clip_range, 1 + clip_range) * weight).mean()


def kl_divergence(old_log_probs: th.Tensor, log_probs: th.Tensor) -> th.Tensor:
    """
    Kullback-Leibler divergence of the policy from the policy of the rollout, ``mean_s sum_a pi_old (log pi_old - log pi)``.

    It and its gradient are zero where the two are equal.

    :param old_log_probs: ``log pi_old(a|s)`` of every action, shape (batch_size, n_actions)
    :param log_probs: ``log pi(a|s)`` of every action, shape (batch_size, n_actions)
    :return: scalar loss, at least 0
    """
    return (old_log_probs.exp() * (_finite(old_log_probs) - _finite(log_probs))).sum(dim=1).mean()


def shrink_advantages(advantages: th.Tensor, old_log_probs: th.Tensor, shrinkage: float) -> th.Tensor:
    """
    Advantages, the smaller the less often the policy of the rollout takes the action, ``A pi_old / (pi_old + shrinkage)``.

    The critic learns ``Q(s, a)`` from the actions that are taken. For an action of small probability Q is a guess, and the sum
    over actions follows it: an action that is guessed to be bad is never taken again, so the guess is never corrected. The
    weight is that of a ridge regression: the advantage that is seen in a share ``pi_old`` of the visits, averaged with a share
    ``shrinkage`` in which it is 0.

    :param advantages: ``A(s, a)``, shape (batch_size, n_actions)
    :param old_log_probs: ``log pi_old(a|s)`` of every action, shape (batch_size, n_actions)
    :param shrinkage: Probability at which the advantage is halved, at least 0; 0 changes nothing
    :return: shape (batch_size, n_actions)
    """
    if shrinkage == 0:
        return advantages
    # The same quotient, also where pi_old is too small for its number format
    return advantages * th.sigmoid(old_log_probs - math.log(shrinkage))


def shrink_q_values(q_values: th.Tensor, values: th.Tensor, old_log_probs: th.Tensor, shrinkage: float) -> th.Tensor:
    """
    Q-values whose advantages are shrunk, ``V~ + (Q - V~) pi_old / (pi_old + shrinkage)``; see ``shrink_advantages``.

    :param q_values: ``Q(s, a)``, shape (batch_size, n_actions)
    :param values: ``V~(s)``, shape (batch_size, 1)
    :param old_log_probs: ``log pi_old(a|s)`` of every action, shape (batch_size, n_actions)
    :param shrinkage: Probability at which the advantage is halved, at least 0; 0 changes nothing, not even by rounding
    :return: shape (batch_size, n_actions)
    """
    if shrinkage == 0:
        return q_values
    return values + shrink_advantages(q_values - values, old_log_probs, shrinkage)


def corrected_advantages(
    q_values: th.Tensor,
    values: th.Tensor,
    old_log_probs: th.Tensor,
    actions: th.Tensor,
    returns: th.Tensor,
    shrinkage: float,
) -> tuple[th.Tensor, th.Tensor]:
    """
    The weights of a sum over actions that trusts the critic less where it knows little, and of its correction.

    :param q_values: ``Q(s, a)``, shape (batch_size, n_actions)
    :param values: ``V~(s)``, shape (batch_size, 1)
    :param old_log_probs: ``log pi_old(a|s)`` of every action, shape (batch_size, n_actions)
    :param actions: actions taken, shape (batch_size, 1)
    :param returns: bootstrapped returns ``R_t``, shape (batch_size, 1)
    :param shrinkage: Probability at which the advantage is halved, at least 0; 0 changes nothing
    :return: ``A(s, a)``, shape (batch_size, n_actions), and ``d = R_t - V~(s_t) - A(s_t, a_t)``, shape (batch_size, 1)
    """
    advantages = shrink_advantages(q_values - values, old_log_probs, shrinkage)
    return advantages, returns - values - advantages.gather(1, actions)


def critic_loss(q_taken: th.Tensor, returns: th.Tensor) -> th.Tensor:
    """
    Squared error of the critic at the actions that were taken, ``mean_s (R_t - Q(s_t, a_t))^2``.

    :param q_taken: ``Q(s_t, a_t)``, shape (batch_size, 1)
    :param returns: bootstrapped n-step returns ``R_t``, shape (batch_size, 1)
    :return: scalar loss
    """
    return F.mse_loss(q_taken, returns)


def negative_entropy(log_probs: th.Tensor) -> th.Tensor:
    """
    Negative entropy of the policy in nats, ``mean_s sum_a pi(a|s) log pi(a|s)``: minimizing it favors exploration.

    :param log_probs: ``log pi(a|s)`` of every action, shape (batch_size, n_actions)
    :return: scalar loss, between ``-log(n_actions)`` and 0
    """
    return (log_probs.exp() * _finite(log_probs)).sum(dim=1).mean()


def _finite(log_probs: th.Tensor) -> th.Tensor:
    """The same, but finite where the probability is 0, so that such an action adds 0 and not the NaN of ``0 * -inf``."""
    return log_probs.clamp(min=th.finfo(log_probs.dtype).min)


def mean_size(advantages: th.Tensor, allowed: th.Tensor | None = None) -> th.Tensor:
    """
    Mean absolute advantage.

    :param advantages: ``A(s, a)``, shape (batch_size, n_actions)
    :param allowed: Which actions are allowed, shape (batch_size, n_actions); None for all
    :return: scalar, at least 0
    """
    if allowed is None:
        return advantages.abs().mean()
    return (advantages.abs() * allowed).sum() / allowed.sum()


def action_gap(q_values: th.Tensor, allowed: th.Tensor | None = None) -> th.Tensor:
    """
    Mean difference between the best and the second best action of a state (0 if there is only one action).

    Paper: Bellemare et al. 2016, "Increasing the action gap", https://arxiv.org/abs/1512.04860

    :param q_values: ``Q(s, a)`` or an advantage, shape (batch_size, n_actions)
    :param allowed: Which actions are allowed, shape (batch_size, n_actions); None for all
    :return: scalar, at least 0
    """
    if allowed is not None:
        q_values = q_values.masked_fill(~allowed, -math.inf)
    best = q_values.topk(min(2, q_values.shape[1]), dim=1).values
    second = th.where(best[:, -1].isinf(), best[:, 0], best[:, -1])
    return (best[:, 0] - second).mean()
