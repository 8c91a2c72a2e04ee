"""Fine-tune a language model on chats with LoRA: packed rows, and loss on the answers only.

    flyte-ddp run --nproc-per-node 2 examples/scripts/lora.py 40
    torchrun --nproc-per-node 2 examples/scripts/lora.py 40

It needs peft. A small fresh model and bytes as tokens stand in for a pretrained model and its
tokenizer. A real tokenizer's `apply_chat_template` returns tokens and the mask of the answers.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from flyte_ddp import session
from flyte_ddp.data import Packed, Shards


def make_document(number):
    question = f"What is {number} plus {number % 7}? ".encode()
    answer = f"It is {number + number % 7}.\n".encode()
    return {"tokens": [*question, *answer], "labels": [-100] * len(question) + [*answer]}


def open_data():
    place = Path(tempfile.gettempdir(), "chats-of-lora")
    data = Packed(Shards(str(place)), 256, labels="labels")
    if dist.get_rank() == 0:
        place.mkdir(exist_ok=True)
        lines = [json.dumps(make_document(number)) for number in range(400)]
        (place / "chats.jsonl").write_text("\n".join(lines))
        data.prepare()
    dist.barrier()
    return data


def main(num_steps):
    dist.init_process_group()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, use_cache=False, **sizes)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear")
    model = peft.get_peft_model(LlamaForCausalLM(config), adapters)
    replica, data, step = DistributedDataParallel(model), open_data(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = session.load()  # None in a new run
    if state:
        peft.set_peft_model_state_dict(model, state["adapters"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for epoch in itertools.count():
        for rows, weight in session.batches(data, 16, epoch):
            rows.pop("sequence_ids")  # transformers finds the documents by position_ids
            loss = weight * replica(**rows).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            session.report(step=step, epoch=epoch, loss=mean.item())
            ends = step == num_steps or session.stop_requested
            if ends or step % 5 == 0:
                adapters = peft.get_peft_model_state_dict(model)
                state = {"adapters": adapters, "optimizer": optimizer.state_dict(), "step": step}
                session.save(state, step)
            if dist.get_rank() == 0 and step % 5 == 0:
                print(f"step {step}: loss {mean.item():.6f}")
            if ends:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
