"""
Action masks on a game: Connect Four of PettingZoo against a random opponent. QPPO, QA2C, PQN and sb3-contrib's MaskablePPO.

Needs ``pip install pettingzoo pygame``. Each run is a line of the output; a run that is there already is left out.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from stable_baselines3.common.env_util import make_vec_env

from sb3_qac import PQN, QA2C, QPPO

LEARNING_RATES = (3e-4, 1e-3, 2e-3, 5e-3)
STEPS, N_ENVS, N_GAMES = 40_000, 8, 500


class ConnectFour(gym.Env):
    """One side of Connect Four; the other one plays at random. Who begins is drawn. A won game is worth 1, a lost one -1."""

    def __init__(self) -> None:
        from pettingzoo.classic.connect_four import connect_four

        self.game = connect_four.raw_env()
        self.observation_space = spaces.Box(0, 1, (84,), np.float32)
        self.action_space = spaces.Discrete(7)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset()
        self.player = self.game.possible_agents[int(self.np_random.integers(2))]
        if self.game.agent_selection != self.player:
            self._opponent()
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        return self.game.observe(self.player)["observation"].astype(np.float32).ravel()

    def _opponent(self) -> None:
        self.game.step(int(self.np_random.choice(np.flatnonzero(self._mask()))))

    def _mask(self) -> np.ndarray:
        # A column whose top is free
        return np.asarray(self.game.board).reshape(6, 7)[0] == 0

    def action_masks(self) -> np.ndarray:
        mask = self._mask()
        # A game that has ended may have a full board, where nothing is chosen any more
        return mask if mask.any() else np.ones(7, dtype=bool)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.game.step(int(action))
        if not any(self.game.terminations.values()):
            self._opponent()
        ended = any(self.game.terminations.values())
        return self._observe(), float(self.game.rewards[self.player]) if ended else 0.0, ended, False, {}


def make_model(name: str, learning_rate: float, seed: int) -> Any:
    """
    The settings of each algorithm's preset for every environment, and of PPO's defaults with as many environments. All have
    two layers of 64 units for the actor and for the critic, or for Q.
    """
    env = make_vec_env(ConnectFour, N_ENVS, seed=seed)
    rate = f"lin_{learning_rate}"
    common: dict[str, Any] = dict(seed=seed, device="cpu", policy_kwargs=dict(net_arch=[64, 64]))
    rollout: dict[str, Any] = dict(n_steps=64, batch_size=128, n_epochs=10)
    if name == "maskable_ppo":
        return MaskablePPO("MlpPolicy", env, lambda left: left * learning_rate, ent_coef=0.01, **rollout, **common)
    if name == "qppo":
        return QPPO("MlpPolicy", env, rate, ent_coef="lin_0.01", **rollout, **common)
    if name == "pqn":
        rollout["n_epochs"] = 4
        return PQN("MlpPolicy", env, rate, exploration_fraction=0.5, exploration_final_eps=0.05, **rollout, **common)
    assert name == "qa2c"
    kwargs: dict[str, Any] = dict(optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.99, eps=1e-5), dueling=True)
    common["policy_kwargs"] = {**kwargs, "net_arch": [64, 64]}
    return QA2C("MlpPolicy", env, rate, n_steps=16, pg_coef=1.0, ent_coef=0.01, vf_coef=0.5, beta=1.0, **common)


def run(name: str, learning_rate: float, seed: int, n_steps: int) -> dict[str, Any]:
    model = make_model(name, learning_rate, seed)
    start = time.perf_counter()
    model.learn(n_steps)
    row = {"algo": name, "learning_rate": learning_rate, "seed": seed, "steps": n_steps}
    row["minutes"] = round((time.perf_counter() - start) / 60, 2)
    for kind, deterministic in {"sampled": False, "greedy": True}.items():
        env = make_vec_env(ConnectFour, N_ENVS, seed=10_000 + 100 * seed)
        returns, _ = evaluate_policy(model, env, N_GAMES, deterministic, return_episode_rewards=True)
        row[kind] = float(np.mean(returns))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file of lines of JSON")
    parser.add_argument("--algos", nargs="+", default=["qppo", "qa2c", "pqn", "maskable_ppo"])
    parser.add_argument("--learning-rates", nargs="+", type=float, default=LEARNING_RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    th.set_num_threads(1)
    for seed in args.seeds:
        for name in args.algos:
            for learning_rate in args.learning_rates:
                with contextlib.suppress(FileNotFoundError):
                    rows = [json.loads(line) for line in args.output.read_text().splitlines()]
                    if any((row["algo"], row["learning_rate"], row["seed"]) == (name, learning_rate, seed) for row in rows):
                        continue
                row = run(name, learning_rate, seed, args.steps)
                with args.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
