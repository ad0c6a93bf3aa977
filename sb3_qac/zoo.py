"""
Registration with RL Zoo: the algorithm, its search space and its presets.

RL Zoo has no plugins. Its own documentation registers an algorithm by writing into ``rl_zoo3.ALGOS``; this does it for
all three places that ask for the algorithm's name. It happens by itself through ``sb3_qac_zoo_hook``, or by ``register()``.
"""

import argparse
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import set_random_seed

from sb3_qac.common.callbacks import ExactCheckpointCallback, active_wandb_run, wandb_run_id
from sb3_qac.common.checkpoints import read_json
from sb3_qac.common.checks import check_package
from sb3_qac.common.minatar import register_minatar_envs
from sb3_qac.common.torch_layers import LeanNatureCNN, MinAtarCNN, SharedMlp
from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO
from sb3_qac.reinforce import REINFORCE

if TYPE_CHECKING:
    import optuna

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"qa2c": QA2C, "qppo": QPPO, "reinforce": REINFORCE}


def presets(algo: str) -> Path:
    """
    :param algo: Name of an algorithm in RL Zoo: "qa2c", "qppo", "reinforce", or "a2c" for the settings QA2C is compared with
    :return: Path of the file with its hyperparameters
    """
    inside, beside = Path(__file__).parent / "hyperparams", Path(__file__).parent.parent / "hyperparams"
    return (inside if inside.is_dir() else beside) / f"{algo}.yml"


def sample_qa2c_params(trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """
    Sampler for QA2C hyperparams. Those of the policy are left as the preset has them, so that it serves every policy;
    ``baseline`` is not sampled because it cannot change the all-action gradient.

    :param trial: Trial of Optuna
    :param n_actions: (unused, for continuous actions)
    :param n_envs: Number of parallel environments of the preset
    :param additional_args: (unused, for off-policy algorithms)
    :return: Arguments of ``QA2C``
    """
    trial.suggest_int("n_steps_pow", 2, 6)
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("one_minus_gae_lambda", 0.001, 0.2, log=True)
    trial.suggest_float("learning_rate", 1e-4, 5e-3, log=True)
    trial.suggest_float("pg_coef", 0.05, 2, log=True)
    trial.suggest_float("vf_coef", 0.1, 1, log=True)
    trial.suggest_float("ent_coef", 1e-5, 0.1, log=True)
    trial.suggest_float("max_grad_norm", 0.3, 5, log=True)
    trial.suggest_categorical("beta", [0.0, 0.5, 1.0])

    hyperparams = convert_qa2c_params(trial.params)
    # Display true values
    for name in ("n_steps", "gamma", "gae_lambda"):
        trial.set_user_attr(name, hyperparams[name])
    return hyperparams


def convert_qa2c_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    :param sampled_params: Values sampled by ``sample_qa2c_params``, as Optuna stores them
    :return: Arguments of ``QA2C``
    """
    hyperparams = dict(sampled_params)
    hyperparams["n_steps"] = 2 ** hyperparams.pop("n_steps_pow")
    hyperparams["gamma"] = 1 - hyperparams.pop("one_minus_gamma")
    hyperparams["gae_lambda"] = 1 - hyperparams.pop("one_minus_gae_lambda")
    return hyperparams


def sample_qppo_params(trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """
    Sampler for QPPO hyperparams. Those of the policy are left as the preset has them, so that it serves every policy.

    :param trial: Trial of Optuna
    :param n_actions: (unused, for continuous actions)
    :param n_envs: Number of parallel environments of the preset
    :param additional_args: (unused, for off-policy algorithms)
    :return: Arguments of ``QPPO``
    """
    trial.suggest_int("n_steps_pow", 4, 8)
    trial.suggest_int("batch_size_pow", 5, 10)
    trial.suggest_int("n_epochs", 1, 8)
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("one_minus_gae_lambda", 0.01, 0.4, log=True)
    trial.suggest_float("learning_rate", 1e-4, 5e-3, log=True)
    trial.suggest_float("kl_coef", 0.03, 3, log=True)
    trial.suggest_float("ent_coef", 1e-4, 0.1, log=True)
    trial.suggest_float("vf_coef", 0.1, 1, log=True)
    trial.suggest_float("max_grad_norm", 0.3, 5, log=True)
    trial.suggest_categorical("beta", [0.5, 1.0])
    trial.suggest_categorical("advantage_scale", ["corrected", "critic"])

    hyperparams = convert_qppo_params(trial.params)
    # Display true values
    for name in ("n_steps", "batch_size", "gamma", "gae_lambda"):
        trial.set_user_attr(name, hyperparams[name])
    return hyperparams


def convert_qppo_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    :param sampled_params: Values sampled by ``sample_qppo_params``, as Optuna stores them
    :return: Arguments of ``QPPO``
    """
    hyperparams = dict(sampled_params)
    for name in ("n_steps", "batch_size"):
        hyperparams[name] = 2 ** hyperparams.pop(f"{name}_pow")
    hyperparams["gamma"] = 1 - hyperparams.pop("one_minus_gamma")
    hyperparams["gae_lambda"] = 1 - hyperparams.pop("one_minus_gae_lambda")
    return hyperparams


def sample_reinforce_params(
    trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, Any]
) -> dict[str, Any]:
    """
    Sampler for REINFORCE hyperparams. Those of the policy are left as the preset has them.

    :param trial: Trial of Optuna
    :param n_actions: (unused, for continuous actions)
    :param n_envs: Number of parallel environments of the preset
    :param additional_args: (unused, for off-policy algorithms)
    :return: Arguments of ``REINFORCE``
    """
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    trial.suggest_float("ent_coef", 1e-5, 0.1, log=True)
    for name in ("baseline", "normalize_returns"):
        trial.suggest_categorical(name, [False, True])

    hyperparams = convert_reinforce_params(trial.params)
    # Display true values
    trial.set_user_attr("gamma", hyperparams["gamma"])
    return hyperparams


