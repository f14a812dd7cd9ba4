"""The search: which placement each storage takes, so that the peak is within the budget and the step is shortest."""

from fxhome.passes.search.front import minimum_peak, search
from fxhome.passes.search.result import SearchResult

__all__ = ["SearchResult", "minimum_peak", "search"]
