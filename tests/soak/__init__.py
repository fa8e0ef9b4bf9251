"""Run the long kill and fault matrices: ``python -m tests.soak``. The tests run a slice of them."""
