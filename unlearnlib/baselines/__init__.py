"""The gradient methods that closed-form unlearning is compared with: their losses, and training on them."""

from .gradient import METHODS, REFUSALS, GradientSettings, alternatives, unlearn

__all__ = ["METHODS", "REFUSALS", "GradientSettings", "alternatives", "unlearn"]
