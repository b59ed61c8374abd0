"""Write docs/results.md and its pictures from the figures that `make results` has made before it calls this."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from kvcache_service.evaluation.scenes import CONTINUATION

ROOT = Path(__file__).parents[1]
OUT, DOCS = ROOT / "out", ROOT / "docs"
MADE = "Made by `{}` on two CPU cores, SmolLM2-135M-Instruct in float32. Compare times within one table only."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def interval(figures: Mapping[str, Any], key: str) -> str:
    low, high = figures[f"{key}_interval"]
    return f"{figures[key]:.4f} [{low:.4f}, {high:.4f}]"


def introduction(figures: Mapping[str, Any]) -> str:
    return (
        "## Policies on the same turns\n\n"
        + MADE.format("make results")
        + " Pools learn and thresholds are fitted on the odd lines of the datasets; even lines are measured. Distance "
        "is over the first 13 (A, B, C) or 32 (agents) next-token positions of the dense continuation, brackets "
        "are 95 % bootstrap intervals. Every policy sees the same tokens and the "
        "same bases, those that the service itself keeps. A name with `:B+T` recomputes B tokens of each placeholder "
        "and T last prompt tokens; `reposition` and `recompute` use no offsets; `reference` is the paper's policy in the "
        "reference code's frame, with span weights from the mean absolute difference (there per token, K and V apart). `fresh` "
        "counts the tokens that were computed. Harm: farther from dense than re-positioned KV with the same recompute. Wrong "
        f"accept and reject: of all turns, against {_target(figures)} nats.\n\n"
    )


def evaluation(figures: Mapping[str, Any]) -> str:
    text = ""
    for name, policies in figures["settings"].items():
        n = next(iter(policies.values()))["n"]
        learned, fitted = figures["options"]["warmup"], figures["options"]["calibration"]
        text += f"### {_title(name, figures['options'])}\n\nn = {n}; pools learned from {learned} questions, thresholds "
        text += f"from {fitted} more.\n\n"
        head = ["policy", "fresh", "KL mean", "KL p95", "top-1", "first divergence", "perplexity", "token reuse", "harm"]
        head += ["wrong accept", "wrong reject", "TTFT / dense p50 (p90)", "pool MB"]
        text += table(head, (_policy_row(policy, f) for policy, f in policies.items()))
        text += _notes(figures["details"][name])
    return text


TITLES = {
    "A": "A: a question behind another fixed prefix",
    "B": "B: an answer behind a prefix and its question",
    "C": "C: as A, pools from GSM8K, spans from HumanEval",
}


def _title(name: str, options: Mapping[str, Any]) -> str:
    if name in TITLES:
        return TITLES[name]
    team = f"{options['agents']} agents on {name.removeprefix('agents-')}"
    if options["topology"] == "judge":
        return f"The judge of {team}, candidates shuffled"
    return f"{team}, {'in a chain' if options['topology'] == 'chain' else 'fully connected'}"


def _target(figures: Mapping[str, Any]) -> str:
    return f"{next(iter(figures['details'].values()))['target_kl']:g}"


def _policy_row(name: str, f: Mapping[str, Any]) -> list[str]:
    divergence = f["first_divergence_p50"]
    return [
        name,
        f"{f['fresh_tokens']:.0f}",
        interval(f, "kl_mean"),
        f"{f['kl_p95']:.4f}",
        f"{f['top1']:.4f}",
        "none" if divergence == CONTINUATION else f"{divergence:.0f}",
        f"{f['perplexity_ratio']:.3f}×",
        f"{f['token_reuse']:.0%}",
        f"{f['harm_rate']:.0%}",
        f"{f['wrong_accept']:.1%}",
        f"{f['wrong_reject']:.1%}",
        f"{f['ttft_ratio_p50']:.2f} ({f['ttft_ratio_p90']:.2f})",
        f"{f['pool_bytes'] / 1e6:.0f}" if f["pool_bytes"] else "–",
    ]


def _notes(details: Mapping[str, Any]) -> str:
    lines = []
    for mine, others in details["paired"].items():
        pairs = [
            f"{other} {p['difference']:+.4f} [{p['interval'][0]:+.4f}, {p['interval'][1]:+.4f}]" for other, p in others.items()
        ]
        lines.append(f"Paired, mean KL of {mine} minus that of: {', '.join(pairs)}.")
    for agent, found in details["calibration"].items():
        rates = ", ".join(f"{signal} {value:.2f}" for signal, value in sorted(found["auc"].items()))
        lines.append(
            f"Calibration of {agent}: {found['audits']} audits, {found['accepted']:.0%} accepted, gate {found['signal']}; AUC of "
            f"each signal against true KL: {rates}."
        )
    for name, c in details["controls"].items():
        lines.append(f"Control, {name} KV: KL {c['kl_mean']:.2f} against {c['reposition_kl_mean']:.4f} when only moved.")
    return "".join(f"- {line}\n" for line in lines) + "\n"


def paper(figures: Mapping[str, Any]) -> str:
    options = figures["options"]
    text = (
        "## The paper's tables on this model\n\n"
        + MADE.format("make results")
        + " Tables 1, 5 and 6 are one run of five fully connected agents on GSM8K "
        f"(warm-up {options['warmup']}, calibration {options['calibration']}, {options['requests']} measured questions, four "
        "reusing agents each). The base KV is the origin context's, as everywhere in this service; the paper's is text read "
        "alone, which is why its own figures without offsets are far worse than ours.\n\n"
    )
    return text + _table_1(figures) + _table_2_and_3(figures) + _table_4(figures) + _table_5(figures) + _table_6(figures)


def _table_1(figures: Mapping[str, Any]) -> str:
    rows = (
        [
            str(a["agents"]),
            a["policy"],
            str(a["n"]),
            interval(a, "top1"),
            f"{a['kl_mean']:.4f}",
            f"{a['identical']:.0%}",
            f"{a['token_reuse']:.0%}",
        ]
        for a in figures["agents"]
    )
    head = ["agents", "policy", "n", "top-1 agreement with dense", "KL mean", "64 greedy tokens identical", "token reuse"]
    note = (
        "The paper reports task accuracy. A model of 135M parameters does not solve these tasks, so agreement with its own dense "
        "answers stands instead: it is also the stricter measure.\n\n"
    )
    return "### Table 1: agents\n\n" + table(head, rows) + note


def _table_2_and_3(figures: Mapping[str, Any]) -> str:
    rows = figures["lengths"]
    longest = max((r["in"], r["out"]) for r in rows)
    by_agent = [r for r in rows if (r["in"], r["out"]) == longest]
    text = f"### Table 2: TTFT by agent ({longest[0]} tokens in, {longest[1]} out, role prompts of 128)\n\n"
    head = ["agent", "policy", "prompt", "TTFT dense", "TTFT", "speedup (min to max)"]
    text += table(
        head,
        (
            [
                r["agent"],
                r["policy"],
                f"{r['prompt_tokens']:.0f}",
                f"{1e3 * r['ttft_dense_s']:.0f} ms",
                f"{1e3 * r['ttft_s']:.0f} ms",
                f"{r['speedup']:.1f}× ({r['speedup_min']:.1f} to {r['speedup_max']:.1f})",
            ]
            for r in by_agent
        ),
    )
    text += (
        "Everything is counted: match, fetch, assembly, recomputed tokens, first forward; the paper's timer leaves out base "
        "forward, gate and copies. Lengths are shorter than the paper's (1K in, 512 out), which a CPU cannot prefill in "
        "reasonable time; the first agent's question is new in every scene, so it is dense and not listed.\n\n"
        "### Table 3: speedup by length, median over agents 2 to 5\n\n"
    )
    cells: dict[tuple[int, int], dict[str, list[float]]] = {}
    for r in rows:
        cells.setdefault((r["in"], r["out"]), {}).setdefault(r["policy"], []).append(r["speedup"])
    middle = {cell: {p: sorted(v)[len(v) // 2] for p, v in policies.items()} for cell, policies in cells.items()}
    text += table(
        ["in × out", "guarded", "paper"],
        ([f"{i} × {o}", f"{p['guarded']:.1f}×", f"{p['paper']:.1f}×"] for (i, o), p in middle.items()),
    )
    return text


def _table_4(figures: Mapping[str, Any]) -> str:
    rows = (
        [
            o["order"],
            o["policy"],
            str(o["n"]),
            f"{o['call_reuse']:.0%}",
            f"{o['token_reuse']:.0%}",
            f"{o['kl_mean']:.4f}",
            f"{o['top1']:.4f}",
        ]
        for o in figures["order"]
    )
    return (
        "### Table 4: order of requests, from cold pools\n\n"
        + table(["order of length", "policy", "n", "call reuse", "token reuse", "KL mean", "top-1"], rows)
        + "Two reusing agents. The guarded policy waits for 12 samples in every slot, whatever their order; the paper's policy "
        "runs beside it on the same pools, which only the dense turns of the guarded one fill. In ascending order it finds no "
        "anchor that is long enough, as the paper saw.\n\n"
    )


def _table_5(figures: Mapping[str, Any]) -> str:
    rows = (
        [*name, interval(figures["variants"][name], "kl_mean"), f"{figures['variants'][name]['top1']:.4f}"]
        for name in figures["variants"]
        if set(name) <= {"✓", "–"}
    )
    return (
        "### Table 5: alignment ablation of the paper's policy, gate open\n\n"
        + table(["rotation", "placeholder offsets", "following-segment offsets", "KL mean", "top-1"], rows)
        + "![Alignment ablation](alignment.png)\n\n"
    )


def _table_6(figures: Mapping[str, Any]) -> str:
    variants = figures["variants"]
    names = [n for n in variants if n.startswith(("γ=", "V="))]
    rows = (
        [n, f"{variants[n]['accept']:.0%}", f"{variants[n]['token_reuse']:.0%}", interval(variants[n], "kl_mean")] for n in names
    )
    return (
        "### Table 6: γ and V of the paper's policy\n\n"
        + table(["", "turns reused", "token reuse", "KL mean over all turns"], rows)
        + "γ runs over smaller values than the paper's 0.1 to 0.9: on raw norms the softmax of this model is nearly one-hot, so "
        "its entropy is small and the gate opens early. V is varied by using the oldest V anchors, gate open.\n\n"
    )


def draw_alignment(figures: Mapping[str, Any]) -> None:
    names = [n for n in figures["variants"] if set(n) <= {"✓", "–"}]
    figure, axis = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    means = [figures["variants"][n]["kl_mean"] for n in names]
    lows = [figures["variants"][n]["kl_mean_interval"][0] for n in names]
    highs = [figures["variants"][n]["kl_mean_interval"][1] for n in names]
    errors = [[m - low for m, low in zip(means, lows, strict=True)], [h - m for h, m in zip(highs, means, strict=True)]]
    axis.bar(names, means, yerr=errors, capsize=3)
    axis.set_yscale("log")
    axis.set_ylabel("mean KL to dense (nats)")
    axis.set_xlabel("rotation · placeholder · following segment")
    figure.savefig(DOCS / "alignment.png", dpi=120)
    plt.close(figure)


def data_path(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = (
        (
            row["bench"],
            row["case"],
            f"{1e3 * row['seconds_p50']:.2f}",
            f"{1e3 * row['seconds_p99']:.2f}",
            f"{1e3 * row['floor_seconds_p50']:.2f}",
            f"{row['ratio']:.2f}",
            row["floor"],
        )
        for row in rows
    )
    return (
        "\n## The data path beside its floors\n\n"
        "Made by `kvcache bench` on two CPU cores, nothing else running; client, service and floor share them. Case and floor "
        "are timed in turns; medians and the 99 % quantile in milliseconds. Synthetic KV has 32 KiB a token in bfloat16; first "
        "tokens are SmolLM2's in float32. A store counts from OpenTurn to the settled turn.\n\n"
        + table(["bench", "case", "p50 ms", "p99 ms", "floor ms", "ratio", "floor"], cells)
        + "![Ratios to the floor](bench.png)\n"
    )


def side_by_side(rows: Sequence[Mapping[str, Any]]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    found = {(row["bytes"], row["clients"], row["act"], row["system"]): row for row in rows}
    cells = []
    for size, clients, act in dict.fromkeys((row["bytes"], row["clients"], row["act"]) for row in rows):
        here = (found[size, clients, act, name] for name in systems)
        times = (f"{1e3 * r['seconds_p50']:.2f} [{1e3 * r['seconds_p25']:.2f}, {1e3 * r['seconds_p75']:.2f}]" for r in here)
        cells.append((f"{act} {size >> 10} KiB, {clients} client{'s' * (clients > 1)}", *times))
    return (
        "\n## Beside other stores\n\n"
        "Made by `benchmarks/side_by_side.py` on two CPU cores, nothing else running: milliseconds, median and quartiles, one "
        "system after the other. LMCache 0.5.6 by its gRPC server, Mooncake Store by TCP with registered buffers, Valkey by SET "
        "and GET. A store of ours counts from OpenTurn to the settled turn, a retrieve turns the keys to their position; the "
        "others hand back the bytes that they were given.\n\n" + table(["case", *systems], cells)
    )


def main() -> None:
    text = "# Results\n\nEvery number here comes out of a script; times are ratios within one run.\n\n"
    for number, name in enumerate(("spans", "teams", "judge")):
        figures = json.loads((OUT / f"{name}.json").read_text())
        text += ("" if number else introduction(figures)) + evaluation(figures) + f"![Distance against budget]({name}.png)\n\n"
        shutil.copy(OUT / f"{name}.png", DOCS / f"{name}.png")
    tables = json.loads((OUT / "paper_tables.json").read_text())
    draw_alignment(tables)
    text += paper(tables)
    text += data_path(json.loads((OUT / "bench.json").read_text())["rows"])
    shutil.copy(OUT / "bench.png", DOCS / "bench.png")
    text += side_by_side(json.loads((OUT / "side_by_side.json").read_text())["rows"])
    (DOCS / "results.md").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
