"""All-action actor-critics for Stable-Baselines3."""

import contextlib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

if TYPE_CHECKING:
    from sb3_qac.pqn import PQN
    from sb3_qac.qa2c import QA2C
    from sb3_qac.qppo import QPPO
    from sb3_qac.reinforce import REINFORCE

__version__ = (Path(__file__).parent / "version.txt").read_text().strip()

# gymnasium >= 1.0 does not register environments by itself: without this, "PongNoFrameskip-v4" does not exist.
with contextlib.suppress(ImportError):
    import ale_py

    gym.register_envs(ale_py)

# The algorithms import PyTorch, which is slow. `python -m sb3_qac --help` imports this package, but needs none of them
_ALGORITHMS = {"PQN": "pqn", "QA2C": "qa2c", "QPPO": "qppo", "REINFORCE": "reinforce"}
_PACKAGES = (*_ALGORITHMS.values(), "resume")

__all__ = ["PQN", "QA2C", "QPPO", "REINFORCE", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ALGORITHMS:
        return getattr(importlib.import_module(f"{__name__}.{_ALGORITHMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
