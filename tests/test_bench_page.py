import dataclasses
import html.parser
import json
import re
from pathlib import Path

import pytest

from funcgrad.bench import _page, _page_plots, _report
from funcgrad.bench._tables import Column, Plot, Row, Table, losses

RESULTS = Path(_report.__file__).parent / "results"
EVIL = "<script>alert('x')</script> & \"quoted\""

TIME = Column("time", "ms", "lower")
COLUMNS = (TIME, Column("low", "ms"), Column("high", "ms"), Column("speed", "/s", "higher", ".0f"))
ROWS = (
    Row("slow", (30.0, 25.0, 40.0, 3.0), "sum"),
    Row("fg.mine", (20.0, 15.0, 21.0, 5.0), "sum", ours=True),
    Row("fast", (2.5, 2.0, 3.0, 40.0), "sum"),
    Row("off", (1.0, 1.0, 1.0, 99.0), "sum", wrong=True),
    Row("away", group="sum", reason="absent: it is not installed"),
    Row("fg.alone", (100.0, 90.0, 110.0, 1.0), "other", ours=True),
)
TABLE = Table(
    EVIL, "way", COLUMNS, ROWS, (EVIL,), Plot(("time",), spread=("low", "high")), ("time", "speed")
)
CURVE = Table(
    "curve",
    "size",
    (Column("plain", "ms"), Column("fg", "ms", ours=True)),
    (Row("1", (1.0, 2.0)), Row("8", (4.0, None)), Row("64", (32.0, 30.0))),
    plot=Plot(("plain", "fg"), x="size"),
    summary=True,
)
FIGURES = {
    "date": "2026-01-02",
    "seed": 0,
    "turns": 5,
    "quick": False,
    "machine": {
        "date": "2026-01-02", "processor": EVIL, "cores": 2, "device": "cpu", "system": "Linux",
        "python": "3.11", "versions": {"jax": "0.10"},
    },
    "models": {"m": {"load": 1.5}},
}  # fmt: skip


def section(*tables):
    return _page.Section("task", "A task", (EVIL,), FIGURES, tables)


