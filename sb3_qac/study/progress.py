"""How far the runs of a study have come: a live table in a terminal, lines elsewhere, such as in a log file."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from sb3_qac.common.files import read_json, to_json
from sb3_qac.study.catalogue import field_name
from sb3_qac.study.run import Run

# With more runs than this, the table shows only active ones
MAX_ROWS = 20
BAR_WIDTH = 8
# Seconds between two lines of a run, where there is no terminal
SECONDS = 60.0


@contextlib.contextmanager
def progress(runs: Sequence[Run], failed: dict[str, str], as_json: bool = False) -> Iterator[Console]:
    """
    :param runs: Runs of a study
    :param failed: What went wrong, by the folder of the run, now and later
    :param as_json: Whether the lines are JSON objects
    :return: within it, the progress of the runs is shown in the error output, to which the console writes
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(get_renderable=lambda: status_table(runs, failed), refresh_per_second=0.5, console=console):
            yield console
        return
    ended = threading.Event()
    thread = threading.Thread(target=_print_lines, args=(runs, failed, as_json, console, ended), daemon=True)
    thread.start()
    try:
        yield console
    finally:
        ended.set()
        thread.join()
        if not as_json:
            console.print(status_table(runs, failed))


def _print_lines(runs: Sequence[Run], failed: dict[str, str], as_json: bool, console: Console, ended: threading.Event) -> None:
    before = {run.folder: status_of(run) for run in runs}
    while not ended.wait(SECONDS):
        for run in runs:
            status = status_of(run)
            # One of an earlier start, which goes on later, or one that has ended
            idle = status == before[run.folder] or status["finished"] or run.folder in failed
            if not idle and not Path(run.folder, "error.txt").exists():
                console.out(progress_line(run, status, as_json), highlight=False)


def status_of(run: Run) -> dict[str, Any]:
    """
    :param run: A run of a study
    :return: its status; empty before it begins
    """
    return read_json(Path(run.folder, "status.json"))


def seconds_left(status: dict[str, Any]) -> int | None:
    """
    :param status: Status of a run that has begun
    :return: seconds to its last step, at its mean speed; None before its first step in this process
    """
    # The last rollout may go beyond the end
    steps, speed = max(status["total"] - status["steps"], 0), status["steps_per_second"]
    return round(steps / speed) if speed else None


def progress_line(run: Run, status: dict[str, Any], as_json: bool = False) -> str:
    """
    :param run: A run of a study
    :param status: Its status
    :param as_json: Whether to write it as a JSON object
    :return: a line of text: steps, share, return of training, last evaluation, speed, time left
    """
    left = seconds_left(status)
    if as_json:
        return to_json({"run": run.folder, **status, "seconds_left": left}, indent=None)
    steps, total, training_return, evaluation = (status[x] for x in ("steps", "total", "training_return", "last_evaluation"))
    parts = [f"{run.folder}: {steps:,} of {total:,} steps ({steps / total:.0%})"]
    if training_return is not None:
        parts.append(f"return {training_return:.2f}")
    if evaluation is not None:
        parts.append(f"{evaluation['mean_return']:.2f} in the evaluation at {evaluation['steps']:,}")
    parts.append("resuming" if left is None else f"{status['steps_per_second']:,.0f} steps/s, {timedelta(seconds=left)} left")
    return ", ".join(parts)


def status_table(runs: Sequence[Run], failed: dict[str, str]) -> Table:
    """
    :param runs: Runs of a study
    :param failed: What went wrong, by the folder of the run
    :return: table with the progress of each run; its returns are the mean of the last training episodes, and of an evaluation
    """
    statuses = {run.folder: status_of(run) for run in runs}
    n_finished = sum(bool(status.get("finished")) for status in statuses.values())
    several = len({run.env_id for run in runs}) > 1
    caption = f"{n_finished} of {len(runs)} finished"
    names = {run.folder: f"{run.env_id} {field_name(run.name)}" if several else field_name(run.name) for run in runs}
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for heading in ("progress", "steps", "steps/s", "left", "return", "last evaluation"):
        table.add_column(heading, no_wrap=heading != "last evaluation")
    for run in runs:
        status, name = statuses[run.folder], names[run.folder]
        if len(runs) > MAX_ROWS and run.folder not in failed and (not status or status["finished"]):
            continue
        if not status:
            table.add_row(name, "failed" if run.folder in failed else "waiting")
            continue
        steps, total = status["steps"], status["total"]
        ended = run.folder in failed or status["finished"]
        state: ProgressBar | str = ProgressBar(total, steps, width=BAR_WIDTH)
        if ended:
            state = "failed" if run.folder in failed else "finished"
        left = seconds_left(status)
        training_return, evaluation = status.get("training_return"), status["last_evaluation"]
        table.add_row(
            name,
            state,
            f"{steps:,}",
            f"{status['steps_per_second']:,.0f}",
            # Its environments may have to play their games again, which takes up to some minutes
            "" if ended or not steps else "resuming" if left is None else f"{timedelta(seconds=left)}",
            "" if training_return is None else f"{training_return:.2f}",
            "" if evaluation is None else f"{evaluation['mean_return']:.2f} at {evaluation['steps']:,}",
        )
    # With many runs that have all ended, or not begun, there is only the caption
    table.show_header = bool(table.rows)
    return table


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """
    :param runs: Runs of a study
    :return: a line of text for each finished run: its steps, its time and its last evaluation
    """
    for run in runs:
        status = status_of(run)
        if not status.get("finished"):
            continue
        line = f"{run.folder}: {status['steps']:,} steps in {timedelta(seconds=round(status['seconds']))}"
        if (evaluation := status["last_evaluation"]) is not None:
            line += f", return {evaluation['mean_return']:.2f} in the evaluation at {evaluation['steps']:,}"
        else:
            line += ", no evaluation"
        if run.stop_return is not None:
            line += f": it {'reached' if run.reached else 'did not reach'} {run.stop_return:g}"
        yield line
