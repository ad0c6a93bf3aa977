"""The report of a study, finished or not: curves, a table, statistics over seeds, as Markdown, HTML, PNG and SVG."""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_qac.common.checks import check_number
from sb3_qac.common.files import make_folder
from sb3_qac.study.analysis import (
    differences,
    over_environments,
    relative_table,
    runs_table,
    statistics,
)
from sb3_qac.study.catalogue import field_name
from sb3_qac.study.diagnosis_tables import diagnosis_tables
from sb3_qac.study.loading import load_study
from sb3_qac.study.records import CURVES, Groups, Record, records_of
from sb3_qac.study.statistics import RelativeReturns, pooled, relative_returns

# Line styles differ because two curves may be identical
STYLES = ("-", "--", ":", "-.")
# These groups always look the same, whatever else is drawn
USUAL = ("a2c", "all-action", "all-action-baseline", "beta-loo", "qppo", "qppo-sampled")
LINES = (
    " Thick lines are means over the episodes of all seeds, shaded with their standard error over episodes (not over seeds). "
    "Each thin line is one seed."
)
STOPPED = (
    " A run that stopped at its return enters the mean with its last evaluation from there on. Such runs are compared by the "
    "steps to that return, because their last evaluation was selected for its return."
)
CURVE_LINES = (
    "Thin lines are seeds, smoothed over a fortieth of their length. Thick lines are medians over seeds. From where a run "
    "stopped at its return, or failed, its last value enters the median."
)
DIAGNOSED = (
    "Measured on rollouts of the network at that point, without learning. First table: squared norm of the expected "
    "gradient of the actor's loss, trace of its covariance over rollouts, their ratio, cosine to the all-action "
    "gradient (an estimate without the noise, so it can be slightly beyond -1 or 1), mean relative distance to it on "
    "the same rollout, milliseconds for one gradient. Second table: the critic against the discounted returns G that "
    "followed. Standard errors are over blocks of rollouts and over environments."
)
NO_ACTOR = " PQN has no actor, and so no first table. Its policy is epsilon-greedy."
PLAYED = (
    " Third table: every action was played from the same visited states, and the policy after it. Differences between two "
    "actions of a state, in Q and in the discounted returns: their root mean squares, slope of the regression of the returns' "
    "on Q's, correlation without the noise of the returns, share of pairs in which both have the same sign, and share in "
    "which two halves of the returns have the same sign. Improbable actions have less than half of the uniform probability. "
    "Standard errors are over states."
)
FAILED = " In means and comparisons a failed run counts with its last evaluation, and is left out if it has none."
# Settings that change what an evaluation is, or how soon one can reach a return: algorithms that are compared share them
COMPARED = ("n_eval_episodes", "deterministic", "eval_freq", "eval_from", "stop_return")
# Also those that change the games' implementation and the network's precision: the runs of an algorithm share them
EVALUATED = (*COMPARED, "native", "dtype")


def draw_evaluations(envs: dict[str, Groups], path: Path) -> None:
    """
    Mean over the episodes of all seeds with its standard error; each seed is a thin line.

    :param envs: Records by environment
    :param path: Image to write, without its suffix: a PNG and an SVG
    """
    import matplotlib.pyplot as plt

    n_columns = min(len(envs), 3) if len(envs) != 4 else 2
    n_rows = -(-len(envs) // n_columns)
    size = (8, 5) if len(envs) == 1 else (4.5 * n_columns, 3.5 * n_rows)
    figure, panels = plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False)
    for panel, (env_id, groups) in zip(panels.flat, envs.items(), strict=False):
        _draw_panel(panel, env_id, groups)
    for panel in panels.flat[len(envs) :]:
        panel.set_axis_off()
    _add_legend(figure, panels.flat)
    save_figure(figure, path)


def _draw_panel(panel: Any, title: str, groups: Groups) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for (group, records), style in zip(groups.items(), _styles(groups), strict=True):
        for record in records:
            # A single point draws no line, so mark it
            end = record.stopped or len(record.timesteps) == 1
            dot = dict(marker="o", markevery=[-1], markersize=3) if end else {}
            panel.plot(record.timesteps, record.means, **style, **dot, linewidth=0.7, alpha=0.6)
        steps, means, errors = pooled(records)
        if len(steps):
            panel.plot(steps, means, **style, linewidth=2, marker="o" if len(steps) == 1 else "", label=group)
            panel.fill_between(steps, means - errors, means + errors, color=style["color"], alpha=0.25, linewidth=0)
    panel.set_xlabel("environment steps")
    panel.xaxis.set_major_formatter(EngFormatter())
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.set_ylabel("return of an evaluation episode")
    panel.set_title(title)
    panel.grid(alpha=0.3)


