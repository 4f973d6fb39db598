"""The command `qarl-trl`."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import TEXT_BESIDE_EYE, make_model, make_tokenizer, make_vision_model
from safetensors.torch import load_file, save_file
from slow.toys import stored_tensors
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration, dynamic_module_utils

from qarl_trl import cli
from qarl_trl.errors import in_one_line, naming_config
from qarl_trl.tools.evaluate.checkpoint import check_complete


LIBRARIES = ("torch", "transformers", "trl", "vllm", "llmcompressor", "matplotlib", "datasets")
# Runs a command, and prints which libraries it has loaded.
PRINT_LOADED = """
import sys
from qarl_trl.cli import main
try:
    main({argv})
except SystemExit:
    pass
print(*(name for name in {libraries} if name in sys.modules))
"""
# Their help describes the fields of a config.
TRAIN = ("train", "sft", "rloo", "distill")
ROOT = Path(__file__).parents[1]
DRY = ["train", "--config", str(ROOT / "recipes/qwen3-8b-base/w4a16_qarl_tbpo.yaml"), "--dry_run"]


@pytest.mark.parametrize(
    ("argv", "loaded", "said", "seconds"),
    [
        (["--help"], set(), "train from a recipe", 1),
        # The help of the others is text: they import what they need when they run.
        *(([name, "--help"], set(), "usage: qarl-trl", 1) for name in cli.COMMANDS if name not in TRAIN),
        # `sft`, `rloo` and `distill` go the same way with other configs, which load no more (`test_architecture`).
        (["train", "--help"], {"torch", "transformers", "trl"}, "--tbpo_epsilon_high", 20),
        (["schemes"], {"torch", "transformers"}, "W4A16", 20),
        # A dry run is for machines without the GPU of the run, where vLLM may not even be installed.
        (DRY, {"torch", "transformers", "trl"}, "no CUDA device here", 20),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_a_command_loads_only_the_libraries_that_it_may(argv, loaded, said, seconds):
    """
    Start-up is imports: which ones is pinned, and the CPU time that the user pays for them.

    The dry run has no way to load vLLM or TRL's trainer. It took 9.8 s in a quiet moment and 13 s beside four
    processes, the others 0.1 s.
    """
    code = PRINT_LOADED.format(argv=argv, libraries=LIBRARIES)
    no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

    before = cpu_seconds()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=no_gpu)
    used = cpu_seconds() - before

    assert used < seconds
    assert said in done.stdout
    seen = set(done.stdout.splitlines()[-1].split())
    assert seen <= loaded
    # Control: what is loaded is seen.
    assert ("torch" in seen) == ("torch" in loaded)


def cpu_seconds():
    """User and system time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("argv", [["trian"], ["export", "a", "b", "--bits", "32"]])
def test_wrong_command_line_exits_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)

    assert stopped.value.code == 2
    assert "usage: qarl-trl" in capsys.readouterr().err


