"""What a plan counts of a rank, against a toy trainer after an update: tensor bytes, exactly."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from slow.toys import save_model
from test_trainer import make
from transformers import PretrainedConfig
from trl import ModelConfig

from qarl_trl.quant import quantized_modules
from qarl_trl.quant.quantize import quantize_weight
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.memory.backward import activations
from qarl_trl.tools.plan.memory.engine import cache_bytes, cache_tokens, synced_bytes, token_bytes
from qarl_trl.tools.plan.memory.learner import optimizer_state, trained_bytes
from qarl_trl.tools.plan.memory.moments import moments
from qarl_trl.tools.plan.run import Hardware, Parameter
from qarl_trl.tools.plan.settings import run_of
from qarl_trl.trainers.forwards import Trust
from tools.plan.runs import example_run, nbytes, resident


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Toy models on disk."""
    return {
        "dense": save_model(tmp_path_factory.mktemp("dense"), layers=1),
        "experts": save_model(tmp_path_factory.mktemp("experts"), layers=1, experts=4),
    }


def resident_tensors(trainer):
    """Bytes of what a real trainer keeps between steps, by the names of the plan; without items of size 0."""
    state = []
    for of_parameter in trainer.optimizer.optimizer.state.values():
        for value in of_parameter.values():
            # A count of steps may be a plain number.
            if isinstance(value, torch.Tensor):
                state.append(value)

    quantized = []
    for weight in trainer.low_bit_store.kept().values():
        quantized += weight.tensors.values()

    sizes = {
        "master weights": nbytes(trainer.model.parameters()),
        "optimizer state": nbytes(state),
        "quantized values": nbytes(quantized),
    }
    return {name: size for name, size in sizes.items() if size}


def record_gradients(trainer):
    """A list that gets the bytes of a trainer's gradients before each `zero_grad` of its model."""
    sizes = []
    clear = trainer.model.zero_grad

    def zero_grad(*args):
        gradients = []
        for param in trainer.model.parameters():
            if param.grad is not None:
                gradients.append(param.grad)

        sizes.append(nbytes(gradients))
        clear(*args)

    trainer.model.zero_grad = zero_grad
    return sizes


@pytest.mark.parametrize(
    ("kind", "muon", "lora"),
    [
        ("dense", False, False),
        ("dense", True, False),
        ("experts", True, False),
        ("dense", False, True),
    ],
)
def test_tensors_of_a_trainer_after_an_update(folders, tmp_path, kind, muon, lora):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if lora else None
    changes = {"optim_muon": True} if muon else {}
    trainer = make(folders[kind], tmp_path, peft_config=adapter, max_steps=1, export_low_bit=False, **changes)
    gradients = record_gradients(trainer)
    trainer.train()

    config = meta.read_config(folders[kind])
    skeleton = meta.model_without_weights(config, torch.float32, adapter, trainer.args.quant_plan())
    # Toys train in float32, on a CPU.
    run = example_run(skeleton, config, trainer.args.optim_muon, compute=4)

    tensors = resident_tensors(trainer)
    print("trainer", kind, tensors, "gradients", max(gradients))
    assert resident(run) == tensors
    assert trained_bytes(run) == max(gradients)

    # Control: the other optimizer has another state.
    if not lora:
        other = "adamw_torch" if trainer.args.optim_muon else "muon"
        other_run = replace(run, parameters=meta.parameters(skeleton, other))
        assert resident(other_run)["optimizer state"] != tensors["optimizer state"]


@pytest.mark.parametrize(
    ("optim", "arguments"),
    [
        ("sgd", None),
        ("sgd", "momentum=0.9"),
        ("adafactor", None),
        ("adagrad", None),
        ("rmsprop", None),
        ("rmsprop", "momentum=0.9"),
    ],
)
def test_the_state_of_other_optimizers_is_not_adamws(folders, tmp_path, optim, arguments):
    changes = {"optim": optim, "optim_args": arguments}
    trainer = make(folders["dense"], tmp_path, max_steps=1, export_low_bit=False, **changes)
    trainer.train()

    hardware = Hardware(1, 24)
    run = run_of(trainer.args, ModelConfig(model_name_or_path=str(folders["dense"])), hardware)

    measured = resident_tensors(trainer).get("optimizer state", 0)
    # Counts of steps and norms are the difference.
    assert optimizer_state(run) == pytest.approx(measured, abs=4 * len(run.parameters))


