"""Per-sample gradients: one gradient for each sample of a batch, and what is made of them."""

from funcgrad.per_sample._clipped_grad import ClippedGrad as ClippedGrad
from funcgrad.per_sample._clipped_grad import ClippedGrads as ClippedGrads
from funcgrad.per_sample._clipped_grad import clipped_grad as clipped_grad
from funcgrad.per_sample._reference import PerSampleGrads as PerSampleGrads
from funcgrad.per_sample._reference import per_sample_grads as per_sample_grads
