from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticCnnPolicy, BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule

from sb3_qac.common.torch_layers import default_net_arch


class PixelPolicy(BasePolicy):
    """
    Passes images unchanged to features extractors that take pixels (``LeanNatureCNN``), in rollouts, updates and ``predict``
    alike. Other features extractors get SB3's preprocessed images. In a class definition, name this mixin after the policy, so
    that the policy's ``super()`` finds it.
    """

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor) -> th.Tensor:
        """
        Preprocess the observation if needed and extract features.

        :param obs: Observation
        :param features_extractor: The features extractor to use
        :return: The extracted features
        """
        # SB3 converts any other image dtype to float, which `predict` may be given
        is_pixels = isinstance(obs, th.Tensor) and obs.dtype == th.uint8
        if is_pixels and getattr(features_extractor, "takes_pixels", False):
            return features_extractor(obs)
        return super().extract_features(obs, features_extractor)


class PixelActorCriticCnnPolicy(ActorCriticCnnPolicy, PixelPolicy):  # type: ignore[misc]
    """
    SB3's CNN policy for A2C and PPO. If the features extractor takes pixels, it does not convert images to floats.

    :param observation_space: Observation space, images
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule (could be constant)
    :param net_arch: The specification of the policy and value networks
    :param features_extractor_class: Features extractor to use
    :param kwargs: Further arguments of ``stable_baselines3.common.policies.ActorCriticCnnPolicy``
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        *,
        features_extractor_class: type[BaseFeaturesExtractor] = NatureCNN,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=default_net_arch(net_arch, features_extractor_class),
            features_extractor_class=features_extractor_class,
            **kwargs,
        )
