#!/usr/bin/env python3
"""Writes zoo/NAME/: a small random model of each architecture that --init-from takes, as transformers saves it, and
what transformers computes with it (expected.golden).

    python3 test/golden/make_zoo.py [folder [name ...]]        needs torch and transformers; README.md has the versions

Shapes are chosen so that mistakes show: T beyond the window and beyond original_max_position_embeddings, heads together
as wide as the hidden size or not, multipliers far from 1, biases and norm weights far from their initial values.
Parameters are rounded to the type that the model is saved in; results are computed in fp64 from these, and rounded to
fp32 once. The table that this script prints says how far the results in fp32 are from this, of the saved folder, opened
by from_pretrained.

test/test_huggingface.py makes the same models at larger shapes (LARGE) where transformers is installed.
"""
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import transformers

from config_forms import flat_form
from make_golden import DoublePrecision, NO_SPECIAL_TOKENS, relative_error, write

V, BATCH, END = 257, 2, 256  # bytes and an end of text, so that --generate needs no tokenizer
PROJECTIONS, DRAWS, BF16_ROUNDING = 8, 16, 2.0**-8
# C hidden size; H heads on G KV heads of size D; F width of an MLP; P positions; T0 positions before scaling; W window;
# T tokens.
SMALL = SimpleNamespace(C=16, H=4, G=2, D=8, F=20, P=64, T0=16, W=7, T=40)
LARGE = SimpleNamespace(C=96, H=6, G=3, D=32, F=136, P=192, T0=48, W=33, T=160)
PROMPT, LONG_PROMPT, NEW_TOKENS = "for (int i", "for (int i = 0; i < n; i++)", 30
SLIDING, FULL = "sliding_attention", "full_attention"
NO_BRANCH_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0)


def common(s, **more):
    """Makes settings of heads that are together as wide as the hidden size."""
    heads = s.C // s.D
    settings = dict(num_hidden_layers=2, hidden_size=s.C, num_attention_heads=heads, num_key_value_heads=heads // 2 or 1,
                    intermediate_size=s.F, vocab_size=V, max_position_embeddings=s.P, rms_norm_eps=1e-4, use_cache=False,
                    tie_word_embeddings=True, pad_token_id=None, **NO_SPECIAL_TOKENS)  # fmt: skip
    return {**settings, **more}


def headed(s, **more):
    """Makes settings of more heads, which are wider than the hidden size."""
    return common(s, **{"head_dim": s.D, "num_attention_heads": s.H, "num_key_value_heads": s.G, **more})


def wide(s, **more):
    """Makes settings of heads of twice the size."""
    return common(s, head_dim=2 * s.D, **more)


