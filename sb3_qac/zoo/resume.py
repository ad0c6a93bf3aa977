"""Exact resume under RL Zoo: a command that is run again finds its unfinished run."""

import argparse
import functools
import json
import os
import re
import shlex
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from filelock import FileLock, Timeout
from stable_baselines3.common.utils import set_random_seed

from sb3_qac.common.files import read_json
from sb3_qac.resume import ExactCheckpointCallback
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
    :return: Folder of the newest run that the same command started with these hyperparameters and this seed, keeps exact
        checkpoints, is not finished, and is not used by any process; None if there is none
    """
    # With `--uuid`, RL Zoo appends one to the number, which is then 1 for all
    name = re.compile(rf"{re.escape(env_name)}_(\d+)(_[0-9a-f-]{{36}})?")
    runs = {path: int(match[1]) for path in log_path.glob("*") if (match := name.fullmatch(path.name))}
    for run in sorted(runs, key=lambda path: (runs[path], path.stat().st_mtime), reverse=True):
        try:
            known = json.loads((run / "checkpoints" / "run.json").read_text())
        except (OSError, ValueError):
            continue
        same = hyperparams in (None, known.get("hyperparams")) and seed in (None, known.get("seed"))
        same = same and (command is None or _arguments_of(known["command"]) == _arguments_of(command))
        # A kill may come between the end of a run and the agent
        if same and not (known["finished"] and has_agent(run, env_name)):
            try:
                with FileLock(run / "checkpoints" / "lock", blocking=False):
                    return run
            except Timeout:
                continue
    return None


def has_agent(run: Path, env_name: str) -> bool:
    """
    :param run: Folder of a run
    :param env_name: Name of the environment, as RL Zoo writes it
    :return: Whether RL Zoo has saved the trained agent, and it is complete
    """
    try:
        with zipfile.ZipFile(run / f"{env_name}.zip") as agent:
            # Without this entry it was cut short, and ends with one of the zip files of PyTorch inside it
            return "data" in agent.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _arguments_of(command: Sequence[str]) -> dict[str, Any]:
    """
    :param command: Command line of ``rl_zoo3.train``, perhaps of a file: its values are not evaluated
    :return: where its run is, and the words after each other option but those that do not change the results, in whatever
        order: ``--seed=1`` is ``--seed 1``. That of another program, which imports RL Zoo, is returned as it is.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("-f", "--log-folder", default="logs")
    parser.add_argument("-P", "--progress", action="store_true")
    parser.add_argument("--verbose")
    try:
        arguments, others = parser.parse_known_args(command[1:])
    except argparse.ArgumentError:
        return {"command": list(command[1:])}
    words = dict[str, list[str]]()
    option = ""
    for word in others:
        # Not a negative number
        if re.match("-[^0-9.]", word):
            option, _, word = word.partition("=")
            words[option] = []
        if word:
            words.setdefault(option, []).append(word)
    found = {name: vars(arguments)[name] for name in ("algo", "env", "log_folder")}
    return {**found, **{option: sorted(values) for option, values in words.items()}}


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
            self.hyperparams_as_read = yaml.dump({**saved_hyperparams, "trained_agent": self.trained_agent})
        return hyperparams, saved_hyperparams

    @functools.wraps(create_log_folder)
    def create_or_find_log_folder(self: Any) -> None:
        run = None
        callback = next((callback for callback in self.callbacks if isinstance(callback, ExactCheckpointCallback)), None)
        if callback is not None and self.optimize_hyperparameters:
            # A trial has no folder of its own
            specified = self.specified_callbacks if isinstance(self.specified_callbacks, list) else [self.specified_callbacks]
            self.specified_callbacks = [each for each in specified if ExactCheckpointCallback.__name__ not in str(each)]
        elif callback is not None:
            run = _run_to_resume(self, callback)
            if run is not None:
                self.save_path = str(run)
                self.params_path = f"{run}/{self.env_name}"
            callback.folder = callback.folder or Path(self.save_path) / "checkpoints"
            if "wandb" in sys.modules:
                # The callback logs every row itself, so that no row is lost or logged twice
                sys.modules["wandb"].tensorboard.unpatch()
        _check_wandb_run_of(run)
        create_log_folder(self)

    manager_class.read_hyperparameters = read_and_keep_hyperparameters
    manager_class.create_log_folder = create_or_find_log_folder


def _run_to_resume(manager: Any, callback: ExactCheckpointCallback) -> Path | None:
    """
    :param manager: RL Zoo's manager, which takes the seed of the run: without ``--seed``, RL Zoo draws another at each start
    :param callback: The callback among the hyperparameters
    :return: Folder of its unfinished run; None if it has none
    """
    # A subclass may have read hyperparameters in its own way
    callback.hyperparams = getattr(manager, "hyperparams_as_read", None)
    log_path, env_name = Path(manager.log_path), str(manager.env_name)
    # In a loop of a script, runs have the same command line, without a seed
    seed = None if hasattr(manager.args, "seed") else manager.seed
    run = unfinished_run(log_path, env_name, sys.argv, callback.hyperparams, seed)
    if run is None:
        other = unfinished_run(log_path, env_name)
        if other is not None:
            command = shlex.join(read_json(other / "checkpoints" / "run.json")["command"])
            print(
                f"The hyperparameters or arguments are not those of the unfinished run in {other}, whose hyperparameters are "
                f"in {other / env_name / 'config.yml'} and whose command was `{command}`. It is not resumed."
            )
        return None
    seed = read_json(run / "checkpoints" / "run.json").get("seed")
    if seed not in (None, manager.seed):
        print(f"Seed: {seed}, from the run in {run}")
        manager.seed = manager.args.seed = seed
        set_random_seed(seed)
        wandb_run = active_wandb_run()
        if wandb_run is not None:
            wandb_run.config.update({"seed": seed}, allow_val_change=True)
    return run


# The run of Weights & Biases that this process resumes, chosen before its folder is known
_resumed_wandb_run: str | None = None


def _check_wandb_run_of(run: Path | None) -> None:
    """
    :param run: Folder of the run that is resumed; None for a new run
    :raises ValueError: if the active run of Weights & Biases belongs to a different run, as after a change of hyperparameters
    """
    wandb_run = active_wandb_run()
    if wandb_run is None or wandb_run.id != _resumed_wandb_run:
        return
    if run is None or wandb_run_id(run / "checkpoints") != wandb_run.id:
        raise ValueError(
            f"`--track` has resumed the run {wandb_run.id} of Weights & Biases, but it belongs to an unfinished run with "
            "other hyperparameters. Restore those to resume that run. For a new run, give another `--log-folder`."
        )


def resume_wandb(exp_manager: ModuleType) -> None:
    """RL Zoo starts its run of Weights & Biases before anything else. These variables make it resume the earlier one."""
    # The script `rl_zoo3` will remove the name of its command
    command = sys.argv[:1] + sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv
    arguments = _arguments_of(command)
    if "--track" not in command or "env" not in arguments:
        return
    env_name = exp_manager.EnvironmentName(arguments["env"])
    run = unfinished_run(Path(arguments["log_folder"], arguments["algo"]), env_name, command)
    run_id = None if run is None else wandb_run_id(run / "checkpoints")
    if run_id is not None:
        # Another id is the user's, or that of an earlier call
        if "WANDB_RUN_ID" not in os.environ:
            global _resumed_wandb_run
            os.environ["WANDB_RUN_ID"] = _resumed_wandb_run = run_id
        os.environ.setdefault("WANDB_RESUME", "allow")
