"""The callback that writes checkpoints and resumes from them."""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EventCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_qac.common.checks import check_integer, check_number
from sb3_qac.common.files import write_atomically
from sb3_qac.common.nested_callbacks import flatten
from sb3_qac.common.random_state import random_state
from sb3_qac.resume.checkpoints import Checkpoint, CheckpointError, newest_checkpoint, restoring, save_checkpoint
from sb3_qac.resume.folder import take_folder
from sb3_qac.resume.identity import check_same_training, falling_schedules
from sb3_qac.resume.logs import LogIntervalCallback
from sb3_qac.resume.model import check_supported
from sb3_qac.resume.parts import RunState
from sb3_qac.resume.signals import DeferredSignals
from sb3_qac.resume.wandb import log_to_wandb, wandb_identity, wandb_outputs

# Seconds of training to each second that writing a checkpoint took, before the next one is due by time
SECONDS_PER_SECOND_OF_SAVING = 50


class ExactCheckpointCallback(BaseCallback):
    """
    Writes checkpoints of a run, and resumes it exactly when ``learn`` is called again::

        model = QA2C("CnnPolicy", env, seed=0)
        model.learn(15_000_000, callback=[EvalCallback(eval_env), ExactCheckpointCallback("runs/pong")])

    Run the same script again after a kill, and it resumes from the newest checkpoint in the folder: parameters, optimizer,
    counters and schedules, environments and emulators, random generators, callbacks, and the log files that were open.
    On a CPU every number after it is identical to the number in a run that was never stopped.

    A checkpoint is written between two updates: at the start, every ``save_freq`` steps, ``save_minutes`` after the one
    before, after each evaluation, at the end if the run does not end inside a rollout, and after SIGINT or SIGTERM,
    which are then handled as usual. A second signal stops at once. An update that was interrupted is never saved: the next
    start repeats it.

    Evaluations draw from random generators of their own, so that they do not change the run.

    It works with A2C, PPO, QA2C, QPPO, PQN and REINFORCE. Environments must not be in a ``SubprocVecEnv``, except with
    ``new_episodes``. The state of the other callbacks is kept too: plain data, random generators, environments and objects
    made of them. A callback with anything else is refused at the start. Attributes of the algorithm are kept in the same way,
    and what cannot be kept is named in a warning.

    :param folder: Folder for the checkpoints of this one run
    :param save_freq: Environment steps (of all environments together) between two checkpoints
    :param keep: Number of checkpoints to keep: the newest ones
    :param verbose: Verbosity level: 0 for no output, 1 for a line when a run is resumed, 2 for each checkpoint
    :param save_minutes: Minutes after a checkpoint at which the next one is due if no other reason comes first. They are
        more if writing one takes long, so that it takes at most a fiftieth of the time.
    :param new_episodes: Whether the environments begin new episodes at a resume. It is then not exact: the state of the
        environments is not restored, and need not be readable. That of each ``VecEnvWrapper`` is, such as the statistics of
        ``VecNormalize``. ``run.json`` has the steps at which it happened.
    :raises ValueError: if ``save_freq`` or ``keep`` is less than 1, or ``save_minutes`` less than 0
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        save_freq: int = 100_000,
        keep: int = 3,
        verbose: int = 1,
        save_minutes: float = 5.0,
        new_episodes: bool = False,
    ) -> None:
        super().__init__(verbose)
        check_number("save_freq", save_freq, minimum=1)
        check_number("save_minutes", save_minutes)
        check_integer("keep", keep, minimum=1)
        self.folder = None if folder is None else Path(folder)
        self.save_freq = save_freq
        self.keep = keep
        self.save_minutes = save_minutes
        self.new_episodes = new_episodes
        # RL Zoo's, as YAML: a command that is run again resumes a run with the same ones only
        self.hyperparams: str | None = None
        # The other callbacks, and their settings when they were first used, by identity: a dataclass has no hash
        self._settings: dict[int, tuple[BaseCallback, dict[str, Any]]] = {}
        self._signals = DeferredSignals(self._is_learning)
        self._lock: FileLock | None = None
        self._log_interval_callback = LogIntervalCallback()
        self._run: RunState | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin anew, because the callback may have been used in another run."""
        self._log_interval_callback.offset = self._log_interval_callback.iteration = 0
        # Steps at which a resume has begun new episodes
        self._new_episodes_at: list[int] = []
        self._saved_at = -1
        # On the clock of `time.monotonic`, in seconds
        self._next_save_time = time.monotonic() + 60 * self.save_minutes
        self._evaluated = False
        self._rollout_is_complete = False
        # What is restored only after every callback has started
        self._to_restore: Checkpoint | None = None
        self._error_at_start: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        """:return: the arguments, and what a subclass adds: RL Zoo writes a callback from a Python file to ``config.yml``"""
        arguments = {"save_freq", "keep", "verbose", "save_minutes", "new_episodes"}
        of_this_process = vars(ExactCheckpointCallback()).keys() - arguments
        kept = {name: value for name, value in vars(self).items() if name not in of_this_process}
        return {**kept, "folder": None if self.folder is None else str(self.folder)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ExactCheckpointCallback.__init__(self, state["folder"])
        vars(self).update({name: value for name, value in state.items() if name != "folder"})

    def _on_training_start(self) -> None:
        check_supported(self.model)
        if self.folder is None:
            raise ValueError("`folder` is missing: ExactCheckpointCallback(folder='runs/my-run')")
        if isinstance(self.parent, EventCallback):
            raise ValueError(
                f"{type(self.parent).__name__} does not tell its callback of rollouts, and checkpoints are written between "
                "these. Give ExactCheckpointCallback to `learn` itself, in the list of callbacks, with a `save_freq`."
            )
        if sum(isinstance(callback, ExactCheckpointCallback) for callback in flatten(self.locals["callback"])) > 1:
            raise ValueError("There are several `ExactCheckpointCallback` among the callbacks: give `learn` one of them.")
        self._begin()
        # The run may change its working folder
        self.folder = self.folder.absolute()
        self._lock = take_folder(self.folder)
        try:
            self._start(self.folder)
        except BaseException:
            self._leave_folder()
            raise

    def _start(self, folder: Path) -> None:
        """
        :param folder: Folder of the checkpoints, which is ours now
        :raises CheckpointError: if its checkpoints are of another run
        """
        model, root = self.model, self.locals["callback"]
        assert isinstance(model, OnPolicyAlgorithm)
        # It comes last, so that its row has what the others record at the end of a rollout
        self._log_interval_callback.init_callback(model)
        self._log_interval_callback.locals = self.locals
        if isinstance(root, CallbackList) and self._log_interval_callback not in root.callbacks:
            # A copy: the list is the user's
            root.callbacks = [*root.callbacks, self._log_interval_callback]
        self._run = run = RunState(model, root, self, folder, self.new_episodes, self._settings)
        for evaluation in run.evaluations():
            self._isolate(evaluation)
        log_to_wandb(model.logger)

        checkpoint = newest_checkpoint(folder)
        if checkpoint is not None:
            with restoring(checkpoint):
                self._resume(checkpoint, run)
        self._write_run_file(finished=False)
        # `learn` may be called while another error is being handled
        self._error_at_start = sys.exc_info()[1]
        self._signals.catch()

    def _resume(self, checkpoint: Checkpoint, run: RunState) -> None:
        """
        :param checkpoint: Checkpoint to resume from
        :param run: State of the run, as far as it has started
        :raises CheckpointError: if the checkpoint is of another run
        """
        check_same_training(self.model, checkpoint)
        self._check_same_call(checkpoint)
        run.restore(checkpoint.state)
        steps = self._saved_at = self.model.num_timesteps
        self._log_interval_callback.iteration = self._log_interval_callback.offset = int(checkpoint.state["iteration"])
        self._new_episodes_at = list(map(int, checkpoint.state["new_episodes_at"]))
        if self.new_episodes and steps < self.model._total_timesteps:
            self._new_episodes_at.append(steps)
        self._to_restore = checkpoint
        if checkpoint.state["left_out"]:
            warnings.warn(
                f"This run is not resumed exactly, because {checkpoint.path} does not have "
                f"{', '.join(checkpoint.state['left_out'])}: taken from this start.",
                stacklevel=2,
            )
        if self.verbose >= 1:
            how = " with new episodes" if self.new_episodes else ""
            print(f"Resuming from step {steps}{how} ({checkpoint.path})")

    def _check_same_call(self, checkpoint: Checkpoint) -> None:
        """
        :param checkpoint: Checkpoint to resume from
        :raises CheckpointError: if it is of a call of ``learn`` that comes after this one
        """
        state, here = checkpoint.state, self.model._total_timesteps
        there, step = state["total_timesteps"], state["model"]["num_timesteps"]
        if here < there and here <= step and (state["continues"] or self._continues):
            raise CheckpointError(
                f"{checkpoint.path} is of a `learn` that ends at step {there}, and this one ends at step {here}. One "
                "continues the other (`reset_num_timesteps=False`): train in one call, or give each its own folder."
            )
        schedules = falling_schedules(self.model)
        if here != there and schedules:
            warnings.warn(
                f"The checkpoint is of a `learn` that ends at step {there}, and this one ends at step {here}: from here on "
                f"{' and '.join(schedules)} follow the new end, unlike in a run that was planned with it.",
                stacklevel=2,
            )

    @property
    def _continues(self) -> bool:
        """Whether this call of ``learn`` continues the steps of an earlier one."""
        return not self.locals.get("reset_num_timesteps", True)

    def _on_rollout_start(self) -> None:
        assert self._run is not None
        if self._to_restore is not None:
            self._restore_after_start(self._to_restore)
            # State that cannot be saved is refused now, not hours later
            self._run.checked()
        is_due = self.model.num_timesteps - self._saved_at >= self.save_freq or time.monotonic() >= self._next_save_time
        if self._saved_at < 0 or is_due or self._evaluated or self._signals.pending is not None:
            self.save()
        self._signals.raise_pending()
        self._rollout_is_complete = False

    def _restore_after_start(self, checkpoint: Checkpoint) -> None:
        assert self._run is not None
        self._to_restore = None
        with restoring(checkpoint):
            self._run.restore_after_start(checkpoint.state)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._rollout_is_complete = True
        if self.locals["callback"] is self:
            self._log_interval_callback.on_rollout_end()

    def _on_training_end(self) -> None:
        if self._lock is None:
            return
        # RL Zoo also calls this after an interrupted update, which may be half done, and hides the interruption
        learn_is_done = self._is_learning(sys._getframe()) and sys.exc_info()[1] is self._error_at_start
        if learn_is_done and self._to_restore is not None:
            # This run had ended before. Another `learn` may continue it
            self._restore_after_start(self._to_restore)
        if learn_is_done and self._rollout_is_complete:
            self.save()
        if learn_is_done and self._signals.pending is None:
            try:
                self._write_run_file(finished=True)
            except OSError as error:
                # The caller has yet to save the trained model
                warnings.warn(
                    f"This run has ended, but that could not be written: {error}. The next start takes it for "
                    "unfinished, and repeats the steps since the newest checkpoint.",
                    stacklevel=2,
                )
        root = self.locals["callback"]
        if isinstance(root, CallbackList):
            root.callbacks = [callback for callback in root.callbacks if callback is not self._log_interval_callback]
        for output_format in wandb_outputs(self.model.logger):
            output_format.close()
            self.model.logger.output_formats.remove(output_format)
        self._leave_folder()
        if learn_is_done:
            # It came in the last rollout or update. No further rollout starts
            self._signals.raise_pending()
        self._signals.release()

    def save(self) -> None:
        """
        Write a checkpoint now. If that fails, the run continues with a warning, unless the state cannot be taken at its
        start.
        """
        assert self.folder is not None and self._run is not None
        steps, steps_before = self.model.num_timesteps, self._saved_at
        if steps_before == steps:
            return
        self._saved_at, self._evaluated = steps, False
        begin = time.monotonic()
        try:
            state = {
                **self._run.checked(),
                "iteration": self._log_interval_callback.iteration,
                "total_timesteps": self.model._total_timesteps,
                "new_episodes_at": self._new_episodes_at,
                "continues": self._continues,
            }
            path = save_checkpoint(self.folder, steps, state, self.keep)
        except Exception as error:
            # A long run is worth more than one checkpoint. At its start nothing is lost yet
            if steps_before < 0 and not isinstance(error, OSError):
                raise
            earlier = "the earlier checkpoints stay" if steps_before >= 0 else "there is no checkpoint yet"
            warnings.warn(
                f"No checkpoint of step {steps} could be written: {str(error).removesuffix('.')}. The run continues, and "
                f"{earlier}.",
                stacklevel=2,
            )
            return
        finally:
            end = time.monotonic()
            self._next_save_time = end + max(60 * self.save_minutes, SECONDS_PER_SECOND_OF_SAVING * (end - begin))
        if self.verbose >= 2:
            print(f"Checkpoint: {path}")

    def _isolate(self, evaluation: EvalCallback) -> None:
        """
        :param evaluation: Evaluation that must not draw from the run's random generators
        """
        # An evaluation may be used in one run after another
        is_isolated = hasattr(evaluation, "_isolated_by")
        evaluation._isolated_by = self  # type: ignore[attr-defined]
        if is_isolated:
            return
        evaluate = evaluation._on_step

        def evaluate_apart() -> bool:
            if evaluation.eval_freq <= 0 or evaluation.n_calls % evaluation.eval_freq != 0:
                return evaluate()
            checkpoints: ExactCheckpointCallback = evaluation._isolated_by  # type: ignore[attr-defined]
            checkpoints._evaluated = True
            assert checkpoints._run is not None
            with random_state(checkpoints._run.evaluation_random):
                return evaluate()

        evaluation._on_step = evaluate_apart  # type: ignore[method-assign]

    def _leave_folder(self) -> None:
        if self._lock is not None:
            self._lock.release(force=True)
            self._lock = None

    def _write_run_file(self, finished: bool) -> None:
        """Write ``run.json``, which says how far the run has come."""
        assert self.folder is not None
        content = {
            "command": sys.argv,
            "hyperparams": self.hyperparams,
            "finished": finished,
            "seed": self.model.seed,
            "num_timesteps": self.model.num_timesteps,
            "new_episodes_at": self._new_episodes_at,
            "wandb": wandb_identity(),
        }
        write_atomically(self.folder / "run.json", (json.dumps(content, indent=1) + "\n").encode())

    def _is_learning(self, frame: FrameType | None) -> bool:
        """
        :param frame: Current stack frame
        :return: Whether it is within ``learn``. An error ends ``learn`` without a call of its callbacks, and then it is not
        """
        while frame is not None:
            if frame.f_code.co_name == "learn" and frame.f_locals.get("self") is self.model:
                return True
            frame = frame.f_back
        return False
