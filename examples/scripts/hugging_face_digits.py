"""Train a tiny language model, built here, with Hugging Face's Trainer. Nothing is downloaded.

flyte-ddp run --nproc-per-node 2 examples/scripts/hugging_face_digits.py --steps 20
torchrun --nproc-per-node 2 examples/scripts/hugging_face_digits.py --steps 20
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output")  # directory of the checkpoints; none are kept without it
    arguments = parser.parse_args()

    set_seed(0)
    # The model learns a sequence of digits that repeats after 97 of them.
    digits = torch.arange(4000).remainder(97).pow(2).remainder(10)
    data = [
        {"input_ids": digits[start : start + 32], "labels": digits[start : start + 32]}
        for start in range(1000)
    ]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=10, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=arguments.output or scratch,
                max_steps=arguments.steps,
                per_device_train_batch_size=8,
                learning_rate=0.003,
                logging_steps=arguments.steps,
                save_strategy="steps" if arguments.output else "no",
                use_cpu=not torch.cuda.is_available(),
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=data,
        )
        result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"step {arguments.steps}: loss {result.training_loss:.6f}")


if __name__ == "__main__":
    main()