@pytest.mark.parametrize(
    ("optim", "bytes_of_an_entry"),
    [
        ("adamw_torch", 8),
        ("lion_32bit", 4),
        ("paged_lion_32bit", 4),
        ("lion_8bit", 1 + 4 / 256),
        ("rmsprop_bnb_8bit", 1 + 4 / 256),
        ("paged_ademamix_32bit", 12),
        ("ademamix_8bit", 3 * (1 + 4 / 256)),
        ("adamw_torch_8bit", 2 * (1 + 4 / 256)),
        ("adamw_torch_4bit", 1 + 8 / 256),
        ("schedule_free_adamw", 8),
    ],
)
def test_moments_are_counted_by_the_optimizers_name(optim, bytes_of_an_entry):
    """Those that are not installed here."""
    config = meta.read_config("Qwen/Qwen2.5-0.5B")
    matrix = Parameter("layers.0.mlp.up_proj.weight", (4096, 512), 4, "layers.0.", optim)
    embedding = Parameter("embed_tokens.weight", (4096, 512), 4, "", optim)
    entries = 4096 * 512

    def state_of(parameter):
        run = example_run(meta.model_without_weights(config, torch.float32), config, parameters=(parameter,))
        return optimizer_state(run, paged=optim.startswith("paged"))

    assert state_of(matrix) == pytest.approx(bytes_of_an_entry * entries, abs=4)
    # bitsandbytes has those of embeddings in 32 bits, torchao has not.
    if "8bit" in optim and optim != "adamw_torch_8bit":
        bytes_of_an_entry = 4 * round(bytes_of_an_entry)
    assert state_of(embedding) == pytest.approx(bytes_of_an_entry * entries, abs=4)


def test_the_engines_kernels_lay_the_quantized_values_out_again(folders):
    config = meta.read_config(folders["dense"])
    skeleton = meta.model_without_weights(config, torch.float32, None, "W4A16")
    run = example_run(skeleton, config, engine_kernel=True)

    assert moments(run)["backward"]["the kernels' layout of them"] == moments(run)["backward"]["quantized values"]
    # Control: torch's products read them as they are.
    assert "the kernels' layout of them" not in moments(replace(run, engine_kernel=False))["backward"]


@pytest.mark.parametrize("frozen", [False, True])
def test_kept_matrices_are_those_of_a_trainer(folders, tmp_path, frozen):
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if frozen else None
    changes = {"lora_base": "frozen"} if frozen else {}
    trainer = make(
        folders["dense"],
        tmp_path,
        peft_config=adapter,
        max_steps=1,
        quant_keep_matrices=True,
        use_vllm=False,
        **changes,
    )
    ids = torch.tensor([[3, 4, 5]])
    # As in a step of the trainer: what others run does not use what it keeps.
    with trainer._guard.trusting(Trust.KEPT):
        trainer.model(input_ids=ids).logits.sum().backward()
    kept = []
    for _, layer in quantized_modules(trainer.model):
        for name, tensor in layer.low_bit().prepared.items():
            # What else a gemm prepared is counted with the quantized values.
            if name.startswith("matrix"):
                kept.append(tensor)

    config = meta.read_config(folders["dense"])
    skeleton = meta.model_without_weights(config, torch.float32, adapter, trainer.args.quant_plan())
    # What is not quantized beside a frozen base is bfloat16, and so are its products.
    run = example_run(skeleton, config, compute=2 if frozen else 4, keeps_matrices=True, frozen=frozen)
    at_moment = moments(run)

    assert at_moment["backward"]["dequantized matrices"] == nbytes(kept)
    # During a rollout only a frozen base has them: an update of the others makes new values.
    assert ("dequantized matrices" in at_moment["rollout"]) == frozen
    # Control: without the setting nothing is kept.
    assert "dequantized matrices" not in moments(replace(run, keeps_matrices=False))["backward"]


def moments_of_bitsandbytes(trainer):
    """The moments in an optimizer of bitsandbytes, and their scales."""
    tensors = []
    for of_parameter in trainer.optimizer.optimizer.state.values():
        for name, value in of_parameter.items():
            # `absmax1` and `absmax2`. The tables of 256 steps beside them are one for all parameters.
            if name.startswith(("state1", "state2", "absmax")):
                tensors.append(value)
    return tensors


