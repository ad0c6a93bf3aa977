"""
One training that may be killed: the child process of tests/kill_and_resume.py.

It has everything that has to go on: environments with lives, monitor files, two evaluations, three kinds of logs, a schedule.
"""

import argparse
import os
import signal
from pathlib import Path

import numpy as np
import torch as th
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import CallbackList, EvalCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_qac import QA2C, QPPO, REINFORCE
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.resume import checkpoints

ENV_ID = "BreakoutNoFrameskip-v4"
ALGORITHMS = {"qa2c": QA2C, "qppo": QPPO, "reinforce": REINFORCE, "a2c": A2C, "ppo": PPO}


def kill_inside_write(n_writes: int) -> None:
    """
    :param n_writes: The checkpoint in the writing of which the process kills itself, after half of its bytes
    """
    write_atomically = checkpoints.write_atomically
    count = 0

    def write_half(path, data):
        nonlocal count
        count += 1
        if count == n_writes:
            with open(path.with_name(f".{path.name}.tmp"), "wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(path, data)

    checkpoints.write_atomically = write_half


def train(algo: str, stack: str, folder: Path, n_steps: int) -> None:
    make_env = {"stock": make_atari_env, "native": make_ale_vec_env}[stack]
    env = VecFrameStack(make_env(ENV_ID, 4, seed=1, monitor_dir=str(folder)), 2)
    eval_env = VecFrameStack(make_env(ENV_ID, 2, seed=2), 2)
    evaluation = EvalCallback(
        eval_env,
        n_eval_episodes=2,
        eval_freq=240,
        deterministic=False,
        log_path=folder,
        best_model_save_path=folder,
        verbose=0,
    )
    arguments = dict(policy_kwargs=dict(features_extractor_kwargs=dict(features_dim=64)), seed=0, device="cpu")
    if algo == "ppo":
        # A rollout of the default length is longer than the training
        arguments["n_steps"] = 64
    model = ALGORITHMS[algo]("CnnPolicy", env, LinearSchedule(1e-3, 1e-4, 1.0), **arguments)
    model.set_logger(configure(str(folder), ["csv", "json", "log", "tensorboard"]))
    checkpoint = ExactCheckpointCallback(folder / "checkpoints", save_freq=600)
    model.learn(n_steps, callback=CallbackList([evaluation, checkpoint]), log_interval=7)
    write_result(model, folder)


def write_result(model, folder: Path) -> None:
    tensors = {f"policy/{name}": tensor.numpy() for name, tensor in model.policy.state_dict().items()}
    for i, state in model.policy.optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer/{i}/{name}": np.asarray(value) for name, value in state.items()})
    np.savez(folder / "result.npz", num_timesteps=model.num_timesteps, **tensors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", choices=ALGORITHMS, default="qa2c")
    parser.add_argument("--stack", choices=("stock", "native"), default="stock")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--kill-inside-write", type=int, default=0)
    args = parser.parse_args()
    th.set_num_threads(1)
    kill_inside_write(args.kill_inside_write)
    train(args.algo, args.stack, args.folder, args.steps)
