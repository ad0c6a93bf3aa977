import contextlib
import io
import os
import signal
import sys

import pytest

# Small networks: one thread is faster than two that wait for each other, and two tests can share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def ctrl_c():
    """Where the tests run in the background, the shell has switched Ctrl-C off for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rl_zoo(monkeypatch):
    """
    RL Zoo's commands in the process of the test, for where the process itself is not what is tested: a new one takes seconds
    for its imports. They return what they print.
    """
    import torch as th

    from sb3_qac.__main__ import main

    def run(command, *arguments, cwd):
        printed = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.chdir(cwd)
            # The command writes its own
            patch.setattr(sys, "argv", sys.argv)
            assert main(["zoo", command, *map(str, arguments)]) == 0
        return printed.getvalue()

    n_threads, environ = th.get_num_threads(), dict(os.environ)
    # A command with `--track` sets it, and variables of W&B
    monkeypatch.setattr("sb3_qac.zoo.resume._resumed_wandb_run", None)
    yield run
    th.set_num_threads(n_threads)
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture
def offline_wandb(monkeypatch):
    """W&B offline, in a service of its own: it reads its mode once, and other tests start it in other modes."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(wandb, "run", None)
    # It would change gymnasium's wrapper for videos, for the tests that follow too
    monkeypatch.setattr("wandb.integration.gym.monitor", lambda: None)
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def quick_bootstrap(monkeypatch):
    """Reports with fewer bootstrap samples, which would take most of their tests' time."""
    from sb3_qac.study import analysis, statistics

    monkeypatch.setattr(analysis, "N_BOOTSTRAP", 50)
    monkeypatch.setattr(analysis, "N_BOOTSTRAP_OF_RANKS", 50)
    monkeypatch.setattr(statistics, "N_BOOTSTRAP_OF_RANKS", 50)
