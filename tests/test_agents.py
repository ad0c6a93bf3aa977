"""The trained agents that the repository keeps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.slow
def test_the_kept_agent_wins_at_pong_by_the_readme_s_command(tmp_path):
    command = ["-m", "rl_zoo3.enjoy", "--algo", "qa2c", "--env", "PongNoFrameskip-v4", "-f", str(RESULTS / "pong" / "agent")]
    played = subprocess.run(
        [sys.executable, *command, "--no-render", "-n", "2500"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert played.returncode == 0, played.stderr
    scores = [float(score) for score in re.findall(r"Atari Episode Score: (-?[\d.]+)", played.stdout)]
    assert scores and min(scores) > 0
