#!/usr/bin/env python3
"""Writes corpus/NAME/ and corpus/NAME.expected: for each parser a few good files and, field by field, bad ones, each
with the words in which the parser must refuse it. Run it after a change of this script; `make test` replays what it
wrote. The corpora of manifest and tokenizer are edited by hand."""
import json
import shutil
import struct
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"


def u32(*values):
    return struct.pack("<%dI" % len(values), *values)


def i64(*values):
    return struct.pack("<%dq" % len(values), *values)


def changed(data, place, new):
    return data[:place] + new + data[place + len(new) :]


def shard():
    def make(magic, version, tokens, width):
        header = u32(magic, version, len(tokens)) + bytes(1024 - 12)
        return header + b"".join(t.to_bytes(width, "little") for t in tokens)

    good = make(20240520, 1, [0, 1, 50256], 2)
    yield "good_u16", good, "accepted"
    yield "good_u32", make(20240801, 7, [0, 128000], 4), "accepted"
    yield "empty", b"", "is empty"
    yield "magic", changed(good, 0, u32(1)), "begins with 1; expected"
    yield "magic_evaluation", changed(good, 0, u32(20240522)), "is an evaluation file"
    yield "header_cut", good[:1023], "expected a header of 1024 bytes"
    yield "version", changed(good, 4, u32(7)), "has version 7; expected 1"
    yield "tokens_none", make(20240520, 1, [], 2), "holds no tokens"
    yield "tokens_more", changed(good, 8, u32(0xFFFFFFFF)), "expected 8589935614 for the 4294967295"
    yield "tokens_less", changed(good, 8, u32(2)), "expected 1028 for the 2"
    yield "width", changed(good, 0, u32(20240801, 7)), "expected 1036 for the 3 uint32"

    def rows(T, width, number, learned):
        header = u32(20261123, 1, T, width) + i64(number, learned, number) + u32(256)
        tokens = bytes((number * T + 1) * width)
        bits = bytes((number * T + 8) // 8)
        return b"".join(part + bytes(-len(part) % 8) for part in (header + bytes(1024 - len(header)), tokens, bits, bits))

    good = rows(5, 2, 3, 4)
    yield "rows_good_u16", good, "accepted"
    yield "rows_good_u32", rows(7, 4, 1, 1), "accepted"
    yield "rows_header_cut", good[:1000], "expected a header of 1024 bytes"
    yield "rows_version", changed(good, 4, u32(2)), "finetuning shard of version 2; expected 1"
    yield "rows_length_none", changed(good, 8, u32(0)), "rows of 0 tokens"
    yield "rows_width", changed(good, 12, u32(3)), "tokens of 3 bytes; expected 2 or 4"
    yield "rows_none", changed(good, 16, i64(0)), "promises 0 rows"
    yield "rows_many", changed(good, 16, i64(1 << 62)), "promises 4611686018427387904 rows"
    yield "rows_more", changed(good, 16, i64(4)), "for the 4 rows of 5 tokens"
    yield "rows_learned_none", changed(good, 24, i64(0)), "promises 0 tokens with loss of 16"
    yield "rows_learned_all", changed(good, 24, i64(16)), "promises 16 tokens with loss of 16"


def megatron_index():
    def make(dtype, lengths, documents, modes=b"", pointers=None):
        width = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}.get(dtype, 4)
        begins = [sum(lengths[:i]) * width for i in range(len(lengths))]
        return (
            i64(sum(lengths) * width) + b"MMIDIDX\0\0" + i64(1) + bytes([dtype]) + i64(len(lengths), len(documents))
            + struct.pack("<%di" % len(lengths), *lengths) + i64(*(pointers or begins)) + i64(*documents) + modes
        )  # fmt: skip

    good = make(4, [3, 0, 4], [0, 2, 3])
    lengths, pointers, documents = 42, 42 + 12, 42 + 36
    for dtype in (1, 2, 3, 4, 5, 8):
        yield "good_type_%d" % dtype, make(dtype, [3, 0, 4], [0, 2, 3]), "accepted"
    yield "good_modes", make(8, [3, 2], [0, 2], b"\0\1"), "accepted"
    yield "bin_bytes_more", changed(good, 0, i64(32)), "describes 28 bytes of tokens, but the .bin has 32"
    yield "bin_bytes_less", changed(good, 0, i64(24)), "which has only 24"
    yield "bin_bytes_none", make(4, [], [0]), "holds no tokens"
    yield "magic", changed(good, 8, b"X"), "doesn't begin with MMIDIDX"
    yield "header_cut", good[:41], "expected a header of 34 bytes"
    yield "version", changed(good, 17, i64(2)), "has version 2; expected 1"
    yield "dtype_float", changed(good, 25, b"\7"), "has dtype code 7"
    yield "dtype_none", changed(good, 25, b"\0"), "has dtype code 0"
    yield "sequences_overflow", changed(good, 26, i64(3 + 2**62)), "doesn't fit the 4611686018427387907 sequences"
    yield "sequences_negative", changed(good, 26, i64(-1)), "doesn't fit the 18446744073709551615 sequences"
    yield "documents_overflow", changed(good, 34, i64(3 + 2**61)), "and 2305843009213693955 document entries"
    yield "documents_none", make(4, [3], []), "has no document index"
    yield "length_negative", changed(good, lengths, struct.pack("<i", -3)), "has the negative length -3"
    yield "length_more", changed(good, lengths + 8, u32(5)), "which has only 28"
    yield "pointer", changed(good, pointers + 16, i64(8)), "sequence 2 begins at byte 8 of the .bin; expected 12"
    yield "pointer_negative", changed(good, pointers, i64(-4)), "sequence 0 begins at byte -4"
    yield "document_first", changed(good, documents, i64(1)), "entry 0 of the document index is 1"
    yield "document_falls", changed(good, documents + 8, i64(-1)), "entry 1 of the document index is -1"
    yield "document_last", changed(good, documents + 16, i64(4)), "entry 2 of the document index is 4"
    yield "cut", good[:-1], "doesn't fit the 3 sequences"


