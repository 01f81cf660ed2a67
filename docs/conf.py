"""How Sphinx makes the pages: the guides in this folder, and the API reference from the docstrings (`make docs`)."""

import inspect

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import convoy

logger = logging.getLogger(__name__)

project = "Convoy"
version = release = convoy.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static"]

myst_heading_anchors = 3
highlight_language = "none"  # of code blocks that name no language: mostly commands
default_role = "py:obj"  # `name` in a docstring is code, and a link where there is such a name
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "Convoy"
html_static_path = ["_static"]
html_css_files = ["convoy.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def check_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn, which fails the build, of a public name that the reference lacks or that has no example."""
    documented = {name for name, *_ in env.domains.python_domain.get_objects()}
    for name in dir(convoy):
        if name.startswith("_"):
            continue
        if f"convoy.{name}" not in documented:
            logger.warning("docs/api.md lacks convoy.%s", name)
        if ">>> " not in (inspect.getdoc(getattr(convoy, name)) or ""):
            logger.warning("the docstring of convoy.%s has no example", name)


def show_defaults(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show the default of a dataclass's field that a factory makes as `...`, which Sphinx can read."""
    return signature.replace("<factory>", "...") if signature else signature, returns


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("env-check-consistency", check_names)
