"""The policy of a preset for every environment, `default`, follows from the observations."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from sb3_qac.common.torch_layers import SMALLEST_IMAGE


def fit_policy(manager: Any, hyperparams: dict[str, Any], saved_hyperparams: dict[str, Any]) -> None:
    """
    RL Zoo's presets for every environment have ``MlpPolicy``, with which SB3 refuses dictionaries and makes vectors of images.
    If the policy comes from such a preset, it is replaced in place by the one for these observations, and a line says so.

    :param manager: RL Zoo's manager; the line is also kept as its ``policy_choice``
    :param hyperparams: Hyperparameters that it has read
    :param saved_hyperparams: The same, for ``config.yml``
    """
    if hyperparams.get("policy") != "MlpPolicy" or "policy" in (manager.custom_hyperparams or {}) or not _is_default(manager):
        return
    policy, kind = _policy_for(_observation_space(manager, hyperparams), hyperparams)
    # Not at the top: RL Zoo is still being imported there
    from rl_zoo3.utils import ALGOS

    if policy in ALGOS[manager.algo].policy_aliases and policy != "MlpPolicy":
        hyperparams["policy"] = saved_hyperparams["policy"] = policy
        manager.policy_choice = (
            f"{manager.algo} has {policy} on {manager.env_name.gym_id} instead of the MlpPolicy of the preset `default`, "
            f"because its observations are {kind}."
        )
        print(manager.policy_choice)


def _policy_for(space: spaces.Space | None, hyperparams: dict[str, Any]) -> tuple[str, str]:
    """:return: name of the policy, and what the observations are"""
    if isinstance(space, spaces.Dict):
        return "MultiInputPolicy", "dictionaries"
    # Normalized pixels are no images for SB3. With a network of its own, `MlpPolicy` is a policy for images too
    own = hyperparams.get("normalize") or "features_extractor_class" in str(hyperparams.get("policy_kwargs"))
    is_image = space is not None and is_image_space(space) and sorted(space.shape or ())[1] >= SMALLEST_IMAGE
    return ("CnnPolicy", "images") if is_image and not own else ("MlpPolicy", "vectors")


def _is_default(manager: Any) -> bool:
    if not manager.config.endswith((".yml", ".yaml")):
        return False
    path = Path(manager.config)
    return not manager._is_atari and manager.env_name.gym_id not in _entries_of(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _entries_of(path: Path, changed: int) -> frozenset[str]:
    """Cached, because RL Zoo has just read the same file, which takes longer than anything else at the start of a run."""
    return frozenset(yaml.safe_load(path.read_text()))


def _observation_space(manager: Any, hyperparams: dict[str, Any]) -> spaces.Space | None:
    """:return: that of its environments; None if a wrapper of vectorized ones may change it, or they cannot be made"""
    from rl_zoo3.utils import get_wrapper_class

    if hyperparams.get("vec_env_wrapper"):
        return None
    with contextlib.suppress(Exception):
        wrap = get_wrapper_class(hyperparams)
        env = gym.spec(manager.env_name.gym_id).make(**hyperparams.get("env_kwargs", manager.env_kwargs))
        try:
            return (env if wrap is None else wrap(env)).observation_space
        finally:
            env.close()
    return None
