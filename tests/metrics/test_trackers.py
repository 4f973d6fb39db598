"""`report_to`: what is logged arrives in a tracker. By hand, with an engine: docs/metrics.md."""

import struct

import pytest
from slow.toys import make_trainer, save_model


def scalars(data):
    """Name and step to value of an event file: records of a length, its checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    return found


def test_every_value_arrives_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX (requirements/cpu.txt)")
    model = save_model(tmp_path / "model", layers=1)
    small = {"use_vllm": False, "bf16": False, "max_completion_length": 8}
    trainer = make_trainer(model, tmp_path / "run", report_to=["tensorboard"], **small)
    trainer.train()
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    found = scalars(file.read_bytes())
    rows = [row for row in trainer.state.log_history if "time/update" in row]
    values = {(f"train/{name}", row["step"]): row[name] for row in rows for name in row if "/" in name}
    assert {step for _, step in values} == {1, 2, 3, 4}
    assert (
        len({name for name, _ in values if name.startswith(("train/ratio/", "train/error_tokens/", "train/time/"))})
        >= 18
    )
    assert {key: found[key] for key in values} == pytest.approx(values, rel=1e-6)  # float32
    assert ("train/ratio/max", 5) not in found  # control
