"""Runs a command on a pseudo-terminal."""

import os
import pty
import select
import subprocess
import sys
import time

RUN = "from eagle3.runner.commands.run import main; main()"


PROMPT = "\r\n> "


class Terminal:
    """A command on a separate terminal that has no escape sequences."""

    def __init__(self, *args, **environment):
        self.screen, child = pty.openpty()
        self.shown = ""
        command = [sys.executable, "-c", RUN, *map(str, args)]
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=_control,
            env=os.environ | {"TERM": "dumb"} | environment,
        )
        os.close(child)

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def until(self, text: str, seconds: float = 60) -> str:
        """Wait for ``text`` and return the output before it. Output after it is left for the next call."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.screen], [], [], 0.2)[0]:
                self.shown += os.read(self.screen, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before


def _control() -> None:
    """Make the terminal on stdin the controlling terminal, so that it sends this process its signals."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
