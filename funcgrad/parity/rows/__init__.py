"""The concept table: one module per section, and every ``Row`` in them, in order."""

from funcgrad.parity._table import Row
from funcgrad.parity.rows import (
    backward_and_grad,
    checkpointing,
    clipping,
    conventions,
    debugging,
    engine,
    function,
    function_class,
    function_context,
    function_uses,
    hooks,
    modules,
    per_sample,
    stopping,
    transforms,
)

ROWS: tuple[Row, ...] = tuple(
    value
    for module in (
        engine,
        backward_and_grad,
        function_class,
        function_context,
        function_uses,
        function,
        stopping,
        hooks,
        checkpointing,
        clipping,
        transforms,
        modules,
        per_sample,
        debugging,
        conventions,
    )
    for value in vars(module).values()
    if isinstance(value, Row)
)
