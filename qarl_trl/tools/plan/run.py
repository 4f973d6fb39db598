"""A run in numbers: all that the formulas read. Only the standard library, so that `--help` is instant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


GIB = 2**30

BFLOAT16 = 2  # bytes
FLOAT32 = 4  # bytes

# Most GPUs, and most GiB of one: far above real ones. Larger numbers are typing errors, and overflow.
LIMIT = 10**6


@dataclass(frozen=True)
class Parameter:
    """
    One parameter of the policy, or of a teacher.

    Attributes:
        name: Its name in the model.
        shape: Of the whole parameter, not of a shard.
        size: Bytes per entry of the master weight; 0 for a low-bit weight of a frozen base, which has none.
        layer: The prefix of its decoder layer, whose parameters FSDP2 gathers at once; `""` outside the layers.
        optimizer: `"muon"`, `"experts"` (Muon in place) or TRL's `optim`; `""` if it is not trained.
        quantized: Bytes of its quantized values on each GPU.
        gathered: Whether FSDP2 gathers quantized values instead of weights; each GPU then keeps those of its own rows.
        stored: Bytes of its low-bit tensors in a checkpoint.
        rounds_inputs: Whether the scheme also quantizes the inputs of the multiplication.
        holds_experts: Whether it has the matrices of all experts of a layer, `(experts, out, in)`.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    layer: str
    optimizer: str
    quantized: int = 0
    gathered: bool = False
    stored: int = 0
    rounds_inputs: bool = False
    holds_experts: bool = False

    @property
    def entries(self) -> int:
        """Number of entries of the whole parameter."""
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and an optimizer."""
        return self.optimizer != ""

    @property
    def in_adapter(self) -> bool:
        """Whether it is a factor of a LoRA adapter."""
        return "lora_" in self.name


@dataclass(frozen=True)
class Hardware:
    """
    The GPUs that a run is meant for.

    Attributes:
        gpus: Their number. Each has one process of the learner.
        memory: GiB of each.
        sharding: How several hold the learner: `"fsdp2"` or `"ddp"`. `None` means `"fsdp2"`.

    Raises:
        ValueError: for a number of GPUs, or of their GiB, that no machine has.
    """

    gpus: int
    memory: float
    sharding: str | None = None

    def __post_init__(self) -> None:
        for name, value in {"gpus": self.gpus, "memory": self.memory}.items():
            # Written so that NaN is refused too.
            if not 0 < value <= LIMIT:
                raise ValueError(f"--{name} must be a number above 0, at most {LIMIT}, got {value:g}.")


@dataclass(frozen=True)
class Teacher:
    """
    What the student of a distillation learns from.

    Attributes:
        name: As a user knows it.
        parameters: Those of a second model; empty if the base of the student's adapter teaches.
        config: transformers' config of its language model.
        positions: Most tokens of a row at which student and teacher are compared.
    """

    name: str
    parameters: tuple[Parameter, ...]
    config: Any
    positions: int


@dataclass(frozen=True)
class Run:
    """
    A run in numbers.

    Attributes:
        parameters: All parameters of the policy, tied ones once.
        config: transformers' config of the language model.
        low_bit_forward: Whether the learner multiplies by low-bit weights (`quantize_learner`, with a scheme).
        memory: Bytes of each GPU, also of a server's.
        rows: Rows in a micro-batch.
        tokens: Tokens in the longest row.
        budget: `max_tokens_per_pass`.
        checkpointing: Whether gradients are checkpointed.
        compute: Bytes per entry in forward and backward.
        engine: `"colocate"` (on these GPUs), `"server"` (on its own GPUs), or `""` without an engine.
        utilization: `vllm_gpu_memory_utilization`.
        sleep: Whether the engine sleeps between rollouts.
        frozen: `lora_base: frozen`: of the base there are only quantized values.
        decompresses: Whether a quantized checkpoint is decompressed beside the model when the run starts.
        keeps_matrices: `quant_keep_matrices`.
        engine_kernel: Whether the learner's kernels are the engine's (`quant_kernel: engine`), which lay the quantized
            values out again.
        engine_ranks: GPUs of one engine.
        ranks: GPUs of the learner, one process each.
        fsdp2: Whether the GPUs hold shards of one model; otherwise each holds the whole.
        reference: Whether there is a second, frozen model for the KL term.
        teacher: What the student of a distillation learns from; `None` for other trainers.
        samples: Whether the run samples answers, with an engine or with transformers.
        sampled_rows: Answers that transformers samples at once in a process; 0 with an engine.
        cache_entry: Bytes of a number in the engine's key-value cache.
        cache_size: Bytes of that cache on each GPU, which `vllm_engine_kwargs` may set; `None`: what the share leaves.
        eager: Whether the engine runs without CUDA graphs.
        accumulation: Micro-batches in an update, which share passes.
        kernels: The schemes that an engine multiplies in: rows of `quant.supported.SUPPORTED`, which say on what GPUs.
    """

    parameters: tuple[Parameter, ...]
    config: Any
    low_bit_forward: bool
    memory: int
    rows: int
    tokens: int
    budget: int | None
    checkpointing: bool
    compute: int
    engine: str
    utilization: float
    sleep: bool
    frozen: bool = False
    decompresses: bool = False
    keeps_matrices: bool = False
    engine_kernel: bool = False
    engine_ranks: int = 1
    ranks: int = 1
    fsdp2: bool = False
    reference: bool = False
    teacher: Teacher | None = None
    samples: bool = True
    sampled_rows: int = 0
    cache_entry: int = 2
    cache_size: int | None = None
    eager: bool = False
    accumulation: int = 1
    kernels: tuple[Any, ...] = ()

    @property
    def in_layers(self) -> list[Parameter]:
        """The parameters of the decoder layers: all but embeddings, the final norm and the output layer."""
        return [parameter for parameter in self.parameters if parameter.layer]

    @property
    def has_adapter(self) -> bool:
        """Whether it trains a LoRA adapter."""
        return any(parameter.in_adapter for parameter in self.parameters)

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        # Some families have larger heads than the hidden size gives (Qwen3, Gemma), and say so.
        explicit = getattr(self.config, "head_dim", None)
        return explicit or self.config.hidden_size // self.config.num_attention_heads

    @property
    def attended(self) -> int:
        """Entries of a head's key and of its value together: attention multiplies by both."""
        # Latent attention (MLA) has keys of two parts, and values of a size of their own.
        plain = getattr(self.config, "qk_nope_head_dim", None)
        if plain:
            return plain + self.config.qk_rope_head_dim + self.config.v_head_dim
        return 2 * self.head_dim

    @property
    def residual(self) -> int:
        """Bytes per entry of the hidden states between layers."""
        size = self.parameters[0].size
        # FSDP2 casts the weights, so hidden states have the smaller dtype. Autocast casts only what matrices multiply:
        # hidden states keep the dtype of the weights.
        if self.fsdp2:
            return min(self.compute, size)
        return size

    def local_entries(self, parameter: Parameter) -> int:
        """
        Number of entries of a parameter on each GPU.

        Args:
            parameter: One of `parameters`.
        """
        if not self.fsdp2 or not parameter.shape:
            return parameter.entries

        # FSDP2 cuts dimension 0 and pads every part to the longest.
        rows = math.ceil(parameter.shape[0] / self.ranks)
        return rows * math.prod(parameter.shape[1:])