def _add_legend(figure: Any, panels: Iterable[Any]) -> None:
    # Not every panel has all groups
    lines = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if lines:
        # Above the panels: inside it would hide lines
        figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, fontsize="small")


def _styles(groups: Iterable[str]) -> Iterator[dict[str, str]]:
    names = [*USUAL, *(group for group in groups if group not in USUAL)]
    for i in map(names.index, groups):
        yield dict(color=f"C{i}", linestyle=STYLES[i % 4])


def draw_curves(envs: dict[str, Groups], path: Path) -> None:
    """
    :param envs: Records by environment
    :param path: Image to write, without its suffix: a PNG and an SVG
    """
    import matplotlib.pyplot as plt

    # One environment has two rows of panels; several environments have one row each
    n_rows, n_columns, size = (2, 3, (13, 7)) if len(envs) == 1 else (len(envs), 6, (15, 2.6 * len(envs)))
    figure, panels = plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False)
    rows = panels.reshape(len(envs), 6)
    for row, (env_id, groups) in zip(rows, envs.items(), strict=True):
        for panel, tag in zip(row, CURVES, strict=True):
            _draw_curve(panel, tag, groups)
        for panel in _visible(row)[:1]:
            panel.set_ylabel(env_id if len(envs) > 1 else "", fontsize="small")
    for column, title in zip(rows.T, CURVES.values(), strict=True):
        for panel in _visible(column)[:1]:
            panel.set_title(title, fontsize="medium")
    for column in panels.T:
        for panel in _visible(column)[-1:]:
            panel.set_xlabel("environment steps")
    _add_legend(figure, panels.flat)
    save_figure(figure, path)


def _visible(panels: Iterable[Any]) -> list[Any]:
    """:return: those that show something. Some algorithms do not log every row, and a run that has just begun none."""
    return [panel for panel in panels if panel.get_visible()]


def _draw_curve(panel: Any, tag: str, groups: Groups) -> None:
    from matplotlib.ticker import EngFormatter

    for (group, records), style in zip(groups.items(), _styles(groups), strict=True):
        records = [record for record in records if tag in record.curves]
        curves = [_smooth(record.curves[tag]) for record in records]
        for curve in curves:
            panel.plot(curve.index, curve, **style, linewidth=0.7, alpha=0.3)
        if curves:
            middle = median_curve(curves, [record.stopped or record.failed for record in records])
            panel.plot(middle.index, middle, **style, linewidth=1.5, label=group)
    panel.set_visible(panel.has_data())
    if tag == "train/explained_variance":
        # It has no lower bound: single updates far below 0 would hide the rest
        panel.set_ylim(max(panel.get_ylim()[0], -1.1), 1.1)
    panel.xaxis.set_major_formatter(EngFormatter())
    panel.grid(alpha=0.3)


