"""Snapshots of a run: models without training-only state, and the statistics of normalized environments."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize


class SnapshotCallback(BaseCallback):
    """
    Saves the model at the start and at every quarter of the run, without the state that only training needs. If its
    environments are normalized, their statistics are saved too.

    :param folder: Folder for SB3's files, such as "0003000000.zip", and "0003000000.pkl" of ``VecNormalize``
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _on_training_start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        if self.model.num_timesteps == 0:
            self.save()

    def _on_step(self) -> bool:
        every = max(self.model._total_timesteps // 4, 1)
        steps = self.model.num_timesteps
        if steps // every > (steps - self.training_env.num_envs) // every:
            self.save()
        return True

    def save(self) -> None:
        """Write the current model."""
        path = self.folder / f"{self.model.num_timesteps:010}.zip"
        save_for_playing(self.model, path)
        normalization = self.model.get_vec_normalize_env()
        if normalization is not None:
            normalization.save(str(path.with_suffix(".pkl")))


def save_for_playing(model: BaseAlgorithm, path: Path) -> None:
    """
    Save a model for SB3's ``load`` without its last observations and without the state of the policy's optimizer, which is
    half the size. The optimizers of SAC's actor and critics stay.

    :param model: Model
    :param path: File to write
    """
    optimizer = getattr(model.policy, "optimizer", None)
    with contextlib.ExitStack() as stack:
        if optimizer is not None:
            stack.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.state = type(optimizer.state)(dict)
        model.save(path, exclude=["_last_obs", "_last_original_obs", "ep_info_buffer", "ep_success_buffer"])


def points_of(snapshots: Sequence[Path], n_points: int) -> list[Path]:
    """
    :param snapshots: Snapshots in their order
    :param n_points: How many to choose
    :return: that many snapshots, evenly spaced from the first to the last; the last if it is one, all if there are fewer
    """
    if n_points == 1:
        return list(snapshots[-1:])
    chosen = (
        np.linspace(0, len(snapshots) - 1, n_points).round().astype(int)
        if len(snapshots) > n_points
        else range(len(snapshots))
    )
    return [snapshots[i] for i in chosen]


def normalize_as(snapshot: Path, env: VecEnv) -> None:
    """
    Set the normalization of environments to the statistics of a snapshot, and stop updating it.

    :param snapshot: Snapshot of a run
    :param env: Environments of the run; if they are not normalized, nothing changes
    :raises ValueError: if the snapshot has no statistics
    """
    normalization = unwrap_vec_normalize(env)
    if normalization is None:
        return
    statistics = snapshot.with_suffix(".pkl")
    if not statistics.is_file():
        raise ValueError(f"The environments of this run are normalized, but their statistics are missing: {statistics}")
    saved = VecNormalize.load(str(statistics), normalization.venv)
    # Observations that are not normalized have no statistics
    for name in {"obs_rms", "ret_rms"} & vars(saved).keys():
        setattr(normalization, name, getattr(saved, name))
    normalization.training = False
