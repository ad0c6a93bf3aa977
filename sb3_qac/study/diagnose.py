"""
Measure estimators of the policy gradient on one model and the same rollouts: their variance, direction and cost. Also measure
how well the critic predicts the differences between actions.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from rich.console import Console
from rich.progress import Progress
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.utils import explained_variance, set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_number
from sb3_qac.common.files import check_writable, write_atomically
from sb3_qac.common.returns import discounted_returns
from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO
from sb3_qac.study.agents import check_same_environments
from sb3_qac.study.branching import judge_branches, play_all_actions
from sb3_qac.study.gradients import GradientMoments, batch_of, estimators_of, gradient_of, scale_of
from sb3_qac.study.loading import DIAGNOSIS_FILE, check_run, read_config
from sb3_qac.study.manager import environments_of
from sb3_qac.study.run import name_of_env, read_run
from sb3_qac.study.snapshots import normalize_as, points_of
from sb3_qac.zoo import register

# Algorithms with a critic Q(s, a) and an actor, by their names in RL Zoo
DIAGNOSED = ("qa2c", "qppo")
# The square of an expected gradient needs two, and its error leaves out each in turn
MIN_ROLLOUTS = 3


def judge_critic(q_values: np.ndarray, probs: np.ndarray, actions: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """
    Compare a critic with the returns of the actions that were taken.

    Its advantages have a slope, ``E[f (G - V~)] / E[f A]`` with ``f = A(s, a)``: 1 if the critic is right about the value of
    an action relative to the others, 0 if its advantages carry no information. For improbable actions, those with less than
    half of the uniform probability, ``f`` is A(s, a) for them and 0 for the others, minus its mean under the policy, so that
    an error of V~ has no effect.

    :param q_values: ``Q(s, a)``, shape (n_steps, n_envs, n_actions)
    :param probs: ``pi(a|s)``, shape (n_steps, n_envs, n_actions)
    :param actions: Actions taken, shape (n_steps, n_envs)
    :param returns: Discounted returns ``G``, shape (n_steps, n_envs)
    :return: the critic's figures, with standard errors over environments
    """
    values = (probs * q_values).sum(axis=2)
    advantages, surprises = q_values - values[..., None], returns - values
    improbable = probs < 0.5 / q_values.shape[2]
    result = {
        "entropy": float(-(probs * np.log(np.clip(probs, 1e-30, 1))).sum(axis=2).mean()),
        "explained_variance": float(explained_variance(_at(q_values, actions).ravel(), returns.ravel())),
        "advantage_size": float(np.sqrt((probs * np.square(advantages)).sum(axis=2).mean())),
        "return_scatter": float(np.std(surprises)),
        "improbable_actions": float((probs * improbable).sum(axis=2).mean()),
    }
    for name, mask in {"slope": True, "slope_improbable": improbable}.items():
        weights = advantages * mask
        weights = weights - (probs * weights).sum(axis=2, keepdims=True)
        found = (_at(weights, actions) * surprises).sum(axis=0)
        claimed = (probs * weights * advantages).sum(axis=(0, 2))
        result[name], result[f"{name}_error"] = _ratio(found, claimed)
    return result


def _at(x: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """
    :param x: Shape (n_steps, n_envs, n_actions)
    :param actions: Shape (n_steps, n_envs)
    :return: ``x`` at the actions, shape (n_steps, n_envs)
    """
    return np.take_along_axis(x, actions[..., None], axis=2)[..., 0]


def _ratio(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """
    :param x: Shape (n_envs,)
    :param y: Shape (n_envs,)
    :return: ratio of their sums, and its standard error from leaving out each environment in turn
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        without = (x.sum() - x) / (y.sum() - y)
        return float(x.sum() / y.sum()), float(np.sqrt((len(x) - 1) * np.var(without)))


