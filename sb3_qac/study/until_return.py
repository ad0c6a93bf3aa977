"""Environment steps and seconds that algorithms need to reach a return: a study of each, stopped at that return."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch as th

from sb3_qac.common.checks import check_device, check_number
from sb3_qac.common.files import read_json
from sb3_qac.study.benchmark import Contender, machine_of, presets_of
from sb3_qac.study.grid import run_study
from sb3_qac.study.run import Run
from sb3_qac.study.train import provenance


def run_until_return(
    env_id: str,
    contenders: Sequence[Contender],
    goal: float,
    folder: Path,
    seeds: Sequence[int] = (0,),
    n_timesteps: int = 1_000_000,
    eval_freq: int | None = None,
    n_envs: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """
    Train each contender until an evaluation reaches a return. Called again, it resumes unfinished trainings, and repeats none.

    :param env_id: Environment
    :param contenders: Result of ``contenders_of``
    :param goal: Mean return of an evaluation
    :param folder: Folder for the trainings
    :param seeds: Seeds of each contender
    :param n_timesteps: Environment steps after which a training ends in any case
    :param eval_freq: Environment steps between two evaluations; a 20th of all if None
    :param n_envs: Number of environments; None for that of the preset
    :param settings: Further settings of ``Run``
    :return: the machine, the settings, and the ``measurements``: one row for each training
    :raises ValueError: if a number is too small, a training failed, or one was begun with other threads, on another device or
        machine, or with another PyTorch
    """
    check_device(settings.get("device", "auto"))
    check_number("steps", n_timesteps, minimum=1)
    if eval_freq is not None and eval_freq > n_timesteps:
        raise ValueError(f"`eval_freq` ({eval_freq}) must be at most `steps` ({n_timesteps}), or there is no evaluation.")
    if n_envs is not None:
        check_number("n_envs", n_envs, minimum=1)
    settings = {
        "n_timesteps": n_timesteps,
        "eval_freq": max(n_timesteps // 20, 1) if eval_freq is None else eval_freq,
        "stop_return": goal,
        "n_threads": th.get_num_threads(),
        **settings,
    }
    # One seed of all after the other, because other load on the machine slows all
    runs = {
        (contender.name, seed): contender.run(env_id, folder / contender.variant, n_envs, seed, **settings)
        for seed in seeds
        for contender in contenders
    }
    for run in runs.values():
        check_same_speed(run)
    failed = run_study(list(runs.values()))
    if failed:
        raise ValueError("; ".join(f"{run} failed: {reason}" for run, reason in failed.items()))
    rows = [{"contender": name, "seed": seed, **measured(run)} for (name, seed), run in runs.items()]
    asked = {
        "env_id": env_id,
        "until_return": goal,
        "steps": n_timesteps,
        "n_envs": n_envs,
        "eval_freq": settings["eval_freq"],
        "eval_episodes": next(iter(runs.values())).n_eval_episodes,
    }
    return {**asked, **machine_of(settings.get("device", "auto")), **presets_of(env_id, contenders), "measurements": rows}


def check_same_speed(run: Run) -> None:
    """
    :param run: A run
    :raises ValueError: if its folder has one with other threads, on another device or machine, or with another PyTorch. Their
        seconds cannot be compared
    """
    kept = read_json(Path(run.folder, "run.json"))
    if not kept or run.failed_at_once:
        return
    here = provenance()
    for name, there, now in (
        ("machine", kept.get("machine"), here["machine"]),
        ("torch", kept.get("versions", {}).get("torch"), here["versions"]["torch"]),
    ):
        if there not in (None, now):
            raise ValueError(
                f"`{name}` is {now!r}, and was {there!r} in {run.folder}, so the seconds cannot be compared. Choose another "
                "`--output`."
            )
    for name, how in {"n_threads": "set OMP_NUM_THREADS", "device": "give `--device`"}.items():
        if kept[name] != getattr(run, name):
            raise ValueError(
                f"`{name}` is {getattr(run, name)!r}, and was {kept[name]!r} in {run.folder}, so the seconds cannot be "
                f"compared. To use that run, {how} as before, or choose another `--output`."
            )


def measured(run: Run) -> dict[str, Any]:
    """
    :param run: Finished run with a return at which it stops
    :return: whether it ``reached`` that return, its ``last_return``, ``steps``, ``training_seconds``,
        ``evaluation_seconds`` and the ``seconds`` of both
    """
    status = read_json(Path(run.folder, "status.json"))
    last = status["last_evaluation"] or {}
    return {
        # The last rollout is completed, and evaluated, beyond the steps that are allowed
        "reached": run.reached and last["steps"] <= run.n_timesteps,
        "last_return": last.get("mean_return"),
        "steps": status["steps"],
        "training_seconds": status["seconds"] - status["evaluation_seconds"],
        "evaluation_seconds": status["evaluation_seconds"],
        "seconds": status["seconds"],
    }


def tables(report: dict[str, Any]) -> Iterator[str]:
    """
    :param report: Result of ``run_until_return``
    :return: lines of a Markdown table
    """
    environments = "" if report["n_envs"] is None else f", {report['n_envs']} environments"
    yield (
        "{env_id} until an evaluation returns {until_return:g}, at most {steps:,} steps, evaluated every {eval_freq:,} "
        "with {eval_episodes} episodes{environments}. {processor}, {cores} threads, {device}.\n".format(
            **report, environments=environments
        )
    )
    yield "| contender | settings | reached | steps: median (min - max) | seconds of training | of evaluations | of both |"
    yield "|---|---|---|---|---|---|---|"
    rows = report["measurements"]
    for name in dict.fromkeys(row["contender"] for row in rows):
        of_contender = [row for row in rows if row["contender"] == name]
        reached = [row for row in of_contender if row["reached"]]
        cells = [
            _spread([row[key] for row in reached], len(of_contender), ",.0f" if key == "steps" else ",.1f")
            for key in ("steps", "training_seconds", "evaluation_seconds", "seconds")
        ]
        yield f"| {name} | {report['presets'][name]} | {len(reached)} of {len(of_contender)} | {' | '.join(cells)} |"


def _spread(values: Sequence[float], n: int, form: str) -> str:
    """
    :param values: Values of those that reached the return
    :param n: Number of all; the others count as infinite
    :param form: Format
    :return: median, minimum and maximum
    """
    known = sorted(values)
    median = statistics.median([*known, *[float("inf")] * (n - len(known))])
    if median == float("inf"):
        return "-"
    largest = f"{known[-1]:{form}}" if len(known) == n else "not reached"
    return f"{median:{form}}" + (f" ({known[0]:{form}} - {largest})" if n > 1 else "")
