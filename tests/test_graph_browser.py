"""The page of a graph in a real browser: what it shows, and what it does when it is touched."""

import html
import json
import re

import jax
import jax.numpy as jnp
import pytest

import funcgrad as fg
from funcgrad._graph._place import place

# Both frames hold the page; what is found there is written into the document and dumped.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>
<iframe id="wide" width="1200" height="800" srcdoc="@PAGE@"></iframe>
<iframe id="narrow" width="390" height="800" srcdoc="@PAGE@"></iframe>
<script>
addEventListener("load", () => {
  const found = {};
  try { wide(document.getElementById("wide").contentWindow, found);
        narrow(document.getElementById("narrow").contentWindow, found); }
  catch (error) { found.error = String(error.stack); }
  document.getElementById("found").textContent = JSON.stringify(found);
});
function boxes(doc) {
  const all = {};
  for (const g of doc.querySelectorAll("[data-item]")) {
    const [x, y] = g.getAttribute("transform").match(/-?[\\d.]+/g).map(Number);
    const rect = g.querySelector("rect");
    all[g.dataset.item] = [x, y, +rect.getAttribute("width"), +rect.getAttribute("height")];
  }
  return all;
}
function state(doc) {
  const transform = doc.getElementById("view").getAttribute("transform");
  return transform.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
}
function wide(win, found) {
  const doc = win.document, canvas = doc.getElementById("canvas");
  const fire = (target, kind, type, more) => target.dispatchEvent(
    new win[kind](type, {bubbles: true, cancelable: true, pointerId: 1, ...more}));
  const press = (target, key) => fire(target, "KeyboardEvent", "keydown", {key});
  const by = text => [...doc.querySelectorAll("[data-item]")].filter(
    g => g.querySelector(":scope > text")?.textContent.includes(text));
  const center = g => { const r = g.querySelector("rect").getBoundingClientRect();
    return {clientX: r.left + r.width / 2, clientY: r.top + 6}; };
  found.title = doc.title;
  found.first = boxes(doc);

  const at = canvas.getBoundingClientRect();
  const point = {clientX: 300, clientY: Math.ceil(at.top) + 200};
  found.point = point.clientY - at.top;
  found.before = state(doc);
  fire(canvas, "WheelEvent", "wheel", {deltaY: -300, ...point});
  found.wheeled = state(doc);
  doc.getElementById("out").click();
  found.out = state(doc);
  fire(canvas, "PointerEvent", "pointerdown", {...point, isPrimary: true});
  fire(win, "PointerEvent", "pointermove", {clientX: 340, clientY: point.clientY + 25});
  fire(win, "PointerEvent", "pointerup", {});
  found.dragged = state(doc);
  press(canvas, "ArrowLeft");
  found.arrowed = state(doc);
  press(canvas, "0");
  found.fitted = state(doc);

  const group = by("▸")[0];
  found.closed = {item: group.dataset.item, said: group.getAttribute("aria-label"),
    expanded: group.getAttribute("aria-expanded"), role: group.getAttribute("role"),
    tab: group.getAttribute("tabindex")};
  fire(canvas, "PointerEvent", "pointerdown", {clientX: 0, clientY: 0});
  fire(win, "PointerEvent", "pointerup", {});
  group.dispatchEvent(new win.MouseEvent("click", {bubbles: true}));
  const again = () => doc.querySelector(`[data-item="${found.closed.item}"]`);
  found.opened = {expanded: again().getAttribute("aria-expanded"), boxes: boxes(doc)};
  again().focus();
  press(again(), "Enter");
  found.shut = {expanded: again().getAttribute("aria-expanded"), boxes: boxes(doc),
    focused: doc.activeElement === again()};

  const tip = doc.getElementById("tip");
  const dot = by("matmul").find(g => !g.getAttribute("aria-expanded"));
  fire(dot, "PointerEvent", "pointermove", {...center(dot), pointerType: "mouse"});
  found.hovered = {hidden: tip.hidden, text: tip.innerText};
  const isLeaf = g => !g.getAttribute("aria-expanded");
  const reader = by("").find(g => g.textContent.includes("◆ tanh") && isLeaf(g));
  fire(reader, "PointerEvent", "pointermove", {...center(reader), pointerType: "mouse"});
  found.linked = [...doc.querySelectorAll(".linked")].map(g => g.getAttribute("aria-label"));
  found.reach = doc.querySelectorAll(".reach").length;
  const wire = doc.querySelector(".wide");
  fire(wire, "PointerEvent", "pointermove", {clientX: 100, clientY: 200, pointerType: "mouse"});
  found.wire = tip.innerText;
  dot.dispatchEvent(new win.MouseEvent("click", {bubbles: true}));
  found.pinned = doc.getElementById("details").innerText;
  press(canvas, "Escape");
  found.unpinned = doc.getElementById("details").hidden;

  doc.getElementById("close").click();
  found.all_closed = Object.keys(boxes(doc)).length;
  const search = doc.getElementById("search");
  search.value = "tanh";
  fire(search, "Event", "input", {});
  found.search = {said: doc.getElementById("said").textContent,
    hit: doc.querySelector(".found")?.getAttribute("aria-label")};
  search.value = "no such thing";
  fire(search, "Event", "input", {});
  found.missed = doc.getElementById("said").textContent;
  doc.getElementById("open").click();
  found.all_open = boxes(doc);

  const paper = () => win.getComputedStyle(doc.querySelector("#canvas")).backgroundColor;
  found.light = paper();
  doc.getElementById("theme").click();
  found.dark = paper();
  found.resources = win.performance.getEntriesByType("resource").length;
  found.hacked = doc.querySelectorAll("img").length + (win.hacked ? 1 : 0);
  found.unnamed = [...doc.querySelectorAll("button,input,[role=button]")].filter(
    e => !(e.textContent.trim() || e.getAttribute("aria-label"))).length;
}
function narrow(win, found) {
  const doc = win.document, canvas = doc.getElementById("canvas");
  const rects = [...doc.querySelectorAll("#view > [data-item] > rect")];
  const roots = rects.map(r => r.getBoundingClientRect());
  found.phone = {overflow: doc.documentElement.scrollWidth, lefts: roots.map(r => r.left),
    rights: roots.map(r => r.right), tops: roots.map(r => r.top), scale: state(doc)[2],
    canvas: canvas.clientHeight, button: doc.getElementById("fit").offsetHeight};
}
</script>"""


def loss(params, x):
    with jax.named_scope("attention"):
        w = jax.nn.softmax((x @ params["q"]) @ (x @ params["k"]).T)
        with jax.named_scope("<img src=x onerror='window.hacked=1'>"):
            x = x + (w @ x) @ params["o"]
    with jax.named_scope("mlp"):
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return (x**2).sum()


@pytest.fixture(scope="module")
def graph():
    shapes = {"q": (4, 4), "k": (4, 4), "o": (4, 4), "up": (4, 8), "down": (8, 4)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return fg.graph(loss)(params, jnp.ones((3, 4)))


@pytest.fixture(scope="module")
def found(graph, browse):
    """What the harness saw, from one start of the browser."""
    seen_by = browse(HARNESS.replace("@PAGE@", html.escape(graph.html())), "--window-size=1700,900")
    text = re.search(r'<pre id="found">(.*?)</pre>', seen_by, re.DOTALL)
    assert text and text[1], seen_by[-2000:]
    seen = json.loads(html.unescape(text[1]))
    assert "error" not in seen, seen["error"]
    return seen


def expected(graph, opened):
    """The boxes as Python places them, with the groups in ``opened`` open, by item."""
    scene = graph._scene
    places = {}

    def visit(number, box, x, y):
        places[str(number)] = (x, y, box.width, box.height)
        children = scene.items[number].children
        for slot, (left, top, inner) in box.slots.items():
            if inner is not None:
                visit(scene.number[children[slot]], inner, left, top)

    before = [item.open for item in scene.items]
    for item, is_open in zip(scene.items, opened, strict=True):
        item.open = is_open
    x = 0.0
    for part in scene.parts:
        box = place(scene, scene.number[part])
        visit(scene.number[part], box, x, 0.0)
        x += box.width + 36
    for item, is_open in zip(scene.items, before, strict=True):
        item.open = is_open
    return places


def assert_same(seen, places):
    assert seen.keys() == places.keys()
    for number, box in places.items():
        assert seen[number] == pytest.approx(box, abs=0.11), number  # rounded to a tenth


def test_boxes_stand_where_python_places_them(graph, found):
    as_given = [item.open for item in graph._scene.items]
    assert found["title"] == "loss"
    assert_same(found["first"], expected(graph, as_given))
    toggled = list(as_given)
    toggled[int(found["closed"]["item"])] = True
    assert_same(found["opened"]["boxes"], expected(graph, toggled))
    assert_same(found["shut"]["boxes"], expected(graph, as_given))
    assert_same(found["all_open"], expected(graph, [True] * len(as_given)))


def test_groups_open_and_close_by_click_and_by_key(found):
    closed, opened, shut = found["closed"], found["opened"], found["shut"]
    assert (closed["expanded"], opened["expanded"], shut["expanded"]) == ("false", "true", "false")
    assert (closed["role"], closed["tab"]) == ("button", "0") and "saves" in closed["said"]
    assert shut["focused"]
    assert found["all_closed"] < len(found["first"]) < len(found["all_open"])


def test_wheel_zooms_about_the_pointer_and_drag_and_keys_move(found):
    (x0, y0, s0), (x1, y1, s1) = found["before"], found["wheeled"]
    assert s1 > 1.3 * s0
    assert (300 - x1) / s1 == pytest.approx((300 - x0) / s0)
    assert (found["point"] - y1) / s1 == pytest.approx((found["point"] - y0) / s0)
    assert found["out"][2] == pytest.approx(0.8 * s1)
    assert found["dragged"][:2] == pytest.approx([found["out"][0] + 40, found["out"][1] + 25])
    assert found["arrowed"][0] == pytest.approx(found["dragged"][0] + 60)
    assert found["fitted"][2] < found["arrowed"][2]


def test_hovering_tells_everything_and_links_what_is_kept_to_its_reader(found):
    hovered = found["hovered"]
    assert not hovered["hidden"]
    for word in ("dot_general", "f32[3,4]", "FLOP", "test_graph_browser.py", "params"):
        assert word in hovered["text"] + found["pinned"]
    assert any("tanh" in label or "mlp" in label for label in found["linked"])
    assert found["reach"] == len(found["linked"])
    assert found["wire"].startswith("f32[")
    assert found["unpinned"]


def test_search_opens_what_it_finds(found):
    assert re.fullmatch(r"1 of \d+", found["search"]["said"])
    assert found["search"]["hit"]
    assert found["missed"] == "nothing found"


def test_light_and_dark_differ_and_nothing_is_loaded_or_run(found):
    assert found["light"] == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", found["dark"]))) < 60
    assert found["resources"] == 0 and found["hacked"] == 0 and found["unnamed"] == 0


def test_on_a_phone_the_parts_stand_one_above_the_other_and_fit(found):
    phone = found["phone"]
    assert phone["overflow"] <= 390
    assert phone["tops"][0] < phone["tops"][1]
    assert min(phone["lefts"]) >= 0 and max(phone["rights"]) <= 390
    assert phone["scale"] >= 0.69 and phone["canvas"] > 400 and phone["button"] >= 36
