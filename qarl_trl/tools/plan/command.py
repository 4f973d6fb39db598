"""The command `qarl-trl plan`: how much memory a recipe needs on each GPU, whether that fits, and which options would."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence

from . import items  # imports only the standard library, so that --help is instant
from .items import GIB, Run


# Memory in GiB, as torch reports it, and CUDA's compute capability.
GPUS = {"4090": (23.5, (8, 9)), "a10": (22, (8, 6)), "l4": (22, (8, 9)), "a100": (79, (8, 0)), "h100": (79, (9, 0))}


def main(argv: Sequence[str]) -> None:
    """`qarl-trl plan`: other options go to the recipe. Exits with 1 if the run does not fit; `ValueError` if it cannot run."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl plan",
        description="Estimate the memory of each GPU from a recipe, without loading a model. Other options override the recipe.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="recipe (.yaml), as for qarl-trl train")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one GPU each (default: 1)")
    parser.add_argument("--gpu", default="h100", choices=GPUS, help="GPU; A100 and H100 have 80 GB (default: h100)")
    parser.add_argument("--memory", type=float, help="GiB of each GPU, for another type")
    parser.add_argument("--sharding", choices=("fsdp2", "ddp"), help="for several GPUs (default: fsdp2)")
    args, overrides = parser.parse_known_args(argv)  # `--help` ends here
    from .ways import explore

    memory = GPUS[args.gpu][0] if args.memory is None else args.memory
    name, run, alone, together = explore(["--config", args.config, *overrides], args.gpus, memory, args.sharding)
    print("\n".join([*table(name, run, alone), *verdict(run, together)]))
    if not items.fits(run):
        raise SystemExit(1)


def table(name: str, run: Run, alone: Mapping[str, tuple[str, Run | None]]) -> Iterator[str]:
    """The memory of each GPU, and with each option that saves memory, in GiB."""
    moments = items.moments(run)
    yield f"{name}: {sum(p.entries for p in run.parameters) / 1e9:.2f} billion parameters"
    yield f"{run.ranks} x {run.memory / GIB:g} GiB, {'FSDP2' if run.fsdp2 else 'DDP' if run.ranks > 1 else 'one GPU'}"
    optimizers = ", ".join({p.optimizer: "" for p in run.parameters if p.optimizer})
    yield f"micro-batch: {run.rows} rows of {run.tokens} tokens; max_tokens_per_pass: {run.budget}; optimizer: {optimizers}"
    yield f"host memory of a machine: {items.host_bytes(run) / GIB:.0f} GiB; a sync moves {items.synced_bytes(run) / GIB:.2f} GiB"
    if run.engine:
        share = f"; vllm_gpu_memory_utilization: at most {items.best_utilization(run):g} would fit"
        share = share if run.engine == "colocate" else ""
        yield f"engine of {run.engine_ranks} GPU(s): key-value cache for {items.cache_tokens(run):,} tokens{share}"
    yield "\n" + cells("GiB on each GPU (estimated)", moments)
    for name in dict.fromkeys(name for held in moments.values() for name in held):
        yield cells(name, (held.get(name, "") for held in moments.values()))
    yield cells("sum", items.peaks(run).values())
    if alone:
        yield "\n" + cells("each alone", [*moments, "sync moves", "host"])
    for name, (options, other) in alone.items():
        sizes = [*items.peaks(other).values(), items.synced_bytes(other), items.host_bytes(other)] if other else []
        yield f"{cells(name, sizes)}  {options}"
    yield ""


def cells(name: str, values: Iterable[int | str]) -> str:
    """A row of the table: texts, and bytes in GiB."""
    texts = (value if isinstance(value, str) else f"{value / GIB:.1f}" for value in values)
    return f"{name:30}" + "".join(f"{text:>16}" for text in texts)


def verdict(run: Run, together: Mapping[str, Run]) -> Iterator[str]:
    """Lines that say whether it fits and, if not, which options make it fit."""
    if items.fits(run):
        yield f"It fits: {max(items.peaks(run).values()) / GIB:.1f} GiB of {run.memory / GIB:g}."
        return
    for moment, size in items.peaks(run).items():
        if size > run.memory:
            largest = sorted(items.moments(run)[moment].items(), key=lambda item: -item[1])[:3]
            names = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
            yield f"It does not fit: {moment} {size / GIB:.1f} GiB, mostly {names}."
    if run.engine and items.cache_tokens(run) < run.tokens:
        yield "The engine has no room for one row."
    for options, other in together.items():
        yield f"This fits, in {max(items.peaks(other).values()) / GIB:.1f} GiB: {options}"
    if not together:
        yield "Nothing here fits: take more --gpus with fsdp2, shorter rows, or a smaller model."
