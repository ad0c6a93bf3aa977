"""Checks of an installation: does the RL Zoo hook work, and what is wrong if not."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sb3_qac import __version__

HOOK = "sb3_qac_zoo_hook"
PACKAGES = ("stable_baselines3", "sb3_contrib", "rl_zoo3", "torch", "gymnasium", "ale-py", "wandb", "numpy")
# All of them contain the module cv2
OPENCV_BUILDS = tuple(f"opencv-{name}" for name in ("python", "python-headless", "contrib-python", "contrib-python-headless"))
REINSTALL = "Install again, in the checkout: `pip install --force-reinstall --no-deps .`, or with `-e .` to work on the code."
# It imports all modules in which the hook registers, and prints the algorithms that the hook has not registered
IMPORT_ZOO = (
    "import rl_zoo3.exp_manager as m; from sb3_qac.zoo import ALGORITHMS as ours; "
    "print(', '.join(ours), '|', *(name for name in ours if m.ALGOS.get(name) is not ours[name]))"
)


class Finding(NamedTuple):
    """
    :param what: What was checked
    :param ok: Whether it is in order
    :param found: What was found
    :param fix: What to do if not
    """

    what: str
    ok: bool
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """:return: One finding for each thing that the plugin needs"""
    builds = [name for name in OPENCV_BUILDS if _version(name)]
    one_build = f"They overwrite each other: `pip uninstall -y {' '.join(OPENCV_BUILDS)} && pip install {OPENCV_BUILDS[1]}`."
    opencv = Finding("OpenCV", len(builds) == 1, " and ".join(builds) or "missing", one_build)
    atari = Finding("Atari", "PongNoFrameskip-v4" in gym.registry, "PongNoFrameskip-v4", "`pip install ale-py`")
    return [_versions(), opencv, atari, _hook(), _zoo_command()]


def _versions() -> Finding:
    requirements = map(Requirement, importlib.metadata.requires("sb3_qac") or [])
    needed = {canonicalize_name(each.name): each for each in requirements if each.marker is None}
    found, wrong = [f"sb3_qac {__version__}"], []
    for name in PACKAGES:
        version, requirement = _version(name), needed.get(canonicalize_name(name), Requirement(name))
        is_tested = version is not None and requirement.specifier.contains(version, prereleases=True)
        found.append(f"{name} {version or 'missing'}" + ("" if is_tested else f" (needed: {requirement.specifier or 'any'})"))
        if not is_tested:
            wrong.append(f'"{requirement}"')
    return Finding("packages", not wrong, ", ".join(found), f"`pip install {' '.join(wrong)}`")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hook() -> Finding:
    if os.environ.get("SB3_QAC_ZOO_HOOK") == "0":
        fix = "`unset SB3_QAC_ZOO_HOOK`, or run RL Zoo as `python -m sb3_qac zoo train ...`."
        return Finding("hook", False, "off, SB3_QAC_ZOO_HOOK=0", fix)
    spec = importlib.util.find_spec(HOOK)
    if spec is None or spec.origin is None:
        return Finding("hook", False, f"{HOOK}.py is not installed", REINSTALL)
    startup_file = Path(spec.origin).with_suffix(".start" if sys.version_info >= (3, 15) else ".pth")
    return Finding("hook", startup_file.is_file(), str(startup_file), f"{startup_file.name} is missing. {REINSTALL}")


def _zoo_command() -> Finding:
    """The decisive check: does a new interpreter that imports only RL Zoo find the algorithms there?"""
    run = subprocess.run([sys.executable, "-c", IMPORT_ZOO], capture_output=True, text=True)
    # The hook's own warning, if there is one, up to the advice to run this command
    refused = re.search(r"sb3_qac could not register .*?(?= `python -m sb3_qac doctor`)", run.stderr)
    if run.returncode != 0:
        found = f"RL Zoo and sb3_qac cannot be imported: {run.stderr.strip().splitlines()[-1]}"
        fix = "Install that package again, in a version that `pip check` does not object to."
        return Finding("RL Zoo", False, found, refused[0] if refused else fix)
    names, missing = map(str.strip, run.stdout.splitlines()[-1].split("|"))
    fix = (
        f"The start-up hook did not run. Files named {HOOK}.* must lie in the environment's own site-packages, and Python "
        "must not run with -S. Until then: `python -m sb3_qac zoo train ...`."
    )
    live = not missing and refused is None
    found = f"`python -m rl_zoo3.train` {'knows' if live else 'does not know'} {missing or names}"
    return Finding("RL Zoo", live, found, refused[0] if refused else fix)
