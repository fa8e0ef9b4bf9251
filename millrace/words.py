"""Numbers in words, for messages and reports."""


def count(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 shard``, ``1,200 shards``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
