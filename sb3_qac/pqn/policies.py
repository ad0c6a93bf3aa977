import math
from collections.abc import Callable, Mapping
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_qac.common.masks import MaskablePolicy
from sb3_qac.common.policies import PixelPolicy
from sb3_qac.common.torch_layers import DuelingHead
from sb3_qac.qa2c.policies import ActorCriticQPolicy


class EpsilonGreedyPolicy(MaskablePolicy, PixelPolicy):
    """
    Policy class for Q-learning on rollouts: it takes the action with the largest Q-value, or with the probability
    ``exploration_rate`` any action. The value of a state is ``max_a Q(s, a)``.

    The network is the critic of ``ActorCriticQPolicy``, and starts from the same weights with the same seed.

    :param observation_space: Observation space
    :param action_space: Action space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` (others raise a ``ValueError``)
    :param lr_schedule: Learning rate schedule (could be constant)
    :param net_arch: Layers behind the features extractor, [64, 64] by default, none behind ``NatureCNN``. Of SB3's form with
        two networks, ``vf`` is used.
    :param activation_fn: Activation function
    :param ortho_init: Whether to use or not orthogonal initialization
    :param features_extractor_class: Features extractor to use, or any callable that returns one
    :param features_extractor_kwargs: Keyword arguments
        to pass to the features extractor.
    :param normalize_images: Whether to normalize images or not,
        dividing by 255.0 (True by default)
    :param optimizer_class: The optimizer to use,
        ``th.optim.RAdam`` by default
    :param optimizer_kwargs: Additional keyword arguments,
        excluding the learning rate, to pass to the optimizer
    :param dueling: Whether ``q_net`` is a ``DuelingHead``
    :param use_sde: Has no effect; SB3 passes it
    """

    features_extractor: BaseFeaturesExtractor
    q_net: nn.Linear | DuelingHead
    exploration_rate: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        features_extractor_class: Callable[..., BaseFeaturesExtractor] = FlattenExtractor,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.RAdam,
        optimizer_kwargs: dict[str, Any] | None = None,
        *,
        dueling: bool = False,
        use_sde: bool = False,
    ) -> None:
        arguments: dict[str, Any] = dict(
            activation_fn=activation_fn,
            ortho_init=ortho_init,
            features_extractor_class=features_extractor_class,
            features_extractor_kwargs=features_extractor_kwargs,
            normalize_images=normalize_images,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            dueling=dueling,
        )
        # Only its critic is kept
        actor_critic = ActorCriticQPolicy(observation_space, action_space, lr_schedule, net_arch, **arguments)
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            features_extractor_kwargs,
            normalize_images=normalize_images,
            optimizer_class=optimizer_class,
            # SB3 gives Adam an epsilon of its own
            optimizer_kwargs=actor_critic.optimizer_kwargs,
        )
        self.net_arch = actor_critic.net_arch
        self.activation_fn, self.ortho_init, self.dueling = activation_fn, ortho_init, dueling
        self.features_extractor = actor_critic.features_extractor
        self.mlp_extractor = actor_critic.mlp_extractor.value_net
        self.q_net = actor_critic.q_net
        self.joint_actions = actor_critic.joint_actions
        # A buffer, so that saved models and checkpoints have it
        self.register_buffer("exploration_rate", th.ones(()))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return dict(
            **super()._get_constructor_parameters(),
            lr_schedule=self._dummy_schedule,  # dummy lr schedule, not needed for loading policy alone
            net_arch=self.net_arch,
            activation_fn=self.activation_fn,
            ortho_init=self.ortho_init,
            features_extractor_class=self.features_extractor_class,
            features_extractor_kwargs=self.features_extractor_kwargs,
            optimizer_class=self.optimizer_class,
            optimizer_kwargs=self.optimizer_kwargs,
            dueling=self.dueling,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        # Until it was public, this class was an actor-critic without an actor
        current = {
            name.replace("mlp_extractor.value_net.", "mlp_extractor."): value
            for name, value in state_dict.items()
            if not name.startswith(("pi_features_extractor.", "vf_features_extractor."))
        }
        return super().load_state_dict(current, strict, assign)

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        :param obs: Observation
        :param deterministic: Whether to take greedy actions, instead of epsilon-greedy ones
        :return: action, value of the state (shape (batch_size, 1)), and zeros for the log probability of the action
        """
        q_values, allowed = self.allowed_q_values(obs)
        values, numbers = q_values.max(dim=1)
        if not deterministic:
            explores = th.rand_like(values) < self.exploration_rate
            if allowed is None:
                others = th.randint_like(numbers, q_values.shape[1])
            else:
                others = th.multinomial(allowed.float(), 1).squeeze(1)
            numbers = th.where(explores, others, numbers)
        return self.joint_actions.actions(numbers), values.unsqueeze(1), th.zeros_like(values)

    def allowed_q_values(self, obs: PyTorchObs) -> tuple[th.Tensor, th.Tensor | None]:
        """
        Get the estimated values of the allowed actions given the observations.

        :param obs: Observation
        :return: ``Q(s, a)``, minus infinity for actions that are not allowed, shape (batch_size, n_actions); and which are, of
            the same shape, None for all
        """
        q_values = self.predict_q_values(obs)
        allowed = self._allowed(q_values)
        return q_values if allowed is None else q_values.masked_fill(~allowed, -math.inf), allowed

    def _allowed(self, q_values: th.Tensor) -> th.Tensor | None:
        return self.joint_actions.allowed(self.masks_for(len(q_values)))

    def predict_values(self, obs: PyTorchObs) -> th.Tensor:
        """
        Get the estimated values of the states given the observations.

        :param obs: Observation
        :return: ``max_a Q(s, a)``, shape (batch_size, 1)
        """
        return self.allowed_q_values(obs)[0].max(dim=1, keepdim=True).values

    def predict_q_values(self, obs: PyTorchObs) -> th.Tensor:
        """
        Get the estimated values of all actions given the observations.

        :param obs: Observation
        :return: ``Q(s, a)``, shape (batch_size, n_actions)
        """
        return self.q_net(self.mlp_extractor(self.extract_features(obs, self.features_extractor)))

    def evaluate_all_actions(self, obs: PyTorchObs) -> tuple[th.Tensor, th.Tensor]:
        """
        Evaluate every action according to the epsilon-greedy policy, given the observations.

        :param obs: Observation
        :return: ``Q(s, a)`` and ``log pi(a|s)`` of every action, shape (batch_size, n_actions) each
        """
        q_values = self.predict_q_values(obs)
        allowed = self._allowed(q_values)
        allowed = th.ones_like(q_values, dtype=th.bool) if allowed is None else allowed
        best = q_values.masked_fill(~allowed, -math.inf).argmax(dim=1, keepdim=True)
        greedy = th.zeros_like(q_values).scatter(1, best, 1.0)
        probs = self.exploration_rate * allowed / allowed.sum(dim=1, keepdim=True) + (1 - self.exploration_rate) * greedy
        return q_values, probs.log()

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self(observation, deterministic)[0]


class EpsilonGreedyCnnPolicy(EpsilonGreedyPolicy):
    """
    The same for images: the Nature CNN, then the head.

    :param observation_space: Observation space, images
    :param action_space: Action space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` (others raise a ``ValueError``)
    :param lr_schedule: Learning rate schedule (could be constant)
    :param features_extractor_class: Features extractor to use, or any callable that returns one
    :param kwargs: Further arguments of ``EpsilonGreedyPolicy``
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        features_extractor_class: Callable[..., BaseFeaturesExtractor] = NatureCNN,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            observation_space, action_space, lr_schedule, features_extractor_class=features_extractor_class, **kwargs
        )


class EpsilonGreedyMultiInputPolicy(EpsilonGreedyPolicy):
    """
    The same for dict observations.

    :param observation_space: Observation space, ``Dict``
    :param action_space: Action space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` (others raise a ``ValueError``)
    :param lr_schedule: Learning rate schedule (could be constant)
    :param features_extractor_class: Features extractor to use, or any callable that returns one
    :param kwargs: Further arguments of ``EpsilonGreedyPolicy``
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        features_extractor_class: Callable[..., BaseFeaturesExtractor] = CombinedExtractor,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            observation_space, action_space, lr_schedule, features_extractor_class=features_extractor_class, **kwargs
        )


MlpPolicy = EpsilonGreedyPolicy
CnnPolicy = EpsilonGreedyCnnPolicy
MultiInputPolicy = EpsilonGreedyMultiInputPolicy
