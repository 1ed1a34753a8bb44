"""The page of `fastrl report` in a real browser: figures, keys, dark paper, no network, and text that stays text."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_folders import compare_folder, train_folder, write_trace

pytest.importorskip("jinja2")
pytest.importorskip("selenium", reason="selenium is not installed: pip install -e .[dev]")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from fastrl.report.page.live import Report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="no chromium or no chromedriver: apt-get install chromium chromium-driver",
)

HOSTILE = [
    "<script>window.hacked = 1; alert(1)</script>",
    '"><img src=x onerror="window.hacked = 1; alert(1)">',
    "</pre></bdi></article></script><script>window.hacked = 1</script>",
    "<svg onload='window.hacked = 1'><animate onbegin='window.hacked = 1' attributeName=x></svg>",
    "left \u202eevil txt.exe",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe><a href='javascript:window.hacked=1'>x</a>",
    "<style>main { display: none }</style>",
    "y" * 1_000_000,
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = train_folder(folder / "run", texts=HOSTILE)
    for _ in range(2):
        write_trace(run / "fastrl", HOSTILE, num_groups=3)
    report = Report(runs=[compare_folder(folder / "out", losses=("grpo",)), run], out=folder / "page.html")
    report.write()
    return report.out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1280,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(page.as_uri())
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    browser.get_log("browser")
    browser.refresh()
    return browser


def light_or_dark(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_the_page_opens_offline_without_a_word_in_the_console(opened: Any):
    assert opened.get_log("browser") == []
    assert opened.title == "FastRL report: made-up matrix, made-up"
    loaded = opened.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


def test_every_figure_is_drawn(opened: Any):
    sizes = opened.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(svg => {"
        "const box = svg.getBoundingClientRect(), ink = svg.querySelector('path, use').getBBox();"
        "return [box.width, box.height, svg.querySelectorAll('path').length, ink.width + ink.height]})"
    )
    assert len(sizes) == len(opened.find_elements(By.TAG_NAME, "figure")) > 30
    assert all(width > 200 and height > 80 and paths > 3 and ink > 0 for width, height, paths, ink in sizes)
    pictures = opened.execute_script("return [...document.images].map(i => [i.complete, i.naturalWidth])")
    assert all(complete and width > 0 for complete, width in pictures)


def test_what_a_model_wrote_stays_text(opened: Any):
    assert opened.execute_script("return window.hacked") is None
    assert opened.execute_script("return document.scripts.length") == 1
    assert (
        opened.execute_script(
            "return document.querySelectorAll('iframe, animate, [onload], [onerror]').length"
        )
        == 0
    )
    texts = opened.execute_script(
        "return [...document.querySelectorAll('.group pre')].map(pre => pre.textContent)"
    )
    assert set(HOSTILE[:7]) <= set(texts)
    assert "y" * 8_000 in texts
    assert max(map(len, texts)) == 8_000
    assert "the first 8,000 of 1,000,000 characters" in opened.page_source
    isolated = "return getComputedStyle(document.querySelector('.group pre bdi')).unicodeBidi"
    assert opened.execute_script(isolated) == "isolate"


def test_the_policy_forbids_a_script_that_got_in_all_the_same(opened: Any):
    opened.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 2'; document.body.append(s);"
        "const d = document.createElement('div'); d.innerHTML = '<img src=x onerror=\"window.hacked = 3\">';"
        "document.body.append(d)"
    )
    time.sleep(0.2)
    assert opened.execute_script("return window.hacked") is None


def shown(browser: Any) -> list[int]:
    return browser.execute_script(
        "return [...document.querySelectorAll('.group')].flatMap((g, i) => g.offsetParent ? [i] : [])"
    )


def press(browser: Any, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def test_groups_are_gone_through_by_keys_alone(opened: Any):
    groups = len(opened.find_elements(By.CLASS_NAME, "group"))
    assert groups == 7
    assert shown(opened) == [0]
    for _ in range(200):
        press(opened, Keys.TAB)
        focused = opened.switch_to.active_element
        if "viewer" in (focused.get_attribute("class") or ""):
            break
    else:
        pytest.fail("the viewer cannot be reached with Tab")
    where = opened.find_element(By.CLASS_NAME, "where")
    assert where.get_attribute("aria-live") == "polite"
    press(opened, Keys.ARROW_RIGHT)
    assert shown(opened) == [1]
    assert where.text.startswith("Group 2 of 7: step 1, prompt circle-")
    press(opened, Keys.END)
    assert shown(opened) == [6]
    press(opened, Keys.ARROW_RIGHT)
    assert shown(opened) == [6], "there is no group after the last"
    press(opened, Keys.HOME)
    assert shown(opened) == [0]
    press(opened, Keys.ARROW_LEFT)
    assert shown(opened) == [0]


def test_buttons_work_by_keys_and_keep_the_focus_at_the_ends(opened: Any):
    last = opened.find_element(By.CSS_SELECTOR, "button[data-go=last]")
    opened.execute_script("arguments[0].focus()", last)
    press(opened, Keys.ENTER)
    assert shown(opened) == [6]
    assert opened.switch_to.active_element == last
    assert last.get_attribute("aria-disabled") == "true"
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert opened.execute_script(outline) == "solid", "the focus is to be seen"


def test_a_page_that_is_loaded_again_shows_the_same_group(opened: Any):
    opened.execute_script("document.querySelector('button[data-go=next]').click()")
    opened.refresh()
    assert shown(opened) == [1]


def contrast(browser: Any, element: str) -> float:
    return browser.execute_script(
        """
        const light = text => {
            const part = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
                .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
        };
        let node = document.querySelector(arguments[0]);
        const style = getComputedStyle(node);
        const ink = light(node.closest("svg") ? style.fill : style.color);
        while (node.parentElement && /, 0\\)$|transparent/.test(getComputedStyle(node).backgroundColor))
            node = node.parentElement;
        const paper = light(getComputedStyle(node).backgroundColor);
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        """,
        element,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_light_and_on_dark_paper(opened: Any, scheme: str):
    light_or_dark(opened, scheme)
    paper = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
    for element in ("h1", "td", "a[href$=json]", ".note", ".missing", "figure text", "td.published", ".badge",
                    ".dropped .badge", "button", "pre", ".cards dt", "summary", "th.published"):  # fmt: skip
        assert contrast(opened, element) >= 4.5, element
    colours = "return new Set([...document.querySelectorAll('figure path')].map(p => getComputedStyle(p).stroke)).size"
    assert opened.execute_script(colours) > 5


def test_lines_of_figures_change_with_the_paper(opened: Any):
    stroke = "return getComputedStyle(document.querySelector('figure [stroke=\"#0072b2\"]')).stroke"
    light_or_dark(opened, "light")
    assert opened.execute_script(stroke) == "rgb(0, 114, 178)"
    light_or_dark(opened, "dark")
    assert opened.execute_script(stroke) == "rgb(86, 180, 233)"


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_a_narrow_window_scrolls_tables_and_not_the_page(opened: Any, width: int):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width


def test_on_paper_all_groups_are_there(opened: Any):
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert shown(opened) == list(range(7))
    assert not opened.find_element(By.TAG_NAME, "nav").is_displayed()


def test_a_page_of_a_run_that_goes_on_loads_itself_again(browser: Any, tmp_path: Path):
    run = train_folder(tmp_path / "run", finished=False)
    report = Report(runs=[run], out=tmp_path / "live.html", every=3)
    report.step()
    assert "loads itself again" in report.out.read_text(encoding="utf-8")
    browser.get(report.out.as_uri() + "#part-1-setup")
    assert browser.title == "FastRL report: run"
    (run / "summary.json").write_text('{"recipe": "over", "methods": []}', encoding="utf-8")
    assert report.step() == (True, True)
    for _ in range(150):
        if browser.title == "FastRL report: over":
            break
        time.sleep(0.2)
    assert browser.title == "FastRL report: over", "also behind a link into the page"
