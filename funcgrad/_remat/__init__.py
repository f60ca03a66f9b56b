"""Checkpointing: seeing, choosing and changing what is kept for the backward pass."""

from funcgrad._remat._checkpoint import checkpoint as checkpoint
from funcgrad._remat._packing import saved_tensor_hooks as saved_tensor_hooks
from funcgrad._remat._plan import KeptValue as KeptValue
from funcgrad._remat._plan import Plan as Plan
from funcgrad._remat._plan import TradeOff as TradeOff
from funcgrad._remat._plan import plan as plan
from funcgrad._remat._saved import SavedTensors as SavedTensors
from funcgrad._remat._saved import saved_tensors as saved_tensors
from funcgrad._remat._sequential import checkpoint_sequential as checkpoint_sequential
from funcgrad._remat._values import SavedTensor as SavedTensor
