"""The callbacks for users; they live in ``sb3_qac.resume`` and in ``sb3_qac.common.curves``."""

from sb3_qac.common.curves import CurvesCallback
from sb3_qac.resume import CheckpointError, ExactCheckpointCallback, resume, wandb_run_id

__all__ = ["CheckpointError", "CurvesCallback", "ExactCheckpointCallback", "resume", "wandb_run_id"]
