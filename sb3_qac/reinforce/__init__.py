from sb3_qac.reinforce.reinforce import REINFORCE

__all__ = ["REINFORCE"]