MISSING = {
    "train": (["train"], "--config"),
    "sft": (["sft", "--max_steps", "3"], "--config"),
    "rloo": (["rloo"], "--config"),
    "distill": (["distill", "--learning_rate=1e-5"], "--config"),
    "eval": (["eval"], "model, --suite"),
    "eval without --suite": (["eval", "runs/sums"], "--suite"),
    "export": (["export"], "checkpoint, output"),
    "push": (["push", "runs/sums"], "repo"),
    "serve": (["serve", "--host", "0.0.0.0"], "--config"),
    "plan": (["plan", "--gpus", "2"], "--config"),
    "report": (["report"], "RUN"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_arguments_are_one_line_with_an_example(case, capsys, tmp_path, monkeypatch):
    """Without a GPU, whose lack is not what the user has to mend first."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    argv, missing = MISSING[case]

    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)

    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert stopped.value.code == 2
    assert said.out == ""
    assert line.startswith(f"qarl-trl {argv[0]}: missing {missing}")
    # The example has what was missing.
    (example,) = re.findall(r"For example: (qarl-trl .*) \(--help", line)
    command, *words = shlex.split(example)[1:]
    assert command == argv[0]
    for option in re.findall(r"--\w+", missing):
        assert option in words


def test_the_help_of_serve_names_port_and_dry_run(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])

    said = " ".join(capsys.readouterr().out.split())
    for words in ("--dry_run", "vllm_server_port", "vllm_server_base_url", "8000"):
        assert words in said


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a small model."""
    path = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=1).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "argv", [["export", "nowhere", "out", "--scheme", "W2A2"], ["train", "--config", "nowhere.yaml"]]
)
def test_with_traceback_bad_input_is_a_traceback(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises((ValueError, OSError), match="W2A2|nowhere"):
        cli.main([*argv, "--traceback"])


@pytest.fixture
def broken(checkpoint, tmp_path, monkeypatch):
    """The current folder: models that are truncated or whose config.json is nonsense, data and recipes alike."""
    monkeypatch.chdir(tmp_path)

    for name in ("whole", "cut", "list", "binary", "wrong", "zero", "other"):
        shutil.copytree(checkpoint, name)
    # As after a download that broke off: the header says more than is there.
    weights = Path("cut/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:2000])

    Path("list/config.json").write_text("[1]")
    Path("binary/config.json").write_bytes(b"\xff\xfe\x00")
    change_config("wrong", num_hidden_layers="two")
    change_config("zero", num_key_value_heads=0)
    change_config("other", intermediate_size=3)

    # Configs that can be read, of models that cannot be built.
    for name, values in {
        "act": {"hidden_act": "nothing"},
        "size": {"vocab_size": -1},
        "bert": {"model_type": "bert"},
    }.items():
        shutil.copytree("whole", name)
        change_config(name, **values)

    shutil.copytree("whole", "index")
    Path("index/model.safetensors.index.json").write_text("[]")
    shutil.copytree("whole", "groups")
    change_config("groups", quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})

    rows = [json.dumps({"problem": f"{i} + 1", "answer": f"{i + 1}"}) for i in range(64)]
    Path("sums.jsonl").write_text("\n".join(rows))
    Path("no_content.jsonl").write_text('{"prompt": [{"role": "user"}], "answer": "1"}\n')

    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    # YAML's errors show the lines around them, here with a token.
    Path("open.yaml").write_text("hub_token: hf_secret\nlora_target_modules: [q_proj\n")
    Path("list.yaml").write_text("- a\n")
    Path("types.yaml").write_text("learning_rate: [1]\n")
    Path("plan.yaml").write_text("model_name_or_path: cut\ndataset_name_or_path: sums.jsonl\n")
    Path("wrong.yaml").write_text("model_name_or_path: wrong\ndataset_name_or_path: sums.jsonl\n")


def change_config(folder, **values):
    """Change values in the config.json of a model."""
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


TRAIN = [
    "train",
    "--model_name_or_path",
    "./cut",
    "--dataset_name_or_path",
    "sums.jsonl",
    "--use_cpu",
    "--report_to=none",
]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*TRAIN, "--per_device_train_batch_size", "0"], ["per_device_train_batch_size"]),
        ([*TRAIN, "--num_generations", "0"], ["num_generations"]),
        ([*TRAIN, "--learning_rate", "nan"], ["learning_rate", "finite"]),
        ([*TRAIN, "--config", "types.yaml"], ["learning_rate", "[1]"]),
        ([*TRAIN, "--config", "list.yaml"], ["list.yaml", "must be a mapping"]),
        ([*TRAIN, "--config", "binary.yaml"], ["binary.yaml"]),
        ([*TRAIN, "--config", "open.yaml"], ["open.yaml", "line 3"]),
        (["train", "--config", "wrong.yaml", "--use_cpu"], ["num_hidden_layers", "wrong/config.json"]),
        ([*TRAIN, "--dataset_name_or_path", "no_content.jsonl"], ["content"]),
        ([*TRAIN, "--dataset_split", "nope["], ["sums.jsonl", "nope["]),
        ([*TRAIN, "--model_name_or_path", "a/b/c"], ["'a/b/c' is neither a folder"]),
        ([*TRAIN, "--model_name_or_path", "./wrong"], ["num_hidden_layers", "wrong/config.json"]),
        (TRAIN, ["cut/model.safetensors"]),
        ([option for option in TRAIN if option != "--use_cpu"], ["bf16", "use_cpu"]),
        (["export", "cut", "out"], ["cut/model.safetensors"]),
        (["export", "nowhere", "out", "--scheme", "W2A2"], ["W2A2"]),
        (["export", "./binary", "out"], ["binary/config.json"]),
        (["export", "./zero", "out"], ["zero/config.json"]),
        (["export", "./other", "out"], ["other/config.json"]),
        (["export", "./act", "out"], ["act/config.json", "KeyError: 'nothing'"]),
        (["export", "./size", "out"], ["size/config.json", "RuntimeError"]),
        (["export", "./index", "out"], ["index/model.safetensors.index.json must have weight_map"]),
        (["eval", "./groups", "--suite", "sums.jsonl"], ["must have config_groups"]),
        (["export", "./bert", "out"], ["./bert has not the weights", "missing"]),
        (["eval", "./list", "--suite", "sums.jsonl"], ["list/config.json"]),
        (
            ["eval", "whole", "--suite", "sums.jsonl", "--max_new_tokens=8", "--output_dir=sums.jsonl/x"],
            ["sums.jsonl/x"],
        ),
        (["eval", "nowhere", "--suite", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["eval", "nowhere", "--suite", "sums.jsonl"], ["'nowhere' is no folder here"]),
        (["plan", "--config", "plan.yaml", "--memory", "1e308"], ["--memory"]),
        (["doctor", "--learning_rte", "1"], ["learning_rte", "Did you mean learning_rate?"]),
    ],
    # A short name each; two of them must not be equal.
    ids=lambda value: " ".join([value[0], *value[-2:]]) if "-" in str(value) else "",
)
@pytest.mark.usefixtures("broken")
def test_what_users_get_wrong_is_one_line_that_names_it(argv, words, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("cache").absolute())

    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)

    said = capfd.readouterr().err.splitlines()
    assert stopped.value.code == 2, said
    # Libraries print lines of their own.
    (line,) = [text for text in said if text.startswith("qarl-trl ")]
    for word in words:
        assert word in line
    assert "hf_secret" not in line


