"""A training loop's own tensors moved by plans."""
