"""The report of a study, unfinished or not: curves, a table, statistics over seeds, as Markdown, HTML, PNG and SVG."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_qac.common.checkpoints import read_json

# Rows of the log that are drawn beside the evaluations
CURVES = {
    "rollout/ep_rew_mean": "return in training",
    "train/entropy_loss": "entropy loss",
    "train/explained_variance": "explained variance",
    "train/value_loss": "value loss",
    "train/policy_loss": "policy loss",
    "train/grad_norm": "gradient norm",
}
# Tasks 1 and 2 may lie upon each other, to the last bit
STYLES = ("-", "--", ":", "-.")
N_BOOTSTRAP = 10_000


@dataclass
class Record:
    """
    What one run of a study left.

    :param settings: Its settings, versions and machine
    :param status: How far it is
    :param timesteps: Environment steps at each evaluation, shape (n_evaluations,)
    :param returns: Raw returns of its episodes, shape (n_evaluations, n_episodes)
    :param curves: What TensorBoard has, by row of the log, indexed by steps
    """

    settings: dict[str, Any]
    status: dict[str, Any]
    timesteps: np.ndarray
    returns: np.ndarray
    curves: dict[str, pd.Series]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.settings["name"]

    @property
    def means(self) -> np.ndarray:
        """Mean return of each evaluation, shape (n_evaluations,)."""
        return self.returns.mean(axis=1)


def standard_error(values: np.ndarray) -> float:
    """
    :param values: Independent values
    :return: standard error of their mean; nan for a single one
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def load_study(folder: Path) -> dict[str, list[Record]]:
    """
    :param folder: Folder of a study
    :return: records of all runs that were started, by group
    :raises ValueError: if there are none
    """
    groups: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*/run.json")):
        record = load_run(path.parent)
        groups.setdefault(record.settings["group"], []).append(record)
    if not groups:
        raise ValueError(
            f"There is no run of a study in {folder}. `python -m sb3_qac study ... --output {folder}` makes some."
        )
    return {group: sorted(records, key=lambda record: record.settings["seed"]) for group, records in groups.items()}


def load_run(folder: Path) -> Record:
    """
    :param folder: Folder of a run
    :return: what it left there
    """
    timesteps, returns = np.zeros(0, dtype=int), np.zeros((0, 1))
    if (folder / "evaluations.npz").is_file():
        evaluations = np.load(folder / "evaluations.npz")
        timesteps, returns = evaluations["timesteps"], evaluations["results"]
    return Record(
        settings=json.loads((folder / "run.json").read_text()),
        status=read_json(folder / "status.json"),
        timesteps=timesteps,
        returns=returns,
        curves=load_curves(folder),
    )


def load_curves(folder: Path) -> dict[str, pd.Series]:
    """
    :param folder: Folder of a run
    :return: rows of its log, from the CSV file that a study in the repository keeps, or from TensorBoard's own files
    """
    kept = folder / "curves.csv"
    if kept.is_file():
        table = pd.read_csv(kept, index_col="step")
        return {tag: table[tag].dropna() for tag in CURVES if tag in table}
    curves = {}
    for events in sorted({path.parent for path in folder.glob("tensorboard/**/events.out.tfevents.*")}):
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in set(CURVES) & set(accumulator.Tags()["scalars"]):
            scalars = accumulator.Scalars(tag)
            curves[tag] = pd.Series([scalar.value for scalar in scalars], index=[scalar.step for scalar in scalars])
    return curves


