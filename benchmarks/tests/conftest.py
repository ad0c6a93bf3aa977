import pytest

from tests.conftest import ctrl_c, quick_bootstrap  # noqa: F401


@pytest.fixture
def quick_noise(monkeypatch):
    """Ladders whose pages measure the noise of gradients in a twentieth of the steps, which would take most of the time."""
    monkeypatch.setattr("benchmarks.ladder.N_STEPS_OF_VARIANCE", 1000)
