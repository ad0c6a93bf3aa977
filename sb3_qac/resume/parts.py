"""What a checkpoint holds of a run: the model, random generators, callbacks, evaluations and logs."""

import copy
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, ProgressBarCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.nested_callbacks import flatten
from sb3_qac.common.random_state import get_random_state, random_state, seeded_random_state, set_random_state
from sb3_qac.resume.callback_state import CALLBACK_ATTRIBUTES_SKIPPED, callback_settings, callback_state
from sb3_qac.resume.checkpoints import CheckpointError
from sb3_qac.resume.environments import NEW_EPISODES, begin_new_episodes, restore_environments, take_environments
from sb3_qac.resume.identity import different_settings, training_settings
from sb3_qac.resume.logs import LogIntervalCallback, Logs, restore_rows, rows_state
from sb3_qac.resume.model import model_state, parts_of, restore_model, without_settings
from sb3_qac.resume.state import (
    ObjectState,
    StateError,
    check_objects,
    is_plain,
    objects_in,
    restore_attributes,
    set_attributes,
)
from sb3_qac.resume.wandb import restore_wandb, wandb_rows


class RunState:
    """
    The state of a run: taken for a checkpoint, and restored from one.

    :param model: Model whose ``learn`` has begun
    :param root: Callback of ``learn``, which calls all others
    :param writer: The callback that writes checkpoints
    :param folder: Folder of the checkpoints
    :param new_episodes: Whether the environments begin new episodes at a resume
    :param settings: Callbacks and their settings when they were first used, by identity; those of this run are added
    """

    def __init__(
        self,
        model: OnPolicyAlgorithm,
        root: BaseCallback,
        writer: BaseCallback,
        folder: Path,
        new_episodes: bool,
        settings: dict[int, tuple[BaseCallback, dict[str, Any]]],
    ) -> None:
        self.model = model
        self.root = root
        self.writer = writer
        self.folder = folder
        self.new_episodes = new_episodes
        self.settings = settings
        for callback in self.callbacks():
            settings.setdefault(id(callback), (callback, callback_settings(callback)))
        self.training_settings = training_settings(model)
        self.evaluation_random = seeded_random_state(model.seed)
        # Class of each object in the state when the run started, by its place, and those of its earlier starts
        self.objects: dict[str, str] | None = None
        self.objects_before: dict[str, str] = {}
        # What checkpoints do not have, so that a resume is not exact
        self.left_out: set[str] = set()

    def callbacks(self) -> Iterator[BaseCallback]:
        """:return: all callbacks that have state, without the one that writes checkpoints"""
        stateless = (CallbackList, ProgressBarCallback, LogIntervalCallback)
        return (each for each in flatten(self.root) if not isinstance(each, stateless) and each is not self.writer)

    def evaluations(self) -> list[EvalCallback]:
        """:return: the callbacks that evaluate"""
        return [callback for callback in self.callbacks() if isinstance(callback, EvalCallback)]

    def _called_before(self) -> set[int]:
        """:return: identities of the callbacks that ``learn`` calls before the one that writes checkpoints"""
        return set(map(id, itertools.takewhile(lambda callback: callback is not self.writer, flatten(self.root))))

    def _envs(self) -> list[VecEnv]:
        """:return: the environments, then those of each evaluation"""
        assert self.model.env is not None
        return [self.model.env, *(evaluation.eval_env for evaluation in self.evaluations())]

    # ---- taken ----

    def checked(self) -> dict[str, Any]:
        """
        :return: everything that the next update depends on, as plain data
        :raises StateError: if a state cannot be taken, or the next start will not have an object whose state is in it. After
            the start, attributes of callbacks and of the algorithm are left out instead, with a warning, because the rest of
            a long run is worth more.
        """
        left_out: dict[str, str] = {}
        state = self._taken(left_out, strict=self.objects is None)
        # Evaluations create the objects of their environments, and a resume resets these too
        required = {"the environment": state["env"], "the rollout buffer": ObjectState("", state["rollout_buffer"])}
        further = [*state["callbacks"], [type(self.model).__name__, state["algorithm"]]]
        if self.objects is None:
            # What was restored may lack an object that the next start has, such as one that is gone for a part of an episode
            self.objects = dict(self.objects_before)
            for name, part in (*required.items(), *((name, ObjectState("", values)) for name, values in further)):
                self.objects.update(objects_in(part, name))
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
        different = different_settings(state["training"], self.training_settings)
        kept = {"VecNormalize", *state["algorithm"]}
        left_out.update({name: f"{text} when the run started." for name, text in different.items() if name not in kept})
        for name in sorted(left_out.keys() - self.left_out):
            warnings.warn(f"Checkpoints do not have {name}. A resume takes that of its start: {left_out[name]}", stacklevel=2)
        self.left_out |= left_out.keys()
        return {**state, "training": self.training_settings, "objects": self.objects, "left_out": sorted(left_out)}

    def _reason_against(self, state: Any, name: str) -> str | None:
        """
        :param state: Result of ``get_state``
        :param name: What to call it
        :return: why a checkpoint cannot have it: the next start will not have an object whose state is in it
        """
        assert self.objects is not None
        for place, kind in objects_in(state, name):
            if self.objects.get(place) != kind:
                before = self.objects.get(place, "not there")
                return (
                    f"{place} is a {kind}, and was {before} when the run started, so a resume would not have it. "
                    "Create it in the constructor, in `reset` or in `_on_training_start`."
                    + (f" {NEW_EPISODES}" if place.startswith("the environment") else "")
                )
        return None

    def _taken(self, left_out: dict[str, str], strict: bool) -> dict[str, Any]:
        """
        :param left_out: Attributes of the algorithm and of callbacks whose state cannot be taken are added to it, with the
            reason
        :param strict: Whether those of callbacks are an error instead
        :return: the state, not checked
        """
        logger, (env, *evaluation_envs) = self.model.logger, self._envs()
        logs = Logs(logger, [env, *evaluation_envs], self.folder).state()
        seen = self._seen()
        state = model_state(self.model, seen, left_out, self.new_episodes)
        return {
            **state,
            "random": get_random_state(),
            "evaluation_random": self.evaluation_random,
            "evaluation_envs": [
                take_environments(each, "the evaluation environment", seen, self.new_episodes) for each in evaluation_envs
            ],
            "callbacks": self._callback_states(seen, None if strict else left_out),
            "logger": rows_state(logger),
            **logs,
            "wandb_rows": wandb_rows(logger),
        }

    def _seen(self) -> set[int]:
        """:return: identities of objects to which a callback may refer, but whose state is not its own"""
        return {*map(id, flatten(self.root)), *map(id, parts_of(self.model))}

    def _callback_states(self, seen: set[int], left_out: dict[str, str] | None) -> list[list[Any]]:
        """
        :param seen: Identities of objects to which callbacks may refer, with those in the environments
        :param left_out: As for ``callback_state``
        :return: name of the class and state of each callback
        """
        if self.new_episodes:
            seen.update(id(env) for callback in self.callbacks() for env in environments_of(callback).values())
        states = []
        for callback in self.callbacks():
            _, settings = self.settings.get(id(callback), (callback, {}))
            states.append([type(callback).__name__, callback_state(callback, settings, seen, self.model.policy, left_out)])
        return states

    # ---- restored ----

    def restore(self, state: dict[str, Any]) -> None:
        """
        :param state: Result of ``checked``
        :raises CheckpointError: if callbacks or log files differ
        """
        logger, envs = self.model.logger, self._envs()
        here, there = [type(callback).__name__ for callback in self.callbacks()], [name for name, _ in state["callbacks"]]
        if here != there:
            raise CheckpointError(f"The callbacks are {here}, but the checkpoint was written with {there}: use the same ones.")
        for evaluation, (_, values) in zip(self.callbacks(), state["callbacks"], strict=True):
            if not isinstance(evaluation, EvalCallback):
                continue
            results, n_episodes = values.get("evaluations_results"), evaluation.n_eval_episodes
            if evaluation.log_path is not None and results and len(results[-1]) != n_episodes:
                raise CheckpointError(
                    f"`n_eval_episodes` of EvalCallback is {n_episodes}, and was {len(results[-1])}. With a `log_path` all "
                    "evaluations are in one table, so they must have equally many episodes: give the earlier number."
                )
        logs = Logs(logger, envs, self.folder)
        contents = logs.contents_of(state)
        restore_model(self.model, state, self.new_episodes)
        called_before = self._called_before()
        for callback, (_, values) in zip(self.callbacks(), state["callbacks"], strict=True):
            kept = without_settings(callback, values, CALLBACK_ATTRIBUTES_SKIPPED)
            plain = {name: value for name, value in kept.items() if is_plain(value)}
            # A copy: they may change the values before these are restored a second time
            set_attributes(callback, copy.deepcopy(plain) if id(callback) in called_before else plain)
        seed, steps = self.model.seed, self.model.num_timesteps
        for i, (env, env_state) in enumerate(zip(envs[1:], state["evaluation_envs"], strict=True), start=1):
            if self.new_episodes:
                begin_new_episodes(env, env_state, None if seed is None else (seed, steps, i))
            else:
                # Some create objects in `reset`. It may draw from the global generators, which are restored later
                env.reset()
                restore_environments(env, env_state, "the evaluation environment")
        self.evaluation_random = state["evaluation_random"]
        with random_state(dict(self.evaluation_random)):
            pass  # What cannot be set is an error now, not at the first evaluation
        self.objects_before = dict(state["objects"])
        logs.restore(state, contents)
        restore_wandb(logger, state["wandb_rows"])
        # The run began with its first start
        self.training_settings |= state["training"]

    def restore_after_start(self, state: dict[str, Any]) -> None:
        """
        Restore state that other callbacks may have changed or created when this run started.

        :param state: Result of ``checked``
        """
        seen = self._seen()
        for env in self._envs():
            take_environments(env, "the environment", seen, self.new_episodes)
        here = self._callback_states(seen, {})
        # Callbacks before the writer were already called for this rollout, as when the checkpoint was written
        called_before = self._called_before()
        for callback, (name, values), (_, own) in zip(self.callbacks(), state["callbacks"], here, strict=True):
            kept = without_settings(callback, values, CALLBACK_ATTRIBUTES_SKIPPED)
            left = {key: value for key, value in kept.items() if id(callback) in called_before or not is_plain(value)}
            if self.new_episodes:
                left = {key: value for key, value in left.items() if key not in environments_of(callback)}
            check_objects(own, left, name)
            restore_attributes(callback, left, name)
        restore_rows(self.model.logger, state["logger"])
        set_random_state(state["random"])


def environments_of(callback: BaseCallback) -> dict[str, gym.Env | VecEnv]:
    """
    :param callback: A callback
    :return: the environments among its attributes, by name
    """
    return {name: value for name, value in vars(callback).items() if isinstance(value, gym.Env | VecEnv)}
