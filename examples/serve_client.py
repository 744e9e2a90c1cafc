"""An image from a running server, by OpenAI's API: `python -m ppdiffusers_tome serve --model emoji_export`."""

import base64
from pathlib import Path

import requests

URL = "http://127.0.0.1:8000"
HEADERS = {}  # {"Authorization": "Bearer KEY"} if the server has a key

body = {"prompt": "a 3d render of fox", "seed": 0, "steps": 20, "guidance_scale": 2.0, "tome_ratio": 0.5}
answer = requests.post(f"{URL}/v1/images/generations", json=body, headers=HEADERS, timeout=600)
answer.raise_for_status()
Path("served.png").write_bytes(base64.b64decode(answer.json()["data"][0]["b64_json"]))
