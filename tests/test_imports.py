"""Imports go one way: the algorithm at the bottom, RL Zoo and the command line on top."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sb3_qac"
# A module may import those on floors below its own
FLOORS = [
    {
        "sb3_qac.common.checks",
        "sb3_qac.common.curves",
        "sb3_qac.common.losses",
        "sb3_qac.common.allocator",
        "sb3_qac.common.policies",
        "sb3_qac.common.returns",
        "sb3_qac.common.state",
    },
    {"sb3_qac.common.checkpoints", "sb3_qac.common.logs", "sb3_qac.common.torch_layers", "sb3_qac.common.wrappers"},
    {"sb3_qac.common.vec_env.ale_vec_env", "sb3_qac.common.callbacks"},
    {"sb3_qac.common.vec_env"},
    {"sb3_qac.common.env_util"},
    {"sb3_qac.qa2c.policies"},
    {"sb3_qac.qa2c.qa2c", "sb3_qac.qppo.policies"},
    {"sb3_qac.qa2c", "sb3_qac.qppo.qppo", "sb3_qac.reinforce.reinforce"},
    {"sb3_qac.qppo", "sb3_qac.reinforce"},
    {"sb3_qac"},
    {"sb3_qac.zoo"},
    {"sb3_qac.doctor", "sb3_qac.study.benchmark", "sb3_qac.study.catalogue", "sb3_qac.study.records", "sb3_qac.study.runs"},
    {"sb3_qac.study.analysis", "sb3_qac.study.diagnose"},
    {"sb3_qac.study.report", "sb3_qac.study.video"},
    {"sb3_qac.study.ladder"},
    {"sb3_qac.study.study"},
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


def test_importing_the_package_leaves_rl_zoo_alone():
    program = "import sys, sb3_qac; print('rl_zoo3' in sys.modules, 'optuna' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["False", "False"]
