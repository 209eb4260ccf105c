"""How Sphinx builds these pages: ``scripts/docs``."""

import configparser
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))
_setup = configparser.ConfigParser()
_setup.read(_ROOT / "setup.cfg", encoding="utf-8")

project = "mimose"
author = "the mimose authors"
project_copyright = author
release = version = _setup["metadata"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["examples"]
nitpicky = True
# Names of other libraries and of typing, whose pages are not linked to.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|nn|np|numpy|abc|os|pathlib|collections|typing|sklearn|lightning|"
        r"transformers|trainer_callback)\..*",
    ),
    (r"py:class", r"mimose\.planners\.problem\..*"),
    (r"py:class", r"mimose\.(session\._(Batch|Result)|micro_batches\.Batch)"),
    (r"py:.*", r"(ArrayLike|Budget|Floats|Sizes|Tokenizer)"),
    (r"py:class", r".*(NDArray|FloatArray|BoolArray|IntArray|LayersSpec|Phase)\b.*"),
]

# In docstrings single backticks mean code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
maximum_signature_line_length = 76
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"mimose {release}"
html_copy_source = False
html_show_sphinx = False


def _plain_attribute(
    _app: object, what: str, _name: str, _value: object, _options: object, lines: list
) -> None:
    """Keep an attribute's text as it is: no type before a colon, no substitutions."""
    if what in ("attribute", "data", "property"):
        lines[:] = ["..", "", *(line.replace("|", r"\|") for line in lines)]


def setup(app: object) -> None:
    """Let `_plain_attribute` see docstrings before napoleon does."""
    app.connect("autodoc-process-docstring", _plain_attribute, priority=100)
