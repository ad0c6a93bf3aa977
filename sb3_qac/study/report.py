"""The report of a study, unfinished or not: curves, a table, statistics over seeds, as Markdown, HTML, PNG and SVG."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sb3_qac.study.analysis import A2C, BETA_1, PUBLISHED, TASK_1, TASK_2, over_environments, paragraphs, statistics
from sb3_qac.study.diagnose import tables as diagnosis_tables
from sb3_qac.study.loading import load_study
from sb3_qac.study.records import CURVES, Groups, Record
from sb3_qac.study.statistics import pooled, standard_error

# Tasks 1 and 2 may lie upon each other, to the last bit
STYLES = ("-", "--", ":", "-.")
# Groups that always look the same, whatever else is drawn
USUAL = (A2C, TASK_1, TASK_2, BETA_1)
STOPPED = (
    " A thin line that ends in a dot is a run that was stopped at a return; in the mean it counts with its last evaluation "
    "from there on. Such runs are compared by their way to that return: their last evaluation was chosen for being good."
)


def draw_evaluations(envs: dict[str, Groups], path: Path) -> None:
    """
    The plot that was asked for: mean over the episodes of all seeds with its standard error; each seed is a thin line.

    :param envs: Records by environment
    :param path: Image to write, without its suffix; a PNG and an SVG come of it
    """
    import matplotlib.pyplot as plt

    n_columns = min(len(envs), 3)
    n_rows = -(-len(envs) // n_columns)
    size = (8, 5) if len(envs) == 1 else (4.5 * n_columns, 3.5 * n_rows)
    figure, panels = plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False)
    for panel, (env_id, groups) in zip(panels.flat, envs.items(), strict=False):
        _draw_panel(panel, env_id, groups)
    for panel in panels.flat[len(envs) :]:
        panel.set_axis_off()
    save_figure(figure, path)


def _draw_panel(panel: Any, env_id: str, groups: Groups) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for (group, records), style in zip(groups.items(), _styles(groups), strict=True):
        for record in records:
            end = dict(marker="o", markevery=[-1], markersize=3) if record.stopped else {}
            panel.plot(record.timesteps, record.means, **style, **end, linewidth=0.7, alpha=0.6)
        steps, means, errors = pooled(records)
        if len(steps):
            seeds = f"{len(records)} seed{'s' if len(records) > 1 else ''}"
            panel.plot(steps, means, **style, linewidth=2, label=f"{group} ({seeds})")
            panel.fill_between(steps, means - errors, means + errors, color=style["color"], alpha=0.25, linewidth=0)
    panel.set_xlabel("environment steps")
    panel.xaxis.set_major_formatter(EngFormatter())
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.set_ylabel("return of an evaluation episode")
    panel.set_title(env_id)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend()


def _styles(groups: Groups) -> Iterator[dict[str, str]]:
    names = [*USUAL, *(group for group in groups if group not in USUAL)]
    for i in map(names.index, groups):
        yield dict(color=f"C{i}", linestyle=STYLES[i % 4])


def draw_curves(groups: Groups, path: Path) -> None:
    """
    :param groups: Records of one environment
    :param path: Image to write, without its suffix; a PNG and an SVG come of it
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, panels = plt.subplots(2, 3, figsize=(13, 7), sharex=True, layout="constrained")
    for panel, (tag, title) in zip(panels.flat, CURVES.items(), strict=True):
        for (group, records), style in zip(groups.items(), _styles(groups), strict=True):
            curves = [_smooth(record.curves[tag]) for record in records if tag in record.curves]
            for curve in curves:
                panel.plot(curve.index, curve, **style, linewidth=0.7, alpha=0.3)
            if curves:
                middle = pd.concat(curves, axis=1).interpolate("index", limit_area="inside").median(axis=1)
                panel.plot(middle.index, middle, **style, linewidth=1.5, label=group)
        if tag == "train/explained_variance":
            # It has no lower bound, and single updates far below 0 would hide the rest
            panel.set_ylim(max(panel.get_ylim()[0], -1.1), 1.1)
        panel.set_title(title)
        panel.grid(alpha=0.3)
    if panels.flat[0].get_legend_handles_labels()[0]:
        panels.flat[0].legend()
    for panel in panels[1]:
        panel.set_xlabel("environment steps")
        panel.xaxis.set_major_formatter(EngFormatter())
    save_figure(figure, path)


