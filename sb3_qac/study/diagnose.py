"""
Measure estimators of the policy gradient on one model and the same rollouts: their variance, direction and cost. Also measure
how well the critic predicts the differences between actions.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from rich.console import Console
from rich.progress import Progress
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from stable_baselines3.common.utils import explained_variance, set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_number
from sb3_qac.common.files import write_atomically
from sb3_qac.common.losses import all_action_policy_loss, sampled_policy_loss, state_values
from sb3_qac.common.returns import discounted_returns
from sb3_qac.qa2c import QA2C
from sb3_qac.study.callbacks import NoCallback
from sb3_qac.study.loading import DIAGNOSIS_FILE
from sb3_qac.study.manager import environments_of
from sb3_qac.study.records import A2C_WEIGHT, ALL_ACTION
from sb3_qac.study.run import read_run
from sb3_qac.study.snapshots import normalize_as, points_of
from sb3_qac.zoo import register

# Number of blocks of rollouts, for standard errors
N_BLOCKS = 10


class Batch(NamedTuple):
    """
    The inputs of an actor loss, with the names of ``QA2C.train``.

    :param q_values: ``Q(s, a)``, shape (batch_size, n_actions)
    :param log_probs: ``log pi(a|s)``, shape (batch_size, n_actions)
    :param values: ``V~(s)``, shape (batch_size, 1)
    :param q_taken: ``Q(s_t, a_t)``, shape (batch_size, 1)
    :param log_prob_taken: ``log pi(a_t|s_t)``, shape (batch_size, 1)
    :param returns: n-step returns, shape (batch_size, 1)
    """

    q_values: th.Tensor
    log_probs: th.Tensor
    values: th.Tensor
    q_taken: th.Tensor
    log_prob_taken: th.Tensor
    returns: th.Tensor


# The first estimator is the reference for the others
ESTIMATORS: dict[str, Callable[[Batch], th.Tensor]] = {
    ALL_ACTION: lambda b: all_action_policy_loss(b.log_probs, b.q_values),
    "all-action, baseline": lambda b: all_action_policy_loss(b.log_probs, b.q_values - b.values),
    "all-action, beta=1": lambda b: (
        all_action_policy_loss(b.log_probs, b.q_values) + sampled_policy_loss(b.log_prob_taken, b.returns - b.q_taken)
    ),
    "sampled": lambda b: sampled_policy_loss(b.log_prob_taken, b.q_taken),
    "sampled, baseline": lambda b: sampled_policy_loss(b.log_prob_taken, b.q_taken - b.values),
    "sampled, return (REINFORCE's weight)": lambda b: sampled_policy_loss(b.log_prob_taken, b.returns),
    A2C_WEIGHT: lambda b: sampled_policy_loss(b.log_prob_taken, b.returns - b.values),
}


class GradientMoments:
    """
    Moments of the gradients of several estimators over rollouts, without keeping the gradients themselves.

    :param names: Estimators, the first of which is the reference
    :param n_rollouts: Number of rollouts that will be added. They are divided into blocks, for the standard errors.
    """

    def __init__(self, names: Sequence[str], n_rollouts: int) -> None:
        self.names, self.n_rollouts = names, n_rollouts
        self.n_blocks = min(N_BLOCKS, n_rollouts)
        self.n_added = 0
        self.counts = np.zeros(self.n_blocks)
        # By estimator and block: sums of the gradients, and of quantities of single rollouts
        self.sums: dict[str, list[th.Tensor | float]] = {name: [0.0] * self.n_blocks for name in names}
        self.squares = {name: np.zeros(self.n_blocks) for name in names}
        self.products = {name: np.zeros(self.n_blocks) for name in names}
        self.differences = {name: np.zeros(self.n_blocks) for name in names}

    def add(self, gradients: dict[str, th.Tensor]) -> None:
        """
        :param gradients: The gradient of each estimator on the same rollout, shape (n_parameters,) each
        """
        block = self.n_added * self.n_blocks // self.n_rollouts
        self.n_added += 1
        self.counts[block] += 1
        reference = gradients[self.names[0]]
        for name, gradient in gradients.items():
            self.sums[name][block] += gradient
            self.squares[name][block] += float(gradient @ gradient)
            self.products[name][block] += float(gradient @ reference)
            self.differences[name][block] += float((gradient - reference).norm() / reference.norm().clamp(min=1e-30))

    def summary(self) -> dict[str, dict[str, float]]:
        """
        :return: by estimator:

            * ``gradient_square``: squared norm of the expected gradient, without bias (it can come out negative)
            * ``variance``: trace of the covariance of a rollout's gradient
            * ``noise_to_signal``: ``variance`` divided by ``gradient_square``
            * ``cosine``: between the expected gradient and the reference's
            * ``difference``: norm of the difference to the reference's gradient on the same rollout, relative to the
              latter's norm, mean over rollouts

            and for each the standard error, with "_error" after its name, from leaving out blocks of rollouts in turn. Where
            the expected gradient is less than two standard errors from 0, ratio and cosine are nan.
        """
        sums = {name: th.stack([th.as_tensor(block) for block in blocks]) for name, blocks in self.sums.items()}
        # Products of the sums of any two blocks, shape (n_blocks, n_blocks)
        with_itself, with_reference = (
            {name: (blocks @ other(name).T).double().numpy(force=True) for name, blocks in sums.items()}
            for other in (sums.__getitem__, lambda _: sums[self.names[0]])
        )
        summary = {}
        for name in self.names:
            figures = self._figures(name, with_itself, with_reference, np.ones(self.n_blocks))
            without = [self._figures(name, with_itself, with_reference, kept) for kept in 1 - np.eye(self.n_blocks)]
            errors = {
                f"{figure}_error": float(np.sqrt((self.n_blocks - 1) * np.var([other[figure] for other in without])))
                for figure in figures
            }
            summary[name] = {**figures, **errors}
            if figures["gradient_square"] < 2 * errors["gradient_square_error"]:
                # The gradient cannot be distinguished from 0
                unknown = [figure for figure in summary[name] if figure.startswith(("noise_to_signal", "cosine"))]
                summary[name].update(dict.fromkeys(unknown, np.nan))
        return summary

    def _figures(
        self, name: str, with_itself: dict[str, np.ndarray], with_reference: dict[str, np.ndarray], kept: np.ndarray
    ) -> dict[str, float]:
        n, reference = self.counts @ kept, self.names[0]

        def expected(of_sums: np.ndarray, of_rollouts: np.ndarray) -> float:
            # Only pairs of different rollouts, so that the noise of a rollout is not squared
            return float((kept @ of_sums @ kept - of_rollouts @ kept) / (n * (n - 1)))

        square = expected(with_itself[name], self.squares[name])
        product = expected(with_reference[name], self.products[name])
        reference_square = expected(with_itself[reference], self.squares[reference])
        variance = float(self.squares[name] @ kept / n) - square
        return {
            "gradient_square": square,
            "variance": variance,
            "noise_to_signal": variance / square if square > 0 else np.nan,
            "cosine": product / np.sqrt(square * reference_square) if min(square, reference_square) > 0 else np.nan,
            "difference": float(self.differences[name] @ kept / n),
        }


def gradient_of(model: QA2C, loss: th.Tensor) -> th.Tensor:
    """
    :param model: Model
    :param loss: Loss of its policy
    :return: gradient with respect to all parameters, shape (n_parameters,)
    """
    gradients = th.autograd.grad(loss, list(model.policy.parameters()), allow_unused=True, materialize_grads=True)
    return th.cat([gradient.flatten() for gradient in gradients])


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


def diagnose_model(model: QA2C, n_rollouts: int) -> dict[str, Any]:
    """
    Collect rollouts with a fixed model, and measure the estimators and the critic on them.

    :param model: Model with its environment
    :param n_rollouts: Number of rollouts, at least 3
    :return: ``estimators`` (see ``GradientMoments.summary``, and milliseconds for a gradient) and ``critic`` (see
        ``judge_critic``)
    """
    # An expected gradient needs two, and its error leaves out each in turn
    check_number("n_rollouts", n_rollouts, minimum=3)
    env, steps = model.env, model.num_timesteps
    assert env is not None
    _, callback = model._setup_learn(n_rollouts * model.n_steps * model.n_envs, callback=NoCallback())
    moments = GradientMoments(list(ESTIMATORS), n_rollouts)
    seconds = dict.fromkeys(ESTIMATORS, 0.0)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in ("rewards", "starts", "actions", "q_values", "probs")}
    buffer = model.rollout_buffer
    for _ in range(n_rollouts):
        model.collect_rollouts(env, callback, buffer, model.n_steps)
        rewards, starts = buffer.rewards.copy(), buffer.episode_starts.copy()
        # ``get`` puts the steps of each environment one after the other, and returns them shuffled
        next(buffer.get(batch_size=None))
        data = buffer._get_samples(np.arange(model.n_steps * model.n_envs))
        with th.no_grad():
            batch = _batch(model, data)
        probs, actions = batch.log_probs.exp(), data.actions.long()
        kept["rewards"].append(rewards)
        kept["starts"].append(starts)
        for name, values in {"q_values": batch.q_values, "probs": probs, "actions": actions}.items():
            kept[name].append(values.numpy(force=True).reshape(model.n_envs, model.n_steps, -1).swapaxes(0, 1))
        gradients = {}
        for name, estimator in ESTIMATORS.items():
            start = time.perf_counter()
            gradients[name] = gradient_of(model, estimator(_batch(model, data)))
            seconds[name] += time.perf_counter() - start
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
    estimators = moments.summary()
    for name, figures in estimators.items():
        figures["milliseconds"] = 1000 * seconds[name] / n_rollouts
    return {
        "steps": steps,
        "n_rollouts": n_rollouts,
        "estimators": {name: _without_nan(figures) for name, figures in estimators.items()},
        "critic": _without_nan(critic),
    }


def _batch(model: QA2C, data: RolloutBufferSamples) -> Batch:
    q_values, log_probs = model.policy.evaluate_all_actions(data.observations)
    actions = data.actions.long()
    values = state_values(log_probs.exp(), q_values).detach()
    returns = data.returns.unsqueeze(1)
    return Batch(q_values, log_probs, values, q_values.gather(1, actions), log_probs.gather(1, actions), returns)


def _without_nan(figures: dict[str, float]) -> dict[str, float | None]:
    # JSON has no nan
    return {name: figure if np.isfinite(figure) else None for name, figure in figures.items()}


def diagnose_run(folder: Path, n_rollouts: int = 200, n_points: int = 3, n_threads: int = 1) -> list[dict[str, Any]]:
    """
    Diagnose a run of a study at several points of its training, from its snapshots. The result is written into its folder.

    :param folder: Folder of a run of QA2C
    :param n_rollouts: Rollouts at each point
    :param n_points: Number of points, from the start to the end of the training
    :param n_threads: Threads for PyTorch
    :return: the result of ``diagnose_model`` at each point
    :raises ValueError: if the folder has no run of QA2C with snapshots
    """
    check_number("n_points", n_points, minimum=1)
    check_number("n_threads", n_threads, minimum=1)
    run = read_run(folder)
    if run.algo != "qa2c":
        raise ValueError(f"{folder} is a run of {run.algo}, which has no critic Q(s, a). Only qa2c can be diagnosed.")
    snapshots = points_of(sorted((folder / "snapshots").glob("*.zip")), n_points)
    if not snapshots:
        raise ValueError(f"There are no snapshots in {folder}. `python -m sb3_qac study` keeps them.")
    register()
    th.set_num_threads(n_threads)
    set_random_seed(run.seed)
    with environments_of(run) as env, Progress(console=Console(stderr=True)) as progress:
        points = progress.track(snapshots, description=run.name)
        results = [diagnose_snapshot(path, env, run.seed, n_rollouts) for path in points]
    write_atomically(folder / DIAGNOSIS_FILE, json.dumps(results, indent=1).encode())
    return results


def diagnose_snapshot(path: Path, env: VecEnv, seed: int, n_rollouts: int) -> dict[str, Any]:
    """
    :param path: Snapshot of QA2C
    :param env: Environments
    :param seed: Seed for them
    :param n_rollouts: Number of rollouts
    :return: what ``diagnose_model`` gives
    """
    env.seed(seed)
    normalize_as(path, env)
    return diagnose_model(QA2C.load(path, env=env), n_rollouts)


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


def _text(figures: dict[str, float | None], name: str, form: str) -> str:
    figure = figures[name]
    if f"{name}_error" not in figures:
        return "-" if figure is None else f"{figure:{form}}"
    error = figures[f"{name}_error"]
    # A figure whose error is unknown is noise
    return "-" if figure is None or error is None else f"{figure:{form}} +/- {error:{form}}"