def diagnose_model(model: QA2C | QPPO, n_rollouts: int, n_states: int = 0, n_repeats: int = 4) -> dict[str, Any]:
    """
    Collect rollouts with a fixed model, and measure the estimators and the critic on them.

    :param model: Model with its environment
    :param n_rollouts: Number of rollouts, at least 3
    :param n_states: Number of states from which every action is played
    :param n_repeats: How often each action is played
    :return: ``estimators`` (see ``GradientMoments.summary``, and milliseconds for a gradient), ``scale`` (what their losses
        are divided by), ``critic`` (see ``judge_critic``), and with states ``branches`` (see ``judge_branches``)
    """
    check_number("n_rollouts", n_rollouts, minimum=MIN_ROLLOUTS)
    env, steps = model.env, model.num_timesteps
    assert env is not None
    _, callback = model._setup_learn(n_rollouts * model.n_steps * model.n_envs)
    estimators, scale = estimators_of(model), None
    moments = GradientMoments(list(estimators), n_rollouts)
    seconds = dict.fromkeys(estimators, 0.0)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in ("rewards", "starts", "actions", "q_values", "probs")}
    buffer = model.rollout_buffer
    for _ in range(n_rollouts):
        model.collect_rollouts(env, callback, buffer, model.n_steps)
        rewards, starts = buffer.rewards.copy(), buffer.episode_starts.copy()
        # ``get`` puts the steps of each environment one after the other, and returns them shuffled
        next(buffer.get(batch_size=None))
        data = buffer._get_samples(np.arange(model.n_steps * model.n_envs))
        with th.no_grad():
            batch = batch_of(model, data)
            scale = scale_of(model, batch) if scale is None else scale
        probs, actions = batch.log_probs.exp(), data.actions.long()
        kept["rewards"].append(rewards)
        kept["starts"].append(starts)
        for name, values in {"q_values": batch.q_values, "probs": probs, "actions": actions}.items():
            kept[name].append(values.numpy(force=True).reshape(model.n_envs, model.n_steps, -1).swapaxes(0, 1))
        gradients = {}
        for name, estimator in estimators.items():
            start = _now(model)
            gradients[name] = gradient_of(model, estimator(batch_of(model, data)) / scale)
            seconds[name] += _now(model) - start
        moments.add(gradients)

    history = {name: np.concatenate(values) for name, values in kept.items()}
    history["actions"] = history["actions"][..., 0]
    assert model._last_obs is not None
    with th.no_grad():
        last_obs, _ = model.policy.obs_to_tensor(model._last_obs)
        last_values = model.policy.predict_values(last_obs).cpu().numpy().ravel()
    # An episode ends before the next one starts
    dones = np.concatenate([history["starts"][1:], np.asarray(model._last_episode_starts)[None]])
    returns = discounted_returns(history["rewards"], dones, last_values, model.gamma)
    # The last returns would depend on the critic that they are meant to judge
    judged = slice(0, max(len(returns) * 9 // 10, 1))
    critic = judge_critic(*(x[judged] for x in (history["q_values"], history["probs"], history["actions"], returns)))
    summary = moments.summary()
    for name, figures in summary.items():
        figures["milliseconds"] = 1000 * seconds[name] / n_rollouts
    branches = judge_branches(play_all_actions(model, n_states, n_repeats)) if n_states else None
    return {
        "steps": steps,
        "n_rollouts": n_rollouts,
        "scale": scale,
        "estimators": {name: _without_nan(figures) for name, figures in summary.items()},
        "critic": _without_nan(critic),
        **({} if branches is None else {"branches": _without_nan(branches)}),
    }


def _now(model: QA2C | QPPO) -> float:
    if model.device.type == "cuda":
        # It computes while the CPU goes on
        th.cuda.synchronize()
    return time.perf_counter()


def _without_nan(figures: dict[str, float]) -> dict[str, float | None]:
    # JSON has no nan
    return {name: figure if np.isfinite(figure) else None for name, figure in figures.items()}


def diagnose_run(
    folder: Path, n_rollouts: int = 200, n_points: int = 3, n_threads: int = 1, n_states: int = 0, n_repeats: int = 4
) -> list[dict[str, Any]]:
    """
    Diagnose a run of a study at several points of its training, from its snapshots. The result is written into its folder.

    :param folder: Folder of a run of QA2C or QPPO
    :param n_rollouts: Rollouts at each point
    :param n_points: Number of points, from the start to the end of the training
    :param n_threads: Threads for PyTorch
    :param n_states: States at each point from which every action is played
    :param n_repeats: How often each action is played
    :return: the result of ``diagnose_model`` at each point
    :raises ValueError: if the folder has no run of QA2C or QPPO with snapshots, or cannot be written
    """
    check_number("rollouts", n_rollouts, minimum=MIN_ROLLOUTS)
    check_number("points", n_points, minimum=1)
    check_number("threads", n_threads, minimum=1)
    check_number("states", n_states)
    check_number("repeats", n_repeats, minimum=2)
    check_run(folder)
    run = read_run(folder)
    if run.algo not in DIAGNOSED:
        raise ValueError(
            f"{folder} is a run of {run.algo}, but only runs of {' and '.join(DIAGNOSED)} can be diagnosed: they have "
            "an actor and a critic Q(s, a)."
        )
    # The noise of a step depends on the number of environments. That of the preset may have changed since
    config = folder / name_of_env(run.env_id) / "config.yml"
    if config.is_file() and "n_envs" in (kept := read_config(config)):
        run = dataclasses.replace(run, hyperparams={**run.hyperparams, "n_envs": kept["n_envs"]})
    if n_states:
        # The state of the C++ environments cannot be cloned. SB3's have the same games
        run = dataclasses.replace(run, native=False)
    snapshots = points_of(sorted((folder / "snapshots").glob("*.zip")), n_points)
    if not snapshots:
        raise ValueError(f"There are no snapshots in {folder}. `python -m sb3_qac study` keeps them.")
    check_writable(folder)
    register()
    check_same_environments(run, folder)
    th.set_num_threads(n_threads)
    set_random_seed(run.seed)
    with environments_of(run) as env, Progress(console=Console(stderr=True)) as progress:
        points = progress.track(snapshots, description=run.name)
        results = [diagnose_snapshot(path, env, run.algo, run.seed, n_rollouts, n_states, n_repeats) for path in points]
    write_atomically(folder / DIAGNOSIS_FILE, json.dumps(results, indent=1).encode())
    return results


def diagnose_snapshot(
    path: Path, env: VecEnv, algo: str, seed: int, n_rollouts: int, n_states: int, n_repeats: int
) -> dict[str, Any]:
    """
    :param path: Snapshot
    :param env: Environments
    :param algo: Algorithm, by its name in RL Zoo
    :param seed: Seed for the environments
    :param n_rollouts: Number of rollouts
    :param n_states: Number of states from which every action is played
    :param n_repeats: How often each action is played
    :return: what ``diagnose_model`` gives
    """
    env.seed(seed)
    normalize_as(path, env)
    # Without the folder of TensorBoard of the training, which may be on another machine
    model = ALGOS[algo].load(path, env=env, tensorboard_log=None)
    return diagnose_model(model, n_rollouts, n_states, n_repeats)  # type: ignore[arg-type]


def tables(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """
    :param results: Result of ``diagnose_run``
    :return: lines of Markdown
    """
    yield "| steps | estimator | expected gradient, squared | variance | noise / signal | cosine | difference | ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        for name, x in result["estimators"].items():
            yield (
                f"| {result['steps']:,} | {name} | {_text(x, 'gradient_square', '.2g')} | {_text(x, 'variance', '.2g')} "
                f"| {_text(x, 'noise_to_signal', '.2g')} | {_text(x, 'cosine', '.3f')} | {x['difference']:.1e} "
                f"| {x['milliseconds']:.1f} |"
            )
    yield ""
    yield "| steps | entropy | explained variance | size of A | scatter of G - V~ | slope of A | of improbable actions |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        x = result["critic"]
        yield (
            f"| {result['steps']:,} | {_text(x, 'entropy', '.2f')} | {_text(x, 'explained_variance', '.2f')} "
            f"| {_text(x, 'advantage_size', '.2g')} | {_text(x, 'return_scatter', '.2g')} | {_text(x, 'slope', '.2f')} "
            f"| {_text(x, 'slope_improbable', '.2f')} |"
        )
    yield from _branch_table(results)


def _branch_table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    with_branches = [result for result in results if "branches" in result]
    if not with_branches:
        return
    yield ""
    yield (
        "| steps | states x repeats | differences of Q | of returns | slope | correlation | right signs | halves agree "
        "| slope, improbable actions | right signs | halves agree |"
    )
    yield "|---" * 11 + "|"
    for result in with_branches:
        x = result["branches"]
        sizes = [_text(x, name, ".2g") for name in ("q_difference", "return_difference")]
        names = ("slope", "correlation", "right_signs", "halves", "slope_improbable", "right_signs_improbable")
        cells = [_text(x, name, ".2f") for name in (*names, "halves_improbable")]
        yield f"| {result['steps']:,} | {x['states']} x {x['repeats']} | {' | '.join([*sizes, *cells])} |"


def _text(figures: dict[str, float | None], name: str, form: str) -> str:
    figure = figures[name]
    if f"{name}_error" not in figures:
        return "-" if figure is None else f"{figure:{form}}"
    error = figures[f"{name}_error"]
    # A figure whose error is unknown is noise
    return "-" if figure is None or error is None else f"{figure:{form}} +/- {error:{form}}"
