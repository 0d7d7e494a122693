#!/usr/bin/env python3
"""Writes huggingface/NAME/: small random models as transformers saves them, with tokens and the logits that it
computes; and huggingface/gpt2.VERSION.bin, GPT-2's parameters as in llm.c's checkpoints.

    python3 test/golden/make_huggingface.py [folder]        needs torch and transformers; README.md has the versions

Parameters are rounded to the type that the model is saved in. The logits are computed from these in fp64, and rounded
to fp32 once. The table that this script prints says how far the logits in fp32 are from this, of the saved folder,
opened by from_pretrained.
"""
import json
import shutil
import struct
import sys
from pathlib import Path

import torch
import transformers

from make_golden import DoublePrecision, NO_DROPOUT, NO_SPECIAL_TOKENS, build, random_parameters, write

T = 24
LLAMA = dict(num_hidden_layers=2, hidden_size=32, vocab_size=101, max_position_embeddings=40, use_cache=False, **NO_SPECIAL_TOKENS)

# Each rule of an import is needed by one of them: transposes, repeated names, a head of its own, biases in one place
# and in all, heads together wider than the hidden size, GQA and MQA, each type, each way to write theta; none has a
# default.
MODELS = {
    "gpt2": dict(seed=11, dtype=torch.float32, config=lambda: transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=101, n_positions=40, layer_norm_epsilon=1e-4, use_cache=False, **NO_DROPOUT,
        **NO_SPECIAL_TOKENS)),
    "llama": dict(seed=12, dtype=torch.float32, config=lambda: transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, rms_norm_eps=1e-4, rope_theta=300.0,
        tie_word_embeddings=False, **LLAMA)),
    "llama_sharded": dict(seed=13, dtype=torch.float16, shard="6KB", theta_at_top=True, config=lambda: transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=16, rms_norm_eps=1e-5, rope_theta=700.0,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **LLAMA)),
    "qwen2": dict(seed=14, dtype=torch.float32, config=lambda: transformers.Qwen2Config(
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, rms_norm_eps=1e-5, rope_theta=2000.0,
        tie_word_embeddings=True, **LLAMA)),
    "qwen2_bf16": dict(seed=15, dtype=torch.bfloat16, config=lambda: transformers.Qwen2Config(
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=24, rms_norm_eps=1e-6, rope_theta=5000.0,
        tie_word_embeddings=False, **LLAMA)),
}  # fmt: skip


def put(model, parameters):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model


def exact_logits(config, parameters, tokens):
    with DoublePrecision(), torch.no_grad():
        return put(build(config, torch.float64), parameters)(tokens).logits


def edit_config(path, theta_at_top):
    """Puts rope_theta at the top, as transformers 4 writes it, or only into rope_parameters, as transformers 5 does."""
    config = json.loads(path.read_text())
    if theta_at_top:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None
    assert ("rope_theta" in config) == theta_at_top
    path.write_text(json.dumps(config, indent=2) + "\n")


def save(folder, config, parameters, dtype, shard=None):
    shutil.rmtree(folder, ignore_errors=True)
    model = put(build(config, torch.float32), parameters).to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)


def strays(folder, tokens, logits):
    torch.set_default_dtype(torch.float32)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return ((model(tokens).logits - logits).abs().max() / logits.abs().max()).item()


def write_llmc(path, version, config, parameters):
    """Writes a checkpoint as llm.c's train_gpt2.py does: the vocabulary padded to a multiple of 128, weights (out,
    in)."""
    C, V = config.n_embd, config.vocab_size
    padded = (V + 127) // 128 * 128
    take = lambda name: parameters["transformer." + name]
    layers = lambda name, transposed: [take(f"h.{i}.{name}").T if transposed else take(f"h.{i}.{name}") for i in range(config.n_layer)]
    tensors = [take("wte.weight"), torch.zeros(padded - V, C), take("wpe.weight")]
    for name, transposed in (("ln_1.weight", 0), ("ln_1.bias", 0), ("attn.c_attn.weight", 1), ("attn.c_attn.bias", 0),
                             ("attn.c_proj.weight", 1), ("attn.c_proj.bias", 0), ("ln_2.weight", 0), ("ln_2.bias", 0),
                             ("mlp.c_fc.weight", 1), ("mlp.c_fc.bias", 0), ("mlp.c_proj.weight", 1), ("mlp.c_proj.bias", 0)):
        tensors += layers(name, transposed)
    tensors += [take("ln_f.weight"), take("ln_f.bias")]
    header = [20240326, version, config.n_positions, V, config.n_layer, config.n_head, C, padded]
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", *header, *[0] * 248))
        for tensor in tensors:
            if version == 5:
                file.write(tensor.contiguous().to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes())
            else:
                file.write(tensor.contiguous().numpy().astype("<f4").tobytes())


def make(folder, name, seed, dtype, config, shard=None, theta_at_top=False):
    generator = torch.Generator().manual_seed(seed)
    parameters = {key: value.to(dtype).float() for key, value in random_parameters(build(config(), torch.float32), generator).items()}
    tokens = torch.randint(config().vocab_size, (1, T), generator=generator)
    tokens[0, T // 2] = config().vocab_size - 1
    logits = exact_logits(config(), parameters, tokens)
    save(folder / name, config(), parameters, dtype, shard)
    if hasattr(config(), "rope_parameters"):
        edit_config(folder / name / "config.json", theta_at_top)
    write(folder / name / "expected.golden", dict(seq_length=T), dict(tokens=tokens, logits=logits))
    files = len(list((folder / name).glob("*.safetensors")))
    print(f"{name:14} {strays(folder / name, tokens, logits):.1e}  files {files}")
    return parameters, tokens


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "huggingface")
    out.mkdir(parents=True, exist_ok=True)
    for model_name, settings in MODELS.items():
        made = make(out, model_name, **settings)
        if model_name == "gpt2":
            gpt2, gpt2_tokens = made
    # llm.c's file does not have its epsilon.
    config5 = MODELS["gpt2"]["config"]()
    config5.layer_norm_epsilon = 1e-5
    for bin_version, bin_dtype in ((3, torch.float32), (5, torch.bfloat16)):
        rounded = {key: value.to(bin_dtype).float() for key, value in gpt2.items()}
        write_llmc(out / f"gpt2.{bin_version}.bin", bin_version, config5, rounded)
        write(out / f"gpt2.{bin_version}.golden", dict(seq_length=T),
              dict(tokens=gpt2_tokens, logits=exact_logits(config5, rounded, gpt2_tokens)))
    print(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()), "bytes")
