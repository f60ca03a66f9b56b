"""PyTorch's autograd, concept by concept, in functional JAX.

Per-sample gradients: ``per_sample``, ``per_sample_grads``, ``clipped_grad``, ``per_sample_loss``.
Proof against PyTorch: ``python -m funcgrad parity``, and ``funcgrad.parity``.
"""

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
