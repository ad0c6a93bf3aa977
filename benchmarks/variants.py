"""
Five variants of QPPO on MinAtar that the protocol names, with the preset otherwise, and the preset itself:

    python -m benchmarks.variants entropy-target MinAtar/Breakout-v1 --seeds 0 1 --steps 600000 --eval-freq 100000

What follows the variant's name are arguments of ``study``, without ``--jobs`` and ``--ray``, whose processes would train the
preset. A resumed run of ``averaged-critic`` begins its moving average anew.
"""

import copy
import math
import sys
from functools import partial

import torch as th
from rl_zoo3.utils import ALGOS
from torch import nn
from torch.nn import functional as F

from sb3_qac import QPPO
from sb3_qac.common.losses import critic_loss, shrink_advantages, state_values
from sb3_qac.common.schedules import current_value
from sb3_qac.qa2c.policies import ActorCriticQPolicy
from sb3_qac.zoo import registration

VARIANTS = ("preset", "entropy-target", "uniform-share", "kl-bound", "averaged-critic", "categorical-critic")
# Entropy in shares of its largest value, at the start; it falls to 0 with the learning rate
TARGET_ENTROPY = 0.5
# Probability that is spread evenly over the actions, at the start; it falls to 0 with the learning rate
UNIFORM_SHARE = 0.1
# KL divergence of a state in nats above which only the divergence is reduced, as in REPPO, and its weight there
KL_BOUND, KL_WEIGHT = 0.1, 1.0
# Of the moving average of the weights, for each minibatch
DECAY = 0.99
# Of the categorical critic: the return at the outermost bin is symexp(5) = 147. Its gradient is larger than that of squared
# errors, so it has another coefficient
N_BINS, LIMIT, CATEGORICAL_VF_COEF = 101, 5.0, 0.1


def symlog(x):
    return x.sign() * x.abs().log1p()


def symexp(x):
    return x.sign() * x.abs().expm1()


class EvenlyMixedPolicy(ActorCriticQPolicy):
    """A share of the probability is spread evenly over the actions."""

    share = UNIFORM_SHARE

    def _get_action_dist_from_latent(self, latent_pi):
        log_probs = self.action_net(latent_pi).log_softmax(dim=1)
        share = max(self.share, 1e-6)
        even = th.full_like(log_probs, math.log(share / log_probs.shape[1]))
        return self.action_dist.proba_distribution(th.logaddexp(log_probs + math.log1p(-share), even))


class CategoricalHead(nn.Module):
    """
    Dueling head with a distribution over bins of symlog(return) for each action, learnt with HL-Gauss (Farebrother et al.
    2024, https://arxiv.org/abs/2403.03950), where the standard deviation is 0.75 of a bin's width.
    """

    def __init__(self, in_features, n_actions):
        super().__init__()
        self.value_net = nn.Linear(in_features, N_BINS)
        self.advantage_net = nn.Linear(in_features, n_actions * N_BINS)
        centres = th.linspace(-LIMIT, LIMIT, N_BINS)
        width = 2 * LIMIT / (N_BINS - 1)
        self.register_buffer("centres", symexp(centres))
        self.register_buffer("edges", th.linspace(-LIMIT - width / 2, LIMIT + width / 2, N_BINS + 1))
        self.deviation = 0.75 * width
        self.logits = None

    def forward(self, features):
        advantages = self.advantage_net(features).unflatten(1, (-1, N_BINS))
        logits = self.value_net(features).unsqueeze(1) + advantages - advantages.mean(dim=1, keepdim=True)
        if th.is_grad_enabled():
            self.logits = logits
        return (logits.softmax(dim=2) * self.centres).sum(dim=2)

    def loss(self, actions, returns):
        """:return: mean cross-entropy of the bins of the actions taken"""
        cdf = th.special.ndtr((self.edges - symlog(returns).clamp(-LIMIT, LIMIT)) / self.deviation)
        target = cdf.diff(dim=1) / (cdf[:, -1:] - cdf[:, :1])
        taken = self.logits.take_along_dim(actions.unsqueeze(2), dim=1).squeeze(1)
        self.logits = None
        return F.cross_entropy(taken, target)


