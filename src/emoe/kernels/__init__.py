"""Triton kernels, for GPUs alone: each stands beside a plain form elsewhere in the package that computes the same."""
