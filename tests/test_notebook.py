"""examples/quickstart.ipynb"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
# What the cells with these tags set
SOURCE = f"SOURCE = {str(ROOT)!r}"
PARAMETERS = "CARTPOLE_STEPS, PONG_STEPS = 2_000, 1_600"


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "source" in tags:
            cell.source = cell.source.replace('SOURCE = ".."', SOURCE)
        elif "parameters" in tags:
            cell.source = PARAMETERS
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert shown.count("image/png") == 2
    html = ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    assert sum("<video" in text and "data:video/mp4;base64," in text for text in html) == 2