def test_an_error_about_a_file_names_the_files_of_the_command_line_once(tmp_path):
    file = tmp_path / "run.json"
    file.write_text("{")
    argv = ["report", str(file), "--title", "nowhere"]
    with pytest.raises(ValueError) as raised:
        json.loads(file.read_text())

    # Python's message does not say which file it is about. Of the words of the command line one is a file.
    assert in_one_line(raised.value, argv).startswith(f"{file}: Expecting property name")
    # Control: an error that says more than the content needs no file.
    assert in_one_line(ValueError("title must be short"), argv) == "title must be short"
    # transformers lists the names of all its models.
    assert in_one_line(ValueError("one of " + "AConfig, " * 1000), argv).endswith("AConfig, [...]")
    assert in_one_line(ValueError("x" * 3000), argv).startswith("xxx")


def test_a_full_disk_is_not_blamed_on_a_config(checkpoint, tmp_path):
    """safetensors has one class for damaged files and for errors of the system."""
    limit, maximum = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Python ignores the signal, so a write fails.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, maximum))
        with pytest.raises(OSError, match=r"os error 27") as raised, naming_config([str(checkpoint)]):
            save_file({"weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, maximum))
    assert "config.json" not in str(raised.value)

    # Control: a file that is no safetensors.
    with pytest.raises(ValueError, match=r"config\.json: SafetensorError"), naming_config([str(checkpoint)]):
        load_file(checkpoint / "config.json")


def test_a_crash_in_the_work_that_a_command_returns_keeps_its_traceback(monkeypatch):
    def crash():
        raise ValueError("in the middle of training")

    monkeypatch.setattr("qarl_trl.train.main", lambda argv: crash)

    with pytest.raises(ValueError, match="in the middle"):
        cli.main(["train"])


@pytest.mark.parametrize(
    ("name", "words"), [("train", "resume_from_checkpoint: auto goes on from the last."), ("eval", "interrupted.")]
)
def test_an_interrupt_is_one_line_with_what_to_do(monkeypatch, capsys, name, words):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", lambda argv: interrupted)

    with pytest.raises(SystemExit) as end:
        cli.main([name])

    assert end.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"qarl-trl {name}: interrupted.")
    assert words in line

    # Control: the traceback on request.
    with pytest.raises(KeyboardInterrupt):
        cli.main([name, "--traceback"])


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapter"])
def test_export_writes_the_low_bit_tensors_of_the_checkpoint(checkpoint, tmp_path, lora):
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    source = checkpoint
    if lora:
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        source = tmp_path / "adapter"
        model.save_pretrained(source)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(source)
        # In training answers ended at this token, too; the base's files do not know it.
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.eos_token = "5"
        tokenizer.save_pretrained(source)
        # Trained with TRL's default: dropout is over when a model is exported.
        written = json.loads((source / "adapter_config.json").read_text())
        (source / "adapter_config.json").write_text(json.dumps(written | {"lora_dropout": 0.05}))

    # Other settings than the defaults, so that a lost option is seen.
    ignore = ["lm_head", "re:.*o_proj$"]
    cli.main(["export", str(source), str(tmp_path / "out"), "--group_size", "32", "--ignore", *ignore])

    expected = dict(iter_low_bit_weights(apply_quantization(model, "W4A16", ignore=ignore, group_size=32)))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
    # Control: --ignore reached the quantizer.
    assert "model.layers.0.self_attn.o_proj.weight" in written

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.quantization_config is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == ("5" if lora else "<eos>")
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])


