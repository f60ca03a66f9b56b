"""Derivatives against finite differences: ``gradcheck`` and ``gradgradcheck``."""

from funcgrad._gradcheck._gradcheck import gradcheck as gradcheck
from funcgrad._gradcheck._gradcheck import gradgradcheck as gradgradcheck
from funcgrad._gradcheck._report import GradcheckEntry as GradcheckEntry
from funcgrad._gradcheck._report import GradcheckError as GradcheckError
from funcgrad._gradcheck._report import GradcheckReport as GradcheckReport
