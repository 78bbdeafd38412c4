"""Sphinx: ``make docs``. It writes the generated pages first: mechanisms, files, command line."""

from importlib.metadata import version as installed
from typing import Any

from sphinx.pycode import ModuleAnalyzer

from longspan import list_mechanisms
from longspan_lab.tools import blocks, cli_page, configs_page, docs_math, docs_pictures, mechanism_pages, tree

project, author, copyright = "longspan", "the longspan contributors", "the longspan contributors"
version = release = installed("longspan")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]

html_theme, html_title = "furo", "longspan"
html_static_path, html_css_files = ["static"], ["narrow.css", "formulas.css", "home.css", "sort.css"]
html_js_files = ["sort.js"]
html_math_renderer = "mathml"  # longspan_lab.tools.docs_math
html_theme_options: dict[str, Any] = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4f0", "color-brand-content": "#7db4f0"},
}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "substitution"]
myst_substitutions = {"mechanisms": len(list_mechanisms())}
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run the notebooks
copybutton_prompt_text, copybutton_prompt_is_regexp = r"\$ |>>> |\.\.\. ", True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def keep_attribute(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put an empty comment first: napoleon takes words before a colon in the first line for the type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


# Overloads differ in the type of the result only, so the signature of the implementation says all.
ModuleAnalyzer.overloads = property(lambda _: {}, lambda _, found: None)  # pyright: ignore[reportAttributeAccessIssue] (an attribute)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_attribute, priority=100)
    docs_math.setup(app)
    docs_pictures.setup(app)


mechanism_pages.main()
blocks.write(tree.PAGES | cli_page.PAGES | configs_page.PAGES)
