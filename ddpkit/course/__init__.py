"""The course's machinery: predictions, and exercises whose answers run on real ranks.

Lessons call it as `ddpkit.predict`, `ddpkit.check` and so on. Nothing here imports torch or ipywidgets until it is needed: lessons import
ddpkit in their first cell.
"""
