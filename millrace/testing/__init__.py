"""Stand-ins of external services, for tests, benchmarks and the demo."""
