"""
The search spaces of RL Zoo's ``-optimize``: a sampler for each algorithm, and their converter.

RL Zoo calls a sampler with the trial, the number of actions, the number of environments and further arguments of off-policy
algorithms; ours need the trial only. It returns the arguments of the algorithm. The policy's hyperparameters stay as in the
preset, so that a sampler works with every policy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna


def _policy_gradient(trial: "optuna.Trial") -> str | None:
    """:return: the estimator that the preset names, if it does: RL Zoo keeps the preset in the study, as text"""
    return trial.study.user_attrs.get("policy_gradient")


def _suggest_rate(trial: "optuna.Trial", name: str, low: float, high: float) -> None:
    """Sample an argument that may fall to 0, starting between ``low`` and ``high``."""
    trial.suggest_float(name, low, high, log=True)
    trial.suggest_categorical(f"{name}_schedule", ["constant", "linear"])


def convert_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    Convert powers of two, discounts and schedules. RL Zoo's own ``convert_onpolicy_params`` wants a sampled ``net_arch`` too.

    :param sampled_params: Values that one of ``SAMPLERS`` has sampled, as Optuna stores them
    :return: Arguments of the algorithm
    """
    hyperparams = {}
    for name, value in sampled_params.items():
        if name.endswith("_pow"):
            hyperparams[name.removesuffix("_pow")] = 2**value
        elif name.startswith("one_minus_"):
            hyperparams[name.removeprefix("one_minus_")] = 1 - value
        elif not name.endswith("_schedule"):
            falls = sampled_params.get(f"{name}_schedule") == "linear"
            hyperparams[name] = f"lin_{value}" if falls else value
    return hyperparams


def _arguments(trial: "optuna.Trial") -> dict[str, Any]:
    """:return: arguments of the algorithm from the values that were sampled"""
    hyperparams = convert_params(trial.params)
    # Display true values
    for name, value in hyperparams.items():
        if name not in trial.params:
            trial.set_user_attr(name, value)
    return hyperparams


def sample_qa2c_params(trial: "optuna.Trial", *_: Any, **__: Any) -> dict[str, Any]:
    """Sampler for QA2C. ``baseline`` is not sampled because it cannot change the all-action gradient."""
    trial.suggest_int("n_steps_pow", 2, 6)
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("one_minus_gae_lambda", 0.001, 0.2, log=True)
    _suggest_rate(trial, "learning_rate", 1e-4, 5e-3)
    trial.suggest_float("pg_coef", 0.05, 2, log=True)
    trial.suggest_float("vf_coef", 0.1, 1, log=True)
    trial.suggest_float("ent_coef", 1e-5, 0.1, log=True)
    trial.suggest_float("max_grad_norm", 0.3, 5, log=True)
    # They are for the all-action estimator only
    sampled = _policy_gradient(trial) == "sampled"
    trial.suggest_categorical("beta", [0.0] if sampled else [0.0, 0.5, 1.0])
    trial.suggest_categorical("shrinkage", [0.0] if sampled else [0.0, 0.1, 1.0])

    return _arguments(trial)


def sample_qppo_params(trial: "optuna.Trial", *_: Any, **__: Any) -> dict[str, Any]:
    """Sampler for QPPO."""
    trial.suggest_int("n_steps_pow", 4, 8)
    trial.suggest_int("batch_size_pow", 5, 10)
    trial.suggest_int("n_epochs", 1, 12)
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("one_minus_gae_lambda", 0.01, 0.4, log=True)
    _suggest_rate(trial, "learning_rate", 1e-4, 5e-3)
    trial.suggest_float("kl_coef", 0.03, 3, log=True)
    _suggest_rate(trial, "ent_coef", 1e-4, 0.1)
    trial.suggest_float("vf_coef", 0.1, 1, log=True)
    trial.suggest_float("max_grad_norm", 0.3, 5, log=True)
    # They have no effect on the policy with the sampled estimator
    sampled = _policy_gradient(trial) == "sampled"
    trial.suggest_categorical("beta", [1.0] if sampled else [0.5, 1.0])
    trial.suggest_categorical("shrinkage", [0.1] if sampled else [0.0, 0.03, 0.1, 0.3])

    return _arguments(trial)


def sample_pqn_params(trial: "optuna.Trial", *_: Any, **__: Any) -> dict[str, Any]:
    """Sampler for PQN."""
    trial.suggest_int("n_steps_pow", 3, 8)
    trial.suggest_int("batch_size_pow", 5, 10)
    trial.suggest_int("n_epochs", 1, 8)
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("one_minus_gae_lambda", 0.01, 0.6, log=True)
    _suggest_rate(trial, "learning_rate", 5e-5, 5e-3)
    trial.suggest_float("exploration_fraction", 0.05, 0.8, log=True)
    trial.suggest_float("exploration_final_eps", 0.001, 0.1, log=True)
    trial.suggest_float("max_grad_norm", 0.3, 30, log=True)

    return _arguments(trial)


def sample_reinforce_params(trial: "optuna.Trial", *_: Any, **__: Any) -> dict[str, Any]:
    """Sampler for REINFORCE."""
    trial.suggest_float("one_minus_gamma", 0.001, 0.05, log=True)
    trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    trial.suggest_float("ent_coef", 1e-5, 0.1, log=True)
    for name in ("baseline", "normalize_returns"):
        trial.suggest_categorical(name, [False, True])

    return _arguments(trial)


SAMPLERS = {
    "qa2c": sample_qa2c_params,
    "qppo": sample_qppo_params,
    "pqn": sample_pqn_params,
    "reinforce": sample_reinforce_params,
}