def vocabulary():
    def make(tokens, end_of_text):
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens) + 1)]
        return b"GPTVOCAB" + u32(1, len(tokens), end_of_text, 0) + u32(*offsets) + b"".join(tokens)

    good = make([b"", b"a", b"\xc3", b"\xa9", b"\x1b[2J", b"int main"], 5)
    yield "good", good, "accepted"
    yield "good_no_end", make([b"a", b"b"], 0xFFFFFFFF), "accepted"
    yield "good_any_bytes", make([bytes(range(256)), b"\xe2\x80\xae", b"\xf4\x90\x80\x80"], 0), "accepted"
    yield "magic", changed(good, 0, b"X"), "is not a vocabulary file"
    yield "header_cut", good[:23], "is not a vocabulary file"
    yield "version", changed(good, 8, u32(2)), "has version 2; expected 1"
    yield "tokens_none", changed(good, 12, u32(0)), "promises 0 tokens"
    yield "tokens_more", changed(good, 12, u32(12)), "promises 12 tokens"
    yield "tokens_overflow", changed(good, 12, u32(0xFFFFFFFF)), "promises 4294967295 tokens"
    yield "end_of_text", changed(good, 16, u32(6)), "names token 6 as the end of text"
    yield "offset_first", changed(good, 24, u32(1)), "offset 0 is 1"
    yield "offset_falls", changed(good, 36, u32(0)), "offset 3 is 0"
    yield "offset_beyond", changed(good, 40, u32(0x80000000)), "offset 4 is 2147483648"
    yield "offset_last", changed(good, 48, u32(14)), "offset 6 is 14"
    yield "cut", good[:-1], "offset 6 is 15"
    yield "more", good + b"x", "offset 6 is 15"


