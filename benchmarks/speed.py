"""
The speed of training: algorithms with the settings that a study gives them, for Atari on SB3's environments and on native
ones.

    python -m benchmarks.speed --output speed.jsonl

Every measurement runs in its own process, so that its memory can be measured too, and is written as it comes. Measurements
are interleaved in rounds, and a contender is compared with the first one in the same round, because other load on the machine
slows both.
"""

import argparse
import contextlib
import json
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

from sb3_qac.commands import HelpFormatter
from sb3_qac.common.checks import check_action_space, check_device, check_number
from sb3_qac.common.files import check_writable, make_folder
from sb3_qac.common.process import keep_freed_memory, limit_spinning, processor
from sb3_qac.common.torch_layers import constant_weights
from sb3_qac.common.vec_env.ale_vec_env import game_arguments, is_atari
from sb3_qac.reinforce import REINFORCE
from sb3_qac.study.callbacks import ConstantWeightsCallback
from sb3_qac.study.catalogue import field_name
from sb3_qac.study.grid import make_grid
from sb3_qac.study.manager import config_of, is_resumable, model_of
from sb3_qac.study.run import Run
from sb3_qac.zoo import register

# Of an Atari game: SB3's environments and network, or the native environments and `LeanNatureCNN` in one of two precisions
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": dict(native=False, dtype=None),
    "float32": dict(native=True, dtype="float32"),
    "bfloat16": dict(native=True, dtype="bfloat16"),
}
# Rollouts shorter than this are measured several at a time
MIN_STEPS = 50
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

    def run(self, env_id: str, folder: Path, n_envs: int | None = None, **settings: Any) -> Run:
        """
        :param env_id: Environment
        :param folder: Folder for the run's folder
        :param n_envs: Number of environments; None for that of the preset
        :param settings: Further settings of ``Run``
        :return: the run of a study that trains it
        :raises ValueError: if there is no such algorithm
        """
        settings = {"wandb": "disabled", **VARIANTS[self.variant], **settings}
        (run,) = make_grid(env_id, [self.algo], [0], folder, **settings)
        return run if n_envs is None else replace(run, hyperparams={**run.hyperparams, "n_envs": n_envs})

    def preset(self, env_id: str) -> str:
        """
        :param env_id: Environment
        :return: where its settings come from
        """
        run = self.run(env_id, Path())
        return "RL Zoo's" if config_of(run.algo, env_id) is None else "sb3_qac's"


def contenders_of(env_id: str, algos: Sequence[str], variants: Sequence[str]) -> tuple[Contender, ...]:
    """
    :param env_id: Environment
    :param algos: Algorithms
    :param variants: Variants of Atari games. Other environments have "stock" only.
    :return: The contenders
    :raises ValueError: if an algorithm cannot be measured, actions are not discrete, or an Atari game skips frames itself
    """
    # Also for the environments of MinAtar
    register()
    if is_atari(gym.spec(env_id)):
        game_arguments(gym.spec(env_id))
    else:
        variants = ["stock"]
    with contextlib.closing(gym.make(env_id)) as env:
        if not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"`env` must have discrete actions, but those of {env_id} are {env.action_space}.")
        check_action_space(env.action_space)
    contenders = tuple(dict.fromkeys(Contender(algo, variant) for algo in map(field_name, algos) for variant in variants))
    for contender in contenders:
        algorithm = ALGOS[contender.run(env_id, Path()).algo]
        if not is_resumable(algorithm, {}):
            raise ValueError(f"{contender.algo} cannot be measured: only on-policy algorithms without an LSTM can.")
        if issubclass(algorithm, REINFORCE):
            raise ValueError(
                f"{contender.algo} cannot be measured: it updates after whole episodes, which are not equally long."
            )
    return contenders