class CategoricalCriticPolicy(ActorCriticQPolicy):
    """Every Q(s, a) is the mean of a distribution."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.q_net = CategoricalHead(self.mlp_extractor.latent_dim_vf, int(self.action_space.n))
        # All bins are equally likely at first, so that Q is 0
        self.q_net.apply(partial(self.init_weights, gain=0.01))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class Variant(QPPO):
    """QPPO with one part changed. ``variant`` is set before training."""

    variant = "preset"
    averaged_policy = None

    def _get_policy_from_name(self, policy_name):
        policies = {"uniform-share": EvenlyMixedPolicy, "categorical-critic": CategoricalCriticPolicy}
        return policies.get(self.variant) or super()._get_policy_from_name(policy_name)

    def collect_rollouts(self, *args, **kwargs):
        if self.variant == "uniform-share":
            # The same for this rollout and the update that follows
            self.policy.share = UNIFORM_SHARE * self._current_progress_remaining
        return super().collect_rollouts(*args, **kwargs)

    def train(self):
        if self.variant in ("preset", "uniform-share"):
            super().train()
        elif self.variant == "entropy-target":
            if not isinstance(self.ent_coef, float):
                self.ent_coef = 0.02
            super().train()
            largest = math.log(self.action_space.n)
            entropy = -self.logger.name_to_value["train/entropy_loss"]
            missing = TARGET_ENTROPY * self._current_progress_remaining - entropy / largest
            # Not far below the preset's, or it would take long to rise again once the first, random policy is gone
            smallest = 0.005 * self._current_progress_remaining
            self.ent_coef = min(max(self.ent_coef * math.exp(missing), smallest), 1.0)
        else:
            self._train_with_other_losses()

    def _train_with_other_losses(self):
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip_range = current_value("clip_range", self.clip_range, self._current_progress_remaining)
        ent_coef = current_value("ent_coef", self.ent_coef, self._current_progress_remaining)
        if self.variant == "averaged-critic" and self.averaged_policy is None:
            self.averaged_policy = copy.deepcopy(self.policy)
        logged = []
        for _ in range(self.n_epochs):
            for rollout_data in self.rollout_buffer.get(self.batch_size):
                actions = rollout_data.actions.long()
                returns = rollout_data.returns.unsqueeze(1)
                q_values, log_probs = self.policy.evaluate_all_actions(rollout_data.observations)
                old_log_probs = rollout_data.old_log_prob.view_as(log_probs)
                probs = log_probs.exp()
                ratio = (log_probs - old_log_probs).gather(1, actions).exp()

                actor_q = q_values.detach()
                if self.variant == "averaged-critic":
                    with th.no_grad():
                        actor_q = self.averaged_policy.evaluate_all_actions(rollout_data.observations)[0]
                values = state_values(probs, actor_q).detach()
                advantages = shrink_advantages(actor_q - values, old_log_probs, self.shrinkage)
                sampled_advantages = returns - values
                td_errors = sampled_advantages - advantages.gather(1, actions)
                sigma = self._next_sigma(probs.detach(), advantages, td_errors, sampled_advantages)

                # One value for each state
                correction = th.min(ratio * td_errors, ratio.clamp(1 - clip_range, 1 + clip_range) * td_errors).squeeze(1)
                objective = ((probs * advantages).sum(dim=1) + self.beta * correction) / sigma
                kl = (old_log_probs.exp() * (old_log_probs - log_probs)).sum(dim=1)
                entropy = -(probs * log_probs).sum(dim=1)
                actor_loss = -objective - ent_coef * entropy
                if self.variant == "kl-bound":
                    actor_loss = th.where(kl <= KL_BOUND, actor_loss, KL_WEIGHT * kl)
                else:
                    actor_loss = actor_loss + self.kl_coef * kl

                if self.variant == "categorical-critic":
                    value_loss = CATEGORICAL_VF_COEF * self.policy.q_net.loss(actions, returns)
                else:
                    value_loss = self.vf_coef * critic_loss(q_values.gather(1, actions), returns)

                self.policy.optimizer.zero_grad()
                (actor_loss.mean() + value_loss).backward()
                grad_norm = th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()
                if self.averaged_policy is not None:
                    with th.no_grad():
                        averaged, current = (list(policy.parameters()) for policy in (self.averaged_policy, self.policy))
                        th._foreach_lerp_(averaged, current, 1 - DECAY)
                rows = [sigma, value_loss, -entropy.mean(), kl.mean(), advantages.abs().mean(), grad_norm]
                logged.append(th.stack(rows).tolist())
                self.sigma = logged[-1][0]
            self._n_updates += 1
        names = ("sigma", "value_loss", "entropy_loss", "kl", "abs_advantage", "grad_norm")
        for name, mean in zip(names, th.tensor(logged).mean(dim=0).tolist(), strict=True):
            self.logger.record(f"train/{name}", mean)


def main():
    # By their names, so that checkpoints find the classes
    from benchmarks.variants import Variant
    from sb3_qac.__main__ import main as command_line

    variant, *arguments = sys.argv[1:]
    if variant not in VARIANTS:
        raise SystemExit(f"{variant!r} is none of {', '.join(VARIANTS)}")
    if not {"--jobs", "--ray"}.isdisjoint(arguments):
        raise SystemExit("--jobs and --ray would train the preset: start several processes instead")
    Variant.variant = variant
    registration.ALGORITHMS["qppo"] = ALGOS["qppo"] = Variant
    sys.argv = ["sb3_qac", "study", arguments[0], "--algos", "qppo", *arguments[1:]]
    command_line()


if __name__ == "__main__":
    main()
