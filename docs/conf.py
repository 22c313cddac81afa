"""The documentation site: Sphinx's configuration (`make docs`; decision 0046).

The source directory is the root of the project, so that a link between pages is the same on the
site as between files.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # the package, and site_extension

import trireme  # noqa: E402

project = "Trireme"
author = "The Trireme developers"
copyright = "The Trireme developers"
version = release = trireme.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_extension",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "examples/README.md"]
source_suffix = {".md": "myst-nb"}
# Programs in pages may be excerpts.
suppress_warnings = ["misc.highlighting_failure", "myst-nb.lexer"]
default_role = "py:obj"  # in docstrings `name` is a name, with a link where there is a target

# Markdown as GitHub reads it.
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]

# Commands are run when the site is built; one that fails fails the site.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = False  # a warning, which -W makes an error: other pages go on
nb_execution_in_temp = True
nb_merge_streams = True
nb_render_markdown_format = "myst"

home_of_commands = Path(tempfile.mkdtemp(prefix="trireme-docs-"))
# The kernels listen on this host alone. Without this each warns that its connection is plain TCP.
kernel_profile = home_of_commands / ".ipython" / "profile_default"
kernel_profile.mkdir(parents=True)
(kernel_profile / "ipython_kernel_config.py").write_text(
    "get_config().IPKernelApp.log_level = 'ERROR'\n", encoding="utf-8"
)
logging.getLogger("traitlets").setLevel(logging.WARNING)  # nbclient names each page that it runs

# What the commands find: this interpreter's programs, the pages (for docs/program.py), a terminal
# that moves no cursor, and an empty home, whose .bashrc changes nothing and whose secrets are not
# the user's.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    PYTHONPATH=str(ROOT),
    PAGES=str(ROOT / "docs"),
    HOME=str(home_of_commands),
    TERM="dumb",
    NO_COLOR="1",
    OMP_NUM_THREADS="1",
    COLUMNS="100",
)

# The reference.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Trireme {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_language = "en-zh"  # docs/site_search.py
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}
copybutton_exclude = ".linenos, .gp, .go"
