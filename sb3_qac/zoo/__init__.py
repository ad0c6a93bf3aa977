"""Everything that touches RL Zoo: registration, search spaces, and resume under RL Zoo."""

from sb3_qac.zoo.registration import ALGORITHMS, presets, register, register_in

__all__ = ["ALGORITHMS", "presets", "register", "register_in"]
