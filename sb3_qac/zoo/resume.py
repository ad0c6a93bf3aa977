"""Exact resume under RL Zoo: a command that is run again finds its unfinished run."""

import argparse
import ast
import contextlib
import functools
import importlib.resources
import json
import os
import re
import shlex
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml
from filelock import FileLock, Timeout
from stable_baselines3.common.utils import set_random_seed

from sb3_qac.common.files import make_folder, read_json
from sb3_qac.resume import ExactCheckpointCallback
from sb3_qac.resume.folder import lock_of
from sb3_qac.resume.wandb import active_wandb_run, wandb_run_id


def unfinished_run(
    log_path: Path,
    env_name: str,
    command: Sequence[str] | None = None,
    hyperparams: str | None = None,
    seed: int | None = None,
) -> Path | None:
    """
    :param log_path: Folder with the runs of an algorithm
    :param env_name: Name of the environment, as RL Zoo writes it
    :param command: Command line; None for any
    :param hyperparams: Hyperparameters, as YAML; None for any
    :param seed: Seed; None for any
    :return: Folder of the newest run that the same command, in any spelling, started with these hyperparameters and this seed,
        keeps exact checkpoints, is not finished, and is not used by any process; None if there is none
    """
    # With `--uuid`, RL Zoo appends one to the number, which is then 1 for all
    name = re.compile(rf"{re.escape(env_name)}_(\d+)(_[0-9a-f-]{{36}})?")
    runs = {path: int(match[1]) for path in log_path.glob("*") if (match := name.fullmatch(path.name))}
    for run in sorted(runs, key=lambda path: (runs[path], path.stat().st_mtime), reverse=True):
        try:
            known = json.loads((run / "checkpoints" / "run.json").read_text())
        except (OSError, ValueError):
            continue
        finished = known["finished"] and has_agent(run, env_name, known["num_timesteps"])
        same = hyperparams in (None, known.get("hyperparams")) and seed in (None, known.get("seed"))
        same = same and (command is None or _what_is_run(known["command"]) == _what_is_run(command))
        if not finished and same:
            try:
                with FileLock(run / "checkpoints" / "lock", blocking=False):
                    return run
            except Timeout:
                continue
    return None


def has_agent(run: Path, env_name: str, steps: int | None = None) -> bool:
    """
    :param run: Folder of a run
    :param env_name: Name of the environment, as RL Zoo writes it
    :param steps: Steps after which the run has ended; None if they are not known
    :return: Whether RL Zoo has saved the trained agent, which it does after the run has ended; a kill may come before,
        and there may be the agent of an earlier Ctrl-C
    """
    try:
        with zipfile.ZipFile(run / f"{env_name}.zip") as agent:
            # Without this entry it was cut short, and ends with one of the zip files of PyTorch inside it
            data = json.loads(agent.read("data"))
            return steps is None or data.get("num_timesteps", steps) == steps
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


@functools.cache
def _zoo_parser() -> argparse.ArgumentParser:
    """
    :return: a parser with the options of ``rl_zoo3.train`` and their defaults, which leaves the values as text. RL Zoo makes
        its own within ``train``, so they are read from the source. Its values must not be evaluated here, as those of
        ``-params`` are there: the command may come from a file.
    """
    parser = _Parser(add_help=False)
    source = importlib.resources.files("rl_zoo3").joinpath("train.py").read_text()
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            settings = {str(x.arg): x.value for x in call.keywords if x.arg in ("nargs", "action", "default")}
            # Another version may compute them
            with contextlib.suppress(ValueError):
                # Without an action that is a class
                literals = {k: ast.literal_eval(value) for k, value in settings.items() if not isinstance(value, ast.Name)}
                parser.add_argument(*map(ast.literal_eval, call.args), **literals)
    return parser


