"""`eval_temperature`: evaluation samples at it and is scored at it, and training is left alone."""

import pytest
import torch
from slow.toys import distinct_characters, prompts, save_model, settings

from qarl_trl import QaRLConfig, QaRLTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def rollouts(model, folder, **changes):
    """Of a training step and of an evaluation: sampled completions, log-probs of the learner, and inputs to score them again."""
    small = {"use_vllm": False, "max_completion_length": 8, "bf16": False, "max_steps": 1, "steps_per_generation": 2}
    args = QaRLConfig(
        **settings(folder, **small | {"per_device_eval_batch_size": 8, "quant_kernel": "dequant"} | changes)
    )
    trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), eval_dataset=prompts(2))
    found, compute = {}, trainer._compute_loss

    def spy(model, inputs):
        forward = trainer._get_per_token_logps_and_entropies

        def keep(*given, **more):
            result = forward(*given, **more)
            ids, mask = (
                torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
                for kind in ("ids", "mask")
            )
            with torch.no_grad():
                logits = trainer._unwrapped(input_ids=ids, attention_mask=mask).logits[
                    :, -inputs["completion_ids"].shape[1] - 1 : -1
                ]
            found[trainer._mode] = (
                inputs["completion_ids"],
                inputs["completion_mask"].bool(),
                result[0].detach(),
                logits,
            )
            return result

        trainer._get_per_token_logps_and_entropies = keep
        loss = compute(model, inputs)
        trainer._get_per_token_logps_and_entropies = forward
        return loss

    trainer._compute_loss = spy
    trainer.train()
    trainer.evaluate()
    return found


def off(rollout, temperature):
    """Largest distance of the learner's log-probs from those at a temperature."""
    ids, mask, logps, logits = rollout
    expected = (logits.float() / temperature).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    return (logps - expected)[mask].abs().max().item()


# 1.0 is the default of transformers, which then takes the model's own setting in its place.
@pytest.mark.parametrize(("training", "evaluation"), [(1.0, 0.01), (0.01, 1.0), (0.01, None)])
def test_an_evaluation_is_sampled_and_scored_at_its_own_temperature(model, tmp_path, training, evaluation):
    found = rollouts(model, tmp_path, temperature=training, eval_temperature=evaluation)
    for mode, temperature in (("train", training), ("eval", evaluation or training)):
        other = 1.01 - temperature
        assert off(found[mode], temperature) < 1e-3  # float32 of logits that a division by 0.01 makes as large as 400
        assert off(found[mode], other) > 1  # control
        ids, mask, _, logits = found[mode]
        likeliest = (logits.argmax(-1) == ids)[mask].float().mean()
        assert likeliest > 0.95 if temperature == 0.01 else likeliest < 0.9
