"""Exact resume: a run that was stopped at any moment continues as if nothing had happened."""

# Registers functions for the state of environments
import sb3_qac.resume.environments  # noqa: F401
from sb3_qac.resume.callback import ExactCheckpointCallback
from sb3_qac.resume.checkpoints import CheckpointError
from sb3_qac.resume.model import resume
from sb3_qac.resume.state import StateError
from sb3_qac.resume.wandb import wandb_run_id

__all__ = ["CheckpointError", "ExactCheckpointCallback", "StateError", "resume", "wandb_run_id"]