def draw_relative(relative: RelativeReturns, path: Path) -> None:
    """
    Interquartile means with their intervals, against environment steps and against time.

    :param relative: Relative returns
    :param path: Image to write, without its suffix: a PNG and an SVG
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    # A single point draws no line, so mark it
    marker = "o" if len(relative.timesteps) == 1 else ""
    for (group, means), style in zip(relative.means.items(), _styles(relative.means), strict=True):
        for panel, x in zip(panels, (relative.timesteps, relative.minutes[group]), strict=True):
            panel.plot(x, means, **style, linewidth=2, label=group, marker=marker)
            panel.fill_between(x, *relative.intervals[group], color=style["color"], alpha=0.12, linewidth=0)
    panels[0].set_xlabel("environment steps")
    panels[0].xaxis.set_major_formatter(EngFormatter())
    panels[1].set_xlabel("minutes of training")
    panels[0].set_ylabel(f"return, relative to {relative.reference} at the end")
    _add_legend(figure, panels)
    for panel in panels:
        panel.axhline(1, color="grey", linewidth=0.6, linestyle="--")
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def median_curve(curves: Sequence[pd.Series], stopped: Sequence[bool]) -> pd.Series:
    """
    :param curves: The same row of the log of several runs, indexed by steps that may differ
    :param stopped: Whether each run stopped because it reached its return, or failed. Then its last value counts at later
        steps too: without it, the median would be over the runs that learn more slowly, or that did not fail.
    :return: their median at all steps; each curve is interpolated between its own steps
    """
    # A resumed log may have two rows of one step
    curves = [curve[~curve.index.duplicated(keep="last")] for curve in curves]
    table = pd.concat(curves, axis=1).sort_index().interpolate("index", limit_area="inside")
    return table.mask(table.isna() & np.asarray(stopped), table.ffill()).median(axis=1)


def _smooth(curve: pd.Series) -> pd.Series:
    return curve.rolling(max(len(curve) // 40, 1), min_periods=1).mean()


def save_figure(figure: Any, path: Path) -> None:
    """
    :param figure: Figure of matplotlib; it is closed
    :param path: Image to write, without its suffix: a PNG and an SVG; the same figure gives the same bytes
    """
    import matplotlib.pyplot as plt

    figure.savefig(f"{path}.png", dpi=85)
    with plt.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(f"{path}.svg", metadata={"Date": None})
    plt.close(figure)


def _actions(records: Sequence[Record]) -> str:
    """
    :param records: All runs of a study
    :return: the actions of their evaluations
    """
    greedy = [record for record in records if record.settings["deterministic"]]
    if len(greedy) == len(records):
        return "the most probable"
    exceptions = ", ".join(dict.fromkeys(record.settings["group"] for record in greedy))
    return f"sampled (but {exceptions}: the most probable)" if exceptions else "sampled"


def markdown(envs: dict[str, Groups], goal: float | None, relative: RelativeReturns | None = None) -> str:
    """
    :param envs: Records by environment
    :param goal: Mean return of an evaluation that counts as solved; if None, the stopping return of each environment's runs
    :param relative: Returns relative to those of a group, if they are part of the report
    :return: the report
    """
    records = _all_records(envs)
    several = len(envs) > 1
    n_episodes = " or ".join(map(str, sorted({record.settings["n_eval_episodes"] for record in records})))
    drawn = _plots(envs, relative)
    lines = [
        f"# {', '.join(envs)}: {', '.join(dict.fromkeys(group for groups in envs.values() for group in groups))}",
        "",
        *_unfinished(envs),
        *(line for warning in warnings_of(envs) for line in (warning, "")),
        *(["![evaluations](evaluations.png)", ""] if "evaluations" in drawn else []),
        f"Each evaluation is {n_episodes} whole episodes with {_actions(records)} actions and raw scores."
        + (LINES if "evaluations" in drawn else "")
        + _evaluated_from(records)
        + (STOPPED if any(record.stopped for record in records) else ""),
        "",
    ]
    overall = list(over_environments(envs)) if several else []
    if overall:
        lines += ["## Over environments", "", *overall, ""]
    if relative is not None:
        lines += [f"## Relative to {relative.reference}", ""]
        lines += ["![relative returns](relative.png)", ""] if "relative" in drawn else []
        lines += [*relative_table(relative), ""]
    for env_id, groups in envs.items():
        lines += [f"## {env_id}", ""] if several else []
        lines += _of_environment(env_id, groups, _stop_return(groups) if goal is None else goal, "###" if several else "##")
    if "curves" in drawn:
        lines += ["## In training", "", "![curves](curves.png)", "", CURVE_LINES, ""]
    lines += ["## Software and machines", "", _provenance(records), *_wandb(records, envs)]
    return "\n".join(lines) + "\n"


def _all_records(envs: dict[str, Groups]) -> list[Record]:
    return [record for groups in envs.values() for record in records_of(groups)]


def _plots(envs: dict[str, Groups], relative: RelativeReturns | None) -> dict[str, Callable[[Path], None]]:
    """:return: by the name of its file, how each plot for which there is data is drawn"""
    records = _all_records(envs)
    plots: dict[str, Callable[[Path], None]] = {}
    if any(len(record.timesteps) for record in records):
        plots["evaluations"] = partial(draw_evaluations, envs)
    if any(tag in record.curves for record in records for tag in CURVES):
        plots["curves"] = partial(draw_curves, envs)
    if relative is not None:
        plots["relative"] = partial(draw_relative, relative)
    return plots


def _stop_return(groups: Groups) -> float | None:
    """:return: the return at which runs of an environment were stopped; None if there is none, or more than one"""
    goals = {record.settings.get("stop_return") for record in records_of(groups)} - {None}
    return goals.pop() if len(goals) == 1 else None


def _evaluated_from(records: list[Record]) -> str:
    if all(record.settings.get("eval_from") is None for record in records):
        return ""
    return " Before the training episodes reached the return of `--eval-from` there were no evaluations."


def _name(record: Record, envs: dict[str, Groups]) -> str:
    """:return: its name, with that of its environment if there are several"""
    return record.name if len(envs) == 1 else f"{record.settings['env_id']} {record.name}"


def _unfinished(envs: dict[str, Groups]) -> list[str]:
    unfinished = [record for record in _all_records(envs) if not record.finished]
    if not unfinished:
        return []
    named = ", ".join(f"{_name(record, envs)} ({record.state})" for record in unfinished)
    failed = FAILED if any(record.failed for record in unfinished) else ""
    return [f"**Not finished:** {named}. The report has their data so far.{failed}", ""]


def warnings_of(envs: dict[str, Groups]) -> Iterator[str]:
    """
    :param envs: Records by environment
    :return: lines of Markdown: what makes a mean or a comparison of the report say less than it seems to
    """
    yield from with_new_episodes(envs)
    for env_id, groups in envs.items():
        for group, records in groups.items():
            # A run that has just begun has none yet
            hyperparams = {
                # `--steps` replaces the number of steps of the preset
                record.path: {**known, "n_timesteps": _planned(record)}
                for record in records
                if (known := record.settings.get("resolved_hyperparams"))
            }
            settings = {record.path: {name: record.settings.get(name) for name in EVALUATED} for record in records}
            # As after a change of a preset
            for what, found in {"hyperparameters": hyperparams, "settings": settings}.items():
                if parts := _different(found):
                    yield f"**The runs of {group} on {env_id} have different {what}:** {'; '.join(parts)}."
            for record in records:
                wrong = record.timesteps[~np.isfinite(record.returns).all(axis=1)]
                if len(wrong):
                    yield (
                        f"**{record.path} has returns on {env_id} that are not finite numbers**, first at {wrong[0]:,} steps. "
                        f"Means of {group} that include them are not numbers either."
                    )
        for name in COMPARED:
            kinds = {
                group: " and ".join(sorted({str(record.settings.get(name)) for record in records}))
                for group, records in groups.items()
            }
            if len(set(kinds.values())) > 1:
                listed = ", ".join(f"{kind} ({group})" for group, kind in kinds.items())
                yield f"**On {env_id} algorithms are compared that were evaluated in different ways:** {name} is {listed}."
        plans = {group: sorted({_planned(record) for record in records} - {0}) for group, records in groups.items()}
        if len({steps for of_group in plans.values() for steps in of_group}) > 1:
            listed = "; ".join(f"{' and '.join(f'{x:,}' for x in steps)} ({group})" for group, steps in plans.items() if steps)
            yield (
                f"**The runs on {env_id} are planned for different numbers of steps:** {listed}. Where they are compared, "
                "their schedules, as of the learning rate, are at different points."
            )


def with_new_episodes(envs: dict[str, Groups]) -> Iterator[str]:
    """
    :param envs: Records by environment
    :return: a line of Markdown for each run that was not resumed exactly
    """
    for record in _all_records(envs):
        if steps := record.status.get("new_episodes_at"):
            yield (
                f"**{_name(record, envs)} was resumed with new episodes** at {' and '.join(f'{x:,}' for x in steps)} steps "
                "(`--new-episodes`), so it is not the run that it would have been without a stop."
            )


def _planned(record: Record) -> int:
    """:return: environment steps of the whole run; 0 if they are not known"""
    of_preset = record.settings.get("resolved_hyperparams", {}).get("n_timesteps") or 0
    return record.settings.get("n_timesteps") or int(float(of_preset))


def _different(found: dict[str, dict[str, Any]]) -> list[str]:
    """:return: each entry that differs, with its value by run"""
    return [
        f"{name} is " + ", ".join(f"{entries.get(name)} ({run})" for run, entries in found.items())
        for name in sorted({name for entries in found.values() for name in entries})
        if any(x.get(name) != y.get(name) for x, y in itertools.pairwise(found.values()))
    ]


def _of_environment(env_id: str, groups: Groups, goal: float | None, heading: str) -> list[str]:
    lines = [*runs_table(groups, goal), "", f"{heading} Over seeds", "", *statistics(groups), ""]
    if len(groups) > 1:
        lines += [f"{heading} Differences", "", *differences(groups, goal), ""]
    diagnosed = [record for record in records_of(groups) if record.diagnosis]
    if diagnosed:
        played = any("branches" in point for record in diagnosed for point in record.diagnosis)
        no_actor = any(not point["estimators"] for record in diagnosed for point in record.diagnosis)
        explained = DIAGNOSED + (NO_ACTOR if no_actor else "") + (PLAYED if played else "")
        lines += [f"{heading} Estimators and critic", "", explained, ""]
    for record in diagnosed:
        lines += [f"{record.name}:", "", *diagnosis_tables(record.diagnosis), ""]
    return lines


def _wandb(records: list[Record], envs: dict[str, Groups]) -> list[str]:
    urls = [f"[{_name(record, envs)}]({url})" for record in records if (url := record.settings.get("wandb_url"))]
    return ["", f"In Weights & Biases: {', '.join(urls)}."] if urls else []


def _provenance(records: list[Record]) -> str:
    versions = {f"{name} {version}" for record in records for name, version in record.settings["versions"].items()}
    # A run that was resumed may have several
    commits = {commit for record in records for commit in (record.settings["commit"] or "").split(", ") if commit}
    machines = {_machine(**record.settings["machine"]) for record in records}
    # With stock environments there is no choice
    precisions = {record.settings.get("dtype") or "float32" for record in records}
    return (
        f"Versions: {', '.join(sorted(versions))}; commit {', '.join(sorted(commits)) or 'not known'}; "
        f"{'; '.join(sorted(machines))}; "
        f"precision of the network for images: {', '.join(sorted(precisions))}. "
        "The values of each run are in its `run.json`, or in `runs.csv` and `settings.json`."
    )


def _machine(cores: int, gpu: str | None, processor: str = "", **_: Any) -> str:
    # Older runs do not say which processor
    return f"{cores} cores{processor and f' of {processor}'}, {gpu or 'no GPU'}"


def write_report(
    folder: Path,
    goal: float | None = None,
    output: Path | None = None,
    reference: str | None = None,
) -> Path:
    """
    :param folder: Folder of a study, packed or not
    :param goal: Mean return of an evaluation that counts as solved; if None, the stopping return of each environment's runs
    :param output: Folder for the report; the folder of the study if None
    :param reference: Group by whose returns those of all groups are divided, to compare them over environments; None for none
    :return: the Markdown file; an HTML file and the images are in the same folder
    :raises ValueError: if there is no run in the folder, or returns cannot be divided by those of the reference
    """
    if goal is not None:
        check_number("goal", goal, minimum=-math.inf)
    envs = load_study(folder)
    relative = None if reference is None else relative_returns(envs, field_name(reference))
    output = make_folder(output or folder)
    for warning in warnings_of(envs):
        print(f"report: {warning.replace('**', '')}", file=sys.stderr)
    for name, draw in _plots(envs, relative).items():
        draw(output / name)
    return write_markdown(markdown(envs, goal, relative), output / "report")


def write_markdown(text: str, path: Path, width: str = "60em") -> Path:
    """
    :param text: Page in Markdown
    :param path: File to write, without its suffix; Markdown and HTML
    :param width: Largest width of the HTML page, as a CSS length
    :return: the Markdown file
    """
    from markdown import markdown as to_html

    style = (
        f"<meta charset='utf-8'><style>body{{font-family:sans-serif;max-width:{width};margin:auto}}"
        "td,th{padding:.2em .6em}img{max-width:100%}</style>"
    )
    Path(f"{path}.md").write_text(text, encoding="utf-8")
    Path(f"{path}.html").write_text(f"{style}\n{to_html(text, extensions=['tables'])}\n", encoding="utf-8")
    return Path(f"{path}.md")
