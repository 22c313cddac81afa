"""Imported last by the process from which tests fork others: what they would do each, done once.

What is loaded stays, so that no search for garbage need look at it, and copy its pages. The
metadata of all packages are read.
"""

import gc

from trireme import plugins

plugins.known("trireme.commands")
gc.collect()
gc.freeze()
