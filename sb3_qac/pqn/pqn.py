import math
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, PyTorchObs, Schedule
from stable_baselines3.common.utils import LinearSchedule, explained_variance
from torch import nn

from sb3_qac.common.checks import (
    check_action_space,
    check_finite,
    check_integer,
    check_max_grad_norm,
    check_number,
    check_observation_space,
    check_policy_class,
)
from sb3_qac.common.losses import critic_loss
from sb3_qac.common.masks import MaskableOnPolicyAlgorithm
from sb3_qac.qa2c.policies import ActorCriticQCnnPolicy, ActorCriticQPolicy, MultiInputActorCriticQPolicy

SelfPQN = TypeVar("SelfPQN", bound="PQN")


class EpsilonGreedyPolicy(ActorCriticQPolicy):
    """
    The critic of ``ActorCriticQPolicy`` without the actor. The value of a state is ``max_a Q(s, a)``.

    :param args: Arguments of ``ActorCriticQPolicy``
    :param kwargs: Arguments of ``ActorCriticQPolicy``; the default optimizer is RAdam
    """

    exploration_rate: th.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"optimizer_class": th.optim.RAdam, **kwargs})

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        del self.action_net
        self.mlp_extractor.policy_net = nn.Sequential()
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]
        # A buffer, so that saved models and checkpoints have it
        self.register_buffer("exploration_rate", th.ones(()))

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        :param obs: Observation
        :param deterministic: Whether to take greedy actions, instead of epsilon-greedy ones
        :return: action, value of the state (shape (batch_size, 1)), and zeros for the log probability of the action
        """
        with self.masked(self.masks_of_rollout()):
            return self._choose(obs, deterministic)

    def _choose(self, obs: PyTorchObs, deterministic: bool) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        q_values, allowed = self._allowed_q_values(obs)
        values, numbers = q_values.max(dim=1)
        if not deterministic:
            explores = th.rand_like(values) < self.exploration_rate
            if allowed is None:
                random_numbers = th.randint_like(numbers, q_values.shape[1])
            else:
                random_numbers = th.multinomial(allowed.float(), 1).squeeze(1)
            numbers = th.where(explores, random_numbers, numbers)
        return self.joint_actions.actions(numbers), values.unsqueeze(1), th.zeros_like(values)

    def _allowed_q_values(self, obs: PyTorchObs) -> tuple[th.Tensor, th.Tensor | None]:
        """:return: ``Q(s, a)``, minus infinity for actions that are not allowed; and which are, None for all"""
        q_values = self.predict_q_values(obs)
        allowed = self.joint_actions.allowed(self.masks_for(len(q_values)))
        return q_values if allowed is None else q_values.masked_fill(~allowed, -math.inf), allowed

    def predict_values(self, obs: PyTorchObs) -> th.Tensor:
        with self.masked(self.masks_of_rollout(of_values=True)):
            return self._allowed_q_values(obs)[0].max(dim=1, keepdim=True).values

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self._choose(observation, deterministic)[0]


class EpsilonGreedyCnnPolicy(EpsilonGreedyPolicy, ActorCriticQCnnPolicy):  # type: ignore[misc]
    """The same for images."""


class EpsilonGreedyMultiInputPolicy(EpsilonGreedyPolicy, MultiInputActorCriticQPolicy):  # type: ignore[misc]
    """The same for dict observations."""


class PQN(MaskableOnPolicyAlgorithm):
    """
    Parallelised Q-Network (PQN): Q-learning on rollouts, without a replay buffer and without a target network.

    Paper: Gallici et al. 2024, https://arxiv.org/abs/2407.04811

    SB3's rollout buffer computes its targets Q(lambda). With ``V(s) = max_a Q(s, a)``, the buffer's TD(lambda) returns are
    ``R_t = r_t + gamma [lambda R_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)]``. As in the paper, the optimizer is RAdam. The
    paper's network has layer normalisation, which is an option of the features extractors. The defaults are CleanRL's for
    Atari games with 8 environments, but for the learning rate, which falls to 0 there, and the network.
    ``hyperparams/pqn.yml`` has both. Layers are normalised over all their units; the paper's code normalises convolutions over
    their channels, at each position on its own. It also halves the squared error, so that its gradients are clipped at twice
    the norm.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy)
    :param env: The environment to learn from, with ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` actions
    :param learning_rate: The learning rate, it can be a function of the current progress remaining (from 1 to 0)
    :param n_steps: The number of steps to run for each environment per update
    :param batch_size: Minibatch size
    :param n_epochs: Number of epochs for each rollout
    :param gamma: Discount factor
    :param gae_lambda: lambda of the targets
    :param exploration_fraction: fraction of the training over which the exploration rate is reduced
    :param exploration_initial_eps: initial probability of a random action
    :param exploration_final_eps: final probability of a random action
    :param max_grad_norm: The maximum value for the gradient clipping, None or infinity for no clipping
    :param stats_window_size: Window size for the rollout logging
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: Verbosity level: 0 for no output, 1 for info messages, 2 for debug messages
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: for an argument or a space that cannot be used
    """

    policy: EpsilonGreedyPolicy
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": EpsilonGreedyPolicy,
        "CnnPolicy": EpsilonGreedyCnnPolicy,
        "MultiInputPolicy": EpsilonGreedyMultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[EpsilonGreedyPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 2.5e-4,
        n_steps: int = 128,
        batch_size: int = 256,
        n_epochs: int = 4,
        gamma: float = 0.99,
        gae_lambda: float = 0.65,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.01,
        max_grad_norm: float | None = 10.0,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.exploration_fraction = exploration_fraction
        self.exploration_initial_eps = exploration_initial_eps
        self.exploration_final_eps = exploration_final_eps
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=0.0,
            vf_coef=1.0,
            max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )

    def _setup_model(self) -> None:
        check_action_space(self.action_space)
        check_policy_class(self.policy_class, EpsilonGreedyPolicy, self.policy_aliases)
        check_observation_space(self.observation_space, issubclass(self.policy_class, MultiInputActorCriticQPolicy))
        for name in ("gamma", "gae_lambda", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps"):
            check_number(name, getattr(self, name), maximum=1)
        for name in ("n_steps", "batch_size", "n_epochs"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.exploration_fraction == 0:
            raise ValueError(
                "`exploration_fraction` must be above 0, but 0 was given. For a constant rate, set "
                "`exploration_initial_eps` and `exploration_final_eps` to it."
            )
        self.max_grad_norm = check_max_grad_norm(self.max_grad_norm)
        super()._setup_model()

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        # From the progress of the training alone, so that a resumed training has the same
        initial, final = self.exploration_initial_eps, self.exploration_final_eps
        # Before the first rollout of a `learn`, SB3 still has the progress of the one before
        self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
        rate = LinearSchedule(initial, final, self.exploration_fraction)(self._current_progress_remaining)
        self.policy.exploration_rate.fill_(rate)
        self.logger.record("rollout/exploration_rate", rate)
        return super().collect_rollouts(*args, **kwargs)

    def train(self) -> None:
        """
        Update policy using the currently gathered rollout buffer.
        """
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        # Update optimizer learning rate
        self._update_learning_rate(self.policy.optimizer)

        losses, grad_norms = [], []
        for _ in range(self.n_epochs):
            # Do a complete pass on the rollout buffer
            for rollout_data in self.rollout_buffer.get(self.batch_size):
                q_values = self.policy.predict_q_values(rollout_data.observations)  # (batch_size, n_actions)
                actions = self.policy.joint_actions.numbers(rollout_data.actions)  # (batch_size, 1)
                q_taken = q_values.gather(1, actions)  # (batch_size, 1)
                loss = critic_loss(q_taken, rollout_data.returns.unsqueeze(1))

                # Optimization step
                self.policy.optimizer.zero_grad()
                loss.backward()
                # Clip grad norm
                grad_norms.append(th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm).item())
                losses.append(loss.item())
                check_finite({"value_loss": losses[-1]})
                self.policy.optimizer.step()
            self._n_updates += 1

        # Logs
        explained_var = explained_variance(self.rollout_buffer.values.flatten(), self.rollout_buffer.returns.flatten())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/value_loss", np.mean(losses))
        self.logger.record("train/grad_norm", np.mean(grad_norms))
        self.logger.record("train/explained_variance", explained_var)

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
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
