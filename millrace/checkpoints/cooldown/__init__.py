"""End an epoch with a checkpoint that selected members upload and all members check."""
