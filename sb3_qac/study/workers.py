"""Trainings in several processes, which stop together, each with a checkpoint."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sb3_qac.common.allocator import keep_freed_memory
from sb3_qac.resume.signals import DeferredSignals
from sb3_qac.study.run import Run
from sb3_qac.study.train import train_run

# A file of this name tells the processes to begin no other training
STOP = "stop"
# Windows has no signal for a closed terminal
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if os.name == "posix" else ()))


def train_in_processes(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, str | None]]:
    """
    SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) stop all trainings, each with a checkpoint, and are then handled as
    usual. joblib alone kills its processes after SIGINT, before they have written one, and leaves them behind otherwise.

    :param runs: Runs to train or to resume
    :param jobs: Number of processes
    :return: each run in its turn, and its error, if there was one
    :raises ValueError: if a process was killed, which ends all of them
    :raises KeyboardInterrupt: after Ctrl-C, when the checkpoints have been written
    """
    with tempfile.TemporaryDirectory() as folder:
        signals = DeferredSignals(lambda frame: True, lambda: _stop_processes(Path(folder)), STOP_SIGNALS)
        signals.catch()
        try:
            train = delayed(_train_unless_stopped)
            # joblib would give several trainings at once to a process, if those before it fail within a moment
            # It starts all its processes at once, and with one it would train in this process
            n_jobs = max(2, min(jobs, len(runs)))
            parallel = Parallel(n_jobs=n_jobs, return_as="generator", batch_size=1, initializer=_start_process)
            for run, error in zip(runs, parallel(train(run, folder) for run in runs), strict=True):
                if signals.pending is None:
                    yield run, error
            if signals.pending is not None:
                # joblib keeps its processes for a later call, for minutes longer than this process may live
                get_reusable_executor(reuse=True).shutdown(kill_workers=True)
        except TerminatedWorkerError:
            # Ctrl-C in a terminal ends a process that is still starting, and joblib then ends the others
            if signals.pending is None:
                raise ValueError(
                    "A process of `--jobs` was killed, as when memory runs out, or could not start, and the others were ended "
                    "with it. Run the same command again to continue, with fewer `--jobs` if memory is short."
                ) from None
        finally:
            signals.release()
    if signals.pending is not None:
        # Only here, because it may end this process at once, and leave the folder behind
        signal.raise_signal(signals.pending)
        # Its handler has returned, but the trainings were stopped
        raise KeyboardInterrupt


def _start_process() -> None:
    keep_freed_memory()
    # Signals may reach all processes: Ctrl-C in a terminal those of its group, SIGTERM at a shutdown those of the machine.
    # Here only `_stop_processes` counts, because a second signal stops a training at once, without a checkpoint.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if os.name == "posix":
        os.setpgrp()


def _train_unless_stopped(run: Run, folder: str) -> str | None:
    process = Path(folder, str(os.getpid()))
    try:
        try:
            # Not between two trainings, where it would end this process, and joblib then ends the others
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # First this file, then the look at the other: `_stop_processes` does it the other way round
            process.touch()
            return None if Path(folder, STOP).exists() else train_run(run)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.unlink(missing_ok=True)
    except KeyboardInterrupt:
        # Before the training has begun or after it has ended, where nothing can be saved
        return None


def _stop_processes(folder: Path) -> None:
    Path(folder, STOP).touch()
    if os.name != "posix":
        # A console of Windows passes Ctrl-C on to all processes
        return
    for process in folder.iterdir():
        if process.name != STOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGINT)
