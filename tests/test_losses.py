"""Values and gradients of the losses against closed forms derived by hand, for one softmax policy, in float64.

With logits z and p = softmax(z), d p_a / d z_k = p_a (1[a = k] - p_k). Hence, for weights w held fixed:

* all-action:  d/dz_k  sum_a p_a w_a        = p_k (w_k - sum_a p_a w_a)
* sampled:     d/dz_k  w_t log p_t          = w_t (1[t = k] - p_k)
* entropy:     d/dz_k  sum_a p_a log p_a    = p_k (log p_k - sum_a p_a log p_a)
"""

import math

import numpy as np
import pytest
import torch as th
from torch.nn import functional as F

from sb3_qac.common.losses import (
    action_gap,
    all_action_policy_loss,
    clipped_policy_loss,
    corrected_advantages,
    critic_loss,
    kl_divergence,
    negative_entropy,
    sampled_policy_loss,
    shrink_advantages,
    state_values,
)

BATCH_SIZE, N_ACTIONS = 7, 4
TOLERANCE = 1e-10


@pytest.fixture
def batch():
    """Logits and Q-values that ask for gradients, actions, returns; Q far from zero, as values of states are."""
    generator = th.Generator().manual_seed(0)
    logits = th.randn(BATCH_SIZE, N_ACTIONS, generator=generator, dtype=th.float64, requires_grad=True)
    q_values = (20 + th.randn(BATCH_SIZE, N_ACTIONS, generator=generator, dtype=th.float64)).requires_grad_()
    actions = th.randint(N_ACTIONS, (BATCH_SIZE, 1), generator=generator)
    returns = 20 + th.randn(BATCH_SIZE, 1, generator=generator, dtype=th.float64)
    return logits, q_values, actions, returns


def weights_of(q_values, log_probs, baseline):
    return q_values - state_values(log_probs.exp(), q_values).detach() if baseline else q_values


def assert_close(actual, expected):
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=TOLERANCE)


def closed_form_all_action(logits, q_values):
    p, q = th.softmax(logits, 1).detach().numpy(), q_values.detach().numpy()
    return -p * (q - (p * q).sum(axis=1, keepdims=True)) / BATCH_SIZE


@pytest.mark.parametrize("baseline", [False, True])
def test_all_action_gradient_is_the_closed_form(batch, baseline):
    logits, q_values, _, _ = batch
    log_probs = F.log_softmax(logits, dim=1)
    all_action_policy_loss(log_probs, weights_of(q_values, log_probs, baseline)).backward()
    assert_close(logits.grad, closed_form_all_action(logits, q_values))


@pytest.mark.parametrize("baseline", [False, True])
def test_sampled_gradient_is_the_closed_form(batch, baseline):
    logits, q_values, actions, _ = batch
    log_probs = F.log_softmax(logits, dim=1)
    weights = weights_of(q_values, log_probs, baseline)
    sampled_policy_loss(log_probs.gather(1, actions), weights.gather(1, actions)).backward()

    p, q = th.softmax(logits, 1).detach().numpy(), q_values.detach().numpy()
    taken = np.eye(N_ACTIONS)[actions.flatten()]
    weight = (taken * q).sum(axis=1, keepdims=True) - (baseline * (p * q).sum(axis=1, keepdims=True))
    assert_close(logits.grad, -weight * (taken - p) / BATCH_SIZE)


def test_tasks_1_and_2_have_the_same_gradient(batch):
    logits, q_values, _, _ = batch
    gradients = []
    for baseline in (False, True):
        log_probs = F.log_softmax(logits, dim=1)
        loss = all_action_policy_loss(log_probs, weights_of(q_values, log_probs, baseline))
        gradients.append(th.autograd.grad(loss, logits)[0])
    assert gradients[0].abs().max() > 1e-3
    assert_close(gradients[0], gradients[1].numpy())


@pytest.mark.parametrize("baseline", [False, True])
def test_sampled_gradient_averages_to_the_all_action_gradient_over_actions(batch, baseline):
    logits, q_values, _, _ = batch
    log_probs = F.log_softmax(logits, dim=1)
    weights = weights_of(q_values, log_probs, baseline)
    expectation = th.zeros_like(logits)
    for action in range(N_ACTIONS):
        actions = th.full((BATCH_SIZE, 1), action)
        loss = sampled_policy_loss(log_probs.gather(1, actions), weights.gather(1, actions))
        gradient = th.autograd.grad(loss, logits, retain_graph=True)[0]
        # States do not share logits here: each row is the gradient of its own state
        expectation += log_probs.exp().gather(1, actions).detach() * gradient
    assert_close(expectation, closed_form_all_action(logits, q_values))


