from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn
from torch.nn import functional as F

from sb3_qac.common.actions import JointActions, JointDistribution
from sb3_qac.common.checks import check_action_space, check_choice
from sb3_qac.common.losses import state_values
from sb3_qac.common.masks import MaskablePolicy
from sb3_qac.common.policies import PixelPolicy
from sb3_qac.common.torch_layers import DuelingHead, default_net_arch


# `PixelPolicy` is named last, so that the `super()` of SB3's policy finds its `extract_features`
class ActorCriticQPolicy(MaskablePolicy, ActorCriticPolicy, PixelPolicy):  # type: ignore[misc]
    """
    Policy class for actor-critics with an action-value critic (has both policy and Q-value prediction).

    It is SB3's ``ActorCriticPolicy`` with a head of one value per action, ``q_net``, instead of one value per state. SB3's
    rollout buffer bootstraps from the value of a state, which is the critic's mean under the policy: ``V~(s) = sum_a pi(a|s)
    Q(s, a)``. With the same seed, the trunk and the actor start from the same weights as in A2C.

    :param observation_space: Observation space
    :param action_space: Action space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` (others raise a ``ValueError``)
    :param lr_schedule: Learning rate schedule (could be constant)
    :param net_arch: The specification of the policy and value networks. ``vf`` is the critic's.
    :param activation_fn: Activation function
    :param ortho_init: Whether to use or not orthogonal initialization
    :param features_extractor_class: Features extractor to use, or any callable that returns one
        (with ``normalize_images=False`` SB3 takes classes only).
    :param features_extractor_kwargs: Keyword arguments
        to pass to the features extractor.
    :param share_features_extractor: If True, the features extractor is shared between the actor and the critic.
    :param normalize_images: Whether to normalize images or not,
        dividing by 255.0 (True by default)
    :param optimizer_class: The optimizer to use,
        ``th.optim.Adam`` by default
    :param optimizer_kwargs: Additional keyword arguments,
        excluding the learning rate, to pass to the optimizer
    :param dueling: Whether ``q_net`` is a ``DuelingHead``
    :param kwargs: Arguments of ``ActorCriticPolicy`` for continuous actions, such as ``log_std_init``.
        SB3 passes them, and files of saved policies contain them; they have no effect here. But SB3 takes neither
        ``use_sde=True`` nor ``squash_output=True`` with ``Discrete`` actions.
    """

    q_net: nn.Linear | DuelingHead
    # While ``keep_evaluations`` is active: what it returns
    _evaluations: list[tuple[th.Tensor, th.Tensor]] | None = None

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
        share_features_extractor: bool = True,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        *,
        dueling: bool = False,
        **kwargs: Any,
    ) -> None:
        check_action_space(action_space)
        if isinstance(observation_space, spaces.Dict) and features_extractor_class is FlattenExtractor:
            raise ValueError(f"{observation_space} needs 'MultiInputPolicy', or a `features_extractor_class` that takes it.")
        check_choice("dueling", dueling, (False, True))
        # Set first: the constructor of SB3's policy calls ``_build``
        self.dueling = dueling
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=default_net_arch(net_arch, features_extractor_class),
            activation_fn=activation_fn,
            ortho_init=ortho_init,
            features_extractor_class=features_extractor_class,
            features_extractor_kwargs=features_extractor_kwargs,
            share_features_extractor=share_features_extractor,
            normalize_images=normalize_images,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            **kwargs,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        """
        Create the networks and the optimizer.

        :param lr_schedule: Learning rate schedule, lr_schedule(1) is the initial learning rate
        """
        super()._build(lr_schedule)
        del self.value_net
        self.joint_actions = JointActions(self.action_space)
        if not isinstance(self.action_space, spaces.Discrete):
            self.action_dist = JointDistribution(self.joint_actions)
        head = DuelingHead if self.dueling else nn.Linear
        self.q_net = head(self.mlp_extractor.latent_dim_vf, self.joint_actions.n)
        if self.ortho_init:
            self.q_net.apply(partial(self.init_weights, gain=1))
        # The optimizer that SB3 made holds the parameters of the removed head
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        # SB3 leaves the first one out; without it, separate trunks could not be loaded again
        data.update(share_features_extractor=self.share_features_extractor, dueling=self.dueling)
        return data

    def _actor_critic(self, obs: PyTorchObs) -> tuple[Distribution, th.Tensor, th.Tensor]:
        """
        :param obs: Observation
        :return: the action distribution, then ``Q(s, a)`` and ``log pi(a|s)``, shape (batch_size, n_actions) each
        """
        features = self.extract_features(obs)
        if self.share_features_extractor:
            latent_pi, latent_vf = self.mlp_extractor(features)
        else:
            pi_features, vf_features = features
            latent_pi = self.mlp_extractor.forward_actor(pi_features)
            latent_vf = self.mlp_extractor.forward_critic(vf_features)
        distribution: Any = self._get_action_dist_from_latent(latent_pi)
        # ``Categorical`` normalizes its logits: they are the log probabilities
        return distribution, self.q_net(latent_vf), distribution.distribution.logits

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        Forward pass in all the networks (actor and critic)

        :param obs: Observation
        :param deterministic: Whether to sample or use deterministic actions
        :return: action, value of the state (``V~``, shape (batch_size, 1)) and log probability of the action
        """
        _, q_values, log_probs = self._actor_critic(obs)
        # Compiled code would be compiled again each time that the list has grown
        if not th.compiler.is_compiling() and self._evaluations is not None:
            self._evaluations.append((q_values, log_probs))
        # As SB3's distribution of one component does; for several it would draw each, and compute the log probability anew
        probs = F.softmax(log_probs, dim=1)
        numbers = probs.argmax(dim=1, keepdim=True) if deterministic else th.multinomial(probs, 1)
        actions = self.joint_actions.actions(numbers.squeeze(1))
        return actions, state_values(log_probs.exp(), q_values), log_probs.gather(1, numbers).squeeze(1)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made within ``keep_evaluations`` would never stop keeping them
        return {**super().__getstate__(), "_evaluations": None}

    @contextmanager
    def keep_evaluations(self) -> Iterator[list[tuple[th.Tensor, th.Tensor]]]:
        """
        Context manager: while active, ``forward`` keeps what it computes for every action. It still returns only the action
        taken.

        :return: ``Q(s, a)`` and ``log pi(a|s)`` of each call, shape (batch_size, n_actions) each
        """
        self._evaluations = []
        try:
            yield self._evaluations
        finally:
            self._evaluations = None

    def evaluate_actions(self, obs: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        Evaluate actions according to the current policy, given the observations.

        :param obs: Observation
        :param actions: Actions, shape (batch_size,)
        :return: value of the state (``V~``, shape (batch_size, 1)), log likelihood of taking those actions
            and entropy of the action distribution
        """
        distribution, q_values, log_probs = self._actor_critic(obs)
        # SB3's algorithms learn the critic from these values: its loss must not train the actor
        values = state_values(log_probs.exp().detach(), q_values)
        return values, distribution.log_prob(actions), distribution.entropy()

    def evaluate_all_actions(self, obs: PyTorchObs) -> tuple[th.Tensor, th.Tensor]:
        """
        Evaluate every action according to the current policy, given the observations.

        :param obs: Observation
        :return: ``Q(s, a)`` and ``log pi(a|s)`` of every action, shape (batch_size, n_actions) each
        """
        _, q_values, log_probs = self._actor_critic(obs)
        return q_values, log_probs

    def predict_q_values(self, obs: PyTorchObs) -> th.Tensor:
        """
        Get the estimated values of all actions given the observations.

        :param obs: Observation
        :return: ``Q(s, a)``, shape (batch_size, n_actions)
        """
        # Not ``self.extract_features``, which runs both trunks when they are separate
        features = PixelPolicy.extract_features(self, obs, self.vf_features_extractor)
        return self.q_net(self.mlp_extractor.forward_critic(features))

    def predict_values(self, obs: PyTorchObs) -> th.Tensor:
        """
        Get the estimated values of the states according to the current policy given the observations.

        :param obs: Observation
        :return: ``V~(s) = sum_a pi(a|s) Q(s, a)``, shape (batch_size, 1)
        """
        _, q_values, log_probs = self._actor_critic(obs)
        return state_values(log_probs.exp(), q_values)


