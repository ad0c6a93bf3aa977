"""All-action actor-critics for Stable-Baselines3."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

if TYPE_CHECKING:
    from sb3_qac.qa2c import QA2C
    from sb3_qac.reinforce import REINFORCE

__version__ = (Path(__file__).parent / "version.txt").read_text().strip()

# gymnasium >= 1.0 finds no environments by itself: without this, "PongNoFrameskip-v4" does not exist.
with contextlib.suppress(ImportError):
    import ale_py

    gym.register_envs(ale_py)

__all__ = ["QA2C", "REINFORCE", "__version__"]


def __getattr__(name: str) -> Any:
    # The algorithms import PyTorch. `python -m sb3_qac --help`, which imports this package first, does without.
    if name == "QA2C":
        from sb3_qac.qa2c import QA2C

        return QA2C
    if name == "REINFORCE":
        from sb3_qac.reinforce import REINFORCE

        return REINFORCE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
