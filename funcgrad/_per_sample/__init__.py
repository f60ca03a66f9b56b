"""Per-sample gradients: one gradient for each sample of a batch, and what is made of them."""

from funcgrad._per_sample._clipped_grad import ClippedGrad as ClippedGrad
from funcgrad._per_sample._clipped_grad import ClippedGrads as ClippedGrads
from funcgrad._per_sample._clipped_grad import clipped_grad as clipped_grad
from funcgrad._per_sample._per_sample import per_sample as per_sample
from funcgrad._per_sample._reference import PerSampleGrads as PerSampleGrads
from funcgrad._per_sample._reference import per_sample_grads as per_sample_grads
from funcgrad._per_sample._roads import LeafRoad as LeafRoad
from funcgrad._per_sample._sample_axis import SampleMixingError as SampleMixingError
from funcgrad._per_sample._sample_axis import per_sample_loss as per_sample_loss
from funcgrad._per_sample._samples import NoiseScale as NoiseScale
from funcgrad._per_sample._samples import Samples as Samples
