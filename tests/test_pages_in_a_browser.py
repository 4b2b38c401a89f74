"""Pages in Chromium, at the widths of a phone, a tablet and a desk, light and dark: run by --browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_suite_page import held_file

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
AXE = Path(os.environ.get("AXE_CORE", ROOT / "node_modules/axe-core/axe.min.js"))
CHECK = """
addEventListener("load", async () => {
  const cut = [];
  for (const svg of document.querySelectorAll("svg")) {
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const texts = [...svg.querySelectorAll("text:not([transform])")];
    const level = texts.map(each => [each.textContent, each.getBBox()]);
    for (const [i, [text, a]] of level.entries()) {
      if (a.x < 0 || a.y < 0 || a.x + a.width > width || a.y + a.height > height) cut.push(text);
      for (const [other, b] of level.slice(i + 1))
        if (a.x < b.x + b.width && b.x < a.x + a.width &&
            a.y + 3 < b.y + b.height && b.y + 3 < a.y + a.height)
          cut.push(`${text} on ${other}`);
    }
  }
  const root = document.documentElement;
  const found = await axe.run();
  const told = parent.document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify({
    width: innerWidth, overflow: Math.max(0, root.scrollWidth - innerWidth), cut,
    ground: getComputedStyle(document.body).backgroundColor,
    violations: found.violations.map(each => each.id + ": " + each.nodes.map(node => node.html)),
  });
  parent.document.body.append(told);
});
"""
# No window of Chromium is as narrow as a phone.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe style="width: {width}px; height: 6000px; border: 0" srcdoc="{page}"></iframe>"""
SCHEMES = {"dark": "rgb(20, 23, 26)", "light": "rgb(255, 255, 255)"}  # and the ground of a page


def chromium(*words: str) -> subprocess.CompletedProcess[str]:
    still = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = ["chromium", *still, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a problem, the suite and a bench; and those that PAGES names, such as one with a trial log."""
    folder = tmp_path_factory.mktemp("pages")
    sizes = ["--m", "4096", "--n", "4096", "--k", "4096", "--ladder"]
    bench = [str(held_file(folder / "bench.json"))]
    for name, words in (("problem", sizes), ("suite", ["--suite"]), ("bench", bench)):
        command = [sys.executable, "-m", "autotune", "report", *words, "--target", "h200"]
        command += ["--out", str(folder / f"{name}.html")]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    for own in os.environ.get("PAGES", "").split():
        (folder / Path(own).name).write_text(Path(own).read_text())
    return sorted(folder.glob("*.html"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_a_page_is_whole_and_accessible(pages, width, scheme, tmp_path):
    for page in pages:
        look = [
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            f"--window-size={width},6000",
        ]
        picture = page.with_name(f"{page.stem}_{width}_{scheme}.png")
        told = chromium(*look, f"--screenshot={picture}", page.as_uri())
        assert "CONSOLE" not in told.stderr, page.name
        checked = tmp_path / page.name
        script = f"<script>{AXE.read_text()}{CHECK}</script>"
        inside = html.escape(page.read_text().replace("</body>", f"{script}</body>"))
        checked.write_text(FRAME.format(width=width, page=inside))
        told = chromium(*look, "--virtual-time-budget=20000", "--dump-dom", checked.as_uri())
        (text,) = re.findall('<pre id="told">(.*?)</pre>', told.stdout, re.DOTALL)
        found = json.loads(html.unescape(text))
        expected = {"width": width, "overflow": 0, "cut": [], "ground": SCHEMES[scheme], "violations": []}
        assert found == expected, page.name
