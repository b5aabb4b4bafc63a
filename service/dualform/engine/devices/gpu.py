"""A CUDA GPU, through torch and FAISS's GPU part.

FAISS's exact search runs over the keys where torch has them (`bfKnn`, which is what GpuIndexFlatIP
runs over its own copy): one copy in GPU memory serves both. Written, not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dualform.engine.devices.device import Moment, Stream, check_search

_LEAST_FREE = 512 << 20
"""With fewer bytes free FAISS may find no room for what cuBLAS needs, and then ends the process."""


class Gpu:
    """A GPU; see `Device`.

    Args:
        number: torch's and FAISS's.
    """

    def __init__(self, number: int) -> None:
        import faiss

        self.name = f"cuda:{number}"
        self.where = torch.device("cuda", number)
        found = torch.cuda.get_device_properties(self.where)
        self.title, self.memory = str(found.name), int(found.total_memory)
        self._number = number
        self._faiss: Any = faiss
        self._resources: Any = faiss.StandardGpuResources()
        # 256 MiB of the host's otherwise, for copies that FAISS is not asked to make.
        self._resources.setPinnedMemory(0)

    def free(self) -> int:
        # torch keeps what tensors had, and gives it to the next.
        kept = torch.cuda.memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)
        return int(torch.cuda.mem_get_info(self.where)[0]) + max(0, kept)

    def prepare(self, scratch: int) -> None:
        self.give_back()
        free = int(torch.cuda.mem_get_info(self.where)[0])
        if free < _LEAST_FREE + scratch:
            raise RuntimeError(
                f"{free >> 20:,} MiB of {self.name} are free; CUDA's libraries and a search need "
                f"{(_LEAST_FREE + scratch) >> 20:,} MiB"
            )
        self._resources.setTempMemory(scratch)
        with torch.cuda.device(self.where):
            # Now, not by the first search: FAISS does not bear to be asked again where its own
            # memory was not to be had.
            self._resources.getDefaultStream(self._number)

    def give_back(self) -> None:
        with torch.cuda.device(self.where):
            torch.cuda.empty_cache()

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self.where):
            # FAISS's kernels in the order of torch's.
            stream = torch.cuda.current_stream(self.where).cuda_stream
            self._resources.setDefaultStream(
                self._number, self._faiss.cast_integer_to_cudastream_t(stream)
            )
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        # FAISS's resources are not touched: they are for one thread at a time.
        with torch.cuda.device(self.where):
            yield

    def empty(self, rows: int, width: int) -> torch.Tensor:
        return torch.empty((rows, width), dtype=torch.float32, device=self.where)

    def stream(self) -> Stream:
        return CudaStream(self.where)

    def nearest(
        self, keys: torch.Tensor, queries: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_search(keys, queries, k, self.where)
        faiss = self._faiss
        scores = torch.empty((len(queries), k), dtype=torch.float32, device=self.where)
        places = torch.empty((len(queries), k), dtype=torch.int64, device=self.where)
        asked = faiss.GpuDistanceParams()
        asked.metric = faiss.METRIC_INNER_PRODUCT
        asked.k, asked.dims = k, keys.shape[1]
        asked.vectors = faiss.cast_integer_to_float_ptr(keys.data_ptr())
        asked.vectorsRowMajor, asked.numVectors = True, len(keys)
        asked.queries = faiss.cast_integer_to_float_ptr(queries.data_ptr())
        asked.queriesRowMajor, asked.numQueries = True, len(queries)
        asked.vectorType = asked.queryType = faiss.DistanceDataType_F32
        asked.outDistances = faiss.cast_integer_to_float_ptr(scores.data_ptr())
        asked.outIndices = faiss.cast_integer_to_idx_t_ptr(places.data_ptr())
        asked.outIndicesType = faiss.IndicesDataType_I64
        asked.device, asked.use_cuvs = self._number, False
        faiss.bfKnn(self._resources, asked)
        return scores, places


class CudaStream:
    """A stream of a GPU; see `Stream`.

    Args:
        where: The GPU.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._stream = torch.cuda.Stream(where)

    def pinned(self, numbers: int) -> torch.Tensor:
        return torch.empty(numbers, dtype=torch.float32, device="cpu", pin_memory=True)

    def copy(self, host: torch.Tensor, out: torch.Tensor) -> Moment:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            out.copy_(host, non_blocking=True)
            done.record(self._stream)
        return done

    def computed(self) -> torch.cuda.Event:
        moment = torch.cuda.Event()
        moment.record(torch.cuda.current_stream(self._where))
        return moment

    def follow(self, computed: torch.cuda.Event) -> None:
        self._stream.wait_event(computed)

    def lead(self) -> None:
        torch.cuda.current_stream(self._where).wait_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


def gpus() -> int:
    """How many GPUs torch finds here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def without_faiss(last: int = 0) -> str | None:
    """Why the FAISS that is installed can't search on GPUs up to this number; None where it can.

    Asked before FAISS is: it ends the process where it meets a GPU that it can't use.
    """
    try:
        import faiss
    except (ImportError, RuntimeError) as error:  # the latter without CUDA 12's libraries
        return f"FAISS cannot be loaded ({error})"
    if not hasattr(faiss, "StandardGpuResources"):
        return "the FAISS that is installed has no GPU part: install [gpu] in place of [cpu]"
    found = faiss.get_num_gpus()
    if found > last:
        return None
    return (
        f"FAISS finds {found} GPUs, where torch finds {gpus()}: its CUDA 12 may need a newer driver"
    )
