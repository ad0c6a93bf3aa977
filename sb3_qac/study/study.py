"""A study: a grid of trainings, run until each is finished, however often it has to be started."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import gymnasium as gym
from joblib import Parallel, delayed
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rl_zoo3.utils import ALGOS

from sb3_qac.common.checkpoints import read_json
from sb3_qac.common.checks import check_number
from sb3_qac.study.runs import Run, config_of, train_run
from sb3_qac.zoo import register

# The names of the document's tasks, and what they are in RL Zoo
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "task1": ("qa2c", {"baseline": False}),
    "task2": ("qa2c", {"baseline": True}),
}
ENV_IDS = {"pong": "PongNoFrameskip-v4", "cartpole": "CartPole-v1"}


def make_grid(
    env_id: str, groups: Sequence[str], seeds: Sequence[int], folder: Path, config: str | None = None, **settings: Any
) -> list[Run]:
    """
    :param env_id: Environment, or a short name of one
    :param groups: Names of algorithms in RL Zoo, and of tasks
    :param seeds: Seeds of each
    :param folder: Folder of the study
    :param config: YAML file with hyperparameters for all; None for each algorithm's own
    :param settings: Further settings of ``Run``
    :return: one run for each group and seed
    :raises ValueError: if there is no such environment or algorithm
    """
    register()
    env_id = ENV_IDS.get(env_id, env_id)
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        raise ValueError(f"{error} Short names are {', '.join(ENV_IDS)}.") from None
    unknown = [group for group in groups if group not in TASKS and group not in ALGOS]
    if unknown:
        raise ValueError(f"There is no algorithm {', '.join(unknown)}. There are {', '.join([*TASKS, *ALGOS])}.")
    if config is not None and not Path(config).is_file():
        raise ValueError(f"There is no file {config} with hyperparameters.")
    for name in ("eval_freq", "n_eval_episodes", "n_threads"):
        check_number(name, settings.get(name, 1), minimum=1)
    check_number("n_timesteps", settings.get("n_timesteps", 0))
    runs = []
    for group in groups:
        algo, hyperparams = TASKS.get(group, (group, {}))
        for seed in seeds:
            name = f"{group}_seed-{seed}"
            own_config = config or config_of(algo, env_id)
            runs.append(Run(name, group, algo, env_id, seed, str(folder / name), hyperparams, own_config, **settings))
    return runs


def run_study(runs: Sequence[Run], jobs: int = 1) -> dict[str, str]:
    """
    Run what is not finished, with a live table. After Ctrl-C the same call goes on.

    :param runs: Runs of the study
    :param jobs: How many at once, each in a process of its own
    :return: what went wrong, by the name of the run
    :raises KeyboardInterrupt: after Ctrl-C, when a checkpoint has been written
    """
    pending = [run for run in runs if not run.finished]
    failed: dict[str, str] = {}
    with Live(get_renderable=lambda: status_table(runs, failed), refresh_per_second=0.5, console=Console(stderr=True)):
        results = Parallel(n_jobs=jobs, return_as="generator")(delayed(train_run)(run) for run in pending)
        for run, error in zip(pending, results, strict=True):
            if error is not None:
                failed[run.name] = error
            elif not run.finished:
                # RL Zoo keeps Ctrl-C to itself
                raise KeyboardInterrupt
    return failed


def status_table(runs: Sequence[Run], failed: dict[str, str]) -> Table:
    """
    :param runs: Runs of a study
    :param failed: What went wrong, by the name of the run
    :return: how far each is
    """
    table = Table("run", "state", "steps", "steps/s", "time left", "last evaluation")
    for run in runs:
        status = read_json(Path(run.folder, "status.json"))
        if not status:
            table.add_row(run.name, "failed" if run.name in failed else "waiting")
            continue
        steps, total, speed = status["steps"], status["total"], status["steps_per_second"]
        state = "failed" if run.name in failed else "finished" if status["finished"] else "unfinished"
        left = "" if status["finished"] or not speed else f"{timedelta(seconds=round((total - steps) / speed))}"
        evaluation = status["last_evaluation"]
        table.add_row(
            run.name,
            state,
            f"{steps:,} of {total:,}",
            f"{speed:,.0f}",
            left,
            "" if evaluation is None else f"{evaluation['mean_return']:.2f} at {evaluation['steps']:,}",
        )
    return table
