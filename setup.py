"""
The metadata is in setup.cfg. Here is only what setuptools cannot be told there: the start-up files of the RL Zoo hook
belong at the root of site-packages, from a wheel and from an editable install alike, and the presets inside the package.
"""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent


class BuildPy(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            copytree(ROOT / "hyperparams", Path(self.build_lib, "sb3_qac", "hyperparams"), dirs_exist_ok=True)
            copytree(ROOT / "startup", self.build_lib, dirs_exist_ok=True)


class EditableWheel(editable_wheel):
    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        # setuptools installs nothing but a path in editable mode; what lies in ``unpacked_wheel`` goes into the wheel
        copytree(ROOT / "startup", unpacked_wheel, dirs_exist_ok=True)
        return super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