def rope(kind="default", theta=100.0, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def factors(pairs, first, step):
    return [first + step * i for i in range(pairs)]


# config: by the sizes. drop: members of config.json that are left out, since a reader knows them otherwise: defaults of
# the class, lists that follow from other members. old: rotary settings as in transformers 4. gemma: norm weights lie
# near 0. documents: the file also has the results of a batch of packed documents. live: made only where transformers is
# installed.
ZOO = {
    "llama_llama3": dict(documents=True, config=lambda s: transformers.LlamaConfig(**wide(
        s, rope_parameters=rope("llama3", factor=5.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=s.T0)))),
    "llama_linear": dict(dtype=torch.float32, old=True, config=lambda s: transformers.LlamaConfig(**common(
        s, rope_parameters=rope("linear", factor=3.0)))),
    "llama_yarn": dict(drop=["tie_word_embeddings"], config=lambda s: transformers.LlamaConfig(**wide(
        s, tie_word_embeddings=False, rope_parameters=rope("yarn", factor=6.0, original_max_position_embeddings=s.T0, beta_fast=2.0,
                                                           beta_slow=0.25, truncate=False, attention_factor=1.4)))),
    "llama_attention_bias": dict(config=lambda s: transformers.LlamaConfig(**headed(
        s, attention_bias=True, rope_parameters=rope()))),
    "llama_mlp_bias": dict(old=True, config=lambda s: transformers.LlamaConfig(**headed(
        s, mlp_bias=True, rope_parameters=rope(theta=30.0)))),
    "qwen2": dict(dtype=torch.float16, drop=["layer_types"], config=lambda s: transformers.Qwen2Config(**common(
        s, num_hidden_layers=3, use_sliding_window=True, sliding_window=s.W, max_window_layers=1, rope_parameters=rope(
            "yarn", factor=4.0, original_max_position_embeddings=s.T0)))),
    "qwen3": dict(shard=6, config=lambda s: transformers.Qwen3Config(**headed(
        s, tie_word_embeddings=False, attention_bias=True, use_sliding_window=True, sliding_window=s.W,
        layer_types=[SLIDING, FULL], rope_parameters=rope()))),
    "qwen3_plain": dict(live=True, drop=["layer_types"], config=lambda s: transformers.Qwen3Config(**headed(
        s, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=s.T0, mscale=1.5, mscale_all_dim=0.5)))),
    "mistral": dict(live=True, config=lambda s: transformers.MistralConfig(**common(s, sliding_window=None, rope_parameters=rope()))),
    "mistral_window": dict(documents=True, config=lambda s: transformers.MistralConfig(**wide(
        s, sliding_window=s.W, rope_parameters=rope(theta=1000.0)))),
    "ministral": dict(config=lambda s: transformers.MinistralConfig(**headed(
        s, sliding_window=s.W, layer_types=[FULL, SLIDING], rope_parameters=rope()))),
    "smollm3": dict(drop=["tie_word_embeddings", "no_rope_layers", "layer_types"], config=lambda s: transformers.SmolLM3Config(**common(
        s, num_hidden_layers=3, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=s.W, attention_bias=True,
        rope_parameters=rope()))),
    "smollm3_list": dict(live=True, drop=["layer_types"], config=lambda s: transformers.SmolLM3Config(**common(
        s, num_hidden_layers=4, no_rope_layers=[0, 1, 1, 0], mlp_bias=True, rope_parameters=rope()))),
    "olmo2": dict(config=lambda s: transformers.Olmo2Config(**common(s, attention_bias=True, rope_parameters=rope()))),
    "olmo3": dict(drop=["layer_types"], config=lambda s: transformers.Olmo3Config(**common(
        s, num_hidden_layers=4, sliding_window=s.W, rope_parameters={SLIDING: rope(theta=5e5), FULL: rope(
            "yarn", theta=5e5, factor=8.0, original_max_position_embeddings=s.T0, beta_fast=2.0, beta_slow=0.02,
            attention_factor=1.2)}))),
    "gemma": dict(gemma=True, drop=["tie_word_embeddings"], config=lambda s: transformers.GemmaConfig(**headed(
        s, hidden_size=3 * s.C // 2, num_key_value_heads=1, rope_parameters=rope()))),
    "gemma2": dict(gemma=True, drop=["tie_word_embeddings", "layer_types"], config=lambda s: transformers.Gemma2Config(**headed(
        s, hidden_size=3 * s.C // 2, query_pre_attn_scalar=3, attn_logit_softcapping=1.5, final_logit_softcapping=2.5,
        sliding_window=s.W + 5, rope_parameters=rope()))),
    "gemma3": dict(gemma=True, config=lambda s: transformers.Gemma3TextConfig(**headed(
        s, hidden_size=3 * s.C // 2, num_hidden_layers=3, query_pre_attn_scalar=3, sliding_window=s.W,
        layer_types=[SLIDING, FULL, SLIDING], rope_parameters={SLIDING: rope(theta=50.0), FULL: rope("linear", theta=400.0, factor=4.0)}))),
    "phi3": dict(prompt=LONG_PROMPT, config=lambda s: transformers.Phi3Config(**common(
        s, sliding_window=s.W + 5, original_max_position_embeddings=s.T0,
        **NO_BRANCH_DROPOUT, rope_parameters=rope(
            "longrope", partial_rotary_factor=0.75, short_factor=factors(3 * s.D // 8, 1.0, 0.1),
            long_factor=factors(3 * s.D // 8, 1.5, 0.7))))),
    "phi3_short": dict(config=lambda s: transformers.Phi3Config(**common(
        s, tie_word_embeddings=False, original_max_position_embeddings=s.T, max_position_embeddings=4 * s.T, sliding_window=None,
        **NO_BRANCH_DROPOUT,
        rope_parameters=rope("longrope", short_factor=factors(s.D // 2, 1.2, 0.3), long_factor=factors(s.D // 2, 4.0, 1.0))))),
    "granite": dict(config=lambda s: transformers.GraniteConfig(**common(
        s, mlp_bias=True,
        attention_multiplier=0.9, embedding_multiplier=5.0, residual_multiplier=0.3, logits_scaling=0.4, rope_parameters=rope()))),
    "gpt_neox": dict(config=lambda s: transformers.GPTNeoXConfig(**neox(
        s, rope_parameters=rope(partial_rotary_factor=0.25)))),
    "gpt_neox_sequential": dict(old=True, config=lambda s: transformers.GPTNeoXConfig(**neox(
        s, use_parallel_residual=False, hidden_act="gelu_fast", tie_word_embeddings=True, rope_parameters=rope(
            theta=40.0, partial_rotary_factor=0.75)))),
    "gpt2_gelu": dict(documents=True, config=lambda s: transformers.GPT2Config(
        n_layer=2, n_embd=s.C, n_head=2, n_inner=s.F, vocab_size=V, n_positions=s.P, activation_function="gelu", use_cache=False,
        attn_pdrop=0.0, layer_norm_epsilon=1e-4, pad_token_id=None, **NO_BRANCH_DROPOUT, **NO_SPECIAL_TOKENS)),
    "cwm": dict(drop=["layer_types"], config=lambda s: transformers.CwmConfig(**headed(
        s, bos_token_id=END, eos_token_id=END, sliding_window=s.W, rope_parameters=rope(
            "llama3", factor=3.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position_embeddings=s.T0)))),
}  # fmt: skip


def neox(s, **more):
    settings = common(s, layer_norm_eps=1e-4,
                      **{"tie_word_embeddings": False, **more})  # fmt: skip
    for name in ("num_key_value_heads", "rms_norm_eps"):
        del settings[name]
    return settings


# ---- Models ----


def build(config, dtype):
    torch.set_default_dtype(dtype)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == bool(config.tie_word_embeddings)
    return model


def random_parameters(model, generator, gemma=False):
    """Makes parameters as make_golden.py does, for every architecture: scores, the MLP's inputs and the logits reach
    where functions curve. Half of the last norm's weights are negative, or a tied head would have each token predict
    itself."""
    result = {}
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim == 1:
            is_norm = name.endswith("weight")
            result[name] = (is_norm and not gemma) + 0.3 * normal
            if name in ("model.norm.weight", "transformer.ln_f.weight", "gpt_neox.final_layer_norm.weight"):
                result[name][::2] -= 2
        elif "wte" in name or "wpe" in name or "embed" in name and "out" not in name:
            result[name] = 0.3 * normal
        else:
            fan_in = parameter.shape[0] if ".c_" in name else parameter.shape[1]  # c_* are Conv1D: (in, out)
            result[name] = 1.3 / math.sqrt(fan_in) * normal
    return result


def put(model, parameters):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model


def in_double(model):
    """Returns a copy of a model that was opened in fp32. The copy computes in fp64 under DoublePrecision, tables of
    rotary embedding too."""
    model.config.dtype = torch.float64
    with DoublePrecision():
        return put(build(model.config, torch.float64), dict(model.named_parameters()))


def save(folder, name, size, parameters):
    """Writes the folder as save_pretrained does, without what ZOO leaves out of config.json."""
    zoo = ZOO[name]
    shutil.rmtree(folder, ignore_errors=True)
    model = put(build(zoo["config"](size), torch.float32), parameters).to(zoo.get("dtype", torch.bfloat16))
    model.save_pretrained(folder, **({"max_shard_size": "%dKB" % zoo["shard"]} if "shard" in zoo else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in zoo.get("drop", [])}
    path.write_text(json.dumps(flat_form(config) if zoo.get("old") else config, indent=2) + "\n")


def open_folder(folder):
    """Opens a folder as anyone would, in fp32: nothing is missing, unexpected or made up."""
    torch.set_default_dtype(torch.float32)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def make_model(name, size, generator):
    """Returns the parameters as the file has them, in fp32."""
    zoo = ZOO[name]
    parameters = random_parameters(build(zoo["config"](size), torch.float32), generator, zoo.get("gemma", False))
    return {key: value.to(zoo.get("dtype", torch.bfloat16)).float() for key, value in parameters.items()}


def random_stream(T, generator):
    """Makes BATCH T + 1 tokens: documents of one token, two delimiters in a row, delimiters at a row's first and last
    token."""
    stream = (END * torch.rand(BATCH * T + 1, generator=generator) ** 2).long()
    stream[[5, 6, T // 2, T - 1, T, T + T // 3, 2 * T - 3]] = END
    return stream


# ---- What the models compute ----


def token_losses(logits, targets):
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def whole_logits(model, tokens):
    return model(tokens, use_cache=False).logits


def document_logits(model, tokens, ends=False):
    """Returns each document's logits by itself, from position 0: a document begins at every delimiter or, with `ends`,
    after it, and at the front of a row."""
    rows = []
    for row in tokens:
        starts = [0] + [t for t in range(1, len(row)) if row[t - ends] == END] + [len(row)]
        pieces = [model(row[None, first:end], use_cache=False).logits for first, end in zip(starts, starts[1:])]
        rows.append(torch.cat(pieces, dim=1))
    return torch.cat(rows)


def step(model, tokens, targets, logits_of=whole_logits):
    """Returns logits, losses of the tokens, and gradients of their mean."""
    model.zero_grad()
    logits = logits_of(model, tokens)
    losses = token_losses(logits, targets)
    losses.mean().backward()
    return logits.detach(), losses.detach(), {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def signs(n):
    """Returns (PROJECTIONS, n) of +-1: bit k of SplitMix64's output i says whether element i is subtracted in
    projection k. The norm of a tensor's projections, and of a difference of them, is the tensor's own to about a
    quarter."""
    with numpy.errstate(over="ignore"):
        x = (numpy.arange(1, n + 1, dtype=numpy.uint64)) * numpy.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        x = x ^ (x >> numpy.uint64(31))
    bits = (x[None, :] >> numpy.arange(PROJECTIONS, dtype=numpy.uint64)[:, None]) & numpy.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(numpy.float64))


def projected(gradients):
    """Returns the projections by the names of the file, without gradients that are zero but for rounding: softmax
    ignores a key's bias where nothing turns it."""
    is_neox = any(name.startswith("gpt_neox.") for name in gradients)
    in_file = lambda name: "embed_out.weight" if is_neox and name == "lm_head.weight" else name
    return {"grad." + in_file(name): signs(g.numel()) @ g.double().flatten() for name, g in gradients.items() if g.norm() > 1e-12}


def shown_positions(T):
    """Returns the rows of logits that the file holds: a last token, and a token of the second sequence."""
    return torch.tensor([T - 1, T + 2 * T // 3])


def results(model, tokens, targets, documents):
    logits, losses, gradients = step(model, tokens, targets)
    shown = logits.flatten(0, 1)[shown_positions(tokens.shape[1])]
    found = {"logits": shown, "losses": losses, "loss": losses.mean().view(1), **projected(gradients)}
    if documents:
        _, losses, gradients = step(model, tokens, targets, document_logits)
        found.update({"documents.losses": losses, "documents.loss": losses.mean().view(1)})
        found.update({"documents." + name: value for name, value in projected(gradients).items()})
    return found


class Perturb(torch.autograd.Function):
    """Puts a random relative error, within one unit roundoff of bf16, on a value and on its gradient."""

    @staticmethod
    def forward(context, x):
        return x * (1 + BF16_ROUNDING * (2 * torch.rand_like(x) - 1))

    @staticmethod
    def backward(context, gradient):
        return gradient * (1 + BF16_ROUNDING * (2 * torch.rand_like(gradient) - 1))


def perturb_stored(model):
    """Puts errors on what an engine stores as bf16: results of linear layers, norms and embeddings, the inputs of
    projections (attention's result, the activation's), and the residual at the end of a layer."""
    after = lambda module, inputs, output: (
        (Perturb.apply(output[0]), *output[1:]) if isinstance(output, tuple) else Perturb.apply(output))
    before = lambda module, inputs: (Perturb.apply(inputs[0]), *inputs[1:])
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) or kind == "Conv1D" or "Norm" in kind or name.split(".")[-1].isdigit():
            module.register_forward_hook(after)
        if name.endswith(("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h")):
            module.register_forward_pre_hook(before)


def deviations(model, found, tokens, targets, documents):
    """Returns the relative error of each result under such errors: the root mean square over DRAWS runs."""
    squares = {name: 0.0 for name in found}
    perturb_stored(model)
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        values = results(model, tokens, targets, documents)
        for name in found:
            squares[name] += relative_error(values[name], found[name]) ** 2 / DRAWS
    return torch.tensor([math.sqrt(value) for value in squares.values()])


def generate(model, prompt, new_tokens=NEW_TOKENS):
    """Returns the ids of the prompt and of its likeliest continuation, and by how much each new logit exceeds all
    others."""
    ids, gaps = list(prompt.encode()), []
    for _ in range(new_tokens):
        with torch.no_grad():
            best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        gaps.append((best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return ids, gaps


def make(name, folder, seed):
    """Makes a model's folder. Returns False where this seed's model predicts the end of text, or has two tokens that
    are nearly equally likely."""
    zoo = ZOO[name]
    generator = torch.Generator().manual_seed(seed)
    parameters = make_model(name, SMALL, generator)
    stream = random_stream(SMALL.T, generator)
    tokens, targets = stream[:-1].view(BATCH, SMALL.T), stream[1:].view(BATCH, SMALL.T)
    prompt, documents = zoo.get("prompt", PROMPT), zoo.get("documents", False)
    with DoublePrecision():
        model = put(build(zoo["config"](SMALL), torch.float64), parameters)
        ids, gaps = generate(model, prompt)
        if END in ids or min(gaps) < 5e-4 or len(set(ids[-12:])) < 4:
            return False
        found = results(model, tokens, targets, documents)
        stray = deviations(model, found, tokens, targets, documents)
    save(folder, name, SMALL, parameters)
    settings = dict(seq_length=SMALL.T, micro_batch_size=BATCH, vocab_size=V, prompt_tokens=len(prompt),
                    torch=torch.__version__.split("+")[0], transformers=transformers.__version__)  # fmt: skip
    data = dict(tokens=tokens, targets=targets, positions=shown_positions(SMALL.T), generated=torch.tensor(ids), deviations=stray)
    write(folder / "expected.golden", settings, {**data, **found})
    report(name, folder, found, stray, tokens, targets, documents, seed)
    return True


def report(name, folder, found, stray, tokens, targets, documents, seed):
    opened = open_folder(folder)
    plain = results(opened, tokens, targets, documents)
    errors = {key: relative_error(plain[key], found[key]) for key in found}
    worst = max((key for key in found if "grad." in key), key=errors.get)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name:22} {errors['logits']:.1e}  {errors['loss']:.1e}  {errors[worst]:.1e} ({worst})  bf16 {stray[0]:.1e} {stray[2]:.1e}"
          f" {max(stray[3:]):.1e}  loss {found['loss'].item():.3f}  seed {seed}  {size} bytes", flush=True)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "zoo")
    out.mkdir(parents=True, exist_ok=True)
    for number, model_name in enumerate(ZOO):
        if ZOO[model_name].get("live") or sys.argv[2:] and model_name not in sys.argv[2:]:
            continue
        attempt = 100 * (number + 1)
        while not make(model_name, out / model_name, attempt):
            attempt += 1
    print(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()), "bytes")
