"""Documentation of Millrace, and the generator of its reference."""
