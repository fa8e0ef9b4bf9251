"""Each benchmark measures Millrace beside a peer and beside the floor, in one run."""
