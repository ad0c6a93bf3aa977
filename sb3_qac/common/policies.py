import torch as th
from stable_baselines3.common.policies import ActorCriticCnnPolicy, BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs


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
        # SB3 makes floats of whatever else stands for pixels, which `predict` may be given
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
    :param kwargs: Further arguments of ``stable_baselines3.common.policies.ActorCriticCnnPolicy``
    """
