"""
Registration with RL Zoo: the algorithms, their search spaces and their presets.

RL Zoo has no plugins. Its documentation registers an algorithm by writing into ``rl_zoo3.ALGOS``. This module does the same
for all three places that use an algorithm's name. ``sb3_qac_zoo_hook`` calls it automatically; ``register()`` calls it
directly.
"""

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_qac.common.files import presets
from sb3_qac.common.minatar import register_minatar_envs
from sb3_qac.common.torch_layers import LeanNatureCNN, MinAtarCNN, SharedMlp
from sb3_qac.pqn import PQN
from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO
from sb3_qac.reinforce import REINFORCE
from sb3_qac.zoo.policy import fit_policy
from sb3_qac.zoo.resume import resume_exactly, resume_wandb
from sb3_qac.zoo.search_space import SAMPLERS, convert_params

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"qa2c": QA2C, "qppo": QPPO, "reinforce": REINFORCE, "pqn": PQN}


def _register_algorithms(utils: ModuleType) -> None:
    refused = []
    for name, algorithm in ALGORITHMS.items():
        registered = utils.ALGOS.setdefault(name, algorithm)
        if registered is not algorithm:
            refused.append(f"RL Zoo knows {name!r} already, as {registered}: it was not replaced by {algorithm}.")
    if refused:
        try:
            warnings.warn(" ".join(refused), stacklevel=2)
        except UserWarning as warning:
            # With `python -W error`, which must not keep the others from being registered
            print(warning, file=sys.stderr)


def _register_search_space(hyperparams_opt: ModuleType) -> None:
    from rl_zoo3.utils import ALGOS

    for name, sampler in SAMPLERS.items():
        if ALGOS.get(name) is ALGORITHMS[name]:
            hyperparams_opt.HYPERPARAMS_SAMPLER.setdefault(name, sampler)
            hyperparams_opt.HYPERPARAMS_CONVERTER.setdefault(name, convert_params)


def _is_ours(exp_manager: ModuleType, algo: str) -> bool:
    # Not an algorithm of the user's with the same name
    return algo in ALGORITHMS and exp_manager.ALGOS.get(algo) is ALGORITHMS[algo]


def _register_presets(exp_manager: ModuleType) -> None:
    init = exp_manager.ExperimentManager.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_with_presets(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        algo = call.arguments["algo"]
        if _is_ours(exp_manager, algo) and not call.arguments.get("config"):
            call.arguments["config"] = str(presets(algo))
        init(*call.args, **call.kwargs)

    init_with_presets._patched_by_sb3_qac = True  # type: ignore[attr-defined]
    exp_manager.ExperimentManager.__init__ = init_with_presets


def _fit_policies(exp_manager: ModuleType) -> None:
    """The policy of the preset ``default`` is made to fit the observations, for our algorithms and those of studies."""
    read_hyperparameters = exp_manager.ExperimentManager.read_hyperparameters

    @functools.wraps(read_hyperparameters)
    def read_hyperparameters_and_fit_policy(self: Any) -> Any:
        result = read_hyperparameters(self)
        if _is_ours(exp_manager, self.algo) or getattr(self, "fits_every_policy", False):
            fit_policy(self, *result)
        return result

    exp_manager.ExperimentManager.read_hyperparameters = read_hyperparameters_and_fit_policy


def _save_agents_where_enjoy_looks(exp_manager: ModuleType) -> None:
    """
    SB3 adds the suffix only to names without a dot, while RL Zoo's ``enjoy`` looks for "My.Game-v0.zip" too. This goes when
    RL Zoo's ``save_trained_model`` adds it (docs/upstream).
    """
    save_trained_model = exp_manager.ExperimentManager.save_trained_model

    @functools.wraps(save_trained_model)
    def save_with_suffix(self: Any, model: BaseAlgorithm) -> None:
        env_name = self.env_name
        self.env_name = f"{env_name}.zip"
        try:
            save_trained_model(self, model)
        finally:
            self.env_name = env_name

    exp_manager.ExperimentManager.save_trained_model = save_with_suffix


def _register_in_exp_manager(exp_manager: ModuleType) -> None:
    # A mark that outer wrappers keep: those of other plugins are made with `functools.wraps` too
    if not hasattr(exp_manager.ExperimentManager.__init__, "_patched_by_sb3_qac"):
        # Names that `policy_kwargs` may use, since RL Zoo evaluates it in this module
        vars(exp_manager).update(LeanNatureCNN=LeanNatureCNN, MinAtarCNN=MinAtarCNN, SharedMlp=SharedMlp)
        register_minatar_envs()
        # Methods are replaced, not the class: a script that calls `register()` may have imported `rl_zoo3.train` before, and
        # with it the class
        _register_presets(exp_manager)
        _fit_policies(exp_manager)
        _save_agents_where_enjoy_looks(exp_manager)
        resume_exactly(exp_manager)
    resume_wandb(exp_manager)


REGISTRATIONS: dict[str, Callable[[ModuleType], None]] = {
    "rl_zoo3.utils": _register_algorithms,
    "rl_zoo3.hyperparams_opt": _register_search_space,
    "rl_zoo3.exp_manager": _register_in_exp_manager,
}


def register_in(module: ModuleType) -> None:
    """
    Register what is free: a name under which RL Zoo has another algorithm is left to that one, with a warning.

    :param module: One of the modules named in ``REGISTRATIONS``
    """
    REGISTRATIONS[module.__name__](module)


def register() -> None:
    """Make the algorithms known to RL Zoo, but for names under which it has others. Calling it again has no effect."""
    for name in REGISTRATIONS:
        register_in(importlib.import_module(name))
