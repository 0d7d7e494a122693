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
#define PRESET_QWEN2 PRESET_LLAMA, "norm-epsilon=1e-6", "rotary-base=1000000", "add-qkv-bias=true", "seq-length=4096"

// X(name, settings...): one row per preset. Shapes are from the config.json that each model is published with on
// Hugging Face; demo is for make demo, with tokens for 256 bytes and the end of a text.
#define PRESETS(X)                                                                                                     \
    X("gpt2-124m", PRESET_GPT2, "num-layers=12", "hidden-size=768", "num-attention-heads=12")                          \
    X("gpt2-350m", PRESET_GPT2, "num-layers=24", "hidden-size=1024", "num-attention-heads=16")                         \
    X("gpt2-774m", PRESET_GPT2, "num-layers=36", "hidden-size=1280", "num-attention-heads=20")                         \
    X("gpt2-1558m", PRESET_GPT2, "num-layers=48", "hidden-size=1600", "num-attention-heads=25")                        \
    X("llama3.2-1b", PRESET_LLAMA3, "num-layers=16", "hidden-size=2048", "num-attention-heads=32",                     \
      "num-query-groups=8", "ffn-hidden-size=8192", "untie-embeddings-and-output-weights=false")                       \
    X("llama3-8b", PRESET_LLAMA3, "num-layers=32", "hidden-size=4096", "num-attention-heads=32", "num-query-groups=8", \
      "ffn-hidden-size=14336", "untie-embeddings-and-output-weights=true")                                             \
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
