#!/usr/bin/env python3
"""Writes lora/NAME/: adapters on the models of huggingface/ and zoo/ as peft saves them, before and after three steps
of AdamW on one batch, with the losses and the gradients' norms.

    python3 test/golden/make_lora.py [folder]        needs torch, transformers and peft; README.md has the versions

All is computed in fp64 from parameters that are fp32, and rounded to fp32 once.
"""
import json
import shutil
import sys
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from make_golden import DoublePrecision
from make_zoo import in_double

HERE = Path(__file__).parent
STEPS, B, T = 3, 2, 24
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ALL = "all-linear"
# Targets by last name, by a longer end that tells two of them apart, and all; parts of q, k, v and of gate, up; each
# layout of a weight.
MODELS = {
    "gpt2": dict(base="huggingface/gpt2", seed=21, targets=ALL, rank=4, alpha=8),
    "gpt2_some": dict(base="huggingface/gpt2", seed=22, targets=["c_attn", "mlp.c_proj"], rank=2, alpha=3),
    "llama": dict(base="huggingface/llama", seed=23, targets=ALL, rank=4, alpha=8),
    "llama_masked": dict(base="huggingface/llama", seed=24, targets=["k_proj", "o_proj", "up_proj"], rank=4, alpha=8, masked=True),
    "qwen2": dict(base="huggingface/qwen2", seed=25, targets=["q_proj", "v_proj", "gate_proj", "down_proj"], rank=4, alpha=8, rslora=True),
    "gpt_neox": dict(base="zoo/gpt_neox", seed=26, targets=ALL, rank=3, alpha=8),
    # it has a layer without rotary embedding
    "smollm3": dict(base="zoo/smollm3", seed=34, targets=ALL, rank=2, alpha=4),
    "phi3": dict(base="zoo/phi3", seed=27, targets=["qkv_proj", "down_proj"], rank=1, alpha=2),
}  # fmt: skip


def adapters_of(model):
    return {name: value.float().contiguous() for name, value in peft.get_peft_model_state_dict(model).items()}


def loss_of(model, tokens, learned):
    """Returns the mean loss over the learned targets: tokens (B, T + 1), learned (B, T)."""
    logits = model(tokens[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * learned.flatten()).sum() / learned.sum()


def train(model, tokens, learned):
    """Returns the losses and the gradients' norms of the steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW, foreach=False)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, learned)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1, foreach=False).item())
        optimizer.step()
    return losses, norms


def make(folder, base, seed, targets, rank, alpha, rslora=False, masked=False):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    path = HERE / base
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, use_rslora=rslora,
                                                       task_type="CAUSAL_LM"))  # fmt: skip
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.05 * torch.randn(value.shape, generator=generator))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../" + base
    config["target_modules"] = sorted(config["target_modules"])  # peft's are a set, in any order
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    base_model = in_double(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    torch.set_default_dtype(torch.float32)
    model = peft.PeftModel.from_pretrained(base_model, folder, is_trainable=True).eval()
    torch.set_default_dtype(torch.float64)
    model = model.double()
    # Samples overlap by a token, as in a shard.
    stream = torch.randint(model.config.vocab_size, (B * T + 1,), generator=generator)
    tokens = torch.stack([stream[i * T : i * T + T + 1] for i in range(B)])
    learned = torch.ones(B, T)
    if masked:
        learned = (torch.rand(B, T, generator=generator) < torch.tensor([[0.2], [0.7]])).double()
        learned[:, -1] = 0  # it is the next row's first token
    with DoublePrecision():
        losses, norms = train(model, tokens, learned)
        with torch.no_grad():
            last = loss_of(model, tokens, learned).item()
    save_file(adapters_of(model), folder / "after.safetensors", metadata={"format": "pt"})
    expected = dict(base=base, seq_length=T, tokens=stream.tolist(), learned=learned.int().flatten().tolist(), losses=losses,
                    grad_norms=norms, last_loss=last, **{key: list(v) if isinstance(v, tuple) else v for key, v in ADAMW.items()})
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    torch.set_default_dtype(torch.float32)
    start = load_file(folder / "adapter_model.safetensors")
    print(f"{folder.name:14} {len(start) // 2} modules, losses {losses}, norms {norms}")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "lora")
    for model_name, settings in MODELS.items():
        make(out / model_name, **settings)
    print(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()), "bytes")
