"""The kit beside what a user would take instead, on the same machine, in one run. A tool, not a test: `python -m tests.bench --help`.

Seconds differ from machine to machine. What counts is the ratio of two figures of one run.
"""
