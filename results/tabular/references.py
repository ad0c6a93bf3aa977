"""
What there is to reach on FrozenLake-v1 and Blackjack-v1: the value of the optimal policy, by dynamic programming, and what
tabular Q-learning gets in as many steps as QA2C.

    python results/tabular/references.py [--steps 500000] [--seeds 10] [--jobs 2] > results/tabular/references.json
"""

import argparse
import functools
import json

import gymnasium as gym
import numpy as np
from joblib import Parallel, delayed

# Drawing a card: 1 to 10, of which 10 is four times as probable
CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}


def optimal_frozen_lake() -> float:
    """:return: probability to reach the goal within the time limit, of the best policy, which may depend on the time left"""
    env = gym.make("FrozenLake-v1")
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


def add(total: int, ace: bool, card: int) -> tuple[int, bool]:
    """:return: a hand's total, with a usable ace counted as 11, and whether it has one, after another card"""
    total, ace = total + card, ace
    if card == 1 and total + 10 <= 21 and not ace:
        total, ace = total + 10, True
    if total > 21 and ace:
        total, ace = total - 10, False
    return total, ace


@functools.cache
def dealer(total: int, ace: bool) -> dict[int, float]:
    """:return: probabilities of the dealer's final totals, 0 for more than 21"""
    if total > 21:
        return {0: 1.0}
    if total >= 17:
        return {total: 1.0}
    finals: dict[int, float] = {}
    for card, p in CARDS.items():
        for final, q in dealer(*add(total, ace, card)).items():
            finals[final] = finals.get(final, 0.0) + p * q
    return finals


@functools.cache
def blackjack_value(total: int, ace: bool, shown: int) -> float:
    """:return: value of a hand of the player for the best policy, against the dealer's card"""
    if total > 21:
        return -1.0
    first = add(0, False, shown)
    stick = 0.0
    for card, p in CARDS.items():
        for final, q in dealer(*add(*first, card)).items():
            stick += p * q * np.sign(total - final)
    hit = sum(p * blackjack_value(*add(total, ace, card), shown) for card, p in CARDS.items())
    return max(stick, hit)


def optimal_blackjack() -> float:
    """:return: expected reward of a game, with gymnasium's default rules (no naturals, an infinite deck)"""
    value = 0.0
    for first, p in CARDS.items():
        for second, q in CARDS.items():
            hand = add(*add(0, False, first), second)
            value += sum(p * q * r * blackjack_value(*hand, shown) for shown, r in CARDS.items())
    return value


def q_learning(env_id: str, seed: int, n_steps: int, n_episodes: int = 2000) -> float:
    """
    Tabular Q-learning with a learning rate of 1 / sqrt(visits) and an exploration that falls from 1 to 0.05 over the first
    half.

    :return: mean return of the greedy policy
    """
    rng = np.random.default_rng(seed)
    # The checker would take as long as the game
    env = gym.make(env_id, disable_env_checker=True)
    n_actions, gamma = env.action_space.n, 0.99
    q: dict = {}
    visits: dict = {}
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once")
    args = parser.parse_args()
    result = {}
    for env_id, optimal in (("FrozenLake-v1", optimal_frozen_lake()), ("Blackjack-v1", optimal_blackjack())):
        learnt = Parallel(n_jobs=args.jobs)(delayed(q_learning)(env_id, seed, args.steps) for seed in range(args.seeds))
        result[env_id] = {"optimal": optimal, "steps": args.steps, "q_learning": learnt}
    print(json.dumps(result, indent=1))
