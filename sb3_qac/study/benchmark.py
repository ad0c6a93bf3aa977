"""
The speed of training, and of each part alone: A2C and QA2C on SB3's environments, and for Atari QA2C on the native ones.

Every measurement runs in its own process, so that its memory can be measured too. Measurements are interleaved in rounds, and
a contender is compared with A2C in the same round, because other load on the machine slows both.
"""

import contextlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch as th
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecTransposeImage
from tqdm.auto import tqdm

from sb3_qac.common.checks import check_action_space, check_number
from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.common.torch_layers import LeanNatureCNN, constant_weights
from sb3_qac.common.vec_env.ale_vec_env import game_arguments, is_atari
from sb3_qac.qa2c import QA2C

N_STEPS = 5


@dataclass(frozen=True)
class Contender:
    """
    :param name: Name in the table
    :param algorithm: Algorithm that trains
    :param native: Whether it uses the environments in C++
    :param dtype: Precision of ``LeanNatureCNN``; None for SB3's ``NatureCNN``
    """

    name: str
    algorithm: type[OnPolicyAlgorithm]
    native: bool
    dtype: str | None

    def make_env(self, env_id: str, n_envs: int) -> VecEnv:
        """
        :param env_id: Environment
        :param n_envs: Number of environments
        :return: Environments; for Atari games with stacked frames, channels first
        """
        if not is_atari(gym.spec(env_id)):
            return make_vec_env(env_id, n_envs, seed=0)
        if self.native:
            return VecFrameStack(make_ale_vec_env(env_id, n_envs, seed=0), 4)
        return VecTransposeImage(VecFrameStack(make_atari_env(env_id, n_envs, seed=0), 4))

    def make_model(self, env_id: str, n_envs: int, device: str) -> OnPolicyAlgorithm:
        """
        :param env_id: Environment
        :param n_envs: Number of environments
        :param device: PyTorch device
        :return: Model with TensorFlow-style RMSprop, and otherwise the defaults of its algorithm
        """
        policy_kwargs: dict[str, Any] = dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(alpha=0.99, eps=1e-5))
        if self.dtype is not None:
            policy_kwargs.update(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=dict(dtype=self.dtype))
        env = self.make_env(env_id, n_envs)
        policy = "CnnPolicy" if is_atari(gym.spec(env_id)) else "MlpPolicy"
        return self.algorithm(policy, env, n_steps=N_STEPS, policy_kwargs=policy_kwargs, seed=0, device=device)  # type: ignore[call-arg]


BASELINE = Contender("A2C, SB3's environments", A2C, native=False, dtype=None)
CONTENDERS = (
    BASELINE,
    Contender("QA2C, SB3's environments", QA2C, native=False, dtype=None),
    Contender("QA2C, native, float32", QA2C, native=True, dtype="float32"),
    Contender("QA2C, native, bfloat16", QA2C, native=True, dtype="bfloat16"),
)


def contenders_of(env_id: str) -> tuple[Contender, ...]:
    """
    :param env_id: Environment
    :return: The contenders that can be measured on it
    """
    return CONTENDERS if is_atari(gym.spec(env_id)) else tuple(contender for contender in CONTENDERS if not contender.native)


def measure_training(contender: Contender, env_id: str, n_envs: int, seconds: float, device: str) -> dict[str, float]:
    """
    :param contender: The contender to train
    :param env_id: Environment
    :param n_envs: Number of environments
    :param seconds: For how long to measure, after a tenth of that to warm up
    :param device: PyTorch device
    :return: ``steps_per_second`` of the environments, learning included, and ``peak_memory`` of the process in MiB (not on
        Windows)
    """
    model = contender.make_model(env_id, n_envs, device)
    rollout = n_envs * N_STEPS
    model.learn(rollout)

    def learn() -> None:
        model.learn(20 * rollout, reset_num_timesteps=False)

    per_call = _seconds_per_call(learn, seconds)
    return {"steps_per_second": 20 * rollout / per_call, **_peak_memory()}


def measure_parts(contender: Contender, env_id: str, n_envs: int, seconds: float, device: str) -> dict[str, float]:
    """
    Each part of an update alone, with nothing else running.

    :param contender: The contender to measure
    :param env_id: Environment
    :param n_envs: Number of environments
    :param seconds: For how long to measure each part
    :param device: PyTorch device
    :return: milliseconds of one update: ``environments`` (all steps of a rollout), ``forward`` (one pass for each step and one
        for the last value), ``update`` (forward, backward and optimizer on the whole rollout); and the ``limit`` that these
        parts set, in steps per second
    """
    model = contender.make_model(env_id, n_envs, device)
    model.learn(n_envs * N_STEPS)
    env, policy, obs = model.env, model.policy, model._last_obs
    assert env is not None
    rng = np.random.default_rng(0)

    def step() -> None:
        env.step(rng.integers(env.action_space.n, size=n_envs))  # type: ignore[attr-defined]

    def forward() -> None:
        with th.no_grad(), constant_weights(policy):
            policy(obs_as_tensor(obs, model.device))[0].cpu()  # type: ignore[arg-type]

    def update() -> None:
        model.train()
        if model.device.type == "cuda":
            th.cuda.synchronize()

    milliseconds = {
        "environments": 1e3 * N_STEPS * _seconds_per_call(step, seconds),
        "forward": 1e3 * (N_STEPS + 1) * _seconds_per_call(forward, seconds),
        "update": 1e3 * _seconds_per_call(update, seconds),
    }
    return {**milliseconds, "limit": 1e3 * n_envs * N_STEPS / sum(milliseconds.values())}


