"""Merging of the pseudo-gradients of a window: the rules, the stored update, and the chain's links.

The backends of the weights use these modules, and `millrace.gradients.sync` uses both.
"""
