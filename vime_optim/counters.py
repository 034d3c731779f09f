"""What the library counts in this process beside the hits of fixes; `status()` shows it."""

from __future__ import annotations

from collections import Counter

counters: Counter[str] = Counter()
