"""Parts of the assembler. Each part owns one kind of state.

`millrace.swarm.assembler` connects the parts. They run on a node, so they import neither the
settings nor a client of a store.
"""
