from sb3_qac.pqn.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_qac.pqn.pqn import PQN

__all__ = ["PQN", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
