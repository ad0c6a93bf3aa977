"""Reports, trained parameters and checkpoints are those that ``golden.py`` has kept."""

import json
import lzma
import shutil

import pytest

# It replaces gymnasium's TimeLimit by its own, which is in the stored checkpoints
import rl_zoo3  # noqa: F401

from sb3_qac.study import analysis, statistics
from tests import golden

SLOW_REPORTS = ("ablation", "ladder", "minatar", "minatar_five_games", "minatar_qppo", "minatar_report")
REPORTS = json.loads(lzma.decompress(golden.REPORTS.read_bytes()))
PARAMETERS = json.loads(golden.PARAMETERS.read_text())


def test_every_packed_study_has_a_kept_report():
    assert REPORTS.keys() == {path.parent.name for path in golden.RESULTS.glob("*/runs.csv")}


@pytest.mark.parametrize(
    "study", [pytest.param(study, marks=[pytest.mark.slow] if study in SLOW_REPORTS else []) for study in REPORTS]
)
def test_reports_of_packed_studies_do_not_change(study, monkeypatch):
    for module in (analysis, statistics):
        monkeypatch.setattr(module, "N_BOOTSTRAP", golden.N_BOOTSTRAP)
        monkeypatch.setattr(module, "N_BOOTSTRAP_OF_RANKS", golden.N_BOOTSTRAP_OF_RANKS)
    assert golden.report(study) == REPORTS[study]


@pytest.mark.parametrize("name", golden.TRAININGS)
def test_trained_parameters_do_not_change(name):
    # Processors round otherwise; a different formula changes more
    assert golden.train(name) == pytest.approx(PARAMETERS["trained"][name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", golden.RESUMED)
def test_checkpoints_of_earlier_commits_are_resumed(name, tmp_path):
    shutil.copytree(golden.CHECKPOINTS / name, tmp_path / "run")
    assert golden.resume(name, tmp_path / "run") == pytest.approx(PARAMETERS["resumed"][name], rel=1e-3, abs=1e-5)
