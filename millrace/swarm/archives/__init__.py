"""Unpack archives while they arrive, without trusting their contents."""
