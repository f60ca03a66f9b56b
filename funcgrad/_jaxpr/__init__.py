"""The core that every feature stands on: a function's jaxpr, read and rewritten.

``trace`` makes the jaxpr of a function of pytrees, ``walk`` visits its equations through
every nested body, ``follow`` tells what depends on what, ``rewrite`` runs it again with
chosen equations replaced, ``source_line`` finds the user's line of an equation.
"""

from funcgrad._jaxpr._alike import alike as alike
from funcgrad._jaxpr._alike import literal as literal
from funcgrad._jaxpr._alike import operation as operation
from funcgrad._jaxpr._bodies import FUNCTION as FUNCTION
from funcgrad._jaxpr._bodies import PASS_THROUGH as PASS_THROUGH
from funcgrad._jaxpr._bodies import Body as Body
from funcgrad._jaxpr._bodies import bodies as bodies
from funcgrad._jaxpr._bodies import has_own_backward as has_own_backward
from funcgrad._jaxpr._bodies import loop_sizes as loop_sizes
from funcgrad._jaxpr._flow import follow as follow
from funcgrad._jaxpr._products import fold_transposes as fold_transposes
from funcgrad._jaxpr._rewrite import bind as bind
from funcgrad._jaxpr._rewrite import evaluate as evaluate
from funcgrad._jaxpr._rewrite import rewrite as rewrite
from funcgrad._jaxpr._source import SourceLine as SourceLine
from funcgrad._jaxpr._source import call_stack as call_stack
from funcgrad._jaxpr._source import calling_line as calling_line
from funcgrad._jaxpr._source import calling_lines as calling_lines
from funcgrad._jaxpr._source import source_line as source_line
from funcgrad._jaxpr._trace import Traced as Traced
from funcgrad._jaxpr._trace import trace as trace
from funcgrad._jaxpr._vjp import Differentiable as Differentiable
from funcgrad._jaxpr._vjp import argument_names as argument_names
from funcgrad._jaxpr._vjp import differentiable as differentiable
from funcgrad._jaxpr._walk import Visit as Visit
from funcgrad._jaxpr._walk import walk as walk
