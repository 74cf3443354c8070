"""Weights in huge pages: a step reads all of them, and 4 KiB pages make the processor look up each page's address.

Linux gives huge pages to memory that asks for them (`madvise`, its usual setting). ONNX Runtime allocates its packed
weights with malloc and does not ask, so glibc's heap asks for it: grown at one stroke before the weights are loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["huge_pages"]

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # linux/mman.h
# glibc's malloc.h, with its own defaults. The thresholds are those that its heap comes to by itself in a process that
# allocates and frees large arrays: setting any parameter ends that adaptation.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULTS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}


@contextmanager
def huge_pages(num_bytes: int) -> Iterator[None]:
    """Within the block, let the next `num_bytes` bytes that are allocated lie in huge pages where that can be had.

    Elsewhere than on Linux with glibc, or where its huge pages are always on or off, nothing is changed. Nor is
    anything gained in another thread than the main one, whose allocations glibc keeps apart.
    """
    libc = _glibc() if num_bytes >= _PAGE else None
    if libc is None:
        yield
        return
    try:
        _grow_heap(libc, num_bytes)
        yield
    finally:
        for parameter, value in _DEFAULTS.items():
            libc.mallopt(parameter, value)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and huge pages are to be asked for."""
    try:
        if "[madvise]" not in _MODE.read_text():
            return None
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - AttributeError where it is another library
    except (OSError, AttributeError):
        return None
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _grow_heap(libc: ctypes.CDLL, num_bytes: int) -> None:
    """Make the heap so much larger, asking for huge pages; no page is touched, so none is taken yet."""
    libc.mallopt(_MMAP_MAX, 0)  # large blocks too come from the heap
    libc.mallopt(_TRIM_THRESHOLD, -1)  # what is freed stays
    start = libc.sbrk(0)
    libc.free(libc.malloc(num_bytes))
    end = libc.sbrk(0)
    first = -(-start // _PAGE) * _PAGE
    if end > first:
        libc.madvise(first, end - first, _MADV_HUGEPAGE)
