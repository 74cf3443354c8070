"""The table of what runs models: execution providers of ONNX Runtime, and TensorRT's engines."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidInputError, shown

__all__ = ["CPU", "PROVIDERS", "Provider", "find_provider"]

CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class Provider:
    """What runs models: a row of `PROVIDERS`.

    Attributes:
        name: of an execution provider, in ONNX Runtime; of what runs engines, the backend that has built them.
        install: what brings the provider to a machine.
        needs: what it needs of the machine in order to start.
        plugin: module that brings its library; None where ONNX Runtime's own package does.
        hardware: kind of the plugin's devices that is used, as ONNX Runtime names it.
        behind: providers that take what it leaves, before the CPU's does.
        device: where ONNX Runtime allocates KV caches and logits; None keeps them in numpy's memory.
        sampler: key of the row that runs the sampler's graphs, where this one's logits lie.
        own_threads: it runs on threads of its own, which ONNX Runtime's would disturb while they wait.
        settings: of the plugin's own library.
        engine: module that runs the bundle's engines; None where ONNX Runtime runs its graphs.
    """

    name: str
    install: str = ""
    needs: str = ""
    plugin: str | None = None
    hardware: str = "GPU"
    behind: tuple[str, ...] = ()
    device: str | None = None
    sampler: str = "cpu"
    own_threads: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    engine: str | None = None

    @property
    def reads_when_bound(self) -> bool:
        """Whether an input in host memory may be copied when it is bound, so that what it holds later is not seen."""
        return self.device is not None or self.plugin is not None


_NVIDIA = "--extra-index-url https://pypi.nvidia.com"  # on PyPI, TensorRT's packages are stubs, or parts of it
_GPU_PACKAGE = "pip uninstall onnxruntime, then pip install 'paceline[gpu]'"
_CUDA_NEEDS = (
    "It needs an NVIDIA GPU with its driver, and the libraries of CUDA 13 and cuDNN 9, which "
    "pip install 'onnxruntime-gpu[cuda,cudnn]' brings."
)

# CUDA graphs are left to engines. A graph that ONNX Runtime captures keeps the values that its host inputs had, and the
# attention of these bundles (GroupQueryAttention) reads `total_sequence_length` on the host; nor can the sampler's
# graphs be captured, which branch (`If`).
PROVIDERS = {
    "cpu": Provider(CPU),
    "cuda": Provider(_CUDA, _GPU_PACKAGE, _CUDA_NEEDS, device="cuda", sampler="cuda"),
    "tensorrt": Provider(
        "TensorrtExecutionProvider",
        _GPU_PACKAGE,
        f"{_CUDA_NEEDS} It also needs TensorRT 10 (libnvinfer.so.10): pip install 'tensorrt-cu13<11', from NVIDIA's "
        f"index ({_NVIDIA}); TensorRT 11 cannot serve it.",
        behind=(_CUDA,),
        device="cuda",
        sampler="cuda",
    ),
    "tensorrt-rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "pip install onnxruntime-ep-nv-tensorrt-rtx",
        f"It needs an RTX GPU, Ampere or newer, and for what it leaves ONNX Runtime's GPU package. {_CUDA_NEEDS}",
        plugin="onnxruntime_ep_nv_tensorrt_rtx",
        behind=(_CUDA,),
        device="cuda",
        sampler="cuda",
    ),
    "tensorrt-rtx-engine": Provider(
        "tensorrt-rtx",
        "Install it: pip install 'paceline[trt]', or tensorrt-rtx from PyPI, in the version that built the engine.",
        device="cuda",
        sampler="cuda",
        engine="tensorrt_rtx",
    ),
    "tensorrt-engine": Provider(
        "tensorrt",
        f"Install it: pip install tensorrt-cu13 {_NVIDIA}, in the version that built the engine; PyPI has only a stub.",
        device="cuda",
        sampler="cuda",
        engine="tensorrt",
    ),
    "openvino": Provider(
        "OpenVINOExecutionProvider",
        "pip install 'paceline[openvino]'",
        "Its plugin offers Intel's processors only.",
        plugin="onnxruntime_ep_openvino",
        hardware="CPU",
        own_threads=True,
        # Where the processor has bfloat16, OpenVINO would compute in it.
        settings=(("INFERENCE_PRECISION_HINT", "f32"),),
    ),
}


def find_provider(provider: object) -> Provider:
    """The row of this name.

    Raises:
        InvalidInputError: there is none.
    """
    if not isinstance(provider, str) or provider not in PROVIDERS:
        raise InvalidInputError(f"Unknown provider {shown(provider)}: expected one of {', '.join(PROVIDERS)}.")
    return PROVIDERS[provider]
