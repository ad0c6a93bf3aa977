"""The start-up hook: light, silent, and harmless where anything is missing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / "startup" / "sb3_qac_zoo_hook.py"

FAKE_ZOO = {
    "rl_zoo3/__init__.py": "import rl_zoo3.utils",
    "rl_zoo3/utils.py": "ALGOS = {}",
    "rl_zoo3/hyperparams_opt.py": "",
    "rl_zoo3/exp_manager.py": "",
}


def run(program, folder, *flags, **environment):
    """An interpreter of its own, without the site-packages of this one, that has the hook from ``startup/`` installed."""
    program = f"import sys; sys.path[:0] = [{str(HOOK.parent)!r}, {str(folder)!r}]\nimport sb3_qac_zoo_hook as hook\n{program}"
    return subprocess.run(
        [sys.executable, "-I", "-S", *flags, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def folder(tmp_path):
    for name, text in FAKE_ZOO.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def write_plugin(folder, text):
    (folder / "sb3_qac").mkdir()
    (folder / "sb3_qac" / "__init__.py").write_text("")
    (folder / "sb3_qac" / "zoo.py").write_text(text)


def test_modules_of_rl_zoo_are_registered_in_as_they_are_imported(folder):
    write_plugin(folder, "def register_in(module): print('registered in', module.__name__)")
    result = run("hook.install(); import rl_zoo3; import rl_zoo3.exp_manager; import json", folder)
    assert result.stdout.splitlines() == ["registered in rl_zoo3.utils", "registered in rl_zoo3.exp_manager"]
    assert result.stderr == ""


def test_nothing_is_imported_before_rl_zoo_is(folder):
    program = "hook.install(); import json; print([name for name in sys.modules if 'sb3' in name or 'zoo' in name])"
    assert run(program, folder).stdout.strip() == "['sb3_qac_zoo_hook']"


def test_import_of_the_hook_loads_no_further_module():
    program = (
        f"import os, sys; sys.path.insert(0, {str(HOOK.parent)!r}); before = set(sys.modules); "
        "import sb3_qac_zoo_hook; sb3_qac_zoo_hook.install(); print(sorted(set(sys.modules) - before))"
    )
    # With -S, or the hook that is installed here would be the one that is loaded. Without it, ``os`` is loaded by then
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "['sb3_qac_zoo_hook']"


@pytest.mark.parametrize("flags", [(), ("-W", "error")])
@pytest.mark.parametrize("fault", ["raise RuntimeError('broken')", "import no_such_module", "def register_in(module): 1 / 0"])
def test_a_broken_plugin_warns_and_leaves_rl_zoo_working(folder, fault, flags):
    write_plugin(folder, fault)
    result = run("hook.install(); import rl_zoo3; print(rl_zoo3.utils.ALGOS)", folder, *flags)
    assert result.returncode == 0
    assert result.stdout.strip() == "{}"
    assert "sb3_qac doctor" in result.stderr and "SB3_QAC_ZOO_HOOK=0" in result.stderr
    assert result.stderr.count("could not register") == 1


def test_a_missing_plugin_or_a_missing_zoo_is_no_error(folder, tmp_path_factory):
    assert run("hook.install(); import rl_zoo3; print('fine')", folder).stdout.strip() == "fine"
    elsewhere = tmp_path_factory.mktemp("empty")
    result = run("hook.install()\ntry:\n    import rl_zoo3.utils\nexcept ImportError:\n    print('no zoo')", elsewhere)
    assert (result.stdout.strip(), result.stderr) == ("no zoo", "")


def test_off_switch(folder):
    write_plugin(folder, "def register_in(module): print('registered')")
    assert run("hook.install(); import rl_zoo3", folder, SB3_QAC_ZOO_HOOK="0").stdout == ""
    assert run("hook.install(); import rl_zoo3", folder, SB3_QAC_ZOO_HOOK="1").stdout.strip() == "registered"


DELEGATING_FINDERS = """
import importlib.util

class Tracer:  # Asks all finders, itself too
    asked = set()

    def find_spec(self, name, path=None, target=None):
        if name in self.asked:
            return None
        self.asked.add(name)
        spec = importlib.util.find_spec(name)
        self.asked.remove(name)
        return spec

class Fork:  # Asks all others
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                return spec
"""


@pytest.mark.parametrize("finder", ["Tracer()", "Fork()"])
@pytest.mark.parametrize("place", ["0", "1", "len(sys.meta_path)"])
def test_a_finder_that_asks_the_other_finders_is_no_obstacle(folder, finder, place):
    write_plugin(folder, "def register_in(module): print('registered in', module.__name__)")
    install = f"hook.install(); sys.meta_path.insert({place}, {finder})"
    result = run(f"{DELEGATING_FINDERS}\n{install}; import rl_zoo3.exp_manager", folder)
    assert result.stdout.splitlines() == ["registered in rl_zoo3.utils", "registered in rl_zoo3.exp_manager"]
    assert result.stderr == ""


def test_modules_are_registered_in_where_one_loader_in_front_loads_them_all_and_others(folder):
    """Such as the finder that rewrites assertions in pytest, after ``pytest.register_assert_rewrite("rl_zoo3")``."""
    write_plugin(folder, "def register_in(module): print('registered in', module.__name__)")
    (folder / "rl_zoo3" / "train.py").write_text("import rl_zoo3.exp_manager")
    finder = """
from importlib.machinery import PathFinder
class Rewriter:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("rl_zoo3"):
            spec = PathFinder.find_spec(name, path)
            spec.loader = self
            return spec
    def create_module(self, spec): pass
    def exec_module(self, module): exec(open(module.__spec__.origin).read(), module.__dict__)
"""
    program = "hook.install(); sys.meta_path.insert(0, Rewriter()); import json; import rl_zoo3.train; print('imported')"
    result = run(f"{finder}\n{program}", folder)
    assert result.stdout.splitlines() == ["registered in rl_zoo3.utils", "registered in rl_zoo3.exp_manager", "imported"]
    assert result.stderr == ""


def test_installing_twice_registers_one_finder(folder):
    assert run("hook.install(); hook.install(); print(sys.meta_path.count(hook.ZooFinder))", folder).stdout.strip() == "1"


def test_a_module_that_is_loaded_lazily_is_registered_in_once_it_is_loaded(folder):
    write_plugin(folder, "def register_in(module): print('registered in', module.__name__)")
    finder = """
import importlib.util
from importlib.machinery import PathFinder
class Lazy:
    def find_spec(self, name, path=None, target=None):
        if name == "rl_zoo3.exp_manager":
            spec = PathFinder.find_spec(name, path)
            spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec
"""
    program = "hook.install(); sys.meta_path.insert(0, Lazy()); import rl_zoo3.exp_manager as lazy; print('imported')"
    result = run(f"{finder}\n{program}; vars(lazy)", folder)
    assert result.stdout.splitlines()[-2:] == ["imported", "registered in rl_zoo3.exp_manager"]
    assert result.stderr == ""


def test_start_up_files_name_what_exists():
    spec = importlib.util.spec_from_file_location("hook", HOOK)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert callable(hook.install)
    assert HOOK.with_suffix(".pth").read_text() == "import sb3_qac_zoo_hook; sb3_qac_zoo_hook.install()\n"
    assert HOOK.with_suffix(".start").read_text() == "sb3_qac_zoo_hook:install\n"
