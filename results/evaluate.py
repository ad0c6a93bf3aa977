"""
Play many new episodes with the agents of RL Zoo's run folders: the last one of a run and the best one, deterministic.

    python results/evaluate.py LOGS [--episodes 1000]
"""

import argparse
from pathlib import Path

import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_qac import QA2C


def main() -> None:
    """Print the mean return and its standard error of each agent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, metavar="LOGS")
    parser.add_argument("--episodes", type=int, default=1000)
    args = parser.parse_args()
    th.set_num_threads(1)
    for run in sorted(args.logs.glob("*/qa2c/*_1")):
        env_id = run.name.removesuffix("_1")
        for agent in (env_id, "best_model"):
            env = make_vec_env(env_id, n_envs=50, seed=12345)
            statistics = run / env_id / "vecnormalize.pkl"
            if statistics.exists():
                env = VecNormalize.load(str(statistics), env)
                env.training, env.norm_reward = False, False
            model = QA2C.load(run / f"{agent}.zip", device="cpu")
            returns, _ = evaluate_policy(model, env, args.episodes, deterministic=True, return_episode_rewards=True)
            name = "last" if agent == env_id else "best"
            error = np.std(returns) / len(returns) ** 0.5
            print(f"{run.parent.parent.name} {name} {np.mean(returns):.2f} +/- {error:.2f}", flush=True)


if __name__ == "__main__":
    main()
