"""The search space of RL Zoo's ``-optimize``: a sampler and its converter for each algorithm."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna


def _policy_gradient(trial: "optuna.Trial") -> str | None:
    """:return: the estimator that the preset names, if it does: RL Zoo keeps the preset in the study, as text"""
    return trial.study.user_attrs.get("policy_gradient")


def sample_qa2c_params(trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """
    Sampler for QA2C hyperparams. The policy's hyperparameters stay as in the preset, so that it works with every policy.
    ``baseline`` is not sampled because it cannot change the all-action gradient.

    :param trial: Trial of Optuna
    :param n_actions: (unused, for continuous actions)
    :param n_envs: (unused, number of parallel environments of the preset)
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
    # `beta` corrects the all-action estimator only
    sampled = _policy_gradient(trial) == "sampled"
    trial.suggest_categorical("beta", [0.0] if sampled else [0.0, 0.5, 1.0])

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
    Sampler for QPPO hyperparams. The policy's hyperparameters stay as in the preset, so that it works with every policy.

    :param trial: Trial of Optuna
    :param n_actions: (unused, for continuous actions)
    :param n_envs: (unused, number of parallel environments of the preset)
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
    # They have no effect on the policy with the sampled estimator
    sampled = _policy_gradient(trial) == "sampled"
    trial.suggest_categorical("beta", [1.0] if sampled else [0.5, 1.0])
    trial.suggest_categorical("shrinkage", [0.1] if sampled else [0.0, 0.03, 0.1, 0.3])
    trial.suggest_categorical("advantage_scale", ["corrected"] if sampled else ["corrected", "critic"])

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
    Sampler for REINFORCE hyperparams. The policy's hyperparameters stay as in the preset.

    :param trial: Trial of Optuna
    :param n_actions: (unused, for continuous actions)
    :param n_envs: (unused, number of parallel environments of the preset)
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
