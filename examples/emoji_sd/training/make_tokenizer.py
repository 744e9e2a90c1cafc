"""Learn a BPE of 2,048 entries in CLIP's format from the captions.

    python make_tokenizer.py

Writes model/tokenizer/ under $EMOJI_WORK.
"""

import json
import os
import re
from itertools import pairwise
from pathlib import Path

from transformers import CLIPTokenizer
from transformers.models.clip.tokenization_clip import bytes_to_unicode

WORK = os.environ.get("EMOJI_WORK", "work")
SIZE = 2048
words = {}
for row in json.loads(Path(WORK, "captions.json").read_text()):
    if row["category"] == "Objects" or row["caption"].startswith("a cartoon"):
        continue
    for w in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]+", row["caption"].lower()):
        words[w] = words.get(w, 0) + 1
letters = list(bytes_to_unicode().values())
vocab = letters + [c + "</w>" for c in letters]
merges = []
split = {w: (*w[:-1], w[-1] + "</w>") for w in words}
while len(vocab) < SIZE - 2:
    pairs = {}
    for w, s in split.items():
        for p in pairwise(s):
            pairs[p] = pairs.get(p, 0) + words[w]
    if not pairs:
        break
    best = max(pairs, key=lambda p: (pairs[p], p))
    merges.append(best)
    vocab.append("".join(best))
    for w, s in split.items():
        out = []
        for c in s:
            if out and (out[-1], c) == best:
                out[-1] += c
            else:
                out.append(c)
        split[w] = tuple(out)
vocab += ["<|startoftext|>", "<|endoftext|>"]
out = WORK + "/model/tokenizer"
os.makedirs(out, exist_ok=True)
Path(out, "vocab.json").write_text(json.dumps({v: i for i, v in enumerate(vocab)}))
Path(out, "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n")
CLIPTokenizer(out + "/vocab.json", out + "/merges.txt", model_max_length=24).save_pretrained(out)
print(len(vocab), "entries")