def safetensors():
    def make(header, data=b"", length=None):
        text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    def one(dtype="F32", shape=(1,), offsets=(0, 4), data=bytes(4), **more):
        return make({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}, data)

    good = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [4, 12]},
        "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "c": {"dtype": "F16", "shape": [0, 3], "data_offsets": [12, 12]},
        "d": {"dtype": "F64", "shape": [], "data_offsets": [12, 20]},
    }
    yield "good", make(good, bytes(range(20))), "accepted"
    yield "good_half", one("F16", [4], (0, 8), b"\x00\x7c\x01\x7e\x01\x00\xff\xfb"), "accepted"
    yield "good_empty", make(b"{}      "), "accepted"
    yield "good_more_members", one(more=[{}]), "accepted"
    yield "length_cut", b"\2\0\0\0\0\0\0", "is 7 bytes long; expected a safetensors file"
    yield "length_large", make(b"{}", length=100000001), "promises a header of 100000001 bytes; expected at most"
    yield "length_overflow", make(b"{}", length=2**64 - 1), "promises a header of 18446744073709551615 bytes"
    yield "length_beyond", make(b"{}", length=3), "but is 10 bytes long; it was cut off"
    yield "length_none", make(b""), "doesn't begin with '{'"
    yield "begin_space", make(b" {}"), "doesn't begin with '{'"
    yield "begin_array", make(b"[]"), "doesn't begin with '{'"
    yield "json", make(b'{"a":}'), "is not valid JSON"
    yield "json_more", make(b"{}{}"), "end of file expected"
    yield "json_utf8", make(b'{"\xff":1}'), "unable to decode byte 0xff"
    yield "json_nul", make(b'{"a\0":1}'), "is not valid JSON"
    yield "json_deep", make(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"), "is nested too deep"
    yield "duplicate_name", make(b'{"a":{},"a":{}}'), "duplicate object key"
    yield "duplicate_member", make(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "duplicate object key"
    yield "tensor", make({"a": 1}), "tensor 'a' is an integer; expected an object"
    yield "dtype", one("f32"), "dtype 'f32' is unknown"
    yield "dtype_type", one(1), "dtype is an integer; expected a string"
    yield "dtype_small", one("F4", [2], (0, 1), b"x"), "dtype F4 has less than a byte"
    yield "shape_type", one(shape="1"), "shape is a string; expected an array"
    yield "shape_negative", one(shape=[-1]), "a size in shape is -1"
    yield "shape_fraction", one(shape=[1.0]), "a size in shape is a number with a fraction"
    yield "shape_large", one(shape=[2**63]), "too big integer"
    yield "shape_overflow", one(shape=[2**32, 2**32, 0], offsets=(0, 0), data=b""), "overflows"
    yield "shape_overflow_bytes", one(shape=[2**62 + 1]), "overflows"
    yield "shape_long", one(shape=[1] * 9), "shape has 9 dimensions"
    yield "shape_other", one(shape=[2]), "has 4 bytes of data; expected 8"
    yield "offsets_type", one(offsets=4), "data_offsets is an integer; expected an array"
    yield "offsets_one", one(offsets=[0]), "data_offsets has 1 numbers"
    yield "offsets_negative", one(offsets=(-4, 0)), "data_offsets[0] is -4"
    yield "offsets_backward", one(offsets=(4, 0)), "data_offsets[1] is 0; expected 4"
    yield "offsets_far", one("U8", [2**62], (0, 2**62)), "which has only 4"
    yield "hole_first", one(offsets=(4, 8), data=bytes(8)), "there is a hole"
    yield "hole", make({**good, "d": {"dtype": "F64", "shape": [], "data_offsets": [13, 21]}}, bytes(21)), "is a hole"
    yield "overlap", make({**good, "d": {"dtype": "F64", "shape": [], "data_offsets": [11, 19]}}, bytes(19)), "overlap"
    yield "data_cut", make(good, bytes(19)), "which has only 19; the file was cut off"
    yield "data_more", make(good, bytes(21)), "has 21 bytes of data; expected 20"
    yield "metadata_type", make({"__metadata__": []}), "__metadata__ is an array; expected an object"
    yield "metadata_value", make({"__metadata__": {"k": 1}}), "__metadata__: k is an integer; expected a string"
    yield "metadata_nul", make(b'{"__metadata__":{"k":"\\u0000"}}'), "k is a string with a NUL byte"


def safetensors_index():
    def make(weight_map, **more):
        return json.dumps({"weight_map": weight_map, **more}).encode()

    file = "model-00001-of-00001.safetensors"
    yield "good", make({"b": file, "a": file}, metadata={"total_size": 12}), "accepted"
    yield "good_fraction", make({"a": "f"}, metadata={"total_size": 1.5}), "accepted"
    yield "good_bare", make({"a": "f"}), "accepted"
    yield "empty", b"", "is empty; expected JSON"
    yield "json", b'{"weight_map": {"a": "f"}', "is not valid JSON"
    yield "array", b"[]", "is an array; expected an object"
    yield "map_none", b"{}", "weight_map is absent"
    yield "map_type", make([]), "weight_map is an array"
    yield "map_empty", make({}), "weight_map is empty"
    yield "duplicate", b'{"weight_map": {"a": "f", "a": "f"}}', "duplicate object key"
    yield "file_type", make({"a": 1}), "a is an integer; expected a string"
    yield "file_empty", make({"a": ""}), "a is in ''; expected the name of a file"
    yield "file_absolute", make({"a": "/etc/passwd"}), "a is in '/etc/passwd'; expected"
    yield "file_above", make({"a": "../f"}), "a is in '../f'; expected"
    yield "file_dots", make({"a": ".."}), "a is in '..'; expected"
    yield "file_backslash", make({"a": "b\\f"}), "a is in 'b\\f'; expected"
    yield "file_nul", make({"a": "f\0"}), "a is a string with a NUL byte"
    yield "metadata_type", make({"a": "f"}, metadata=1), "metadata is an integer; expected an object"
    yield "size_type", make({"a": "f"}, metadata={"total_size": "1"}), "total_size is a string"
    yield "size_negative", make({"a": "f"}, metadata={"total_size": -1}), "total_size is -1"
    yield "size_large", make({"a": "f"}, metadata={"total_size": 1e300}), "total_size is 1e+300"


def config():
    def sizes(**heads):
        return {"vocab_size": 101, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **heads,
                "intermediate_size": 24, "max_position_embeddings": 40}  # fmt: skip

    full, sliding = "full_attention", "sliding_attention"
    models = {
        "gpt2": {"model_type": "gpt2", "vocab_size": 101, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 40,
                 "n_inner": 72, "layer_norm_epsilon": 1e-4, "tie_word_embeddings": False},
        "llama": {"model_type": "llama", **sizes(), "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
                  "mlp_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
        "qwen2": {"model_type": "qwen2", **sizes(num_key_value_heads=4), "rope_theta": 300, "rope_scaling": None,
                  "rms_norm_eps": 1e-6, "use_sliding_window": False, "layer_types": [full, full], "tie_word_embeddings": True},
        "train_gpt": {"model_type": "train_gpt", "vocab_size": 101, "num_layers": "2", "hidden_size": "32",
                      "num_attention_heads": "4", "num_query_groups": "2", "kv_channels": "8", "ffn_hidden_size": "40",
                      "normalization": "LayerNorm", "norm_epsilon": "1e-05", "position_embedding_type": "rope",
                      "rotary_base": "10000", "activation": "gelu", "add_bias_linear": "true", "add_qkv_bias": "true",
                      "max_position_embeddings": "40", "untie_embeddings_and_output_weights": "false"},
    }  # fmt: skip

    def make(model, **more):
        return json.dumps({**models[model], **more}).encode()

    def grouped(model_type, **more):
        return json.dumps({"model_type": model_type, **sizes(num_key_value_heads=2, head_dim=8), **more}).encode()

    for model in models:
        yield "good_" + model, make(model), "accepted"
        yield model + "_cut", make(model)[:-1], "is not valid JSON"
    yield "empty", b"", "is empty; expected JSON"
    yield "array", b"[]", "is an array; expected an object"
    yield "duplicate", b'{"model_type": "gpt2", "model_type": "gpt2"}', "duplicate object key"
    yield "model_type_other", make("gpt2", model_type="mixtral"), "model_type is 'mixtral', which is not supported"
    yield "model_type_none", make("gpt2", model_type=None), "model_type is null; expected a string"
    yield "model_type_nul", make("gpt2", model_type="gpt2\0"), "model_type is a string with a NUL byte"
    yield "quantization_config", make("llama", quantization_config={}), "quantization_config is set"
    for key, model in (("vocab_size", "gpt2"), ("n_layer", "gpt2"), ("n_embd", "gpt2"), ("n_head", "gpt2"),
                       ("n_positions", "gpt2"), ("n_inner", "gpt2"), ("num_hidden_layers", "llama"), ("hidden_size", "llama"),
                       ("num_attention_heads", "llama"), ("num_key_value_heads", "llama"), ("head_dim", "llama"),
                       ("intermediate_size", "qwen2"), ("max_position_embeddings", "qwen2")):  # fmt: skip
        yield key + "_zero", make(model, **{key: 0}), key + " is 0; expected 1 to"
        yield key + "_negative", make(model, **{key: -1}), key + " is -1; expected 1 to"
        yield key + "_large", make(model, **{key: 2**62}), key + " is %d; expected 1 to" % 2**62
        yield key + "_type", make(model, **{key: "2"}), key + " is a string; expected an integer"
        if key not in ("n_inner", "num_key_value_heads", "head_dim"):
            yield key + "_none", make(model, **{key: None}), key + " is null; expected an integer"
    yield "num_hidden_layers_beyond", make("llama", num_hidden_layers=65537), "num_layers would be '65537'"
    yield "n_head_divides", make("gpt2", n_head=3), "n_head is 3, which does not divide"
    yield "n_head_size", make("gpt2", n_head=8), "heads of size 4"
    yield "head_dim_size", make("llama", head_dim=12), "heads of size 12"
    yield "groups_divide", make("llama", num_key_value_heads=3), "num_key_value_heads is 3, which does not divide"
    yield "groups_more", make("llama", num_key_value_heads=5), "num_key_value_heads is 5; expected 1 to 4"
    yield "tie", make("llama", tie_word_embeddings=1), "tie_word_embeddings is an integer; expected true or false"
    yield "layer_norm_epsilon", make("gpt2", layer_norm_epsilon=0), "layer_norm_epsilon is 0"
    yield "rms_norm_eps", make("qwen2", rms_norm_eps="1e-6"), "rms_norm_eps is a string; expected a number"
    yield "activation_function", make("gpt2", activation_function="gelu"), "accepted"
    yield "hidden_act", make("llama", hidden_act="relu"), "hidden_act is 'relu'"
    yield "scale_attn_weights", make("gpt2", scale_attn_weights=False), "scale_attn_weights is false"
    yield "scale_by_layer", make("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is true"
    yield "cross_attention", make("gpt2", add_cross_attention=True), "add_cross_attention is true"
    words = "rope_scaling and rope_parameters have another rope_type each"
    yield "rope_scaling", make("llama", rope_scaling={"type": "linear"}), words
    yield "rope_type", make("llama", rope_parameters={"rope_type": "yarn"}), "accepted"
    yield "rope_type_old", make("llama", rope_parameters={"type": "linear"}), "factor is absent"
    yield "rope_type_type", make("llama", rope_parameters={"rope_type": 1}), "rope_type is an integer"
    yield "rope_by_kind", make("llama", rope_parameters={full: {}}), "rope_parameters has full_attention"
    yield "rope_parameters", make("llama", rope_parameters=[]), "rope_parameters is an array"
    yield "rope_theta", make("qwen2", rope_theta=0), "rope_theta is 0"
    yield "rope_theta_large", make("qwen2", rope_theta=1e31), "rope_theta is 1e+31"
    yield "partial_rotary", make("llama", partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"
    yield "partial_rotary_in", make("llama", rope_parameters={"partial_rotary_factor": 0}), "partial_rotary_factor is 0,"
    yield "sliding_window", make("qwen2", use_sliding_window=True), "accepted"
    words = "layer_types has 'sliding_attention', but use_sliding_window is false"
    yield "layer_types", make("qwen2", layer_types=[full, sliding]), words
    yield "layer_types_type", make("qwen2", layer_types=[full, 1]), "layer_types is an integer"
    yield "attention_bias", make("llama", mlp_bias=False), "accepted"
    yield "attention_bias_qwen2", make("qwen2", attention_bias=False), "attention_bias is false"
    yield "ours_none", make("train_gpt", activation=None), "activation is null; expected a string"
    yield "ours_long", make("train_gpt", activation="g" * 21), "activation would be '%s', which is not known" % ("g" * 21)
    yield "ours_unknown", make("train_gpt", activation="relu"), "activation would be 'relu', which is not known"
    yield "ours_number", make("train_gpt", num_layers="two"), "num_layers would be 'two', which is not understood"
    yield "ours_range", make("train_gpt", hidden_size="-1"), "hidden_size would be '-1', which is out of range"

    theta = {"rope_theta": 5e5}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "attention_factor": 1.2, **theta}
    more = {
        "qwen3": {"use_sliding_window": True, "sliding_window": 7, "layer_types": [sliding, full],
                  "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "mscale": 1.5,
                                   "mscale_all_dim": 0.5}},
        "mistral": {"sliding_window": 5},
        "ministral": {"layer_types": [full, sliding], "sliding_window": 4},
        "cwm": {"mlp_bias": True, "rope_parameters": {"rope_type": "llama3", **theta, "factor": 16.0, "low_freq_factor": 1,
                                                      "high_freq_factor": 4, "original_max_position_embeddings": 8}},
        "smollm3": {"no_rope_layers": [1, 0], "attention_bias": True},
        "granite": {"attention_multiplier": 0.3, "logits_scaling": 0.4, "residual_multiplier": 0.22, "embedding_multiplier": 12},
        "olmo2": theta,
        "olmo3": {"rope_parameters": {full: yarn, sliding: {"rope_type": "default", **theta}}},
        "gemma": {"hidden_act": "gelu"},
        "gemma2": {"query_pre_attn_scalar": 144, "final_logit_softcapping": None},
        "gemma3_text": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 50.5,
                        "sliding_window_pattern": 2},
        "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 20,
                 "rope_scaling": {"type": "su", "short_factor": [1.0, 1.25], "long_factor": [2, 33.5]}},
        "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 77, "use_parallel_residual": False},
    }  # fmt: skip
    for model in more:
        yield "good_" + model, grouped(model, **more[model]), "accepted"

    def longrope(*factors):
        return grouped("phi3", rope_scaling={"type": "longrope", "short_factor": factors, "long_factor": [1, 2, 3, 4]})

    yield "window_zero", grouped("mistral", sliding_window=0), "sliding_window is 0"
    yield "layers_length", grouped("gemma2", layer_types=[sliding]), "layer_types has 1 layers; expected 2"
    yield "layers_unknown", grouped("gemma2", layer_types=[sliding, "chunked_attention"]), "layer_types has 'chunked_attention'"
    yield "no_rope_length", grouped("smollm3", no_rope_layers=[1]), "no_rope_layers has 1 layers; expected 2"
    yield "no_rope_value", grouped("smollm3", no_rope_layers=[1, True]), "no_rope_layers is true"
    yield "rope_dynamic", grouped("llama", rope_scaling={"type": "dynamic", "factor": 2}), "rope_type is 'dynamic'"
    words = "rope_scaling has 'mrope_section'"
    yield "rope_member", grouped("llama", rope_scaling={"type": "default", "mrope_section": [1]}), words
    yield "rope_lists", longrope(1, 2, 3), "short_factor has 3 numbers; expected 4"
    yield "rope_list_zero", longrope(1, 2, 3, 0), "short_factor is not a list of numbers of at least 1e-6"
    words = "rope_parameters has 'rope_theta' beside full_attention"
    yield "rope_beside", grouped("olmo3", rope_parameters={full: {"rope_theta": 5}, "rope_theta": 7}), words
    words = "sliding_attention has a scaling of its own"
    yield "rope_local", grouped("olmo3", rope_parameters={sliding: {"rope_type": "linear", "factor": 2}}), words
    yield "gemma3_cap", grouped("gemma3_text", attn_logit_softcapping=50), "attn_logit_softcapping is set"
    yield "gemma3_images", grouped("gemma3"), "gemma3_text, as Gemma 3 270M and 1B are"
    yield "rotary_odd", grouped("gpt_neox", rotary_pct=0.4), "rotates 3 elements of a head"


def llmc():
    def make(words, file_bytes=None):
        _, version, positions, _, layers, _, C, padded = words
        size = 1024 + (2 if version == 5 else 4) * ((padded + positions + 2) * C + layers * (12 * C * C + 13 * C))
        return struct.pack("<Q", size if file_bytes is None else file_bytes) + struct.pack("<8i", *words) + bytes(992)

    good = [20240326, 3, 40, 101, 2, 2, 32, 128]
    names = ("magic", "version", "positions", "vocab_size", "layers", "heads", "channels", "padded_vocab_size")

    def other(place, value):
        return good[:place] + [value] + good[place + 1 :]

    yield "good_fp32", make(good), "accepted"
    yield "good_bf16", make(other(1, 5)), "accepted"
    yield "good_gpt2", make([20240326, 5, 1024, 50257, 12, 12, 768, 50304]), "accepted"
    yield "header_cut", make(good)[:-1], "expected an llm.c checkpoint, whose header has 1024"
    yield "magic", make(other(0, 20240520)), "begins with 20240520"
    yield "version", make(other(1, 4)), "version 4"
    for place in range(2, 8):
        yield names[place] + "_zero", make(other(place, 0)), "header word %d is 0; expected 1 to" % place
        yield names[place] + "_negative", make(good, 0)[: 8 + 4 * place] + b"\xff" * 4 + bytes(1024), "is -1; expected 1 to"
        yield names[place] + "_large", make(other(place, 2**26), 0), "header word %d is 67108864" % place
    yield "padded_less", make(other(7, 100)), "a vocabulary of 101 padded to 100"
    yield "heads_divide", make(other(5, 3)), "3 heads and width 32"
    yield "heads_size", make(other(5, 8)), "a multiple of 8"
    yield "all_large", make(good[:2] + [2**26 - 1] * 3 + [1, 2**26 - 8, 2**26 - 1], 2**64 - 1), "by its header"
    yield "bytes_less", make(good, 124415), "expected 124416 by its header; it was cut off"
    yield "bytes_more", make(good, 124417), "expected 124416 by its header"


def trainer_state():
    state = {
        "version": 1, "step": 20, "skipped": 1, "samples": 80, "micro_steps": 40, "best_val_loss": 3.25, "best_val_step": 10,
        "validation_due": False, "precision": "bf16",
        "files": [{"name": "a.bin", "tokens": 100}, {"name": "b.bin", "tokens": 50}],
        "data_changes": [{"first_epoch": 0, "files": 1}, {"first_epoch": 3, "files": 2}],
        "given": {"lr": "0.001"}, "resolved": {"lr": "0.001", "seed": "18446744073709551615"},
    }  # fmt: skip

    def make(**more):
        return json.dumps({**state, **more}).encode()

    def changes(*pairs):
        return make(data_changes=[{"first_epoch": epoch, "files": files} for epoch, files in pairs])

    yield "good", make(), "accepted"
    yield "good_no_validation", make(best_val_loss=None), "accepted"
    base = {"folder": "/models/base", "digest": "0123456789abcdef0123456789abcdef"}
    yield "good_base", make(base=base), "accepted"
    yield "base_type", make(base=1), "base is an integer"
    yield "base_folder_none", make(base={"digest": "0"}), "folder is absent"
    yield "base_digest_type", make(base={**base, "digest": 1}), "digest is an integer"
    yield "good_one_file", make(files=state["files"][:1], data_changes=state["data_changes"][:1]), "accepted"
    yield "cut", make()[:-1], "is not valid JSON"
    yield "empty", b"", "is empty; expected JSON"
    yield "array", b"[]", "is an array; expected an object"
    for key in state:
        if key != "best_val_loss":
            yield key + "_none", json.dumps({k: v for k, v in state.items() if k != key}).encode(), key + " is absent"
        yield key + "_type", make(**{key: [] if key in ("given", "resolved") else {"x": 1}}), key + " is a"
    for key in ("step", "skipped", "samples", "micro_steps", "best_val_step"):
        yield key + "_negative", make(**{key: -1}), key + " is -1; expected 0 to"
        yield key + "_large", make(**{key: 2**60}), key + " is %d" % 2**60
    yield "version", make(version=2), "version is 2; expected 1 to 1"
    yield "skipped_more", make(skipped=21), "skipped is 21; expected 0 to 20"
    yield "best_val_step_more", make(best_val_step=21), "best_val_step is 21; expected 0 to 20"
    yield "best_val_loss_large", make(best_val_loss=1e301), "best_val_loss is 1e+301"
    yield "precision", make(precision="fp16"), "precision is 'fp16'; expected bf16 or fp32"
    yield "files_empty", make(files=[]), "files has 0 members"
    yield "file_type", make(files=[1]), "name is absent"
    yield "file_name", make(files=[{"name": 1, "tokens": 1}]), "name is an integer"
    yield "file_tokens", make(files=[{"name": "a", "tokens": -1}]), "tokens is -1"
    yield "changes_empty", changes(), "data_changes has 0 members"
    yield "changes_many", changes((0, 1), (1, 2), (2, 2)), "data_changes has 3 members; expected 1 to 2"
    yield "change_first", changes((1, 2)), "first_epoch is 1; expected 0 to 0"
    yield "change_epoch", changes((0, 1), (0, 2)), "first_epoch is 0; expected 1 to"
    yield "change_files", changes((0, 2), (1, 2)), "files is 2; expected 3 to 2"
    yield "change_files_more", changes((0, 3)), "files is 3; expected 1 to 2"
    yield "change_last", changes((0, 1)), "data_changes ends with 1 of 2 files"
    first = {"name": "web", "weight": 7, "before": 0, "files": 1, "data_changes": [{"first_epoch": 0, "files": 1}]}

    def mixed(data_start=0, **more):
        return make(data_start=data_start, parts=[first, {**first, "name": "code", "weight": 3, "before": 5, **more}])

    yield "good_parts", mixed(), "accepted"
    yield "good_new_data", make(data_start=40, parts=[{**first, "files": 2, "data_changes": state["data_changes"]}]), "accepted"
    yield "data_start_none", make(parts=[first]), "data_start is absent"
    yield "data_start_more", mixed(data_start=81), "data_start is 81; expected at most samples, 80"
    yield "parts_type", make(parts=1), "parts is an integer"
    yield "parts_empty", make(data_start=0, parts=[]), "parts has 0 members; expected 1 to 64"
    yield "parts_few", make(data_start=0, parts=[first]), "parts have 1 of 2 files"
    yield "part_files", mixed(files=2), "files is 2; expected 1 to 1"
    yield "part_weight", mixed(weight=-1), "weight is -1; expected 0 to"
    yield "part_weights", mixed(weight=2**31 - 1), "weights are 2147483654 together; expected 1 to 2^31 - 1"
    yield "part_no_weights", make(data_start=0, parts=[{**first, "weight": 0}, {**first, "weight": 0}]), "weights are 0 together"
    yield "part_before", mixed(before=-1), "before is -1"
    yield "part_name", mixed(name=1), "name is an integer"
    yield "part_changes", mixed(data_changes=[{"first_epoch": 1, "files": 1}]), "first_epoch is 1; expected 0 to 0"
    yield "option_type", make(given={"lr": 0.001}), "lr is a number with a fraction"
    yield "option_nul", make(resolved={"lr": "\0"}), "lr is a string with a NUL byte"


def matmul_algorithms():
    keys = "abcdefghijklmnopqrstuv"
    title, machine = "train_gpt matmul algorithms 3", "library=130000 multiprocessors=132 gpu=NVIDIA H100 80GB HBM3"

    def row(**more):
        values = {**{key: 8 + i for i, key in enumerate(keys)}, "fused": 0, "candidate": 3, "first_us": 12.5, "us": "11.25",
                  "algorithm": "0123456789abcdef" * 8, **more}
        return " ".join("%s=%s" % item for item in values.items() if item[1] is not None)

    def make(*lines):
        return "".join(line + "\n" for line in lines).encode()

    yield "good", make(title, machine, row(), row(a=1, fused=1)), "accepted"
    yield "good_none", make(title, machine), "accepted"
    yield "empty", b"", "line 1: expected 2 lines"
    yield "title_alone", make(title), "line 2: expected 2 lines"
    yield "title", make("train_gpt matmul algorithms 2", machine), "line 1: expected 'train_gpt matmul algorithms 3'"
    yield "machine", make(title, row()), "line 2: expected library=, not 'a=8"
    yield "library", make(title, machine.replace("130000", "-1")), "line 2: expected library= and a number of 0 to"
    yield "gpu_none", make(title, machine.split(" gpu")[0]), "line 2: expected multiprocessors=VALUE and more"
    yield "gpu_long", make(title, machine + 200 * "x"), "line 2: expected gpu=VALUE"
    yield "cut", make(title, machine, row())[:-1], "line 3: does not end"
    yield "key_none", make(title, machine, row(), row(a=1, d=None)), "line 4: expected d=, not 'e=12"
    yield "key_text", make(title, machine, row(c="x")), "line 3: expected c= and a number of 0 to"
    yield "key_large", make(title, machine, row(c=2**50 + 1)), "line 3: expected c= and a number of 0 to"
    yield "key_nothing", make(title, machine, row(c="")), "line 3: expected c=VALUE"
    yield "key_nul", make(title, machine, row(c="1\0")), "line 3: expected c=VALUE and more"
    yield "twice", make(title, machine, row(), row(a=1), row(us=1)), "line 5: the product of line 3 again"
    yield "fused", make(title, machine, row(fused=2)), "line 3: expected fused= and a number of 0 to 1"
    yield "us_nan", make(title, machine, row(us="nan")), "line 3: expected us= and microseconds"
    yield "us_infinite", make(title, machine, row(us="1e999")), "line 3: expected us= and microseconds"
    yield "algorithm_short", make(title, machine, row(algorithm="ab" * 63)), "line 3: expected algorithm= and 128 hexadecimal"
    yield "algorithm_digit", make(title, machine, row(algorithm="xy" * 64)), "line 3: expected algorithm= and 128 hexadecimal"
    yield "more", make(title, machine, row() + " more=1"), "line 3: expected algorithm= and 128 hexadecimal"
    yield "many", make(title, machine, *(row(a=i) for i in range(129))), "line 131: more than 128 products"


def peft_config():
    settings = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "models/base",
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_to_transform": None,
        "layers_pattern": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2",
        "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    }  # fmt: skip

    def make(**more):
        return json.dumps({**settings, **more}).encode()

    yield "good", make(), "accepted"
    yield "good_least", b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": "all-linear"}', "accepted"
    yield "good_gpt2", make(fan_in_fan_out=True, target_modules=["c_attn"], lora_alpha=0.5, use_rslora=True), "accepted"
    yield "good_initialised", make(init_lora_weights="gaussian"), "accepted"
    yield "good_unknown_off", make(use_what_comes_next=False), "accepted"
    yield "cut", make()[:-1], "is not valid JSON"
    yield "array", b"[]", "is an array; expected an object"
    for key in ("peft_type", "r", "lora_alpha", "target_modules"):
        yield key + "_none", json.dumps({k: v for k, v in settings.items() if k != key}).encode(), key + " is absent"
        yield key + "_type", make(**{key: {"x": 1}}), key + " is an object"
    yield "ia3", make(peft_type="IA3"), "peft_type is 'IA3'; expected 'LORA'"
    yield "task", make(task_type="SEQ_CLS"), "task_type is 'SEQ_CLS'; expected 'CAUSAL_LM'"
    yield "rank_zero", make(r=0), "r is 0; expected 1 to"
    yield "rank_large", make(r=2**21), "r is 2097152; expected 1 to"
    yield "rank_number", make(r=1.5), "r is a number with a fraction"
    yield "alpha_zero", make(lora_alpha=0), "lora_alpha is 0; expected"
    yield "alpha_negative", make(lora_alpha=-8), "lora_alpha is -8; expected"
    yield "alpha_large", make(lora_alpha=1e10), "lora_alpha is 1e+10; expected"
    yield "dropout_one", make(lora_dropout=1), "lora_dropout is 1; expected 0 to"
    yield "bias", make(bias="all"), "bias is 'all'; expected 'none'"
    yield "dora", make(use_dora=True), "use_dora is true, which this program does not compute"
    yield "lora_bias", make(lora_bias=True), "lora_bias is true, which"
    yield "ranks", make(rank_pattern={"q_proj": 4}), 'rank_pattern is {"q_proj":4}, which'
    yield "alphas", make(alpha_pattern={"q_proj": 4}), 'alpha_pattern is {"q_proj":4}, which'
    yield "saved", make(modules_to_save=["lm_head"]), 'modules_to_save is ["lm_head"], which'
    yield "layers", make(layers_to_transform=[0]), "layers_to_transform is [0], which"
    yield "layer", make(layers_to_transform=0), "layers_to_transform is 0, which"
    yield "excluded", make(exclude_modules=["q_proj"]), 'exclude_modules is ["q_proj"], which'
    yield "unknown", make(use_what_comes_next=True), "use_what_comes_next is true, which"
    yield "unknown_bytes", make(**{"\u00e9\n": True}), "\\xc3\\xa9\\x0a is true, which"
    yield "pissa", make(init_lora_weights="pissa"), 'init_lora_weights is "pissa", with which'
    yield "initialised_type", make(init_lora_weights=[1]), "init_lora_weights is [1], with which"
    yield "targets_pattern", make(target_modules=".*_proj"), "target_modules is '.*_proj', which peft takes as a regular"
    yield "targets_empty", make(target_modules=[]), "target_modules is an empty list; expected a list of names"
    yield "target_type", make(target_modules=["q_proj", 1]), "target_modules[1] is an integer; expected a string"
    yield "target_nothing", make(target_modules=[""]), "target_modules[0] is empty; expected the name of a module"
    yield "target_comma", make(target_modules=["a,b"]), "target_modules[0] is 'a,b'; expected the name of a module"
    yield "target_control", make(target_modules=["a\n"]), "target_modules[0] is 'a\\x0a'; expected the name of a module"
    yield "base_type", make(base_model_name_or_path=1), "base_model_name_or_path is an integer"
    yield "fan_type", make(fan_in_fan_out=1), "fan_in_fan_out is an integer"


def json_field():
    def make(field, line):
        return field.encode() + b"\n" + line

    none = "no such text, or a parser must look"
    good = b'{"id": [1, {"text": "no"}, -0.5e-3, true], "text": "a text \\u00e9 \\ud83c\\udf89 \\\\ \\/ \\n", "z": null}'
    yield "good", make("text", good), "accepted"
    yield "good_end", make("text", b' {"text": ""} \r\n'), "accepted"
    yield "good_deep", make("a.b.c", b'{"a": {"b": {"c": "deep"}, "c": "x"}}'), "accepted"
    yield "good_dot", make("a.b", b'{"a.b": "name with a dot"}'), "accepted"
    yield "good_last", make("a.b", b'{"a": null, "a": {"b": "last"}}'), "accepted"
    yield "good_nul", make("text", b'{"text": "a\\u0000b"}'), "accepted"
    yield "good_numbers", make("text", b'{"n": [0, -0, 1e999, 123456789012345678901234567890, 0.1E+2], "text": "a"}'), "accepted"
    yield "field_none", b"text", "no line with a field's name"
    yield "absent", make("text", b'{"test": "a"}'), none
    yield "twice", make("text", b'{"text": "a", "text": "b"}'), none
    yield "both", make("a.b", b'{"a": {"b": "x"}, "a.b": "y"}'), none
    yield "gone", make("a.b", b'{"a": {"b": "x"}, "a": null}'), none
    yield "key_escape", make("text", b'{"te\\u0078t": "a"}'), none
    yield "half_pair", make("text", b'{"text": "\\ud83c"}'), none
    yield "utf8", make("text", b'{"text": "\xff"}'), none
    yield "control", make("text", b'{"text": "a\tb"}'), none
    yield "number", make("text", b'{"text": 3}'), none
    yield "zeros", make("text", b'{"text": "a", "n": 01}'), none
    yield "nan", make("text", b'{"text": "a", "n": NaN}'), none
    yield "digits", make("text", b'{"text": "a", "n": ' + 300 * b"1" + b"}"), none
    yield "nested", make("text", b'{"text": "a", "n": ' + 70 * b"[" + 70 * b"]" + b"}"), none
    yield "comma", make("text", b'{"text": "a",}'), none
    yield "cut", make("text", b'{"text": "a"'), none
    yield "more", make("text", b'{"text": "a"} {'), none
    yield "array", make("text", b'["text", "a"]'), none


for files in (shard, megatron_index, vocabulary, safetensors, safetensors_index, config, llmc, trainer_state, peft_config,
              matmul_algorithms, json_field):  # fmt: skip
    folder = CORPUS / files.__name__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    expected = []
    for name, data, words in files():
        (folder / name).write_bytes(data)
        expected.append("%s: %s\n" % (name, words))
    (CORPUS / (files.__name__ + ".expected")).write_text("".join(expected))
