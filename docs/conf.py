"""Sphinx configuration.

Run `sphinx-build -W --keep-going -b html docs build/docs` in the repository's root.
"""

import sys
from pathlib import Path

import emsjax

sys.path.insert(0, str(Path(__file__).parent))  # for benchmark_tables

project = "emsjax"
copyright = "the authors of emsjax, Apache-2.0"
version = release = emsjax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "benchmark_tables"]
html_theme = "furo"
html_title = "emsjax"
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 3

# A name in single backticks is a link if the reference documents it, and code otherwise.
default_role = "py:obj"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False  # types are in the signature


def setup(app) -> None:
    app.connect("autodoc-process-signature", name_arrays)


def name_arrays(app, what, name, obj, options, signature, returns) -> tuple[str, str]:
    """Shortens the type of JAX arrays in signatures to the name that users import."""
    short = lambda text: text and text.replace("jaxlib._jax.Array", "Array")
    return short(signature), short(returns)
