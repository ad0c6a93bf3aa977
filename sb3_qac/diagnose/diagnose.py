import time
from functools import partial
from typing import Any

import numpy as np
import torch as th

from sb3_qac.common.checks import check_number
from sb3_qac.common.masks import MaskableOnPolicyAlgorithm, ask_for_masks
from sb3_qac.common.returns import discounted_returns
from sb3_qac.diagnose.branching import judge_branches, play_all_actions
from sb3_qac.diagnose.critic import judge_critic
from sb3_qac.diagnose.gradients import GradientMoments, batch_of, estimators_of, gradient_of, scale_of
from sb3_qac.pqn import PQN
from sb3_qac.qa2c import QA2C
from sb3_qac.qppo import QPPO

# The square of an expected gradient needs two, and its error leaves out each in turn
MIN_ROLLOUTS = 3


def diagnose_model(model: QA2C | QPPO | PQN, n_rollouts: int, n_states: int = 0, n_repeats: int = 4) -> dict[str, Any]:
    """
    Collect rollouts with a fixed model, and measure the estimators and the critic on them.

    :param model: Model with its environment. The exploration rate of PQN stays as it is, and no estimators are measured
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
    # PQN's own sets the exploration rate of another progress
    collect = partial(MaskableOnPolicyAlgorithm.collect_rollouts, model) if isinstance(model, PQN) else model.collect_rollouts
    for _ in range(n_rollouts):
        collect(env, callback, buffer, model.n_steps)
        rewards, starts = buffer.rewards.copy(), buffer.episode_starts.copy()
        # ``get`` puts the steps of each environment one after the other, and returns them shuffled
        next(buffer.get(batch_size=None))
        data = buffer._get_samples(np.arange(model.n_steps * model.n_envs))
        with th.no_grad():
            batch = batch_of(model, data)
            scale = scale_of(model, batch) if scale is None else scale
        probs, actions = batch.log_probs.exp(), batch.actions
        kept["rewards"].append(rewards)
        kept["starts"].append(starts)
        for name, values in {"q_values": batch.q_values, "probs": probs, "actions": actions}.items():
            kept[name].append(values.numpy(force=True).reshape(model.n_envs, model.n_steps, -1).swapaxes(0, 1))
        gradients = {}
        for name, estimator in estimators.items():
            start = _now(model)
            gradients[name] = gradient_of(model, estimator(batch_of(model, data)) / scale)
            seconds[name] += _now(model) - start
        if estimators:
            moments.add(gradients)

    history = {name: np.concatenate(values) for name, values in kept.items()}
    history["actions"] = history["actions"][..., 0]
    assert model._last_obs is not None
    with th.no_grad(), model.policy.masked(ask_for_masks(env) if model._is_masked else None):
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


def _now(model: QA2C | QPPO | PQN) -> float:
    if model.device.type == "cuda":
        # It computes while the CPU goes on
        th.cuda.synchronize()
    return time.perf_counter()


def _without_nan(figures: dict[str, float]) -> dict[str, float | None]:
    # JSON has no nan
    return {name: figure if np.isfinite(figure) else None for name, figure in figures.items()}
