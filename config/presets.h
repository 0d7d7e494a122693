// The presets of --preset: known models' shapes, as options.
#pragma once

struct preset {
    const char *name;
    const char *settings[40]; // "option=value", ended by NULL
};

#define PRESET_GPT2                                                                                                    \
    "normalization=LayerNorm", "norm-epsilon=1e-5", "position-embedding-type=learned_absolute", "activation=gelu",     \
        "add-bias-linear=true", "untie-embeddings-and-output-weights=false", "vocab-size=50257", "seq-length=1024",    \
        "max-position-embeddings=1024"
#define PRESET_LLAMA                                                                                                   \
    "normalization=RMSNorm", "position-embedding-type=rope", "activation=swiglu", "add-bias-linear=false"
#define PRESET_LLAMA3 PRESET_LLAMA, "norm-epsilon=1e-5", "rotary-base=500000", "vocab-size=128256", "seq-length=4096"
// Llama 3.1 and 3.2 were trained on 8192 tokens, then with scaled frequencies on 131072.
#define PRESET_LLAMA31(factor)                                                                                         \
    PRESET_LLAMA3, "rope-scaling-type=llama3", "rope-scaling-factor=" factor, "rope-low-freq-factor=1",                \
        "rope-high-freq-factor=4", "rope-original-max-position-embeddings=8192", "max-position-embeddings=131072"
#define PRESET_QWEN2 PRESET_LLAMA, "norm-epsilon=1e-6", "rotary-base=1000000", "add-qkv-bias=true", "seq-length=4096"
#define PRESET_QWEN3                                                                                                   \
    PRESET_LLAMA, "norm-epsilon=1e-6", "rotary-base=1000000", "qk-layernorm=true", "kv-channels=128",                  \
        "num-query-groups=8", "vocab-size=151936", "seq-length=4096", "max-position-embeddings=40960"
#define PRESET_SMOLLM2                                                                                                 \
    PRESET_LLAMA, "norm-epsilon=1e-5", "vocab-size=49152", "seq-length=4096", "max-position-embeddings=8192",          \
        "untie-embeddings-and-output-weights=false"
#define PRESET_OLMO2                                                                                                   \
    PRESET_LLAMA, "norm-epsilon=1e-6", "rotary-base=500000", "norm-placement=post", "qk-layernorm=true",               \
        "qk-layernorm-width=full", "vocab-size=100352", "seq-length=4096", "max-position-embeddings=4096",             \
        "untie-embeddings-and-output-weights=true"
// Scores are divided by sqrt(256), the default of heads of 256.
#define PRESET_GEMMA3                                                                                                  \
    "normalization=RMSNorm", "norm-epsilon=1e-6", "apply-layernorm-1p=true", "norm-placement=sandwich",                \
        "qk-layernorm=true", "position-embedding-type=rope", "rotary-base=1000000", "rotary-base-local=10000",         \
        "window-size=512", "window-attn-skip-freq=6", "activation=geglu", "add-bias-linear=false",                     \
        "num-attention-heads=4", "num-query-groups=1", "kv-channels=256", "vocab-size=262144", "seq-length=4096",      \
        "max-position-embeddings=32768", "untie-embeddings-and-output-weights=false"
#define PRESET_PYTHIA                                                                                                  \
    "normalization=LayerNorm", "norm-epsilon=1e-5", "position-embedding-type=rope", "rotary-percent=0.25",             \
        "parallel-residual=true", "activation=gelu_erf", "add-bias-linear=true", "vocab-size=50304",                   \
        "seq-length=2048", "max-position-embeddings=2048", "untie-embeddings-and-output-weights=true"

