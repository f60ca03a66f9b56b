"""Numbers and names as words for people."""

import html
import re

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKS = re.compile("[\x00-\x1f\x7f\u2028-\u202e\u2066-\u2069]")


def size_text(size: int) -> str:
    """Bytes, ``1.5 MiB``."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_text(count: int) -> str:
    """Operations, ``1.5 MFLOP``."""
    return _scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(number: int | float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= step
    return f"{number:.3g} {units[-1]}"


def one_line(text: str) -> str:
    """Text without line breaks, control characters and marks that turn the direction."""
    return _MARKS.sub("\ufffd", _NOT_XML.sub("\ufffd", text))


def clipped(text: str, length: int) -> str:
    """At most ``length`` characters, with dots where it is cut."""
    text = one_line(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def escape(text: str) -> str:
    """Text as XML and HTML hold it."""
    return html.escape(_NOT_XML.sub("\ufffd", text))
