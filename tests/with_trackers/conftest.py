"""trackio reads where its files go when it is imported, and TRL imports it: a folder of its own, before any test."""

import os
import tempfile

_FOLDER = tempfile.TemporaryDirectory(prefix="fastrl-trackio-")
os.environ["TRACKIO_DIR"] = _FOLDER.name