@pytest.mark.parametrize("baseline", [False, True])
def test_policy_losses_leave_no_gradient_on_the_critic(batch, baseline):
    logits, q_values, actions, _ = batch
    log_probs = F.log_softmax(logits, dim=1)
    weights = weights_of(q_values, log_probs, baseline)
    loss = all_action_policy_loss(log_probs, weights)
    loss = loss + sampled_policy_loss(log_probs.gather(1, actions), weights.gather(1, actions))
    loss.backward()
    assert q_values.grad is None
    assert logits.grad.abs().max() > 0


def test_baseline_that_is_not_detached_would_have_no_gradient(batch):
    """What the detachment inside the loss protects from: the mistake, made by hand, learns nothing at all."""
    logits, q_values, _, _ = batch
    log_probs = F.log_softmax(logits, dim=1)
    advantages = q_values.detach() - state_values(log_probs.exp(), q_values.detach())
    mistaken = -(log_probs.exp() * advantages).sum(dim=1).mean()
    assert_close(th.autograd.grad(mistaken, logits, retain_graph=True)[0], np.zeros((BATCH_SIZE, N_ACTIONS)))

    right = all_action_policy_loss(log_probs, advantages)
    assert_close(th.autograd.grad(right, logits)[0], closed_form_all_action(logits, q_values))


@pytest.mark.parametrize("shrinkage", [0, 0.1, 5])
def test_corrected_gradient_with_beta_1_is_unbiased_whatever_the_critic_says(batch, shrinkage):
    """Averaged over the actions, its gradient is that of sum_a pi(a|s) R(s, a): the critic drops out."""
    logits, q_values, _, _ = batch
    true_returns = th.randn(BATCH_SIZE, N_ACTIONS, generator=th.Generator().manual_seed(1), dtype=th.float64)
    log_probs = F.log_softmax(logits, dim=1)
    values = state_values(log_probs.exp(), q_values).detach()
    expectation = th.zeros_like(logits)
    for action in range(N_ACTIONS):
        actions = th.full((BATCH_SIZE, 1), action)
        advantages, correction = corrected_advantages(
            q_values.detach(), values, log_probs.detach(), actions, true_returns.gather(1, actions), shrinkage
        )
        loss = all_action_policy_loss(log_probs, advantages)
        loss = loss + sampled_policy_loss(log_probs.gather(1, actions), correction)
        gradient = th.autograd.grad(loss, logits, retain_graph=True)[0]
        expectation += log_probs.exp().gather(1, actions).detach() * gradient
    assert_close(expectation, closed_form_all_action(logits, true_returns))


def test_entropy_gradient_is_the_closed_form(batch):
    logits, _, _, _ = batch
    negative_entropy(F.log_softmax(logits, dim=1)).backward()
    p = th.softmax(logits, 1).detach().numpy()
    assert_close(logits.grad, p * (np.log(p) - (p * np.log(p)).sum(axis=1, keepdims=True)) / BATCH_SIZE)


def test_an_action_of_probability_0_adds_nothing_to_the_entropy_and_the_kl_divergence(batch):
    """A policy of the user's may mask actions with logits of -inf."""
    logits, _, _, _ = batch
    masked = F.pad(logits, (0, 1), value=-math.inf)
    for loss in (negative_entropy, lambda log_probs: kl_divergence(log_probs.detach().roll(1, dims=0), log_probs)):
        values = [loss(F.log_softmax(each, dim=1)) for each in (logits, masked)]
        th.testing.assert_close(*values)
        th.testing.assert_close(*(th.autograd.grad(value, logits, retain_graph=True)[0] for value in values))


