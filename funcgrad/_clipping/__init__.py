"""Norms of gradients and clipping, overflow-safe and the same on every sharding."""

from funcgrad._clipping._clip import ClippedByNorm as ClippedByNorm
from funcgrad._clipping._clip import clip_grad_norm as clip_grad_norm
from funcgrad._clipping._clip import clip_grad_value as clip_grad_value
from funcgrad._clipping._norm import global_norm as global_norm
from funcgrad._clipping._transformations import ClipState as ClipState
from funcgrad._clipping._transformations import clip_by_total_norm as clip_by_total_norm
from funcgrad._clipping._transformations import clip_by_value as clip_by_value
