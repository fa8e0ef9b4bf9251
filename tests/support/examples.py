"""Numbers of examples that properties draw."""

import hypothesis


def scale_examples(count: int) -> int:
    """Return `count` in `make soak`, and a quarter of it in other runs, at least 20."""
    soaks = hypothesis.settings.get_current_profile_name() == "random"
    return count if soaks else max(count // 4, min(count, 20))
