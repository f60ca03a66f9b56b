"""Flax modules as functions of their parameters: ``functional_call``, ``stack_modules``."""

from funcgrad._modules._functional_call import Called as Called
from funcgrad._modules._functional_call import functional_call as functional_call
from funcgrad._modules._stack import Stacked as Stacked
from funcgrad._modules._stack import stack_modules as stack_modules
