"""README and the pages of the documentation: links, code, command lines and figures. Sphinx is not needed here."""

import argparse
import csv
import functools
import json
import re
import runpy
import shlex
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from inspect import signature
from itertools import zip_longest
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import trim_mean
from stable_baselines3 import PPO

from sb3_qac import QA2C, QPPO, __version__
from sb3_qac.common.minatar import register_minatar_envs
from sb3_qac.study.catalogue import STUDIES, study_of
from sb3_qac.study.statistics import difference
from sb3_qac.zoo import register

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README, RESULTS_PAGE, QPPO_PAGE = ROOT / "README.md", DOCS / "results.md", DOCS / "results_qppo.md"
CHANGELOG = ROOT / "CHANGELOG.md"
GUIDE = [README, *sorted(DOCS.glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
STUDY_PAGES = sorted((ROOT / "results").glob("*/README.md"))
PAGES = [*GUIDE, CHANGELOG, *sorted((DOCS / "upstream").glob("*.md")), *sorted((ROOT / "results").rglob("*.md"))]
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
CHECKPOINT = """
from sb3_qac import QA2C
from sb3_qac.common.callbacks import ExactCheckpointCallback
QA2C("CnnPolicy", env, seed=0).learn(40, ExactCheckpointCallback("runs/pong/checkpoints"))
"""
PRELUDES = {"exact_resume.md": ATARI, "exact_resume_reference.md": ATARI + CHECKPOINT}
# A few environments, rollouts and episodes are enough
STEPS = {"reinforce.md": 2000}
BUDGETS = {r"n_envs=16": "n_envs=2", r"n_eval_episodes=20": "n_eval_episodes=1"}
PYTHON_PAGES = [path for path in GUIDE if "```python" in path.read_text()]


@pytest.mark.filterwarnings("ignore::tqdm.TqdmExperimentalWarning", "ignore:.*render_mode='rgb_array'")
@pytest.mark.parametrize("path", [of_page(path) for path in PYTHON_PAGES])
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    blocks = [code for language, code in FENCE.findall(path.read_text()) if language == "python"]
    names = {}
    for code in [PRELUDES.get(path.name, ""), *blocks]:
        for number, enough in {r"learn\([\d_]+": f"learn({STEPS.get(path.name, 40)}", **BUDGETS}.items():
            code = re.sub(number, enough, code)
        if re.search("^env = ", code, re.MULTILINE):
            # An example that makes its environment is copied alone
            names = {}
        exec(compile(code, str(path), "exec"), names)
    if "wandb" in names:
        names["wandb"].finish()


# RL Zoo's own entries
ZOO_ENTRIES = {"n_timesteps", "policy", "n_envs"}


def test_files_for_an_environment_have_arguments_of_their_algorithms():
    text = (DOCS / "own_environment.md").read_text()
    files = re.findall(r"`(\w+)\.yml`:\n\n```yaml\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == ["qa2c", "qppo", "ppo"]
    for name, content in files:
        (entries,) = yaml.safe_load(content).values()
        assert not set(entries) - ZOO_ENTRIES - set(signature({"qa2c": QA2C, "qppo": QPPO, "ppo": PPO}[name]).parameters)


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
        # RL Zoo's plots take several
        for env in [args.env] if isinstance(args.env, str) else args.env:
            own = env.endswith(".yml") or getattr(args, "gym_packages", None)
            assert own or env in STUDIES or env in gym.registry, env


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
        elif argument.startswith("torch=="):
            assert arguments == ["--index-url", "URL"], "No tracked file may name a package index"
            arguments = []
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
    assert re.findall(r"pip install torch==(\S+) --index-url", path.read_text()) == [pinned]


def check_command(words, monkeypatch):
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    # The output may go to a file
    words = words[: words.index(">")] if ">" in words else words
    program, *arguments = words
    if program == "bash":
        assert (ROOT / arguments[0]).is_file(), shlex.join(words)
    elif program in ("python3", "source"):
        assert arguments in (["-m", "venv", ".venv"], [".venv/bin/activate"]), shlex.join(words)
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
    for line in "\n".join([*blocks, *inline]).replace("\\\n", " ").replace(" && ", "\n").splitlines():
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


def test_the_study_file_of_the_page_is_one_that_can_be_run(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "study_reference.md").read_text(), re.DOTALL)
    (tmp_path / "my_study.yml").write_text(block)
    study = study_of(str(tmp_path / "my_study.yml"))
    assert study.algos == ("ppo", "qppo", "qppo-slow") and study.steps == 600_000


# ---- figures ----


def page_of(study):
    return ROOT / "results" / study / "README.md"


def runs_of(study):
    """The runs of a study under results/, or of its part, that came to their end: environment, group, seed, steps, figures."""
    with (ROOT / "results" / study.partition("/")[0] / "runs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == study and row["state"] in ("finished", "stopped")]
    for row in rows:
        row |= {name: float(row[name] or "nan") for name in ("seed", "steps", "last_evaluation", "training_return")}
    return rows


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


def each_agent(study, environment, kind="greedy"):
    """For each group the greedy or sampled return of the agent of each seed."""
    values = defaultdict(list)
    for line in (ROOT / "results" / study / "agents.jsonl").read_text().splitlines():
        agent = json.loads(line)
        if agent["env"] == environment:
            values[agent["run"].rpartition("_seed-")[0]].append(agent[kind])
    return values


def agents_of(study, environment, kind="greedy"):
    """For each group the mean over seeds."""
    return {group: [np.mean(figures)] for group, figures in each_agent(study, environment, kind).items()}


def each_seed(study, environment):
    """For each group the last evaluation of each seed."""
    values = defaultdict(list)
    for run in sorted(runs_of(study), key=lambda run: run["seed"]):
        if run["environment"] == environment:
            values[run["group"]].append(run["last_evaluation"])
    return values


def ends(values_of_groups):
    """The smallest and the largest value of each group."""
    return {group: [min(values), max(values)] for group, values in values_of_groups.items()}


def peers_of_pong():
    """The fewest and the most steps to 18; of QPPO on the machine of the ten seeds."""
    ppo = {"ppo": steps_to_18("pong_robust/epyc")["ppo"]}
    return ends(ppo | steps_to_18("pong_robust/pqn") | steps_to_18("pong_robust"))


def pong_of_readme():
    """The fewest and the most steps to 18; of A2C also the planned steps of the run that did not pass it."""
    found = ends(steps_to_18("pong") | steps_to_18("pong_qppo")) | peers_of_pong()
    missed = [run["steps"] / 1e6 for run in runs_of("pong") if run["last_evaluation"] < 18]
    return found | {"a2c": [*steps_to_18("pong")["a2c"], *missed]}


def relative_returns(study, reference, returns=None):
    """For each group the interquartile mean over environments and seeds of the return divided by that of the reference."""
    returns = returns or [(run["group"], run["environment"], run["last_evaluation"]) for run in runs_of(study)]
    frame = pd.DataFrame(returns, columns=["group", "env", "value"])
    means = frame[frame.group == reference].groupby("env").value.mean()
    relative = frame.value / frame.env.map(means)
    return {group: [trim_mean(values, 0.25)] for group, values in relative.groupby(frame.group)}


def relative_returns_of_agents(kind, study="minatar_report"):
    """The same on MinAtar's five games, from the new episodes of the final agents."""
    agents = [json.loads(line) for line in (ROOT / "results" / study / "agents.jsonl").read_text().splitlines()]
    returns = [(agent["run"].rpartition("_seed-")[0], agent["env"], agent[kind]) for agent in agents]
    return relative_returns(study, "a2c", returns)


def sampled_and_greedy_of_equal():
    sampled, greedy = EQUAL("sampled"), EQUAL("greedy")
    return {group: sampled[group] + greedy[group] for group in sampled}


QA2C_AND_A2C = (("task1", "all-action"), ("task2", "all-action-baseline"), ("beta1", "beta-loo"), ("a2c",))
QPPO_AND_PEERS = (("qppo",), ("qppo-sampled",), ("ppo",))
PEERS_AND_PQN = (*QPPO_AND_PEERS, ("pqn",))
EQUAL_COLUMNS = (("qppo",), ("ppo",), ("pqn",))
README_COLUMNS = (*QPPO_AND_PEERS, ("qa2c", "all-action"), ("a2c",))
EQUAL = functools.partial(relative_returns_of_agents, study="minatar_equal")
CHANGES = {
    "without the correction": "qppo-no-correction",
    "one epoch": "qppo-one-epoch",
    "without shrinkage": "qppo-no-shrinkage",
    "with LayerNorm": "qppo-layer-norm",
    "without KL term": "qppo-no-kl",
    "on the sampled action": "qppo-sampled",
    "without the dueling head": "qppo-no-dueling",
    "without scale": "qppo-no-scale",
}
BREAKOUT, SPACE_INVADERS = "BreakoutNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4"
# By page and the start of the row: the names of the groups of its columns, and their figures
FIGURES = {
    README: {
        "[MinAtar]": (README_COLUMNS, lambda: relative_returns("minatar_report", "a2c")),
        "[the same agents]": (README_COLUMNS, lambda: relative_returns_of_agents("greedy")),
        "[searches of equal size]": (README_COLUMNS, sampled_and_greedy_of_equal),
        "[Atari's Breakout]": (README_COLUMNS, lambda: ends(each_seed("atari", BREAKOUT))),
        "[Atari's Space Invaders]": (README_COLUMNS, lambda: ends(each_seed("atari", SPACE_INVADERS))),
        "Pong, million steps to 18": (README_COLUMNS, pong_of_readme),
    },
    RESULTS_PAGE: {
        "CartPole, 500,000 steps, sampled": (QA2C_AND_A2C, lambda: means_of("classic_control", ["CartPole-v1"])),
        "Acrobot, the same": (QA2C_AND_A2C, lambda: means_of("classic_control", ["Acrobot-v1"])),
        "Breakout of MinAtar": (QA2C_AND_A2C, lambda: means_of("minatar", ["MinAtar/Breakout-v1"])),
        "Pong, million steps to 18, two": (QA2C_AND_A2C, lambda: steps_to_18("pong")),
        "Space Invaders, 10 million": (QA2C_AND_A2C, lambda: means_of("spaceinvaders", [SPACE_INVADERS], "training_return")),
        "FrozenLake": (QA2C_AND_A2C, lambda: agents_of("tabular", "FrozenLake-v1")),
        "Blackjack": (QA2C_AND_A2C, lambda: agents_of("tabular", "Blackjack-v1")),
        "MinAtar's five games": (QPPO_AND_PEERS, lambda: relative_returns("minatar_report", "a2c")),
        "new episodes, sampled": (QPPO_AND_PEERS, lambda: relative_returns_of_agents("sampled")),
        "new episodes, greedy": (QPPO_AND_PEERS, lambda: relative_returns_of_agents("greedy")),
        "MinAtar, searches of equal size": (QPPO_AND_PEERS, lambda: EQUAL("sampled")),
        "the same, greedy": (QPPO_AND_PEERS, lambda: EQUAL("greedy")),
        "Atari's Breakout": (PEERS_AND_PQN, lambda: each_seed("atari", BREAKOUT)),
        "Atari's Space Invaders": (PEERS_AND_PQN, lambda: each_seed("atari", SPACE_INVADERS)),
        "Pong, million steps to 18, ten seeds, PPO, PQN three": (PEERS_AND_PQN, peers_of_pong),
        "Pong, earlier preset": (QPPO_AND_PEERS, lambda: steps_to_18("pong_qppo")),
        "CartPole, 50,000 steps": (QPPO_AND_PEERS, lambda: means_of("classic_qppo_searched", ["CartPole-v1"])),
        **{change: (((group,),), lambda: relative_returns("ablation", "qppo")) for change, group in CHANGES.items()},
    },
    page_of("minatar"): {
        game: ((("a2c",), ("task1", "all-action")), lambda game=game: means_of("minatar", [f"MinAtar/{game}-v1"]))
        for game in GAMES
    },
    page_of("minatar_equal"): {
        "last evaluation": (EQUAL_COLUMNS, lambda: relative_returns("minatar_equal", "a2c")),
        "[new episodes](agents.jsonl), sampled": (EQUAL_COLUMNS, lambda: EQUAL("sampled")),
        "new episodes, greedy": (EQUAL_COLUMNS, lambda: EQUAL("greedy")),
    },
    page_of("atari"): {
        "Breakout |": (PEERS_AND_PQN, lambda: each_seed("atari", BREAKOUT)),
        "Space Invaders |": (PEERS_AND_PQN, lambda: each_seed("atari", SPACE_INVADERS)),
        "Breakout, sampled": (PEERS_AND_PQN, lambda: agents_of("atari", BREAKOUT, "sampled")),
        "Breakout, greedy": (PEERS_AND_PQN, lambda: agents_of("atari", BREAKOUT)),
        "Space Invaders, sampled": (PEERS_AND_PQN, lambda: agents_of("atari", SPACE_INVADERS, "sampled")),
        "Space Invaders, greedy": (PEERS_AND_PQN, lambda: agents_of("atari", SPACE_INVADERS)),
    },
}


def row_of(path, start):
    (line,) = [line for line in path.read_text().splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def wrong_figures(cell, values):
    """Pairs of a figure in a cell and the value that it should have, where the two differ at the figure's own precision."""
    figures = re.findall(r"-?\d+(?:\.\d+)?", cell.partition("(")[0])
    for figure, value in zip_longest(figures, values):
        if figure is None or value is None:
            yield figure, value
        # A half may be rounded up or down
        elif abs(float(figure) - value) > 0.5 * 10 ** -len(figure.partition(".")[2]) + 1e-9:
            yield figure, value


@pytest.mark.parametrize(
    ("path", "start"), [pytest.param(path, start, id=f"{path.name} {start}") for path in FIGURES for start in FIGURES[path]]
)
def test_figures_are_those_of_the_data(path, start):
    columns, figures = FIGURES[path][start]
    found, n_compared = figures(), 0
    for names, cell in zip(columns, row_of(path, start)[1:], strict=False):
        if re.search(r"\d", cell.partition("(")[0]):
            (group,) = [name for name in names if name in found]
            assert not list(wrong_figures(cell, found[group])), f"{group}: {cell}"
            n_compared += 1
    assert n_compared


def words_of(path):
    return " ".join(path.read_text().split())


def two_digits(found):
    return {group: f"{value:.2f}" for group, (value,) in found.items()}


def test_pqn_and_qa2c_are_those_of_the_data():
    last, sampled, greedy = relative_returns("minatar_report", "a2c"), *map(relative_returns_of_agents, ("sampled", "greedy"))
    assert f"PQN ({last['pqn'][0]:.2f} in the figure)" in words_of(README)
    for start, found in {"MinAtar's": last, "new episodes, sampled": sampled, "new episodes, greedy": greedy}.items():
        cell = re.sub(r"\([^)]*\)", "", row_of(RESULTS_PAGE, start)[4])
        figures = dict(re.findall(r"(PQN|QA2C)\D* (\d\.\d+)", cell))
        assert figures == {"PQN": f"{found['pqn'][0]:.2f}", "QA2C": f"{found['qa2c'][0]:.2f}"}
    page, peers = words_of(DOCS / "pqn.md"), "(QPPO {qppo}, on the sampled action {qppo-sampled}, PPO {ppo})"
    last, sampled, greedy = map(two_digits, (last, sampled, greedy))
    assert f"* {last['pqn']} (95 % interval" in page and "QPPO has {qppo} and PPO {ppo} with sampled".format(**last) in page
    assert f"new episodes {sampled['pqn']} with exploration {peers.format(**sampled)}" in page
    assert f"all greedy, {greedy['pqn']} {peers.format(**greedy)}" in page
    last, greedy = map(two_digits, (relative_returns("minatar_equal", "a2c"), EQUAL("greedy")))
    assert f"it has less, {last['pqn']} (" in page and "QPPO has {qppo} and PPO {ppo}; all greedy".format(**last) in page
    assert "all greedy {pqn}, {qppo} and {ppo}".format(**greedy) in page
    assert f"PQN ({greedy['pqn']}, no preset) lost Freeway" in words_of(README)
    assert "greedy, 18 after [{} to {} million".format(*peers_of_pong()["pqn"]) in page
    atari = [agents_of("atari", environment) for environment in (BREAKOUT, SPACE_INVADERS)]
    games = [f"{found['pqn'][0]:.0f} ({peer}{found['ppo'][0]:.0f})" for found, peer in zip(atari, ("PPO ", ""), strict=True)]
    assert f"three seeds, greedy: {'; Space Invaders '.join(games)}." in page
    differences = []
    for kind in "sampled", "greedy":
        found = each_agent("atari", BREAKOUT, kind)
        less = difference(found["pqn"], found["ppo"])
        differences.append(f"{less.mean:+.0f}, {less.low:+.0f} to {less.high:+.0f}")
    sampled, greedy = differences
    assert f"PQN is behind PPO if sampled ({sampled}; greedy: {greedy})" in words_of(page_of("atari"))


def test_figures_of_minatar_are_those_of_the_presets():
    settings = json.loads((ROOT / "results" / "minatar_report" / "settings.json").read_text())
    files = (ROOT / "hyperparams").glob("*.yml")
    presets = {file.stem: yaml.safe_load(file.read_text()) for file in files}
    for run in runs_of("minatar_report"):
        changes = dict(policy_gradient="sampled") if run["group"] == "qppo-sampled" else {}
        assert settings[run["settings"]]["resolved_hyperparams"] == presets[run["algo"]][run["environment"]] | changes


def improvement(x, y):
    """The probability that a value of x is above one of y, the mean over environments of two dictionaries."""
    ahead = [np.sign(np.subtract.outer(x[env], y[env])).mean() for env in sorted(x)]
    return (np.mean(ahead) + 1) / 2


def test_probabilities_of_improvement_on_minatar_are_those_of_the_data():
    last, whole = defaultdict(lambda: defaultdict(list)), defaultdict(lambda: defaultdict(list))
    evaluations = pd.read_csv(ROOT / "results" / "minatar_report" / "evaluations.csv.xz")
    means = evaluations.groupby("run")["return"].mean()
    for run in runs_of("minatar_report"):
        last[run["group"]][run["environment"]].append(run["last_evaluation"])
        whole[run["group"]][run["environment"]].append(means[run["run"]])
    for start, other in {"probability of improvement over PPO": "ppo", "the same over PQN": "pqn"}.items():
        assert row_of(QPPO_PAGE, start)[2].startswith(f"{improvement(last['qppo'], last[other]):.2f} (")
    probability = f"{improvement(whole['qppo'], whole['qppo-sampled']):.2f}"
    assert f"probability of improvement is {probability} (" in words_of(QPPO_PAGE)
    page = page_of("minatar_report")
    assert f"over the sampled-action baseline is {probability} (" in words_of(page)


def test_figures_of_qppo_are_the_same_on_all_pages():
    """Those of the tables are compared with the data."""
    qppo, sampled, ppo = (row_of(RESULTS_PAGE, "MinAtar's")[column].partition(" (")[0] for column in (1, 2, 3))
    for page in (QPPO_PAGE, DOCS / "qppo.md"):
        assert qppo in words_of(page) and sampled in words_of(page)
    assert f"{qppo} times tuned A2C's return" in words_of(DOCS / "qppo.md") and f"PPO {ppo}" in words_of(DOCS / "qppo.md")
    sampled, greedy = map(two_digits, (EQUAL("sampled"), EQUAL("greedy")))
    text = f"on new episodes {sampled['qppo']}, PPO {sampled['ppo']}; greedy {greedy['qppo']} and {greedy['ppo']}"
    assert text in words_of(DOCS / "qppo.md")
    for change in ("without the correction", "one epoch", "without shrinkage", "with LayerNorm", "without KL term"):
        assert row_of(RESULTS_PAGE, change)[1].partition(" (")[0] in words_of(DOCS / "qppo.md"), change


def test_speed_of_a2c_is_that_of_the_data():
    ratios = defaultdict(list)
    for file, left_out in (("qppo_four_epochs.json", ()), ("qppo.json", (0,))):
        rounds = defaultdict(dict)
        for row in json.loads((ROOT / "results" / "benchmark" / file).read_text())["measurements"]:
            # In the first round of that file another run was in the way
            if "steps_per_second" in row and row["round"] not in left_out:
                rounds[row["round"]][row["contender"]] = row["steps_per_second"]
        for contenders in rounds.values():
            for name, speed in contenders.items():
                ratios[name].append(speed / contenders["A2C, SB3's environments"])
    low, high = ends(ratios)["A2C, native, float32"]
    low16, high16 = ends(ratios)["A2C, native, bfloat16"]
    assert f"{low:.1f} to {high:.1f} times as many steps per second" in words_of(README)
    assert f"in bfloat16 {low16:.1f} to {high16:.1f} times" in words_of(README)
    for start, dtype in {"native environments, float32": "float32", "the same, bfloat16": "bfloat16"}.items():
        for algo, cell in zip(("A2C", "QA2C"), row_of(RESULTS_PAGE, start)[1:], strict=False):
            assert not list(wrong_figures(cell, ends(ratios)[f"{algo}, native, {dtype}"]))


def test_number_of_kills_is_that_of_the_data():
    kills = json.loads((ROOT / "results" / "resume" / "kills.json").read_text())
    assert f"[{sum(len(run['kills']) for run in kills['trainings'])} kills" in words_of(README)


@pytest.mark.parametrize("path", [of_page(path) for path in sorted((ROOT / "results").glob("*/runs.csv"))])
def test_rows_of_a_packed_study_have_its_name(path):
    with path.open(newline="") as file:
        assert {row["study"].partition("/")[0] for row in csv.DictReader(file)} == {path.parent.name}


def test_each_study_has_one_link_on_the_page_of_the_data():
    page = ROOT / "results" / "README.md"
    linked = Counter(link for link in links_of(page) if link.endswith("/README.md"))
    assert linked == Counter(str(path.relative_to(page.parent)) for path in STUDY_PAGES)


@pytest.mark.parametrize("path", [of_page(path) for path in STUDY_PAGES if (path.parent / "runs.csv").is_file()])
def test_page_of_a_study_names_a_commit_of_its_runs(path):
    text = path.read_text()
    if re.search(r"[Cc]ommits in \W*runs\.csv", text):
        return
    with (path.parent / "runs.csv").open(newline="") as file:
        commits = {run["commit"][:7] for run in csv.DictReader(file)}
    assert commits & set(re.findall(r"\b[0-9a-f]{7}\b", text))


def test_wrong_figures_are_found():
    assert not list(wrong_figures("0.49, 19.1 (x 3)", [0.4933, 19.0533]))
    assert list(wrong_figures("0.49, 19.0", [0.4933, 19.0533])) == [("19.0", 19.0533)]
    assert list(wrong_figures("0.49", [0.4933, 19.0533])) == [(None, 19.0533)]


def test_games_of_minatar_in_which_qa2c_is_behind_are_those_of_the_data():
    values = defaultdict(list)
    for run in runs_of("minatar"):
        values[run["group"].replace("task1", "all-action"), run["environment"]].append(run["last_evaluation"])
    intervals = {
        game: difference(values["all-action", f"MinAtar/{game}-v1"], values["a2c", f"MinAtar/{game}-v1"]) for game in GAMES
    }
    assert not any(interval.low > 0 for interval in intervals.values())
    *others, last = [game for game, interval in intervals.items() if interval.high < 0]
    assert f"with Pong's settings, on MinAtar's {', '.join(others)} and {last}." in words_of(RESULTS_PAGE)


# ---- the rest ----


def n_words(*paths):
    return sum(len(path.read_text().split()) for path in paths)


def n_lines(path):
    return len(path.read_text().splitlines())


def test_readme_is_short():
    assert n_lines(README) <= 90
    assert n_words(README) <= 900
    # Words of our laboratory, which a visitor does not know
    assert not re.findall(r"\b(?:goals?|protocol|counterparts?|level|trainings)\b", README.read_text())


@pytest.mark.parametrize("path", [of_page(path) for path in STUDY_PAGES])
def test_page_of_a_study_is_short(path):
    assert n_lines(path) <= 40
    assert n_words(path) <= 400


def test_changelog_is_short():
    assert n_lines(CHANGELOG) <= 120


# Words, as `wc -w` counts them
USER_GUIDE = {
    "index": 200,
    "quickstart": 700,
    "own_environment": 700,
    "masks": 400,
    "tune": 400,
    "from_a2c_or_ppo": 250,
    "algorithm": 1200,
    "qppo": 1200,
    "pqn": 800,
    "reinforce": 250,
    "rl_zoo": 800,
    "study": 1100,
    "exact_resume": 800,
    "ale_vec_env": 600,
}
OTHER_PAGES = {
    "study_reference": 900,
    "exact_resume_reference": 1200,
    "ale_vec_env_reference": 400,
    "developing": 800,
    "results": 1000,
    "results_qppo": 600,
    "ladder": 500,
    "protocol": 700,
}


@pytest.mark.parametrize(("name", "limit"), [*USER_GUIDE.items(), *OTHER_PAGES.items()])
def test_page_is_short(name, limit):
    assert n_words(DOCS / f"{name}.md") <= limit


def test_user_guide_is_short():
    assert {path.stem for path in DOCS.glob("*.md")} == USER_GUIDE.keys() | OTHER_PAGES.keys()
    assert n_words(*(DOCS / f"{name}.md" for name in USER_GUIDE)) <= 8800


def test_all_pages_together_are_short():
    assert n_words(*PAGES) <= 26_500


def test_badges_and_citation_are_those_of_the_package():
    setup = (ROOT / "setup.cfg").read_text()
    versions = re.findall(r"Python :: (3\.\d+)", setup)
    badge = (
        f"![Python {versions[0]} to {versions[-1]}](https://img.shields.io/badge/python-{versions[0]}%20to%20{versions[-1]}-"
    )
    assert badge in README.read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = CHANGELOG.read_text()
    sections = re.findall(r"^## (\S+) \((.*)\)$", changes, re.MULTILINE)
    # As in SB3, the version in work is a prerelease: 0.2.0a0 until 0.2.0 has a date
    newest, date = sections[0]
    assert __version__ == (f"{newest}a0" if date == "unreleased" else newest)
    released = next(section for section in sections if section[1] != "unreleased")
    assert (citation["version"], citation["date-released"]) == released
    assert citation["license"] == re.search(r"^license = (.*)$", setup, re.MULTILINE)[1]
