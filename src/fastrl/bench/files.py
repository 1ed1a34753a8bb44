"""Results on disk."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, **options: Any) -> None:
    """Write to a temporary name and rename, so that a file is whole or not there; options as of `json.dumps`."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(content, **{"indent": 2, **options}) + "\n", encoding="utf-8")
    temporary.replace(path)
