"""The documentation says what the code does: written pages are current, links lead somewhere, the site builds."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fastrl.config import FastRLConfig
from fastrl.metric_keys import METRICS
from fastrl.report.reference import PAGES, SETTINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
DOCUMENTS = [
    *sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
    ROOT / "recipes" / "README.md",
]  # fmt: skip
OUTSIDE = {"recipes.md", "project/changelog.md", "project/contributing.md"}  # pages that docs/hooks.py adds


def text_of(path):
    return path.read_text(encoding="utf-8")


def without_code(markdown):
    return re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)


# What is written from the code


@pytest.mark.parametrize("name", PAGES)
def test_a_written_page_is_current(name):
    assert text_of(DOCS / name) == PAGES[name](), (
        f"docs/{name} is not what the code says now: make docs, or python -m fastrl.report.reference docs"
    )


def test_every_setting_has_its_place_and_its_section():
    fields = [field.name for field in dataclasses.fields(FastRLConfig)]
    assert sorted(name for names in SETTINGS.values() for name in names) == sorted(fields)
    page = text_of(DOCS / "configuration.md")
    for name in fields:
        section = page.partition(f"\n### `{name}`\n")[2].partition("\n##")[0]
        assert "default `" in section, name
        for choice in FastRLConfig._choices.get(name, ()):
            assert f"`{choice}`" in section, (name, choice)
        if name in FastRLConfig._ranges:
            assert FastRLConfig._ranges[name][2] in section, name


def test_every_metric_is_on_its_page():
    page = text_of(DOCS / "metrics.md")
    for metrics in METRICS.values():
        for metric in metrics:
            assert page.count(f"| `{metric.key}` | ") == 1, metric.key


# The site's pages and links


def pages_of(nav):
    for entry in nav:
        for target in entry.values():
            yield from pages_of(target) if isinstance(target, list) else [target]


def test_the_navigation_holds_every_page_once():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml, whose tags for Python's objects mean nothing here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    nav = list(pages_of(yaml.load(text_of(ROOT / "mkdocs.yml"), Loader=Loader)["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(nav) == len(set(nav))
    assert set(nav) == there | OUTSIDE


def anchors_of(path):
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code(text_of(path)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(path))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors_of(linked), target


def test_the_quickstart_is_the_readmes():
    example = re.compile(r"```python\n(.*?)```", re.S)
    assert example.search(text_of(DOCS / "index.md"))[1] == example.search(text_of(ROOT / "README.md"))[1]


def test_the_promises_name_tests_that_exist():
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", text_of(DOCS / "reliability.md"))
    assert len(named) > 60
    for file, test in named:
        assert f"def {test}(" in text_of(ROOT / file), (file, test)


# Papers and their settings

SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text_of(DOCS / "papers.md"), re.M | re.S)


@pytest.mark.parametrize(("paper", "section"), SECTIONS, ids=[paper for paper, _ in SECTIONS])
def test_the_settings_of_a_paper_are_a_recipe(paper, section):
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
    settings = yaml.safe_load(block)
    found = FastRLConfig.from_dict(settings.pop("fastrl"))
    if paper in ("FastRL", "GSPO", "Dr. GRPO"):
        assert found == FastRLConfig()
    for recipe in re.findall(r"`(recipes/testbed/\w+\.yaml)`", section):
        assert found == FastRLConfig.load(ROOT / recipe), recipe


def test_the_settings_of_a_paper_are_fields_of_trl():
    trl = pytest.importorskip("trl", reason="no trl here: pip install fastrl-grpo[trl]")
    names = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    for _, section in SECTIONS:
        block = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.S)[1])
        assert set(block) - {"fastrl"} <= names


# The site


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="no mkdocs here: make docs")
def test_the_site_is_built_without_a_network(tmp_path):
    cut_off = ["unshare", "--map-root-user", "--net"]
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([*cut_off, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody have a network of their own: unshare --net")
    done = subprocess.run(
        [*cut_off, MKDOCS, "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        html = text_of(page)
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*?\b(?:src|href)="(https?://[^"]+)"', html)
        assert loaded == [], f"{page.name} loads from elsewhere"
        assert str(ROOT) not in html
    assert "num_prompts_missing" in text_of(tmp_path / "site" / "api.html")
