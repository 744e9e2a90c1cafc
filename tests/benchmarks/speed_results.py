"""Small speed results with known answers, for the tests of what reads them."""

import json

from lab.arm import Arm
from lab.speed.cases import Case, Measurement

from ppdiffusers_tome import ToMeConfig


def config(ratio, **settings):
    """The config of an arm by tomesd's method with fixed dst, which the built-in ToMe must equal; None at ratio 0."""
    return ToMeConfig(ratio, "tomesd", use_rand=False, **settings) if ratio else None


def arm(seconds, ratio=0.0, *, status="measured", memory=None, attention="plain", backend="eager", **fields):
    """One arm; `seconds` has one number per round, `memory` is in GB."""
    costs = {"seconds": list(seconds), "peak_memory_bytes": memory and int(memory * 10**9), "macs": 10**9}
    costs["parity"] = {"against": "its reference", "difference": 2e-6}
    reason = None if status == "measured" else "the allocator failed"
    made = Arm(config(ratio), attention=attention, backend=backend)
    return {**Measurement(made, status=status, reason=reason, **costs).to_json(), **fields}


def case(arms, *, size=512, batch=2, **fields):
    about = Case("sd15", size=size, batch=batch, latent=[size // 8, size // 8], tokens=(size // 8) ** 2)
    return {**about.to_json(), "arms": arms, **fields}


def result(cases, *, machine="Test CPU", **fields):
    environment = {"machine": machine, "cores": 2, "device": "cpu", "python": "3.11.9", "paddlepaddle": "2.6.2"}
    environment |= {"paddlepaddle-gpu": "not installed", "ppdiffusers": "0.29.0", "ppdiffusers_tome": "0.9.0"}
    about = {"kind": "speed", "format": 4, "commit": "abc1234", "environment": environment, "rounds": 3, "threads": 1}
    return {**about, "command": "python benchmarks/bench.py", "cases": cases, **fields}


def write(path, data):
    """Write a result, or any text, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path
