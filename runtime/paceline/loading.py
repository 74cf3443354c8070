"""From a bundle on disk to a decoder."""

from __future__ import annotations

from pathlib import Path

from .bundle import Bundle
from .cost_profile import check_profile, find_costs, setup_of
from .decoder import SpeculativeDecoder
from .errors import InvalidInputError, shown
from .model import CausalLM
from .prefix_cache import PrefixCache
from .retokenizer import Retokenizer
from .shared_ids import read_shared_ids
from .tokenizer import Tokenizer
from .translated import TranslatedModel

__all__ = ["load"]


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    provider: str = "cpu",
    sampler: str = "numpy",
    prefix_cache_bytes: int = 0,
    huge_pages: bool = True,
    profile: str | Path | None = "auto",
    engines: str | Path | None = None,
    max_batch: int = 1,
) -> SpeculativeDecoder:
    """Open a bundle and make a decoder of it. The size of every file is checked first.

    Args:
        path: folder of the bundle, as `paceline export` writes it.
        threads: threads that both models share; None leaves the number to the runtime.
        provider: what runs the models: "cpu", "cuda", "tensorrt", "tensorrt-rtx" or "openvino" their graphs, and
            "tensorrt-rtx-engine" or "tensorrt-engine" the bundle's engines. Caches and logits lie where it runs. One
            that does not start raises; nothing falls back to the CPU.
        sampler: "numpy", or "graph" for the bundle's own graphs, which leave the logits where the models wrote them.
        prefix_cache_bytes: of keys and values of finished texts to keep: a prompt that begins like one of them, such
            as the next turn of a chat, skips that part of its prefill. 0 keeps none; see `paceline.PrefixCache`.
        huge_pages: let the weights lie in huge pages where Linux has them to ask for, which makes steps faster. While
            the models are loaded, settings of the process's malloc are changed; False leaves them alone.
        profile: costs that drafts are planned by. "auto" takes the profile that `paceline tune` stored for this bundle,
            machine, number of threads and version of ONNX Runtime, if there is one; one that does not fit is passed
            over with a warning. A path names the profile, which must fit. None plans without: then a seed gives the
            same text whether or not someone has tuned.
        engines: folder of engines that `paceline build -o` has made of this bundle; None takes those in the bundle.
        max_batch: texts that one pass of a model may take, where an `AsyncEngine` of the same `max_batch` runs them.
            Above 1 the bundle needs the graphs of `paceline batch`, which the provider "cpu" runs, and the sampler
            must be "numpy"; weights are then in memory twice.

    Raises:
        BundleError: no bundle there, or one that is truncated, altered or of a newer format; or no engine in it that
            fits this machine.
        InstallationError: ONNX Runtime is missing, installed twice, lacks the provider, or the provider does not
            start; for engines, there is no GPU, or TensorRT is missing.
        InvalidInputError: an unknown provider or sampler, a bad number of threads, bytes or texts, a profile that is no
            path, engines for a provider that runs none, a GPU without room for them, or a `max_batch` that the bundle,
            the provider or the sampler does not take.
        ProfileError: the profile that `profile` names is missing, damaged, or of another setup.
    """
    # Only here: reading a bundle's manifest, or sampling on table models, needs no ONNX Runtime.
    from .batching import Batchable
    from .huge_pages import huge_pages as in_huge_pages
    from .ort import OrtModel
    from .ort_lanes import LanesModel
    from .ort_sampler import SamplerGraphs
    from .providers import PROVIDERS, find_provider
    from .trt import TrtModel

    if not isinstance(path, str | Path):
        raise InvalidInputError(f"path must be the folder of a bundle, got {shown(path)}.")
    if not isinstance(sampler, str) or sampler not in ("numpy", "graph"):
        raise InvalidInputError(f"sampler must be 'numpy' or 'graph', got {shown(sampler)}.")
    if not isinstance(huge_pages, bool):
        raise InvalidInputError(f"huge_pages must be True or False, got {shown(huge_pages)}.")
    if not isinstance(prefix_cache_bytes, int) or isinstance(prefix_cache_bytes, bool) or prefix_cache_bytes < 0:
        raise InvalidInputError(
            f"prefix_cache_bytes must be an integer of at least 0, got {shown(prefix_cache_bytes)}."
        )
    if not isinstance(max_batch, int) or isinstance(max_batch, bool) or max_batch < 1:
        raise InvalidInputError(f"max_batch must be an integer of at least 1, got {shown(max_batch)}.")
    runs_engines = find_provider(provider).engine is not None
    if runs_engines and threads is not None and sampler != "graph":
        raise InvalidInputError(f"threads={threads} is of no use: {provider} runs on the GPU; leave it out.")
    if engines is not None and (not isinstance(engines, str | Path) or not str(engines)):
        raise InvalidInputError(f"engines must be the folder of `paceline build -o`, or None, got {shown(engines)}.")
    if engines is not None and not runs_engines:
        runners = " or ".join(name for name, row in PROVIDERS.items() if row.engine is not None)
        raise InvalidInputError(
            f"engines={str(engines)!r:.80} is of no use: {provider} runs the bundle's graphs; leave it out, or choose "
            f"the provider {runners}."
        )
    if max_batch > 1 and (provider != "cpu" or sampler != "numpy"):
        given = f"provider {provider!r}" if provider != "cpu" else f"sampler {sampler!r}"
        raise InvalidInputError(
            f"max_batch={max_batch}: only the provider 'cpu' with the sampler 'numpy' takes several texts in one pass, "
            f"and the {given} is asked for; leave one of them out."
        )
    folder = None if engines is None else Path(engines)
    profile = check_profile(profile)
    bundle = Bundle.open(path)
    if sampler == "graph" and bundle.manifest.draft_tokenizer is not None:
        raise InvalidInputError(
            f"{bundle.root}: its draft has a tokenizer of its own, whose ids the sampler's graphs do not know; load it "
            "with sampler='numpy'."
        )
    tokenizer = Tokenizer.from_bundle(bundle)
    weights = bundle.manifest.weight_bytes

    def open_graph(which: str) -> OrtModel | Batchable:
        if max_batch == 1:
            return OrtModel.open(bundle, which, provider=provider, threads=threads)
        model = LanesModel.open(bundle, which, threads=threads, max_batch=max_batch)
        return Batchable(model, is_draft=which == "draft")

    target: OrtModel | TrtModel | Batchable
    draft: OrtModel | TrtModel | Batchable | None = None
    drafts: CausalLM | None
    max_draft_tokens: int | None = None
    if runs_engines:
        target = TrtModel.open(bundle, "target", provider=provider, folder=folder)
        draft = TrtModel.open(bundle, "draft", provider=provider, folder=folder) if bundle.manifest.draft else None
        max_draft_tokens = target.max_draft_tokens
    else:
        graphs_each = 1 if max_batch == 1 else 2  # each of which keeps weights of its own
        with in_huge_pages(graphs_each * weights if huge_pages and provider == "cpu" else 0):
            target = open_graph("target")
            if bundle.manifest.draft:
                draft = open_graph("draft")
    if draft is not None and (own := bundle.manifest.draft_tokenizer) is not None:
        reads = Tokenizer.from_bundle(bundle, "draft")
        drafts = TranslatedModel(draft, Retokenizer(tokenizer, reads, read_shared_ids(bundle, own)), own.method)
    else:
        drafts = draft
    graphs = SamplerGraphs.open(bundle, provider=provider, threads=threads) if sampler == "graph" else None
    prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
    costs = None if profile is None else find_costs(setup_of(bundle, provider, folder), profile)
    return SpeculativeDecoder(
        target,
        drafts,
        tokenizer,
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        graphs,
        costs,
        prefixes,
        max_draft_tokens,
    )