def _smooth(curve: pd.Series) -> pd.Series:
    return curve.rolling(max(len(curve) // 40, 1), min_periods=1).mean()


def save_figure(figure: Any, path: Path) -> None:
    """
    :param figure: Figure of matplotlib; it is closed
    :param path: Image to write, without its suffix; a PNG and an SVG come of it, the same bytes for the same figure
    """
    import matplotlib.pyplot as plt

    figure.savefig(f"{path}.png", dpi=120)
    with plt.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(f"{path}.svg", metadata={"Date": None})
    plt.close(figure)


def table(groups: Groups, goal: float | None) -> Iterator[str]:
    """
    :param groups: Records of one environment
    :param goal: Mean return of an evaluation that counts as solved; None for none
    :return: lines of a Markdown table, a row for each run
    """
    to_goal = "" if goal is None else f" steps to {goal:g} | hours to {goal:g} |"
    yield f"| run | state | steps | last evaluation | best evaluation |{to_goal} last 100 episodes of training | steps/s |"
    yield "|---" * (7 if goal is None else 9) + "|"
    for record in (record for records in groups.values() for record in records):
        state = "finished" if record.finished else "failed" if record.failed else "unfinished"
        last = best = "-"
        if len(record.timesteps):
            top = int(record.means.argmax())
            last, best = (f"{record.means[i]:.2f} +/- {standard_error(record.returns[i]):.2f}" for i in (-1, top))
            best += f" at {record.timesteps[top]:,}"
        cells = [record.name, state, f"{record.status.get('steps', 0):,}", last, best]
        if goal is not None:
            reached, hours = record.steps_to(goal), record.hours_to(goal)
            cells += ["not reached", "-"] if hours is None else [f"{reached:,}", f"{hours:.2g}"]
        training = record.figures.get("training_return")
        cells += ["-" if training is None else f"{training:.2f}", f"{record.steps_per_second:,.0f}"]
        yield f"| {' | '.join(cells)} |"


def markdown(folder: Path, envs: dict[str, Groups], goal: float | None) -> str:
    """
    :param folder: Folder of the study
    :param envs: Records by environment
    :param goal: Mean return of an evaluation that counts as solved; None for none
    :return: the report
    """
    records = [record for groups in envs.values() for group in groups.values() for record in group]
    settings = records[0].settings
    n_episodes, actions = settings["n_eval_episodes"], "the most probable" if settings["deterministic"] else "sampled"
    several = len(envs) > 1
    lines = [
        f"# {', '.join(envs)}: {', '.join(dict.fromkeys(group for groups in envs.values() for group in groups))}",
        "",
        *_unfinished(records),
        "![evaluations](evaluations.png)",
        "",
        f"Each evaluation is {n_episodes} whole episodes with {actions} actions and raw scores. "
        "Thick lines are means over the episodes of all seeds, shaded with their standard error; each "
        "thin line is one seed. The standard error is that of the episodes that were played, not of other seeds."
        + (STOPPED if any(record.stopped for record in records) else ""),
        "",
    ]
    if any(BETA_1 in groups for groups in envs.values()):
        lines += ["What `beta=1` changes:", "", "![beta](beta.png)", ""]
    if several:
        lines += ["## Over environments", "", *over_environments(envs), ""]
    for env_id, groups in envs.items():
        lines += [f"## {env_id}", ""] if several else []
        lines += _of_environment(env_id, groups, goal, "###" if several else "##")
    lines += [
        "## All runs",
        "",
        " ".join(filter(None, ("Every run in this folder is in the tables.", _wandb(folder, records)))),
        "",
        _provenance(records),
    ]
    return "\n".join(lines) + "\n"


def _unfinished(records: list[Record]) -> list[str]:
    unfinished = [record.name for record in records if not record.finished]
    if not unfinished:
        return []
    named = ", ".join(unfinished) if len(unfinished) <= 10 else f"{len(unfinished)} of {len(records)} runs"
    return [f"**Unfinished:** {named}. What follows is what there is so far.", ""]


def _of_environment(env_id: str, groups: Groups, goal: float | None, heading: str) -> list[str]:
    lines = [*table(groups, goal), "", f"{heading} Over seeds", "", *statistics(groups), ""]
    if env_id in PUBLISHED:
        lines += ["Published figures, of other protocols:", "", "| | score |", "|---|---|"]
        lines += [f"| {source} | {score} |" for source, score in PUBLISHED[env_id].items()] + [""]
    analysis = list(paragraphs(groups, goal))
    if analysis:
        lines += [f"{heading} Analysis", "", *analysis, ""]
    lines += [f"{heading} In training", "", f"![curves]({_curves_name(env_id)}.png)", ""]
    lines += ["Thin lines are seeds, smoothed over a fortieth of their length, thick ones the medians over seeds.", ""]
    diagnosed = [record for records in groups.values() for record in records if record.diagnosis]
    if diagnosed:
        lines += [
            f"{heading} Estimators and critic",
            "",
            "On rollouts of the network at that point, without learning: squared norm of the expected gradient of the actor's "
            "loss, trace of its covariance over rollouts, their ratio, cosine to the all-action gradient, mean distance from "
            "it on the same rollout (relative), milliseconds for one gradient. Then the critic against the discounted returns "
            "G that followed. Standard errors are over blocks of rollouts, and over environments.",
            "",
        ]
    for record in diagnosed:
        lines += [f"{record.name}:", "", *diagnosis_tables(record.diagnosis), ""]
    return lines


def _curves_name(env_id: str) -> str:
    return f"curves-{env_id.replace('/', '-')}"


def _wandb(folder: Path, records: list[Record]) -> str:
    urls = [f"[{record.name}]({record.settings['wandb_url']})" for record in records if record.settings.get("wandb_url")]
    if urls:
        return f"In Weights & Biases: {', '.join(urls)}."
    runs = sorted({os.path.relpath(path.parent, folder) for path in folder.glob("**/wandb/offline-run-*")})
    if runs:
        depth = "/".join("*" for _ in Path(runs[0]).parts[:-1])
        return f"To Weights & Biases they go with `wandb sync {depth}/wandb/offline-run-*`, from the folder of the study."
    return ""


def _provenance(records: list[Record]) -> str:
    versions = {f"{name} {version}" for record in records for name, version in record.settings["versions"].items()}
    commits = {str(record.settings["commit"]) for record in records}
    machines = {f"{x['cores']} cores, {x['gpu'] or 'no GPU'}" for x in (record.settings["machine"] for record in records)}
    precisions = {str(record.settings.get("dtype")) for record in records}
    return (
        f"Versions: {', '.join(sorted(versions))}; commit {', '.join(sorted(commits))}; {'; '.join(sorted(machines))}; "
        f"precision of the network for images: {', '.join(sorted(precisions))}. Each run's `run.json` has its own."
    )


def write_report(folder: Path, goal: float | None = None, output: Path | None = None) -> Path:
    """
    :param folder: Folder of a study
    :param goal: Mean return of an evaluation that counts as solved; if None, that at which the runs were to stop, if any
    :param output: Folder for the report; that of the study if None
    :return: the Markdown file; an HTML file and the images are beside it
    :raises ValueError: if there is no run in the folder
    """
    envs = load_study(folder)
    if goal is None:
        goal = next(iter(next(iter(envs.values())).values()))[0].settings.get("stop_return")
    output = output or folder
    output.mkdir(parents=True, exist_ok=True)
    # beta=1 is drawn apart from what the documents ask for, beside task 1
    draw_evaluations(_chosen(envs, lambda group: group != BETA_1) or envs, output / "evaluations")
    if any(BETA_1 in groups for groups in envs.values()):
        draw_evaluations(_chosen(envs, lambda group: group in (TASK_1, BETA_1)), output / "beta")
    for env_id, groups in envs.items():
        draw_curves(groups, output / _curves_name(env_id))
    return write_markdown(markdown(folder, envs, goal), output / "report")


def _chosen(envs: dict[str, Groups], is_chosen: Callable[[str], bool]) -> dict[str, Groups]:
    chosen = {env_id: {name: x for name, x in groups.items() if is_chosen(name)} for env_id, groups in envs.items()}
    return {env_id: groups for env_id, groups in chosen.items() if groups}


def write_markdown(text: str, path: Path, width: str = "60em") -> Path:
    """
    :param text: Page in Markdown
    :param path: File to write, without its suffix; Markdown and HTML come of it
    :param width: Largest width of the HTML page, in terms of CSS
    :return: the Markdown file
    """
    from markdown import markdown as to_html

    style = (
        f"<meta charset='utf-8'><style>body{{font-family:sans-serif;max-width:{width};margin:auto}}"
        "td,th{padding:.2em .6em}img{max-width:100%}</style>"
    )
    Path(f"{path}.md").write_text(text)
    Path(f"{path}.html").write_text(f"{style}\n{to_html(text, extensions=['tables'])}\n")
    return Path(f"{path}.md")