def _seconds_per_call(call: Callable[[], None], seconds: float) -> float:
    """
    :param call: What to time
    :param seconds: For how long, after a tenth of that to warm up
    :return: Mean seconds of a call
    """
    for budget in (seconds / 10, seconds):
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < budget:
            call()
            calls += 1
        elapsed = time.perf_counter() - start
    return elapsed / calls


def _peak_memory() -> dict[str, float]:
    """:return: ``peak_memory`` of this process in MiB; nothing on Windows"""
    try:
        import resource
    except ImportError:
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}


def run_benchmark(env_id: str, n_envs_list: list[int], seconds: float, repeats: int, device: str) -> dict[str, Any]:
    """
    :param env_id: Environment
    :param n_envs_list: Numbers of environments to measure with
    :param seconds: Seconds of one measurement
    :param repeats: Rounds, in each of which everything is measured once
    :param device: PyTorch device
    :return: the machine, the settings, and the ``measurements``: one row each
    :raises ValueError: if an Atari game skips frames itself, a number is too small, or actions are not discrete
    """
    if is_atari(gym.spec(env_id)):
        game_arguments(gym.spec(env_id))
    check_number("seconds", seconds, minimum=0.01)
    check_number("repeats", repeats, minimum=1)
    for n_envs in n_envs_list:
        check_number("n_envs", n_envs, minimum=1)
    with contextlib.closing(gym.make(env_id)) as env:
        check_action_space(env.action_space)
    jobs = [
        (round_, n_envs, contender, measure)
        for n_envs in n_envs_list
        for round_ in range(repeats)
        for measure in (measure_training, measure_parts)
        for contender in contenders_of(env_id)
    ]
    rows = []
    # A process for each measurement
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for round_, n_envs, contender, measure in tqdm(jobs, unit="measurement"):
            # The time is divided among the three parts
            time_of_each = seconds if measure is measure_training else seconds / 3
            result = pool.apply(measure, (contender, env_id, n_envs, time_of_each, device))
            rows.append({"round": round_, "n_envs": n_envs, "contender": contender.name, **result})
    return {
        "env_id": env_id,
        "seconds": seconds,
        "repeats": repeats,
        "device": th.cuda.get_device_name(0) if device.startswith("cuda") else "cpu",
        "processor": _processor(),
        "cores": th.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": th.__version__,
            "stable_baselines3": stable_baselines3.__version__,
        },
        "measurements": rows,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def tables(report: dict[str, Any]) -> Iterator[str]:
    """
    :param report: Result of ``run_benchmark``
    :return: Markdown, one table for each number of environments
    """
    contenders = contenders_of(report["env_id"])
    yield "{env_id}, {processor}, {cores} threads, {device}, {repeats} rounds of {seconds:g} s".format(**report)
    header = (
        "contender | steps/s: median (min - max) | times A2C: median (min - max) | limit of its parts | reached | peak memory"
    )
    for n_envs in sorted({row["n_envs"] for row in report["measurements"]}):
        yield f"\n{n_envs} environments:\n\n| {header} |\n|---|---|---|---|---|---|"
        for contender in contenders:
            speeds, limits, memory = (
                _column(report, n_envs, contender.name, key) for key in ("steps_per_second", "limit", "peak_memory")
            )
            baseline = _column(report, n_envs, BASELINE.name, "steps_per_second")
            ratios = [speed / reference for speed, reference in zip(speeds, baseline, strict=True)]
            limit = statistics.median(limits)
            peak = f"{statistics.median(memory):.0f} MiB" if memory else "not measured"
            yield (
                f"| {contender.name} | {statistics.median(speeds):.0f} ({min(speeds):.0f} - {max(speeds):.0f}) "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
                f"| {limit:.0f} | {statistics.median(speeds) / limit:.0%} | {peak} |"
            )
        yield "\nMilliseconds of one update, each part alone:\n"
        yield "| contender | environments | forward | update |\n|---|---|---|---|"
        for contender in contenders:
            parts = [
                statistics.median(_column(report, n_envs, contender.name, key))
                for key in ("environments", "forward", "update")
            ]
            yield f"| {contender.name} | " + " | ".join(f"{part:.1f}" for part in parts) + " |"


def _column(report: dict[str, Any], n_envs: int, contender: str, key: str) -> list[float]:
    return [
        row[key] for row in report["measurements"] if row["n_envs"] == n_envs and row["contender"] == contender and key in row
    ]


def write_report(report: dict[str, Any], path: Path) -> None:
    """
    :param report: Result of ``run_benchmark``
    :param path: JSON file to write
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
