"""Keys of objects that are written only to try what a credential may do."""


def make_audit_probe_key(scope: str, nonce: str, name: str) -> str:
    """Return the key of an object that an audit writes and removes."""
    return f"{scope}/_audit-{nonce}-{name}" if scope else f"_audit-{nonce}-{name}"


def make_write_probe_key(scope: str, nonce: str) -> str:
    """Return the key of an object that is written and removed to try whether that is allowed."""
    return f"{scope}/_probe-{nonce}" if scope else f"_probe-{nonce}"
