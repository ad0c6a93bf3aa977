"""Trainings in several processes, which stop together, each with a checkpoint."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from sb3_qac.common.allocator import keep_freed_memory
from sb3_qac.resume.signals import DeferredSignals
from sb3_qac.study.run import Run
from sb3_qac.study.train import train_run

# A file of this name tells the processes to begin no other training
STOP = "stop"


def train_in_processes(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, str | None]]:
    """
    SIGINT (Ctrl-C) and SIGTERM stop all trainings, each with a checkpoint, and are then handled as usual. joblib alone kills
    its processes after SIGINT, before they have written one, and leaves them behind after SIGTERM.

    :param runs: Runs to train or to resume
    :param jobs: Number of processes
    :return: each run in its turn, and its error, if there was one
    :raises KeyboardInterrupt: after Ctrl-C, when the checkpoints have been written
    """
    with tempfile.TemporaryDirectory() as folder:
        signals = DeferredSignals(lambda frame: True, on_deferred=lambda: _stop_processes(Path(folder)))
        signals.catch()
        try:
            train = delayed(_train_unless_stopped)
            parallel = Parallel(n_jobs=jobs, return_as="generator", initializer=_start_process)
            for run, error in zip(runs, parallel(train(run, folder) for run in runs), strict=True):
                if signals.pending is None:
                    yield run, error
            if signals.pending is not None:
                # joblib keeps its processes for a later call, for minutes longer than this process may live
                get_reusable_executor(reuse=True).shutdown(kill_workers=True)
            signals.raise_pending()
        finally:
            signals.release()


def _start_process() -> None:
    keep_freed_memory()
    # Ctrl-C in a terminal reaches the whole process group. Here it must come once, from `_stop_processes`, even if the group
    # ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.name == "posix":
        os.setpgrp()


def _train_unless_stopped(run: Run, folder: str) -> str | None:
    process = Path(folder, str(os.getpid()))
    try:
        # First this file, then the look at the other: `_stop_processes` does it the other way round
        process.touch()
        return None if Path(folder, STOP).exists() else train_run(run)
    except KeyboardInterrupt:
        # Before the training has begun, where nothing can be saved
        return None
    finally:
        process.unlink(missing_ok=True)


def _stop_processes(folder: Path) -> None:
    Path(folder, STOP).touch()
    if os.name != "posix":
        # A console of Windows passes Ctrl-C on to all processes
        return
    for process in folder.iterdir():
        if process.name != STOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGINT)