def test_values_by_hand():
    # pi = (1/2, 1/4, 1/4): V~ = 1/2 * 4 + 1/4 * 8 - 1/4 * 4 = 3, entropy = 1/2 log 2 + 2 * 1/4 * 2 log 2 = 3/2 log 2
    log_probs = th.tensor([[0.5, 0.25, 0.25]], dtype=th.float64).log()
    q_values = th.tensor([[4.0, 8.0, -4.0]], dtype=th.float64)
    assert_close(state_values(log_probs.exp(), q_values), [[3.0]])
    assert_close(all_action_policy_loss(log_probs, q_values), -3.0)
    assert_close(all_action_policy_loss(log_probs, q_values - 3), 0.0)
    assert_close(sampled_policy_loss(log_probs[:, 1:2], q_values[:, 1:2]), 8 * math.log(4))
    assert_close(critic_loss(q_values[:, :1], th.tensor([[1.0]], dtype=th.float64)), 9.0)
    assert_close(negative_entropy(log_probs), -1.5 * math.log(2))
    assert_close(action_gap(q_values), 4.0)
    assert_close(action_gap(q_values[:, :1]), 0.0)


def test_clipped_gradient_is_the_sampled_one_at_the_old_policy(batch):
    logits, _, actions, returns = batch
    log_prob = F.log_softmax(logits, dim=1).gather(1, actions)
    clipped_policy_loss((log_prob - log_prob.detach()).exp(), returns, 0.2).backward(retain_graph=True)
    clipped, logits.grad = logits.grad, None
    sampled_policy_loss(log_prob, returns).backward()
    assert_close(clipped, logits.grad.numpy())


@pytest.mark.parametrize(
    ("ratio", "weight", "loss", "moves"),
    [
        pytest.param(1.1, 2.0, -2.2, True, id="inside, wanted"),
        pytest.param(0.9, -2.0, 1.8, True, id="inside, not wanted"),
        pytest.param(1.5, 2.0, -2.4, False, id="far enough, wanted"),
        pytest.param(0.5, -2.0, 1.6, False, id="far enough, not wanted"),
        pytest.param(0.5, 2.0, -1.0, True, id="moved the wrong way, wanted"),
        pytest.param(1.5, -2.0, 3.0, True, id="moved the wrong way, not wanted"),
    ],
)
def test_clipped_loss_stops_where_the_ratio_has_gone_far_enough(ratio, weight, loss, moves):
    ratio = th.tensor([[ratio]], requires_grad=True)
    weight = th.tensor([[weight]], requires_grad=True)
    clipped = clipped_policy_loss(ratio, weight, 0.2)
    clipped.backward()
    assert clipped.item() == pytest.approx(loss)
    assert (ratio.grad.item() != 0) is moves
    assert weight.grad is None


def test_advantages_are_shrunk_by_how_seldom_an_action_is_taken():
    """An advantage of 1 that is seen in a share p of the visits, averaged with a share of 0.1 in which it is 0."""
    probs = th.tensor([[0.9, 0.1, 0.02, 0.0]])
    advantages = shrink_advantages(th.ones(1, 4), probs.log(), 0.1)
    assert advantages.flatten().tolist() == pytest.approx([0.9, 0.5, 1 / 6, 0])
    # Without shrinkage they are the very same, also for actions that are never taken
    assert th.equal(shrink_advantages(th.ones(1, 4), probs.log(), 0), th.ones(1, 4))
    # Both the probability and the shrinkage are 0 in float32
    assert shrink_advantages(th.ones(1), th.tensor([-120.0]), math.exp(-120)).item() == 0.5


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_gradient_with_much_shrinkage_is_that_of_the_action_taken(batch, beta):
    """What is left is the correction, beta times the return's advantage."""
    logits, q_values, actions, returns = batch
    log_probs = F.log_softmax(logits, dim=1)
    values = state_values(log_probs.exp(), q_values).detach()
    log_prob = log_probs.gather(1, actions)
    advantages, correction = corrected_advantages(q_values.detach(), values, log_probs.detach(), actions, returns, 1e12)
    loss = all_action_policy_loss(log_probs, advantages) + beta * sampled_policy_loss(log_prob, correction)
    (gradient,) = th.autograd.grad(loss, logits, retain_graph=True)
    (sampled,) = th.autograd.grad(sampled_policy_loss(log_prob, returns - values), logits)
    assert_close(gradient, beta * sampled.numpy())


def test_kl_divergence_by_hand():
    old, new = th.tensor([[0.5, 0.5], [1.0, 1e-30]]).log(), th.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(old, new).item() == pytest.approx((first + math.log(2)) / 2, rel=1e-5)
    assert kl_divergence(old, old).item() == 0
