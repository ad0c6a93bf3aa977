"""Diagnose a run of a study, from its snapshots."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch as th
from rich.console import Console
from rich.progress import Progress
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_number
from sb3_qac.common.files import check_writable, write_atomically
from sb3_qac.diagnose import MIN_ROLLOUTS, diagnose_model
from sb3_qac.study.agents import check_same_environments
from sb3_qac.study.loading import DIAGNOSIS_FILE, read_config
from sb3_qac.study.manager import environments_of
from sb3_qac.study.run import Run, env_dirname, read_run
from sb3_qac.study.snapshots import normalize_as, points_of
from sb3_qac.zoo import register

# Algorithms with a critic Q(s, a), by their names in RL Zoo
DIAGNOSED = ("qa2c", "qppo", "pqn")


def diagnose_run(
    folder: Path, n_rollouts: int = 200, n_points: int = 3, n_threads: int = 1, n_states: int = 0, n_repeats: int = 4
) -> list[dict[str, Any]]:
    """
    Diagnose a run of a study at several points of its training, from its snapshots. The result is written into its folder.

    :param folder: Folder of a run of QA2C, QPPO or PQN
    :param n_rollouts: Rollouts at each point
    :param n_points: Number of points, from the start to the end of the training
    :param n_threads: Threads for PyTorch
    :param n_states: States at each point from which every action is played
    :param n_repeats: How often each action is played
    :return: the result of ``diagnose_model`` at each point
    :raises ValueError: if the folder has no run of QA2C, QPPO or PQN with snapshots, or cannot be written
    """
    check_number("rollouts", n_rollouts, minimum=MIN_ROLLOUTS)
    check_number("points", n_points, minimum=1)
    check_number("threads", n_threads, minimum=1)
    check_number("states", n_states)
    check_number("repeats", n_repeats, minimum=2)
    run = read_run(folder)
    if run.algo not in DIAGNOSED:
        raise ValueError(
            f"{folder} is a run of {run.algo}, but only runs of {', '.join(DIAGNOSED[:-1])} and {DIAGNOSED[-1]} can be "
            "diagnosed: they have a critic Q(s, a)."
        )
    # The noise of a step depends on the number of environments. That of the preset may have changed since
    config = folder / env_dirname(run.env_id) / "config.yml"
    if config.is_file() and "n_envs" in (kept := read_config(config)):
        run = dataclasses.replace(run, hyperparams={**run.hyperparams, "n_envs": kept["n_envs"]})
    if n_states:
        # The state of the C++ environments cannot be cloned. SB3's have the same games
        run = dataclasses.replace(run, native=False)
    snapshots = points_of(sorted((folder / "snapshots").glob("*.zip")), n_points)
    if not snapshots:
        raise ValueError(f"There are no snapshots in {folder}. `python -m sb3_qac study` keeps them.")
    check_writable(folder)
    register()
    check_same_environments(run, folder)
    th.set_num_threads(n_threads)
    set_random_seed(run.seed)
    with environments_of(run) as env, Progress(console=Console(stderr=True)) as progress:
        points = progress.track(snapshots, description=run.name)
        results = [diagnose_model(_at_snapshot(run, path, env), n_rollouts, n_states, n_repeats) for path in points]
    write_atomically(folder / DIAGNOSIS_FILE, json.dumps(results, indent=1).encode())
    return results


def _at_snapshot(run: Run, path: Path, env: VecEnv) -> Any:
    """:return: the model of a snapshot, with environments that are seeded anew and normalised as then"""
    env.seed(run.seed)
    normalize_as(path, env)
    # Without the folder of TensorBoard of the training, which may be on another machine
    return ALGOS[run.algo].load(path, env=env, tensorboard_log=None)