def pooled(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    :param records: Runs of a group
    :return: steps up to which all of them have been evaluated, and at each the mean return of all their episodes and its
        standard error as if episodes were independent, shape (n_evaluations,) each
    """
    n_evaluations = min(len(record.timesteps) for record in records)
    returns = np.concatenate([record.returns[:n_evaluations] for record in records], axis=1)
    errors = np.array([standard_error(row) for row in returns])
    return records[0].timesteps[:n_evaluations], returns.mean(axis=1), errors


def draw_evaluations(groups: dict[str, list[Record]], path: Path) -> None:
    """
    The plot that was asked for: mean over the episodes of all seeds with its standard error; each seed is a thin line.

    :param groups: Records of a study
    :param path: Image to write, without its suffix; a PNG and an SVG come of it
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (group, records) in enumerate(groups.items()):
        for record in records:
            axes.plot(record.timesteps, record.means, color=f"C{i}", linestyle=STYLES[i % 4], linewidth=0.7, alpha=0.6)
        steps, means, errors = pooled(records)
        if len(steps):
            label = f"{group} ({len(records)} seeds)"
            axes.plot(steps, means, color=f"C{i}", linestyle=STYLES[i % 4], linewidth=2, label=label)
            axes.fill_between(steps, means - errors, means + errors, color=f"C{i}", alpha=0.25, linewidth=0)
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_ylabel("return of an evaluation episode")
    axes.set_title(next(iter(groups.values()))[0].settings["env_id"])
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    _save(figure, path)


def draw_curves(groups: dict[str, list[Record]], path: Path) -> None:
    """
    :param groups: Records of a study
    :param path: Image to write, without its suffix; a PNG and an SVG come of it
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, panels = plt.subplots(2, 3, figsize=(13, 7), sharex=True, layout="constrained")
    for panel, (tag, title) in zip(panels.flat, CURVES.items(), strict=True):
        for i, (group, records) in enumerate(groups.items()):
            for j, curve in enumerate(record.curves[tag] for record in records if tag in record.curves):
                smooth = curve.rolling(max(len(curve) // 100, 1), min_periods=1).mean()
                label = group if j == 0 else None
                panel.plot(curve.index, smooth, color=f"C{i}", linestyle=STYLES[i % 4], linewidth=1, label=label)
        panel.set_title(title)
        panel.grid(alpha=0.3)
    if panels.flat[0].get_legend_handles_labels()[0]:
        panels.flat[0].legend()
    for panel in panels[1]:
        panel.set_xlabel("environment steps")
        panel.xaxis.set_major_formatter(EngFormatter())
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
    plt.close(figure)


def table(groups: dict[str, list[Record]], goal: float) -> Iterator[str]:
    """
    :param groups: Records of a study
    :param goal: Mean return of an evaluation that counts as solved
    :return: lines of a Markdown table, a row for each run
    """
    yield f"| run | state | steps | last evaluation | best evaluation | steps to {goal:g} | hours to {goal:g} | steps/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for record in (record for records in groups.values() for record in records):
        status = record.status
        state = "finished" if status.get("finished") else "unfinished"
        steps, seconds = status.get("steps", 0), status.get("seconds", 0.0)
        speed = steps / seconds if seconds else float("nan")
        last = best = "-"
        reached = np.zeros(0, dtype=int)
        if len(record.timesteps):
            top = int(record.means.argmax())
            last, best = (f"{record.means[i]:.2f} +/- {standard_error(record.returns[i]):.2f}" for i in (-1, top))
            best += f" at {record.timesteps[top]:,}"
            reached = record.timesteps[record.means >= goal]
        to_goal = f"{reached[0]:,} | {reached[0] / speed / 3600:.2g}" if len(reached) else "not reached | -"
        yield f"| {record.name} | {state} | {steps:,} | {last} | {best} | {to_goal} | {speed:,.0f} |"


def statistics(groups: dict[str, list[Record]]) -> Iterator[str]:
    """
    Interquartile means of the last evaluation that all runs have, and probabilities of improvement, over seeds.

    Source: Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice"; their library rliable

    :param groups: Records of a study
    :return: lines of Markdown
    """
    from rliable import metrics

    n_evaluations = min(len(record.timesteps) for records in groups.values() for record in records)
    if n_evaluations == 0:
        yield "No evaluation yet that all runs have."
        return
    steps = next(iter(groups.values()))[0].timesteps[n_evaluations - 1]
    scores = {group: np.array([[record.means[n_evaluations - 1]] for record in records]) for group, records in groups.items()}
    n_seeds = min(len(records) for records in groups.values())
    yield f"At {steps:,} steps, the last evaluation that all runs have. The replicate is the seed: {n_seeds} of each."
    yield ""
    if n_seeds < 2:
        yield "One seed gives no interval."
        return
    estimates, intervals = _intervals(scores, lambda values: np.array([metrics.aggregate_iqm(values)]))
    yield "| group | interquartile mean | 95 % bootstrap interval |"
    yield "|---|---|---|"
    for group in scores:
        yield f"| {group} | {estimates[group][0]:.2f} | {intervals[group][0, 0]:.2f} to {intervals[group][1, 0]:.2f} |"
    names = list(scores)
    pairs = {f"{x} over {y}": (scores[x], scores[y]) for i, x in enumerate(names) for y in names[:i]}
    if not pairs:
        return
    estimates, intervals = _intervals(pairs, metrics.probability_of_improvement)
    yield ""
    yield "| pair | probability of improvement | 95 % bootstrap interval |"
    yield "|---|---|---|"
    for pair in pairs:
        low, high = intervals[pair].ravel()
        yield f"| {pair} | {np.ravel(estimates[pair])[0]:.2f} | {low:.2f} to {high:.2f} |"
    if n_seeds < 5:
        yield ""
        yield f"An interval over {n_seeds} seeds says little: the bootstrap can only draw these {n_seeds} again."


def _intervals(scores: dict[str, Any], function: Callable[..., Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """
    :param scores: Scores by name, shape (n_seeds, 1) each, or pairs of such
    :param function: What to estimate
    :return: estimates, and 95 % intervals of the stratified bootstrap
    """
    from rliable import library

    with warnings.catch_warnings():
        # rliable hands arch a generator in the way that arch is leaving
        warnings.simplefilter("ignore", FutureWarning)
        return library.get_interval_estimates(scores, function, reps=N_BOOTSTRAP, random_state=np.random.RandomState(0))


def markdown(groups: dict[str, list[Record]], goal: float) -> str:
    """
    :param groups: Records of a study
    :param goal: Mean return of an evaluation that counts as solved
    :return: the report
    """
    records = [record for group in groups.values() for record in group]
    settings = records[0].settings
    unfinished = [record.name for record in records if not record.status.get("finished")]
    n_episodes, actions = settings["n_eval_episodes"], "the most probable" if settings["deterministic"] else "sampled"
    lines = [
        f"# {settings['env_id']}: {', '.join(groups)}",
        "",
        *([f"**Unfinished:** {', '.join(unfinished)}. What follows is what there is so far.", ""] if unfinished else []),
        "![evaluations](evaluations.png)",
        "",
        f"Each evaluation is {n_episodes} whole episodes with {actions} actions and raw scores. "
        "Thick lines are means over the episodes of all seeds, shaded with their standard error; each "
        "thin line is one seed. The standard error is that of the episodes that were played, not of other seeds.",
        "",
        *table(groups, goal),
        "",
        "## Over seeds",
        "",
        *statistics(groups),
        "",
        "## In training",
        "",
        "![curves](curves.png)",
        "",
        "Every run that was started is in the table. Versions: "
        + ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
        + f"; commit {settings['commit']}; {settings['machine']['cores']} cores, {settings['machine']['gpu'] or 'no GPU'}.",
    ]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, goal: float = 18.0, output: Path | None = None) -> Path:
    """
    :param folder: Folder of a study
    :param goal: Mean return of an evaluation that counts as solved
    :param output: Folder for the report; that of the study if None
    :return: the Markdown file; an HTML file and the images are beside it
    :raises ValueError: if there is no run in the folder
    """
    from markdown import markdown as to_html

    groups = load_study(folder)
    output = output or folder
    output.mkdir(parents=True, exist_ok=True)
    draw_evaluations(groups, output / "evaluations")
    draw_curves(groups, output / "curves")
    text = markdown(groups, goal)
    (output / "report.md").write_text(text)
    style = (
        "<meta charset='utf-8'><style>body{font-family:sans-serif;max-width:60em;margin:auto}td,th{padding:.2em .6em}</style>"
    )
    (output / "report.html").write_text(f"{style}\n{to_html(text, extensions=['tables'])}\n")
    return output / "report.md"