class Reader(html.parser.HTMLParser):
    """Collects what a page refers to, its scripts, and its text."""

    def __init__(self, text):
        super().__init__()
        self.links, self.scripts, self.text, self.open = [], 0, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.links += [v for k, v in attrs if k in ("href", "src", "srcset", "action")]
        if tag not in ("meta", "link", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_needs_nothing_beside_itself_and_escapes_what_it_shows():
    text = _page.html([section(TABLE, CURVE)])
    reader = Reader(text)
    assert reader.open == [] and reader.scripts == 1
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "<script>alert" not in text
    assert sum(part == EVIL for part in reader.text) >= 3
    for words in ("2026-01-02", "jax 0.10", "1.5 to 1.5", "absent: it is not installed", "30.0"):
        assert any(words in part for part in reader.text), words


def test_facts_say_the_days_of_all_models():
    days = lambda *given: {"models": {str(i): {"date": day} for i, day in enumerate(given)}}
    facts = lambda models: dict(_page.facts({**FIGURES, **models}))["date"]
    assert facts(days("2026-01-02", "2026-01-01")) == "2026-01-01 to 2026-01-02"
    assert facts(days("2026-01-01")) == "2026-01-01"
    assert facts({"models": {}}) == "2026-01-02"


def test_losses_are_the_best_of_ours_behind_the_best_that_is_right():
    found = losses([TABLE])
    assert [(loss.column.name, loss.ours.name, loss.theirs.name) for loss in found] == [
        ("time", "fg.mine", "fast"),
        ("speed", "fg.mine", "fast"),
    ]
    assert [loss.factor for loss in found] == [8.0, 8.0]
    text = _page.html([section(TABLE)])
    assert "20.0 ms, fg.mine" in text and "2.5 ms, fast" in text
    close = Table("t", "way", (TIME,), (Row("a", (10.0,)), Row("b", (10.4,), ours=True)))
    close = dataclasses.replace(close, compared=("time",))
    assert losses([close]) == []
    tiny = Table("t", "way", (TIME,), (Row("a", (0.01,)), Row("b", (0.04,), ours=True)))
    assert losses([dataclasses.replace(tiny, compared=("time",))]) == []
    assert "Nowhere, in what was measured." in _page.html([section(close)])


@pytest.mark.parametrize("values", [(1.0, 1.0), (0.9, 1.1), (3e-4, 7e5), (5.0,), (0.0, 0.3), ()])
def test_axis_holds_its_values_and_few_round_ticks(values):
    axis = _page_plots.Axis(values)
    assert all(0 <= axis.share(value) <= 1 for value in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(0 <= axis.share(tick) <= 1 for tick in ticks)


def test_every_committed_figure_is_on_the_page():
    sections = _report.sections(RESULTS)
    assert {s.name for s in sections} == {
        name for name in _report.TASKS if (RESULTS / f"{_report._stem(name)}.json").exists()
    }
    reader = Reader(_page.html(sections))
    text = "\n".join(reader.text)
    for of in sections:
        assert of.figures["date"] in text
        for table in of.tables:
            assert table.title in text
            assert all(row.name in text for row in table.rows)


# Run by the browser, at the end of the page; what it finds stands in the title.
SELF_TEST = """{
const failed = [];
const check = (what, fine) => { if (!fine) failed.push(what); };
const tables = [...document.querySelectorAll("#task table")];
const table = tables.find((table) => table.textContent.includes("fg.mine"));
const [head, ...heads] = table.tHead.rows[0].cells;
const names = () =>
  [...table.tBodies[0].rows].map((row) => row.cells[0].textContent).join(",");
const before = names();
heads[0].querySelector("button").click();
check("ascending", names() === "off wrong,fast,fg.mine,slow,fg.alone,away");
check("aria-sort", heads[0].getAttribute("aria-sort") === "ascending");
heads[0].querySelector("button").click();
check("descending", names() === "fg.alone,slow,fg.mine,fast,off wrong,away");
head.querySelector("button").focus();
check("keyboard", document.activeElement === head.querySelector("button"));
document.activeElement.click();
check("by name", names() === "away,fast,fg.alone,fg.mine,off wrong,slow");
check("aria-sort moves", heads[0].getAttribute("aria-sort") === "none");
check("all rows stay", before.split(",").sort().join() === names().split(",").sort().join());
const dot = document.querySelector(".dots .mine");
dot.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
const tip = document.querySelector("#tip");
check("tip", !tip.hidden && tip.textContent === "fg.mine: time 20.0 ms");
document.body.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
check("tip goes", tip.hidden);
const circle = document.querySelector("circle");
circle.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
check("tip of a line", tip.textContent === "plain: plain 1.0 ms at size 1");
check("no alert", document.scripts.length === 2);
const size = (element) => element.getBoundingClientRect();
check("dots have a place", size(dot).width > 5 && size(dot).left > size(dot.parentElement).left);
const paper = () => getComputedStyle(document.body).backgroundColor;
check("a background", paper() !== "rgba(0, 0, 0, 0)");
const frame = document.createElement("iframe");
frame.style = "width: 390px; height: 800px; border: 0";
const copy = document.documentElement.cloneNode(true);
for (const script of copy.querySelectorAll("script")) script.remove();
frame.srcdoc = "<!doctype html>" + copy.outerHTML;
frame.onload = () => {
  const inner = frame.contentDocument.documentElement;
  check("fits a phone", inner.clientWidth > 370 && inner.scrollWidth <= inner.clientWidth);
  document.title = JSON.stringify(failed);
};
document.body.append(frame);
}"""


def test_page_sorts_shows_values_and_fits_a_phone_in_a_browser(browse):
    page = _page.html([section(TABLE, CURVE)])
    page = page.replace("</body>", f"<script>{SELF_TEST}</script>\n</body>")
    seen = browse(page, "--window-size=1200,900", "--virtual-time-budget=10000")
    title = re.search(r"<title>(.*?)</title>", seen)
    assert title, seen[-2000:]
    failed = json.loads(html.unescape(title[1]))
    assert failed == [], failed
