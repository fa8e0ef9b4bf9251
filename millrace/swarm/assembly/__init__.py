"""Parts of the assembler, which `millrace.swarm.assembler` connects: each owns one kind of state.

They run on a node, so they import neither the settings nor a store's client.
"""
