"""
The best possible return on FrozenLake-v1 and Blackjack-v1, by dynamic programming, and the return of tabular Q-learning.

    python -m benchmarks.references --jobs 2 > results/tabular/references.json
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from joblib import Parallel, delayed
from tqdm.auto import tqdm

from sb3_qac.common.checks import check_number

# Probability of each card: four cards count as 10
CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}


def optimal_frozen_lake() -> float:
    """:return: probability that the best policy reaches the goal within the time limit; the policy may use the time left"""
    env: Any = gym.make("FrozenLake-v1")
    transitions = env.unwrapped.P
    values = np.zeros(env.observation_space.n)
    for _ in range(env.spec.max_episode_steps):
        following = values.copy()
        for state, actions in transitions.items():
            values[state] = max(
                sum(p * (reward + (0 if done else following[new])) for p, new, reward, done in outcomes)
                for outcomes in actions.values()
            )
    return float(values[0])


def draw(total: int, ace: bool, card: int) -> tuple[int, bool]:
    """
    :param total: Total of a hand, with a usable ace counted as 11
    :param ace: Whether it has a usable ace
    :param card: Another card
    :return: total and usable ace of the hand with that card
    """
    total += card
    if card == 1 and total + 10 <= 21 and not ace:
        return total + 10, True
    return (total - 10, False) if total > 21 and ace else (total, ace)


@functools.cache
def dealer_totals(total: int, ace: bool) -> dict[int, float]:
    """
    :param total: Total of the dealer's hand
    :param ace: Whether it has a usable ace
    :return: probabilities of the dealer's final totals, 0 for more than 21
    """
    if total > 21:
        return {0: 1.0}
    if total >= 17:
        return {total: 1.0}
    finals: dict[int, float] = {}
    for card, p in CARDS.items():
        for final, q in dealer_totals(*draw(total, ace, card)).items():
            finals[final] = finals.get(final, 0.0) + p * q
    return finals


@functools.cache
def blackjack_value(total: int, ace: bool, shown: int) -> float:
    """
    :param total: Total of the player's hand
    :param ace: Whether it has a usable ace
    :param shown: The dealer's card
    :return: value of the hand under the best policy
    """
    if total > 21:
        return -1.0
    stick = sum(
        p * q * float(np.sign(total - final))
        for card, p in CARDS.items()
        for final, q in dealer_totals(*draw(*draw(0, False, shown), card)).items()
    )
    hit = sum(p * blackjack_value(*draw(total, ace, card), shown) for card, p in CARDS.items())
    return max(stick, hit)


def dealt_value(first: int, second: int, shown: int) -> float:
    """
    With the rules that gymnasium registers, those of Sutton and Barto (2018, example 5.1): an ace with a ten, a natural, wins
    unless the dealer has one too.

    :param first: The player's first card
    :param second: The second one
    :param shown: The dealer's card
    :return: value of the two cards under the best policy
    """
    if {first, second} == {1, 10}:
        return 1 - (CARDS[11 - shown] if shown in (1, 10) else 0)
    return blackjack_value(*draw(*draw(0, False, first), second), shown)


def optimal_blackjack() -> float:
    """:return: expected reward of a game under the best policy"""
    deals = itertools.product(CARDS.items(), repeat=3)
    return sum(p * q * r * dealt_value(first, second, shown) for (first, p), (second, q), (shown, r) in deals)


OPTIMAL = {"FrozenLake-v1": optimal_frozen_lake, "Blackjack-v1": optimal_blackjack}


def q_learning(env_id: str, seed: int, n_steps: int, n_episodes: int = 2000) -> float:
    """
    Tabular Q-learning with a learning rate of 1 / sqrt(visits). The exploration falls from 1 to 0.05 over the first half.

    :param env_id: Environment with hashable observations
    :param seed: Seed
    :param n_steps: Environment steps
    :param n_episodes: Episodes to evaluate the greedy policy
    :return: mean return of the greedy policy
    """
    rng = np.random.default_rng(seed)
    # The environment checker would take as long as the game itself
    env: Any = gym.make(env_id, disable_env_checker=True)
    n_actions, gamma = env.action_space.n, 0.99
    q: dict[Any, np.ndarray] = {}
    visits: dict[Any, int] = {}
    state, _ = env.reset(seed=seed)
    for step in range(n_steps):
        exploration = max(0.05, 1 - 1.9 * step / n_steps)
        values = q.setdefault(state, np.zeros(n_actions))
        best = np.flatnonzero(values == values.max())
        action = int(rng.integers(n_actions) if rng.random() < exploration else best[rng.integers(len(best))])
        new, reward, terminated, truncated, _ = env.step(action)
        target = reward + (0 if terminated else gamma * q.setdefault(new, np.zeros(n_actions)).max())
        visits[state, action] = visits.get((state, action), 0) + 1
        values[action] += (target - values[action]) / np.sqrt(visits[state, action])
        state = env.reset()[0] if terminated or truncated else new
    returns = []
    for episode in range(n_episodes):
        state, _ = env.reset(seed=10_000 + episode)
        total, done = 0.0, False
        while not done:
            state, reward, terminated, truncated, _ = env.step(int(np.argmax(q.get(state, np.zeros(n_actions)))))
            total, done = total + reward, terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def references(n_steps: int = 500_000, n_seeds: int = 10, jobs: int = 1) -> dict[str, dict[str, Any]]:
    """
    :param n_steps: Environment steps of Q-learning
    :param n_seeds: Seeds of Q-learning
    :param jobs: Number of seeds to run at once
    :return: by environment the ``optimal`` return, and the returns of ``q_learning``
    """
    for name, value in {"steps": n_steps, "seeds": n_seeds, "jobs": jobs}.items():
        check_number(name, value, minimum=1)
    parallel = Parallel(n_jobs=jobs, return_as="generator")
    results = {}
    for env_id, optimal in OPTIMAL.items():
        returns = parallel(delayed(q_learning)(env_id, seed, n_steps) for seed in range(n_seeds))
        q_learned = list(tqdm(returns, desc=env_id, total=n_seeds, unit="seed"))
        results[env_id] = {"optimal": optimal(), "steps": n_steps, "q_learning": q_learned}
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.references",
        description="Prints JSON for both tasks: the value of the optimal policy by dynamic programming, and for each seed "
        "the mean return of the greedy policy of tabular Q-learning in 2,000 episodes.",
    )
    parser.add_argument("--steps", type=int, default=500_000, help="environment steps of Q-learning")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="number of seeds to run at once")
    args = parser.parse_args(arguments)
    try:
        print(json.dumps(references(args.steps, args.seeds, args.jobs), indent=1))
    except ValueError as error:
        sys.exit(f"references: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
