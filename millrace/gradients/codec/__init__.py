"""Compression of pseudo-gradients into objects, and strict checks of received objects."""
