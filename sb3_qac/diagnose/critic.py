"""How well a critic predicts the returns of the actions that were taken."""

import numpy as np
from stable_baselines3.common.utils import explained_variance


def judge_critic(q_values: np.ndarray, probs: np.ndarray, actions: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """
    Compare a critic with the returns of the actions that were taken.

    Its advantages have a slope, ``E[f (G - V~)] / E[f A]`` with ``f = A(s, a)``: 1 if the critic is right about the value of
    an action relative to the others, 0 if its advantages carry no information. For improbable actions, those with less than
    half of the uniform probability, ``f`` is A(s, a) for them and 0 for the others, minus its mean under the policy, so that
    an error of V~ has no effect.

    :param q_values: ``Q(s, a)``, shape (n_steps, n_envs, n_actions)
    :param probs: ``pi(a|s)``, shape (n_steps, n_envs, n_actions)
    :param actions: Actions taken, shape (n_steps, n_envs)
    :param returns: Discounted returns ``G``, shape (n_steps, n_envs)
    :return: the critic's figures, with standard errors over environments
    """
    values = (probs * q_values).sum(axis=2)
    advantages, surprises = q_values - values[..., None], returns - values
    # Those that a mask forbids have probability 0
    improbable = probs < 0.5 / (probs > 0).sum(axis=2, keepdims=True)
    result = {
        "entropy": float(-(probs * np.log(np.clip(probs, 1e-30, 1))).sum(axis=2).mean()),
        "explained_variance": float(explained_variance(take_actions(q_values, actions).ravel(), returns.ravel())),
        "advantage_size": float(np.sqrt((probs * np.square(advantages)).sum(axis=2).mean())),
        "return_scatter": float(np.std(surprises)),
        "improbable_actions": float((probs * improbable).sum(axis=2).mean()),
    }
    for name, mask in {"slope": True, "slope_improbable": improbable}.items():
        weights = advantages * mask
        weights = weights - (probs * weights).sum(axis=2, keepdims=True)
        found = (take_actions(weights, actions) * surprises).sum(axis=0)
        claimed = (probs * weights * advantages).sum(axis=(0, 2))
        result[name], result[f"{name}_error"] = _ratio(found, claimed)
    return result


def take_actions(x: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """
    :param x: Shape (n_steps, n_envs, n_actions)
    :param actions: Shape (n_steps, n_envs)
    :return: ``x`` at the actions, shape (n_steps, n_envs)
    """
    return np.take_along_axis(x, actions[..., None], axis=2)[..., 0]


def _ratio(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """
    :param x: Shape (n_envs,)
    :param y: Shape (n_envs,)
    :return: ratio of their sums, and its standard error from leaving out each environment in turn
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        without = (x.sum() - x) / (y.sum() - y)
        return float(x.sum() / y.sum()), float(np.sqrt((len(x) - 1) * np.var(without)))
