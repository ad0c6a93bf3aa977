"""README and the pages of the documentation: links, code, command lines and figures. Sphinx is not needed here."""

import argparse
import csv
import json
import re
import runpy
import shlex
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import trim_mean, ttest_ind

from sb3_qac import __version__
from sb3_qac.common.minatar import register_minatar_envs
from sb3_qac.study.catalogue import STUDIES
from sb3_qac.zoo import register

ROOT = Path(__file__).parent.parent
README, RESULTS_PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
GUIDE = [README, *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDE, ROOT / "CHANGELOG.md", *sorted((ROOT / "results").rglob("*.md"))]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def of_page(path):
    return pytest.param(path, id=str(path.relative_to(ROOT)))


# ---- links ----


def links_of(path):
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text()))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"https?://", link)]


def anchors_of(path):
    # As GitHub makes them, and MyST
    counts, anchors = Counter(), set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", path.read_text()), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return anchors


def broken_links(path):
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors_of(target):
            yield f"{link}: there is no such heading"


@pytest.mark.parametrize("path", [of_page(path) for path in PAGES])
def test_links_lead_somewhere(path):
    assert not list(broken_links(path))


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# The loss\n\n# The loss\n\n```bash\n# No heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#the-loss-1) [b](https://example.com/no) `[c](no.md)` [d](no.md) [e](other.md#no-heading)")
    assert [line.split(":")[0] for line in broken_links(page)] == ["no.md", "other.md#no-heading"]


# ---- Python ----

# What a page leaves to the reader
ATARI = """
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage
env, eval_env = (VecTransposeImage(VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=2), 4)) for _ in range(2))
"""
PRELUDES = {"exact_resume.md": ATARI}
# A few environments, rollouts and episodes are enough
BUDGETS = {r"learn\([\d_]+": "learn(40", r"n_envs=16": "n_envs=2", r"n_eval_episodes=20": "n_eval_episodes=1"}
PYTHON_PAGES = [path for path in GUIDE if "```python" in path.read_text()]


@pytest.mark.filterwarnings("ignore::tqdm.TqdmExperimentalWarning")
@pytest.mark.parametrize("path", [of_page(path) for path in PYTHON_PAGES])
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    blocks = [code for language, code in FENCE.findall(path.read_text()) if language == "python"]
    names = {}
    for code in [PRELUDES.get(path.name, ""), *blocks]:
        for number, enough in BUDGETS.items():
            code = re.sub(number, enough, code)
        if re.search("^env = ", code, re.MULTILINE):
            # An example that makes its environment is copied alone
            names = {}
        exec(compile(code, str(path), "exec"), names)
    if "wandb" in names:
        names["wandb"].finish()


# ---- command lines ----


class Parsed(Exception):
    """A command line was understood."""


@pytest.fixture
def parse_only(monkeypatch):
    register()
    register_minatar_envs()
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *args, **kwargs):
        raise Parsed(parse_args(self, *args, **kwargs))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def check_module(module, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(find_spec(module).origin, run_name="__main__")
    args = parsed.value.args[0]
    if getattr(args, "command", None) == "zoo":
        check_module(f"rl_zoo3.{args.zoo_command}", args.arguments, monkeypatch)
    elif hasattr(args, "env"):
        assert args.env in STUDIES or args.env in gym.registry, args.env


def check_make(arguments):
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), argument


def check_pip(arguments):
    assert arguments.pop(0) == "install"
    while arguments:
        argument = arguments.pop(0)
        if argument == "-c":
            assert (ROOT / arguments.pop(0)).is_file()
        elif argument.startswith(("sb3_qac[", ".[")):
            setup = (ROOT / "setup.cfg").read_text()
            for extra in argument.partition("[")[2].rstrip("]").split(","):
                assert re.search(rf"^{extra} =$", setup, re.MULTILINE), extra
        else:
            assert argument in (".", "-e") or argument.startswith("gymnasium["), argument


@pytest.mark.parametrize("path", [of_page(README), of_page(ROOT / "docs" / "quickstart.md")])
def test_the_torch_to_install_first_is_the_one_that_pip_keeps(path):
    """``constraints.txt`` would replace another one by PyPI's, which has CUDA."""
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.findall(r"CPU build of torch ([\d.]+)", path.read_text()) == [pinned]


