"""What a person sees of a run: in a notebook HTML, in a terminal text. The one way in for the rest of the package."""

from ddpkit.show.still import bundle_of, text_of
from ddpkit.show.together import card
from ddpkit.show.watch import Screen, nothing, somebody_watches, watch, watch_cells

__all__ = ["Screen", "bundle_of", "card", "nothing", "somebody_watches", "text_of", "watch", "watch_cells"]
