"""Runs in several processes, which stop together, each with a checkpoint."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess

from sb3_qac.common.process import keep_freed_memory
from sb3_qac.resume.signals import DeferredSignals
from sb3_qac.study.run import Run
from sb3_qac.study.train import train_run

# Windows has no signal for a closed terminal
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if os.name == "posix" else ()))
# A process, its run, and where its result comes from
Active = tuple[SpawnProcess, Run, connection.Connection]


def train_in_processes(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, str | None]]:
    """
    Each run has a process of its own. SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) stop all runs, each with a
    checkpoint, and are then handled as usual.

    :param runs: Runs to train or to resume
    :param jobs: Number of processes at once
    :return: each run as it ends, and its error, if there was one
    :raises KeyboardInterrupt: after Ctrl-C, when the checkpoints have been written
    """
    context = multiprocessing.get_context("spawn")
    # Its start would unblock the signals below
    resource_tracker.ensure_running()
    waiting, active = list(runs), dict[int, Active]()
    signals = DeferredSignals(lambda frame: True, lambda: _interrupt(active.values()), STOP_SIGNALS)
    signals.catch()
    try:
        while active or (waiting and signals.pending is None):
            # A new process has blocked signals until it can handle them
            with _blocked_signals():
                while waiting and len(active) < jobs and signals.pending is None:
                    run = waiting.pop(0)
                    result, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_train, args=(run, sender))
                    process.start()
                    sender.close()
                    active[process.sentinel] = (process, run, result)
            for sentinel in connection.wait(list(active)):
                process, run, result = active.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                try:
                    error = result.recv()
                except EOFError:
                    error = f"Its process was killed (exit code {process.exitcode}), as when memory runs out. Run it again."
                if signals.pending is None:
                    yield run, error
    finally:
        signals.release()
        # After an error, or a second signal
        _interrupt(active.values())
        for process, *_ in active.values():
            process.join()
    if signals.pending is not None:
        signal.raise_signal(signals.pending)
        # Its handler has returned, but the runs were stopped
        raise KeyboardInterrupt


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Context manager: while active, signals that stop this process wait, also in processes that are started."""
    # A console of Windows passes Ctrl-C on to all processes
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interrupt(active: Iterable[Active]) -> None:
    for process, *_ in active:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]


def _train(run: Run, sender: connection.Connection) -> None:
    keep_freed_memory()
    # Signals may reach all processes: Ctrl-C in a terminal those of its group, SIGTERM at a shutdown those of the machine.
    # Only SIGINT from the process above counts, because a second signal stops a run at once, without a checkpoint. SIGINT may
    # be waiting already, and is not lost by another handler as it would be if it were ignored.
    for number in STOP_SIGNALS[1:]:
        signal.signal(number, signal.SIG_IGN)
    error = None
    # Before the run has begun or after it has ended, there is nothing to save
    with contextlib.suppress(KeyboardInterrupt):
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.name == "posix":
                os.setpgrp()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            error = train_run(run)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The process above may have been killed. This run has its result in its folder
    with contextlib.suppress(BrokenPipeError):
        sender.send(error)
