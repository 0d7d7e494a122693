#!/usr/bin/env python3
"""Makes the golden files: what PyTorch and Hugging Face transformers compute on three small random models.

    python3 test/golden/make_golden.py [folder]        needs torch and transformers; README.md has the versions

For GPT-2, Llama (GQA, untied head) and Qwen2 (MQA, tied head) a file holds the initial parameters, ten batches, logits,
mean loss and every gradient of the first batch, and losses and gradient norms of ten AdamW steps.

The parameters are fp32 numbers. All results are computed in fp64 and rounded to fp32 once at the end, since PyTorch in
fp32 is up to 1e-6 away from the exact result. The same model also runs in plain fp32. The table that this script prints
says how far fp32 is off, which is the share of a 1e-5 bound that rounding uses up.

README.md beside this file describes names, layouts and the file format.
"""
import math
import struct
import sys
from pathlib import Path

import torch
import transformers
from torch.overrides import TorchFunctionMode

STEPS, BATCH = 10, 2
LR, BETAS, ADAM_EPS, WEIGHT_DECAY, CLIP_GRAD = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
NO_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
NO_SPECIAL_TOKENS = dict(bos_token_id=None, eos_token_id=None)  # the defaults lie outside of the small vocabularies

# Sizes are awkward on purpose: odd T, widths that no vector or tile divides, a vocabulary that needs padding; GPT-2 has
# more positions than a sequence uses, and Llama's heads together are wider than its hidden size.
MODELS = {
    "gpt2": dict(seed=1, T=29, config=lambda: transformers.GPT2Config(
        n_layer=2, n_embd=48, n_head=3, n_inner=84, vocab_size=150, n_positions=36, layer_norm_epsilon=1e-5,
        activation_function="gelu_new", use_cache=False, **NO_DROPOUT, **NO_SPECIAL_TOKENS)),
    "llama": dict(seed=2, T=27, config=lambda: transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=76, vocab_size=157, max_position_embeddings=27, rms_norm_eps=1e-5, rope_theta=1e4,
        tie_word_embeddings=False, use_cache=False, **NO_SPECIAL_TOKENS)),
    "qwen2": dict(seed=3, T=31, config=lambda: transformers.Qwen2Config(
        num_hidden_layers=2, hidden_size=48, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=68, vocab_size=151, max_position_embeddings=31, rms_norm_eps=1e-6, rope_theta=1e6,
        tie_word_embeddings=True, use_cache=False, **NO_SPECIAL_TOKENS)),
}


