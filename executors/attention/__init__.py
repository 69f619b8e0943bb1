"""Attention by a plan's COMPUTE steps: contents, kernels, and the reference on one device."""
