"""Each principal of the design's table of trust writes whatever it may; every flow runs over it."""
