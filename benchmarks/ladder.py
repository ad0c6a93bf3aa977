"""
The page of the ladder: the rungs from REINFORCE to QA2C, A2C, PPO and DQN on CartPole-v1.

    python -m sb3_qac study ladder --jobs 2
    python -m benchmarks.ladder studies/ladder
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch as th
from joblib import Parallel, delayed
from rl_zoo3.utils import ALGOS
from stable_baselines3 import PPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import set_random_seed

from sb3_qac.common.files import write_atomically
from sb3_qac.diagnose.gradients import GradientMoments
from sb3_qac.study.loading import NOISE_FILE, load_study
from sb3_qac.study.manager import environments_of
from sb3_qac.study.records import Record, records_of
from sb3_qac.study.report import save_figure, write_markdown
from sb3_qac.study.run import read_run
from sb3_qac.study.snapshots import normalize_as, points_of
from sb3_qac.study.statistics import mean_with_error, pooled
from sb3_qac.zoo import register

# What the actor of each rung maximises, the mean over steps, and what it changes relative to the rung below
RUNGS = {
    "reinforce-episode": ("ln pi(a_t) sum_k gamma^k r_k", "whole-episode return"),
    "reinforce-to-go": ("ln pi(a_t) G_t", "only what comes after the action"),
    "reinforce-baseline": ("ln pi(a_t) (G_t - V)", "a learnt baseline"),
    "reinforce-normalized": ("ln pi(a_t) (G_t - mean) / std", "normalised instead"),
    "q-shared": ("ln pi(a_t) Q(a_t)", "a critic, on a shared body; n-step returns"),
    "q-shared-advantage": ("ln pi(a_t) (Q(a_t) - V~)", "its advantage"),
    "q-separate": ("ln pi(a_t) Q(a_t)", "separate bodies"),
    "q-separate-advantage": ("ln pi(a_t) (Q(a_t) - V~)", "its advantage"),
    "all-action": ("sum_a pi(a) Q(a)", "all actions instead of the sampled one"),
    "all-action-baseline": ("sum_a pi(a) (Q(a) - V~)", "the advantage: the same gradient"),
    "beta-loo": ("sum_a pi(a) Q(a) + ln pi(a_t) (R_t - Q(a_t))", "the critic's error corrected"),
    "a2c": ("ln pi(a_t) (R_t - V)", "A2C with RL Zoo's settings"),
    "ppo": ("min(rho A, clip(rho) A), rho = pi(a_t) / pi_old(a_t)", "PPO with RL Zoo's settings"),
    "dqn": ("(none: the greedy action of Q)", "DQN with RL Zoo's settings"),
}
# gymnasium's threshold for CartPole-v1
SOLVED = 475.0
N_STEPS_OF_VARIANCE = 20_000
PAGE = "ladder"
OF_DQN = " DQN's sampled actions are greedy, except for the random ones of its exploration at that time."


def noise_of_run(folder: Path) -> dict[str, float] | None:
    """
    Measure how noisy the actor's gradient is in the middle of a run: the trace of the covariance of the gradient of the
    policy's last layer over the square of its expectation, for an update from 1,000 environment steps. The result is written
    to the run's folder.

    :param folder: Folder of a run with snapshots
    :return: ``noise_to_signal`` and ``variance``, both for 1,000 steps; None if the algorithm has no such gradient, or the run
        has no snapshots
    """
    register()
    run = read_run(folder)
    snapshots = points_of(sorted((folder / "snapshots").glob("*.zip")), 3)
    if not issubclass(ALGOS[run.algo], OnPolicyAlgorithm) or len(snapshots) < 3:
        return None
    th.set_num_threads(1)
    set_random_seed(run.seed)
    with environments_of(run) as env:
        normalize_as(snapshots[1], env)
        model = ALGOS[run.algo].load(snapshots[1], env=env, device="cpu", tensorboard_log=None)
        assert isinstance(model, OnPolicyAlgorithm)
        gradients, steps = gradients_of_updates(model, N_STEPS_OF_VARIANCE)
    moments = GradientMoments([run.group], len(gradients))
    for gradient in gradients:
        moments.add({run.group: gradient})
    figures = moments.summary()[run.group]
    noise = {name: figures[name] * steps / 1000 for name in ("noise_to_signal", "variance")}
    # JSON has no nan
    known = {name: figure for name, figure in noise.items() if np.isfinite(figure)}
    write_atomically(folder / NOISE_FILE, json.dumps(known).encode())
    return noise


def gradients_of_updates(model: OnPolicyAlgorithm, n_steps: int) -> tuple[list[th.Tensor], float]:
    """
    Make an algorithm collect rollouts and compute its gradients, without learning from them.

    :param model: Model with its environment
    :param n_steps: Environment steps to collect
    :return: gradients of the policy's last layer, shape (n_parameters,) each, and the mean number of steps for each
    """
    model.max_grad_norm = 1e12
    if isinstance(model, PPO):
        model.n_epochs, model.batch_size = 1, model.n_steps * model.n_envs
    model.policy.optimizer.step = lambda closure=None: None  # type: ignore
    _, callback = model._setup_learn(2 * n_steps)
    gradients = []
    while model.num_timesteps < n_steps:
        assert model.env is not None
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        model.train()
        head = list(model.policy.action_net.parameters())
        gradients.append(th.cat([parameter.grad.flatten().clone() for parameter in head]))  # type: ignore[union-attr]
    return gradients, model.num_timesteps / len(gradients)


def table(groups: dict[str, list[Record]], noise: dict[str, list[dict[str, float] | None]]) -> Iterator[str]:
    """
    :param groups: Records by rung
    :param noise: Result of ``noise_of_run`` for each run
    :return: lines of a Markdown table
    """
    yield (
        "| rung | the actor maximises | what is new | seeds | last evaluation | solved | steps to solve "
        "| variance | noise / signal |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, records in groups.items():
        formula, change = RUNGS[name]
        lasts = np.array([record.means[-1] for record in records if len(record.means)])
        solved = [record.steps_to(SOLVED) for record in records]
        n_solved = sum(steps is not None for steps in solved)
        measured = [x for x in noise[name] if x is not None]
        variances = [x["variance"] for x in measured]
        ratios = [x["noise_to_signal"] if x.get("noise_to_signal", 0) > 0 else None for x in measured]
        yield (
            f"| {name} | `{formula}` | {change} | {len(records)} | {mean_with_error(lasts, 1)} "
            f"| {n_solved} of {len(records)} | {_median(solved, ',.0f')} "
            f"| {_median(variances, '.2g')} | {_median(ratios, '.2g')} |"
        )


def _median(values: Sequence[float | None], form: str) -> str:
    # A value that was never reached, or that is hidden by noise, counts as infinite
    median = np.median([np.inf if value is None else value for value in values]) if values else np.inf
    return f"{median:{form}}" if np.isfinite(median) else "-"


def draw(groups: dict[str, list[Record]], path: Path) -> None:
    """
    :param groups: Records by rung
    :param path: Image to write, without its suffix: a PNG and an SVG
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    n_rows = -(-len(groups) // 4)
    figure, panels = plt.subplots(
        n_rows, 4, figsize=(13, 2.6 * n_rows), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    for panel, (name, records) in zip(panels.flat, groups.items(), strict=False):
        for record in records:
            panel.plot(record.timesteps, record.means, color="C0", linewidth=0.8, alpha=0.6)
        steps, means, _ = pooled(records)
        panel.plot(steps, means, color="C0", linewidth=2)
        panel.axhline(SOLVED, color="grey", linewidth=0.6, linestyle="--")
        panel.set_title(name, fontsize="medium")
        panel.set_ylim(0, 520)
        panel.xaxis.set_major_formatter(EngFormatter())
    figure.supxlabel("environment steps", fontsize="medium")
    figure.supylabel("mean return of an evaluation: each seed, and the mean over seeds", fontsize="medium")
    save_figure(figure, path)


def write_page(folder: Path, jobs: int = 1) -> Path:
    """
    :param folder: Folder of a study of the rungs, packed or not
    :param jobs: Number of runs whose gradient noise is measured at the same time
    :return: the Markdown file in that folder; an HTML file and the plot are in it too
    :raises ValueError: if the folder has no run of a rung
    """
    found = load_study(folder).get("CartPole-v1", {})
    groups = {name: found[name] for name in RUNGS if name in found}
    if not groups:
        raise ValueError(f"There is no rung of the ladder in {folder}. `python -m sb3_qac study ladder` trains them.")
    measured = iter(Parallel(n_jobs=jobs)(delayed(_noise_of)(record) for record in records_of(groups)))
    noise = {name: [next(measured) for _ in records] for name, records in groups.items()}
    draw(groups, folder / PAGE)
    return write_markdown("\n".join(_page(groups, noise)) + "\n", folder / PAGE, width="none")


def _noise_of(record: Record) -> dict[str, float] | None:
    if (record.folder / "run.json").is_file():
        return noise_of_run(record.folder)
    # A packed run has the figures from when its page was last written
    known = {name: figure for name, figure in record.metrics.items() if name in ("noise_to_signal", "variance")}
    return known if "variance" in known else None


def _page(groups: dict[str, list[Record]], noise: dict[str, list[dict[str, float] | None]]) -> Iterator[str]:
    settings = next(iter(groups.values()))[0].settings
    unfinished: Sequence[str] = [x.name for x in records_of(groups) if not x.finished]
    yield "# The ladder of policy gradients, on CartPole-v1"
    yield ""
    if unfinished:
        yield f"**Unfinished:** {', '.join(unfinished)}."
        yield ""
    actions = "the most probable" if settings["deterministic"] else "sampled"
    yield (
        "pi(a), Q(a) and V belong to the state s_t. G_t is the discounted return to the end of the episode, R_t the n-step "
        "return, V~ = sum_a pi(a) Q(a). The weights of ln pi are constants for the gradient. "
        f"An evaluation is {settings['n_eval_episodes']} episodes with {actions} actions; the table shows the mean of the "
        f"last one over seeds and its standard error. Solved: an evaluation of {SOLVED:g} or more. Variance: the trace of "
        "the covariance of the gradient of the policy's last layer, in the middle of the training, for an update from 1,000 "
        "steps. It has the scale of the weight of ln pi. Noise / signal is the variance over the squared expectation, and "
        "has no scale. Steps to solve, variance and noise / signal are medians over all seeds. A run that never solved, or "
        "whose expected gradient cannot be told from 0, counts as infinite; an infinite median is a dash. The q-shared "
        "rungs have one body for actor and critic on purpose, as in the documents."
        + ("" if settings["deterministic"] or "dqn" not in groups else OF_DQN)
    )
    yield ""
    yield from table(groups, noise)
    yield ""
    yield f"![ladder]({PAGE}.png)"
    yield ""
    yield (
        "Figures of the course documents: the Q actor-critic stalls at about 120. A2C with separate networks returns 168 "
        "after 75,000 steps; with a shared one, GAE and normalised advantages 496; with 8 environments 500 after 125,000."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder",
        description="Measures the noise of each run's gradient, and writes ladder.md, ladder.html and the plot.",
    )
    parser.add_argument("folder", type=Path, help="folder of `study ladder`, packed or not")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs that are measured at once")
    args = parser.parse_args(arguments)
    try:
        print(write_page(args.folder, args.jobs))
    except ValueError as error:
        sys.exit(f"ladder: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
