"""
The documentation site: `make docs` builds it into docs/_build/html, without network.

Sphinx reads from the root of the repository, not from docs/: a link such as ``../results/ladder/README.md`` is then a page
of the site, and the same link works where the Markdown is shown as it is.
"""

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

project = "sb3_qac"
author = "sb3_qac contributors"
copyright = "2026, sb3_qac contributors"
release = version = (ROOT / "sb3_qac" / "version.txt").read_text().strip()

root_doc = "docs/index"
include_patterns = ["docs/**", "results/**/*.md", "benchmarks/README.md", "CHANGELOG.md"]
exclude_patterns = ["docs/_build", "docs/upstream", ".*", "build", "dist", "logs", "studies", "wandb"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

# Markdown: headings are anchors by GitHub's names, and $ marks mathematics
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]

# Parameters are described in SB3's `:param` form; their types are those of the signatures
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Names of other packages and type variables have no page here
nitpick_ignore_regex = [(r"py:.*", r"(?!sb3_qac).*"), (r"py:.*", r".*\.Self\w+")]

html_theme = "furo"
html_title = f"sb3_qac {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
# The front page is docs/index.html. The index.html at the root leads there
html_extra_path = ["_root"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "default", "monokai"


def visit_math(translator: Any, node: nodes.math) -> None:
    """:param translator: Writer of HTML; :param node: inline mathematics, written as MathML, which browsers draw themselves"""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(translator: Any, node: nodes.math_block) -> None:
    """:param translator: Writer of HTML; :param node: a displayed formula"""
    formula = tex2mathml(node.astext()).replace("<math ", '<math display="block" ', 1)
    translator.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def finish_page(app: Sphinx, page: nodes.document) -> None:
    """
    Turn links to folders of the repository into plain text, since the site has no pages for folders. Keep pages of studies
    out of the sidebar.

    :param app: Sphinx
    :param page: A page that has been read
    """
    name = app.env.docname
    for link in list(page.findall(pending_xref)):
        if link["reftype"] == "myst" and Path(app.srcdir, name).parent.joinpath(link["reftarget"]).is_dir():
            link.replace_self(link.children)
    if name.startswith("results/"):
        app.env.metadata[name]["orphan"] = True


def setup(app: Sphinx) -> None:
    """:param app: Sphinx"""
    app.connect("doctree-read", finish_page)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
