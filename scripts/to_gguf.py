#!/usr/bin/env python3
"""Converts a model to GGUF, the format of llama.cpp and Ollama, by llama.cpp's own converter.

  scripts/to_gguf.py out/mine --llama-cpp ~/llama.cpp --out mine.gguf
  llama-cli -m mine.gguf -no-cnv --temp 0 -p 'Once upon a time'

MODEL is a checkpoint, a merged model or any folder of Hugging Face that the converter knows; of a run's folder its
newest checkpoint. The folder of llama.cpp is a clone of it (github.com/ggml-org/llama.cpp), or vendor/llama.cpp in the
source of the Python package llama-cpp-python. Its converter needs the packages torch, transformers and sentencepiece.

The converter knows how a tokenizer splits text by a list of published tokenizers. For one that is not in it, as
train_tokenizer.py's or bytes, this script says which of llama.cpp's ways to split is the tokenizer's own. Text then has
the same tokens in both programs. A tokenizer that splits in another way is refused.
"""

import argparse
import importlib.util
import json
import logging
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import train_tokenizer  # noqa: E402: lies beside this file
from mistakes import Mistake, run_script  # noqa: E402

CONVERTER = "convert_hf_to_gguf.py"
PACKAGES = ["numpy", "torch", "transformers", "sentencepiece"]
# llama.cpp's names of ways to split. "llama-bpe" splits as "smaug-bpe" does, and takes words that are tokens whole.
GPT2, LLAMA3, LLAMA3_WHOLE_WORDS = "gpt-2", "smaug-bpe", "llama-bpe"
NO_MERGE = "<|endoftext|> <|endoftext|>"  # llama.cpp wants one at least; this one joins no bytes


def model_folder(path):
    """Returns the folder of the model: of a run's folder its newest checkpoint's."""
    checkpoints = os.path.join(path, "checkpoints")
    if os.path.isdir(checkpoints) and not os.path.exists(os.path.join(path, "model.safetensors")):
        steps = sorted(name for name in os.listdir(checkpoints) if re.fullmatch(r"step_\d+", name) and os.path.exists(os.path.join(checkpoints, name, "manifest.json")))
        if not steps:
            raise Mistake(f"{path}: the run has no checkpoint yet")
        path = os.path.join(checkpoints, steps[-1])
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        raise Mistake(f"{path}: holds adapters only; merge them first: train_gpt --init-from BASE --lora-adapter {path} --lora-merge FOLDER")
    for name, what in (("config.json", "a model's folder"), ("tokenizer.json", "a model with a tokenizer: prepare_data.py's files beside the shards bring it")):
        if not os.path.exists(os.path.join(path, name)):
            raise Mistake(f"{path}: has no {name}; expected {what}")
    return path


def way_to_split(tokenizer):
    """Returns llama.cpp's name of the way in which a tokenizer.json splits text; raises Mistake where it has none."""
    model, steps = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") if steps.get("type") == "Sequence" else [steps]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or steps[-1].get("type") != "ByteLevel":
        raise Mistake("is no byte-level BPE")
    if tokenizer.get("normalizer") or steps[-1].get("add_prefix_space"):
        raise Mistake("changes the text before it is split")
    if not model["merges"]:
        return GPT2  # bytes, wherever they are split
    splits = [step["pattern"].get("Regex") if step.get("type") == "Split" else None for step in steps[:-1]]
    splits += [train_tokenizer.PATTERNS["gpt2"]] if steps[-1].get("use_regex", True) else []
    if splits == [train_tokenizer.PATTERNS["gpt2"]]:
        return GPT2
    if splits == [train_tokenizer.PATTERNS["llama3"]]:
        return LLAMA3_WHOLE_WORDS if model.get("ignore_merges") else LLAMA3
    raise Mistake("splits text in a way that is neither GPT-2's nor Llama 3's")


def load_converter(folder):
    """Returns the converter as a module that has not run, and the class that names tokenizers."""
    path = os.path.join(folder, CONVERTER)
    if not os.path.exists(path):
        raise Mistake(f"--llama-cpp {folder}: has no {CONVERTER}; expected a clone of https://github.com/ggml-org/llama.cpp")
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise Mistake(f"llama.cpp's converter needs the Python packages {', '.join(missing)}: pip install {' '.join(missing)}")
    sys.path.insert(0, os.path.abspath(folder))  # of its other modules
    specification = importlib.util.spec_from_file_location("convert_hf_to_gguf", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    names = getattr(module, "TextModel", None) or getattr(sys.modules.get("conversion.base"), "TextModel", None)
    if not hasattr(names, "get_vocab_base_pre"):
        raise Mistake(f"{path}: is of a version that to_gguf.py does not know")
    return module, names


def teach(names, special_vocabulary, folder):
    """Makes the converter take a tokenizer that is not in its list."""
    known, add = names.get_vocab_base_pre, special_vocabulary.add_to_gguf

    def name_of(self, tokenizer):
        try:
            logging.disable(logging.WARNING)  # twelve lines where the list lacks it
            return known(self, tokenizer)
        except NotImplementedError:
            with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as file:
                try:
                    name = way_to_split(json.load(file))
                except Mistake as mistake:
                    raise Mistake(f"{file.name}: {mistake}; llama.cpp's list has no such tokenizer") from None
            print(f"to_gguf.py: llama.cpp's list lacks the tokenizer; it splits text as {name} there", flush=True)
            return name
        finally:
            logging.disable(logging.INFO)

    def add_with_merges(self, *arguments, **options):
        if self.load_merges and not self.merges:
            self.merges = [NO_MERGE]
        return add(self, *arguments, **options)

    names.get_vocab_base_pre, special_vocabulary.add_to_gguf = name_of, add_with_merges


def convert(options):
    folder = model_folder(options.model)
    part = options.out + ".part"
    module, names = load_converter(options.llama_cpp)
    teach(names, sys.modules["gguf"].SpecialVocab, folder)
    logging.disable(logging.INFO)  # a line a tensor
    sys.argv = [CONVERTER, folder, "--outfile", part, "--outtype", options.outtype]
    try:
        module.main()
        os.replace(part, options.out)
    except (Mistake, OSError):
        raise
    except SystemExit as end:  # the converter has said why
        raise Mistake(f"{folder}: llama.cpp's converter ended with status {end.code}") from None
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise Mistake(f"{folder}: llama.cpp's converter ended with {type(error).__name__}: {line}") from None
    finally:
        if os.path.exists(part):
            os.remove(part)
    print(f"{options.out}: {os.path.getsize(options.out):,} bytes, of {folder}")


def parse_options(arguments):
    parser = argparse.ArgumentParser(prog="to_gguf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint, a run's folder, or another folder of Hugging Face")
    parser.add_argument("--llama-cpp", default="llama.cpp", metavar="FOLDER", help="where llama.cpp's source is (default: llama.cpp)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--outtype", default="auto", metavar="TYPE", help="of the weights: f32, f16, bf16, q8_0 or auto, the model's own (default: auto)")
    return parser.parse_args(arguments)


def main(arguments=None):
    return run_script("to_gguf.py", lambda: convert(parse_options(arguments)))


if __name__ == "__main__":
    sys.exit(main())
