"""Pictures to play with, one file each. They move without running ranks.

An explorer shows one output: text and a still picture for every reader (a saved notebook, a program), and controls with a picture that follows
them for a person. The text alone says what the picture says; some have only text.
"""

from ddpkit.explore.digits import digits
from ddpkit.explore.gradients import gradients
from ddpkit.explore.symptoms import symptoms

__all__ = ["digits", "gradients", "symptoms"]
