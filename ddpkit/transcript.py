"""What one rank wrote, as a terminal would show it, in bounded memory."""

from __future__ import annotations

import codecs
from collections import deque

MAX_LINE = 1 << 16
"""Characters after which a line without an end is broken, so that it can be shown and dropped like any other."""


class Transcript:
    r"""Collects a rank's output.

    A carriage return starts the line over, as in a terminal: a progress bar is one line that changes. Bytes that are no UTF-8 are shown as
    `\xff`. Of more than `limit` characters, the first half and the last half of that are kept, and a line says how much is left out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._head: list[str] = []
        self._head_size = 0
        self._tail: deque[str] = deque()
        self._tail_size = 0
        self._line = ""
        self._returned = False
        self.dropped_lines = 0
        self.dropped_characters = 0

    def feed(self, data: bytes) -> list[str]:
        """Take more output; returns the lines that it completed."""
        return self._take(self._decoder.decode(data))

    def end(self) -> list[str]:
        """No more comes: an unfinished line counts as one. Returns it, in a list."""
        finished = self._take(self._decoder.decode(b"", final=True))
        if self._line:
            finished.append(self._line)
            self._keep(self._line)
            self._line = ""
        return finished

    def _take(self, text: str) -> list[str]:
        finished = []
        *whole, rest = text.split("\n")
        for piece in whole:
            self._write(piece)
            finished.append(self._line)
            self._keep(self._line)
            self._line, self._returned = "", False
        self._write(rest)
        if len(self._line) > MAX_LINE:
            finished.append(self._line)
            self._keep(self._line)
            self._line = ""
        return finished

    def _write(self, piece: str) -> None:
        r"""Write within a line. A return takes effect with the next character: "\r\n" ends a line and does not empty it."""
        if not piece:
            return
        before, returned, last = piece.rstrip("\r").rpartition("\r")
        if returned or (self._returned and (before or last)):
            self._line = last
        else:
            self._line += last
        self._returned = piece.endswith("\r")

    def _keep(self, line: str) -> None:
        size = len(line) + 1
        if not self._tail and self._head_size + size <= self._limit // 2:
            self._head.append(line)
            self._head_size += size
            return
        self._tail.append(line)
        self._tail_size += size
        while self._tail_size > self._limit // 2 and len(self._tail) > 1:
            gone = self._tail.popleft()
            self._tail_size -= len(gone) + 1
            self.dropped_lines += 1
            self.dropped_characters += len(gone) + 1

    @property
    def last_line(self) -> str:
        """What a person looking at the terminal would see at the bottom."""
        if self._line:
            return self._line
        return self._tail[-1] if self._tail else self._head[-1] if self._head else ""

    def lines(self) -> list[str]:
        """All lines that are kept, the unfinished one included."""
        left_out = []
        if self.dropped_lines:
            left_out = [f"… {self.dropped_lines:,} lines ({self.dropped_characters:,} characters) left out: more than ddpkit keeps of one rank …"]
        return [*self._head, *left_out, *self._tail, *([self._line] if self._line else [])]

    @property
    def text(self) -> str:
        """The lines as one text; each line ends in a newline, the last included."""
        lines = self.lines()
        return "\n".join(lines) + "\n" if lines else ""
