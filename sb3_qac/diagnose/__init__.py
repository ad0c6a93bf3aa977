"""
Measure estimators of the policy gradient on one model and the same rollouts: their variance, direction and cost. Also measure
how well the critic predicts the differences between actions.
"""

from sb3_qac.diagnose.diagnose import MIN_ROLLOUTS, diagnose_model

__all__ = ["MIN_ROLLOUTS", "diagnose_model"]
