"""Names of the objects that Millrace reads and writes, one module per kind of owner.

No other package builds or parses a key, but for the formats of shards, which add the names of their
index objects. Numbers are zero-padded, so listings are in order.
"""
