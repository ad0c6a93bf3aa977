"""Idle OpenMP threads give their core back."""

import os
import subprocess
import sys

import pytest

from sb3_qac.common.threads import SPIN_COUNT, limit_spinning


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPIN_COUNT)}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_the_user_s_settings_are_kept(before, after, monkeypatch):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        # Set first, so that it is as before after the test in any case
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert {name: os.environ[name] for name in names if name in os.environ} == after


@pytest.mark.parametrize("command", [["study", "nothing"]])
def test_commands_that_train_limit_it_before_pytorch_is_loaded(command):
    # PyTorch cannot be imported, so a command that does not call it first ends with another exit code, and trains nothing
    code = (
        "import sys; from sb3_qac.__main__ import main; from sb3_qac.common import threads\n"
        "sys.modules['torch'] = None; threads.limit_spinning = lambda: sys.exit(7)\n"
        f"main({command})"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7
