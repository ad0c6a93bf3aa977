"""
The speed of training, and of each part alone: algorithms with the settings that a study gives them, for Atari on SB3's
environments and on the native ones.

Every measurement runs in its own process, so that its memory can be measured too. Measurements are interleaved in rounds, and
a contender is compared with the first one in the same round, because other load on the machine slows both.
"""

import contextlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch as th
from gymnasium import spaces
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import get_device, obs_as_tensor
from tqdm.auto import tqdm

from sb3_qac.common.allocator import keep_freed_memory
from sb3_qac.common.checks import check_action_space, check_device, check_number
from sb3_qac.common.files import to_json, write_atomically
from sb3_qac.common.torch_layers import constant_weights
from sb3_qac.common.vec_env.ale_vec_env import game_arguments, is_atari
from sb3_qac.reinforce import REINFORCE
from sb3_qac.study.callbacks import ConstantWeightsCallback
from sb3_qac.study.catalogue import BENCHMARKED, VARIANTS, field_name
from sb3_qac.study.grid import make_grid
from sb3_qac.study.manager import config_of, is_resumable, model_of
from sb3_qac.study.run import Run
from sb3_qac.zoo import register

# Rollouts shorter than this are measured several at a time
MIN_STEPS = 100
# What a report says after Ctrl-C
INTERRUPTED = "interrupted"
# Linux's own figures of this process
PROCESS_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Contender:
    """
    :param algo: Algorithm, as for ``study --algos``; its settings are those of a study
    :param variant: Environments and network of Atari games, one of ``VARIANTS``; "stock" for other tasks
    """

    algo: str
    variant: str = "stock"

    @property
    def name(self) -> str:
        """Name in tables."""
        algo = self.algo.upper() if self.algo in ALGOS else self.algo
        return f"{algo}, " + ("SB3's environments" if self.variant == "stock" else f"native, {self.variant}")

    def run(self, env_id: str, folder: Path, n_envs: int | None = None, seed: int = 0, **settings: Any) -> Run:
        """
        :param env_id: Environment
        :param folder: Folder for the run's folder
        :param n_envs: Number of environments; None for that of the preset
        :param seed: Seed
        :param settings: Further settings of ``Run``
        :return: the run of a study that trains it
        :raises ValueError: if there is no such algorithm
        """
        settings = {"wandb": "disabled", **VARIANTS[self.variant], **settings}
        (run,) = make_grid(env_id, [self.algo], [seed], folder, **settings)
        return run if n_envs is None else replace(run, hyperparams={**run.hyperparams, "n_envs": n_envs})

    def preset(self, env_id: str) -> str:
        """
        :param env_id: Environment
        :return: whose settings it has
        """
        run = self.run(env_id, Path())
        return "RL Zoo's" if config_of(run.algo, env_id) is None else "sb3_qac's"


def contenders_of(
    env_id: str, algos: Sequence[str] = BENCHMARKED, variants: Sequence[str] | None = None
) -> tuple[Contender, ...]:
    """
    :param env_id: Environment
    :param algos: Algorithms
    :param variants: Variants of Atari games; None for all of them. Other environments have "stock" only.
    :return: The contenders
    :raises ValueError: if there is no such algorithm, an Atari game skips frames itself, or the environment is no Atari game
        and does not have a variant
    """
    # Also for the environments of MinAtar
    register()
    if is_atari(gym.spec(env_id)):
        game_arguments(gym.spec(env_id))
    elif others := sorted({*(variants or ())} - {"stock"}):
        raise ValueError(f"{env_id} is no Atari game, and has the variant 'stock' only, but {', '.join(others)} was given.")
    else:
        variants = ["stock"]
    variants = tuple(VARIANTS) if variants is None else variants
    contenders = tuple(dict.fromkeys(Contender(algo, variant) for algo in map(field_name, algos) for variant in variants))
    for contender in contenders:
        contender.run(env_id, Path())
    return contenders


