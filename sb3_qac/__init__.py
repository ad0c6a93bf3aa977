"""All-action actor-critics for Stable-Baselines3."""

import contextlib
from pathlib import Path

import gymnasium as gym

from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO
from sb3_qac.reinforce import REINFORCE

__version__ = (Path(__file__).parent / "version.txt").read_text().strip()

# gymnasium >= 1.0 finds no environments by itself: without this, "PongNoFrameskip-v4" does not exist.
with contextlib.suppress(ImportError):
    import ale_py

    gym.register_envs(ale_py)

__all__ = ["QA2C", "QPPO", "REINFORCE", "__version__"]
