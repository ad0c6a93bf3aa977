"""
How good a critic is for actions that the policy would not take. From states that the policy visits, every action is played on
purpose, and the policy from then on. The returns of the actions are compared with their Q-values.

The state of the environments is cloned, so that all actions start from the same state. Within a repeat they also share the
random numbers of the environment and of the policy, so that luck cancels in the differences between them.
"""

import copy
import math
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_integer
from sb3_qac.common.masks import ask_for_masks, with_masks
from sb3_qac.common.random_state import find_generators, generators_at
from sb3_qac.common.torch_layers import constant_weights
from sb3_qac.pqn import PQN
from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO
from sb3_qac.resume.state import get_state, set_state

# Rewards that count less than this are left out, and in any case those after so many steps
SMALLEST_WEIGHT, LONGEST_HORIZON = 0.01, 1000
# States are taken after a random number of steps below the horizon, or below this where that is shorter
SHORTEST_WALK = 100
N_BOOTSTRAP = 1000


class Branches(NamedTuple):
    """
    :param q_values: ``Q(s, a)``, shape (n_states, n_actions)
    :param probs: ``pi(a|s)``, shape (n_states, n_actions)
    :param returns: Discounted return of each action and of the policy after it, shape (n_repeats, n_states, n_actions); 0 for
        actions that are not allowed
    :param allowed: Which actions the state allows, shape (n_states, n_actions); None for all
    """

    q_values: np.ndarray
    probs: np.ndarray
    returns: np.ndarray
    allowed: np.ndarray | None = None


def play_all_actions(model: QA2C | QPPO | PQN, n_states: int, n_repeats: int, seed: int = 0) -> Branches:
    """
    Play every action from states that the policy visits. Rewards are those of the training, so they may be clipped or
    normalized. A return ends with its episode or after a horizon. Nothing is bootstrapped.

    :param model: Model with environments whose state can be taken
    :param n_states: Number of states, rounded up to a multiple of the number of environments
    :param n_repeats: How often each action is played, each time with other random numbers
    :param seed: Seed of the random numbers, and of the moments at which states are taken
    :return: Q-values and returns
    :raises ValueError: if a number is too small, or the state of the environments cannot be taken
    """
    check_integer("n_states", n_states, minimum=1)
    # The noise of the returns is estimated from two halves
    check_integer("n_repeats", n_repeats, minimum=2)
    env = model.env
    assert env is not None
    rng, horizon = np.random.default_rng(seed), horizon_of(model.gamma)
    branches = []
    obs = env.reset()
    player = with_masks(model, env) if model._is_masked else model
    with constant_weights(model.policy):
        for _ in range(math.ceil(n_states / env.num_envs)):
            # At random moments, because episodes of the same length run in step
            for _ in range(rng.integers(max(horizon, SHORTEST_WALK))):
                obs, _, _, _ = env.step(player.predict(obs, deterministic=False)[0])  # type: ignore[arg-type]
            state = get_state(env, "the environment")
            with th.no_grad(), model.policy.masked(ask_for_masks(env) if model._is_masked else None):
                q_values, log_probs = model.policy.evaluate_all_actions(model.policy.obs_to_tensor(obs)[0])  # type: ignore[arg-type]
                found = model.policy.joint_actions.allowed(model.policy.action_masks)
            allowed = np.ones(q_values.shape, dtype=bool) if found is None else found.numpy(force=True)
            returns = np.zeros((n_repeats, *q_values.shape))
            for repeat, repeat_seed in enumerate(rng.integers(2**31, size=n_repeats).tolist()):
                for action in range(q_values.shape[1]):
                    set_with_new_randomness(env, state, np.random.default_rng(repeat_seed))
                    th.manual_seed(repeat_seed)
                    # Where it is not allowed another one is played, whose return does not count
                    actions = np.where(allowed[:, action], action, allowed.argmax(axis=1))
                    returns[repeat, :, action] = return_of(player, env, actions, horizon) * allowed[:, action]
            set_state(env, copy.deepcopy(state), "the environment")
            branches.append(Branches(q_values.numpy(force=True), log_probs.exp().numpy(force=True), returns, allowed))
    q_values, probs, all_returns, all_allowed = zip(*branches, strict=True)
    returns = np.concatenate(all_returns, axis=1)
    return Branches(np.concatenate(q_values), np.concatenate(probs), returns, np.concatenate(all_allowed))


def horizon_of(gamma: float) -> int:
    """
    :param gamma: Discount factor
    :return: Number of steps after which rewards are left out
    """
    if gamma == 0:
        return 1
    return LONGEST_HORIZON if gamma == 1 else min(math.ceil(math.log(SMALLEST_WEIGHT) / math.log(gamma)), LONGEST_HORIZON)


def return_of(model: Any, env: VecEnv, numbers: np.ndarray, horizon: int) -> np.ndarray:
    """
    :param model: Model that plays after the first step, with masks if there are any
    :param env: Environments
    :param numbers: Numbers of the actions of the first step, shape (n_envs,)
    :param horizon: Number of steps
    :return: Discounted returns to the end of the episode or to the horizon, shape (n_envs,)
    """
    actions: Any = model.policy.joint_actions.actions(th.as_tensor(numbers, device=model.device)).numpy(force=True)
    returns, weights = np.zeros(env.num_envs), np.ones(env.num_envs)
    for _ in range(horizon):
        obs, rewards, dones, _ = env.step(actions)
        returns += weights * rewards
        weights *= model.gamma * np.logical_not(dones)
        if not weights.any():
            break
        actions, _ = model.predict(obs, deterministic=False)
    return returns


