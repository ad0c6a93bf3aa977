from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import explained_variance, obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.buffers import AllActionRolloutBuffer
from sb3_qac.common.checks import (
    check_action_space,
    check_choice,
    check_finite,
    check_integer,
    check_max_grad_norm,
    check_number,
    check_observation_space,
    check_policy_class,
    warn_of_truncated_minibatch,
)
from sb3_qac.common.losses import (
    action_gap,
    all_action_policy_loss,
    clipped_policy_loss,
    corrected_advantages,
    critic_loss,
    kl_divergence,
    mean_size,
    negative_entropy,
    state_values,
)
from sb3_qac.common.masks import MaskableOnPolicyAlgorithm
from sb3_qac.common.schedules import check_schedule, current_value
from sb3_qac.qa2c.policies import ActorCriticQCnnPolicy, ActorCriticQPolicy, MultiInputActorCriticQPolicy

SelfQPPO = TypeVar("SelfQPPO", bound="QPPO")

# Decay of sigma's running mean, for each minibatch
SIGMA_DECAY = 0.99


class QPPO(MaskableOnPolicyAlgorithm):
    """
    Q Proximal Policy Optimization (QPPO): PPO with an action-value critic and the all-action policy gradient.

    It is to QA2C what PPO is to A2C: each rollout is used for several epochs of minibatches. The sum over actions needs no
    importance ratio, because it weights every action by its current probability. Q still estimates returns of the policy of
    the rollout, so the KL term keeps the two close::

        loss = - mean_s [ sum_a pi(a|s) A(s, a) ] / sigma
               - beta     * mean_s [ min(rho d, clip(rho) d) ] / sigma
               + kl_coef  * mean_s [ KL(pi_old(.|s) || pi(.|s)) ]
               - ent_coef * mean_s [ entropy of pi(.|s) ]
               + vf_coef  * mean_s [ (R_t - Q(s_t, a_t))^2 ]

    A = (Q - V~) pi_old / (pi_old + shrinkage) with V~ = sum_a pi Q, d = R_t - V~(s_t) - A(s_t, a_t) and sigma are constants to
    the gradient; rho = pi(a_t|s_t) / pi_old(a_t|s_t). R_t are TD(lambda) returns, bootstrapped from V~ of the rollout. With
    ``shrinkage=0``, A = Q - V~ and d = R_t - Q(s_t, a_t): at pi = pi_old and sigma = 1 it then has the same gradient as QA2C
    with ``pg_coef=1`` and the same other coefficients.

    Differences from PPO: the critic is Q(s, a). A KL penalty limits the all-action term, as in the penalty form of PPO
    (Schulman et al. 2017, https://arxiv.org/abs/1707.06347); only the correction by the return is clipped. Advantages are
    divided by a running scale, not by the standard deviation of the minibatch. The all-action gradient is that of Mean
    Actor-Critic, Allen et al. 2017, https://arxiv.org/abs/1709.00503; the correction is that of beta-LOO, Gruslys et al. 2017,
    https://arxiv.org/abs/1704.04651. The defaults are for Atari games with 16 environments; the results on Pong are those of
    the preset in ``hyperparams/qppo.yml``, whose network and schedules differ, in bfloat16 (see ``docs/qppo.md``).

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy, or a subclass of ActorCriticQPolicy)
    :param env: The environment to learn from (if registered in Gym, can be str), with ``Discrete``, ``MultiDiscrete``
        or ``MultiBinary`` actions
    :param learning_rate: The learning rate, it can be a function
        of the current progress remaining (from 1 to 0), or "lin_1e-3", RL Zoo's name of the schedule that falls linearly from
        1e-3 to 0
    :param n_steps: The number of steps to run for each environment per update
        (i.e. rollout buffer size is n_steps * n_envs where n_envs is number of environment copies running in parallel)
    :param batch_size: Minibatch size. None (default) for 128, or for the whole rollout if it is smaller
    :param n_epochs: Number of epochs when optimizing the loss
    :param gamma: Discount factor, between 0 and 1
    :param gae_lambda: Factor for trade-off of bias vs variance of the critic's targets, TD(lambda), between 0 and 1
    :param clip_range: Clipping parameter of the correction (and of "sampled"), it can be a schedule as ``learning_rate``
    :param ent_coef: Entropy coefficient for the loss calculation, it can be a schedule as ``learning_rate``
    :param vf_coef: Value function coefficient for the loss calculation
    :param max_grad_norm: The maximum value for the gradient clipping, None or infinity for no clipping
    :param rollout_buffer_class: Rollout buffer class to use. If ``None``, it will be automatically selected.
    :param rollout_buffer_kwargs: Keyword arguments to pass to the rollout buffer on creation.
    :param stats_window_size: Window size for the rollout logging, specifying the number of episodes to average
        the reported success rate, mean episode length, and mean reward over
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: Verbosity level: 0 for no output, 1 for info messages (such as device or wrappers used), 2 for
        debug messages
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run.
        Setting it to auto, the code will be run on the GPU if possible.
    :param kl_coef: Coefficient of the KL divergence between the policy of the rollout and the current policy
    :param beta: Weight of the sampled correction, at least 0. At 0 the gradient trusts the critic, at 1 the return
    :param shrinkage: Probability of an action at which its advantage in the sum is halved, at least 0. The critic knows little
        of actions that are seldom taken. 0 trusts it for all actions alike. With ``beta=1``, the larger, the closer to
        "sampled", and the expected gradient at pi = pi_old is the same for every value, but for sigma.
    :param policy_gradient: Estimator of the policy gradient: "all-action", or "sampled" for the sampled-action baseline:
        PPO's clipped loss with (R_t - V~) / sigma replaces the sum and its correction, so ``beta`` and ``shrinkage``
        have no effect on the policy; everything else is the same
    :param normalize_advantage: Whether to divide advantages by sigma, the size of the advantage together with its correction:
        a running mean over the minibatches of the root of mean_s sum_a pi A^2 + beta mean d^2, with a decay of 0.99, which
        starts with the first minibatch. With "sampled", the root of mean (R_t - V~)^2. False for sigma = 1.
    :param sigma_min: Smallest sigma, at least 1e-8, in the units of the return. Where rewards are rare, advantages are errors
        of the critic, and a sigma as small as they are makes them as large as real advantages. With rewards of size 1, 0.1
        prevents this, as the bound of 1 on the range of returns does in DreamerV3 (Hafner et al. 2023,
        https://arxiv.org/abs/2301.04104). It has no effect with ``normalize_advantage=False``.
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: for an argument or a space that cannot be used; the message says what to use instead
    """

    policy: ActorCriticQPolicy
    rollout_buffer: AllActionRolloutBuffer
    rollout_buffer_base = AllActionRolloutBuffer
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticQPolicy,
        "CnnPolicy": ActorCriticQCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticQPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticQPolicy],
        env: GymEnv | str,
        learning_rate: float | str | Schedule = 5e-4,
        n_steps: int = 64,
        batch_size: int | None = None,
        n_epochs: int = 4,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | str | Schedule = 0.2,
        # PPO's order ends here: its next argument is `clip_range_vf`
        *,
        ent_coef: float | str | Schedule = 0.02,
        vf_coef: float = 0.5,
        max_grad_norm: float | None = 0.5,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        kl_coef: float = 1.0,
        beta: float = 1.0,
        shrinkage: float = 0.1,
        policy_gradient: Literal["all-action", "sampled"] = "all-action",
        normalize_advantage: bool = True,
        sigma_min: float = 1e-8,
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,  # type: ignore[arg-type]
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,  # type: ignore[arg-type]
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
            use_sde=False,
            sde_sample_freq=-1,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            device=device,
            seed=seed,
            _init_setup_model=False,
        )

        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.clip_range = clip_range
        self.kl_coef = kl_coef
        self.beta = beta
        self.shrinkage = shrinkage
        self.policy_gradient = policy_gradient
        self.normalize_advantage = normalize_advantage
        self.sigma_min = sigma_min
        # None until the first minibatch
        self.sigma: float | None = None

        if _init_setup_model:
            self._setup_model()
            if batch_size is not None:
                warn_of_truncated_minibatch(batch_size, n_steps, self.n_envs)

    @property
    def training_state(self) -> tuple[str, ...]:
        """Attributes that change during training, for exact resume."""
        return (*super().training_state, "sigma")

    def _setup_model(self) -> None:
        self._check_arguments()
        self.clip_range = check_schedule("clip_range", self.clip_range)
        super()._setup_model()

    def _check_arguments(self) -> None:
        # Not in the constructor, so that ``load(path, beta=-1)`` is checked as well
        check_action_space(self.action_space)
        check_policy_class(self.policy_class, ActorCriticQPolicy, self.policy_aliases)
        check_observation_space(self.observation_space, issubclass(self.policy_class, MultiInputActorCriticQPolicy))
        for name in ("vf_coef", "kl_coef", "beta", "shrinkage"):
            check_number(name, getattr(self, name))
        check_number("sigma_min", self.sigma_min, minimum=1e-8)
        for name in ("clip_range", "ent_coef"):
            check_schedule(name, getattr(self, name))
        for name in ("gamma", "gae_lambda"):
            check_number(name, getattr(self, name), maximum=1)
        for name in ("n_steps", "n_epochs"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.batch_size is None:
            self.batch_size = min(128, self.n_steps * self.n_envs)
        check_integer("batch_size", self.batch_size, minimum=1)
        self.max_grad_norm = check_max_grad_norm(self.max_grad_norm)
        check_choice("policy_gradient", self.policy_gradient, ("all-action", "sampled"))
        check_choice("normalize_advantage", self.normalize_advantage, (False, True))

    def _maybe_recommend_cpu(self, mlp_class_name: str = ActorCriticQPolicy.__name__) -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        with self.policy.keep_evaluations() as evaluations:
            self.rollout_buffer.evaluate_rollout = lambda: self._evaluate_rollout(evaluations)
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)

    @th.no_grad()
    def _evaluate_rollout(self, evaluations: list[tuple[th.Tensor, th.Tensor]]) -> tuple[th.Tensor, th.Tensor]:
        """
        :param evaluations: What the policy has kept in the rollout
        :return: ``Q(s, a)`` and ``log pi(a|s)`` for each of its steps, shape (n_steps, n_envs, n_actions) each
        """
        used, ours = type(self.policy), ActorCriticQPolicy
        is_ours = used.forward is ours.forward and used.evaluate_all_actions is ours.evaluate_all_actions
        if not is_ours or len(evaluations) != self.n_steps:
            # The policy has such a method of its own, maybe around ours, or a callback called the policy too
            observations: Any = self.rollout_buffer.observations
            if isinstance(observations, dict):
                observations = [{name: obs[step] for name, obs in observations.items()} for step in range(self.n_steps)]
            evaluations = []
            for step, obs in enumerate(observations):
                masks = self.rollout_buffer.action_masks
                with self.policy.masked(None if masks is None else masks[step]):
                    evaluations.append(self.policy.evaluate_all_actions(obs_as_tensor(obs, self.device)))
        q_values, log_probs = zip(*evaluations, strict=True)
        return th.stack(q_values), th.stack(log_probs)

    def train(self) -> None:
        """
        Update policy using the currently gathered rollout buffer.
        """
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        # Update optimizer learning rate
        self._update_learning_rate(self.policy.optimizer)
        # Compute current clip range and entropy coefficient
        clip_range = current_value("clip_range", self.clip_range, self._current_progress_remaining)
        ent_coef = self._current_ent_coef()

        minibatches = []
        for _ in range(self.n_epochs):
            # Do a complete pass on the rollout buffer
            for rollout_data in self.rollout_buffer.get(self.batch_size):
                actions = self.policy.joint_actions.numbers(rollout_data.actions)  # (batch_size, 1)
                returns = rollout_data.returns.unsqueeze(1)  # (batch_size, 1)

                action_masks = rollout_data.action_masks if self._is_masked else None
                with self.policy.masked(action_masks):
                    q_values, log_probs = self.policy.evaluate_all_actions(
                        rollout_data.observations
                    )  # (batch_size, n_actions)
                old_log_probs = rollout_data.all_old_log_probs
                ratio = (log_probs - old_log_probs).gather(1, actions).exp()  # (batch_size, 1)

                # Weights of the actor loss
                values = state_values(log_probs.exp(), q_values).detach()  # (batch_size, 1)
                advantages, td_errors = corrected_advantages(
                    q_values.detach(), values, old_log_probs, actions, returns, self.shrinkage
                )
                sampled_advantages = returns - values  # (batch_size, 1)
                sigma = self._next_sigma(log_probs.detach().exp(), advantages, td_errors, sampled_advantages)

                # Policy gradient loss
                if self.policy_gradient == "all-action":
                    policy_loss = all_action_policy_loss(log_probs, advantages / sigma)
                    policy_loss = policy_loss + self.beta * clipped_policy_loss(ratio, td_errors / sigma, clip_range)
                else:
                    policy_loss = clipped_policy_loss(ratio, sampled_advantages / sigma, clip_range)

                # Distance from the policy of the rollout
                kl_loss = kl_divergence(old_log_probs, log_probs)

                # The entropy bonus favors exploration
                entropy_loss = negative_entropy(log_probs)

                # Value loss using the TD(gae_lambda) target
                value_loss = critic_loss(q_values.gather(1, actions), returns)

                loss = policy_loss + self.kl_coef * kl_loss + ent_coef * entropy_loss + self.vf_coef * value_loss

                # Optimization step
                self.policy.optimizer.zero_grad()
                loss.backward()
                # Clip grad norm
                grad_norm = th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)

                allowed = self.policy.joint_actions.allowed(action_masks)
                diagnostics = {
                    "loss": loss,
                    "policy_loss": policy_loss,
                    "value_loss": value_loss,
                    "entropy_loss": entropy_loss,
                    "kl": kl_loss,
                    "clip_fraction": ((ratio - 1).abs() > clip_range).float().mean(),
                    "grad_norm": grad_norm,
                    "sigma": sigma,
                    "state_value": values.mean(),
                    "q_target": returns.mean(),
                    "abs_advantage": mean_size(advantages, allowed),
                    "action_gap": action_gap(q_values.detach(), allowed),
                }
                # One transfer from the device for all of them
                logged = dict(zip(diagnostics, th.stack(list(diagnostics.values())).tolist(), strict=True))
                check_finite(logged)
                self.policy.optimizer.step()
                if self.normalize_advantage:
                    self.sigma = logged["sigma"]

                minibatches.append(logged)

            self._n_updates += 1

        # Logs
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        means = {name: np.mean([logged[name] for logged in minibatches]) for name in minibatches[0]}
        # How far the policy has moved with this rollout: mean over the last epoch, as in PPO
        means["kl"] = np.mean([logged["kl"] for logged in minibatches[-(len(minibatches) // self.n_epochs) :]])
        for name, mean in means.items():
            self.logger.record(f"train/{name}", mean)
        self.logger.record("train/kl_coef", self.kl_coef)
        self.logger.record("train/ent_coef", ent_coef)
        self.logger.record("train/clip_range", clip_range)
        # For the rollout's state values, as in PPO, and for its Q-values of the actions taken
        rollout_q = self.rollout_buffer.swap_and_flatten(self.rollout_buffer.q_values.numpy(force=True))
        actions = self.policy.joint_actions.numbers(th.as_tensor(self.rollout_buffer.actions, device=self.device))
        q_taken = np.take_along_axis(rollout_q, actions.numpy(force=True), axis=-1)
        explained_var = explained_variance(self.rollout_buffer.values.flatten(), self.rollout_buffer.returns.flatten())
        explained_var_q = explained_variance(q_taken.flatten(), self.rollout_buffer.returns.flatten())
        self.logger.record("train/explained_variance", explained_var)
        self.logger.record("train/explained_variance_q", explained_var_q)

    def _next_sigma(
        self, action_probs: th.Tensor, advantages: th.Tensor, td_errors: th.Tensor, sampled_advantages: th.Tensor
    ) -> th.Tensor:
        """
        :param action_probs: ``pi(a|s)``, shape (batch_size, n_actions)
        :param advantages: ``A(s, a)``, shape (batch_size, n_actions)
        :param td_errors: ``R_t - V~(s_t) - A(s_t, a_t)``, shape (batch_size, 1)
        :param sampled_advantages: ``R_t - V~(s_t)``, shape (batch_size, 1)
        :return: the running mean with this minibatch, scalar; ``self.sigma`` follows once the update is made
        """
        if not self.normalize_advantage:
            return th.ones((), device=self.device)
        if self.policy_gradient == "sampled":
            mean_square = sampled_advantages.square().mean()
        else:
            mean_square = (action_probs * advantages.square()).sum(dim=1).mean() + self.beta * td_errors.square().mean()
        sigma = mean_square.sqrt()
        if self.sigma is not None:
            sigma = SIGMA_DECAY * self.sigma + (1 - SIGMA_DECAY) * sigma
        return sigma.clamp(min=self.sigma_min)

    def learn(
        self: SelfQPPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "QPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        use_masking: bool = True,
    ) -> SelfQPPO:
        self.use_masking = use_masking
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