def _zoo_arguments(command: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """
    :param command: Command line
    :return: the arguments of ``rl_zoo3.train``, and what is left
    """
    try:
        return _zoo_parser().parse_known_args(command[1:])
    except argparse.ArgumentError:
        # The command line of another program, which imports RL Zoo
        return _zoo_parser().parse_args([]), list(command[1:])


def _what_is_run(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """
    :param command: Command line
    :return: its arguments without those that do not change the results
    """
    arguments, others = _zoo_arguments(command)
    # In whatever order their values are, as those of `-params`. Of several with one key, the last counts
    values = {
        name: sorted(value, key=lambda item: item.partition(":")[0]) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
    }
    return {name: str(value) for name, value in values.items() if name not in ("progress", "verbose")}, others


def resume_exactly(exp_manager: ModuleType) -> None:
    """
    With an ``ExactCheckpointCallback`` among the hyperparameters, a command that is run again resumes its unfinished run, in
    the same folder, with the same seed and in the same run of Weights & Biases. With other hyperparameters, such as those of a
    file that was edited, it starts a new run.
    """
    manager_class = exp_manager.ExperimentManager
    read_hyperparameters, create_log_folder = manager_class.read_hyperparameters, manager_class.create_log_folder

    @functools.wraps(read_hyperparameters)
    def read_and_keep_hyperparameters(self: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        hyperparams, saved_hyperparams = read_hyperparameters(self)
        if "callback" in saved_hyperparams and not self.optimize_hyperparameters:
            # Text, because RL Zoo changes some of the values later
            self.hyperparams_as_read = yaml.dump(dict(saved_hyperparams))
        return hyperparams, saved_hyperparams

    @functools.wraps(create_log_folder)
    def create_or_find_log_folder(self: Any) -> None:
        _leave_taken()
        callback = next((callback for callback in self.callbacks if isinstance(callback, ExactCheckpointCallback)), None)
        if callback is not None and self.optimize_hyperparameters:
            # A trial has no folder of its own
            self.specified_callbacks = without_checkpoints(self.specified_callbacks)
        elif callback is not None:
            run = _run_to_resume(self, callback)
            _check_wandb_run_of(run)
            if run is not None:
                self.save_path = str(run)
                self.params_path = f"{run}/{self.env_name}"
                _take_seed_of(run, self)
            callback.folder = callback.folder or Path(self.save_path) / "checkpoints"
            if "wandb" in sys.modules:
                # The callback logs every row itself, so that no row is lost or logged twice
                sys.modules["wandb"].tensorboard.unpatch()
        else:
            _check_wandb_run_of(None)
        # RL Zoo's method does not say what to do if that fails
        make_folder(Path(self.params_path))
        create_log_folder(self)

    manager_class.read_hyperparameters = read_and_keep_hyperparameters
    manager_class.create_log_folder = create_or_find_log_folder


def _run_to_resume(manager: Any, callback: ExactCheckpointCallback) -> Path | None:
    """
    :param manager: RL Zoo's manager
    :param callback: The callback among the hyperparameters
    :return: Folder of its unfinished run, which no other process can take any more; None if it has none
    """
    callback.hyperparams, seed = _settings_of(manager)
    log_path, env_name = Path(manager.log_path), str(manager.env_name)
    find = functools.partial(unfinished_run, log_path, env_name, sys.argv, seed=seed)
    run, other = find(callback.hyperparams), find()
    if run is None and other is None:
        other = unfinished_run(log_path, env_name)
    if other is not None and other != run:
        _leave(other, env_name)
    while run is not None and not _take(run):
        run = find(callback.hyperparams)
    return run


def _settings_of(manager: Any) -> tuple[str | None, int | None]:
    """
    :param manager: RL Zoo's manager
    :return: what tells its run from others of the same command: hyperparameters, as YAML, and the seed; None for any
    """
    # A subclass may have read hyperparameters in its own way
    hyperparams = getattr(manager, "hyperparams_as_read", None)
    if hasattr(manager.args, "seed"):
        return hyperparams, None
    # Without a command line, as in a loop of a script
    if manager.trained_agent:
        hyperparams = yaml.dump({"trained_agent": manager.trained_agent}) + (hyperparams or "")
    return hyperparams, manager.seed


def without_checkpoints(specified: Any) -> list[Any]:
    """
    :param specified: Entry ``callback`` of RL Zoo's hyperparameters: a callback, its name, or a mapping of its name to its
        arguments; or a list of these
    :return: the others than ``ExactCheckpointCallback`` and its subclasses
    """
    # Not at the top: RL Zoo is still being imported there
    from rl_zoo3.utils import get_callback_list

    callbacks = specified if isinstance(specified, list) else [specified]
    made = get_callback_list({"callback": callbacks})
    return [each for each, callback in zip(callbacks, made, strict=True) if not isinstance(callback, ExactCheckpointCallback)]


def _leave(run: Path, env_name: str) -> None:
    """
    :param run: Folder of an unfinished run with other hyperparameters or arguments
    :param env_name: Name of the environment, as RL Zoo writes it
    :raises ValueError: if its run of Weights & Biases is resumed already, which RL Zoo does before it reads hyperparameters
    """
    command = shlex.join(read_json(run / "checkpoints" / "run.json")["command"])
    reason = (
        f"The hyperparameters or arguments are not those of the unfinished run in {run}, whose hyperparameters are in "
        f"{run / env_name / 'config.yml'} and whose command was `{command}`."
    )
    wandb_run = active_wandb_run()
    if wandb_run is not None and wandb_run.id == wandb_run_id(run / "checkpoints"):
        raise ValueError(
            f"{reason} But `--track` has resumed its run of Weights & Biases already. Restore those hyperparameters to resume "
            "that run. For a new run, give another `--log-folder`, or move that folder away."
        )
    print(f"{reason} It is not resumed.")


# The run of Weights & Biases that this process resumes, chosen before its folder is known
_resumed_wandb_run: str | None = None


def _check_wandb_run_of(run: Path | None) -> None:
    """
    :param run: Folder of the run that is resumed; None for a new run
    :raises ValueError: if the active run of Weights & Biases belongs to a different run. Another process may have taken the
        run that was found first, or the hyperparameters no longer have an ``ExactCheckpointCallback``.
    """
    wandb_run = active_wandb_run()
    if wandb_run is None or wandb_run.id != _resumed_wandb_run:
        return
    if run is None or wandb_run_id(run / "checkpoints") != wandb_run.id:
        _leave_taken()
        raise ValueError(
            f"`--track` has resumed the run {wandb_run.id} of Weights & Biases, but it belongs to another run of "
            "RL Zoo: another process has resumed that one meanwhile, or the hyperparameters no longer have an "
            "`ExactCheckpointCallback`. Start the command again. To leave an unfinished run, give another `--log-folder`."
        )


# The lock of the run that this process has found last
_taken: list[FileLock] = []


def _leave_taken() -> None:
    """Leave the run of an earlier start in this process, which may have failed before its training began."""
    while _taken:
        _taken.pop().release(force=True)


def _take(run: Path) -> bool:
    """
    Keep other processes from the run until the callback has its folder, after all environments are made.

    :param run: Folder of an unfinished run
    :return: whether no other process has taken it meanwhile
    """
    lock = lock_of(run / "checkpoints")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    _taken.append(lock)
    return True


def _take_seed_of(run: Path, manager: Any) -> None:
    """
    Take the seed of the run. Without ``--seed``, RL Zoo draws another seed at each start, before it knows its folder.

    :param run: Folder of the run to resume
    :param manager: RL Zoo's manager, which has not made its environments yet
    """
    seed = read_json(run / "checkpoints" / "run.json").get("seed")
    if seed is None or seed == manager.seed:
        return
    print(f"Seed: {seed}, from the run in {run}")
    manager.seed = manager.args.seed = seed
    set_random_seed(seed)
    wandb_run = active_wandb_run()
    if wandb_run is not None:
        wandb_run.config.update({"seed": seed}, allow_val_change=True)


def resume_wandb(exp_manager: ModuleType) -> None:
    """RL Zoo starts its run of Weights & Biases before anything else. These variables make it resume the earlier one."""
    # The script `rl_zoo3` will remove the name of its command
    command = sys.argv[:1] + sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv
    arguments, _ = _zoo_arguments(command)
    if not getattr(arguments, "track", False):
        return
    env_name = exp_manager.EnvironmentName(arguments.env)
    run = unfinished_run(Path(arguments.log_folder, arguments.algo), env_name, command)
    run_id = None if run is None else wandb_run_id(run / "checkpoints")
    if run_id is not None:
        # Another id is the user's, or that of an earlier call
        if "WANDB_RUN_ID" not in os.environ:
            global _resumed_wandb_run
            os.environ["WANDB_RUN_ID"] = _resumed_wandb_run = run_id
        os.environ.setdefault("WANDB_RESUME", "allow")
