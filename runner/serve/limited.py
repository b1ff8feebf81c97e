"""Limits the time of work in pure Python, such as a chat template, which no other thread can end."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from eagle3.runner.serve.errors import Refused


class TimeIsOver(BaseException):
    """Raised in the thread that takes too long. ``except Exception`` does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``Refused`` within this context if it takes longer than ``seconds``."""
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsOver))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                over = True
            timer.cancel()
        for _ in range(2):  # an exception that was sent in the last moment arrives in a loop at the latest
            pass
    except TimeIsOver:
        raise Refused(f"the chat template takes more than {seconds:g} s for these messages: send fewer") from None
