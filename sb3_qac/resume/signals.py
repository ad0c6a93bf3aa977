"""Signals that are deferred until the run can be stopped."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class DeferredSignals:
    """
    Defers SIGINT (Ctrl-C) and SIGTERM until a run is between two updates, where it can stop with a checkpoint. A second
    signal is handled at once, and so is a signal outside of it.

    :param is_training: Function that says whether the frame that a signal interrupted belongs to the run
    :param on_deferred: Function that is called when a signal is deferred, if any
    :param numbers: The signals
    """

    def __init__(
        self,
        is_training: Callable[[FrameType | None], bool],
        on_deferred: Callable[[], None] | None = None,
        # Not members of `Signals`: RL Zoo writes a callback of its Python files as YAML, which fails for them on Python 3.10
        numbers: Sequence[int] = (int(signal.SIGINT), int(signal.SIGTERM)),
    ) -> None:
        self.is_training = is_training
        self.on_deferred = on_deferred
        self.numbers = numbers
        # The deferred signal
        self.pending: int | None = None
        self._handlers: dict[int, Any] = {}

    def catch(self) -> None:
        """Take over the handling of the signals. Only the main thread can do this; in other threads nothing happens."""
        self.pending = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.numbers:
            left_behind = getattr(signal.getsignal(number), "__self__", None)
            if isinstance(left_behind, DeferredSignals):
                left_behind.release()
            # An ignored signal stays ignored, such as SIGINT in a background job. None is a handler in C, which could not be
            # restored
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Restore the previous handlers of the signals."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def raise_pending(self) -> None:
        """Handle the deferred signal, if there is one, as if it came now."""
        if self.pending is None:
            return
        self.release()
        signal.raise_signal(self.pending)
        # The handler neither stopped the process nor raised KeyboardInterrupt
        self.catch()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pending is not None or not self.is_training(frame):
            self.release()
            signal.raise_signal(number)
            return
        self.pending = number
        name = signal.Signals(number).name
        # Not `print`: the signal may have interrupted another `print`, which holds the lock
        message = f"\n{name}: stopping with a checkpoint after this update or evaluation. A second one stops at once.\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        if self.on_deferred is not None:
            self.on_deferred()
