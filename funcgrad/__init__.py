"""PyTorch's autograd, concept by concept, in functional JAX.

Per-sample gradients: ``per_sample``, ``per_sample_grads``, ``clipped_grad``, ``per_sample_loss``.
Stopping gradients: ``no_grad``, ``set_grad_enabled``, ``inference_mode``, ``freeze``,
``unused_grads``.
Checkpointing: ``saved_tensors``, ``checkpoint``, ``policies``, ``saved_tensor_hooks``, ``packs``,
``checkpoint_sequential``, ``plan``.
Derivative rules of one's own: ``Function``, ``once_differentiable``.
Clipping and accumulation: ``clip_grad_norm``, ``clip_grad_value``, ``global_norm``,
``clip_by_total_norm``, ``clip_by_value``, ``accumulate_grads``.
Communication between devices: ``collectives``, ``assert_matches_unsharded``.
Hooks: ``grad_hook``, ``grad_hooks``, ``module_hooks``, ``name_outputs``, ``capture``,
``capture_grads``.
Function transforms: ``vmap``, ``jacrev``, ``jacfwd``, ``jacobian``, ``hessian``,
``hessian_diagonal``, ``hessian_trace``, ``hutchinson``, ``hvp``, ``vhp``, ``gnvp``.
Finding where a NaN begins: ``detect_anomaly``. The graph to look at: ``graph``.
Checking derivatives: ``gradcheck``, ``gradgradcheck``.
Flax modules as functions: ``functional_call``, ``stack_modules``.
Proof against PyTorch: ``python -m funcgrad parity``, and ``funcgrad.parity``.
"""

# Namespaces
from funcgrad import collectives as collectives
from funcgrad import packs as packs
from funcgrad import policies as policies

# Accumulation
from funcgrad._accumulation import Accumulated as Accumulated
from funcgrad._accumulation import accumulate_grads as accumulate_grads

# Debugging
from funcgrad._anomaly import Anomaly as Anomaly
from funcgrad._anomaly import AnomalyError as AnomalyError
from funcgrad._anomaly import detect_anomaly as detect_anomaly

# Clipping
from funcgrad._clipping import ClippedByNorm as ClippedByNorm
from funcgrad._clipping import ClipState as ClipState
from funcgrad._clipping import clip_by_total_norm as clip_by_total_norm
from funcgrad._clipping import clip_by_value as clip_by_value
from funcgrad._clipping import clip_grad_norm as clip_grad_norm
from funcgrad._clipping import clip_grad_value as clip_grad_value
from funcgrad._clipping import global_norm as global_norm

# Derivative rules of one's own
from funcgrad._function import Function as Function
from funcgrad._function import once_differentiable as once_differentiable

# Derivatives against finite differences
from funcgrad._gradcheck import GradcheckEntry as GradcheckEntry
from funcgrad._gradcheck import GradcheckError as GradcheckError
from funcgrad._gradcheck import GradcheckReport as GradcheckReport
from funcgrad._gradcheck import gradcheck as gradcheck
from funcgrad._gradcheck import gradgradcheck as gradgradcheck

# The graph
from funcgrad._graph import Graph as Graph
from funcgrad._graph import Node as Node
from funcgrad._graph import graph as graph

# Hooks and capture
from funcgrad._hooks import Captured as Captured
from funcgrad._hooks import CapturedGrads as CapturedGrads
from funcgrad._hooks import capture as capture
from funcgrad._hooks import capture_grads as capture_grads
from funcgrad._hooks import grad_hook as grad_hook
from funcgrad._hooks import grad_hooks as grad_hooks
from funcgrad._hooks import module_hooks as module_hooks
from funcgrad._hooks import name_outputs as name_outputs

# Communication
from funcgrad._matches_unsharded import assert_matches_unsharded as assert_matches_unsharded

# Flax modules
from funcgrad._modules import Called as Called
from funcgrad._modules import Stacked as Stacked
from funcgrad._modules import functional_call as functional_call
from funcgrad._modules import stack_modules as stack_modules

# Per-sample gradients
from funcgrad._per_sample import ClippedGrad as ClippedGrad
from funcgrad._per_sample import ClippedGrads as ClippedGrads
from funcgrad._per_sample import LeafRoad as LeafRoad
from funcgrad._per_sample import NoiseScale as NoiseScale
from funcgrad._per_sample import PerSampleGrads as PerSampleGrads
from funcgrad._per_sample import SampleMixingError as SampleMixingError
from funcgrad._per_sample import Samples as Samples
from funcgrad._per_sample import clipped_grad as clipped_grad
from funcgrad._per_sample import per_sample as per_sample
from funcgrad._per_sample import per_sample_grads as per_sample_grads
from funcgrad._per_sample import per_sample_loss as per_sample_loss

# Checkpointing
from funcgrad._remat import KeptValue as KeptValue
from funcgrad._remat import Plan as Plan
from funcgrad._remat import SavedTensor as SavedTensor
from funcgrad._remat import SavedTensors as SavedTensors
from funcgrad._remat import TradeOff as TradeOff
from funcgrad._remat import checkpoint as checkpoint
from funcgrad._remat import checkpoint_sequential as checkpoint_sequential
from funcgrad._remat import plan as plan
from funcgrad._remat import saved_tensor_hooks as saved_tensor_hooks
from funcgrad._remat import saved_tensors as saved_tensors

# Stopping gradients
from funcgrad._stopping import Freeze as Freeze
from funcgrad._stopping import UnusedGrads as UnusedGrads
from funcgrad._stopping import UnusedLeaf as UnusedLeaf
from funcgrad._stopping import freeze as freeze
from funcgrad._stopping import inference_mode as inference_mode
from funcgrad._stopping import no_grad as no_grad
from funcgrad._stopping import set_grad_enabled as set_grad_enabled
from funcgrad._stopping import unused_grads as unused_grads

# Function transforms
from funcgrad._transforms import HessianEstimate as HessianEstimate
from funcgrad._transforms import Jacobian as Jacobian
from funcgrad._transforms import gnvp as gnvp
from funcgrad._transforms import hessian as hessian
from funcgrad._transforms import hessian_diagonal as hessian_diagonal
from funcgrad._transforms import hessian_trace as hessian_trace
from funcgrad._transforms import hutchinson as hutchinson
from funcgrad._transforms import hvp as hvp
from funcgrad._transforms import jacfwd as jacfwd
from funcgrad._transforms import jacobian as jacobian
from funcgrad._transforms import jacrev as jacrev
from funcgrad._transforms import vhp as vhp
from funcgrad._transforms import vmap as vmap
