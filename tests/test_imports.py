"""Imports go one way: the algorithm at the bottom, RL Zoo and the command line on top."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sb3_qac"
COMMANDS = ("zoo", "doctor", "benchmark", "study", "report", "diagnose", "video", "presets")
# A module may import those on floors below its own
FLOORS = [
    {
        "sb3_qac.common.checks",
        "sb3_qac.common.curves",
        "sb3_qac.common.losses",
        "sb3_qac.common.allocator",
        "sb3_qac.common.policies",
        "sb3_qac.common.minatar",
        "sb3_qac.common.returns",
        "sb3_qac.common.state",
    },
    {"sb3_qac.common.checkpoints", "sb3_qac.common.logs", "sb3_qac.common.torch_layers", "sb3_qac.common.wrappers"},
    {"sb3_qac.common.vec_env.ale_vec_env", "sb3_qac.common.callbacks"},
    {"sb3_qac.common.vec_env"},
    {"sb3_qac.common.env_util"},
    {"sb3_qac.qa2c.policies"},
    {"sb3_qac.qa2c.qa2c"},
    {"sb3_qac.qa2c", "sb3_qac.reinforce.reinforce"},
    {"sb3_qac.reinforce"},
    {"sb3_qac"},
    {"sb3_qac.zoo"},
    {"sb3_qac.doctor", "sb3_qac.study.benchmark", "sb3_qac.study.catalogue", "sb3_qac.study.records", "sb3_qac.study.runs"},
    {"sb3_qac.study.analysis", "sb3_qac.study.diagnose"},
    {"sb3_qac.study.report", "sb3_qac.study.video"},
    {"sb3_qac.study.ladder"},
    {"sb3_qac.study.study"},
    {"sb3_qac.commands"},
    {f"sb3_qac.commands.{name}" for name in COMMANDS},
    {"sb3_qac.__main__"},
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.read_text().strip()}


def test_every_module_has_its_floor():
    assert set(MODULES) == set().union(*FLOORS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module):
    floor = next(i for i, names in enumerate(FLOORS) if module in names)
    below = set().union(*FLOORS[:floor])
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        ours = [name for name in names if name.split(".")[0] == "sb3_qac"]
        assert set(ours) <= below, f"{module} imports {ours} at line {node.lineno}"


def run_without(modules, program):
    """:return: what a new interpreter printed, in which these modules cannot be imported"""
    program = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); {program}"
    return subprocess.check_output([sys.executable, "-c", program], text=True)


def test_the_package_gives_its_algorithms_without_rl_zoo():
    program = (
        "import sb3_qac; light = 'torch' in sys.modules; from sb3_qac import QA2C, REINFORCE; from sb3_qac import *; "
        "import gymnasium; print(light, QA2C.__name__, 'rl_zoo3' in sys.modules, 'PongNoFrameskip-v4' in gymnasium.registry)"
    )
    assert run_without((), program).split() == ["False", "QA2C", "False", "True"]


def test_the_package_lists_what_it_gives_and_no_more():
    import sb3_qac

    assert set(sb3_qac.__all__) <= set(dir(sb3_qac))
    with pytest.raises(AttributeError, match="module 'sb3_qac' has no attribute 'QA3C'"):
        _ = sb3_qac.QA3C


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_of_every_command_imports_neither_pytorch_nor_rl_zoo(arguments):
    """Their import takes more than a second. In a module that is None every import fails."""
    program = f"import runpy; sys.argv = {['sb3_qac', *arguments, '--help']}; runpy.run_module('sb3_qac', run_name='__main__')"
    printed = run_without(("torch", "rl_zoo3", "stable_baselines3", "resource"), program)
    assert printed.startswith("usage: python -m sb3_qac")


def test_doctor_runs_where_python_has_no_resource_module():
    """It is not there on Windows."""
    program = (
        "import runpy; sys.argv = ['sb3_qac', 'doctor', '--json']; from sb3_qac.study import benchmark\n"
        "runpy.run_module('sb3_qac', run_name='__main__')"
    )
    assert '"what": "RL Zoo"' in run_without(("resource",), program)
