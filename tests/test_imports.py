"""Imports go one way: the algorithm at the bottom, RL Zoo and the command line on top."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sb3_qac"
COMMANDS = (
    "zoo",
    "doctor",
    "study",
    "report",
    "diagnose",
    "evaluate",
    "export",
    "video",
    "presets",
)
# Who may import whom: what a package imports of the others. Nobody imports what stands above it
BELOW = {
    "common": set(),
    "qa2c": {"common"},
    "qppo": {"common", "qa2c"},
    "pqn": {"common", "qa2c"},
    "reinforce": {"common"},
    "resume": {"common"},
    "diagnose": {"common", "pqn", "qa2c", "qppo", "resume"},
    "zoo": {"common", "qa2c", "qppo", "pqn", "reinforce", "resume"},
    "doctor": {"zoo"},
    "study": {"common", "pqn", "qa2c", "qppo", "resume", "diagnose", "zoo"},
    "commands": {"common", "doctor", "study", "zoo"},
    "__main__": {"commands"},
    # The package itself, which gives the algorithms, and the documented path of what `resume` and `common.curves` have
    "": {"pqn", "qa2c", "qppo", "reinforce"},
    "common.callbacks": {"common", "resume"},
}
# A module of study imports those on floors below its own
STUDY_FLOORS = [
    {"catalogue", "diagnosis_tables", "records", "run"},
    {"callbacks", "progress", "snapshots", "statistics"},
    {"analysis", "manager", "pack"},
    {"loading"},
    {"agents", "train"},
    {"workers"},
    {"diagnosis", "grid", "video"},
    {"report"},
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.read_text().strip()}


def part_of(module: str) -> str:
    """:return: the name in ``BELOW`` that stands for a module"""
    name = module.removeprefix("sb3_qac").lstrip(".")
    return name if name in BELOW else name.partition(".")[0]


@functools.cache
def imports_of(module: str) -> set[str]:
    """:return: the modules of ours that a module imports, anywhere in it"""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name for name in inner if name in MODULES} or {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "sb3_qac"}


def test_every_module_belongs_to_a_part():
    assert {part_of(module) for module in MODULES} == set(BELOW)


def test_imports_go_down():
    for module in MODULES:
        part = part_of(module)
        # `__version__` and the like are anybody's
        above = {name for name in imports_of(module) - {"sb3_qac"} if part_of(name) not in BELOW[part] | {part}}
        assert not above, f"{module} imports {', '.join(sorted(above))}"


def test_no_module_imports_itself_by_way_of_others():
    for module in MODULES:
        # A package's `__init__` gives what its modules have, and they do not import it
        reached, new = set(), imports_of(module) - {module.rpartition(".")[0]}
        while new:
            reached |= new
            new = {name for path in new for name in imports_of(path)} - reached
        assert module not in reached, module


def test_modules_of_study_import_only_those_below_them():
    floors = {f"sb3_qac.study.{name}": i for i, names in enumerate(STUDY_FLOORS) for name in names}
    assert set(floors) == {module for module in MODULES if part_of(module) == "study"}
    for module, floor in floors.items():
        assert not {name for name in imports_of(module) if floors.get(name, -1) >= floor}


def test_the_package_knows_nothing_of_what_made_its_evidence():
    """``benchmarks`` is not installed with it."""
    for path in MODULES.values():
        assert not re.search(r"^\s*(from|import) (benchmarks|tests)\b", path.read_text(), re.MULTILINE), path


def test_environments_and_algorithms_know_nothing_of_resume():
    for module in MODULES:
        if part_of(module) in ("common", "qa2c", "qppo", "pqn", "reinforce"):
            assert not {name for name in imports_of(module) if part_of(name) == "resume"}


def run_without(modules, program):
    """:return: what a new interpreter printed, in which these modules cannot be imported"""
    program = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); {program}"
    return subprocess.check_output([sys.executable, "-c", program], text=True)


def test_the_package_gives_its_algorithms_without_rl_zoo():
    program = (
        "import sb3_qac; light = 'torch' in sys.modules; sb3_qac.qppo.MlpPolicy; sb3_qac.resume.ExactCheckpointCallback; "
        "from sb3_qac import QA2C, REINFORCE; from sb3_qac import *; "
        "import gymnasium; print(light, QA2C.__name__, 'rl_zoo3' in sys.modules, 'PongNoFrameskip-v4' in gymnasium.registry)"
    )
    assert run_without((), program).split() == ["False", "QA2C", "False", "True"]


def test_the_package_lists_what_it_gives_and_no_more():
    import sb3_qac

    assert set(sb3_qac.__all__) <= set(dir(sb3_qac))
    with pytest.raises(AttributeError, match="module 'sb3_qac' has no attribute 'QA3C'"):
        _ = sb3_qac.QA3C


def test_help_of_every_command_imports_neither_pytorch_nor_rl_zoo():
    """Their import takes more than a second. In a module that is None every import fails."""
    program = (
        f"from sb3_qac.__main__ import main\nfor command in ({', '.join(map(repr, COMMANDS))}, None):\n"
        "    try:\n        main([command, '--help'] if command else ['--help'])\n    except SystemExit as end:\n"
        "        assert end.code == 0"
    )
    printed = run_without(("torch", "rl_zoo3", "stable_baselines3", "resource"), f"exec({program!r})")
    assert printed.count("usage: python -m sb3_qac") == len(COMMANDS) + 1