class ActorCriticQCnnPolicy(ActorCriticQPolicy, ActorCriticCnnPolicy):  # type: ignore[misc]
    """
    CNN policy class for actor-critics with an action-value critic: the Nature CNN, then the two heads.

    :param observation_space: Observation space, images
    :param action_space: Action space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` (others raise a ``ValueError``)
    :param lr_schedule: Learning rate schedule (could be constant)
    :param features_extractor_class: Features extractor to use, or any callable that returns one
    :param kwargs: Further arguments of ``ActorCriticQPolicy``
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


class MultiInputActorCriticQPolicy(ActorCriticQPolicy, MultiInputActorCriticPolicy):  # type: ignore[misc]
    """
    MultiInput policy class for actor-critics with an action-value critic: dict observations, then the two heads.

    :param observation_space: Observation space, ``Dict``
    :param action_space: Action space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary`` (others raise a ``ValueError``)
    :param lr_schedule: Learning rate schedule (could be constant)
    :param features_extractor_class: Features extractor to use, or any callable that returns one
    :param kwargs: Further arguments of ``ActorCriticQPolicy``
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


MlpPolicy = ActorCriticQPolicy
CnnPolicy = ActorCriticQCnnPolicy
MultiInputPolicy = MultiInputActorCriticQPolicy
