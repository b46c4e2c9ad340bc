"""The comparison page in a real browser, on a desk and on a phone, in light and in dark."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.observe.browser import CHROMIUM, chromium_page
from tests.observe.runs import as_a_client_sees, made_up, write_run
from tests.observe.test_report import HOSTILE, hostile_runs
from tidegate.core.slo import DEFAULT_CLASSES
from tidegate.observe.records import write_records
from tidegate.observe.report import Run, write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")

# Of each chart: how many pixels have the colour of each of its curves, and the text around it.
INK = """
[...document.querySelectorAll(".plot")].map(plot => {
  const canvas = plot.querySelector("canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const chart = JSON.parse(document.getElementById("data").textContent).charts[plot.id];
  const style = getComputedStyle(document.documentElement);
  const ink = chart.series.map(s => {
    const hex = style.getPropertyValue(`--c${s.colour}`).trim();
    const rgb = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
    let count = 0;
    for (let i = 0; i < pixels.length; i += 4) {
      if (pixels[i + 3] > 200 && rgb.every((c, j) => Math.abs(c - pixels[i + j]) < 12)) count++;
    }
    return count;
  });
  const figure = plot.parentElement;
  return {id: plot.id, ink, title: figure.querySelector("figcaption").textContent,
          label: plot.getAttribute("aria-label"), x: chart.x.label,
          y: chart.y.label, below: figure.querySelector(".readout").textContent};
})
"""
TABLE = "[...document.querySelectorAll('#worst-table tbody tr')].map(row => [...row.cells].map(c => c.textContent))"
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
CHOOSE = """
(() => {{
  const field = document.getElementById("worst-{field}");
  field.value = "{value}";
  field.dispatchEvent(new Event("input"));
}})()
"""
BOX = """
(() => {
  const box = document.querySelector(".plot .u-over").getBoundingClientRect();
  return [box.x, box.y, box.width];
})()
"""

# Text whose contrast to what is behind it is under 4.5 (WCAG AA), by its own words.
FAINT = """
(() => {
  const light = c => { const v = c / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const bright = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility())
    .filter(e => {
      const [a, b] = [bright(rgb(getComputedStyle(e).color)), bright(behind(e))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
    })
    .map(e => e.textContent.slice(0, 40));
})()
"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two simulated runs and a measured one."""
    folder = tmp_path_factory.mktemp("page")
    runs = [
        Run.of_file(write_run(folder, name, made_up(400, slow))) for name, slow in (("vllm-v1", 3.0), ("joint", 1.0))
    ]
    write_records(as_a_client_sees(made_up(400, 1.1, seed=2)), folder / "real.jsonl")
    runs.append(Run.of_file(folder / "real.jsonl", name="joint", measured=True))
    write_report(runs, folder / "page.html", promises=DEFAULT_CLASSES, title="Two policies")
    return folder / "page.html"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_the_page_is_drawn_whole_at_every_width(page_file: Path, tmp_path: Path, width: int, dark: bool) -> None:
    async with chromium_page(tmp_path) as page:
        await page.open(page_file, width, dark=dark)
        assert await page.evaluate("document.documentElement.dataset.ready") == "true"
        wide, visible = await page.evaluate(WIDTHS)
        assert (wide, visible) == (width, width), "the page does not scroll sideways"
        charts = await page.evaluate(INK)
        assert len(charts) == 15
        for chart in charts:
            assert all(ink > 40 for ink in chart["ink"]), chart
            assert all(chart[part] for part in ("title", "label", "x", "y", "below")), chart
            assert "(" in chart["x"], "the axis has a unit"
        assert await page.evaluate(FAINT) == []
        picture = await page.screenshot()
        (tmp_path / "page.png").write_bytes(picture)
        assert struct.unpack(">I", picture[16:20]) == (width,)
        assert len(picture) > 50_000
        assert page.complaints == []
        assert page.asked_for == [page_file.as_uri()]


async def test_the_table_is_sorted_and_filtered(page_file: Path, tmp_path: Path) -> None:
    async with chromium_page(tmp_path) as page:
        await page.open(page_file, 1280)
        rows = await page.evaluate(TABLE)
        assert len(rows) > 100
        waits = [float(row[4]) for row in rows if row[4] != "–"]
        assert waits == sorted(waits, reverse=True)
        click = "[...document.querySelectorAll('#worst-table th button')].find(b => b.textContent === 'Prompt').click()"
        await page.evaluate(click)
        await page.evaluate(click)
        sizes = [float(row[10].replace("k", "e3")) for row in await page.evaluate(TABLE)]
        assert sizes == sorted(sizes)
        for field, value in (("run", "joint"), ("class", "batch"), ("text", "ACME")):
            await page.evaluate(CHOOSE.format(field=field, value=value))
        left = await page.evaluate(TABLE)
        assert left
        assert {(row[0], row[1], row[3]) for row in left} == {("joint", "batch", "acme")}
        await page.evaluate("document.getElementById('worst-missed').click()")
        assert {row[8] for row in await page.evaluate(TABLE)} <= {"broken"}
        assert page.complaints == []


async def test_a_run_can_be_hidden_and_a_chart_read_and_zoomed(page_file: Path, tmp_path: Path) -> None:
    async with chromium_page(tmp_path) as page:
        await page.open(page_file, 1280)
        await page.evaluate("document.querySelector('button.run').click()")
        await page.evaluate("new Promise(done => setTimeout(done, 100))")
        charts = await page.evaluate(INK)
        assert all(chart["ink"][0] == 0 < chart["ink"][1] for chart in charts)
        await page.evaluate("document.querySelector('.plot').scrollIntoView({block: 'center', behavior: 'instant'})")
        x, y, width = await page.evaluate(BOX)
        mouse = {"y": y + 60, "button": "left", "clickCount": 1}
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + width / 2, y=y + 60)
        below = await page.evaluate("document.querySelector('.readout').innerText")
        assert "joint: " in below
        assert "%" in below
        assert "half" not in below, "what the cursor points at, no longer the quantiles"
        await page.send("Input.dispatchMouseEvent", type="mousePressed", x=x + width / 4, **mouse)
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + width / 2, **mouse)
        before = await page.screenshot()
        await page.send("Input.dispatchMouseEvent", type="mouseReleased", x=x + width / 2, **mouse)
        assert await page.screenshot() != before
        assert page.complaints == []


async def test_hostile_names_stay_text(tmp_path: Path) -> None:
    write_report(hostile_runs(tmp_path), tmp_path / "page.html", title=HOSTILE)
    async with chromium_page(tmp_path / "profile") as page:
        await page.open(tmp_path / "page.html", 390)
        assert await page.evaluate("window.hit === undefined")
        assert await page.evaluate("document.querySelectorAll('img').length") == 0
        assert await page.evaluate("document.querySelector('#worst-table tbody td').textContent") in (
            await page.evaluate("JSON.parse(document.getElementById('data').textContent).runs.map(r => r.name)")
        )
        assert await page.evaluate(WIDTHS) == [390, 390]
        assert page.complaints == []
        # Were a name ever to become a tag after all, the page's policy would not let it run.
        await page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit=1\">')")
        await page.evaluate("new Promise(done => setTimeout(done, 200))")
        assert await page.evaluate("window.hit === undefined")
