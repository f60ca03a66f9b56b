"""A page that is complete in itself: the scene as data, and a template that draws it."""

import importlib.resources
import json
import re
from typing import Any

from funcgrad._graph import _place
from funcgrad._graph._scene import LINE, PAD, Scene
from funcgrad._graph._svg import STYLE, carried, classes
from funcgrad._graph._words import clipped, escape


def page(scene: Scene) -> str:
    """The text of an HTML file without any outside resource."""
    template = importlib.resources.files("funcgrad._graph").joinpath("page.html")
    told = scene.totals + (f"; no backward pass: {scene.no_backward}" if scene.no_backward else "")
    # Nothing in a script element ends it but "</script", and a comment may open another.
    data = json.dumps(_data(scene), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(clipped(scene.title, 100)),
        "TOTALS": escape(told),
        "STYLE": STYLE,
        "DATA": data,
    }
    text = template.read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], text)


def _data(scene: Scene) -> dict[str, Any]:
    number_of = {item.node.id: i for i, item in enumerate(scene.items) if item.node is not None}
    return {
        "parts": [scene.number[part] for part in scene.parts],
        "line": LINE,
        "pad": PAD,
        "gapX": _place.GAP_X,
        "gapY": _place.GAP_Y,
        "passage": _place.PASSAGE,
        "head": _place.HEAD,
        "sweeps": _place.SWEEPS,
        "straight": _place.STRAIGHT,
        "items": [_item(scene, i, number_of) for i in range(len(scene.items))],
    }


def _item(scene: Scene, i: int, number_of: dict[int, int]) -> dict[str, Any]:
    item, words = scene.items[i], scene.words[i]
    made: dict[str, Any] = {
        "c": f"group {item.kind}" if item.children else classes(item, 0),
        "l": words.lines,
        "d": words.details,
        "w": words.width,
        "h": words.height,
        "n": [scene.number[child] for child in item.children],
        "s": sorted({number_of[c.source] for c in item.chips if c.source in number_of}),
    }
    if item.kind == "end":
        made["end"] = True
    if item.children:
        rows = scene.rows[i]
        made |= {
            "open": item.open,
            "head": words.head,
            "hw": words.head_width,
            "rows": rows.rows,
            "links": [(a, b, carried(item, ends)) for a, b, ends in rows.links],
            "in": rows.inlet,
            "out": rows.outlet,
        }
    return made
