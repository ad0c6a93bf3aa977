"""Signals that wait for a moment at which a training can be stopped."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class DeferredSignals:
    """
    Lets SIGINT (Ctrl-C) and SIGTERM wait until a training is between two updates, where it can stop with a checkpoint. A
    second signal is handled at once, and so is one that comes outside the training.

    :param is_training: Whether the frame that a signal has interrupted belongs to the training
    """

    def __init__(self, is_training: Callable[[FrameType | None], bool]) -> None:
        self.is_training = is_training
        # The signal that waits
        self.pending: int | None = None
        self._handlers: dict[int, Any] = {}

    def catch(self) -> None:
        """Take over the handling of the signals. Only the main thread can, elsewhere it does nothing."""
        self.pending = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            left_behind = getattr(signal.getsignal(number), "__self__", None)
            if isinstance(left_behind, DeferredSignals):
                left_behind.release()
            # One that is ignored, as SIGINT is by a job in the background, stays so
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Give the handling of the signals back to whoever had it."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def raise_pending(self) -> None:
        """Handle the signal that waits, if there is one, as if it came now."""
        if self.pending is None:
            return
        self.release()
        signal.raise_signal(self.pending)
        # It did not stop the process, nor raise KeyboardInterrupt
        self.catch()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pending is not None or not self.is_training(frame):
            self.release()
            signal.raise_signal(number)
            return
        self.pending = number
        name = signal.Signals(number).name
        # Not with `print`: the signal may have come inside another one, which holds its lock
        message = f"\n{name}: stopping with a checkpoint after this update or evaluation. A second one stops at once.\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