def convert_reinforce_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    :param sampled_params: Values sampled by ``sample_reinforce_params``, as Optuna stores them
    :return: Arguments of ``REINFORCE``
    """
    hyperparams = dict(sampled_params)
    hyperparams["gamma"] = 1 - hyperparams.pop("one_minus_gamma")
    return hyperparams


def _check_zoo(module: ModuleType, holds: bool, assumption: str) -> None:
    """
    :param module: Module of RL Zoo
    :param holds: Whether it is as it has to be
    :param assumption: What it has to have, for the message
    :raises RuntimeError: if it is not
    """
    cure = 'Install a version that was tested, `pip install "rl_zoo3>=2.9.2,<2.10"`, or do without QA2C: SB3_QAC_ZOO_HOOK=0.'
    check_package("rl_zoo3", holds, f"{assumption} in {module.__name__}", cure)


def _register_algorithms(utils: ModuleType) -> None:
    _check_zoo(utils, isinstance(getattr(utils, "ALGOS", None), dict), "a dict `ALGOS`")
    for name, algorithm in ALGORITHMS.items():
        registered = utils.ALGOS.setdefault(name, algorithm)
        if registered is not algorithm:
            raise ValueError(f"RL Zoo knows {name!r} already, as {registered}: not replaced by {algorithm}.")


def _register_search_space(hyperparams_opt: ModuleType) -> None:
    for name in ("HYPERPARAMS_SAMPLER", "HYPERPARAMS_CONVERTER"):
        _check_zoo(hyperparams_opt, isinstance(getattr(hyperparams_opt, name, None), dict), f"a dict `{name}`")
    hyperparams_opt.HYPERPARAMS_SAMPLER.update(
        qa2c=sample_qa2c_params, qppo=sample_qppo_params, reinforce=sample_reinforce_params
    )
    hyperparams_opt.HYPERPARAMS_CONVERTER.update(
        qa2c=convert_qa2c_params, qppo=convert_qppo_params, reinforce=convert_reinforce_params
    )


def _check_manager(exp_manager: ModuleType) -> None:
    """
    :param exp_manager: RL Zoo's module of that name
    :raises RuntimeError: if its manager is not as it has to be
    """
    manager_class = getattr(exp_manager, "ExperimentManager", None)
    _check_zoo(exp_manager, manager_class is not None, "a class `ExperimentManager`")
    parameters = inspect.signature(manager_class.__init__).parameters  # type: ignore[misc]
    for name in ("algo", "config"):
        _check_zoo(exp_manager, name in parameters, f"a parameter `{name}` of `ExperimentManager`")
    _check_zoo(exp_manager, hasattr(manager_class, "create_log_folder"), "a method `create_log_folder` of `ExperimentManager`")


def _register_presets(exp_manager: ModuleType) -> None:
    init = exp_manager.ExperimentManager.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_with_presets(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        if call.arguments["algo"] in ALGORITHMS and not call.arguments.get("config"):
            call.arguments["config"] = str(presets(call.arguments["algo"]))
        init(*call.args, **call.kwargs)

    exp_manager.ExperimentManager.__init__ = init_with_presets


def unfinished_run(log_path: Path, env_name: str, command: Sequence[str]) -> Path | None:
    """
    :param log_path: Folder with the runs of an algorithm
    :param env_name: Name of the environment, as RL Zoo writes it
    :param command: Command line
    :return: Folder of the newest run that the same command started, that keeps exact checkpoints, is not finished, and that no
        process works on; None if there is none
    """
    runs = [path for path in log_path.glob(f"{env_name}_*") if path.name.removeprefix(f"{env_name}_").isdigit()]
    for run in sorted(runs, key=lambda path: int(path.name.rpartition("_")[2]), reverse=True):
        try:
            known = json.loads((run / "checkpoints" / "run.json").read_text())
        except (OSError, ValueError):
            continue
        if not known["finished"] and _what_is_run(known["command"]) == _what_is_run(command):
            try:
                with FileLock(run / "checkpoints" / "lock", blocking=False):
                    return run
            except Timeout:
                continue
    return None


def _what_is_run(command: Sequence[str]) -> list[str]:
    """
    :param command: Command line
    :return: its arguments without those that leave the numbers as they are
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-P", "--progress", action="store_true")
    parser.add_argument("--verbose")
    try:
        return parser.parse_known_args(command[1:])[1]
    except argparse.ArgumentError:
        # Of another program, which imports RL Zoo
        return list(command[1:])


