"""Checks of an installation: does the RL Zoo hook work, and what is wrong if not."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sb3_qac import __version__

HOOK = "sb3_qac_zoo_hook"
# All of them contain the module cv2
OPENCV_BUILDS = tuple(f"opencv-{name}" for name in ("python", "python-headless", "contrib-python", "contrib-python-headless"))
# Seconds for another interpreter to import RL Zoo
TIMEOUT = 120
REINSTALL = "Install again, in the checkout: `pip install --force-reinstall --no-deps .`, or with `-e .` to work on the code."


class Finding(NamedTuple):
    """
    :param what: What was checked
    :param ok: Whether it is in order
    :param found: What was found
    :param cure: What to do if not
    """

    what: str
    ok: bool
    found: str
    cure: str = ""


def examine() -> list[Finding]:
    """:return: One finding for each thing that the plugin needs"""
    switch = _hook_switch()
    findings = [
        Finding("Python", sys.version_info >= (3, 10), platform.python_version(), "Python 3.10 or newer is needed."),
        _versions(),
        _opencv(),
        _atari(),
        _hook_files(),
        switch,
    ]
    try:
        # Here, because it imports PyTorch, SB3 and others, and any of them may be missing or broken
        from sb3_qac.zoo import ALGORITHMS, presets
    except Exception as error:
        cure = "Install that package again, in a version that `pip check` does not object to."
        return [*findings, Finding("imports", False, f"`import sb3_qac.zoo`: {type(error).__name__}: {error}", cure)]
    zoo_command = _zoo_command(list(ALGORITHMS))
    if not switch.ok:
        # The new interpreter has only found the same
        zoo_command = zoo_command._replace(cure=switch.cure)
    return [*findings, _presets([presets(algo) for algo in ALGORITHMS]), zoo_command]


def _versions() -> Finding:
    names = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "torch", "gymnasium", "ale-py", "wandb", "numpy")
    needed = _requirements()
    found, wrong = [f"sb3_qac {__version__}"], []
    for name in names:
        version, requirement = _version(name), needed.get(canonicalize_name(name), Requirement(name))
        is_tested = version is not None and requirement.specifier.contains(version, prereleases=True)
        found.append(f"{name} {version or 'missing'}" + ("" if is_tested else f" (needed: {requirement.specifier or 'any'})"))
        if not is_tested:
            wrong.append(f'"{requirement}"')
    return Finding("packages", not wrong, ", ".join(found), f"`pip install {' '.join(wrong)}`")


def _requirements() -> dict[str, Requirement]:
    """:return: What this package needs without extras, by canonical name; nothing if it is not installed"""
    try:
        needed = map(Requirement, importlib.metadata.requires("sb3_qac") or [])
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {canonicalize_name(requirement.name): requirement for requirement in needed if requirement.marker is None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _opencv() -> Finding:
    builds = [name for name in OPENCV_BUILDS if _version(name)]
    return Finding(
        "OpenCV",
        len(builds) == 1,
        " and ".join(builds) or "missing",
        "Install one build and no other, since each overwrites files of the others: "
        f"`pip uninstall -y {' '.join(OPENCV_BUILDS)} && pip install opencv-python-headless`.",
    )


def _atari() -> Finding:
    known = "PongNoFrameskip-v4" in gym.registry
    return Finding("Atari", known, f"PongNoFrameskip-v4 is {'known' if known else 'unknown'}", "`pip install ale-py`")


def _presets(paths: list[Path]) -> Finding:
    try:
        counts = [f"{path.name} with {len(yaml.safe_load(path.read_text()))} entries" for path in paths]
        return Finding("presets", True, f"{paths[0].parent}: {', '.join(counts)}")
    # An empty file has no entries to count, and one that was damaged may be no text
    except (OSError, TypeError, UnicodeDecodeError, yaml.YAMLError) as error:
        return Finding("presets", False, str(error), REINSTALL)


def _hook_files() -> Finding:
    spec = importlib.util.find_spec(HOOK)
    if spec is None or spec.origin is None:
        return Finding("hook files", False, f"{HOOK}.py is not installed", REINSTALL)
    startup_file = Path(spec.origin).with_suffix(".start" if sys.version_info >= (3, 15) else ".pth")
    return Finding("hook files", startup_file.is_file(), str(startup_file), f"{startup_file.name} is missing. {REINSTALL}")


def _hook_switch() -> Finding:
    value = os.environ.get("SB3_QAC_ZOO_HOOK")
    return Finding(
        "hook switch",
        value != "0",
        "on" if value != "0" else "off, SB3_QAC_ZOO_HOOK=0",
        "`unset SB3_QAC_ZOO_HOOK`, or run RL Zoo as `python -m sb3_qac zoo train ...`.",
    )


def _zoo_command(algorithms: list[str]) -> Finding:
    """The decisive check: does a new interpreter that imports only RL Zoo find the algorithms there?"""
    # This module imports the other two in which the hook registers
    program = "import json, rl_zoo3.exp_manager as m; print(json.dumps({name: a.__name__ for name, a in m.ALGOS.items()}))"
    try:
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        cure = "Run `python -m sb3_qac doctor` again when the machine is less busy."
        return Finding("RL Zoo", False, f"`import rl_zoo3.exp_manager` takes more than {TIMEOUT} seconds", cure)
    printed = run.stderr.strip().splitlines() or ["The start-up hook did not run."]
    # The hook's own warning, if there is one, up to the advice to run this command
    refused = re.search(r"sb3_qac could not register .*?(?= `python -m sb3_qac doctor`)", run.stderr)
    live = run.returncode == 0 and refused is None and all(f'"{name}"' in run.stdout for name in algorithms)
    misplaced = (
        f"{printed[-1]} Files named {HOOK}.* must lie in the environment's own site-packages, and Python must not run with "
        "-S. Until then: `python -m sb3_qac zoo train ...`."
    )
    return Finding(
        "RL Zoo",
        live,
        f"`python -m rl_zoo3.train` {'knows' if live else 'does not know'} {', '.join(algorithms)}",
        refused[0] if refused else misplaced,
    )
