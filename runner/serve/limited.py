"""Limits the time of work in pure Python, such as a chat template, which no other thread can end."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from eagle3.runner.serve.errors import Refused


class TimeIsOver(BaseException):
    """Raised in the thread that takes too long. ``except Exception`` does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``Refused`` within this context if it takes more than ``seconds`` of processor time. On a busy machine they
    pass more slowly than those of a clock."""
    thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        left = seconds
        while not over.wait(max(left, 0.02)):
            with lock:
                if over.is_set():
                    return
                if (left := end - time.clock_gettime(clock)) <= 0:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsOver))
                    return

    threading.Thread(target=watch, daemon=True).start()
    try:
        try:
            yield
        finally:
            with lock:
                over.set()
        for _ in range(2):  # an exception that was sent in the last moment arrives in a loop at the latest
            pass
    except TimeIsOver:
        raise Refused(f"the chat template takes more than {seconds:g} s for these messages: send fewer") from None
