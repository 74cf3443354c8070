"""Energy of the processor's packages, where Linux tells it (RAPL), of NVIDIA's GPUs, and how fast memory is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EnergyMeter", "read_bandwidth"]

_RAPL = Path("/sys/class/powercap")
# Of memory read at once, by all threads together: more than the caches of most processors hold.
_BYTES = 1 << 28


class EnergyMeter:
    """Counters of the processor's packages, and of GPUs; empty where there are none or they may not be read."""

    def __init__(self, folder: Path = _RAPL, *, gpu: bool = False) -> None:
        """Take the counters of `folder`: a zone for each package, whose parts have a second colon.

        With `gpu`, those of all GPUs that NVML has, too, by the package nvidia-ml-py, if it is installed. Not yet run
        on a GPU.
        """
        self._counters: dict[str, tuple[Callable[[], int], int | None]] = {}
        for zone in sorted(folder.glob("intel-rapl:*")):
            if zone.name.count(":") == 1:
                try:
                    int((zone / "energy_uj").read_text())
                    limit = int((zone / "max_energy_range_uj").read_text())
                except (OSError, ValueError):  # only root may read, or a zone without a counter
                    continue
                self._counters[zone.name] = partial(_number_in, zone / "energy_uj"), limit
        if gpu:
            self._counters |= {name: (read, None) for name, read in _gpus().items()}

    def read(self) -> Mapping[str, int]:
        """Each counter, in microjoules."""
        return {name: read() for name, (read, _) in self._counters.items()}

    def since(self, before: Mapping[str, int]) -> float | None:
        """Joules since `read` gave `before`; a counter that has run over its range once is seen."""
        if not self._counters:
            return None
        now = self.read()
        used = {name: now[name] - before[name] for name in self._counters}
        limits = {name: limit for name, (_, limit) in self._counters.items()}
        return sum(one if (limit := limits[name]) is None else one % (limit + 1) for name, one in used.items()) / 1e6


def _number_in(path: Path) -> int:
    return int(path.read_text())


def _gpus() -> dict[str, Callable[[], int]]:
    """What reads the counters of NVML, in microjoules; empty without its package, a driver or a GPU that counts."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except ModuleNotFoundError:
        return {}
    except pynvml.NVMLError:
        return {}
    counters: dict[str, Callable[[], int]] = {}
    for index, handle in enumerate(handles):

        def read(handle: Any = handle) -> int:
            return int(1000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))  # millijoules

        try:
            read()
        except pynvml.NVMLError:  # GPUs before Volta do not count
            continue
        counters[f"nvml:{index}"] = read
    return counters


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
