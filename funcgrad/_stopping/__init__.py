"""Stopping gradients: regions without them, frozen leaves, and leaves that get none."""

from funcgrad._stopping._freeze import Freeze as Freeze
from funcgrad._stopping._freeze import freeze as freeze
from funcgrad._stopping._inference_mode import inference_mode as inference_mode
from funcgrad._stopping._no_grad import no_grad as no_grad
from funcgrad._stopping._no_grad import set_grad_enabled as set_grad_enabled
from funcgrad._stopping._unused import Cut as Cut
from funcgrad._stopping._unused import UnusedGrads as UnusedGrads
from funcgrad._stopping._unused import UnusedLeaf as UnusedLeaf
from funcgrad._stopping._unused import unused_grads as unused_grads
