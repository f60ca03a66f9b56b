"""Function transforms: chunked maps and Jacobians, and products with second derivatives."""

from funcgrad._transforms._gauss_newton import gnvp as gnvp
from funcgrad._transforms._hessian import hessian as hessian
from funcgrad._transforms._hessian import hessian_diagonal as hessian_diagonal
from funcgrad._transforms._hessian import hessian_trace as hessian_trace
from funcgrad._transforms._hutchinson import HessianEstimate as HessianEstimate
from funcgrad._transforms._hutchinson import hutchinson as hutchinson
from funcgrad._transforms._hvp import hvp as hvp
from funcgrad._transforms._hvp import vhp as vhp
from funcgrad._transforms._jacobian import Jacobian as Jacobian
from funcgrad._transforms._jacobian import jacobian as jacobian
from funcgrad._transforms._modes import jacfwd as jacfwd
from funcgrad._transforms._modes import jacrev as jacrev
from funcgrad._transforms._vmap import vmap as vmap
