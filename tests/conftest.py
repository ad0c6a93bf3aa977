import os
import signal

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
def quick_bootstrap(monkeypatch):
    """Reports with fewer bootstrap samples, which would take most of their tests' time."""
    from sb3_qac.study import analysis

    monkeypatch.setattr(analysis, "N_BOOTSTRAP", 50)
    monkeypatch.setattr(analysis, "N_BOOTSTRAP_OF_RANKS", 50)
