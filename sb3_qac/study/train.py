"""Train one run of a study, from its settings to its folder."""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import stable_baselines3
import torch as th
from filelock import FileLock, Timeout
from stable_baselines3.common.utils import set_random_seed

import sb3_qac
from sb3_qac.common.checks import check_device
from sb3_qac.common.files import make_folder, read_json, write_atomically
from sb3_qac.common.process import processor
from sb3_qac.resume.checkpoints import CheckpointError, checkpoints_in
from sb3_qac.resume.state import StateError
from sb3_qac.resume.wandb import wandb_run_id
from sb3_qac.study.loading import CURVES_FILE, DIAGNOSIS_FILE, NOISE_FILE
from sb3_qac.study.manager import StudyManager
from sb3_qac.study.run import Run, check_same_run, env_dirname
from sb3_qac.zoo import register

# The outcome of a run whose folder is locked
ELSEWHERE = "another process trains it"


def train_run(run: Run, wait: bool = False) -> str | None:
    """
    Train or resume one run of a study. A finished run is not repeated, and one with other settings is left as it is.

    :param run: The run
    :param wait: Whether to wait for another process that trains it, instead of leaving the run to it
    :return: None, or the error; that of a run is also in the run's ``error.txt``, unless the disk is full
    """
    try:
        folder = make_folder(Path(run.folder))
    except ValueError as error:
        return str(error)
    try:
        with FileLock(folder / "lock", timeout=-1 if wait else 0):
            # Again: a process that had the lock may have begun it with other settings
            check_same_run(run)
            return None if run.finished else _train_or_tell(run)
    except Timeout:
        return ELSEWHERE
    except ValueError as error:
        return str(error)


def _train_or_tell(run: Run) -> str | None:
    folder = Path(run.folder)
    error_file = folder / "error.txt"
    try:
        with open(folder / "printed.txt", "a") as printed, contextlib.redirect_stdout(printed):
            _train(run)
    except Exception as error:
        # A full disk may be the error
        with contextlib.suppress(OSError):
            error_file.write_text(traceback.format_exc(), encoding="utf-8")
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """
    :param error: An error, whose message may have several lines
    :return: its class, and the first line of its message
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _train(run: Run) -> None:
    check_device(run.device)
    register()
    th.set_num_threads(run.n_threads)
    set_random_seed(run.seed)
    # A start that is refused trains nothing, so its commit and machine do not belong to the run
    run_file = Path(run.folder, "run.json")
    run_before = run_file.read_bytes() if run_file.is_file() and not run.failed_at_once else None
    with wandb_run_of(run) as url:
        settings = {**asdict(run), **provenance(), "wandb_url": url}
        # Not the folder: a study can be moved
        del settings["folder"]
        settings["commit"] = commits_of(run, settings["commit"])
        write_atomically(run_file, json.dumps(settings, indent=1).encode())
        if run.failed_at_once:
            # It may have other settings now
            shutil.rmtree(Path(run.folder, "checkpoints"), ignore_errors=True)
        Path(run.folder, "error.txt").unlink(missing_ok=True)
        manager = StudyManager(run)
        config = Path(run.folder, env_dirname(run.env_id), "config.yml")
        config_before = config.read_bytes() if config.is_file() else None
        monitors_before = {path: path.read_bytes() for path in Path(run.folder).glob("*.monitor.csv")}
        try:
            result = manager.setup_experiment()
            assert result is not None
            if not checkpoints_in(Path(run.folder, "checkpoints")):
                # It begins again: its first evaluation is yet to come, and its log must not continue the former one
                for name in ("evaluations.npz", "best_model.zip", CURVES_FILE, DIAGNOSIS_FILE, NOISE_FILE):
                    Path(run.folder, name).unlink(missing_ok=True)
                for name in ("tensorboard", "snapshots"):
                    shutil.rmtree(Path(run.folder, name), ignore_errors=True)
            try:
                manager.learn(result[0])
            except (CheckpointError, StateError):
                # RL Zoo has written the hyperparameters that are refused here, and not those of the checkpoint. The
                # environments have begun new monitor files
                for path, content in {config: config_before, run_file: run_before, **monitors_before}.items():
                    if content is not None:
                        write_atomically(path, content)
                raise
            finally:
                manager.status.update()
            # RL Zoo catches Ctrl-C
            if manager.status.ended:
                manager.finish(result[0])
        finally:
            for env in manager.envs:
                env.close()


@contextlib.contextmanager
def wandb_run_of(run: Run) -> Iterator[str | None]:
    """
    Context manager: while active, there is a run of Weights & Biases: the earlier one if there was one, else a new one.

    :param run: Run of a study
    :return: its address, if it has one
    """
    if run.wandb == "disabled":
        yield None
        return
    import wandb

    wandb_run = wandb.init(
        project=f"sb3_qac-{env_dirname(run.env_id)}",
        name=run.name,
        group=run.group,
        id=wandb_run_id(Path(run.folder, "checkpoints")),
        resume="allow",
        mode=run.wandb,  # type: ignore[arg-type]
        dir=run.folder,
        config=asdict(run),
        settings=wandb.Settings(silent=True, console="off"),
    )
    try:
        # Asked offline, it warns that there is none
        yield wandb_run.url if run.wandb == "online" else None
    except BaseException:
        # As `with wandb.init()` does, which prints the traceback too: it is in error.txt
        wandb_run.finish(exit_code=1)
        raise
    wandb_run.finish()


def commits_of(run: Run, commit: str | None) -> str | None:
    """
    :param run: Run that is about to be trained
    :param commit: Commit of the code that will train it
    :return: the commits of all its starts; None if none is known
    """
    folder = Path(run.folder)
    resumed = not run.failed_at_once and checkpoints_in(folder / "checkpoints")
    before = read_json(folder / "run.json").get("commit") if resumed else None
    return ", ".join(dict.fromkeys(filter(None, [*(before or "").split(", "), commit]))) or None


def _git(*command: str) -> str | None:
    """
    :param command: Command of git, run in the folder of this package
    :return: what it prints; None if it fails, or if there is no git
    """
    try:
        words = ["git", "-C", str(Path(sb3_qac.__file__).parent), *command]
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def provenance() -> dict[str, Any]:
    """:return: versions, git commit and machine"""
    # An installed package may lie inside another project's repository, which does not know its files
    is_checkout = _git("ls-files", Path(sb3_qac.__file__).name) is not None
    return {
        "versions": {
            "python": platform.python_version(),
            "sb3_qac": sb3_qac.__version__,
            "stable_baselines3": stable_baselines3.__version__,
            "torch": th.__version__,
            "gymnasium": gym.__version__,
        },
        "commit": _git("describe", "--always", "--dirty") if is_checkout else None,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": os.cpu_count(),
            "gpu": th.cuda.get_device_name(0) if th.cuda.is_available() else None,
        },
    }
