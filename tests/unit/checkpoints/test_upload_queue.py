"""Files that a member uploads or verifies next."""

import threading
from concurrent.futures import ThreadPoolExecutor

from millrace.checkpoints.upload_queue import UploadQueue

FILES = ["a", "b", "c", "d", "e"]


def queue_of(completed: list[bool] | None = None) -> UploadQueue:
    ends = completed if completed is not None else []
    return UploadQueue(FILES, lambda: ends.append(True))


def drain(queue: UploadQueue) -> list[str]:
    """Pick and send files one after another."""
    picked: list[str] = []
    while (digest := queue.pick_upload()) is not None:
        picked.append(digest)
        queue.note_sent(digest, f"key-{digest}")
        queue.end_upload()
    return picked


def test_a_member_uploads_its_share_and_then_the_last_files_of_the_others() -> None:
    queue = queue_of()
    queue.divide(1, 2)
    assert drain(queue) == ["b", "d", "e", "c", "a"]
    assert queue.is_complete


def test_files_of_others_wait_for_the_end_of_the_own_uploads() -> None:
    queue = queue_of()
    queue.divide(0, 5)
    assert queue.pick_upload() == "a"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.pick_upload)
        assert not waiting.done()
        queue.end_upload()
        assert waiting.result(30) == "e"


def test_found_files_are_not_uploaded_but_verified() -> None:
    completed: list[bool] = []
    queue = queue_of(completed)
    queue.note_found([("b", "key-b"), ("unknown", "key"), ("b", "again")])
    queue.divide(0, 1)
    assert drain(queue) == ["a", "c", "d", "e"]
    assert (queue.is_complete, completed) == (False, [])
    assert queue.pick_unchecked() == ("b", "key-b")
    assert not queue.is_verified("b")
    queue.note_verified("b")
    assert (queue.is_complete, completed) == (True, [True])
    assert queue.pick_unchecked() is None


def test_a_stop_ends_picks_and_waits() -> None:
    queue = queue_of()
    queue.divide(0, 1)
    thread = threading.Thread(target=queue.pick_unchecked)
    thread.start()
    queue.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert queue.is_stopped()
    assert queue.pick_upload() is None