def quantized_values(trainer):
    """Copies of the quantized values of each layer."""
    return [layer.low_bit().quantized.clone() for _, layer in quantized_modules(trainer.model)]


def test_moments_of_bitsandbytes(folders, tmp_path):
    """8 bits but for embeddings and norms, which the plan leaves out; the learner then quantizes the new weights."""
    pytest.importorskip("bitsandbytes", reason="pip install --target FOLDER --no-deps bitsandbytes; PYTHONPATH=FOLDER")
    trainer = make(folders["dense"], tmp_path, max_steps=1, export_low_bit=False, optim="adamw_8bit")
    before = quantized_values(trainer)
    trainer.train()

    config = meta.read_config(folders["dense"])
    skeleton = meta.model_without_weights(config, torch.float32, None, trainer.args.quant_plan())
    run = example_run(skeleton, config, False, parameters=meta.parameters(skeleton, "adamw_8bit"))

    measured = nbytes(moments_of_bitsandbytes(trainer))
    print("bitsandbytes", measured, optimizer_state(run))
    # Norms, whose moments stay in float32, are the difference.
    assert measured == pytest.approx(optimizer_state(run), rel=0.01)

    # Control: torch's AdamW has a larger state.
    plain = replace(run, parameters=meta.parameters(skeleton, "adamw_torch"))
    assert optimizer_state(plain) > 1.5 * optimizer_state(run)

    # bitsandbytes writes into weights by kernels of its own. The layers must see that their values are out of date.
    after = quantized_values(trainer)
    assert len(after) == len(before)
    assert not all(map(torch.equal, before, after))
    for _, layer in quantized_modules(trainer.model):
        assert torch.equal(layer.low_bit().quantized, quantize_weight(layer.weight, layer.scheme).quantized)


# Qwen3-8B, by hand --------------------------------------------------------------------------------------------------

# 36 layers: queries, keys, values and output for 32, 8, 8 and 32 heads of 128, and three matrices of the MLP.
MATRICES = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288)
# Embeddings, output layer and norms.
OTHERS = 8_190_735_360 - MATRICES
# Four bits an entry, a bfloat16 scale for each 128, and two int64 of a shape for each of 7 matrices in a layer.
PACKED = MATRICES // 2 + 2 * MATRICES // 128 + 16 * 36 * 7


@pytest.fixture(scope="module")
def skeleton_8b():
    config = meta.read_config("Qwen/Qwen3-8B-Base")
    return meta.model_without_weights(config, torch.float32, quantization="W4A16"), config


@pytest.fixture(scope="module")
def eight_billion(skeleton_8b):
    return example_run(*skeleton_8b)


def test_8b_on_one_gpu(eight_billion):
    """Float32 master weights; Muon for 6.95 billion entries in layers, AdamW for two matrices of 151936 x 4096."""
    # Tensors, each with a float32 count of its steps.
    trained_by_adamw = 2 + 1 + 36 * 4
    stays = resident(eight_billion)

    assert stays["master weights"] == 4 * 8_190_735_360
    assert stays["optimizer state"] == 4 * MATRICES + 8 * OTHERS + 4 * trained_by_adamw
    assert stays["quantized values"] == PACKED
    assert synced_bytes(eight_billion) == PACKED + 2 * OTHERS


def test_8b_in_eight_shards(skeleton_8b):
    sharded = example_run(*skeleton_8b, ranks=8, fsdp2=True)

    assert resident(sharded)["master weights"] == 4 * 8_190_735_360 // 8
    assert resident(sharded)["quantized values"] == MATRICES // 16 + 2 * MATRICES // 1024 + 16 * 36 * 7
    assert activations(sharded) == 4 * 18432 * (36 * 4096 * 2 + 8 * 4096)


def test_8b_in_three_shards_keeps_matrices_that_three_does_not_divide_whole(skeleton_8b):
    """Of 4096 and 12288 rows only the latter are thirds: two matrices in a layer."""
    uneven = example_run(*skeleton_8b, ranks=3, fsdp2=True)

    divisible = 36 * 2 * 4096 * 12288
    whole = PACKED - (divisible // 2 + 2 * divisible // 128 + 16 * 36 * 2)
    thirds = divisible // 6 + 2 * divisible // 384 + 16 * 36 * 2
    assert resident(uneven)["quantized values"] == whole + thirds


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (16, 1)])
def test_the_cache_has_keys_and_values_of_the_heads_of_a_rank(eight_billion, ranks, heads):
    run = replace(eight_billion, engine_ranks=ranks)

    # Keys and values, in bfloat16. With more ranks than the 8 heads each rank still has one.
    bytes_of_a_token = 36 * 2 * heads * 128 * 2
    assert cache_tokens(run) == cache_bytes(run) // bytes_of_a_token


