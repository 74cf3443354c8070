"""Energy of the processor's packages, where Linux tells it (RAPL), and how fast memory is read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

__all__ = ["EnergyMeter", "read_bandwidth"]

_RAPL = Path("/sys/class/powercap")
# Of memory read at once, by all threads together: more than the caches of most processors hold.
_BYTES = 1 << 28


class EnergyMeter:
    """Counters of the processor's packages; empty where there are none or they may not be read."""

    def __init__(self, folder: Path = _RAPL) -> None:
        """Take the counters of `folder`: a zone for each package, whose parts have a second colon."""
        self._zones: dict[str, tuple[Path, int]] = {}
        for zone in sorted(folder.glob("intel-rapl:*")):
            if zone.name.count(":") == 1:
                try:
                    int((zone / "energy_uj").read_text())
                    limit = int((zone / "max_energy_range_uj").read_text())
                except (OSError, ValueError):  # only root may read, or a zone without a counter
                    continue
                self._zones[zone.name] = zone / "energy_uj", limit

    def read(self) -> Mapping[str, int]:
        """Each counter, in microjoules."""
        return {name: int(path.read_text()) for name, (path, _) in self._zones.items()}

    def since(self, before: Mapping[str, int]) -> float | None:
        """Joules since `read` gave `before`; a counter that has run over its range once is seen."""
        if not self._zones:
            return None
        now = self.read()
        return sum((now[name] - before[name]) % (limit + 1) for name, (_, limit) in self._zones.items()) / 1e6


def read_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read from memory: the best of five searches for a largest number."""
    arrays = [np.ones(_BYTES // threads // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.max, arrays))
            best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - started))
    return best
