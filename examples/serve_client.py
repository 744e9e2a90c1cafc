"""Request an image from a running server by OpenAI's API; writes serve_client.png. It does not need the package.

python -m ppdiffusers_tome export --model examples/scenes_sd --output build/scenes --ratio 0.75 0 --img2img
python -m ppdiffusers_tome serve --model build/scenes --port 8000
"""

import base64
from pathlib import Path

import requests

URL = "http://127.0.0.1:8000"

body = {"prompt": "a 3d render of fox on red bricks", "seed": 7, "tome_ratio": 0.75}
# A server with a key: headers={"Authorization": f"Bearer {key}"}
response = requests.post(f"{URL}/v1/images/generations", json=body, timeout=600)
if not response.ok:
    raise SystemExit(f"{response.status_code}: {response.text}")
Path("serve_client.png").write_bytes(base64.b64decode(response.json()["data"][0]["b64_json"]))
print("wrote serve_client.png")
