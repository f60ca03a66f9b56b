"""Custom derivative rules: ``torch.autograd.Function`` in functional form."""

from funcgrad._function._class import Function as Function
from funcgrad._function._context import Context as Context
from funcgrad._function._context import once_differentiable as once_differentiable