def set_with_new_randomness(env: VecEnv, state: Any, rng: np.random.Generator) -> None:
    """
    :param env: Environments
    :param state: Their state. A copy is set, and then every random generator starts from a new seed
    :param rng: Generator of seeds; the same one gives the same game
    """
    # As a whole: several attributes may refer to the same list
    set_state(env, copy.deepcopy(state), "the environment")
    for single in getattr(env.unwrapped, "envs", []):
        for generator in generators_at(find_generators(single)):
            seed = int(rng.integers(2**31))
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            elif isinstance(generator, th.Generator):
                generator.manual_seed(seed)
            else:
                generator.seed(seed)
        atari: Any = single.unwrapped
        if hasattr(atari, "ale") and atari.ale.getFloat("repeat_action_probability") > 0:
            # The emulator draws sticky actions itself, and takes a seed only with a new game. A new game also begins without a
            # last action to repeat, which is not part of a state, so that it would be that of the branch before.
            game = atari.clone_state()
            atari.seed_game(int(rng.integers(2**31)))
            atari.load_game()
            atari.restore_state(game)


def judge_branches(branches: Branches) -> dict[str, float]:
    """
    Compare differences of Q-values with differences of returns, over all pairs of actions of a state.

    :param branches: Result of ``play_all_actions``
    :return: number of ``states`` and ``repeats``; and

        * ``q_difference``, ``return_difference``: root mean square of the differences. The noise of the returns is removed
          from the latter: it is the root of the mean product of the differences in two halves of the repeats.
        * ``slope``: of the regression of the returns' differences on Q's, 1 if Q is right
        * ``correlation``: between Q's differences and those of the expected returns, with the noise of the returns removed
        * ``right_signs``: share of pairs in which Q prefers the action with the larger mean return
        * ``halves``: share of pairs in which the two halves of the repeats prefer the same action, to compare
          ``right_signs`` with

        and slope, right signs and halves of the pairs with an improbable action, one with less than half of the uniform
        probability, with "_improbable" after their name. Each has a standard error, with "_error" after its name, from a
        bootstrap over states. Figures that the data do not determine are nan.
    """
    n_repeats, n_states, n_actions = branches.returns.shape
    first, second = np.array(list(combinations(range(n_actions), 2)), dtype=int).reshape(-1, 2).T
    allowed = np.ones((n_states, n_actions), dtype=bool) if branches.allowed is None else branches.allowed
    improbable = branches.probs < 0.5 / allowed.sum(axis=1, keepdims=True)
    pairs = allowed[:, first] & allowed[:, second]
    masks = {"": pairs, "_improbable": pairs & (improbable[:, first] | improbable[:, second])}
    halves = np.array_split(branches.returns, [n_repeats // 2])
    claimed, found, one_half, other_half = (
        values[:, first] - values[:, second]
        for values in (branches.q_values, *(returns.mean(axis=0) for returns in (branches.returns, *halves)))
    )
    products = {
        "pairs": np.ones_like(claimed),
        "claimed": claimed**2,
        "together": claimed * found,
        "expected": one_half * other_half,
        "unequal": found != 0,
        "right": (found != 0) & (np.sign(claimed) == np.sign(found)),
        "unequal_halves": (one_half != 0) & (other_half != 0),
        "equal_signs": one_half * other_half > 0,
    }
    # Shape (n_bootstrap + 1, n_states): how often each state is in a sample; the first one is the data
    rng = np.random.default_rng(0)
    counts = np.vstack([np.ones(n_states), rng.multinomial(n_states, np.full(n_states, 1 / n_states), N_BOOTSTRAP)])
    result: dict[str, float] = {"states": n_states, "repeats": n_repeats}
    for suffix, mask in masks.items():
        sums = {name: counts @ (values * mask).sum(axis=1) for name, values in products.items()}
        with np.errstate(invalid="ignore", divide="ignore"):
            for name, samples in _figures(sums).items():
                if suffix == "" or name in ("slope", "right_signs", "halves"):
                    result[f"{name}{suffix}"] = float(samples[0])
                    result[f"{name}{suffix}_error"] = float(np.std(samples[1:]))
    return result


def _figures(sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """
    :param sums: Sums over the pairs of the states of each sample, shape (n_samples,) each
    :return: the figures of ``judge_branches``, shape (n_samples,) each
    """
    return {
        "q_difference": np.sqrt(sums["claimed"] / sums["pairs"]),
        "return_difference": np.sqrt(sums["expected"] / sums["pairs"]),
        "slope": sums["together"] / sums["claimed"],
        "correlation": sums["together"] / np.sqrt(sums["claimed"] * sums["expected"]),
        "right_signs": sums["right"] / sums["unequal"],
        "halves": sums["equal_signs"] / sums["unequal_halves"],
    }
