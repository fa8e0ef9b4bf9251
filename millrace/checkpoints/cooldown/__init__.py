"""Cooldown: the end of an epoch with a checkpoint that some members upload and all check."""
