# This file is here just to define MlpPolicy/CnnPolicy
# that work for QPPO
from sb3_qac.qa2c.policies import ActorCriticQCnnPolicy, ActorCriticQPolicy, MultiInputActorCriticQPolicy

MlpPolicy = ActorCriticQPolicy
CnnPolicy = ActorCriticQCnnPolicy
MultiInputPolicy = MultiInputActorCriticQPolicy
