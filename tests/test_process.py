"""Settings of a process that trains."""

import os
import platform
import subprocess
import sys

import pytest

from sb3_qac.common import process
from sb3_qac.common.process import SPIN_COUNT, idle_cores, limit_spinning


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


@pytest.mark.slow
def test_studies_limit_it_before_pytorch_is_loaded():
    # PyTorch cannot be imported, so a command that does not call it first ends with another exit code, and trains nothing
    code = (
        "import sys; from sb3_qac.__main__ import main; from sb3_qac.common import process\n"
        "sys.modules['torch'] = None; process.limit_spinning = lambda: sys.exit(7)\n"
        "main(['study', 'nothing'])"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


PAGE_FAULTS = """
import resource
import torch as th
from sb3_qac.common.process import keep_freed_memory
for mode in ("default", "keep"):
    if mode == "keep":
        keep_freed_memory()
    for repetition in range(30):
        if repetition == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        th.ones(12_000_000)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_kept():
    """48 MB taken and given back twenty times: some 230,000 pages of 4 KB to fault in, or hardly one."""
    default, keep = map(int, subprocess.check_output([sys.executable, "-c", PAGE_FAULTS], text=True).split())
    assert keep < 1000 < default


@pytest.mark.parametrize(("busy", "idle"), [(0.1, 4), (1.2, 3), (3.9, 1), (9.0, 1)])
def test_busy_cores_are_left_to_others(busy, idle, monkeypatch):
    """Of four cores that this process may use."""
    clock = iter([0.0, 2.0])
    seconds = iter([100.0, 100.0 + 2.0 * busy])
    monkeypatch.setattr(process.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(process, "_busy_seconds", lambda cores: next(seconds))
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: range(4), raising=False)
    assert idle_cores(seconds=0) == idle


def test_one_core_is_used_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setattr(process, "_busy_seconds", lambda cores: (_ for _ in ()).throw(FileNotFoundError()))
    assert idle_cores(seconds=0) == 1


def test_cores_of_other_processes_do_not_count(monkeypatch):
    per_core = {"cpu": 1000, "cpu0": 100, "cpu1": 200, "cpu11": 700}
    lines = [f"{name} {busy} 0 0 5000 60 0 0 0 0 0" for name, busy in per_core.items()]
    monkeypatch.setattr(process.Path, "read_text", lambda _: "\n".join([*lines, "intr 7 0 0"]))
    monkeypatch.setattr(process.os, "sysconf", lambda _: 100)
    assert process._busy_seconds({0, 1}) == 3.0
