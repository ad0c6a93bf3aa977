"""One install of the package, as a wheel and editable, in an environment of its own, from another directory."""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def call(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SB3_QAC_ZOO_HOOK")}
    run = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the files that git knows, as from a clean checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in call("git", "ls-files", cwd=ROOT).split("\n"):
        if name and not name.startswith("results/") and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", target, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built, source


@pytest.fixture(params=["wheel", pytest.param("editable", marks=pytest.mark.slow)])
def installed(request, wheel, tmp_path):
    """
    :return: interpreter of a new environment with the package installed, and nothing else of ours: the dependencies are
        seen through a path, along which no start-up file is run
    """
    built, source = wheel
    # It has the pip of the dependencies
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    site_packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    package = [built] if request.param == "wheel" else ["--no-build-isolation", "-e", source]
    call(python, "-m", "pip", "install", "--no-deps", "--ignore-installed", *package, cwd=tmp_path)
    return python


@pytest.mark.slow
def test_literal_command_works_after_one_install_and_nothing_stays_after_an_uninstall(installed, tmp_path):
    command = [installed, "-m", "rl_zoo3.train", "--algo", "qa2c", "--env", "CartPole-v1", "-n", 100, "--eval-freq", -1]
    printed = call(*command, cwd=tmp_path)
    assert "Saving to logs/qa2c/CartPole-v1_1" in printed
    enjoy = [installed, "-m", "rl_zoo3.enjoy", "--algo", "qa2c", "--env", "CartPole-v1", "-f", "logs", "-n", 50, "--no-render"]
    assert "Loading logs/qa2c" in call(*enjoy, cwd=tmp_path)
    origin = call(installed, "-c", "import sb3_qac; print(sb3_qac.__file__)", cwd=tmp_path).strip()
    assert not origin.startswith(str(ROOT)), "the package of the tests was tested, not the one installed"
    call(installed, "-m", "pip", "uninstall", "-y", "sb3_qac", cwd=tmp_path)
    site_packages = Path(call(installed, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    assert list(site_packages.glob("*sb3_qac*")) == []


def test_wheel_holds_the_package_the_presets_and_the_start_up_files(wheel):
    names = set(zipfile.ZipFile(wheel[0]).namelist())
    assert {"sb3_qac_zoo_hook.pth", "sb3_qac_zoo_hook.start", "sb3_qac_zoo_hook.py"} <= names
    assert {"sb3_qac/hyperparams/qa2c.yml", "sb3_qac/hyperparams/studies/pong.yml", "sb3_qac/py.typed"} <= names
    others = [name for name in names if name.split("/")[0] not in ("sb3_qac",) and ".dist-info/" not in name]
    assert sorted(others) == ["sb3_qac_zoo_hook.pth", "sb3_qac_zoo_hook.py", "sb3_qac_zoo_hook.start"]


@pytest.mark.parametrize("name", ["stable-baselines3", "sb3-contrib", "rl_zoo3", "ale-py", "wandb", "setuptools"])
def test_what_is_used_from_the_inside_is_bounded_above(name):
    """The version that the tests run with is allowed, and the next minor one, or major of setuptools, is not."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = f"{settings['options']['install_requires']}\n{settings['options.extras_require']['tests']}".splitlines()
    lines += re.findall(r'requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text())
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    specifiers = [requirement.specifier for requirement in requirements if requirement.name == name]
    assert len(specifiers) == (2 if name == "setuptools" else 1)
    installed = Version(version(name))
    following = f"{installed.major + 1}" if name == "setuptools" else f"{installed.major}.{installed.minor + 1}"
    for specifier in specifiers:
        assert installed in specifier and following not in specifier


def test_editable_install_names_what_setuptools_no_longer_has(wheel, tmp_path):
    program = (
        "import runpy, sys; from setuptools.command.editable_wheel import editable_wheel; "
        f"del editable_wheel._run_build_commands; sys.argv = ['setup.py', 'editable_wheel', '-d', {str(tmp_path)!r}]; "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    built = subprocess.run([sys.executable, "-c", program], cwd=wheel[1], capture_output=True, text=True)
    assert built.returncode != 0
    assert "needs `editable_wheel._run_build_commands`" in built.stderr and "'setuptools<85'" in built.stderr
