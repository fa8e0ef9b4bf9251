"""Number of concurrent reads from the store."""

from itertools import pairwise

from millrace.swarm.rates import ReadConcurrency


def pass_reads(concurrency: ReadConcurrency, count: int, now: float, seconds: float) -> float:
    """Note reads that end one after another, and return the time after them."""
    for _ in range(count):
        now += seconds
        concurrency.note_read(1 << 20, 1, now)
    return now


def test_more_reads_are_tried_again_after_a_trial_in_a_bad_moment() -> None:
    concurrency = ReadConcurrency(8)
    now = pass_reads(concurrency, 3, 0.0, 0.1)  # the first read only starts the clock
    assert concurrency.read_slots == 2
    now = pass_reads(concurrency, 4, now, 1.0)
    assert concurrency.read_slots == 1  # the trial brought less
    now = pass_reads(concurrency, 7, now, 0.1)
    assert concurrency.read_slots == 1
    now = pass_reads(concurrency, 1, now, 0.1)
    assert concurrency.read_slots == 2  # tried again
    now = pass_reads(concurrency, 4, now, 0.05)
    assert concurrency.read_slots == 4  # brought twice as much


def test_a_trial_that_brings_nothing_is_repeated_ever_more_rarely() -> None:
    concurrency = ReadConcurrency(8)
    trials, slots, before = list[int](), list[int](), 1
    now = 0.0
    for number in range(1000):
        now = pass_reads(concurrency, 1, now, 0.1)
        if concurrency.read_slots > before:
            trials.append(number)
            slots.append(concurrency.read_slots)
        before = concurrency.read_slots
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert set(slots) == {2}
    assert 4 <= len(trials) <= 8
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses))