@contextlib.contextmanager
def contender_model(contender: Contender, env_id: str, n_envs: int, device: str) -> Iterator[OnPolicyAlgorithm]:
    """
    :param contender: The contender
    :param env_id: Environment
    :param n_envs: Number of environments
    :param device: PyTorch device
    :return: within it, its model after a first update
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        model_of(contender.run(env_id, Path(folder), n_envs, device=device)) as model,
    ):
        assert isinstance(model, OnPolicyAlgorithm)
        # Each call of `learn` would start another log
        model.tensorboard_log = None
        yield model.learn(model.n_steps * n_envs)


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
    with contender_model(contender, env_id, n_envs, device) as model:
        steps = n_envs * model.n_steps * max(MIN_STEPS // model.n_steps, 1)

        def learn() -> None:
            model.learn(steps, ConstantWeightsCallback(), reset_num_timesteps=False)

        return {"steps_per_second": steps / _seconds_per_call(learn, seconds), **_peak_memory()}


def measure_parts(contender: Contender, env_id: str, n_envs: int, seconds: float, device: str) -> dict[str, float]:
    """
    Each part of an update alone, with nothing else running.

    :param contender: The contender to measure
    :param env_id: Environment
    :param n_envs: Number of environments
    :param seconds: For how long to measure each part
    :param device: PyTorch device
    :return: milliseconds of one rollout and its update: ``environments`` (all steps), ``forward`` (one pass for each step and
        one for the last value), ``update`` (forward, backward and optimizer, in all epochs); and the ``limit`` that these
        parts set, in steps per second
    """
    rng = np.random.default_rng(0)
    with contender_model(contender, env_id, n_envs, device) as model:
        env, policy, obs = model.env, model.policy, model._last_obs
        assert env is not None

        def step() -> None:
            env.step(rng.integers(env.action_space.n, size=n_envs))  # type: ignore[attr-defined]

        def forward() -> None:
            with th.no_grad():
                policy(obs_as_tensor(obs, model.device))[0].cpu()  # type: ignore[arg-type]

        def update() -> None:
            model.train()
            if model.device.type == "cuda":
                th.cuda.synchronize()

        # As in a rollout, in which the weights are prepared once
        with constant_weights(policy):
            pass_seconds = _seconds_per_call(forward, seconds)
        milliseconds = {
            "environments": 1e3 * model.n_steps * _seconds_per_call(step, seconds),
            "forward": 1e3 * (model.n_steps + 1) * pass_seconds,
            "update": 1e3 * _seconds_per_call(update, seconds),
        }
        return {**milliseconds, "limit": 1e3 * n_envs * model.n_steps / sum(milliseconds.values())}


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
    if PROCESS_STATUS.is_file():
        # On Linux `ru_maxrss` may be the peak of the process that started this one
        (peak,) = [line.split()[1] for line in PROCESS_STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        return {"peak_memory": int(peak) / 1024}
    try:
        import resource
    except ImportError:
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}


class KilledError(ValueError):
    """A process that measured was killed."""


def run_benchmark(
    env_id: str, contenders: Sequence[Contender], n_envs_list: Sequence[int], seconds: float, repeats: int, device: str
) -> dict[str, Any]:
    """
    :param env_id: Environment
    :param contenders: Result of ``contenders_of``
    :param n_envs_list: Numbers of environments to measure with
    :param seconds: Seconds of one measurement
    :param repeats: Rounds, in each of which everything is measured once
    :param device: PyTorch device
    :return: the machine, the settings, the ``measurements``, one row each, and what ``interrupted`` it: after Ctrl-C, or if a
        process was killed, there are the measurements of all complete rounds
    :raises ValueError: if a number is too small, actions are not discrete, an algorithm cannot be measured, or a process was
        killed in the first round
    :raises KeyboardInterrupt: after Ctrl-C in the first round
    """
    check_device(device)
    check_number("seconds", seconds, minimum=0.01)
    check_number("repeats", repeats, minimum=1)
    for n_envs in n_envs_list:
        check_number("n_envs", n_envs, minimum=1)
    with contextlib.closing(gym.make(env_id)) as env:
        if not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"`env` must have discrete actions, but those of {env_id} are {env.action_space}.")
        check_action_space(env.action_space)
    for contender in contenders:
        algorithm = ALGOS[contender.run(env_id, Path()).algo]
        if not is_resumable(algorithm, {}):
            raise ValueError(f"{contender.algo} cannot be measured: only on-policy algorithms without an LSTM can.")
        if issubclass(algorithm, REINFORCE):
            raise ValueError(
                f"{contender.algo} cannot be measured: it updates after whole episodes, which are not equally long. "
                "Measure the time to a return, with `--until-return`."
            )
    jobs = [
        (round_, n_envs, contender, measure)
        for round_ in range(repeats)
        for n_envs in n_envs_list
        for measure in (measure_training, measure_parts)
        for contender in contenders
    ]
    rows: list[dict[str, Any]] = []
    interrupted = None
    try:
        for round_, n_envs, contender, measure in tqdm(jobs, unit="measurement"):
            # The time is divided among the three parts
            time_of_each = seconds if measure is measure_training else seconds / 3
            result = _in_process(measure, contender, env_id, n_envs, time_of_each, device)
            rows.append({"round": round_, "n_envs": n_envs, "contender": contender.name, **result})
    except (KeyboardInterrupt, KilledError) as error:
        # Contenders are compared within a round
        n_of_round = len(jobs) // repeats
        repeats = len(rows) // n_of_round
        del rows[repeats * n_of_round :]
        if not rows:
            raise
        interrupted = str(error) or INTERRUPTED
    settings = {"env_id": env_id, "seconds": seconds, "repeats": repeats, "interrupted": interrupted}
    return {**settings, **machine_of(device), **presets_of(env_id, contenders), "measurements": rows}


def _in_process(
    measure: Callable[..., dict[str, float]], contender: Contender, env_id: str, n_envs: int, seconds: float, device: str
) -> dict[str, float]:
    """:return: the result of ``measure_training`` or ``measure_parts``, called in a process of its own"""
    with ProcessPoolExecutor(1, get_context("spawn"), keep_freed_memory) as executor:
        try:
            return executor.submit(measure, contender, env_id, n_envs, seconds, device).result()
        except BrokenProcessPool:
            raise KilledError(
                f"The process that measured {contender.name} with {n_envs} environments was killed. If the memory was not "
                "enough, give fewer environments with `--n-envs`."
            ) from None


def presets_of(env_id: str, contenders: Sequence[Contender]) -> dict[str, dict[str, str]]:
    """
    :param env_id: Environment
    :param contenders: Contenders
    :return: ``presets``: whose settings each has, by its name
    """
    return {"presets": {contender.name: contender.preset(env_id) for contender in contenders}}


def machine_of(device: str) -> dict[str, Any]:
    """
    :param device: PyTorch device
    :return: the machine and the versions
    """
    used = get_device(device)
    return {
        "device": th.cuda.get_device_name(used) if used.type == "cuda" else used.type,
        "processor": _processor(),
        "cores": th.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": th.__version__,
            "stable_baselines3": stable_baselines3.__version__,
        },
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
    contenders = list(dict.fromkeys(row["contender"] for row in report["measurements"]))
    presets = report.get("presets", {})
    settings = "{env_id}, {processor}, {cores} threads, {device}, {repeats} rounds of {seconds:g} s".format(**report)
    yield settings + (", interrupted: complete rounds only" if report.get("interrupted") else "")
    header = "contender | settings | steps/s: median (min - max) | times the first: median (min - max) | limit of its parts"
    for n_envs in sorted({row["n_envs"] for row in report["measurements"]}):
        yield f"\n{n_envs} environments:\n\n| {header} | reached | peak memory |\n{'|---' * 7}|"
        for contender in contenders:
            speeds, limits, memory = (
                _column(report, n_envs, contender, key) for key in ("steps_per_second", "limit", "peak_memory")
            )
            baseline = _column(report, n_envs, contenders[0], "steps_per_second")
            ratios = [speed / reference for speed, reference in zip(speeds, baseline, strict=True)]
            limit = statistics.median(limits)
            peak = f"{statistics.median(memory):.0f} MiB" if memory else "not measured"
            yield (
                f"| {contender} | {presets.get(contender, '-')} "
                f"| {statistics.median(speeds):.0f} ({min(speeds):.0f} - {max(speeds):.0f}) "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
                f"| {limit:.0f} | {statistics.median(speeds) / limit:.0%} | {peak} |"
            )
        yield "\nMilliseconds of one rollout and its update, each part alone:\n"
        yield "| contender | environments | forward | update |\n|---|---|---|---|"
        for contender in contenders:
            parts = [
                statistics.median(_column(report, n_envs, contender, key)) for key in ("environments", "forward", "update")
            ]
            yield f"| {contender} | " + " | ".join(f"{part:.1f}" for part in parts) + " |"


def _column(report: dict[str, Any], n_envs: int, contender: str, key: str) -> list[float]:
    return [
        row[key] for row in report["measurements"] if row["n_envs"] == n_envs and row["contender"] == contender and key in row
    ]


def write_report(report: dict[str, Any], path: Path) -> None:
    """
    :param report: Result of ``run_benchmark``
    :param path: JSON file to write
    """
    write_atomically(path, (to_json(report) + "\n").encode())