def check_command(words, monkeypatch):
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "taskset":
        check_command(arguments[2:], monkeypatch)
    elif program == "make":
        check_make(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program == "ray":
        assert arguments == ["start", "--head"]
    else:
        assert words[:2] == ["python", "-m"], f"tests/test_docs.py does not know how to check {shlex.join(words)}"
        module, *arguments = arguments[1:]
        check_module("sb3_qac.__main__" if module == "sb3_qac" else module, arguments, monkeypatch)


def commands_of(path):
    text = path.read_text()
    blocks = [code for language, code in FENCE.findall(text) if language == "bash"]
    inline = re.findall(r"`((?:python -m [^`\s]+|make|pip install) [^`]+)`", FENCE.sub("", text))
    for line in "\n".join([*blocks, *inline]).replace("\\\n", " ").splitlines():
        line = line.replace("$(python -m sb3_qac presets a2c)", "hyperparams/a2c.yml")
        words = shlex.split(line, comments=True)
        if words:
            yield words


@pytest.mark.parametrize("path", [of_page(path) for path in GUIDE])
def test_command_lines_are_understood(path, parse_only, monkeypatch):
    for words in commands_of(path):
        try:
            check_command(words, monkeypatch)
        except SystemExit as end:
            # --help ends with 0
            assert end.code == 0, f"{shlex.join(words)} is refused"


@pytest.mark.parametrize(
    "command",
    [
        "python -m sb3_qac study pong --stop-retrun 18",
        "python -m sb3_qac study NoSuchGame-v4",
        "python -m rl_zoo3.train --algo qa2d --env CartPole-v1",
        "make trian",
        "pip install 'sb3_qac[reports]'",
    ],
)
def test_wrong_command_lines_are_found(command, parse_only, monkeypatch):
    with pytest.raises((SystemExit, AssertionError)):
        check_command(shlex.split(command), monkeypatch)


# ---- figures ----


def runs_of(study):
    """The runs of a study under results/ that came to their end: environment, group, seed, steps, figures."""
    with (ROOT / "results" / study / "runs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == study and row["state"] in ("finished", "stopped")]
    for row in rows:
        row |= {name: float(row[name] or "nan") for name in ("seed", "steps", "last_evaluation", "training_return")}
    return rows


# Names of groups, in the order of the columns of README and of docs/results.md
COLUMNS = {
    README: (("task1", "all-action"), ("beta1", "beta-loo"), ("a2c",)),
    RESULTS_PAGE: (("task1", "all-action"), ("task2", "all-action-baseline"), ("beta1", "beta-loo"), ("a2c",)),
}
GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


def means_of(study, environments, figure="last_evaluation"):
    """For each group a list of one mean over seeds for each environment."""
    values = defaultdict(list)
    for run in runs_of(study):
        values[run["group"], run["environment"]].append(run[figure])
    groups = {group for group, _ in values}
    return {group: [np.mean(values[group, name]) for name in environments] for group in groups}


def steps_to_18(study):
    """For each group the million steps of each seed that passed 18."""
    found = defaultdict(list)
    for run in sorted(runs_of(study), key=lambda run: run["seed"]):
        if run["last_evaluation"] >= 18:
            found[run["group"]].append(run["steps"] / 1e6)
    return found


def greedy_agents(study, environment):
    """For each group the mean over seeds of the agents' greedy returns."""
    values = defaultdict(list)
    for line in (ROOT / "results" / study / "agents.jsonl").read_text().splitlines():
        agent = json.loads(line)
        if agent["env"] == environment:
            values[agent["run"].rpartition("_seed-")[0]].append(agent["greedy"])
    return {group: [np.mean(figures)] for group, figures in values.items()}


# By the start of the row
FIGURES = {
    README: {
        "[CartPole]": lambda: means_of("classic_control", ["CartPole-v1"]),
        "[Acrobot]": lambda: means_of("classic_control", ["Acrobot-v1"]),
        "[FrozenLake]": lambda: greedy_agents("tabular", "FrozenLake-v1"),
        "[Pong]": lambda: steps_to_18("pong"),
        "[Space Invaders]": lambda: means_of("spaceinvaders", ["SpaceInvadersNoFrameskip-v4"], "training_return"),
    },
    RESULTS_PAGE: {
        "CartPole-v1, 500,000 steps, sampled": lambda: means_of("classic_control", ["CartPole-v1"]),
        "Acrobot-v1, the same": lambda: means_of("classic_control", ["Acrobot-v1"]),
        **{f"MinAtar {game}": lambda game=game: means_of("minatar", [f"MinAtar/{game}-v1"]) for game in GAMES},
        "Pong, million": lambda: steps_to_18("pong"),
        "Space Invaders": lambda: means_of("spaceinvaders", ["SpaceInvadersNoFrameskip-v4"], "training_return"),
        "FrozenLake": lambda: greedy_agents("tabular", "FrozenLake-v1"),
        "Blackjack": lambda: greedy_agents("tabular", "Blackjack-v1"),
    },
}


def row_of(path, start):
    (line,) = [line for line in path.read_text().splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def wrong_figures(cell, values):
    """Pairs of a figure in a cell and the value that it should have, where the two differ at the figure's own precision."""
    figures = re.findall(r"-?\d+(?:\.\d+)?", cell.partition("(")[0])
    for figure, value in zip_longest(figures, values):
        if figure is None or value is None or f"{value:.{len(figure.partition('.')[2])}f}" != figure:
            yield figure, value


@pytest.mark.parametrize(
    ("path", "start"), [pytest.param(path, start, id=f"{path.name} {start}") for path in FIGURES for start in FIGURES[path]]
)
def test_figures_are_those_of_the_data(path, start):
    found = FIGURES[path][start]()
    cells = row_of(path, start)[1:]
    n_compared = 0
    for names, cell in zip(COLUMNS[path], cells, strict=False):
        if re.search(r"\d", cell.partition("(")[0]):
            (group,) = [name for name in names if name in found]
            assert not list(wrong_figures(cell, found[group])), f"{group}: {cell}"
            n_compared += 1
    assert n_compared


def test_steps_of_qppo_to_18_on_pong_are_those_of_the_data():
    found = steps_to_18("pong_qppo")
    _, _, *cells = row_of(README, "million steps to 18 on [Pong]")
    for group, cell in zip(("qppo", "qppo-sampled"), cells, strict=False):
        assert len(found[group]) == 5 and not list(wrong_figures(cell, [min(found[group]), max(found[group])]))


def test_returns_relative_to_a2c_on_minatar_are_those_of_the_data():
    agents = [json.loads(line) for line in (ROOT / "results" / "minatar_report" / "agents.jsonl").read_text().splitlines()]
    last = [(run["group"], run["environment"], run["last_evaluation"]) for run in runs_of("minatar_report")]
    kinds = {kind: [(x["run"].rpartition("_seed-")[0], x["env"], x[kind]) for x in agents] for kind in ("sampled", "greedy")}
    starts = {"[MinAtar's five games]": last, "the same agents": kinds["sampled"], "with greedy actions": kinds["greedy"]}
    for start, returns in starts.items():
        frame = pd.DataFrame(returns, columns=["group", "env", "value"])
        reference = frame[frame.group == "a2c"].groupby("env").value.mean()
        relative = frame.value / frame.env.map(reference)
        found = {group: trim_mean(values, 0.25) for group, values in relative.groupby(frame.group)}
        *_, all_action, sampled, ppo, others = row_of(README, start)
        cells = {
            "qppo": all_action,
            "qppo-sampled": sampled,
            "ppo": ppo,
            **dict(re.findall(r"(\w+) (\d\.\d+)", others.lower())),
        }
        assert set(cells) == set(found) - {"a2c"}
        assert {group: f"{found[group]:.2f}" for group in cells} == cells, start
        if returns is last:
            text = " ".join(README.read_text().split())
            assert f"it returns {found['qa2c']:.2f} times as much" in text and f"and PPO {found['ppo']:.2f} times" in text


def test_probabilities_of_improvement_on_minatar_are_those_of_the_report():
    report = (ROOT / "results" / "minatar_report" / "report.md").read_text()
    # The first table is that over all games
    over_games = report[: report.index("## Relative to")]
    _, _, *cells, _, _ = row_of(README, "the five games, last evaluation: probability of improvement")
    for group, cell in zip(("qppo", "qppo-sampled"), cells, strict=True):
        found = [re.search(rf"^\| {group} over {other} \| ([\d.]+) ", over_games, re.MULTILINE)[1] for other in ("ppo", "pqn")]
        assert cell == "; ".join(found)


def test_the_probability_that_the_sum_is_ahead_over_a_whole_training_is_that_of_the_data():
    runs = pd.read_csv(ROOT / "results" / "minatar_report" / "runs.csv").set_index("run")
    returns = pd.read_csv(ROOT / "results" / "minatar_report" / "evaluations.csv.xz").groupby("run")["return"].mean()
    means = {key: of_run.array for key, of_run in returns.groupby([runs["group"], runs["environment"]])}
    games = sorted({game for _, game in means})
    ahead = [np.sign(np.subtract.outer(means["qppo", x], means["qppo-sampled", x])).mean() for x in games]
    probability = f"{(np.mean(ahead) + 1) / 2:.2f}"
    for page in (README, ROOT / "docs" / "qppo.md"):
        text = " ".join(page.read_text().split())
        assert re.search(rf"QPPO's probability of improvement (over its counterpart )?is {probability} \(", text)
    page = (ROOT / "results" / "minatar_report" / "README.md").read_text()
    assert f"over the sampled-action baseline is {probability} (" in page


@pytest.mark.parametrize("path", [of_page(path) for path in sorted((ROOT / "results").glob("*/runs.csv"))])
def test_rows_of_a_packed_study_have_its_name(path):
    with path.open(newline="") as file:
        assert {row["study"].partition("/")[0] for row in csv.DictReader(file)} == {path.parent.name}


def test_commits_on_the_page_of_results_are_those_of_the_data():
    """But for those in brackets, which are of another study."""
    page = ROOT / "results" / "README.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if re.search(r"/README\.md\) \|", line)]
    assert len(rows) == len(list(page.parent.glob("*/README.md"))), "Each folder has one row"
    n_compared = 0
    for _, study, *_, cell, _ in rows:
        runs = page.parent / study.partition("](")[2].partition("/")[0] / "runs.csv"
        commits = re.findall(r"\b[0-9a-f]{7}\b", cell.partition("(")[0])
        if commits and runs.is_file():
            with runs.open(newline="") as file:
                assert set(commits) <= {run["commit"] for run in csv.DictReader(file)}, study
            n_compared += 1
    assert n_compared > 10


def test_wrong_figures_are_found():
    assert not list(wrong_figures("0.49, 19.1 (x 3)", [0.4933, 19.0533]))
    assert list(wrong_figures("0.49, 19.0", [0.4933, 19.0533])) == [("19.0", 19.0533)]
    assert list(wrong_figures("0.49", [0.4933, 19.0533])) == [(None, 19.0533)]


def test_readme_says_in_how_many_games_of_minatar_qa2c_is_behind():
    values = defaultdict(list)
    for run in runs_of("minatar"):
        values[run["group"].replace("task1", "all-action"), run["environment"]].append(run["last_evaluation"])
    intervals = [
        ttest_ind(
            values["all-action", f"MinAtar/{game}-v1"], values["a2c", f"MinAtar/{game}-v1"], equal_var=False
        ).confidence_interval()
        for game in GAMES
    ]
    behind, ahead = sum(interval.high < 0 for interval in intervals), sum(interval.low > 0 for interval in intervals)
    words = {2: "two", 3: "three", 5: "five"}
    level = len(GAMES) - behind - ahead
    text = " ".join(README.read_text().split())
    assert ahead == 0
    assert f"QA2C is behind A2C in {words[behind]} of {words[len(GAMES)]} games" in text
    assert f"and level in {words[level]}." in text


# ---- the rest ----


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_badges_and_citation_are_those_of_the_package():
    setup = (ROOT / "setup.cfg").read_text()
    versions = re.findall(r"Python :: (3\.\d+)", setup)
    badge = (
        f"![Python {versions[0]} to {versions[-1]}](https://img.shields.io/badge/python-{versions[0]}%20to%20{versions[-1]}-"
    )
    assert badge in README.read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (\S+) \((.*)\)$", changes, re.MULTILINE)
    # As in SB3, the version in work is a prerelease: 0.2.0a0 until 0.2.0 has a date
    newest, date = sections[0]
    assert __version__ == (f"{newest}a0" if date == "unreleased" else newest)
    released = next(section for section in sections if section[1] != "unreleased")
    assert (citation["version"], citation["date-released"]) == released
    assert citation["license"] == re.search(r"^license = (.*)$", setup, re.MULTILINE)[1]
