from sb3_qac.qppo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_qac.qppo.qppo import QPPO

__all__ = ["QPPO", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
