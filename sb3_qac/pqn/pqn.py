from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import LinearSchedule, explained_variance

from sb3_qac.common.buffers import MaskableRolloutBuffer
from sb3_qac.common.checks import (
    check_action_space,
    check_finite,
    check_integer,
    check_max_grad_norm,
    check_number,
    check_observation_space,
    check_policy_class,
    warn_of_truncated_minibatch,
)
from sb3_qac.common.losses import critic_loss
from sb3_qac.common.masks import MaskableOnPolicyAlgorithm
from sb3_qac.pqn.policies import EpsilonGreedyCnnPolicy, EpsilonGreedyMultiInputPolicy, EpsilonGreedyPolicy

SelfPQN = TypeVar("SelfPQN", bound="PQN")


class PQN(MaskableOnPolicyAlgorithm):
    """
    Parallelised Q-Network (PQN): Q-learning on rollouts, without a replay buffer and without a target network.

    Paper: Gallici et al. 2024, https://arxiv.org/abs/2407.04811

    Each rollout is played epsilon-greedily, and is used for several epochs of minibatches::

        loss = mean [ (R_t - Q(s_t, a_t))^2 ],   R_t = r_t + gamma [lambda R_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)]

    The targets R_t, Q(lambda), are those of SB3's rollout buffer with ``V(s) = max_a Q(s, a)``, computed once per rollout. As
    in the paper and in CleanRL, the optimizer is RAdam and the rate of exploration falls linearly.

    Differences from the paper's code and CleanRL's: an episode cut by a time limit bootstraps from its last observation, as
    always in SB3; there it ends as any other. Their networks have layer normalization, which is an option of the features
    extractors here and normalizes all units of a layer, with a weight for each channel (CleanRL: for each unit); the paper's
    code normalizes the channels of convolutions at each position on its own. Q starts smaller than CleanRL's. The
    paper's code halves the squared error, so that its gradients are clipped at twice the norm. CleanRL's rate of exploration
    falls at every step, here it is that of the rollout's first step. The defaults are CleanRL's for Atari games with 8
    environments, but for the learning rate, which falls to 0 there, and layer normalization; ``hyperparams/pqn.yml`` has both.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy, or a subclass of EpsilonGreedyPolicy)
    :param env: The environment to learn from (if registered in Gym, can be str), with ``Discrete``, ``MultiDiscrete``
        or ``MultiBinary`` actions
    :param learning_rate: The learning rate, it can be a function
        of the current progress remaining (from 1 to 0), or "lin_1e-3", RL Zoo's name of the schedule that falls linearly from
        1e-3 to 0
    :param n_steps: The number of steps to run for each environment per update
        (i.e. rollout buffer size is n_steps * n_envs where n_envs is number of environment copies running in parallel)
    :param batch_size: Minibatch size. None (default) for 256, or for the whole rollout if it is smaller
    :param n_epochs: Number of epochs for each rollout
    :param gamma: Discount factor, between 0 and 1
    :param gae_lambda: lambda of the targets, between 0 and 1
    :param exploration_fraction: fraction of the run over which the exploration rate is reduced, above 0. For a constant rate,
        set the two below to it
    :param exploration_initial_eps: initial probability of a random action
    :param exploration_final_eps: final probability of a random action
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
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: for an argument or a space that cannot be used; the message says what to use instead
    """

    policy: EpsilonGreedyPolicy  # type: ignore[assignment]
    rollout_buffer: MaskableRolloutBuffer
    rollout_buffer_base = MaskableRolloutBuffer
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": EpsilonGreedyPolicy,
        "CnnPolicy": EpsilonGreedyCnnPolicy,
        "MultiInputPolicy": EpsilonGreedyMultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[EpsilonGreedyPolicy],
        env: GymEnv | str,
        learning_rate: float | str | Schedule = 2.5e-4,
        n_steps: int = 128,
        batch_size: int | None = None,
        n_epochs: int = 4,
        gamma: float = 0.99,
        gae_lambda: float = 0.65,
        # PPO's order ends here: its next argument is `clip_range`
        *,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.01,
        max_grad_norm: float | None = 10.0,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,
            learning_rate=learning_rate,  # type: ignore[arg-type]
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=0.0,
            vf_coef=1.0,
            max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
            use_sde=False,
            sde_sample_freq=-1,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )

        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.exploration_fraction = exploration_fraction
        self.exploration_initial_eps = exploration_initial_eps
        self.exploration_final_eps = exploration_final_eps

        if _init_setup_model:
            self._setup_model()
            if batch_size is not None:
                warn_of_truncated_minibatch(batch_size, n_steps, self.n_envs)

    def _setup_model(self) -> None:
        # Not in the constructor, so that ``load(path, gamma=2)`` is checked as well
        check_action_space(self.action_space)
        check_policy_class(self.policy_class, EpsilonGreedyPolicy, self.policy_aliases)
        check_observation_space(self.observation_space, issubclass(self.policy_class, EpsilonGreedyMultiInputPolicy))
        for name in ("gamma", "gae_lambda", "exploration_initial_eps", "exploration_final_eps"):
            check_number(name, getattr(self, name), maximum=1)
        check_number("exploration_fraction", self.exploration_fraction, maximum=1, above=True)
        for name in ("n_steps", "n_epochs"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.batch_size is None:
            self.batch_size = min(256, self.n_steps * self.n_envs)
        check_integer("batch_size", self.batch_size, minimum=1)
        self.max_grad_norm = check_max_grad_norm(self.max_grad_norm)
        super()._setup_model()

    @property
    def exploration_rate(self) -> float:
        """Probability of a random action in the last rollout, 1 before the first; it can be set for ``predict``"""
        return self.policy.exploration_rate.item()

    @exploration_rate.setter
    def exploration_rate(self, rate: float) -> None:
        check_number("exploration_rate", rate, maximum=1)
        self.policy.exploration_rate.fill_(rate)

    def _maybe_recommend_cpu(self, mlp_class_name: str = EpsilonGreedyPolicy.__name__) -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        # From the progress of the run alone, so that a resumed run has the same
        initial, final = self.exploration_initial_eps, self.exploration_final_eps
        # Before the first rollout of a `learn`, SB3 still has the progress of the one before
        self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
        rate = LinearSchedule(initial, final, self.exploration_fraction)(self._current_progress_remaining)
        self.policy.exploration_rate.fill_(rate)
        goes_on = super().collect_rollouts(*args, **kwargs)
        # Not before: an evaluation writes the rows that are there
        self.logger.record("rollout/exploration_rate", rate)
        return goes_on

    def train(self) -> None:
        """
        Update policy using the currently gathered rollout buffer.
        """
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        # Update optimizer learning rate
        self._update_learning_rate(self.policy.optimizer)

        minibatches = []
        for _ in range(self.n_epochs):
            # Do a complete pass on the rollout buffer
            for rollout_data in self.rollout_buffer.get(self.batch_size):
                with self.policy.masked(rollout_data.action_masks if self._is_masked else None):
                    q_values = self.policy.allowed_q_values(rollout_data.observations)[0]  # (batch_size, n_actions)
                actions = self.policy.joint_actions.numbers(rollout_data.actions)  # (batch_size, 1)
                returns = rollout_data.returns.unsqueeze(1)  # (batch_size, 1)
                loss = critic_loss(q_values.gather(1, actions), returns)

                # Optimization step
                self.policy.optimizer.zero_grad()
                loss.backward()
                # Clip grad norm
                grad_norm = th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)

                diagnostics = {
                    "value_loss": loss,
                    "grad_norm": grad_norm,
                    "state_value": q_values.detach().max(dim=1).values.mean(),
                    "q_target": returns.mean(),
                }
                # One transfer from the device for all of them
                logged = dict(zip(diagnostics, th.stack(list(diagnostics.values())).tolist(), strict=True))
                check_finite(logged)
                self.policy.optimizer.step()
                minibatches.append(logged)

            self._n_updates += 1

        # Logs
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name in minibatches[0]:
            self.logger.record(f"train/{name}", np.mean([logged[name] for logged in minibatches]))
        explained_var = explained_variance(self.rollout_buffer.values.flatten(), self.rollout_buffer.returns.flatten())
        self.logger.record("train/explained_variance", explained_var)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = True,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Get the actions of the policy. Unlike in other algorithms of SB3, they are greedy by default. SB3's
        ``evaluate_policy`` and ``EvalCallback`` ask for greedy ones too. On Atari games RL Zoo asks for epsilon-greedy ones,
        in the evaluations of ``train`` and in ``enjoy``, which has ``--deterministic`` for greedy ones. ``policy.predict`` has
        SB3's default.

        :param observation: the input observation
        :param state: has no effect
        :param episode_start: has no effect
        :param deterministic: False for epsilon-greedy actions, with the current exploration rate of the run
        :param action_masks: Which actions are allowed, of one observation or of each; None for all
        :return: the actions, and ``state``
        """
        return super().predict(observation, state, episode_start, deterministic, action_masks)

    def learn(
        self: SelfPQN,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "PQN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        use_masking: bool = True,
    ) -> SelfPQN:
        self.use_masking = use_masking
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
