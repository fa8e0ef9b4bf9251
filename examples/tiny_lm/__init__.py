"""A small language model of bytes, trained by a campaign: to be copied, and made your own.

``begin`` makes the weights that a campaign begins with, ``train`` is what every worker runs.
Neither knows where the worker is, nor how many there are.
"""
