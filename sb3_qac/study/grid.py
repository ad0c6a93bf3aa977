"""A grid of runs: each algorithm with each seed, on this machine or on a Ray cluster. It can be stopped and resumed."""

import contextlib
import difflib
import inspect
import io
import itertools
import json
import logging
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from rl_zoo3.utils import ALGOS

from sb3_qac.common.checks import check_number, check_seed
from sb3_qac.common.files import to_json
from sb3_qac.common.minatar import check_minatar
from sb3_qac.common.vec_env.ale_vec_env import game_arguments, is_atari
from sb3_qac.study.catalogue import FIELD_NAMES, STUDIES, TASKS, field_name, study_of
from sb3_qac.study.loading import ENVIRONMENT_ENTRIES, changed_entries, parse_config, read_config
from sb3_qac.study.manager import StudyManager, import_packages, is_resumable
from sb3_qac.study.progress import progress, progress_line, status_of, summary
from sb3_qac.study.run import Run, check_same_run, env_dirname
from sb3_qac.study.train import ELSEWHERE, first_line, train_run
from sb3_qac.study.workers import train_in_processes
from sb3_qac.zoo import register

# Entries of RL Zoo's presets that it does not pass on to the algorithm
ZOO_ENTRIES = {"n_envs", *ENVIRONMENT_ENTRIES}
# Those that it changes before it passes them on, or reads itself, and that a search cannot set
OTHER_ENTRIES = {"n_timesteps", "callback", "noise_type", "noise_std"}
COUNTS = {"n_timesteps", "n_envs"}
# Arguments of algorithms that RL Zoo passes on itself
OF_THE_STUDY = {"env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
# How often a run is retried after its machine is lost, and how many seconds a run has to write its last checkpoint
RAY_RETRIES, RAY_GRACE = 10, 60


def make_grid(
    env: str,
    groups: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    config: str | None = None,
    hyperparams: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Run]:
    """
    :param env: Environment, short name of a study, or YAML file of one
    :param groups: Algorithms: names of RL Zoo, or rungs of the ladder
    :param seeds: Seeds of each
    :param folder: Folder of the study. With several environments, each has a subfolder.
    :param config: YAML file with hyperparameters for all; None for each algorithm's own
    :param hyperparams: Entries that replace those of the file, for all
    :param settings: Further settings of ``Run``
    :return: one run for each environment, group and seed
    :raises ValueError: if there is no such environment, algorithm or module, a number that is not allowed, or an algorithm or
        a precision that the environment does not have
    """
    register()
    import_packages(settings.get("gym_packages", []))
    study = study_of(env)
    env_ids, tasks = study.env_ids, {**TASKS, **study.tasks}
    # What is given twice, maybe by both of its names, is trained once, under the first
    names: dict[str, str] = {}
    for group in groups:
        names.setdefault(field_name(group), group)
    for env_id in env_ids:
        _check_env(env_id)
        _check_fit(env_id, settings)
    seeds = list(dict.fromkeys(seeds))
    for group in names:
        _check_algorithm(group, tasks)
    if config is not None and not Path(config).is_file():
        raise ValueError(f"There is no file {config} with hyperparameters.")
    # A worker or a later diagnosis may have another working directory
    config = config and os.path.abspath(config)
    for name in ("eval_freq", "n_eval_episodes", "n_threads"):
        check_number(name, settings.get(name, 1), minimum=1)
    check_number("n_timesteps", settings.get("n_timesteps", 0))
    for name in ("stop_return", "eval_from"):
        if settings.get(name) is not None:
            # Not a number is not even equal to itself, so the run could not be resumed
            check_number(name, settings[name], minimum=-math.inf)
    for seed in seeds:
        check_seed("seeds", seed)
    runs = []
    for env_id, (field, group), seed in itertools.product(env_ids, names.items(), seeds):
        algo, of_group = tasks.get(field, (field, {}))
        name = f"{group}_seed-{seed}"
        run_folder = folder / name if len(env_ids) == 1 else folder / env_dirname(env_id) / name
        entries = {**of_group, **(hyperparams or {})}
        # PQN explores in training only, as in its paper
        greedy = {"deterministic": True} if algo == "pqn" else {}
        runs.append(Run(name, group, algo, env_id, seed, str(run_folder), entries, config, **{**settings, **greedy}))
    return runs


def _check_env(env_id: str) -> None:
    check_minatar(env_id)
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        module, _, name = env_id.rpartition(":")
        option = f"Give {name} and `--gym-packages {module}`: it" if module else "`--gym-packages`"
        raise ValueError(
            f"{error}{'' if str(error).endswith(('.', '?')) else '.'} Short names are {', '.join(STUDIES)}. "
            f"{option} imports the module that registers an environment of your own."
        ) from None


def _check_algorithm(group: str, tasks: dict[str, Any]) -> None:
    known = [*tasks, *sorted(ALGOS)]
    if group in tasks and group in ALGOS:
        raise ValueError(f"{group} has settings of its own, but it is the name of an algorithm. Choose another one.")
    if group in tasks and tasks[group][0] not in ALGOS:
        raise ValueError(f"`algo` of {group} must be one of {', '.join(sorted(ALGOS))}, but {tasks[group][0]!r} was given.")
    if group not in known:
        similar = " or ".join(sorted(difflib.get_close_matches(group, [*known, *FIELD_NAMES])))
        meant = f"Did you mean {similar}? " if similar else ""
        raise ValueError(f"There is no algorithm {group}. {meant}There are {', '.join(known)}.")


def _check_fit(env_id: str, settings: dict[str, Any]) -> None:
    atari = is_atari(gym.spec(env_id))
    if atari and settings.get("native", True):
        game_arguments(gym.spec(env_id))
    if not atari and settings.get("dtype") == "bfloat16":
        raise ValueError(
            f"`dtype` is 'bfloat16', but {env_id} is not an Atari game, and only the network for these has another precision. "
            "Leave `--dtype` out."
        )


def _check_other_name(run: Run) -> None:
    for group in (*FIELD_NAMES, *FIELD_NAMES.values()):
        other = Path(run.folder).with_name(f"{group}_seed-{run.seed}")
        if group != run.group and field_name(group) == field_name(run.group) and (other / "run.json").is_file():
            raise ValueError(
                f"{other} is the run of {run.group} with this seed, by its other name. Give `--algos {group}` to go on with "
                "it, or another `--output`."
            )


def check_hyperparams(runs: Sequence[Run]) -> None:
    """
    :param runs: Runs of a study
    :raises ValueError: if their file with hyperparameters cannot be used, or a finished run had other ones or an unfinished
        one another number of steps or other environments, because the preset or the file has changed since
    """
    known: dict[str, dict[str, Any]] = {}
    for run in runs:
        # Reading the file takes longer than all else
        key = json.dumps([run.algo, run.env_id, run.config, run.hyperparams], sort_keys=True, default=str)
        if key not in known:
            known[key] = parse_config(yaml.dump(hyperparams_of(run)))
        now, path = known[key], Path(run.folder, env_dirname(run.env_id), "config.yml")
        if run.failed_at_once or not path.is_file():
            continue
        try:
            before = read_config(path)
        except ValueError:
            if run.finished:
                raise
            # Left half written by a killed process; the run writes it again
            continue
        # Exact resume compares the arguments of an unfinished run. It does not compare the length, and schedules depend
        # on that, nor how environments are made, because their settings come from the checkpoint
        names = {*now, *before} if run.finished else {"n_timesteps", *ENVIRONMENT_ENTRIES}
        if run.n_timesteps:
            names -= {"n_timesteps"}
        different = changed_entries(now, before, sorted(names))
        if different:
            raise ValueError(
                f"{run.folder} is {'a finished' if run.finished else 'an unfinished'} run with other hyperparameters: "
                f"{'; '.join(different)}. Its preset or its file has changed since. Restore that, or give another folder with "
                "`--output`."
            )


def check_entry(finding: str, name: str, value: Any, algo: str, zoo_entries: set[str]) -> None:
    """
    :param finding: Where the entry is, as the beginning of the message
    :param name: Name of an entry of hyperparameters
    :param value: Its value
    :param algo: Algorithm, by its name in RL Zoo
    :param zoo_entries: Entries of RL Zoo that are allowed too
    :raises ValueError: if the algorithm has no such argument, and RL Zoo no such entry, or its value is a number as text
    """
    if isinstance(value, str) and _is_number(value):
        raise ValueError(f"{finding}, whose value is the text {value!r}. YAML floats need a decimal point: 1.0e-3, or 0.001.")
    arguments = [argument for argument in inspect.signature(ALGOS[algo]).parameters if argument not in OF_THE_STUDY]
    if name not in arguments and name not in zoo_entries:
        raise ValueError(
            f"{finding}, which is neither an argument of {ALGOS[algo].__name__} ({', '.join(arguments)}) "
            f"nor one of {', '.join(sorted(zoo_entries))}."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def hyperparams_of(run: Run) -> dict[str, Any]:
    """
    :param run: A run
    :return: its hyperparameters: those of its preset or file, and the run's own
    :raises ValueError: if the file cannot be used
    """
    return _read_hyperparams(run)[1]


def _read_hyperparams(run: Run) -> tuple[StudyManager, dict[str, Any]]:
    manager = StudyManager(run)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            hyperparams, _ = manager.read_hyperparameters()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{manager.config} is not a YAML file: {error}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{manager.config} has no hyperparameters by environment: {error}.") from None
    except (ImportError, KeyError) as error:
        if error.args == ("atari",):
            raise ValueError(
                f"Hyperparameters not found for {run.algo}-{run.env_id} in {manager.config}, which has no {run.env_id} or "
                "`atari`."
            ) from None
        # RL Zoo takes every other name for that of a module
        raise ValueError(
            f"{manager.config} cannot be read: {error}. It must be a YAML file (.yml, .yaml) with hyperparameters by "
            "environment, or a Python file (.py) that has them in `hyperparams`."
        ) from None
    for name, value in hyperparams.items():
        source = f"`-params` or the group {run.group}" if name in run.hyperparams else manager.config
        finding = f"{source} has the entry {name!r} for {run.env_id}"
        check_entry(finding, name, value, run.algo, ZOO_ENTRIES | OTHER_ENTRIES)
        if name in COUNTS:
            check_number(f"{name}` for `{run.env_id}` in `{manager.config}", value, minimum=1)
    missing = [name for name in ("n_timesteps", "policy") if name not in hyperparams]
    if missing:
        raise ValueError(f"{manager.config} has no entry {missing[0]!r} for {run.env_id}.")
    return manager, hyperparams


def with_evaluations(runs: Sequence[Run]) -> list[Run]:
    """
    :param runs: Runs of a study
    :return: the same, each with an evaluation at least at every quarter
    """
    steps = {
        (run.group, run.env_id): run.n_timesteps or int(float(hyperparams_of(run)["n_timesteps"]))
        for run in _one_of_each(runs)
    }
    return [replace(run, eval_freq=max(min(run.eval_freq, steps[run.group, run.env_id] // 4), 1)) for run in runs]


def _one_of_each(runs: Sequence[Run]) -> list[Run]:
    """:return: one of the runs that differ in their seed only"""
    return list({(run.group, run.env_id): run for run in runs}.values())


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """
    :param runs: Runs of a study
    :return: lines about what these runs do that the user may not expect
    """
    n_envs: dict[str, dict[str, int]] = {}
    for run in _one_of_each(runs):
        manager, hyperparams = _read_hyperparams(run)
        n_envs.setdefault(run.env_id, {})[field_name(run.group)] = hyperparams.get("n_envs", 1)
        if manager.policy_choice:
            yield manager.policy_choice
        n_steps, n = hyperparams.get("n_steps", _default_n_steps(run.algo)), hyperparams.get("n_envs", 1)
        steps = run.n_timesteps or int(float(hyperparams["n_timesteps"]))
        # The algorithm refuses other than whole numbers. Nobody minds a few steps more
        trained = -(-steps // (n * n_steps)) * n * n_steps if isinstance(n_steps, int) and n_steps > 0 else steps
        if trained > 1.05 * steps:
            yield (
                f"{field_name(run.group)} on {run.env_id} trains {trained:,} steps instead of {steps:,}, because each rollout "
                f"has {n * n_steps:,} (`n_steps` {n_steps:,} x `n_envs` {n})."
            )
    for env_id, by_group in n_envs.items():
        if len(set(by_group.values())) > 1:
            listed = ", ".join(f"{n} ({group})" for group, n in by_group.items())
            yield (
                f"on {env_id} algorithms are compared that have different numbers of environments: {listed}. "
                "`-params n_envs:8` gives all of them 8."
            )


def _default_n_steps(algo: str) -> int:
    parameter = inspect.signature(ALGOS[algo]).parameters.get("n_steps")
    return getattr(parameter, "default", 1)


def resume_hint(runs: Sequence[Run]) -> str:
    """
    :param runs: Runs of a study that was interrupted
    :return: what the same command does with them, as the end of a sentence
    """
    # A preset may have an entry that cannot be resumed
    algos = {run.algo for run in runs if not run.finished and not is_resumable(ALGOS[run.algo], hyperparams_of(run))}
    return f"resumes it, but unfinished runs of {', '.join(sorted(algos))} begin again" if algos else "resumes it"


def describe_failure(folder: str, error: str) -> str:
    """
    :param folder: Folder of a run that failed
    :param error: Its error
    :return: the error, and where its traceback is, if there is one
    """
    # There is none if its machine was lost, or the disk is full
    file = Path(folder, "error.txt")
    return f"{error} (see error.txt in that folder)" if file.is_file() and file.stat().st_size else error


def run_study(runs: Sequence[Run], jobs: int = 1, ray_address: str | None = None, as_json: bool = False) -> dict[str, str]:
    """
    Train all runs that are not finished, and show their progress. After Ctrl-C the same call resumes them. Runs that another
    process trains are skipped, so that several processes and machines can share the folder of a study.

    :param runs: Runs of the study
    :param jobs: Number of runs at once on this machine, each in its own process
    :param ray_address: Address of a Ray cluster to run them on instead, "auto" for the one of this machine. The folders of
        the runs must be the same on all of its machines.
    :param as_json: Whether lines about the progress, which there are outside terminals, are JSON objects
    :return: what went wrong, by the folder of the run
    :raises ValueError: if a folder contains a run with other settings or hyperparameters, or a file with hyperparameters
        cannot be used
    :raises KeyboardInterrupt: after Ctrl-C, when a checkpoint has been written
    """
    if not runs:
        # As of a round of a search that is finished: an empty table says nothing
        return {}
    for run in runs:
        _check_other_name(run)
        check_same_run(run)
    check_hyperparams(runs)
    pending = [run for run in runs if not run.finished]
    failed: dict[str, str] = {}
    with progress(runs, failed, as_json) as console:
        for run, error in run_on_ray(pending, ray_address) if ray_address else run_here(pending, jobs):
            if error == ELSEWHERE:
                skipped = to_json({"run": run.folder, "skipped": error}, indent=None)
                console.out(skipped if as_json else f"{run.folder} is skipped: {error}", highlight=False)
                continue
            if error is not None:
                failed[run.folder] = error
            elif not run.finished:
                # RL Zoo catches Ctrl-C and does not pass it on
                raise KeyboardInterrupt
            if not console.is_terminal and run.finished:
                console.out(progress_line(run, status_of(run), True) if as_json else next(summary([run])), highlight=False)
    return failed


def run_here(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, str | None]]:
    """
    :param runs: Runs to train or to resume
    :param jobs: Number of runs at once
    :return: each run in its turn, and its error, if there was one
    """
    if jobs > 1:
        yield from train_in_processes(runs, jobs)
    else:
        for run in runs:
            yield run, train_run(run)


def run_on_ray(runs: Sequence[Run], address: str) -> Iterator[tuple[Run, str | None]]:
    """
    Ray chooses the machine of each run. If a machine or process is lost, its run is retried elsewhere, from its last
    checkpoint.

    :param runs: Runs to train or to resume
    :param address: Address of a Ray cluster
    :return: each run as it ends, and its error, if there was one
    :raises ConnectionError: if there is no cluster
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    tasks = {}
    for run in runs:
        n_gpus = 1 if run.device.startswith("cuda") else 0
        train = ray.remote(num_cpus=run.n_threads, num_gpus=n_gpus, max_retries=RAY_RETRIES)(train_run)
        # A worker has another working directory
        # A retry waits until the lost process is gone
        tasks[train.remote(replace(run, folder=os.path.abspath(run.folder)), wait=True)] = run
    try:
        while tasks:
            (task,), _ = ray.wait(list(tasks))
            run = tasks.pop(task)
            try:
                yield run, ray.get(task)
            except ray.exceptions.RayError as error:
                yield run, first_line(error)
    finally:
        # After Ctrl-C each writes a checkpoint
        for task in tasks:
            ray.cancel(task)
        if tasks:
            ray.wait(list(tasks), num_returns=len(tasks), timeout=RAY_GRACE)
        ray.shutdown()


def check_ray_address(address: str) -> None:
    """
    :param address: Address of a Ray cluster: "auto", "host:port", or one with "ray://"
    :raises ValueError: if it is not an address, or nothing answers there (Ray itself would try for minutes)
    """
    host, _, port = address.rpartition(":")
    if address == "auto" or address.startswith("ray://"):
        return
    if not host or not port.isdigit():
        raise ValueError(f"`ray` must be 'auto', HOST:PORT or ray://HOST:PORT, but {address!r} was given.")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ValueError(f"There is no Ray cluster at {address}: {error}. `ray start --head` starts one.") from None
