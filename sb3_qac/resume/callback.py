"""The callback that writes checkpoints and resumes from them."""

import copy
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

import gymnasium as gym
import numpy as np
from filelock import FileLock, Timeout
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EventCallback, ProgressBarCallback
from stable_baselines3.common.logger import (
    CSVOutputFormat,
    HumanOutputFormat,
    JSONOutputFormat,
    TensorBoardOutputFormat,
)
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_integer, check_number
from sb3_qac.common.files import make_folder, write_atomically
from sb3_qac.common.random_state import get_random_state, random_state, seeded_random_state, set_random_state
from sb3_qac.resume.callback_state import CALLBACK_ATTRIBUTES_SKIPPED, callback_settings, callback_state, flatten
from sb3_qac.resume.checkpoints import Checkpoint, CheckpointError, newest_checkpoint, restoring, save_checkpoint
from sb3_qac.resume.environments import NEW_EPISODES, begin_new_episodes, restore_environments, take_environments
from sb3_qac.resume.identity import (
    check_same_number,
    check_same_training,
    different_settings,
    falling_schedules,
    training_settings,
)
from sb3_qac.resume.logs import (
    change_next_row,
    pack_log,
    read_log,
    results_writers,
    resume_tensorboard,
    rewrite_log,
    sync_files,
    unpack_log,
)
from sb3_qac.resume.model import (
    check_supported,
    model_state,
    parts_of,
    plain_attributes,
    restore_model,
    without_settings,
)
from sb3_qac.resume.signals import DeferredSignals
from sb3_qac.resume.state import (
    ObjectState,
    StateError,
    check_objects,
    equal,
    is_plain,
    objects_in,
    restore_attributes,
    set_attributes,
)
from sb3_qac.resume.wandb import WandbOutputFormat, active_wandb_run, wandb_identity

# Attributes of the logger: what was recorded and not yet written
LOGGED = ("name_to_value", "name_to_count", "name_to_excluded")
# Seconds of training to each second that writing a checkpoint took, before the next one is due by time
SECONDS_PER_SECOND_OF_SAVING = 50


def lock_of(folder: Path) -> FileLock:
    """
    :param folder: Folder of checkpoints
    :return: the lock of the process that trains there, the same object for every spelling of the folder
    """
    return FileLock(folder.resolve() / "lock", is_singleton=True)