// X(name, settings...). Shapes are from the models' files on Hugging Face; demo has tokens for bytes and a text's end.
#define PRESETS(X)                                                                                                     \
    X("gpt2-124m", PRESET_GPT2, "num-layers=12", "hidden-size=768", "num-attention-heads=12")                          \
    X("gpt2-350m", PRESET_GPT2, "num-layers=24", "hidden-size=1024", "num-attention-heads=16")                         \
    X("gpt2-774m", PRESET_GPT2, "num-layers=36", "hidden-size=1280", "num-attention-heads=20")                         \
    X("gpt2-1558m", PRESET_GPT2, "num-layers=48", "hidden-size=1600", "num-attention-heads=25")                        \
    X("llama3.2-1b", PRESET_LLAMA31("32"), "num-layers=16", "hidden-size=2048", "num-attention-heads=32",              \
      "num-query-groups=8", "ffn-hidden-size=8192", "untie-embeddings-and-output-weights=false")                       \
    X("llama3.2-3b", PRESET_LLAMA31("32"), "num-layers=28", "hidden-size=3072", "num-attention-heads=24",              \
      "num-query-groups=8", "ffn-hidden-size=8192", "untie-embeddings-and-output-weights=false")                       \
    X("llama3-8b", PRESET_LLAMA3, "num-layers=32", "hidden-size=4096", "num-attention-heads=32", "num-query-groups=8", \
      "ffn-hidden-size=14336", "untie-embeddings-and-output-weights=true")                                             \
    X("llama3.1-8b", PRESET_LLAMA31("8"), "num-layers=32", "hidden-size=4096", "num-attention-heads=32",               \
      "num-query-groups=8", "ffn-hidden-size=14336", "untie-embeddings-and-output-weights=true")                       \
    /* of v0.3: 32768 tokens in the vocabulary, and no window, which only v0.1 had */                                  \
    X("mistral-7b", PRESET_LLAMA, "norm-epsilon=1e-5", "rotary-base=1000000", "num-layers=32", "hidden-size=4096",     \
      "num-attention-heads=32", "num-query-groups=8", "ffn-hidden-size=14336", "vocab-size=32768", "seq-length=4096",  \
      "max-position-embeddings=32768", "untie-embeddings-and-output-weights=true")                                     \
    X("smollm2-135m", PRESET_SMOLLM2, "rotary-base=100000", "num-layers=30", "hidden-size=576",                        \
      "num-attention-heads=9", "num-query-groups=3", "ffn-hidden-size=1536")                                           \
    X("smollm2-360m", PRESET_SMOLLM2, "rotary-base=100000", "num-layers=32", "hidden-size=960",                        \
      "num-attention-heads=15", "num-query-groups=5", "ffn-hidden-size=2560")                                          \
    X("smollm2-1.7b", PRESET_SMOLLM2, "rotary-base=130000", "num-layers=24", "hidden-size=2048",                       \
      "num-attention-heads=32", "num-query-groups=32", "ffn-hidden-size=8192")                                         \
    X("qwen3-0.6b", PRESET_QWEN3, "num-layers=28", "hidden-size=1024", "num-attention-heads=16",                       \
      "ffn-hidden-size=3072", "untie-embeddings-and-output-weights=false")                                             \
    X("qwen3-1.7b", PRESET_QWEN3, "num-layers=28", "hidden-size=2048", "num-attention-heads=16",                       \
      "ffn-hidden-size=6144", "untie-embeddings-and-output-weights=false")                                             \
    X("qwen3-4b", PRESET_QWEN3, "num-layers=36", "hidden-size=2560", "num-attention-heads=32", "ffn-hidden-size=9728", \
      "untie-embeddings-and-output-weights=false")                                                                     \
    X("qwen3-8b", PRESET_QWEN3, "num-layers=36", "hidden-size=4096", "num-attention-heads=32",                         \
      "ffn-hidden-size=12288", "untie-embeddings-and-output-weights=true")                                             \
    X("gemma3-270m", PRESET_GEMMA3, "num-layers=18", "hidden-size=640", "ffn-hidden-size=2048",                        \
      "embedding-multiplier=25.298221281347036")                                                                       \
    X("gemma3-1b", PRESET_GEMMA3, "num-layers=26", "hidden-size=1152", "ffn-hidden-size=6912",                         \
      "embedding-multiplier=33.94112549695428")                                                                        \
    X("olmo2-1b", PRESET_OLMO2, "num-layers=16", "hidden-size=2048", "num-attention-heads=16", "num-query-groups=16",  \
      "ffn-hidden-size=8192")                                                                                          \
    X("olmo2-7b", PRESET_OLMO2, "num-layers=32", "hidden-size=4096", "num-attention-heads=32", "num-query-groups=32",  \
      "ffn-hidden-size=11008")                                                                                         \
    X("pythia-70m", PRESET_PYTHIA, "num-layers=6", "hidden-size=512", "num-attention-heads=8")                         \
    X("pythia-160m", PRESET_PYTHIA, "num-layers=12", "hidden-size=768", "num-attention-heads=12")                      \
    X("pythia-410m", PRESET_PYTHIA, "num-layers=24", "hidden-size=1024", "num-attention-heads=16")                     \
    X("qwen2.5-0.5b", PRESET_QWEN2, "num-layers=24", "hidden-size=896", "num-attention-heads=14",                      \
      "num-query-groups=2", "ffn-hidden-size=4864", "vocab-size=151936", "untie-embeddings-and-output-weights=false")  \
    X("qwen2.5-1.5b", PRESET_QWEN2, "num-layers=28", "hidden-size=1536", "num-attention-heads=12",                     \
      "num-query-groups=2", "ffn-hidden-size=8960", "vocab-size=151936", "untie-embeddings-and-output-weights=false")  \
    X("qwen2.5-7b", PRESET_QWEN2, "num-layers=28", "hidden-size=3584", "num-attention-heads=28", "num-query-groups=4", \
      "ffn-hidden-size=18944", "vocab-size=152064", "untie-embeddings-and-output-weights=true")                        \
    X("demo", PRESET_LLAMA, "norm-epsilon=1e-5", "vocab-size=257", "seq-length=128", "num-layers=4",                   \
      "hidden-size=128", "num-attention-heads=4", "num-query-groups=2", "ffn-hidden-size=384")

#define PRESET_ROW(name, ...) {name, {__VA_ARGS__}},
static const struct preset presets[] = {PRESETS(PRESET_ROW)};
#undef PRESET_ROW
#define PRESET_NAME(name, ...) "|" name
#define PRESET_NAMES "none" PRESETS(PRESET_NAME) // the choices of --preset: none is 0, presets[i] is i + 1
