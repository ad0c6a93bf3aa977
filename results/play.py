"""
Play many new episodes with the final agents of a study's runs, sampled and greedy: one line of JSON each.

    python results/play.py RUN... [--episodes 1000]
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch as th
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import set_random_seed

from sb3_qac.study.diagnose import settings_of
from sb3_qac.study.records import standard_error
from sb3_qac.study.video import player_env
from sb3_qac.zoo import register

# Other episodes than in training, and others for each run, so that their luck is not that of all seeds of a study
FIRST_SEED, N_ENVS = 12345, 50


def main() -> None:
    """Print the mean return of each agent and its standard error over episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--episodes", type=int, default=1000)
    args = parser.parse_args()
    th.set_num_threads(1)
    register()
    for folder in args.runs:
        run = settings_of(folder)
        line = {"env": run.env_id, "run": folder.name, "episodes": args.episodes}
        seed = FIRST_SEED + N_ENVS * run.seed
        with tempfile.TemporaryDirectory() as scratch, player_env(run, folder, Path(scratch), n_envs=N_ENVS) as (env, agent):
            model = ALGOS[run.algo].load(agent, device="cpu")
            for name, deterministic in {"sampled": False, "greedy": True}.items():
                set_random_seed(seed)
                env.seed(seed)
                returns, _ = evaluate_policy(model, env, args.episodes, deterministic, return_episode_rewards=True)
                line[name] = round(float(np.mean(returns)), 4)
                line[f"{name}_error"] = round(standard_error(np.array(returns)), 4)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
