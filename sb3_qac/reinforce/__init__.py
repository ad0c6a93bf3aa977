from sb3_qac.reinforce.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_qac.reinforce.reinforce import REINFORCE

__all__ = ["REINFORCE", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
