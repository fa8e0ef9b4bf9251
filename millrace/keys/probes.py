"""Keys of temporary objects that show what a credential may do."""


def make_audit_probe_key(scope: str, nonce: str, name: str) -> str:
    """Return the key of an object that an access audit writes and deletes."""
    return f"{scope}/_audit-{nonce}-{name}" if scope else f"_audit-{nonce}-{name}"


def make_write_probe_key(scope: str, nonce: str) -> str:
    """Return the key of an object that is written and deleted to test a credential."""
    return f"{scope}/_probe-{nonce}" if scope else f"_probe-{nonce}"
