"""Reader for the gradients of Templar's workers."""
