"""
The metadata is in setup.cfg. This file does what setup.cfg cannot express. It puts the start-up files of the RL Zoo hook at
the root of site-packages, from a wheel and from an editable install alike, and the presets inside the package.
"""

from pathlib import Path
from shutil import copytree, ignore_patterns

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent


def copy_files(name, target):
    copytree(ROOT / name, target, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)


class BuildPy(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            copy_files("hyperparams", Path(self.build_lib, "sb3_qac", "hyperparams"))
            copy_files("startup", self.build_lib)


class EditableWheel(editable_wheel):
    def run(self):
        if not hasattr(editable_wheel, "_run_build_commands"):
            raise SystemExit(
                f"setuptools {setuptools.__version__} is installed, but sb3_qac needs `editable_wheel._run_build_commands`, "
                "which puts the start-up files of the RL Zoo hook into the wheel. "
                "Install with `pip install 'setuptools<85'` first, or without `-e`."
            )
        super().run()

    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        # In editable mode setuptools installs only a path. Files in ``unpacked_wheel`` go into the wheel as well
        copy_files("startup", unpacked_wheel)
        return super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
