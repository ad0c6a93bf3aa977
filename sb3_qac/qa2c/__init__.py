from sb3_qac.qa2c.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_qac.qa2c.qa2c import QA2C

__all__ = ["QA2C", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
