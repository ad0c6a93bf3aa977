"""Signals wait until a training can be stopped."""

import signal
import sys
import threading

import pytest

from sb3_qac.resume.signals import DeferredSignals


@pytest.fixture(autouse=True)
def handlers_stay_as_they_were():
    # A job in the background starts with SIGINT ignored
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    signal.signal(signal.SIGINT, outside)
    assert after == before


@pytest.fixture
def signals():
    signals = DeferredSignals(is_training=lambda frame: True)
    signals.catch()
    yield signals
    signals.release()


def test_a_signal_waits_until_it_is_asked_for(signals, capfd):
    signal.raise_signal(signal.SIGINT)
    assert signals.pending == signal.SIGINT
    assert "SIGINT: stopping with a checkpoint" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signals.raise_pending()


def test_a_signal_inside_a_write_to_stderr_is_no_error(signals, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    signal.raise_signal(signal.SIGINT)
    assert "SIGINT: stopping with a checkpoint" in capfd.readouterr().err


def test_a_second_signal_is_handled_at_once(signals):
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_signal_nothing_is_raised(signals):
    signals.raise_pending()
    assert signals.pending is None


def test_outside_the_training_a_signal_is_handled_at_once(signals):
    signals.is_training = lambda frame: False
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_user_that_does_not_stop_leaves_the_signals_caught(monkeypatch):
    handled = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    signals = DeferredSignals(is_training=lambda frame: True)
    try:
        signals.catch()
        signal.raise_signal(signal.SIGTERM)
        assert not handled
        signals.raise_pending()
        assert handled == [signal.SIGTERM] and signals.pending is None
        signal.raise_signal(signal.SIGTERM)
        assert signals.pending == signal.SIGTERM and len(handled) == 1
    finally:
        signals.release()
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = DeferredSignals(is_training=lambda frame: True)
    try:
        signals.catch()
        signal.raise_signal(signal.SIGINT)
        assert signals.pending is None
    finally:
        signals.release()
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    """As of a program that embeds Python: it could not be restored."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    signals = DeferredSignals(is_training=lambda frame: True)
    signals.catch()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) != signals._on_signal
    signals.release()


def test_what_another_training_left_behind_is_replaced():
    """One that ended in an error, which nobody told it of."""
    before = signal.getsignal(signal.SIGINT)
    left, new = (DeferredSignals(is_training=lambda frame: True) for _ in range(2))
    left.catch()
    new.catch()
    new.release()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    signals = DeferredSignals(is_training=lambda frame: True)
    thread = threading.Thread(target=signals.catch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
