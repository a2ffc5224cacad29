"""Time and memory to trace, cut and plan a large Hugging Face model, start-up included.

    python benchmarks/search/traced_search.py [--gpus 64] [--json]

The model has the shape of GPT-NeoX-20B (arXiv 2204.06745, section 2.1); only its configuration is
needed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parplan.profiles.units import GIB, KIB, format_bytes, format_seconds

ROOT = Path(__file__).resolve().parents[2]
NEOX_20B = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "num_hidden_layers": 44,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "vocab_size": 50432,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
    "hidden_act": "gelu_fast",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tie_word_embeddings": False,
}
MOST_S, MOST_BYTES = 30.0, 4 * GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(NEOX_20B))
        command = [
            sys.executable,
            "-c",
            "import cli; cli.main()",
            "--model",
            str(config),
            "--trace",
            "--gpus",
            str(options.gpus),
            "--global-batch-size",
            "1024",
            "--output",
            str(Path(folder) / "plan.yaml"),
            "--json",
        ]
        started_s = time.monotonic()
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        wall_s = time.monotonic() - started_s
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIB
    plan = json.loads(done.stdout)
    figures = {
        "wall_s": round(wall_s, 2),
        "peak_bytes": peak_bytes,
        "operators": plan["traced"]["num_operators"],
        "shards": len(plan["shards"]),
        "parameters": plan["traced"]["num_parameters"],
        "gap": plan["search"]["gap"],
        "candidates": plan["search"]["candidates"],
        "within": wall_s <= MOST_S and peak_bytes <= MOST_BYTES,
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(
        f"{figures['parameters'] / 1e9:.1f} B parameters, {figures['operators']} "
        f"operators in {figures['shards']} shards, {options.gpus} GPUs"
    )
    print(f"{format_seconds(wall_s)} (at most {format_seconds(MOST_S)})")
    print(f"peak {format_bytes(peak_bytes)} (at most {format_bytes(MOST_BYTES)})")
    print(
        f"gap {figures['gap']:.1%}, {figures['candidates']['solved']} of "
        f"{figures['candidates']['considered']} candidates solved"
    )


if __name__ == "__main__":
    main()
