"""Exact resume: a training that was stopped at any moment continues as if nothing had happened."""

import contextlib
import copy
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Sized
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from filelock import FileLock, Timeout
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EventCallback, ProgressBarCallback
from stable_baselines3.common.logger import (
    CSVOutputFormat,
    HumanOutputFormat,
    JSONOutputFormat,
    TensorBoardOutputFormat,
)
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checkpoints import (
    Checkpoint,
    CheckpointError,
    checkpoints_in,
    load_checkpoint,
    newest_checkpoint,
    read_json,
    save_checkpoint,
    write_atomically,
)
from sb3_qac.common.checks import check_number
from sb3_qac.common.logs import (
    ContinuedLogger,
    ContinuedTensorBoard,
    WandbOutputFormat,
    read_log,
    results_writers,
    rewrite_log,
    sync_files,
)
from sb3_qac.common.state import (
    equal,
    get_random_state,
    get_state,
    is_plain,
    plain_attributes,
    put,
    put_attributes,
    random_state,
    seeded_random_state,
    set_random_state,
    set_state,
    take,
    take_attributes,
)

SelfOnPolicyAlgorithm = TypeVar("SelfOnPolicyAlgorithm", bound=OnPolicyAlgorithm)

# State of a model's training, without its policy
MODEL_ATTRIBUTES = (
    "num_timesteps",
    "_n_updates",
    "_episode_num",
    "_current_progress_remaining",
    "_num_timesteps_at_start",
    "ep_info_buffer",
    "ep_success_buffer",
    "_last_obs",
    "_last_episode_starts",
    "_last_original_obs",
)
# Attributes of every callback that belong to this process, and one of SB3's StopTrainingOnMaxEpisodes, made of its setting
CALLBACK_ATTRIBUTES_SKIPPED = frozenset({"model", "parent", "locals", "globals", "verbose", "_total_max_episodes"})
# Packages whose objects are displays or services: a callback that holds one has no state in it
SERVICES = ("matplotlib", "optuna", "rich", "tensorboard", "torch.utils.tensorboard", "tqdm", "wandb")
# Arguments of algorithms that do not change the numbers, or that are compared in another way
ARGUMENTS_NOT_COMPARED = frozenset({"policy", "policy_kwargs", "env", "learning_rate", "tensorboard_log", "verbose", "device"})
SCHEDULES = (FloatSchedule, ConstantSchedule, LinearSchedule)