def test_layers_with_a_window_keep_its_tokens_and_linear_attention_none(eight_billion):
    """vLLM's own sizes, of a row at its end, for which it lets no token more wait."""
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    window = 512
    layout = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    vllm_config = VllmConfig()
    vllm_config.model_config = SimpleNamespace(max_model_len=eight_billion.tokens)
    vllm_config.scheduler_config.max_num_batched_tokens = 1
    whole = FullAttentionSpec(**layout).max_memory_usage_bytes(vllm_config)
    sliding = SlidingWindowSpec(**layout, sliding_window=window).max_memory_usage_bytes(vllm_config)
    # It has one block more, because a window may begin within one.
    sliding -= SlidingWindowSpec(**layout, sliding_window=window).page_size_bytes

    def row_bytes(kinds, **sizes):
        sizes = {"num_hidden_layers": 6, "num_key_value_heads": 8, "head_dim": 128, "layer_types": kinds, **sizes}
        config = PretrainedConfig(**sizes)
        return token_bytes(replace(eight_billion, config=config)) * eight_billion.tokens

    # Six layers each; a mean for each token is rounded up.
    six = ["sliding_attention"] * 5 + ["full_attention"]
    assert row_bytes(six, sliding_window=window) == pytest.approx(5 * sliding + whole, abs=eight_billion.tokens)
    assert row_bytes(["linear_attention", "conv", "moe"] + ["full_attention"] * 3) == 3 * whole
    # Controls: a window longer than the row, and none.
    assert row_bytes(six, sliding_window=10**6) == 6 * whole
    assert row_bytes(six, sliding_window=None) == 6 * whole
    # Mistral's first model has one window, and no list.
    of_all = row_bytes(None, sliding_window=window)
    assert of_all == pytest.approx(6 * sliding, abs=eight_billion.tokens)


def test_answers_that_transformers_samples_have_keys_and_values(tiny_model):
    """Of a whole rollout batch at once: the bytes of a real cache."""
    model = tiny_model()
    prompts = torch.full((3, 4), 5)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=6,
        max_new_tokens=6,
        return_dict_in_generate=True,
    )
    layers = output.past_key_values.layers
    real = nbytes([tensor for layer in layers for tensor in (layer.keys, layer.values)])

    # The last token is in no cache. These are in float32.
    sizes = {"rows": 1, "tokens": 4 + 6 - 1, "compute": 4, "engine": "", "sampled_rows": 3}
    run = example_run(model, model.config, **sizes)

    name = "keys and values of sampled answers"
    assert moments(run)["rollout"][name] == real
    assert name not in moments(run)["backward"]
    # Control: an engine has a cache of its own.
    assert name not in moments(replace(run, engine="colocate", sampled_rows=0))["rollout"]


def test_an_fp8_cache_holds_twice_the_tokens(eight_billion):
    tokens = cache_tokens(eight_billion)

    # An odd number of half tokens is one more.
    assert cache_tokens(replace(eight_billion, cache_entry=1)) in (2 * tokens, 2 * tokens + 1)
    assert cache_bytes(replace(eight_billion, cache_entry=1)) == cache_bytes(eight_billion)


def test_an_engine_takes_its_share_in_the_rollout_and_without_sleep_always(eight_billion):
    share = int(0.5 * eight_billion.memory)

    def taken(run):
        """What the engine takes at each moment."""
        bytes_taken = {}
        for moment, sizes in moments(run).items():
            weights = sizes.get("engine weights", 0)
            cache = sizes.get("key-value cache", 0)
            work = sizes.get("work of the engine (assumed)", 0)
            bytes_taken[moment] = weights + cache + work
        return bytes_taken

    assert taken(eight_billion) == {"rollout": share, "backward": 0}
    assert taken(replace(eight_billion, sleep=False)) == {"rollout": share, "backward": share}
    assert taken(replace(eight_billion, engine="server")) == {"rollout": 0, "backward": 0}