class ExactCheckpointCallback(BaseCallback):
    """
    Writes checkpoints of a training, and resumes the training exactly when ``learn`` is called again::

        model = QA2C("CnnPolicy", env, seed=0)
        model.learn(15_000_000, callback=[EvalCallback(eval_env), ExactCheckpointCallback("runs/pong")])

    Run the same script again after a kill, and it resumes from the newest checkpoint in the folder: parameters, optimizer,
    counters and schedules, environments and emulators, random generators, callbacks, and the log files that were open.
    On a CPU every number after it is identical to the number in a training that was never stopped.

    A checkpoint is written between two updates: at the start, every ``save_freq`` steps, ``save_minutes`` after the one
    before, after each evaluation, at the end if the training does not end inside a rollout, and after SIGINT or SIGTERM,
    which are then handled as usual. A second signal stops at once. An update that was interrupted is never saved: the next
    start repeats it.

    Evaluations draw from random generators of their own, so that they do not change the training.

    It works with every ``OnPolicyAlgorithm`` of SB3 (A2C, PPO, QA2C, QPPO). Environments must be in a ``DummyVecEnv`` or an
    ``AleVecEnv``, except with ``new_episodes``. The state of the other callbacks is kept too: plain data, random generators,
    environments and objects made of them. A callback with anything else is refused at the start. Attributes of the algorithm
    that change are kept in the same way, and what cannot be kept is named in a warning.

    :param folder: Folder for the checkpoints of this one run
    :param save_freq: Environment steps (of all environments together) between two checkpoints
    :param keep: Number of checkpoints to keep: the newest ones
    :param verbose: Verbosity level: 0 for no output, 1 for a line when a training is resumed, 2 for each checkpoint
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
        # Steps at which a resume has begun new episodes
        self._new_episodes_at: list[int] = []
        # RL Zoo's, as YAML: a command that is run again resumes a run with the same ones only
        self.hyperparams: str | None = None
        self.iteration = 0
        self._log_interval_callback = LogIntervalCallback(self)
        self._saved_at = -1
        # On the clock of `time.monotonic`, in seconds
        self._next_save_time = 0.0
        self._evaluated = False
        self._rollout_is_complete = False
        # Class of each object in the state when the training started, by its place, and those of its earlier starts
        self._objects: dict[str, str] | None = None
        self._objects_before: dict[str, str] = {}
        # The other callbacks, and their settings when the training started, by identity: a dataclass has no hash
        self._settings: dict[int, tuple[BaseCallback, dict[str, Any]]] = {}
        # The algorithm's settings and attributes when the training started
        self._settings_at_start: dict[str, Any] = {}
        self._attributes_at_start: dict[str, Any] = {}
        # What checkpoints do not have, so that a resume is not exact
        self._left_out: set[str] = set()
        self._evaluation_random_state: dict[str, Any] = {}
        # Rows for W&B of an earlier start, compressed, while this one logs to no run of W&B
        self._wandb_rows: bytes | None = None
        # What is restored only after every callback has started
        self._to_restore: Checkpoint | None = None
        self._error_at_start: BaseException | None = None
        self._signals = DeferredSignals(self._is_learning)
        self._lock: FileLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        """:return: the arguments, and what a subclass adds: RL Zoo writes a callback from a Python file to ``config.yml``"""
        arguments = {"save_freq", "keep", "verbose", "save_minutes", "new_episodes"}
        of_this_process = vars(ExactCheckpointCallback()).keys() - arguments
        kept = {name: value for name, value in vars(self).items() if name not in of_this_process}
        return {**kept, "folder": None if self.folder is None else str(self.folder)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ExactCheckpointCallback.__init__(self, state["folder"])
        vars(self).update({name: value for name, value in state.items() if name != "folder"})

    # ---- the course of a training ----

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
        self._rollout_is_complete, self._to_restore, self._wandb_rows = False, None, None
        self._objects, self._objects_before = None, {}
        self._left_out = set()
        # As new, because it may have been used in another training
        self.iteration = self._log_interval_callback.offset = 0
        self._saved_at, self._evaluated = -1, False
        self._next_save_time, self._new_episodes_at = time.monotonic() + 60 * self.save_minutes, []
        # The run may change its working folder
        self.folder = self.folder.absolute()
        self._take_folder(self.folder)
        try:
            self._start(self.folder)
        except BaseException:
            self._leave_folder()
            raise

    def _start(self, folder: Path) -> None:
        """
        :param folder: Folder of the checkpoints, which is ours now
        :raises CheckpointError: if its checkpoints are of another training
        """
        self._evaluation_random_state = seeded_random_state(self.model.seed)
        for evaluation in self._evaluations():
            self._isolate(evaluation)
        root = self.locals["callback"]
        if isinstance(root, CallbackList) and self._log_interval_callback not in root.callbacks:
            # It comes last, so that its row has what the others record at the end of a rollout. A copy: the list is the user's
            self._log_interval_callback.init_callback(self.model)
            root.callbacks = [*root.callbacks, self._log_interval_callback]

        for callback in self._callbacks():
            self._settings.setdefault(id(callback), (callback, callback_settings(callback)))
        self._settings_at_start = training_settings(self.model)
        self._attributes_at_start = plain_attributes(self.model)
        self._log_to_wandb(folder)

        checkpoint = newest_checkpoint(folder)
        if checkpoint is not None:
            with restoring(checkpoint):
                check_same_training(self.model, checkpoint)
                self._check_same_call(checkpoint)
                self._restore(checkpoint.state)
                left_out = ", ".join(checkpoint.state["left_out"])
            self._to_restore = checkpoint
            # The training began with its first start
            self._settings_at_start |= checkpoint.state["training"]
            for name in checkpoint.state["algorithm"]:
                self._attributes_at_start.pop(name, None)
            if left_out:
                warnings.warn(
                    f"This training is not resumed exactly, because {checkpoint.path} does not have {left_out}: taken from "
                    "this start.",
                    stacklevel=2,
                )
            if self.verbose >= 1:
                how = " with new episodes" if self.new_episodes else ""
                print(f"Resuming from step {self.model.num_timesteps}{how} ({checkpoint.path})")
        self._write_run_file(finished=False)
        # `learn` may be called while another error is being handled
        self._error_at_start = sys.exc_info()[1]
        self._signals.catch()

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
                f"{' and '.join(schedules)} follow the new end, unlike in a training that was planned with it.",
                stacklevel=2,
            )

    @property
    def _continues(self) -> bool:
        """Whether this call of ``learn`` continues the steps of an earlier one."""
        return not self.locals.get("reset_num_timesteps", True)

    def _on_rollout_start(self) -> None:
        if self._to_restore is not None:
            self._restore_after_start(self._to_restore)
            # State that cannot be saved is refused now, not hours later
            self._checked_state()
        is_due = self.model.num_timesteps - self._saved_at >= self.save_freq or time.monotonic() >= self._next_save_time
        if self._saved_at < 0 or is_due or self._evaluated or self._signals.pending is not None:
            self.save()
        self._signals.raise_pending()
        self._rollout_is_complete = False

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.iteration += 1
        self._rollout_is_complete = True
        if self.locals["callback"] is self:
            self._log_interval_callback.on_rollout_end()

    def _on_training_end(self) -> None:
        if self._lock is None:
            return
        # RL Zoo also calls this after an interrupted update, which may be half done, and hides the interruption
        learn_is_done = self._is_learning(sys._getframe()) and sys.exc_info()[1] is self._error_at_start
        if learn_is_done and self._to_restore is not None:
            # This training had ended before. Another `learn` may continue it
            self._restore_after_start(self._to_restore)
        if learn_is_done and self._rollout_is_complete:
            self.save()
        if learn_is_done and self._signals.pending is None:
            try:
                self._write_run_file(finished=True)
            except OSError as error:
                # The caller has yet to save the trained model
                warnings.warn(
                    f"This training has ended, but that could not be written: {error}. The next start takes it for "
                    "unfinished, and repeats the steps since the newest checkpoint.",
                    stacklevel=2,
                )
        root = self.locals["callback"]
        if isinstance(root, CallbackList):
            root.callbacks = [callback for callback in root.callbacks if callback is not self._log_interval_callback]
        for output_format in self._wandb_outputs():
            output_format.close()
            self.model.logger.output_formats.remove(output_format)
        self._leave_folder()
        if learn_is_done:
            # It came in the last rollout or update. No further rollout starts
            self._signals.raise_pending()
        self._signals.release()

    def save(self) -> None:
        """
        Write a checkpoint now. If that fails, the training continues with a warning, unless the state cannot be taken at its
        start.
        """
        assert self.folder is not None
        steps, steps_before = self.model.num_timesteps, self._saved_at
        if steps_before == steps:
            return
        self._saved_at, self._evaluated = steps, False
        begin = time.monotonic()
        try:
            path = save_checkpoint(self.folder, steps, self._checked_state(), self.keep)
        except Exception as error:
            # A long training is worth more than one checkpoint. At its start nothing is lost yet
            if steps_before < 0 and not isinstance(error, OSError):
                raise
            earlier = "the earlier checkpoints stay" if steps_before >= 0 else "there is no checkpoint yet"
            warnings.warn(
                f"No checkpoint of step {steps} could be written: {str(error).removesuffix('.')}. The training continues, and "
                f"{earlier}.",
                stacklevel=2,
            )
            return
        finally:
            end = time.monotonic()
            self._next_save_time = end + max(60 * self.save_minutes, SECONDS_PER_SECOND_OF_SAVING * (end - begin))
        if self.verbose >= 2:
            print(f"Checkpoint: {path}")

    # ---- what a checkpoint holds ----

    def _checked_state(self) -> dict[str, Any]:
        """
        :return: result of ``_state``
        :raises StateError: if a state cannot be taken, or the next start will not have an object whose state is in it. After
            the start, attributes of callbacks and of the algorithm are left out instead, with a warning, because the rest of
            a long training is worth more.
        """
        is_start = self._objects is None
        left_out: dict[str, str] = {}
        state = self._state(left_out, strict=is_start)
        # Evaluations create the objects of their environments, and a resume resets these too
        required = {"the environment": state["env"], "the rollout buffer": ObjectState("", state["rollout_buffer"])}
        further = [*state["callbacks"], [type(self.model).__name__, state["algorithm"]]]
        if self._objects is None:
            # What was restored may lack an object that the next start has, such as one that is gone for a part of an episode
            self._objects = dict(self._objects_before)
            for name, part in (*required.items(), *((name, ObjectState("", values)) for name, values in further)):
                self._objects.update(objects_in(part, name))
        for name, part in required.items():
            if reason := self._reason_against(part, name):
                raise StateError(reason)
        for name, values in further:
            reasons = {key: self._reason_against(value, f"{name}.{key}") for key, value in values.items()}
            for key, reason in reasons.items():
                if reason is not None:
                    left_out[f"{name}.{key}"] = reason
                    del values[key]
        # Settings that have changed and are not in the state, such as a schedule that a callback has replaced
        different = different_settings(state["training"], self._settings_at_start)
        kept = {"VecNormalize", *state["algorithm"]}
        left_out.update({name: f"{text} when the training started." for name, text in different.items() if name not in kept})
        for name in sorted(left_out.keys() - self._left_out):
            warnings.warn(f"Checkpoints do not have {name}. A resume takes that of its start: {left_out[name]}", stacklevel=2)
        self._left_out |= left_out.keys()
        return {**state, "training": self._settings_at_start, "objects": self._objects, "left_out": sorted(left_out)}

    def _reason_against(self, state: Any, name: str) -> str | None:
        """
        :param state: Result of ``get_state``
        :param name: What to call it
        :return: why a checkpoint cannot have it: the next start will not have an object whose state is in it
        """
        assert self._objects is not None
        for place, kind in objects_in(state, name):
            if self._objects.get(place) != kind:
                before = self._objects.get(place, "not there")
                return (
                    f"{place} is a {kind}, and was {before} when the training started, so a resume would not have it. "
                    "Create it in the constructor, in `reset` or in `_on_training_start`."
                    + (f" {NEW_EPISODES}" if place.startswith("the environment") else "")
                )
        return None

    def _state(self, left_out: dict[str, str], strict: bool) -> dict[str, Any]:
        """
        :param left_out: Attributes of the algorithm and of callbacks whose state cannot be taken are added to it, with the
            reason
        :param strict: Whether those of callbacks are an error instead
        :return: everything that the next update depends on, as plain data
        """
        model, logger = self.model, self.model.logger
        assert isinstance(model, OnPolicyAlgorithm)
        tensorboard = [f for f in logger.output_formats if isinstance(f, TensorBoardOutputFormat)]
        for output_format in tensorboard:
            sync_files(Path(output_format.writer.log_dir))
        # A callback may refer to these objects, but their state is not its own
        seen = {
            id(self),
            id(self._log_interval_callback),
            *map(id, flatten(self.locals["callback"])),
            *map(id, parts_of(model)),
        }
        state = model_state(model, seen, left_out, self.new_episodes)
        before = self._attributes_at_start
        evaluation_envs = []
        for env in self._evaluation_envs():
            seen_there: set[int] = set()
            evaluation_envs.append(take_environments(env, "the evaluation environment", seen_there, self.new_episodes))
            seen |= seen_there
        if self.new_episodes:
            seen.update(id(env) for callback in self._callbacks() for env in environments_of(callback).values())
        return {
            **state,
            "algorithm": {
                name: value
                for name, value in state["algorithm"].items()
                if not (name in before and equal(value, before[name]))
            },
            "random": get_random_state(),
            "evaluation_random": self._evaluation_random_state,
            "evaluation_envs": evaluation_envs,
            "callbacks": [
                [
                    type(callback).__name__,
                    callback_state(callback, self._settings_of(callback), seen, model.policy, None if strict else left_out),
                ]
                for callback in self._callbacks()
            ],
            "iteration": self.iteration,
            "total_timesteps": model._total_timesteps,
            "new_episodes_at": self._new_episodes_at,
            "continues": self._continues,
            "logger": {
                name: {key: value for key, value in getattr(logger, name).items() if is_plain(value)} for name in LOGGED
            },
            "csv_keys": [list(f.keys) for f in logger.output_formats if isinstance(f, CSVOutputFormat)],
            "tensorboard": [os.path.relpath(f.writer.log_dir, self.folder) for f in tensorboard],
            "logs": [pack_log(read_log(file)) for file in self._open_logs()],
            "wandb_rows": self._rows_for_wandb(),
            "logs_to_wandb": bool(self._wandb_outputs()),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """
        :param state: Result of ``_state``
        :raises CheckpointError: if callbacks or log files differ
        """
        self._check_same_callbacks(state["callbacks"])
        self._check_same_number_of_episodes(state["callbacks"])
        csv_formats = [f for f in self.model.logger.output_formats if isinstance(f, CSVOutputFormat)]
        check_same_number("CSV logs are open", csv_formats, state["csv_keys"], "give the logger the same outputs")
        logs = self._open_logs()
        check_same_number("log files are open", logs, state["logs"], "give the environments and the logger the same files")
        contents = [unpack_log(packed) for packed in state["logs"]]

        restore_model(self.model, state, self.new_episodes)
        called_before = self._called_before()
        for callback, (_, values) in zip(self._callbacks(), state["callbacks"], strict=True):
            kept = without_settings(callback, values, CALLBACK_ATTRIBUTES_SKIPPED)
            plain = {name: value for name, value in kept.items() if is_plain(value)}
            # A copy: they may change the values before these are restored a second time
            set_attributes(callback, copy.deepcopy(plain) if id(callback) in called_before else plain)
        seed, steps = self.model.seed, self.model.num_timesteps
        for i, (env, env_state) in enumerate(zip(self._evaluation_envs(), state["evaluation_envs"], strict=True), start=1):
            if self.new_episodes:
                begin_new_episodes(env, env_state, None if seed is None else (seed, steps, i))
            else:
                # Some create objects in `reset`. It may draw from the global generators, which are restored later
                env.reset()
                restore_environments(env, env_state, "the evaluation environment")
        self._new_episodes_at = list(map(int, state.get("new_episodes_at", [])))
        if self.new_episodes and steps < self.model._total_timesteps:
            self._new_episodes_at.append(steps)
        self._evaluation_random_state = state["evaluation_random"]
        with random_state(dict(self._evaluation_random_state)):
            pass  # What cannot be set is an error now, not at the first evaluation
        self._objects_before = dict(state["objects"])
        self.iteration = self._log_interval_callback.offset = int(state["iteration"])
        self._saved_at = self.model.num_timesteps
        self._restore_logger(state)
        for file, content in zip(logs, contents, strict=True):
            rewrite_log(file, content)
        self._restore_wandb(state)
        for evaluation in self._evaluations():
            folder = evaluation.best_model_save_path
            if folder is not None and evaluation.best_mean_reward > -np.inf and not Path(folder, "best_model.zip").exists():
                warnings.warn(
                    f"There is no best_model.zip in {folder}, and a checkpoint does not hold it: copy it there. Otherwise "
                    f"there is none until an evaluation is better than {evaluation.best_mean_reward:g}.",
                    stacklevel=2,
                )

    def _restore_after_start(self, checkpoint: Checkpoint) -> None:
        """
        Restore state that other callbacks may have changed or created when this training started.

        :param checkpoint: Checkpoint to resume from
        """
        state, self._to_restore = checkpoint.state, None
        # Callbacks before this one were already called for this rollout, as when the checkpoint was written
        called_before = self._called_before()
        with restoring(checkpoint):
            here = self._state({}, strict=False)["callbacks"]
            for callback, (name, values), (_, own) in zip(self._callbacks(), state["callbacks"], here, strict=True):
                kept = without_settings(callback, values, CALLBACK_ATTRIBUTES_SKIPPED)
                left = {key: value for key, value in kept.items() if id(callback) in called_before or not is_plain(value)}
                if self.new_episodes:
                    left = {key: value for key, value in left.items() if key not in environments_of(callback)}
                check_objects(own, left, name)
                restore_attributes(callback, left, name)
            self._restore_rows(state["logger"])
            set_random_state(state["random"])

    def _restore_rows(self, rows: dict[str, dict[str, Any]]) -> None:
        """
        Restore the rows that were recorded and not yet written.

        :param rows: Those that a checkpoint can hold, by attribute of the logger. It has no figures, videos and lists of
            hyperparameters, but where those that were still to be written were to go.
        """
        kept = rows["name_to_value"].keys()
        lost = rows["name_to_excluded"].keys() - kept
        for name in LOGGED:
            recorded, values = getattr(self.model.logger, name), rows[name]
            # This start may have recorded them again
            again = {key: recorded[key] for key in lost if key in recorded}
            recorded.clear()
            recorded.update({key: value for key, value in values.items() if key in kept})
            recorded.update(again)

    def _check_same_callbacks(self, states: list[Any]) -> None:
        here, there = [type(callback).__name__ for callback in self._callbacks()], [name for name, _ in states]
        if here != there:
            raise CheckpointError(f"The callbacks are {here}, but the checkpoint was written with {there}: use the same ones.")

    def _check_same_number_of_episodes(self, states: list[Any]) -> None:
        for evaluation, (_, values) in zip(self._callbacks(), states, strict=True):
            if not isinstance(evaluation, EvalCallback):
                continue
            results, n_episodes = values.get("evaluations_results"), evaluation.n_eval_episodes
            if evaluation.log_path is not None and results and len(results[-1]) != n_episodes:
                raise CheckpointError(
                    f"`n_eval_episodes` of EvalCallback is {n_episodes}, and was {len(results[-1])}. With a `log_path` all "
                    "evaluations are in one table, so they must have equally many episodes: give the earlier number."
                )

    def _restore_logger(self, state: dict[str, Any]) -> None:
        assert self.folder is not None
        output_formats = self.model.logger.output_formats
        csv_formats = [f for f in output_formats if isinstance(f, CSVOutputFormat)]
        for csv_format, keys in zip(csv_formats, state["csv_keys"], strict=True):
            csv_format.keys = keys
        tensorboards = [f for f in output_formats if isinstance(f, TensorBoardOutputFormat)]
        for output_format, folder in zip(tensorboards, state["tensorboard"], strict=False):
            # Without a look at the disk, as it was made: ".." behind a symbolic link leads elsewhere
            resume_tensorboard(output_format, Path(os.path.abspath(self.folder / folder)))

    def _log_to_wandb(self, folder: Path) -> None:
        run = active_wandb_run()
        output_formats = self.model.logger.output_formats
        if run is None or self._wandb_outputs():
            return
        if run.settings.sync_tensorboard and sys.modules["wandb"].patched["tensorboard"]:
            warnings.warn(
                "Weights & Biases copies the rows of TensorBoard, which loses some when the process is killed. Leave "
                "`sync_tensorboard=True` out: with ExactCheckpointCallback all rows are logged anyway.",
                stacklevel=2,
            )
            return
        output_formats.append(WandbOutputFormat(run, folder / "wandb.jsonl"))

    def _wandb_outputs(self) -> list[WandbOutputFormat]:
        return [output for output in self.model.logger.output_formats if isinstance(output, WandbOutputFormat)]

    def _restore_wandb(self, state: dict[str, Any]) -> None:
        """
        :param state: Result of ``_state``
        """
        self._wandb_rows = rows = state["wandb_rows"]
        for output_format in self._wandb_outputs():
            if rows is not None:
                rewrite_log(output_format.file, unpack_log(rows))
            output_format.log_again()
            if not state["logs_to_wandb"]:
                # The run may have rows of a start before that one. Those that follow are not the same rows
                output_format.next_row = max(output_format.next_row, output_format.first_row)

    def _rows_for_wandb(self) -> bytes | None:
        """:return: the rows that W&B has got, compressed; those of an earlier start if this one has no run of W&B"""
        for output_format in self._wandb_outputs():
            return pack_log(read_log(output_format.file))
        return self._wandb_rows

    # ---- callbacks, environments and files ----

    def _callbacks(self) -> Iterator[BaseCallback]:
        """:return: all callbacks of the training that have state, without this one"""
        stateless = (CallbackList, ProgressBarCallback)
        return (
            callback
            for callback in flatten(self.locals["callback"])
            if not isinstance(callback, (*stateless, LogIntervalCallback)) and callback is not self
        )

    def _settings_of(self, callback: BaseCallback) -> dict[str, Any]:
        """:return: result of ``callback_settings`` from when this training started"""
        _, settings = self._settings.get(id(callback), (callback, {}))
        return settings

    def _called_before(self) -> set[int]:
        """:return: identities of the callbacks that ``learn`` calls before this one"""
        return set(map(id, itertools.takewhile(lambda callback: callback is not self, flatten(self.locals["callback"]))))

    def _evaluations(self) -> list[EvalCallback]:
        return [callback for callback in self._callbacks() if isinstance(callback, EvalCallback)]

    def _evaluation_envs(self) -> list[VecEnv]:
        return [evaluation.eval_env for evaluation in self._evaluations()]

    def _open_logs(self) -> list[IO[str]]:
        """:return: the files that monitors and the logger append to"""
        assert self.model.env is not None
        writers = [writer for env in (self.model.env, *self._evaluation_envs()) for writer in results_writers(env)]
        files = [writer.file_handler for writer in writers]
        for output_format in self.model.logger.output_formats:
            if isinstance(output_format, CSVOutputFormat | JSONOutputFormat) or (
                isinstance(output_format, HumanOutputFormat) and output_format.own_file
            ):
                files.append(output_format.file)
        return files

    # ---- effects on the process ----

    def _isolate(self, evaluation: EvalCallback) -> None:
        """
        :param evaluation: Evaluation that must not draw from the training's random generators
        """
        # An evaluation may be used in one training after another
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
            with random_state(checkpoints._evaluation_random_state):
                return evaluate()

        evaluation._on_step = evaluate_apart  # type: ignore[method-assign]

    def _take_folder(self, folder: Path) -> None:
        self._lock = lock_of(make_folder(folder))
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise CheckpointError(
                f"Another process is training in {folder}, or was stopped there and is still open, such as a notebook: wait "
                "for it, close it, or use another folder."
            ) from None

    def _leave_folder(self) -> None:
        if self._lock is not None:
            self._lock.release(force=True)
            self._lock = None

    def _write_run_file(self, finished: bool) -> None:
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


def environments_of(callback: BaseCallback) -> dict[str, gym.Env | VecEnv]:
    """
    :param callback: A callback
    :return: the environments among its attributes, by name
    """
    return {name: value for name, value in vars(callback).items() if isinstance(value, gym.Env | VecEnv)}


class LogIntervalCallback(BaseCallback):
    """
    Writes the log of a resumed training at the right iterations. ``learn`` counts its iterations from 0 again, so it would
    write the log at the wrong ones and with the wrong number.

    :param checkpoints: The callback that resumed the training
    """

    def __init__(self, checkpoints: ExactCheckpointCallback) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.offset = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        model, iteration = self.checkpoints.model, self.checkpoints.iteration
        log_interval = self.checkpoints.locals["log_interval"]
        if self.offset == 0 or log_interval is None:
            return
        assert isinstance(model, OnPolicyAlgorithm)
        is_written = (iteration - self.offset) % log_interval == 0
        if self.offset % log_interval == 0 and is_written:
            change_next_row(model.logger, iteration)
            return
        if iteration % log_interval == 0:
            model.dump_logs(iteration)
        if is_written:
            change_next_row(model.logger, None)