class DoublePrecision(TorchFunctionMode):
    """Turns casts to float32 into casts to float64. The models of transformers make such casts inside norms, softmax
    and rotary embedding, whatever type they are in. A float32 that appears all the same is an error."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        widen = lambda value: torch.float64 if value is torch.float32 else value
        args, kwargs = tuple(map(widen, args)), {key: widen(value) for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        result = function(*args, **kwargs)
        assert not (isinstance(result, torch.Tensor) and result.dtype == torch.float32), function
        return result


def build(config, dtype):
    torch.set_default_dtype(dtype)
    config._attn_implementation = "eager"
    model_class = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM,
                   "qwen2": transformers.Qwen2ForCausalLM}[config.model_type]
    model = model_class(config).train()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == bool(config.tie_word_embeddings)
    return model


def random_parameters(model, generator):
    """Makes wider parameters than any real initialization: attention scores and MLP inputs of a standard deviation of
    about one reach the curved part of softmax, GELU and SiLU, and no bias or norm weight has a value at which its term
    vanishes."""
    result = {}
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim == 1:
            is_norm_weight = name.endswith("weight")
            result[name] = is_norm_weight + 0.2 * normal
        elif "wte" in name or "wpe" in name or "embed_tokens" in name:
            result[name] = 0.25 * normal
        else:
            fan_in = parameter.shape[0] if ".c_" in name else parameter.shape[1]  # c_* are Conv1D: (in, out)
            result[name] = 1.2 / math.sqrt(fan_in) * normal
    return result


def random_batches(vocab_size, T, generator):
    """Makes batches that are skewed towards small tokens, so that there is something to learn: some tokens repeat
    within a batch, others never appear. The last token of the vocabulary is an input and a target of the first
    batch."""
    uniform = torch.rand(STEPS, BATCH, T + 1, generator=generator, dtype=torch.float32)
    sequence = (vocab_size * uniform**3).long().clamp(max=vocab_size - 1)
    sequence[0, 1, T // 2] = vocab_size - 1
    return sequence[:, :, :-1].contiguous(), sequence[:, :, 1:].contiguous()


def train(model, parameters, tokens, targets):
    """Returns logits and gradients of the first batch, and losses and gradient norms (before clipping) of all steps."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    groups = [dict(params=[p for p in model.parameters() if p.ndim == 2], weight_decay=WEIGHT_DECAY),
              dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=ADAM_EPS, foreach=False)
    result = dict(losses=[], grad_norms=[])
    for step in range(STEPS):
        logits = model(tokens[step]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[step].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            result["logits"] = logits.detach()
            result["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD, foreach=False)
        optimizer.step()
        result["losses"].append(loss.item())
        result["grad_norms"].append(norm.item())
    return result


def engine_tensors(architecture, hf):
    """Returns the tensors of a transformers state dict under the engine's names, in the engine's layouts: Linear
    weights are (out, in)."""
    result = {}
    if architecture == "gpt2":
        take = lambda name: hf.pop("transformer." + name)
        result["wte"], result["wpe"] = take("wte.weight"), take("wpe.weight")
        for layer in range(1 + max(int(name.split(".")[2]) for name in hf if ".h." in name)):
            for ours, theirs in (("ln1", "ln_1"), ("qkv", "attn.c_attn"), ("attproj", "attn.c_proj"), ("ln2", "ln_2"),
                                 ("fc", "mlp.c_fc"), ("fcproj", "mlp.c_proj")):
                weight = take(f"h.{layer}.{theirs}.weight")
                result[f"layer.{layer}.{ours}.weight"] = weight.T if weight.ndim == 2 else weight
                result[f"layer.{layer}.{ours}.bias"] = take(f"h.{layer}.{theirs}.bias")
        result["lnf.weight"], result["lnf.bias"] = take("ln_f.weight"), take("ln_f.bias")
    else:
        take = lambda name: hf.pop("model." + name)
        result["wte"] = take("embed_tokens.weight")
        for layer in range(1 + max(int(name.split(".")[2]) for name in hf if ".layers." in name)):
            p = f"layers.{layer}."
            join = lambda names, what: torch.cat([take(f"{p}{name}.{what}") for name in names])
            qkv, gate_up = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
            result[f"layer.{layer}.ln1.weight"] = take(p + "input_layernorm.weight")
            result[f"layer.{layer}.qkv.weight"] = join(qkv, "weight")
            if architecture == "qwen2":
                result[f"layer.{layer}.qkv.bias"] = join(qkv, "bias")
            result[f"layer.{layer}.attproj.weight"] = take(p + "self_attn.o_proj.weight")
            result[f"layer.{layer}.ln2.weight"] = take(p + "post_attention_layernorm.weight")
            result[f"layer.{layer}.fc.weight"] = join(gate_up, "weight")
            result[f"layer.{layer}.fcproj.weight"] = take(p + "mlp.down_proj.weight")
        result["lnf.weight"] = take("norm.weight")
        if "lm_head.weight" in hf:
            result["lm_head"] = hf.pop("lm_head.weight")
    assert not hf, f"not converted: {list(hf)}"
    return result


def engine_config(config, T):
    """Returns the config by Megatron-LM's option names with _ for -, booleans as 0 and 1."""
    gpt2 = config.model_type == "gpt2"
    heads = config.num_attention_heads
    ours = dict(
        architecture=config.model_type, num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        num_attention_heads=heads, num_query_groups=heads if gpt2 else config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_hidden_size=config.n_inner if gpt2 else config.intermediate_size, vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings, seq_length=T, micro_batch_size=BATCH, train_steps=STEPS,
        normalization="LayerNorm" if gpt2 else "RMSNorm",
        norm_epsilon=config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
        position_embedding_type="learned_absolute" if gpt2 else "rope", swiglu=int(not gpt2), add_bias_linear=int(gpt2),
        add_qkv_bias=int(config.model_type != "llama"),
        untie_embeddings_and_output_weights=int(not config.tie_word_embeddings))
    if not gpt2:
        ours["rotary_base"] = config.rope_parameters["rope_theta"]
    ours.update(lr=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=ADAM_EPS, weight_decay=WEIGHT_DECAY,
                clip_grad=CLIP_GRAD, torch=torch.__version__, transformers=transformers.__version__)
    return ours


def write(path, config, tensors):
    text = "".join(f"{key}={value}\n" for key, value in config.items()).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<8sI", b"GPTGOLD1", len(text)) + text + struct.pack("<I", len(tensors)))
        for name, tensor in tensors.items():
            is_int = not tensor.is_floating_point()
            array = tensor.detach().to(torch.int32 if is_int else torch.float32).contiguous().numpy()
            file.write(struct.pack("<I", len(name)) + name.encode())
            file.write(struct.pack(f"<BI{array.ndim}q", is_int, array.ndim, *array.shape))
            file.write(bytes(-file.tell() % 8))
            file.write(array.astype("<i4" if is_int else "<f4").tobytes())


def relative_error(x, reference):
    x, reference = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(reference, dtype=torch.float64)
    return ((x - reference).norm() / reference.norm()).item()


def make(name, seed, T, config, folder):
    generator = torch.Generator().manual_seed(seed)
    model32 = build(config(), torch.float32)
    parameters = random_parameters(model32, generator)
    tokens, targets = random_batches(model32.config.vocab_size, T, generator)
    plain = train(model32, parameters, tokens, targets)
    with DoublePrecision():
        exact = train(build(config(), torch.float64), parameters, tokens, targets)

    golden = engine_tensors(name, dict(parameters))
    gradients, plain_gradients = (engine_tensors(name, run["gradients"]) for run in (exact, plain))
    golden.update({"grad." + key: value for key, value in gradients.items()})
    golden.update(tokens=tokens, targets=targets, logits=exact["logits"], losses=torch.tensor(exact["losses"]),
                  grad_norms=torch.tensor(exact["grad_norms"]))
    path = Path(folder) / f"{name}.golden"
    write(path, engine_config(model32.config, T), golden)

    errors = {key: relative_error(plain_gradients[key], gradients[key]) for key in gradients}
    worst = max(errors, key=errors.get)
    worst_of = lambda what: max(relative_error(x, y) for x, y in zip(plain[what], exact[what]))
    print(f"{name:5}  {relative_error(plain['logits'], exact['logits']):.1e}  {errors[worst]:.1e}"
          f" ({worst})  {worst_of('losses'):.1e}  {worst_of('grad_norms'):.1e}  "
          f" {exact['losses'][0]:.4f} -> {exact['losses'][-1]:.4f}"
          f"  {min(exact['grad_norms']):.2f} to {max(exact['grad_norms']):.2f}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; fp32 against fp64, relative:")
    print("model  logits   worst gradient  worst loss of 10  worst norm of 10   losses  gradient norms  file")
    for model_name, settings in MODELS.items():
        make(model_name, folder=sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent, **settings)
