# This file is here just to define MlpPolicy/CnnPolicy
# that work for REINFORCE: SB3's policies, whose actions can be masked
from stable_baselines3.common import policies

from sb3_qac.common.masks import MaskablePolicy


class ActorCriticPolicy(MaskablePolicy, policies.ActorCriticPolicy):
    """SB3's policy, whose actions can be masked."""


class ActorCriticCnnPolicy(MaskablePolicy, policies.ActorCriticCnnPolicy):
    """SB3's policy for images, whose actions can be masked."""


class MultiInputActorCriticPolicy(MaskablePolicy, policies.MultiInputActorCriticPolicy):
    """SB3's policy for dict observations, whose actions can be masked."""


MlpPolicy = ActorCriticPolicy
CnnPolicy = ActorCriticCnnPolicy
MultiInputPolicy = MultiInputActorCriticPolicy
