"""An order of operations in which those of one module stand together."""

import heapq
from collections.abc import Mapping, Sequence

from funcgrad._graph._data import Call


def schedule(
    items: Sequence[int],
    before: Mapping[int, set[int]],
    calls: Mapping[int, tuple[Call, ...]],
    fed: set[int],
) -> list[int]:
    """``items`` in an order in which ``before`` each come those it needs.

    Each time, of those that may come next, one of the same call is taken, else one that
    shares the most calls with the last, else the first.  So a module is left as seldom as
    possible, and the quotient of this order by runs of one module has no cycles.  What is not
    ``fed``, such as a parameter's change of shape, could come at any time: it comes just before
    what needs it.
    """
    fed = fed or set(items)
    left = {item: len(before.get(item, set()) & fed) for item in items}
    after: dict[int, list[int]] = {}
    for item, needed in before.items():
        for other in needed:
            after.setdefault(other, []).append(item)
    same: dict[tuple[Call, ...], list[int]] = {}
    within: dict[tuple[Call, ...], list[int]] = {}

    def ready(item: int) -> None:
        heapq.heappush(same.setdefault(calls[item], []), item)
        for depth in range(len(calls[item]) + 1):
            heapq.heappush(within.setdefault(calls[item][:depth], []), item)

    done: set[int] = set()

    def first(heap: list[int] | None) -> int | None:
        while heap:
            if heap[0] not in done:
                return heap[0]
            heapq.heappop(heap)
        return None

    for item in items:
        if item in fed and not left[item]:
            ready(item)
    order: list[int] = []

    def place(item: int) -> None:
        for other in sorted(before.get(item, set()) - fed):
            if other not in done:
                done.add(other)
                place(other)
        order.append(item)

    here: tuple[Call, ...] = ()
    for _ in fed:
        found = first(same.get(here))
        for depth in range(len(here), -1, -1):
            if found is None:
                found = first(within.get(here[:depth]))
        assert found is not None, "the nodes of one program have no cycle"
        done.add(found)
        place(found)
        here = calls[found]
        for item in after.get(found, ()):
            left[item] -= 1
            if item in fed and not left[item]:
                ready(item)
    for item in items:  # and what nothing needs
        if item not in done:
            done.add(item)
            place(item)
    return order
