"""
What exact checkpoints cost: the time of one beside the time of the training between two, on Pong with 16 environments.

    python results/resume/cost.py

Evaluations are left out of the training's time, and their 30 environments are in the checkpoint.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch as th
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_qac import QA2C
from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.common.torch_layers import LeanNatureCNN
from sb3_qac.resume import ExactCheckpointCallback
from sb3_qac.resume.checkpoints import checkpoints_in

PONG = "PongNoFrameskip-v4"


class Stopwatch(BaseCallback):
    """Steps per second of the training, checkpoints left out."""

    def __init__(self, checkpoint: ExactCheckpointCallback) -> None:
        super().__init__()
        save = checkpoint.save
        self.saves: list[float] = []

        def timed_save() -> None:
            start = time.perf_counter()
            save()
            self.saves.append(time.perf_counter() - start)

        checkpoint.save = timed_save  # type: ignore[method-assign]

    def _on_training_start(self) -> None:
        self.start = time.perf_counter()

    def _on_step(self) -> bool:
        self.seconds = time.perf_counter() - self.start
        return True


def measure(stack: str, steps: int) -> dict[str, float | str]:
    make_env = {"stock": make_atari_env, "native": make_ale_vec_env}[stack]
    env, eval_env = (VecFrameStack(make_env(PONG, n_envs, seed=0), 4) for n_envs in (16, 30))
    extractor = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=dict(dtype="bfloat16"))
    model = QA2C("CnnPolicy", env, seed=0, policy_kwargs=extractor if stack == "native" else None)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ExactCheckpointCallback(folder, save_freq=2000)
        stopwatch = Stopwatch(checkpoint)
        model.learn(steps, [EvalCallback(eval_env, eval_freq=10**9), stopwatch, checkpoint])
        megabytes = checkpoints_in(Path(folder))[-1].stat().st_size / 1e6
    save = statistics.median(stopwatch.saves)
    steps_per_second = steps / (stopwatch.seconds - sum(stopwatch.saves))
    interval = ExactCheckpointCallback("").save_freq / steps_per_second
    return {
        "stack": stack,
        "checkpoints": len(stopwatch.saves),
        "seconds_each": round(save, 4),
        "seconds_each_max": round(max(stopwatch.saves), 4),
        "megabytes": round(megabytes, 1),
        "steps_per_second": round(steps_per_second),
        "share_of_training": save / interval,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40_000)
    args = parser.parse_args()
    for stack in ("stock", "native"):
        print(json.dumps({"threads": th.get_num_threads(), **measure(stack, args.steps)}))
