"""Estimators of the policy gradient, and moments of their gradients over rollouts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch as th

from sb3_qac.common.buffers import AllActionSamples, MaskableSamples
from sb3_qac.common.losses import all_action_policy_loss, corrected_advantages, sampled_policy_loss, state_values
from sb3_qac.pqn import PQN
from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO

# The two estimators that reports compare
ALL_ACTION, A2C_WEIGHT = "all-action", "sampled, return - V~ (A2C's weight)"
# Number of blocks of rollouts, for standard errors
N_BLOCKS = 10


class Batch(NamedTuple):
    """
    The inputs of an actor loss, with the names of ``QA2C.train`` and ``QPPO.train``.

    :param q_values: ``Q(s, a)``, shape (batch_size, n_actions)
    :param log_probs: ``log pi(a|s)``, shape (batch_size, n_actions)
    :param values: ``V~(s)``, shape (batch_size, 1)
    :param actions: actions taken, shape (batch_size, 1)
    :param returns: n-step returns, shape (batch_size, 1)
    """

    q_values: th.Tensor
    log_probs: th.Tensor
    values: th.Tensor
    actions: th.Tensor
    returns: th.Tensor

    @property
    def q_taken(self) -> th.Tensor:
        """``Q(s_t, a_t)``, shape (batch_size, 1)"""
        return self.q_values.gather(1, self.actions)

    @property
    def log_prob_taken(self) -> th.Tensor:
        """``log pi(a_t|s_t)``, shape (batch_size, 1)"""
        return self.log_probs.gather(1, self.actions)


def batch_of(model: QA2C | QPPO | PQN, data: MaskableSamples | AllActionSamples) -> Batch:
    """
    :param model: Model
    :param data: Its rollout
    :return: inputs of the actor losses, with gradients
    """
    with model.policy.masked(data.action_masks if model._is_masked else None):
        q_values, log_probs = model.policy.evaluate_all_actions(data.observations)
    values = state_values(log_probs.exp(), q_values).detach()
    actions = model.policy.joint_actions.numbers(data.actions)
    return Batch(q_values, log_probs, values, actions, data.returns.unsqueeze(1))


def weights_of(batch: Batch, shrinkage: float = 0.0) -> tuple[th.Tensor, th.Tensor]:
    """
    :param batch: Inputs of an actor loss
    :param shrinkage: As in QA2C and QPPO
    :return: weights ``A`` of the sum, shape (batch_size, n_actions), and ``d`` of the correction, shape (batch_size, 1)
    """
    q_values, log_probs = batch.q_values.detach(), batch.log_probs.detach()
    return corrected_advantages(q_values, batch.values, log_probs, batch.actions, batch.returns, shrinkage)


def _corrected(beta: float, shrinkage: float = 0.0) -> Callable[[Batch], th.Tensor]:
    def loss(batch: Batch) -> th.Tensor:
        advantages, td_errors = weights_of(batch, shrinkage)
        correction = sampled_policy_loss(batch.log_prob_taken, td_errors)
        return all_action_policy_loss(batch.log_probs, advantages) + beta * correction

    return loss


# The first estimator is the reference for the others. For the policy of the rollout QPPO's ratio is 1: its clipped losses have
# the same gradients as these.
ESTIMATORS: dict[str, Callable[[Batch], th.Tensor]] = {
    ALL_ACTION: lambda b: all_action_policy_loss(b.log_probs, b.q_values),
    "all-action, baseline": lambda b: all_action_policy_loss(b.log_probs, b.q_values - b.values),
    "all-action, beta=1": _corrected(1.0),
    "sampled": lambda b: sampled_policy_loss(b.log_prob_taken, b.q_taken),
    "sampled, baseline": lambda b: sampled_policy_loss(b.log_prob_taken, b.q_taken - b.values),
    "sampled, return (REINFORCE's weight)": lambda b: sampled_policy_loss(b.log_prob_taken, b.returns),
    A2C_WEIGHT: lambda b: sampled_policy_loss(b.log_prob_taken, b.returns - b.values),
}


class GradientMoments:
    """
    Moments of the gradients of several estimators over rollouts, without keeping the gradients themselves.

    :param names: Estimators, the first of which is the reference
    :param n_rollouts: Number of rollouts that will be added. They are divided into blocks, for the standard errors.
    """

    def __init__(self, names: Sequence[str], n_rollouts: int) -> None:
        self.names, self.n_rollouts = names, n_rollouts
        self.n_blocks = min(N_BLOCKS, n_rollouts)
        self.n_added = 0
        self.counts = np.zeros(self.n_blocks)
        # By estimator and block: sums of the gradients, and of quantities of single rollouts
        self.sums: dict[str, list[th.Tensor | float]] = {name: [0.0] * self.n_blocks for name in names}
        self.squares = {name: np.zeros(self.n_blocks) for name in names}
        self.products = {name: np.zeros(self.n_blocks) for name in names}
        self.differences = {name: np.zeros(self.n_blocks) for name in names}

    def add(self, gradients: dict[str, th.Tensor]) -> None:
        """
        :param gradients: The gradient of each estimator on the same rollout, shape (n_parameters,) each
        """
        block = self.n_added * self.n_blocks // self.n_rollouts
        self.n_added += 1
        self.counts[block] += 1
        reference = gradients[self.names[0]]
        for name, gradient in gradients.items():
            self.sums[name][block] += gradient
            self.squares[name][block] += float(gradient @ gradient)
            self.products[name][block] += float(gradient @ reference)
            self.differences[name][block] += float((gradient - reference).norm() / reference.norm().clamp(min=1e-30))

    def summary(self) -> dict[str, dict[str, float]]:
        """
        :return: by estimator:

            * ``gradient_square``: squared norm of the expected gradient, without bias (it can come out negative)
            * ``variance``: trace of the covariance of a rollout's gradient
            * ``noise_to_signal``: ``variance`` divided by ``gradient_square``
            * ``cosine``: between the expected gradient and the reference's. The noise is removed from their product and
              norms, so it can come out beyond -1 or 1.
            * ``difference``: norm of the difference to the reference's gradient on the same rollout, relative to the
              latter's norm, mean over rollouts

            and for each the standard error, with "_error" after its name, from leaving out blocks of rollouts in turn. Where
            the expected gradient is less than two standard errors from 0, ratio and cosine are nan.
        """
        sums = {name: th.stack([th.as_tensor(block) for block in blocks]) for name, blocks in self.sums.items()}
        # Products of the sums of any two blocks, shape (n_blocks, n_blocks)
        with_itself = {name: (x @ x.T).double().numpy(force=True) for name, x in sums.items()}
        with_reference = {name: (x @ sums[self.names[0]].T).double().numpy(force=True) for name, x in sums.items()}
        summary = {}
        for name in self.names:
            figures = self._figures(name, with_itself, with_reference, np.ones(self.n_blocks))
            without = [self._figures(name, with_itself, with_reference, kept) for kept in 1 - np.eye(self.n_blocks)]
            errors = {
                f"{figure}_error": float(np.sqrt((self.n_blocks - 1) * np.var([other[figure] for other in without])))
                for figure in figures
            }
            summary[name] = {**figures, **errors}
            if figures["gradient_square"] < 2 * errors["gradient_square_error"]:
                # The gradient cannot be distinguished from 0
                unknown = [figure for figure in summary[name] if figure.startswith(("noise_to_signal", "cosine"))]
                summary[name].update(dict.fromkeys(unknown, np.nan))
        return summary

    def _figures(
        self, name: str, with_itself: dict[str, np.ndarray], with_reference: dict[str, np.ndarray], kept: np.ndarray
    ) -> dict[str, float]:
        n, reference = self.counts @ kept, self.names[0]

        def expected(of_sums: np.ndarray, of_rollouts: np.ndarray) -> float:
            # Only pairs of different rollouts, so that the noise of a rollout is not squared
            return float((kept @ of_sums @ kept - of_rollouts @ kept) / (n * (n - 1)))

        square = expected(with_itself[name], self.squares[name])
        product = expected(with_reference[name], self.products[name])
        reference_square = expected(with_itself[reference], self.squares[reference])
        variance = float(self.squares[name] @ kept / n) - square
        return {
            "gradient_square": square,
            "variance": variance,
            "noise_to_signal": variance / square if square > 0 else np.nan,
            "cosine": product / np.sqrt(square * reference_square) if min(square, reference_square) > 0 else np.nan,
            "difference": float(self.differences[name] @ kept / n),
        }


def estimators_of(model: QA2C | QPPO | PQN) -> dict[str, Callable[[Batch], th.Tensor]]:
    """
    :param model: Model
    :return: ``ESTIMATORS``, and the model's own if it is all-action with another ``beta``, or with shrinkage. None for PQN,
        which has no actor
    """
    if isinstance(model, PQN):
        return {}
    shrinkage = model.shrinkage
    if model.policy_gradient == "sampled" or (model.beta in (0, 1) and shrinkage == 0):
        return ESTIMATORS
    name = f"all-action, beta={model.beta:g}" + (f", shrinkage={shrinkage:g}" if shrinkage else "")
    return {**ESTIMATORS, name: _corrected(model.beta, shrinkage)}


def scale_of(model: QA2C | QPPO | PQN, batch: Batch) -> float:
    """
    :param model: Model
    :param batch: A rollout
    :return: what the actor's loss is divided by in training: QPPO's sigma, and 1 for the others
    """
    if not isinstance(model, QPPO):
        return 1.0
    weights = *weights_of(batch, model.shrinkage), batch.returns - batch.values
    return model._next_sigma(batch.log_probs.exp(), *weights).item()


def gradient_of(model: QA2C | QPPO | PQN, loss: th.Tensor) -> th.Tensor:
    """
    :param model: Model
    :param loss: Loss of its policy
    :return: gradient with respect to all parameters, shape (n_parameters,)
    """
    gradients = th.autograd.grad(loss, list(model.policy.parameters()), allow_unused=True, materialize_grads=True)
    return th.cat([gradient.flatten() for gradient in gradients])