def _resume_exactly(exp_manager: ModuleType) -> None:
    """
    With an ``ExactCheckpointCallback`` among the hyperparameters, a command that is run again resumes its unfinished run, in
    the same folder, with the same seed and in the same run of Weights & Biases.
    """
    manager_class = exp_manager.ExperimentManager
    create_log_folder = manager_class.create_log_folder

    @functools.wraps(create_log_folder)
    def create_or_find_log_folder(self: Any) -> None:
        callback = next((callback for callback in self.callbacks if isinstance(callback, ExactCheckpointCallback)), None)
        if callback is not None and not self.optimize_hyperparameters:
            run = unfinished_run(Path(self.log_path), str(self.env_name), sys.argv)
            if run is not None:
                self.save_path = str(run)
                self.params_path = f"{run}/{self.env_name}"
                _take_seed_of(run, self)
            callback.folder = callback.folder or Path(self.save_path) / "checkpoints"
            if "wandb" in sys.modules:
                # The callback logs every row itself, so that none is lost or there twice
                sys.modules["wandb"].tensorboard.unpatch()
        create_log_folder(self)

    manager_class.create_log_folder = create_or_find_log_folder


def _take_seed_of(run: Path, manager: Any) -> None:
    """
    Without ``--seed``, RL Zoo draws another seed at each start, before it knows its folder.

    :param run: Folder of the run to resume
    :param manager: RL Zoo's manager, which has not made its environments yet
    """
    seed = read_json(run / "checkpoints" / "run.json").get("seed")
    if seed is None or seed == manager.seed:
        return
    print(f"Seed: {seed}, that of the run in {run}")
    manager.seed = manager.args.seed = seed
    set_random_seed(seed)
    wandb_run = active_wandb_run()
    if wandb_run is not None:
        wandb_run.config.update({"seed": seed}, allow_val_change=True)


def _resume_wandb(exp_manager: ModuleType) -> None:
    """RL Zoo starts its run of Weights & Biases before anything else. These variables make it resume the former one."""
    # The script `rl_zoo3` will take the name of its command away
    command = sys.argv[:1] + sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv
    arguments = _zoo_arguments(command)
    if not arguments.track:
        return
    env_name = exp_manager.EnvironmentName(arguments.env)
    run = unfinished_run(Path(arguments.log_folder, arguments.algo), env_name, command)
    run_id = None if run is None else wandb_run_id(run / "checkpoints")
    if run_id is not None:
        os.environ.setdefault("WANDB_RUN_ID", run_id)
        os.environ.setdefault("WANDB_RESUME", "allow")


def _zoo_arguments(command: Sequence[str]) -> argparse.Namespace:
    """
    :param command: Command line
    :return: those arguments of ``rl_zoo3.train`` that say where a run lies, with RL Zoo's defaults
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("-f", "--log-folder", default="logs")
    parser.add_argument("--track", action="store_true")
    try:
        return parser.parse_known_args(command[1:])[0]
    except argparse.ArgumentError:
        # Of another program, which imports RL Zoo
        return parser.parse_args([])


def _register_in_exp_manager(exp_manager: ModuleType) -> None:
    _check_manager(exp_manager)
    if not hasattr(exp_manager.ExperimentManager.__init__, "__wrapped__"):
        # Names for `policy_kwargs`, which RL Zoo evaluates there
        vars(exp_manager).update(LeanNatureCNN=LeanNatureCNN, MinAtarCNN=MinAtarCNN, SharedMlp=SharedMlp)
        register_minatar_envs()
        _register_presets(exp_manager)
        _resume_exactly(exp_manager)
    _resume_wandb(exp_manager)


PLACES: dict[str, Callable[[ModuleType], None]] = {
    "rl_zoo3.utils": _register_algorithms,
    "rl_zoo3.hyperparams_opt": _register_search_space,
    "rl_zoo3.exp_manager": _register_in_exp_manager,
}


def register_in(module: ModuleType) -> None:
    """
    :param module: One of the modules named in ``PLACES``
    :raises ValueError: if RL Zoo has another algorithm under the same name
    :raises RuntimeError: if RL Zoo is not inside as it has to be
    """
    PLACES[module.__name__](module)


def register() -> None:
    """
    Make the algorithms known to RL Zoo; once or again, it is the same.

    :raises ValueError: if RL Zoo has another algorithm under the same name
    :raises RuntimeError: if RL Zoo is not inside as it has to be
    """
    for name in PLACES:
        register_in(importlib.import_module(name))
