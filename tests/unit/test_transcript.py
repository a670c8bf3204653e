"""What a rank wrote, as a terminal would show it: carriage returns, bytes of any kind in pieces of any size, bounded memory."""

from __future__ import annotations

import pytest

from ddpkit.transcript import MAX_LINE, Transcript


def fed(*pieces, limit=1 << 20):
    transcript = Transcript(limit)
    finished = [line for piece in pieces for line in transcript.feed(piece)]
    finished += transcript.end()
    return transcript, finished


def everywhere(data):
    """All ways of cutting it into two pieces, the whole, and single bytes."""
    yield (data,)
    yield tuple(data[i : i + 1] for i in range(len(data)))
    for cut in range(1, len(data)):
        yield data[:cut], data[cut:]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"no end", ["no end"]),
        (b"", []),
        (b"\n\n", ["", ""]),
        (b"10%\r50%\r100%\n", ["100%"]),
        (b"10%\r50%\r100%\r\nnext\r\n", ["100%", "next"]),
        (b"10%\r50%\r", ["50%"]),  # the bar as it stands
        (b"\r 10%\r 20%\nend", [" 20%", "end"]),
        (b"a\r\r\n", ["a"]),
        (b"a\r\rb\n", ["b"]),
        (b"\r\n", [""]),
        ("é 日本 😀\n".encode(), ["é 日本 😀"]),
        (b"caf\xe9\n", ["caf\\xe9"]),
        (b"\xff\xfe\n\x80", ["\\xff\\xfe", "\\x80"]),
        (b"cut \xf0\x9f\x98", ["cut \\xf0\\x9f\\x98"]),  # ends within a character
        (b"zero \0 byte \x1b[31mred\x1b[0m\n", ["zero \0 byte \x1b[31mred\x1b[0m"]),
    ],
)
def test_lines_do_not_depend_on_where_the_pieces_end(written, shown):
    for pieces in everywhere(written):
        transcript, finished = fed(*pieces)
        assert transcript.lines() == finished == shown, pieces
        assert transcript.text == "".join(line + "\n" for line in shown)


def test_lines_come_as_soon_as_they_are_whole():
    transcript = Transcript(1000)
    assert transcript.feed(b"a\nb") == ["a"]
    assert transcript.last_line == "b" and transcript.lines() == ["a", "b"]
    assert transcript.feed(b"c\n") == ["bc"]
    assert transcript.feed(b"10%\r") == [] and transcript.last_line == "10%"
    assert transcript.feed(b"20%") == [] and transcript.last_line == "20%"
    assert transcript.end() == ["20%"]
    assert transcript.end() == []  # only once
    assert transcript.lines() == ["a", "bc", "20%"]


def test_nothing_was_written():
    transcript, finished = fed()
    assert (transcript.text, transcript.lines(), transcript.last_line, finished) == ("", [], "", [])


def test_a_long_progress_bar_takes_no_memory():
    transcript = Transcript(1000)
    for step in range(50_000):
        transcript.feed(b"\r%6d of 50000 |########## |" % step)
    assert transcript.end() == [" 49999 of 50000 |########## |"]
    assert transcript.dropped_lines == 0


def test_a_very_long_line_is_broken():
    transcript = Transcript(10 * MAX_LINE)
    finished = []
    for _ in range(5 * MAX_LINE // 1000):
        finished += transcript.feed(b"x" * 1000)
    assert finished and all(MAX_LINE < len(line) <= MAX_LINE + 1000 for line in finished)
    finished += transcript.end()
    assert sum(map(len, finished)) == 5 * MAX_LINE // 1000 * 1000
    assert transcript.lines() == finished


def test_a_very_long_line_in_one_piece_is_kept_whole_or_dropped_whole():
    transcript, finished = fed(b"x" * 3_000_000 + b"\nend\n", limit=1 << 20)
    assert finished[-1] == "end" and transcript.lines()[-1] == "end"
    assert len(transcript.text) <= 3_000_000 + 100


@pytest.mark.parametrize("width", [1, 80, 999])
def test_memory_is_bounded_and_a_note_says_what_is_left_out(width):
    limit = 100_000
    transcript = Transcript(limit)
    count = 3 * limit // (width + 7)
    for number in range(count):
        transcript.feed(f"{number:06}{'x' * width}\n".encode())
    transcript.end()
    lines = transcript.lines()
    (note,) = [line for line in lines if "left out" in line]
    where = lines.index(note)
    kept = [int(line[:6]) for line in lines if line != note]
    assert kept == [*range(where), *range(count - len(lines) + where + 1, count)]  # the first and the last
    assert note == (
        f"… {count - len(kept):,} lines ({(count - len(kept)) * (width + 7):,} characters) left out: more than ddpkit keeps of one rank …"
    )
    assert limit * 0.9 < len(transcript.text) < limit + 2 * width + 200
    assert transcript.last_line == lines[-1]


def test_just_enough_is_kept_whole():
    transcript, finished = fed(b"x" * 9 + b"\n", b"y" * 9 + b"\n", limit=20)
    assert transcript.lines() == finished == ["x" * 9, "y" * 9] and transcript.dropped_lines == 0
