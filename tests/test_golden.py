"""Reports, trained parameters and checkpoints are those that ``golden.py`` has kept."""

import json
import lzma
import re

import pytest

# It replaces gymnasium's TimeLimit by its own, which is in the stored checkpoints
import rl_zoo3  # noqa: F401

from sb3_qac.study import analysis, statistics
from tests import golden

SLOW_REPORTS = ("ablation", "ladder", "minatar", "minatar_equal", "minatar_report")
REPORTS = json.loads(lzma.decompress(golden.REPORTS.read_bytes()))
PARAMETERS = json.loads(golden.PARAMETERS.read_text())


def test_every_packed_study_has_a_kept_report():
    assert REPORTS.keys() == {path.parent.name for path in golden.RESULTS.glob("*/runs.csv")}


def by_environment(report):
    """Lines of a report with the environment of their section, or another heading."""
    # Scores that others published are no longer part of it
    title, *lines = re.sub(r"^\| \| score \|\n(\|.*\n)*", "", report, flags=re.MULTILINE).splitlines()
    several, heading = ", " in title.partition(": ")[0], ""
    for line in lines:
        if several and line.startswith("## "):
            heading = line
        yield heading, line


def rows_of(report):
    return [
        (heading, *(cell.strip() for cell in line.strip("|").split(" | ")))
        for heading, line in by_environment(report)
        if line.startswith("| ")
    ]


# In the reports that are kept, differences stand in sentences
PAIR = re.compile(r"^\*\*(\S+) against (\S+?)\.\*\*")
NUMBER = r"([+-][\d.,e+-]*\d)"
DIFFERENCE = rf"{NUMBER}(?: (\w+))? \((?:95 % interval {NUMBER} to {NUMBER}|no interval)"
AT = re.compile(r"^At ([\d,]+) steps")


def differences_of(report):
    """For the pairs in the text of a report: the steps of their last evaluation, and the differences with their intervals."""
    found, pair = {}, None
    for heading, line in by_environment(report):
        if match := PAIR.match(line):
            pair = match.groups()
        elif not line:
            pair = None
        columns = {"At ": ["difference"], "Averaged over": ["averaged"], "To reach": ["steps", "hours"]}
        names = next((names for start, names in columns.items() if line.startswith(start)), [])
        if pair is not None and names:
            if match := AT.match(line):
                found[heading, pair, "at"] = match[1]
            for name, (mean, unit, *interval) in zip(names, re.findall(DIFFERENCE, line), strict=False):
                found[heading, pair, name] = unit, [float(x.replace(",", "")) for x in (mean, *interval) if x]
    return found


@pytest.mark.parametrize(
    "study", [pytest.param(study, marks=[pytest.mark.slow] if study in SLOW_REPORTS else []) for study in REPORTS]
)
def test_tables_and_differences_of_packed_studies_do_not_change(study, monkeypatch):
    for module in (analysis, statistics):
        monkeypatch.setattr(module, "N_BOOTSTRAP", golden.N_BOOTSTRAP)
        monkeypatch.setattr(module, "N_BOOTSTRAP_OF_RANKS", golden.N_BOOTSTRAP_OF_RANKS)
    kept, report = REPORTS[study], golden.report(study)
    rows = rows_of(report)
    assert [row for row in rows_of(kept) if row not in rows] == []
    names = ("at", "difference", "averaged", "steps", "hours")
    table = {
        (heading, tuple(pair.split(" minus "))): dict(zip(names, cells, strict=False))
        for heading, pair, *cells in rows
        if " minus " in pair
    }
    for (heading, pair, name), expected in differences_of(kept).items():
        sign = 1 if (heading, pair) in table else -1
        cell = table[heading, pair[::sign]][name]
        if name == "at":
            assert cell == expected
            continue
        unit, values = expected
        mean, *interval = (float(x.replace(",", "")) for x in re.findall(NUMBER, cell))
        in_table = [sign * x for x in (mean, *interval[::sign])]
        # The text had shorter times in minutes, to three digits
        scale = {"minutes": 60, "seconds": 3600}.get(unit, 1)
        assert [scale * x for x in in_table] == pytest.approx(values, rel=0.01 if scale > 1 else 0), (pair, name)


@pytest.mark.parametrize("name", golden.TRAININGS)
def test_trained_parameters_do_not_change(name):
    # Processors round otherwise; a different formula changes more
    assert golden.train(name) == pytest.approx(PARAMETERS["trained"][name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", golden.RESUMED)
def test_checkpoints_of_earlier_commits_are_resumed(name, tmp_path):
    golden.unpack(name, tmp_path / "run")
    assert golden.resume(name, tmp_path / "run") == pytest.approx(PARAMETERS["resumed"][name], rel=1e-3, abs=1e-5)
