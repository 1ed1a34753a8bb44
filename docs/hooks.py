"""What mkdocs needs to know of this repository: pages that lie outside docs/, and links that lead there.

Links in docs/ are relative to the repository, as GitHub reads them. On the site, files of `PAGES` have pages of their
own; any other file outside docs/ is a link into `repo_url` (mkdocs.yml) if there is one, and plain text if not.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "recipes/README.md": "recipes.md",
    "README.md": "index.md",
    "src/fastrl/trace.py": "api.md",
}
"""Files of the repository, and the page of the site that says the same."""

_ADDED = ("CHANGELOG.md", "CONTRIBUTING.md", "recipes/README.md")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the pages that lie outside docs/."""
    root = Path(config.config_file_path).parent
    for name in _ADDED:
        content = (root / name).read_text(encoding="utf-8")
        files.append(File.generated(config, PAGES[name], content=content))
    return files


def on_page_markdown(markdown, page, config, **_):
    """Rewrite links, so that they lead to pages of the site."""
    here = page.file.src_uri
    origin = next((name for name in _ADDED if PAGES[name] == here), f"docs/{here}")

    def rewritten(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        uri = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if uri is not None:
            return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"
        return f"[{text}]({config.repo_url}/blob/main/{path}{anchor})" if config.repo_url else text

    return _LINK.sub(rewritten, markdown)
