"""Compress pseudo-gradients into objects, and read such objects without trusting them."""
