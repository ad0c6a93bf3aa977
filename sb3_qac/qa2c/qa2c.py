from typing import Any, ClassVar, Literal, TypeVar

import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import explained_variance

from sb3_qac.common.buffers import MaskableRolloutBuffer
from sb3_qac.common.checks import (
    check_action_space,
    check_choice,
    check_finite,
    check_integer,
    check_max_grad_norm,
    check_number,
    check_observation_space,
    check_policy_class,
)
from sb3_qac.common.losses import (
    action_gap,
    all_action_policy_loss,
    critic_loss,
    mean_size,
    negative_entropy,
    sampled_policy_loss,
    shrink_q_values,
    state_values,
)
from sb3_qac.common.masks import MaskableOnPolicyAlgorithm
from sb3_qac.common.schedules import check_schedule
from sb3_qac.qa2c.policies import ActorCriticQCnnPolicy, ActorCriticQPolicy, MultiInputActorCriticQPolicy

SelfQA2C = TypeVar("SelfQA2C", bound="QA2C")


def _with_rms_prop(policy_kwargs: dict[str, Any], eps: float) -> dict[str, Any]:
    """
    :param policy_kwargs: Arguments of a policy
    :param eps: RMSProp epsilon
    :return: the same, with A2C's optimizer unless they name one
    """
    if "optimizer_class" in policy_kwargs:
        return dict(policy_kwargs)
    optimizer_kwargs = {"alpha": 0.99, "eps": eps, **(policy_kwargs.get("optimizer_kwargs") or {})}
    return {**policy_kwargs, "optimizer_class": RMSpropTFLike, "optimizer_kwargs": optimizer_kwargs}


