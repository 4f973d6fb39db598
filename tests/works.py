"""
What works, what is refused and what nobody tried: the lists of docs/what_works.md, each row with its test.

`python tests/works.py` writes the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "what_works.md"

WORKS = "works"
REFUSED = "refused"
NOT_TRIED = "not tried"

HEAD = """# What works, what does not

What works or is refused links to the file of its test. What is not tried has no test, but may work. A refused setting
stops the run with one line, as a rule before a model loads. "Engine" is vLLM's engine on a CPU; see also
[what ran on GPUs](../CONTRIBUTING.md#versions).

<!-- Written by tests/works.py. -->
"""


@dataclass(frozen=True)
class Row:
    """
    One row of the page.

    Attributes:
        what: A feature, in words.
        state: `WORKS`, `REFUSED` or `NOT_TRIED`.
        test: The name of the test that shows it, after its file and "::" where others have the same name; empty for
            what nobody tried.
        note: What a user has to know.
    """

    what: str
    state: str
    test: str = ""
    note: str = ""


# A row is a claim that users rely on. Whoever adds one names a test that fails if it is not so.
SECTIONS: dict[str, list[Row]] = {
    "Trainers": [
        Row("GRPO with TBPO (`QaRLTrainer`)", WORKS, "test_what_trains_is_tbpo"),
        Row(
            "GRPO with TRL's losses",
            WORKS,
            "test_a_stock_loss_without_quantization_is_trls_bit_for_bit",
            "all `loss_type`s of TRL",
        ),
        Row(
            "with `quant_scheme: none`",
            WORKS,
            "test_with_the_scheme_off_losses_and_weights_are_those_of_trl_bit_for_bit",
            "TRL's losses and weights, bit for bit",
        ),
        Row(
            "SFT, DPO, KTO, RLOO (`LowBitMixin`)",
            WORKS,
            "test_it_trains_on_low_bit_weights_and_saves_what_the_forward_used",
        ),
        Row(
            "IW-OPD, by a class of your own",
            WORKS,
            "test_a_loader_that_wraps_another_resumes_at_the_end_of_an_epoch_alone",
            "it resumes at the end of an epoch alone; with an engine it ran once by hand",
        ),
        Row("distillation into low bits", WORKS, "test_a_student_comes_closer_to_its_own_start"),
        Row(
            "`torch_compile` in SFT, DPO, KTO, CPO and of reward models",
            REFUSED,
            "test_dpo_and_kto_in_low_bits_are_not_compiled",
            "TorchDynamo fails there, and elsewhere without `gradient_checkpointing`",
        ),
        Row("SFT with packing", WORKS, "test_rows_that_share_a_sequence_do_not_see_each_other"),
        Row(
            "packing of models in which texts would cross: LFM2, Falcon-H1, OPT and others",
            REFUSED,
            "test_rows_that_share_a_sequence_are_refused_where_layers_run_on",
        ),
        Row(
            "a teacher with another tokenizer",
            REFUSED,
            "test_a_teacher_that_numbers_its_tokens_otherwise_is_refused_before_a_model_loads",
        ),
        Row(
            "AsyncGRPO",
            REFUSED,
            "test_a_trainer_that_streams_master_weights_to_its_server_is_refused",
            "in low bits; it streams high-precision weights to its server",
        ),
        Row(
            "ORPO and reward models",
            NOT_TRIED,
            note="ran once by hand; a reward model with `quant_ignore: [lm_head, score]`",
        ),
        Row("PPO", NOT_TRIED),
    ],
    "Features of TRL": [
        Row("colocated engine", WORKS, "test_invariants.py::test_the_learner_gives_the_engines_log_probs_bit_for_bit"),
        Row(
            "engine as a server",
            WORKS,
            "test_server.py::test_a_run_through_a_server_is_the_colocated_one",
            "`qarl-trl serve`",
        ),
        Row(
            "RLOO and distillation with a server",
            WORKS,
            "test_server.py::test_rloo_and_distillation_train_through_the_server",
        ),
        Row(
            "no engine: transformers samples",
            WORKS,
            "test_run_trains_evaluates_and_saves",
            "`use_vllm: false`, slow; on every machine",
        ),
        Row(
            "several updates on one rollout batch",
            WORKS,
            "test_packed_passes_train_as_padded_rows_do",
            "`num_iterations`, `steps_per_generation`",
        ),
        Row("sleep mode", WORKS, "test_a_sync_brings_back_all_that_a_sleep_threw_away"),
        Row("rewards by name and by import path", WORKS, "test_rewards_come_by_name_and_by_path"),
        Row("several rewards with weights", WORKS, "test_several_rewards_are_added_by_their_weights"),
        Row(
            "streamed data sets in a script",
            WORKS,
            "test_a_streamed_data_set_trains_as_the_same_one_in_memory",
            "set `max_steps`; a resume does not compare their rows, and a recipe loads data sets whole",
        ),
        Row("`rollout_func` that asks the engine", WORKS, "test_an_engine_that_a_rollout_func_drives_is_checked_too"),
        Row("tools, several processes, one engine", REFUSED, "test_tools_of_several_processes_need_an_engine_each"),
        Row(
            "tools, one engine a process",
            WORKS,
            "test_an_engine_in_a_loop_of_turns_waits_for_nobody",
            "a toy that calls its tool ran once by hand, at a mismatch of 3e-7 nats",
        ),
        Row("evaluation within a run", WORKS, "test_an_evaluation_samples_from_weights_that_were_just_loaded"),
        Row(
            "callbacks that swap weights (EMA)",
            WORKS,
            "test_the_rollout_after_an_evaluation_of_other_weights_is_from_the_runs_own",
        ),
        Row("stop strings", WORKS, "test_answers_that_ended_on_a_stop_string_are_not_counted_as_cut_off"),
        Row(
            "`beta` > 0 with all weights",
            WORKS,
            "test_the_reference_of_all_weights_is_the_unquantized_model",
            "KL is above 0 at the start",
        ),
        Row("`beta` > 0 with LoRA", WORKS, "test_the_reference_of_lora_is_the_low_bit_base"),
        Row("`use_liger_kernel`", REFUSED, "test_a_setting_that_does_not_work_in_low_bits_is_refused_by_name"),
        Row(
            "`top_p`, `top_k`, `min_p` with the mismatch weight",
            REFUSED,
            "test_a_setting_that_would_bias_the_method_or_train_nothing_is_refused_by_name",
        ),
        Row(
            "tokens that were added in memory", WORKS, "test_tokens_that_were_added_in_memory_are_known_to_the_engine"
        ),
        Row("a tokenizer with another end token", WORKS, "test_the_eos_token_of_the_processing_class_ends_answers"),
        Row("images, colocated", NOT_TRIED, "", "by hand, with torchvision: Qwen2.5-VL, random weights, W4A16"),
        Row("images, with a server", REFUSED, "test_a_server_takes_no_images"),
        Row(
            "`torch_compile` with TBPO",
            REFUSED,
            "test_a_setting_that_would_bias_the_method_or_train_nothing_is_refused_by_name",
            "with TRL's losses it ran once by hand",
        ),
        Row(
            "resume",
            WORKS,
            "test_resuming_after_two_of_four_steps_gives_the_same_master_weights_bit_for_bit",
            "bit for bit",
        ),
        Row("resume with another learning rate", WORKS, "test_a_lower_learning_rate_counts_from_the_next_update_on"),
        Row("trackio", WORKS, "test_metrics_are_those_of_the_trainers_log"),
        Row(
            "a tracker that is not installed",
            REFUSED,
            "test_a_tracker_that_is_unknown_or_not_installed_is_refused_before_a_model_loads",
        ),
        Row("wandb", NOT_TRIED, "", "offline, once by hand, with its table of completions"),
        Row("speculative decoding: once by hand, by n-grams the mismatch was 0.014 to 0.025, unexplained", NOT_TRIED),
    ],
    "Model families": [
        Row(
            "Qwen3, Qwen2, Qwen2.5, Llama",
            WORKS,
            "test_invariants.py::test_the_learner_gives_the_engines_log_probs_bit_for_bit",
            "engine and learner agree bit for bit on a CPU",
        ),
        Row(
            "OLMo-2, StarCoder2, SmolLM3",
            WORKS,
            "test_learner_and_engine_run_the_same_class_of_transformers",
            "vLLM runs transformers' own class; mismatch at the floor",
        ),
        Row(
            "Mixtral, OLMoE, Qwen3-MoE: learner and file",
            WORKS,
            "test_an_untouched_model_is_saved_byte_for_byte_as_by_llm_compressor",
        ),
        Row(
            "low-bit experts in the CPU engine",
            REFUSED,
            "test_experts_off_the_engine_are_refused_before_a_model_loads",
            "take a GPU, or ignore the experts",
        ),
        Row(
            "experts in high precision, attention in low bits",
            WORKS,
            "test_low_bit_attention_beside_experts_in_high_precision_trains_on_the_cpu_engine",
        ),
        Row(
            "gpt-oss, Nemotron-H (other layouts of experts)",
            REFUSED,
            "test_experts_of_another_form_are_refused",
            "also if ignored",
        ),
        Row(
            "LFM2-MoE, MiniMax-M2, PhiMoE",
            REFUSED,
            "test_experts_whose_names_vllm_does_not_read_are_refused",
            "vLLM would run random experts",
        ),
        Row(
            "biases that vLLM has no place for, such as that of Qwen3's `o_proj`",
            REFUSED,
            "test_a_bias_without_a_place_in_the_engine_stops_the_run",
            "at the first sync in which one is not 0; without an engine a warning",
        ),
        Row("GPT-2 (Conv1D)", REFUSED, "test_matrices_that_are_no_linear_layers_are_named"),
        Row(
            "Gemma-2 with sdpa",
            REFUSED,
            "test_an_attention_without_the_softcap_of_the_model_is_refused",
            "set `attn_implementation: eager`",
        ),
        Row(
            "Mistral, Granite, Phi-3, Gemma-3, Cohere, Falcon-H1",
            NOT_TRIED,
            "",
            "all ran once by hand, but the sync check stopped Falcon-H1 (random weights, in bf16, too)",
        ),
        Row("vision-language models", NOT_TRIED, "", "without an engine LLaVA ran once by hand"),
    ],
    "Machines": [
        Row(
            "CPUs with AVX-512 and the engine",
            WORKS,
            "test_invariants.py::test_the_learner_gives_the_engines_log_probs_bit_for_bit",
        ),
        Row(
            "CPUs with AVX2 and the engine: W8A8, W4A8, FP8_DYNAMIC",
            WORKS,
            "test_a_cpu_that_the_engine_runs_on_passes",
        ),
        Row(
            "CPUs with AVX2 and the engine: W4A16",
            REFUSED,
            "test_a_run_with_the_engine_is_refused_before_a_model_loads",
            "without an engine it trains",
        ),
        Row(
            "ARM and x86 without AVX2, with the engine",
            REFUSED,
            "test_a_cpu_that_the_engine_cannot_run_on_says_why",
        ),
        Row(
            "Hopper (H200): W4A16, FP8_DYNAMIC",
            WORKS,
            "test_the_engines_own_layer_is_the_plain_form",
            "the test is of layers; trained, synced and saved by hand, with vLLM 0.26 ([the run](../dev/gpu.md))",
        ),
        Row("other GPUs: Ampere, Ada, Blackwell, AMD", NOT_TRIED, "", "a consumer's GPU neither"),
        Row("macOS, Windows", NOT_TRIED),
    ],
    "Schemes and starts": [
        Row(
            "W4A16, W4A16_ASYM, W4A8, W8A8, FP8_DYNAMIC in the CPU engine",
            WORKS,
            "test_invariants.py::test_the_learner_gives_the_engines_log_probs_bit_for_bit",
            "[which runs where](schemes.md)",
        ),
        Row(
            "the other schemes in the CPU engine",
            REFUSED,
            "test_a_scheme_without_a_cpu_kernel_is_refused_before_a_model_loads",
        ),
        Row("two schemes in one model", WORKS, "test_two_schemes_in_one_engine"),
        Row(
            "start from GPTQ or another compressed-tensors checkpoint",
            WORKS,
            "test_master_weights_are_what_transformers_decompresses_and_nothing_else",
        ),
        Row("start from AWQ, bitsandbytes, GGUF", REFUSED, "test_a_checkpoint_of_another_kind_is_refused"),
        Row(
            "FP8 cache of keys and values",
            WORKS,
            "test_kv_cache.py::test_the_learner_gives_the_engines_log_probs_bit_for_bit",
            "`kv_cache_dtype: fp8`",
        ),
        Row("a checkpoint with scales of a quantized cache", REFUSED, "test_a_quantized_cache_is_refused"),
    ],
    "Adapters": [
        Row("LoRA, merged before each quantization", WORKS, "test_quantized_values_are_those_of_pefts_own_merge"),
        Row("LoRA beside a frozen base", WORKS, "test_engine_learner_and_files_are_one_base_and_one_adapter"),
        Row("a `PeftModel` of your own", WORKS, "test_a_peft_model_is_trained_with_its_own_adapter_as_the_reference"),
        Row(
            "DoRA, dropout, biases, PiSSA",
            REFUSED,
            "test_adapters_that_cannot_be_aligned_are_refused_before_a_model_loads",
        ),
        Row("AdaLoRA, IA3 and other kinds", REFUSED, "test_other_kinds_of_adapters_are_refused"),
        Row("`modules_to_save`", WORKS, "test_modules_to_save_are_synced_as_trained"),
        Row(
            "`modules_to_save` of a tied embedding",
            REFUSED,
            "test_a_copy_of_a_tied_weight_is_refused_before_the_model_loads",
        ),
        Row("LoRA with Muon", REFUSED, "test_muon_and_lora_are_refused_together"),
        Row(
            "an adapter beside a frozen base, with a server",
            WORKS,
            "test_server_frozen.py::test_a_run_through_a_server_is_the_colocated_one",
        ),
        Row("LoRA on low-bit experts", NOT_TRIED, "", "on attention beside them it works"),
    ],
    "Several processes": [
        Row("DDP", WORKS, "test_processes_train_one_model_and_every_engine_gets_it"),
        Row(
            "FSDP2",
            WORKS,
            "test_processes_train_one_model_and_every_engine_gets_it",
            "on CPUs, with a changed accelerate; on GPUs not tried",
        ),
        Row("HSDP", WORKS, "test_two_nodes_train_one_model", "without an engine"),
        Row("DeepSpeed ZeRO-3", WORKS, "test_zero3_syncs_and_trains_as_ddp"),
        Row("DeepSpeed ZeRO-1, ZeRO-2", WORKS, "test_zero1_and_zero2_train_as_ddp"),
        Row("a frozen base with DeepSpeed", REFUSED, "test_a_frozen_base_has_no_shards_but_those_of_fsdp2"),
        Row("FSDP1, offloaded shards", REFUSED, "test_shards_that_cannot_be_quantized_are_refused"),
        Row("FSDP2 on CPUs", REFUSED, "test_shards_of_several_cpus_are_refused", "accelerate would run DDP"),
        Row(
            "a tensor-parallel learner; context parallelism in RL",
            REFUSED,
            "test_a_learner_that_is_cut_within_layers_or_sequences_is_refused",
        ),
        Row("context parallelism in SFT", NOT_TRIED),
        Row(
            "several GPUs in one process",
            REFUSED,
            "test_one_process_with_several_gpus_is_refused_before_a_model_loads",
        ),
        Row("an engine over several ranks", WORKS, "test_shards_of_a_learner_sync_to_two_ranks_of_a_server"),
        Row("several trainers on one server", WORKS, "test_two_trainers_share_a_server"),
        Row("expert-parallel engines", NOT_TRIED),
        Row("several real GPUs or nodes", NOT_TRIED),
    ],
}


def files_with(test: str) -> list[Path]:
    """
    The files that define a test.

    Args:
        test: As in a [`Row`].
    """
    file, _, name = test.rpartition("::")
    # As a whole: the name of one test may begin with that of another.
    definition = re.compile(rf"^def {name}\(", re.MULTILINE)

    found = []
    for path in sorted((ROOT / "tests").rglob(file or "test_*.py")):
        if definition.search(path.read_text()):
            found.append(path)
    return found


def page() -> str:
    """The page, in Markdown."""
    lines = [HEAD]

    for title, rows in SECTIONS.items():
        lines.append(f"## {title}\n")
        # What works comes first, whatever the order of the rows.
        for state in (WORKS, REFUSED, NOT_TRIED):
            items = []
            for row in rows:
                if row.state == state:
                    items.append(_item(row))
            if items:
                lines += [f"**{state.capitalize()}**\n", *items, ""]

    return "\n".join(lines)


def _item(row: Row) -> str:
    """A row as an item of a list, with a link to the file of its test."""
    what = row.what
    if row.test:
        # To the file, without a line: lines move with each change.
        path = files_with(row.test)[0].relative_to(ROOT)
        what = f"[{row.what}](../{path})"
    return f"- {what}: {row.note}" if row.note else f"- {what}"


if __name__ == "__main__":
    PAGE.write_text(page())
