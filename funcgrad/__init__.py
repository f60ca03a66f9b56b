"""PyTorch's autograd, concept by concept, in functional JAX."""