class QA2C(MaskableOnPolicyAlgorithm):
    """
    Q Advantage Actor-Critic (QA2C): A2C with an action-value critic and the all-action policy gradient.

    The defaults are for Atari games. A small task needs other settings::

        env = make_vec_env("CartPole-v1", n_envs=8)
        model = QA2C("MlpPolicy", env, learning_rate="lin_5e-3", pg_coef=1.0, ent_coef=0.0, beta=1.0)

    Paper: Mean Actor-Critic, Allen et al. 2017, https://arxiv.org/abs/1709.00503;
    the all-action gradient is from Sutton et al. 2001, "Comparing policy-gradient algorithms".

    Differences from A2C: the critic is Q(s, a), learned from the n-step returns R_t of the actions taken, and the actor learns
    from all actions at once::

        loss = - pg_coef  * mean_s [ sum_a pi(a|s) w(s, a) ]
               - beta     * pg_coef * mean_s [ log pi(a_t|s_t) (R_t - Q(s_t, a_t)) ]
               - ent_coef * mean_s [ entropy of pi(.|s) ]
               + vf_coef  * mean_s [ (R_t - Q(s_t, a_t))^2 ]

    w = Q(s, a), or Q(s, a) - V~(s) with the baseline, where V~(s) = sum_a pi(a|s) Q(s, a). w and the factor
    R_t - Q(s_t, a_t) of the correction are constants to the gradient. ``beta`` and ``shrinkage`` are 0 by default. With
    ``shrinkage``, the Q of both is V~ + (Q - V~) pi / (pi + shrinkage).

    The baseline cannot change the gradient of this actor loss, because sum_a pi(a|s) is 1. It acts on the sampled estimator.

    The defaults of ``learning_rate``, ``ent_coef`` and the optimizer differ too. To compare the losses alone, give both
    algorithms the same ones, and QA2C ``pg_coef=1``. With ``use_rms_prop=False`` both have Adam.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy, or a subclass of ActorCriticQPolicy)
    :param env: The environment to learn from (if registered in Gym, can be str), with ``Discrete``, ``MultiDiscrete``
        or ``MultiBinary`` actions
    :param learning_rate: The learning rate, it can be a function
        of the current progress remaining (from 1 to 0), or "lin_1e-3", RL Zoo's name of the schedule that falls linearly from
        1e-3 to 0
    :param n_steps: The number of steps to run for each environment per update
        (i.e. batch size is n_steps * n_env where n_env is number of environment copies running in parallel)
    :param gamma: Discount factor, between 0 and 1
    :param gae_lambda: Factor for trade-off of bias vs variance of the critic's targets, TD(lambda), between 0 and 1.
        At 1 the targets are the n-step returns.
    :param ent_coef: Entropy coefficient for the loss calculation, it can be a schedule as ``learning_rate``
    :param vf_coef: Value function coefficient for the loss calculation
    :param max_grad_norm: The maximum value for the gradient clipping, None or infinity for no clipping
    :param rms_prop_eps: RMSProp epsilon. It stabilizes square root computation in denominator
        of RMSProp update
    :param use_rms_prop: Whether to use RMSprop in TensorFlow's manner (``RMSpropTFLike``, default) or Adam as optimizer
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
    :param pg_coef: Policy gradient coefficient for the loss calculation
    :param baseline: Whether the actor's weights are the advantages Q - V~ instead of Q
    :param policy_gradient: Estimator of the policy gradient: "all-action", or "sampled" for the classic Q actor-critic, which
        weights the log probability of the action taken
    :param beta: Weight of the sampled correction of beta-LOO (Gruslys et al. 2017, https://arxiv.org/abs/1704.04651):
        the actor also maximizes beta * log pi(a_t|s_t) * (R_t - Q(s_t, a_t)). At 0 the gradient is as good as the critic. At 1
        its only bias is A2C's, from the bootstrap in R_t. Only for "all-action".
    :param shrinkage: Probability of an action at which its advantage in the sum is halved, at least 0. The critic knows little
        of actions that are seldom taken. 0 trusts it for all actions alike. With ``beta=1``, the larger, the closer to A2C's
        estimator, and the expected gradient is the same for every value. Only for "all-action".
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: for an argument or a space that cannot be used; the message says what to use instead
    """

    policy: ActorCriticQPolicy
    rollout_buffer: MaskableRolloutBuffer
    rollout_buffer_base = MaskableRolloutBuffer
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticQPolicy,
        "CnnPolicy": ActorCriticQCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticQPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticQPolicy],
        env: GymEnv | str,
        learning_rate: float | str | Schedule = 1.5e-3,
        n_steps: int = 5,
        gamma: float = 0.99,
        gae_lambda: float = 1.0,
        ent_coef: float | str | Schedule = 0.001,
        vf_coef: float = 0.5,
        max_grad_norm: float | None = 0.5,
        rms_prop_eps: float = 1e-5,
        use_rms_prop: bool = True,
        # A2C's order ends here: its next argument is `use_sde`
        *,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        pg_coef: float = 0.1,
        baseline: bool = False,
        policy_gradient: Literal["all-action", "sampled"] = "all-action",
        beta: float = 0.0,
        shrinkage: float = 0.0,
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
            policy_kwargs=dict(policy_kwargs or {}),
            verbose=verbose,
            device=device,
            seed=seed,
            _init_setup_model=False,
        )

        self.pg_coef = pg_coef
        self.baseline = baseline
        self.policy_gradient = policy_gradient
        self.beta = beta
        self.shrinkage = shrinkage

        # Update optimizer inside the policy if we want to use RMSProp
        # (original implementation) rather than Adam
        if use_rms_prop:
            self.policy_kwargs = _with_rms_prop(self.policy_kwargs, rms_prop_eps)

        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        # Checked here and not in the constructor, so that ``load(path, beta=-1)`` is checked as well
        check_action_space(self.action_space)
        check_policy_class(self.policy_class, ActorCriticQPolicy, self.policy_aliases)
        check_observation_space(self.observation_space, issubclass(self.policy_class, MultiInputActorCriticQPolicy))
        for name in ("pg_coef", "vf_coef", "beta", "shrinkage"):
            check_number(name, getattr(self, name))
        check_schedule("ent_coef", self.ent_coef)
        self.max_grad_norm = check_max_grad_norm(self.max_grad_norm)
        for name in ("gamma", "gae_lambda"):
            check_number(name, getattr(self, name), maximum=1)
        check_integer("n_steps", self.n_steps, minimum=1)
        check_choice("baseline", self.baseline, (False, True))
        check_choice("policy_gradient", self.policy_gradient, ("all-action", "sampled"))
        for name in ("beta", "shrinkage") if self.policy_gradient == "sampled" else ():
            if getattr(self, name) > 0:
                raise ValueError(
                    f"`{name}` ({getattr(self, name)}) is for policy_gradient='all-action' and cannot go with 'sampled'. "
                    f"Set `{name}=0`, or `policy_gradient='all-action'`."
                )
        super()._setup_model()

    def _maybe_recommend_cpu(self, mlp_class_name: str = ActorCriticQPolicy.__name__) -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def train(self) -> None:
        """
        Update policy using the currently gathered
        rollout buffer (one gradient step over whole data).
        """
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)

        # Update optimizer learning rate
        self._update_learning_rate(self.policy.optimizer)
        # Compute current entropy coefficient
        ent_coef = self._current_ent_coef()

        # This will only loop once (get all data in one go)
        for rollout_data in self.rollout_buffer.get(batch_size=None):
            actions = self.policy.joint_actions.numbers(rollout_data.actions)  # (batch_size, 1)
            returns = rollout_data.returns.unsqueeze(1)  # (batch_size, 1)

            # The weights have not changed since the rollout, so these are also its Q-values
            action_masks = rollout_data.action_masks if self._is_masked else None
            with self.policy.masked(action_masks):
                q_values, log_probs = self.policy.evaluate_all_actions(rollout_data.observations)  # (batch_size, n_actions)
            q_taken, log_prob_taken = q_values.gather(1, actions), log_probs.gather(1, actions)  # (batch_size, 1)
            values = state_values(log_probs.exp(), q_values).detach()  # (batch_size, 1)
            # The critic as the actor sees it. Without shrinkage it is Q
            shrunk_q_values = shrink_q_values(q_values.detach(), values, log_probs.detach(), self.shrinkage)
            advantages = shrunk_q_values - values  # (batch_size, n_actions)

            # Policy gradient loss
            weights = advantages if self.baseline else shrunk_q_values
            if self.policy_gradient == "all-action":
                policy_loss = all_action_policy_loss(log_probs, weights)
                td_errors = returns - shrunk_q_values.gather(1, actions)  # (batch_size, 1)
                policy_loss = policy_loss + self.beta * sampled_policy_loss(log_prob_taken, td_errors)
            else:
                policy_loss = sampled_policy_loss(log_prob_taken, weights.gather(1, actions))

            # Value loss using the n-step returns
            value_loss = critic_loss(q_taken, returns)

            # The entropy bonus favors exploration
            entropy_loss = negative_entropy(log_probs)

            loss = self.pg_coef * policy_loss + ent_coef * entropy_loss + self.vf_coef * value_loss

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
                "grad_norm": grad_norm,
                "state_value": values.mean(),
                "q_target": returns.mean(),
                "abs_advantage": mean_size(advantages, allowed),
                "action_gap": action_gap(q_values.detach(), allowed),
            }
            # One transfer from the device for all of them
            logged = dict(zip(diagnostics, th.stack(list(diagnostics.values())).tolist(), strict=True))
            check_finite(logged)
            self.policy.optimizer.step()

        self._n_updates += 1
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, value in logged.items():
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/ent_coef", ent_coef)
        # For the state values, as in A2C, and for the Q-values of the actions taken
        explained_var = explained_variance(self.rollout_buffer.values.flatten(), self.rollout_buffer.returns.flatten())
        explained_var_q = explained_variance(q_taken.numpy(force=True).flatten(), returns.numpy(force=True).flatten())
        self.logger.record("train/explained_variance", explained_var)
        self.logger.record("train/explained_variance_q", explained_var_q)

    @classmethod
    def load(cls: type[SelfQA2C], path: Any, *args: Any, **kwargs: Any) -> SelfQA2C:
        """
        Load the model from a zip-file.

        :param path: path to the file (or a file-like) where to load the agent from
        :param args: further arguments of SB3's ``load``: ``env``, ``device``, ``custom_objects``, ``print_system_info`` and
            ``force_reset``
        :param kwargs: the same by name, and arguments to change the model when loading. ``policy_kwargs`` are those that the
            constructor was given, or those in the file, to which the optimizer was added.
        :return: new model instance with loaded parameters
        :raises ValueError: if the agent was made with other ``policy_kwargs``
        """
        is_given = "policy_kwargs" in kwargs
        given = kwargs.pop("policy_kwargs", None) or {}
        model = super().load(path, *args, **kwargs)
        stored = model.policy_kwargs
        eps = (stored.get("optimizer_kwargs") or {}).get("eps", 0.0)
        if is_given and stored not in (given, _with_rms_prop(given, eps)):
            raise ValueError(f"The agent in {path} has the policy_kwargs {stored}, but {given} were given: leave them out.")
        return model

    def learn(
        self: SelfQA2C,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 100,
        tb_log_name: str = "QA2C",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        use_masking: bool = True,
    ) -> SelfQA2C:
        self.use_masking = use_masking
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