class ExactCheckpointCallback(BaseCallback):
    """
    Writes checkpoints of a training, and resumes the training exactly when ``learn`` is called again::

        model = QA2C("CnnPolicy", env, seed=0)
        model.learn(15_000_000, callback=[EvalCallback(eval_env), ExactCheckpointCallback("runs/pong")])

    Run the same script again after a kill, and it resumes from the newest checkpoint in the folder: parameters, optimizer,
    counters and schedules, environments and emulators, random generators, callbacks, and the log files that were open.
    On a CPU every number after it is identical to that of a training that was never stopped.

    A checkpoint is written between two updates: at the start, every ``save_freq`` steps, after each evaluation, at the end
    if the training does not end inside a rollout, and after SIGINT or SIGTERM, which are then handled as usual. A second
    signal stops at once. An update that was interrupted is never saved: the next start repeats it.

    Evaluations draw from random generators of their own, so that they do not change the training.

    It works with every ``OnPolicyAlgorithm`` of SB3 that keeps no further state (A2C, PPO, QA2C) or names it in an attribute
    ``training_state`` (QPPO), and environments in a ``DummyVecEnv`` or an ``AleVecEnv``. The state of the other callbacks is
    kept too: plain data, random generators, environments and objects made of them. A callback with anything else is refused
    at the start.

    :param folder: Folder for the checkpoints of this one run
    :param save_freq: Environment steps (of all environments together) between two checkpoints
    :param keep: Number of checkpoints to keep: the newest ones
    :param verbose: Verbosity level: 0 for no output, 1 for a line when a training is resumed, 2 for each checkpoint
    :raises ValueError: if ``save_freq`` or ``keep`` is less than 1
    """

    def __init__(
        self, folder: str | os.PathLike | None = None, save_freq: int = 100_000, keep: int = 3, verbose: int = 1
    ) -> None:
        super().__init__(verbose)
        check_number("save_freq", save_freq, minimum=1)
        check_number("keep", keep, minimum=1)
        self.folder = None if folder is None else Path(folder)
        self.save_freq = save_freq
        self.keep = keep
        self.iteration = 0
        self._log_clock = LogClock(self)
        self._saved_at = -1
        self._evaluated = False
        self._rollout_is_complete = False
        # Of the other callbacks, as they were when the training started
        self._settings: dict[BaseCallback, dict[str, Any]] = {}
        self._evaluation_random_state: dict[str, Any] = {}
        # What is left to restore until every callback has started
        self._state_to_restore: dict[str, Any] | None = None
        self._error_at_start: BaseException | None = None
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._lock: FileLock | None = None

    # ---- the course of a training ----

    def _on_training_start(self) -> None:
        check_supported(self.model)
        if self.folder is None:
            raise ValueError("`folder` is missing: ExactCheckpointCallback(folder='runs/my-run')")
        self._rollout_is_complete, self._state_to_restore = False, None
        self._take_folder(self.folder)
        for evaluation in self._evaluations():
            self._isolate(evaluation)
        root = self.locals["callback"]
        if isinstance(root, CallbackList) and self._log_clock not in root.callbacks:
            # Behind all others: what they record at the end of a rollout is in its row. The list itself is the user's
            self._log_clock.init_callback(self.model)
            root.callbacks = [*root.callbacks, self._log_clock]

        for callback in self._callbacks():
            self._settings.setdefault(callback, callback_settings(callback))
        self._log_to_wandb(self.folder)

        checkpoint = newest_checkpoint(self.folder)
        if checkpoint is None:
            self._evaluation_random_state = seeded_random_state(self.model.seed)
        else:
            check_same_training(self.model, checkpoint)
            self._restore(checkpoint.state)
            if self.verbose >= 1:
                print(f"Resuming from step {self.model.num_timesteps} ({checkpoint.path})")
        self._write_run_file(finished=False)
        # `learn` may be called where another error is being handled
        self._error_at_start = sys.exc_info()[1]
        self._catch_signals()

    def _on_rollout_start(self) -> None:
        if self._state_to_restore is not None:
            self._restore_after_start(self._state_to_restore)
            self._state_to_restore = None
            # What cannot be kept is refused now, not hours later
            self._state()
        steps_since = self.model.num_timesteps - self._saved_at
        if self._saved_at < 0 or steps_since >= self.save_freq or self._evaluated or self._signal is not None:
            self.save()
        if self._signal is not None:
            self._pass_signal_on(self._signal)
        self._rollout_is_complete = False

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.iteration += 1
        self._rollout_is_complete = True
        if self.locals["callback"] is self:
            self._log_clock.on_rollout_end()

    def _on_training_end(self) -> None:
        if self._lock is None:
            return
        # RL Zoo calls this after an interrupted update too, which may be half done, and hides that it was interrupted
        learn_is_done = self._is_learning(sys._getframe()) and sys.exc_info()[1] is self._error_at_start
        if learn_is_done and self._rollout_is_complete:
            self.save()
        if learn_is_done and self._signal is None:
            self._write_run_file(finished=True)
        root = self.locals["callback"]
        if isinstance(root, CallbackList):
            root.callbacks = [callback for callback in root.callbacks if callback is not self._log_clock]
        self._leave_signals()
        self._lock.release(force=True)
        self._lock = None

    def save(self) -> None:
        """Write a checkpoint now. If that fails after the first one, the training continues with a warning."""
        assert self.folder is not None
        steps, steps_before = self.model.num_timesteps, self._saved_at
        if steps_before == steps:
            return
        self._saved_at, self._evaluated = steps, False
        try:
            path = save_checkpoint(self.folder, steps, self._state(), self.keep)
        except Exception as error:
            # A training of hours is worth more than one checkpoint. At its start nothing is lost yet
            if steps_before < 0 and not isinstance(error, OSError):
                raise
            advice = "The training continues, and the checkpoints before it stay."
            warnings.warn(f"No checkpoint of step {steps} could be written: {error} {advice}", stacklevel=2)
            return
        if self.verbose >= 2:
            print(f"Checkpoint: {path}")

    # ---- what a checkpoint holds ----

    def _state(self) -> dict[str, Any]:
        """:return: everything that the next update depends on, as plain data"""
        model, logger = self.model, self.model.logger
        assert isinstance(model, OnPolicyAlgorithm)
        tensorboard = [f for f in logger.output_formats if isinstance(f, TensorBoardOutputFormat)]
        for output_format in tensorboard:
            sync_files(Path(output_format.writer.log_dir))
        # A callback may refer to all this, which is not its own
        seen = {id(self), id(self._log_clock), *map(id, flatten(self.locals["callback"])), *map(id, parts_of(model))}
        state = model_state(model, seen)
        evaluation_envs = []
        for env in self._evaluation_envs():
            seen_there: set[int] = set()
            evaluation_envs.append(get_state(env, "the evaluation environment", seen_there))
            seen |= seen_there
        return {
            **state,
            "random": get_random_state(),
            "evaluation_random": self._evaluation_random_state,
            "evaluation_envs": evaluation_envs,
            "callbacks": [
                [type(callback).__name__, callback_state(callback, self._settings.get(callback, {}), seen)]
                for callback in self._callbacks()
            ],
            "iteration": self.iteration,
            "logger": {
                name: {key: value for key, value in getattr(logger, name).items() if is_plain(value)}
                for name in ("name_to_value", "name_to_count", "name_to_excluded")
            },
            "csv_keys": [list(f.keys) for f in logger.output_formats if isinstance(f, CSVOutputFormat)],
            "tensorboard": [os.path.relpath(f.writer.log_dir, self.folder) for f in tensorboard],
            "logs": [zlib.compress(read_log(file), 1) for file in self._open_logs()],
            "evaluation_files": [path.read_bytes() if path.exists() else None for path in self._evaluation_files()],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """
        :param state: What ``_state`` gave
        :raises CheckpointError: if callbacks or log files are other ones
        """
        restore_model(self.model, state)
        self._check_same_callbacks(state["callbacks"])
        called_before = self._called_before()
        for callback, (_, values) in zip(self._callbacks(), state["callbacks"], strict=True):
            plain = {name: value for name, value in values.items() if is_plain(value)}
            # They may change it before they get it once more
            put_attributes(callback, copy.deepcopy(plain) if callback in called_before else plain)
        evaluation_files = self._evaluation_files()
        check_same_number(
            "files are written by evaluations",
            evaluation_files,
            state["evaluation_files"],
            "give `EvalCallback` a `log_path` and a `best_model_save_path` where it had them",
        )
        for env, env_state in zip(self._evaluation_envs(), state["evaluation_envs"], strict=True):
            set_state(env, env_state, "the evaluation environment")
        self._evaluation_random_state = state["evaluation_random"]
        self._state_to_restore = state
        self.iteration = self._log_clock.offset = state["iteration"]
        self._saved_at = self.model.num_timesteps
        self._restore_logger(state)
        logs = self._open_logs()
        if len(logs) != len(state["logs"]):
            logs = self._open_logs(repeated=True)
        check_same_number("log files are open", logs, state["logs"], "give the environments and the logger the same files")
        for file, content in zip(logs, state["logs"], strict=True):
            rewrite_log(file, zlib.decompress(content))
        for output_format in self.model.logger.output_formats:
            if isinstance(output_format, WandbOutputFormat):
                output_format.log_again()
        for path, content in zip(evaluation_files, state["evaluation_files"], strict=True):
            if content is None:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != content:
                write_atomically(path, content)

    def _restore_after_start(self, state: dict[str, Any]) -> None:
        """
        Restore what other callbacks may have changed or made at the start of this process.

        :param state: What ``_state`` gave
        """
        # Those before this one were called already for this rollout, as they were when the checkpoint was written
        called_before = self._called_before()
        for callback, (name, values) in zip(self._callbacks(), state["callbacks"], strict=True):
            left = {key: value for key, value in values.items() if callback in called_before or not is_plain(value)}
            put(callback, left, name)
        for name, values in state["logger"].items():
            recorded = getattr(self.model.logger, name)
            recorded.clear()
            recorded.update(values)
        set_random_state(state["random"])

    def _check_same_callbacks(self, states: list[Any]) -> None:
        here, there = [type(callback).__name__ for callback in self._callbacks()], [name for name, _ in states]
        if here != there:
            raise CheckpointError(f"The callbacks are {here}, but the checkpoint was written with {there}: use the same ones.")

    def _restore_logger(self, state: dict[str, Any]) -> None:
        assert self.folder is not None
        logger = ContinuedLogger(self.model.logger)
        csv_formats = [f for f in logger.output_formats if isinstance(f, CSVOutputFormat)]
        check_same_number("CSV logs are open", csv_formats, state["csv_keys"], "give the logger the same outputs")
        for csv_format, keys in zip(csv_formats, state["csv_keys"], strict=True):
            csv_format.keys = keys
        folders = iter(state["tensorboard"])
        for i, output_format in enumerate(logger.output_formats):
            if isinstance(output_format, TensorBoardOutputFormat):
                folder = next(folders, None)
                if folder is not None:
                    continued = ContinuedTensorBoard.instead_of(output_format, self.folder / folder)
                    logger.output_formats[i] = continued
                    self._replace_in_callbacks(output_format, continued)
        self.model._logger = logger

    def _replace_in_callbacks(self, old: Any, new: Any) -> None:
        """Callbacks such as RL Zoo's ``RawStatisticsCallback`` hold the TensorBoard output."""
        for callback in self._callbacks():
            vars(callback).update({name: new for name, value in vars(callback).items() if value is old})

    def _log_to_wandb(self, folder: Path) -> None:
        run = active_wandb_run()
        output_formats = self.model.logger.output_formats
        if run is None or any(isinstance(output_format, WandbOutputFormat) for output_format in output_formats):
            return
        if run.settings.sync_tensorboard and sys.modules["wandb"].patched["tensorboard"]:
            warnings.warn(
                "Weights & Biases copies the rows of TensorBoard, which loses some when the process is killed. Leave "
                "`sync_tensorboard=True` out: with ExactCheckpointCallback all rows are logged anyway.",
                stacklevel=2,
            )
            return
        output_formats.append(WandbOutputFormat(run, folder / "wandb.jsonl"))

    # ---- what it looks at ----

    def _callbacks(self) -> Iterator[BaseCallback]:
        """:return: all callbacks of the training with state, this one left out"""
        stateless = (CallbackList, ProgressBarCallback)
        return (
            callback
            for callback in flatten(self.locals["callback"])
            if callback not in (self, self._log_clock) and not isinstance(callback, stateless)
        )

    def _called_before(self) -> set[BaseCallback]:
        """:return: the callbacks that ``learn`` calls before this one"""
        return set(itertools.takewhile(lambda callback: callback is not self, flatten(self.locals["callback"])))

    def _evaluations(self) -> list[EvalCallback]:
        return [callback for callback in self._callbacks() if isinstance(callback, EvalCallback)]

    def _evaluation_envs(self) -> list[VecEnv]:
        return [evaluation.eval_env for evaluation in self._evaluations()]

    def _evaluation_files(self) -> list[Path]:
        """:return: the files that evaluations write anew each time"""
        paths = []
        for evaluation in self._evaluations():
            if evaluation.log_path is not None:
                paths.append(Path(evaluation.log_path).with_suffix(".npz"))
            if evaluation.best_model_save_path is not None:
                paths.append(Path(evaluation.best_model_save_path, "best_model.zip"))
        return paths

    def _open_logs(self, repeated: bool = False) -> list[IO[str]]:
        """
        :param repeated: Whether to list some more than once, as older checkpoints do
        :return: the files that monitors and the logger append to
        """
        assert self.model.env is not None
        writers = [writer for env in (self.model.env, *self._evaluation_envs()) for writer in results_writers(env, repeated)]
        files = [writer.file_handler for writer in writers]
        for output_format in self.model.logger.output_formats:
            if isinstance(output_format, CSVOutputFormat | JSONOutputFormat | WandbOutputFormat) or (
                isinstance(output_format, HumanOutputFormat) and output_format.own_file
            ):
                files.append(output_format.file)
        return files

    # ---- what it does to the process ----

    def _isolate(self, evaluation: EvalCallback) -> None:
        """
        :param evaluation: Evaluation that shall neither draw from the training's random generators nor disturb them
        """
        if getattr(evaluation, "_isolated_by", None) is self:
            return
        evaluate = evaluation._on_step

        def evaluate_apart() -> bool:
            if evaluation.eval_freq <= 0 or evaluation.n_calls % evaluation.eval_freq != 0:
                return evaluate()
            self._evaluated = True
            with random_state(self._evaluation_random_state):
                return evaluate()

        evaluation._on_step = evaluate_apart  # type: ignore[method-assign]
        evaluation._isolated_by = self  # type: ignore[attr-defined]

    def _take_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / "lock", is_singleton=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise CheckpointError(f"Another process is training in {folder}: wait for it, or use another folder.") from None

    def _write_run_file(self, finished: bool) -> None:
        assert self.folder is not None
        content = {
            "command": sys.argv,
            "finished": finished,
            "seed": self.model.seed,
            "num_timesteps": self.model.num_timesteps,
            "wandb": wandb_identity(),
        }
        write_atomically(self.folder / "run.json", (json.dumps(content, indent=1) + "\n").encode())

    def _catch_signals(self) -> None:
        self._signal = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                left_behind = getattr(signal.getsignal(number), "__self__", None)
                if isinstance(left_behind, ExactCheckpointCallback):
                    left_behind._leave_signals()
                # One that is ignored, as SIGINT is by a job in the background, stays so
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None or not self._is_learning(frame):
            self._leave_signals()
            signal.raise_signal(number)
            return
        self._signal = number
        name = signal.Signals(number).name
        # Not with `print`: the signal may have come inside another one, which holds its lock
        message = f"\n{name}: stopping with a checkpoint after this update or evaluation. A second one stops at once.\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())

    def _is_learning(self, frame: FrameType | None) -> bool:
        """
        :param frame: Where the program is
        :return: Whether that is within ``learn``; after an error in it, which no callback is told of, it is not
        """
        while frame is not None:
            if frame.f_code.co_name == "learn" and frame.f_locals.get("self") is self.model:
                return True
            frame = frame.f_back
        return False

    def _pass_signal_on(self, number: int) -> None:
        """
        :param number: Signal that came during the last update, to be handled as if it came now
        """
        self._leave_signals()
        signal.raise_signal(number)
        # It did not stop the process, nor raise KeyboardInterrupt
        self._catch_signals()

    def _leave_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class LogClock(BaseCallback):
    """
    Writes the log of a resumed training when it is due. ``learn`` counts its iterations from 0 again and would write it after
    as many iterations since the start of the process, under the wrong number.

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
        assert isinstance(model, OnPolicyAlgorithm) and isinstance(model.logger, ContinuedLogger)
        if iteration % log_interval == 0:
            model.dump_logs(iteration)
        if (iteration - self.offset) % log_interval == 0:
            model.logger.hold = True


def resume(model: SelfOnPolicyAlgorithm, path: str | os.PathLike) -> SelfOnPolicyAlgorithm:
    """
    Bring a model to where a training was, ready to go on.

    With an ``ExactCheckpointCallback`` in the same folder, ``learn`` with the arguments of the first time does the rest.
    Without it, ``model.learn(steps_to_go, reset_num_timesteps=False)`` goes on with the same numbers, but in new log files.

    :param model: A model that was made as the one that was trained, with environments made as its were
    :param path: Folder of checkpoints, for the newest good one (with a warning if the training went on behind it and ended
        inside a rollout, where there is none), or one of them
    :return: The model: parameters, optimizer, counters, environments and random generators are those of the checkpoint
    :raises CheckpointError: if there is none, it is damaged, or it is that of another training
    """
    check_supported(model)
    path = Path(path)
    checkpoint = load_checkpoint(path) if not path.is_dir() else newest_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"There is no checkpoint in {path}.")
    if model._last_obs is None:
        assert model.env is not None
        model.env.reset()
    check_same_training(model, checkpoint)
    restore_model(model, checkpoint.state)
    set_random_state(checkpoint.state["random"])
    run = read_json(path / "run.json") if path.is_dir() else {}
    if run.get("finished") and run.get("num_timesteps", 0) > model.num_timesteps:
        warnings.warn(
            f"The training in {path} ended inside a rollout, at step {run['num_timesteps']}, and its newest checkpoint is of "
            f"step {model.num_timesteps}: the model is the one of then. `learn` with ExactCheckpointCallback plays the rest.",
            stacklevel=2,
        )
    return model


def check_supported(model: BaseAlgorithm) -> None:
    """
    :param model: Model to train
    :raises ValueError: if it cannot be resumed exactly
    """
    if not isinstance(model, OnPolicyAlgorithm):
        raise ValueError(
            f"{type(model).__name__} cannot be resumed exactly: only on-policy algorithms can, such as QA2C, A2C and PPO."
        )
    if model.use_sde or hasattr(model, "_last_lstm_states"):
        raise ValueError("A training with generalized state-dependent exploration or an LSTM cannot be resumed exactly.")


def parts_of(model: OnPolicyAlgorithm) -> list[Any]:
    """
    :param model: Model
    :return: itself and the objects that belong to it
    """
    parts = [value for value in vars(model).values() if not is_plain(value)]
    return [model, *parts, model.policy.optimizer, *model.policy.modules(), *model.policy.parameters()]


def model_state(model: OnPolicyAlgorithm, seen: set[int] | None = None) -> dict[str, Any]:
    """
    :param model: Model, between two updates
    :param seen: The identities of the environment and of what is inside it are added to it
    :return: what makes its training this one, and all that its next update depends on, as plain data
    """
    seen_in_env: set[int] = set()
    env = get_state(model.env, "the environment", seen_in_env)
    if seen is not None:
        seen |= seen_in_env
    return {
        "training": training_settings(model),
        "model": {name: getattr(model, name) for name in (*MODEL_ATTRIBUTES, *training_state(model))},
        "elapsed": time.time_ns() - model.start_time,
        "policy": dict(model.policy.state_dict()),
        "optimizer": model.policy.optimizer.state_dict(),
        "env": env,
    }


def restore_model(model: BaseAlgorithm, state: dict[str, Any]) -> None:
    """
    :param model: Model made as the one that was trained; its environments were reset once
    :param state: What ``model_state`` gave
    """
    assert isinstance(model, OnPolicyAlgorithm)
    model.policy.load_state_dict(state["policy"])
    model.policy.optimizer.load_state_dict(state["optimizer"])
    set_state(model.env, state["env"], "the environment")
    vars(model).update(state["model"])
    model.start_time = time.time_ns() - state["elapsed"]


def check_same_training(model: BaseAlgorithm, checkpoint: Checkpoint) -> None:
    """
    :param model: Model that is to go on
    :param checkpoint: Checkpoint that it is to go on from
    :raises CheckpointError: if it is that of another training; the message names the newest one beside it that is of this one
    """
    different = differences(model, checkpoint.state)
    if not different:
        return
    advice = "There is none of this training in its folder: use another folder."
    for path in reversed(checkpoints_in(checkpoint.path.parent)):
        with contextlib.suppress(CheckpointError):
            if not differences(model, load_checkpoint(path).state):
                advice = f"The newest one of this training there is {path.name}."
                break
    raise CheckpointError(f"{checkpoint.path} is of another training: {'; '.join(different)}. {advice}")


def check_same_number(what: str, here: Sized, there: Sized, advice: str) -> None:
    """
    :param what: What is counted, such as "log files are open"
    :param here: Those of this process
    :param there: Those of the checkpoint
    :param advice: What to do
    :raises CheckpointError: if they are not as many
    """
    if len(here) != len(there):
        raise CheckpointError(f"{len(here)} {what}, but {len(there)} were when the checkpoint was written: {advice}.")


def differences(model: BaseAlgorithm, state: dict[str, Any]) -> list[str]:
    """
    :param model: Model that is to go on
    :param state: What ``model_state`` gave
    :return: what differs, as far as both name it: former versions of this package compared fewer settings
    """
    here, there = training_settings(model), state["training"]
    different = [
        f"{name} is {here[name]!r}, and was {there[name]!r}"
        for name in here
        if name in there and not equal(here[name], there[name])
    ]
    if not different:
        now, then = (
            {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for tensors in (model.policy.state_dict(), state["policy"])
        )
        others = [name for name in {**then, **now} if now.get(name) != then.get(name)]
        different = [f"the shape of {name} is {now.get(name)}, and was {then.get(name)}" for name in others]
    return different


def training_state(model: BaseAlgorithm) -> tuple[str, ...]:
    """
    :param model: Model
    :return: names of further attributes that move with its training, which an algorithm may list under this name
    """
    return getattr(model, "training_state", ())


def training_settings(model: BaseAlgorithm) -> dict[str, Any]:
    """
    :param model: Model
    :return: what must be equal for one training to resume another
    """
    assert model.env is not None
    spec = model.env.get_attr("spec")[0]
    moving = set(training_state(model))
    arguments = sorted(constructor_arguments(model) - ARGUMENTS_NOT_COMPARED - moving)
    policy = model.policy._get_constructor_parameters()
    return {
        "algorithm": type(model).__name__,
        "environment": None if spec is None else spec.id,
        "n_envs": model.n_envs,
        "policy": type(model.policy).__name__,
        **settings({"learning_rate": model.lr_schedule}),
        **settings({name: getattr(model, name) for name in arguments if hasattr(model, name)}),
        # Its layers and its optimizer, and arguments that it does not tell
        **settings(policy),
        "policy_kwargs": settings({name: value for name, value in model.policy_kwargs.items() if name not in policy}),
    }


def settings(values: dict[str, Any]) -> dict[str, Any]:
    """
    :param values: Arguments by name
    :return: those that can be compared, as plain data: classes by their name, schedules by two of their values
    """
    described: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, type):
            described[name] = value.__name__
        elif isinstance(value, SCHEDULES):
            described[name] = [float(value(progress)) for progress in (1.0, 0.5)]
        elif is_plain(value):
            described[name] = value
    return described


def constructor_arguments(obj: Any) -> set[str]:
    """
    :param obj: Any object
    :return: names of all parameters that the constructors of its class and of the base classes have
    """
    return {name for kind in type(obj).__mro__ for name in inspect.signature(kind.__init__).parameters}  # type: ignore[misc]


def flatten(callback: BaseCallback) -> Iterator[BaseCallback]:
    """
    :param callback: A callback
    :return: itself, and those that it calls
    """
    yield callback
    children: list[BaseCallback | None] = list(callback.callbacks) if isinstance(callback, CallbackList) else []
    if isinstance(callback, EventCallback):
        children += [callback.callback, getattr(callback, "callback_on_new_best", None)]
    for child in children:
        if child is not None:
            yield from flatten(child)


@take.register
def _(obj: BaseCallback, name: str, seen: set[int]) -> dict[str, Any]:
    return take_attributes(obj, name, seen, CALLBACK_ATTRIBUTES_SKIPPED)


def callback_state(callback: BaseCallback, settings: dict[str, Any], seen: set[int]) -> dict[str, Any]:
    """
    :param callback: A callback
    :param settings: What ``callback_settings`` gave
    :param seen: Identities of objects that it may refer to, but that are not its own
    :return: the state of its attributes by name, without settings that the training leaves as they are
    :raises StateError: if some attribute's state cannot be taken; the message names it
    """
    services = {name for name, value in vars(callback).items() if is_service(value)}
    values = take_attributes(callback, type(callback).__name__, seen, CALLBACK_ATTRIBUTES_SKIPPED | services)
    return {name: value for name, value in values.items() if not (name in settings and equal(value, settings[name]))}


def is_service(value: Any) -> bool:
    """
    :param value: Value of a callback's attribute
    :return: Whether it is a display, or the handle of a service
    """
    return f"{type(value).__module__}.".startswith(tuple(f"{package}." for package in SERVICES))


def callback_settings(callback: BaseCallback) -> dict[str, Any]:
    """
    :param callback: A callback that has not been called yet
    :return: its attributes that have the name of a parameter of its constructor, and its strings, such as paths
    """
    parameters = constructor_arguments(callback)
    attributes = plain_attributes(callback).items()
    return copy.deepcopy({name: value for name, value in attributes if name in parameters or isinstance(value, str)})


def wandb_run_id(folder: str | os.PathLike) -> str | None:
    """
    For ``wandb.init(id=wandb_run_id("runs/pong"), resume="allow")``, which goes on with the run that was.

    :param folder: Folder of checkpoints
    :return: id of the training's run of Weights & Biases; None if there is none yet
    """
    run = read_json(Path(folder, "run.json")).get("wandb")
    return None if run is None else run["id"]


def active_wandb_run() -> Any:
    """:return: the run of Weights & Biases that is active; None if there is none, or W&B is not even imported"""
    return getattr(sys.modules.get("wandb"), "run", None)


def wandb_identity() -> dict[str, str] | None:
    """:return: id, project and entity of the run of Weights & Biases that is active, if there is one"""
    run = active_wandb_run()
    return None if run is None else {"id": run.id, "project": run.project, "entity": run.entity}