@pytest.mark.parametrize(
    ("place", "weight", "words"),
    [
        ("base", "model.layers.0.mlp.up_proj.weight", r"base has not the weights .* first model.*up_proj"),
        ("adapter", "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", "adapter lacks weights"),
    ],
)
def test_export_of_an_adapter_without_all_weights_is_refused(checkpoint, tmp_path, place, weight, words):
    """transformers fills a lost weight with random numbers, and peft leaves the layer as it was."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapter = tmp_path / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(adapter)
    cli.run(["export", str(adapter), str(tmp_path / "control")])

    (file,) = (tmp_path / place).glob("*.safetensors")
    tensors = load_file(file)
    del tensors[weight]
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=words):
        cli.run(["export", str(adapter), str(tmp_path / "out")])
    assert not (tmp_path / "out" / "config.json").exists()


def save_adapter(base, folder, name="default", rows=None):
    """An adapter with random factors, perhaps on a base whose embedding was resized; returns its `PeftModel`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base)
    if rows is not None:
        model.resize_token_embeddings(rows)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, config, adapter_name=name)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return model


@pytest.mark.parametrize(("name", "rows"), [("policy", None), ("default", 72)], ids=["named", "resized"])
def test_export_takes_an_adapter_with_a_name_and_one_with_a_resized_embedding(checkpoint, tmp_path, name, rows):
    """peft saves the one into a folder of its own, and the other with all rows, also those without a token."""
    from quant.schemes import same_tensors
    from safetensors.torch import load_file

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    model = save_adapter(checkpoint, tmp_path / "adapter", name, rows)

    cli.run(["export", str(tmp_path / "adapter"), str(tmp_path / "out")])

    expected = dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))
    assert same_tensors(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_export_of_a_model_with_adapters_below_it_takes_the_model(checkpoint, tmp_path):
    """As Phi-4-multimodal is published, and as a user may keep the adapters of a base."""
    from quant.schemes import same_tensors
    from safetensors.torch import load_file

    shutil.copytree(checkpoint, tmp_path / "model")
    save_adapter(checkpoint, tmp_path / "model" / "speech")

    folders = {"expected": checkpoint, "out": tmp_path / "model", "other": tmp_path / "model" / "speech"}
    for name, folder in folders.items():
        cli.run(["export", str(folder), str(tmp_path / name)])

    tensors = {name: load_file(tmp_path / name / "model.safetensors") for name in folders}
    assert same_tensors(tensors["out"], tensors["expected"])
    # Control: the adapter makes another model.
    assert not same_tensors(tensors["other"], tensors["expected"])


@pytest.mark.parametrize("manifest", [None, "of the run", "without it"])
def test_export_says_which_of_several_adapters_it_takes(checkpoint, tmp_path, capsys, manifest):
    """peft saves "default" into the folder itself, also if a run trained another one on top."""
    from quant.schemes import same_tensors
    from safetensors.torch import load_file

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    run = tmp_path / "run"
    save_adapter(checkpoint, run)
    # TRL's reference is no choice.
    save_adapter(checkpoint, tmp_path / "start", "ref")
    shutil.copytree(tmp_path / "start" / "ref", run / "ref")
    cli.run(["export", str(run), str(tmp_path / "control")])
    assert "several adapters" not in capsys.readouterr().out

    trained = save_adapter(checkpoint, tmp_path / "trained", "policy")
    # peft's folder has no tokenizer.
    shutil.copytree(tmp_path / "trained" / "policy", run / "policy")
    if manifest is not None:
        files = {"policy/adapter_config.json": 1} if manifest == "of the run" else {}
        (run / "manifest.json").write_text(json.dumps({"files": files}))
    cli.run(["export", str(run), str(tmp_path / "default")])
    said = capsys.readouterr().out
    # A folder that the manifest does not name is a user's own.
    is_of_run = manifest != "without it"
    assert ("'default' is exported, and not policy" in said) == is_of_run
    assert (f"export its folder: {run / 'policy'}" in said) == is_of_run

    cli.run(["export", str(run / "policy"), str(tmp_path / "policy")])
    expected = dict(iter_low_bit_weights(apply_quantization(trained, "W4A16")))
    assert same_tensors(load_file(tmp_path / "policy" / "model.safetensors"), expected)
    # Control: the other one.
    assert not same_tensors(load_file(tmp_path / "default" / "model.safetensors"), expected)


def test_export_of_what_it_cannot_choose_or_read_is_one_line(checkpoint, tmp_path):
    source = tmp_path / "several"
    save_adapter(checkpoint, source, "policy")
    # TRL's reference is no policy.
    shutil.copytree(source / "policy", source / "ref")
    cli.run(["export", str(source), str(tmp_path / "control")])
    shutil.copytree(source / "policy", source / "other")
    with pytest.raises(ValueError, match=r"several has several adapters \(other, policy\)"):
        cli.run(["export", str(source), str(tmp_path / "out")])

    # A base of another width, as if somebody had moved another model to its place.
    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    save_adapter(base, tmp_path / "adapter")
    make_model(hidden_size=256).save_pretrained(base)
    with pytest.raises(ValueError, match=r"adapter does not fit its base: .*size mismatch for .*q_proj") as error:
        cli.run(["export", str(tmp_path / "adapter"), str(tmp_path / "out")])
    assert "\n" not in str(error.value)

    sharded = tmp_path / "sharded"
    (sharded / "pytorch_model_fsdp_0").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"in FSDP's shards \(pytorch_model_fsdp_0\).*low_bit"):
        cli.run(["export", str(sharded), str(tmp_path / "out")])


