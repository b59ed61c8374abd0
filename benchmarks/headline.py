"""Write the README's table from the figures of the last `make demo` (out/demo.json, out/demo.png).

make demo && .venv/bin/python benchmarks/headline.py
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- headline -->\n).*?(<!-- /headline -->)", re.DOTALL)
HEAD = "| agent | prompt | TTFT dense | TTFT with the cache | speedup | KL to dense | top-1 |\n|---|---|---|---|---|---|---|\n"


def main() -> None:
    figures = json.loads((ROOT / "out/demo.json").read_text())
    turns, total = figures["turns"], figures["summary"]
    lines = []
    for agent in dict.fromkeys(t["agent"] for t in turns):
        mine = [t for t in turns if t["agent"] == agent]
        dense, cached = (1e3 * statistics.median(t[key] for t in mine) for key in ("ttft_dense_s", "ttft_s"))
        speedup = statistics.median(t["ttft_dense_s"] / t["ttft_s"] for t in mine)
        kl, top1 = (statistics.fmean(t[key] for t in mine) for key in ("kl", "top1"))
        prompt = statistics.median(t["prompt_tokens"] for t in mine)
        lines.append(f"| {agent} | {prompt:.0f} | {dense:.0f} ms | {cached:.0f} ms | {speedup:.1f}× | {kl:.4f} | {top1:.3f} |\n")
    beside = figures["beside"].get("paper")
    closing = (
        f"\n{len(turns)} turns: {total['token_reuse']:.0%} of prompt tokens reused, {total['call_reuse']:.0%} of calls; "
        f"mean KL {total['kl_mean']:.4f}, p95 {total['kl_p95']:.4f}, top-1 agreement {total['top1']:.3f}."
    )
    if beside:
        other = beside["summary"]
        closing += (
            f"\nKVCOMM's policy on the same turns, on our bases: {other['token_reuse']:.0%} of tokens, "
            f"{other['call_reuse']:.0%} of calls, mean KL {other['kl_mean']:.4f}, top-1 {other['top1']:.3f}.\n"
            "Made by `make demo` and `benchmarks/headline.py`."
        )
    readme = ROOT / "README.md"
    text = BLOCK.sub(lambda m: m[1] + HEAD + "".join(lines) + closing + "\n" + m[2], readme.read_text())
    readme.write_text(text)
    shutil.copy(ROOT / "out/demo.png", ROOT / "docs/demo.png")


if __name__ == "__main__":
    main()
