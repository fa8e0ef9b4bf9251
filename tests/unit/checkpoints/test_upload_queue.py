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


def test_ever_fewer_files_are_sent_at_once_towards_the_end_of_a_share() -> None:
    """Others verify the first files of a share while its last ones are sent."""
    queue = UploadQueue([f"{number:02d}" for number in range(16)], lambda: None)
    queue.divide(0, 2)  # 8 files
    sent: list[int] = []  # files that are being sent, whenever another one begins
    sending = 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.pick_upload)
        while (picked := waiting.result(30)) is not None and int(picked) % 2 == 0:
            sending += 1
            sent.append(sending)
            waiting = pool.submit(queue.pick_upload)
            remaining = 8 - len(sent) + sending
            while len(sent) < 8 and sending >= max(1, remaining // 2):
                assert not waiting.done()
                queue.end_upload()
                sending, remaining = sending - 1, remaining - 1
            if len(sent) == 8:
                for _ in range(sending):
                    queue.end_upload()
                sending = 0
    assert sent == [1, 2, 3, 4, 3, 2, 1, 1]


def test_threads_that_share_an_upload_send_each_file_once() -> None:
    for uploaders in (1, 2, 3):
        files = [f"{number:02d}" for number in range(40)]
        queue = UploadQueue(files, lambda: None)
        queue.divide(uploaders - 1, uploaders)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(drain, queue) for _ in range(4)]
            picked = [digest for run in runs for digest in run.result(60)]
        assert sorted(picked) == files
        assert queue.is_complete


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