def test_export_of_a_model_without_the_vocabulary_of_its_tokenizer_is_refused(checkpoint, tmp_path):
    """transformers would make an empty tokenizer, which the output would get, also in place of a good one."""
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer.json"))
    # Of this class it would; others refuse.
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    cli.run(["export", str(checkpoint), str(tmp_path / "out")])
    tokenizer = (tmp_path / "out" / "tokenizer.json").read_bytes()

    with pytest.raises(
        ValueError, match=r"bare must have the vocabulary of its tokenizer, got none of .*tokenizer\.json"
    ):
        cli.run(["export", str(bare), str(tmp_path / "out")])

    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer


def test_export_of_an_adapter_without_a_tokenizer_takes_that_of_its_base(checkpoint, tmp_path):
    adapter = tmp_path / "adapter"
    save_adapter(checkpoint, adapter)
    for file in adapter.glob("tokenizer*"):
        file.unlink()

    cli.run(["export", str(adapter), str(tmp_path / "out")])

    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == json.loads(
        (checkpoint / "tokenizer.json").read_text()
    )


def test_export_of_an_adapter_that_names_no_base_is_one_line(checkpoint, tmp_path):
    """peft writes null for a model that a script made."""
    adapter = tmp_path / "adapter"
    save_adapter(checkpoint, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))

    with pytest.raises(ValueError, match="base_model_name_or_path in .* must be the base of the adapter, got None"):
        cli.run(["export", str(adapter), str(tmp_path / "out")])


def test_export_of_one_file_beside_an_index_of_others_is_refused(checkpoint, tmp_path):
    """transformers would read the one, and vLLM the others."""
    both = tmp_path / "both"
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(both, max_shard_size="100KB")
    shutil.copy(checkpoint / "tokenizer.json", both)
    cli.run(["export", str(both), str(tmp_path / "out")])  # control
    shutil.copy(checkpoint / "model.safetensors", both)

    with pytest.raises(ValueError, match=r"both must hold the weights of one model, got model\.safetensors beside"):
        cli.run(["export", str(both), str(tmp_path / "out")])


