"""Millrace and its peers, which copy objects to all nodes of a rig (see `run`).

Each system is a separate script that runs on hosts of the rig. One of them needs another Python
interpreter, so this module has no imports.
"""