@contextlib.contextmanager
def contender_model(contender: Contender, env_id: str, n_envs: int, device: str) -> Iterator[OnPolicyAlgorithm]:
    """
    Context manager that gives the contender's model after a first update.

    :param contender: The contender
    :param env_id: Environment
    :param n_envs: Number of environments
    :param device: PyTorch device
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        model_of(contender.run(env_id, Path(folder), n_envs, device=device)) as model,
    ):
        assert isinstance(model, OnPolicyAlgorithm)
        # Each call of `learn` would start another log
        model.tensorboard_log = None
        yield model.learn(model.n_steps * n_envs)


def measure(
    contender: Contender, env_id: str, n_envs: int, seconds: float, device: str, parts: bool = False
) -> dict[str, float]:
    """
    :param contender: The contender to train
    :param env_id: Environment
    :param n_envs: Number of environments
    :param seconds: For how long to measure, after a tenth of that to warm up; the same for the three parts together
    :param device: PyTorch device
    :param parts: Whether to measure each part of an update alone too
    :return: ``steps_per_second`` of the environments, learning included; ``peak_memory`` of the process in MiB (not on
        Windows); the result of ``measure_parts``
    """
    with contender_model(contender, env_id, n_envs, device) as model:
        steps = n_envs * model.n_steps * max(MIN_STEPS // model.n_steps, 1)

        def learn() -> None:
            model.learn(steps, ConstantWeightsCallback(), reset_num_timesteps=False)

        result = {"steps_per_second": steps / seconds_per_call(learn, seconds), **_peak_memory()}
        return {**result, **measure_parts(model, seconds / 3)} if parts else result


def measure_parts(model: OnPolicyAlgorithm, seconds: float) -> dict[str, float]:
    """
    Each part of an update alone, with nothing else running.

    :param model: Model after an update
    :param seconds: For how long to measure each part
    :return: milliseconds of one rollout and its update: ``environments`` (all steps), ``forward`` (one pass for each step and
        one for the last value), ``update`` (forward, backward and optimizer, in all epochs); and the ``limit`` that these
        parts set, in steps per second
    """
    rng = np.random.default_rng(0)
    env, policy, obs, n_envs = model.env, model.policy, model._last_obs, model.n_envs
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
        pass_seconds = seconds_per_call(forward, seconds)
    milliseconds = {
        "environments": 1e3 * model.n_steps * seconds_per_call(step, seconds),
        "forward": 1e3 * (model.n_steps + 1) * pass_seconds,
        "update": 1e3 * seconds_per_call(update, seconds),
    }
    return {**milliseconds, "limit": 1e3 * n_envs * model.n_steps / sum(milliseconds.values())}


def seconds_per_call(call: Callable[[], None], seconds: float) -> float:
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


def measurements(
    env_id: str, contenders: Sequence[Contender], n_envs: Sequence[int], repeats: int, **settings: Any
) -> Iterator[dict[str, Any]]:
    """
    :param env_id: Environment
    :param contenders: Result of ``contenders_of``
    :param n_envs: Numbers of environments to measure with
    :param repeats: Rounds, in each of which everything is measured once
    :param settings: Further arguments of ``measure``
    :return: a row for each measurement, as it comes
    :raises ValueError: if a process was killed
    """
    for round_ in range(repeats):
        for n in n_envs:
            for contender in contenders:
                row = {"round": round_, "n_envs": n, "contender": contender.name, "settings": contender.preset(env_id)}
                with ProcessPoolExecutor(1, get_context("spawn"), keep_freed_memory) as executor:
                    try:
                        yield row | executor.submit(measure, contender, env_id, n, **settings).result()
                    except BrokenProcessPool:
                        raise ValueError(
                            f"The process that measured {contender.name} with {n} environments was killed. If the memory was "
                            "not enough, give fewer environments with `--n-envs`."
                        ) from None


def machine_of(device: str) -> dict[str, Any]:
    """
    :param device: PyTorch device
    :return: the machine and the versions
    """
    used = get_device(device)
    return {
        "device": th.cuda.get_device_name(used) if used.type == "cuda" else used.type,
        "processor": processor(),
        "cores": th.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": th.__version__,
            "stable_baselines3": stable_baselines3.__version__,
        },
    }


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """
    :param rows: Measurements
    :return: Markdown, one table for each number of environments, and one of the parts if they were measured
    """
    for n_envs in dict.fromkeys(row["n_envs"] for row in rows):
        of_contender: dict[str, dict[int, dict[str, Any]]] = {}
        for row in rows:
            if row["n_envs"] == n_envs:
                of_contender.setdefault(row["contender"], {})[row["round"]] = row
        first = next(iter(of_contender.values()))
        yield f"\n{n_envs} environments:\n\n| contender | settings | steps/s: median (min - max) | times the first | memory |"
        yield "|---" * 5 + "|"
        for name, rounds in of_contender.items():
            speeds = [row["steps_per_second"] for row in rounds.values()]
            ratios = [row["steps_per_second"] / first[i]["steps_per_second"] for i, row in rounds.items()]
            memory = [row["peak_memory"] for row in rounds.values() if "peak_memory" in row]
            peak = f"{statistics.median(memory):.0f} MiB" if memory else "not measured"
            yield (
                f"| {name} | {next(iter(rounds.values()))['settings']} | {_spread(speeds, '.0f')} | {_spread(ratios, '.2f')} "
                f"| {peak} |"
            )
        if "limit" not in next(iter(first.values())):
            continue
        yield "\nMilliseconds of one rollout and its update, each part alone, and the steps/s that they allow:\n"
        yield "| contender | environments | forward | update | limit |\n|---|---|---|---|---|"
        for name, rounds in of_contender.items():
            parts = [statistics.median(row[part] for row in rounds.values()) for part in ("environments", "forward", "update")]
            limit = statistics.median(row["limit"] for row in rounds.values())
            yield f"| {name} | " + " | ".join(f"{part:.1f}" for part in parts) + f" | {limit:.0f} |"


def _spread(values: Sequence[float], form: str) -> str:
    middle = f"{statistics.median(values):{form}}"
    return f"{middle} ({min(values):{form}} - {max(values):{form}})" if len(values) > 1 else middle


def make_parser() -> argparse.ArgumentParser:
    """:return: The parser of the command line"""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Measures environment steps per second in training. Each measurement is a line of the output as it comes.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--env", default="PongNoFrameskip-v4", help="environment: an Atari game, or a task such as CartPole-v1"
    )
    parser.add_argument(
        "--algos", nargs="+", default=["a2c", "qppo"], help="algorithms, as for `study`; the first is the baseline"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=["stock", "bfloat16"],
        help="for Atari: SB3's environments, with its network where the preset names no other, or the native environments and "
        "the faster network in this precision",
    )
    parser.add_argument("--n-envs", type=int, nargs="+", default=[16], help="numbers of environments")
    parser.add_argument("--parts", action="store_true", help="measure the parts of a rollout and its update alone too")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="rounds in which everything is measured once")
    parser.add_argument("--device", default="cpu", help="PyTorch device")
    parser.add_argument("--output", type=Path, default=Path("speed.jsonl"), help="file for the lines of JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code
    """
    args = make_parser().parse_args(arguments)
    # For the processes that measure
    limit_spinning()
    rows: list[dict[str, Any]] = []
    stopped: str | None = None
    try:
        check_device(args.device)
        check_number("seconds", args.seconds, minimum=0.01)
        for name, value in [("repeats", args.repeats), *(("n-envs", n) for n in args.n_envs)]:
            check_number(name, value, minimum=1)
        contenders = contenders_of(args.env, args.algos, args.variants)
        make_folder(args.output.absolute().parent)
        check_writable(args.output)
        settings = {"seconds": args.seconds, "device": args.device, "parts": args.parts}
        with args.output.open("w") as file:
            print(json.dumps({"env_id": args.env, **settings, **machine_of(args.device)}), file=file, flush=True)
            for row in measurements(args.env, contenders, args.n_envs, args.repeats, **settings):
                print(json.dumps(row), file=file, flush=True)
                print(f"{row['contender']}: {row['steps_per_second']:.0f} steps/s", file=sys.stderr)
                rows.append(row)
    except (OSError, ValueError, gym.error.Error) as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = f"interrupted; {args.output} has what was measured."
    print("\n".join(tables(rows)))
    if stopped is not None:
        sys.exit(f"speed: {stopped}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