def test_export_rounds_no_weights_that_a_file_has_in_float32(checkpoint, tmp_path):
    """Training reads them as they are, whatever the config says."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}

    scales = {}
    for dtype in ("float32", "float16"):
        (source / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        cli.run(["export", str(source), str(tmp_path / dtype)])
        scales[dtype] = load_file(tmp_path / dtype / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]

    assert torch.equal(scales["float16"], scales["float32"])


def test_export_refuses_a_generation_config_that_it_could_not_write_before_it_loads(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "generation_config.json").write_text('{"temperature": 0.6}')

    with pytest.raises(ValueError, match=r"generation_config\.json must be one that transformers saves"):
        cli.run(["export", str(source), str(tmp_path / "out")])

    assert not (tmp_path / "out").exists()


def test_export_names_a_template_that_an_earlier_model_left(checkpoint, tmp_path, caplog):
    """Other files in the output stay, and an engine uses this one."""
    cli.main(["export", str(checkpoint), str(tmp_path / "out")])
    assert "chat_template" not in caplog.text  # control

    template = tmp_path / "out" / "chat_template.jinja"
    template.write_text("{{ messages }}")
    cli.main(["export", str(checkpoint), str(tmp_path / "out")])

    assert "chat_template.jinja of another tokenizer" in caplog.text
    assert template.is_file()


@pytest.mark.parametrize(
    ("pattern", "is_said"), [("model.layers.0", True), (r"re:model\.layers\.0\..*q_proj$", False)]
)
def test_export_names_what_ignore_does_not_keep(checkpoint, tmp_path, capsys, pattern, is_said):
    cli.main(["export", str(checkpoint), str(tmp_path / "out"), "--ignore", "lm_head", pattern])

    assert ("--ignore: ['model.layers.0'] match no layer" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(("other", "is_said"), [(r"re:.*k_porj$", True), (r"re:.*k_proj$", False)])
def test_export_names_what_targets_do_not_match(checkpoint, tmp_path, capsys, other, is_said):
    cli.main(["export", str(checkpoint), str(tmp_path / "out"), "--targets", r"re:.*q_proj$", other])

    assert (f"--targets: [{other!r}] match no layer" in capsys.readouterr().out) == is_said


def test_export_of_a_classifier_is_refused(tmp_path):
    """Where the output layer is tied no weight is missing, and only the head would be left out."""
    from transformers import Qwen2ForSequenceClassification

    tied = make_model("qwen2", tie_word_embeddings=True)
    for name, model in (("lm", tied), ("classifier", Qwen2ForSequenceClassification(tied.config))):
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)

    cli.run(["export", str(tmp_path / "lm"), str(tmp_path / "control")])
    with pytest.raises(ValueError, match="must be a language model, got Qwen2ForSequenceClassification"):
        cli.run(["export", str(tmp_path / "classifier"), str(tmp_path / "out")])
    assert not (tmp_path / "out" / "config.json").exists()


def test_export_keeps_the_eye_of_a_model_that_transformers_also_has_without(tmp_path):
    """`AutoModelForCausalLM` loads the text model of Qwen3.5 alone."""
    text = TEXT_BESIDE_EYE | {"head_dim": 64, "layer_types": ["full_attention"]}
    eye = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=eye))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    # Control: what it would be.
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "model")).__name__ == "Qwen3_5ForCausalLM"

    cli.run(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--scheme", "FP8_DYNAMIC"])

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    eyes = [name for name in stored_tensors(tmp_path / "model") if "visual" in name]
    kept = stored_tensors(tmp_path / "out")
    assert eyes
    assert all(name in kept for name in eyes)


def save_with_a_class_of_its_own(folder):
    """A model whose config and class are code in its folder, which transformers has not."""
    model = make_model()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "mine.py").write_text(
        "import transformers\n\n\n"
        f"class MyConfig(transformers.{type(model.config).__name__}):\n    model_type = 'mine'\n\n\n"
        f"class Mine(transformers.{type(model).__name__}):\n    config_class = MyConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.Mine"}
    config |= {"model_type": "mine", "architectures": ["Mine"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))


def test_export_runs_the_code_of_a_model_where_the_user_trusts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    save_with_a_class_of_its_own(tmp_path / "own")
    command = ["export", str(tmp_path / "own"), str(tmp_path / "out")]
    with pytest.raises(ValueError, match="trust_remote_code"):
        cli.run(command)

    cli.run([*command, "--trust_remote_code"])

    assert (tmp_path / "out" / "mine.py").is_file()
    # Nothing of the output needs the folder that it came from.
    shutil.rmtree(tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "Mine"
    # `eval` has the same word for it among the arguments of its engine.
    check_complete(tmp_path / "out", trust_remote_code=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        check_complete(tmp_path / "out")


def of_run(checkpoint, folder, **settings):
    """A copy of a model's folder as a checkpoint of a run with these settings."""
    from qarl_trl import QaRLConfig
    from qarl_trl.checkpoints.identity import identity_of

    shutil.copytree(checkpoint, folder)
    run = QaRLConfig(output_dir=str(folder.parent), use_cpu=True, bf16=False, **settings)
    facts = identity_of(str(checkpoint), run, run.quant_plan(), {})
    (folder / "manifest.json").write_text(json.dumps({"number": 1, **facts, "files": {}}))
    return folder


