"""Hooks and capture: see and change values and cotangents on their way.

``_pass_through`` is the primitive underneath: the identity with a backward of its own.
``_grad_hook`` puts a hook on a value, ``_module_hooks`` on the modules of a Flax model,
``_capture`` returns named values and their cotangents.
"""

from funcgrad._hooks._capture import Captured as Captured
from funcgrad._hooks._capture import CapturedGrads as CapturedGrads
from funcgrad._hooks._capture import capture as capture
from funcgrad._hooks._capture import capture_grads as capture_grads
from funcgrad._hooks._grad_hook import grad_hook as grad_hook
from funcgrad._hooks._grad_hook import grad_hooks as grad_hooks
from funcgrad._hooks._module_hooks import module_hooks as module_hooks
from funcgrad._hooks._module_hooks import name_outputs as name_outputs
