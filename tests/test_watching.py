"""A thread that looks after something: until it has seen it, and although a look may fail."""

import threading
import time

import pytest

from dphybrid.util.stop import watching


def test_it_looks_until_nothing_is_left_to_watch() -> None:
    looks: list[str] = []
    seen = threading.Event()

    def look() -> bool:
        looks.append(threading.current_thread().name)
        if len(looks) == 3:
            seen.set()
        return len(looks) == 3

    with watching(look, 0.01, "watch"):
        assert seen.wait(30)
        time.sleep(0.1)
    assert looks == ["watch"] * 3


def test_a_look_that_fails_is_told_once_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    seen, left = threading.Event(), [OSError("first"), OSError("second")]

    def look() -> bool:
        if left:
            raise left.pop(0)
        seen.set()
        return True

    with watching(look, 0.01, "watch"):
        assert seen.wait(30)
    told = capsys.readouterr().err
    assert told.count("watch failed, and tries again every 0.01 s") == 1
    assert "OSError: first" in told
    assert "second" not in told


def test_it_ends_with_its_block() -> None:
    with pytest.raises(ValueError, match="inside"), watching(lambda: False, 0.01, "watch-that-ends"):
        raise ValueError("inside")
    assert not [thread for thread in threading.enumerate() if thread.name == "watch-that-ends"]
