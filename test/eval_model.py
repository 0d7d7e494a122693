"""Writes small models with a tokenizer of real shape, for test_eval_tasks.py and golden/make_eval_tasks.py, equal ones
for each: parameters come from Python's random numbers. Needs only Python's standard library."""
import json
import os
import random
import shutil
import struct

from environment import ROOT

GOLDEN = os.path.join(ROOT, "test/golden")
V, C, HEADS, LAYERS, POSITIONS, STD = 1280, 32, 4, 2, 96, 0.35


def gpt2_shapes():
    yield "wte.weight", (V, C)
    yield "wpe.weight", (POSITIONS, C)
    for i in range(LAYERS):
        h = "h.%d." % i
        for name in ("ln_1", "ln_2"):
            yield h + name + ".weight", (C,)
            yield h + name + ".bias", (C,)
        for name, rows, columns in (("attn.c_attn", C, 3 * C), ("attn.c_proj", C, C), ("mlp.c_fc", C, 4 * C), ("mlp.c_proj", 4 * C, C)):
            yield h + name + ".weight", (rows, columns)
            yield h + name + ".bias", (columns,)
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)


def llama_shapes():
    yield "model.embed_tokens.weight", (V, C)
    for i in range(LAYERS):
        h = "model.layers.%d." % i
        yield h + "input_layernorm.weight", (C,)
        yield h + "post_attention_layernorm.weight", (C,)
        for name, rows, columns in (("self_attn.q_proj", C, C), ("self_attn.k_proj", C // 2, C), ("self_attn.v_proj", C // 2, C),
                                    ("self_attn.o_proj", C, C), ("mlp.gate_proj", 2 * C, C), ("mlp.up_proj", 2 * C, C),
                                    ("mlp.down_proj", C, 2 * C)):  # fmt: skip
            yield h + name + ".weight", (rows, columns)
    yield "model.norm.weight", (C,)
    yield "lm_head.weight", (V, C)


# By architecture: config.json, the tensors' shapes, the tokenizer and its special tokens. GPT-2's tokenizer_config.json
# has only an end of text, which is also its beginning of text; Llama's template puts a beginning of text before each
# text; Qwen's has none.
MODELS = {
    "gpt2": (dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_layer=LAYERS, n_embd=C, n_head=HEADS, n_positions=POSITIONS,
                  vocab_size=V, layer_norm_epsilon=1e-5, activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                  tie_word_embeddings=True),
             gpt2_shapes, "tokenizer_gpt2.json", dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>")),
    "llama": (dict(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=LAYERS, hidden_size=C,
                   num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, intermediate_size=2 * C, vocab_size=V,
                   max_position_embeddings=POSITIONS, rms_norm_eps=1e-5, rope_theta=1000.0, hidden_act="silu", attention_bias=False,
                   mlp_bias=False, tie_word_embeddings=False),
              llama_shapes, "tokenizer_llama3.json", dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")),
}  # fmt: skip


def write_model(folder, name):
    """Writes a folder that train_gpt and transformers open: config.json, model.safetensors and the tokenizer's
    files."""
    config, shapes, tokenizer, special = MODELS[name]
    generator = random.Random("eval " + name)
    header, data = {}, []
    size = 0
    for tensor, shape in shapes():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        norm = len(shape) == 1 and tensor.endswith("weight")
        # A sum of three uniform numbers, since Python may change its gauss().
        values = [norm + STD * (2 / 3) * (generator.random() + generator.random() + generator.random() - 1.5) * 2 for _ in range(count)]
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [size, size + 4 * count]}
        data.append(struct.pack("<%df" % count, *values))
        size += 4 * count
    os.makedirs(folder, exist_ok=True)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder + "/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))
    for file, value in (("config.json", dict(config, torch_dtype="float32")),
                        ("tokenizer_config.json", dict(special, tokenizer_class="PreTrainedTokenizerFast"))):  # fmt: skip
        with open("%s/%s" % (folder, file), "w", encoding="utf-8") as f:
            json.dump(value, f)
    shutil.copy(os.path.join(GOLDEN, tokenizer), folder + "/tokenizer.json")
