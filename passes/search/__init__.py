"""The search: which placement each storage takes, so that the peak is within the budget and the step is shortest."""

from fxhome.passes.search.bound import Bound, lower_bound
from fxhome.passes.search.front import POLICIES, minimum_peak, search
from fxhome.passes.search.result import SearchResult
from fxhome.passes.search.sweep import sweep

__all__ = ["POLICIES", "Bound", "SearchResult", "lower_bound", "minimum_peak", "search", "sweep"]