@pytest.mark.parametrize(
    ("options", "is_said"), [([], True), (["--group_size", "32"], False), (["--scheme", "FP8_DYNAMIC"], True)]
)
def test_export_of_a_runs_checkpoint_in_another_scheme_says_so(checkpoint, tmp_path, capsys, options, is_said):
    """The default is W4A16 in groups of 128, whatever the run trained."""
    folder = of_run(checkpoint, tmp_path / "checkpoint-4", quant_scheme="W4A16", quant_group_size=32)

    cli.main(["export", str(folder), str(tmp_path / "out"), *options])

    assert ("it is another model." in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("options", "frozen", "is_said"),
    [
        ([], False, True),
        (["--group_size", "32", "--ignore", "lm_head", "re:.*down_proj$"], False, False),
        (["--group_size", "32"], False, True),
        # Beside a frozen base, which the folder's earlier run did not have.
        ([], True, False),
    ],
)
def test_export_of_the_adapter_that_a_run_saved_in_another_scheme_says_so(
    checkpoint, tmp_path, capsys, options, frozen, is_said
):
    """The folder of `save_model` has no manifest, and the low-bit model beside the adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization

    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "run")
    make_tokenizer().save_pretrained(tmp_path / "run")
    apply_quantization(model, "W4A16", group_size=32, ignore=["lm_head", "re:.*down_proj$"])
    save_low_bit(model, None, tmp_path / "run" / "low_bit")
    if frozen:
        (tmp_path / "run" / "base_config.json").write_text('{"weights": null}')

    cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *options])

    said = capsys.readouterr().out
    assert ("it is another model." in said) == is_said
    assert ("low_bit has the one that was trained, too." in said) == is_said


@pytest.mark.parametrize(
    ("change", "is_said"),
    [
        ("nothing", None),
        ("embedding", "model.embed_tokens.weight differs"),
        ("rope", "rope_parameters differs"),
        ("folder of a checkpoint", "has other files than in the run"),
        ("nothing in a checkpoint", None),
    ],
)
def test_export_of_an_adapter_onto_another_base_than_that_of_the_run_says_so(
    checkpoint, tmp_path, capsys, change, is_said
):
    """A script had changed it, its folder has another model since, or it was loaded with another config."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization

    base = shutil.copytree(checkpoint, tmp_path / "base")
    rope = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}} if change == "rope" else {}
    loaded = AutoModelForCausalLM.from_pretrained(base, **rope)
    if change == "embedding":
        loaded.model.embed_tokens.weight.data[3] += 1
    model = get_peft_model(loaded, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    run = tmp_path / "run"
    if "checkpoint" in change:
        of_run(base, run, quant_scheme="W4A16", quant_group_size=32)
        # An adapter alone.
        (run / "config.json").unlink()
        (run / "model.safetensors").unlink()
    model.save_pretrained(run)
    make_tokenizer().save_pretrained(run)
    apply_quantization(model, "W4A16", group_size=32)
    if "checkpoint" not in change:
        save_low_bit(model, None, run / "low_bit")
    if change == "folder of a checkpoint":
        make_model("qwen2", num_hidden_layers=1).save_pretrained(base)

    cli.main(["export", str(run), str(tmp_path / "out"), "--group_size", "32"])

    said = capsys.readouterr().out
    if is_said is None:
        assert "another model" not in said
    else:
        assert "another model than" in said
        assert is_said in said


DOWN = r"re:.*down_proj$"


@pytest.mark.parametrize(
    ("of_the_run", "options", "is_said"),
    [
        (["lm_head", DOWN], [], "model.layers.0.mlp.down_proj: high precision in the run, weights int4"),
        (["lm_head", DOWN], ["--ignore", "lm_head", DOWN], None),
        # The same layers in other words.
        (["lm_head", DOWN], ["--ignore", "lm_head", "model.layers.0.mlp.down_proj"], None),
        (["lm_head"], ["--ignore", "lm_head", DOWN], "weights int4 per group 128 in the run, high precision here"),
    ],
)
def test_export_of_a_runs_checkpoint_with_other_layers_says_so(
    checkpoint, tmp_path, capsys, of_the_run, options, is_said
):
    folder = of_run(checkpoint, tmp_path / "checkpoint-4", quant_ignore=of_the_run)

    cli.main(["export", str(folder), str(tmp_path / "out"), *options])

    said = capsys.readouterr().out
    assert "another model" not in said if is_said is None else is_said in said


RECIPE = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          targets: ['re:.*self_attn.*']
          weights: {num_bits: 8, strategy: channel}
          input_activations: {num_bits: 8, strategy: token, dynamic: true}
        group_1:
          targets: ['re:.*mlp.*']
          weights: {num_bits: 4, strategy: group, group_size: 128}
"""


def test_export_in_one_of_a_runs_two_schemes_says_so(checkpoint, tmp_path, capsys):
    recipe = tmp_path / "two.yaml"
    recipe.write_text(RECIPE)
    folder = of_run(checkpoint, tmp_path / "checkpoint-4", quant_recipe=str(recipe))

    cli.main(["export", str(folder), str(tmp_path / "out")])

    assert "differs in 4 layers: it is another model. model.layers.0.self_attn.k_proj:" in capsys.readouterr().out


def test_export_of_a_run_with_one_scheme_in_two_groups_is_the_model_that_was_trained(checkpoint, tmp_path, capsys):
    recipe = tmp_path / "two.yaml"
    four_bits = "weights: {num_bits: 4, strategy: group, group_size: 128}"
    recipe.write_text(
        RECIPE.replace("weights: {num_bits: 8, strategy: channel}", four_bits).replace(
            "          input_activations: {num_bits: 8, strategy: token, dynamic: true}\n", ""
        )
    )
    folder = of_run(checkpoint, tmp_path / "checkpoint-4", quant_recipe=str(recipe))

    cli.main(["export", str(folder), str(tmp_path / "out")])

    assert "another model" not in capsys.readouterr().out


def test_export_of_a_checkpoint_whose_manifest_was_edited_says_that_it_compares_nothing(checkpoint, tmp_path, capsys):
    folder = of_run(checkpoint, tmp_path / "checkpoint-4")
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"scheme": "W4A16 of my own"}))

    cli.main(["export", str(folder), str(tmp_path / "out")])

    assert "nothing is compared with it" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()


def test_export_of_an_adapter_takes_the_class_that_its_base_had(checkpoint, tmp_path):
    """A model with a vision tower is no causal language model for transformers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoProcessor, AutoTokenizer, LlavaProcessor, Qwen2VLImageProcessorPil

    base = tmp_path / "base"
    model = make_vision_model()
    model.save_pretrained(base)
    model.name_or_path = str(base)  # peft writes it as the base
    adapter = tmp_path / "adapter"
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(adapter)
    # As a run saves it.
    processor = LlavaProcessor(Qwen2VLImageProcessorPil(), AutoTokenizer.from_pretrained(checkpoint))
    processor.save_pretrained(adapter)

    cli.run(["export", str(adapter), str(tmp_path / "out"), "--ignore", "lm_head", "re:.*visual.*"])

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    # vLLM takes images by it.
    assert isinstance(AutoProcessor.from_pretrained(tmp_path / "out"), LlavaProcessor)


def test_export_of_an_adapter_of_a_reward_model_is_refused(checkpoint, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="task_type .* must be CAUSAL_LM, got SEQ_CLS"):
        cli.run(["export", str(tmp_path), str(tmp_path / "out")])


def test_export_of_a_low_bit_checkpoint_is_refused(checkpoint, tmp_path):
    cli.main(["export", str(checkpoint), str(tmp_path / "once"), "--scheme", "FP8_DYNAMIC"])

    with pytest.raises(ValueError, match="quantized already"):
        cli.run(["export", str(tmp_path / "once"), str(tmp_path / "twice")])


def test_schemes_prints_a_row_for_each_of_the_table(capsys):
    from qarl_trl.quant.supported import SUPPORTED

    cli.main(["schemes"])

    # Below the header; before the advice there is an empty line.
    _, *rows, _, advice = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    printed = {row[0]: row for row in rows}
    assert [row[0] for row in rows] == list(SUPPORTED)
    assert printed["W4A16"][1] == "32, 64, 128, channel"
    for name, scheme in SUPPORTED.items():
        assert printed[name][-1].endswith("some mismatch stays") == (scheme.activations != "none")
    assert "W4A16 first" in advice[0]


def test_help_of_train_has_each_field_of_ours_once_and_in_a_group(capsys):
    from trl import GRPOConfig

    from qarl_trl import QaRLConfig
    from qarl_trl.methods import QaRLScriptArguments
    from qarl_trl.options import GROUPS

    cli.main(["train", "--help"])

    said = capsys.readouterr().out
    stock = {field.name for field in fields(GRPOConfig)} - {"loss_type"}
    ours = {field.name for group in (QaRLScriptArguments, QaRLConfig) for field in fields(group)} - stock
    assert sorted(re.findall(r"^  --(\w+)$", said, re.MULTILINE)) == sorted(ours)

    expected = ["Data and rewards", *GROUPS[1:]]
    # Each title and the options below it in turn, after what stands above the first.
    _, *parts = re.split(rf"^({'|'.join(expected)})$", said, flags=re.MULTILINE)
    titles = parts[0::2]
    options = dict(zip(titles, parts[1::2], strict=True))
    assert titles == expected
    for text in options.values():
        assert "  --" in text
    assert "--quant_scheme" in options["Quantization"]
    assert "--learning_rate" not in said
    assert "huggingface.co/docs/trl" in said
