"""Tables and pictures of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = {
    "n": "{:.0f}",
    "kl_mean": "{:.4f}",
    "kl_p95": "{:.4f}",
    "top1": "{:.3f}",
    "first_divergence_p50": "{:.0f}",
    "perplexity_ratio": "{:.3f}",
    "token_reuse": "{:.0%}",
    "call_reuse": "{:.0%}",
    "fresh_tokens": "{:.0f}",
    "harm_rate": "{:.0%}",
    "wrong_accept": "{:.1%}",
    "wrong_reject": "{:.1%}",
    "ttft_ratio_p50": "{:.2f}",
    "ttft_ratio_p90": "{:.2f}",
    "pool_bytes": "{:,.0f}",
}


def show(console: Console, name: str, setting: dict[str, Any]) -> None:
    table = Table(title=f"Setting {name}")
    table.add_column("policy")
    for column in _COLUMNS:
        table.add_column(column.replace("_", " "), justify="right")
    for policy, figures in setting["policies"].items():
        table.add_row(policy, *(form.format(figures[column]) for column, form in _COLUMNS.items()))
    console.print(table)
    for policy, figures in setting["policies"].items():
        if figures["reasons"]:
            console.print(f"  {policy}: dense segments because of {figures['reasons']}")
    show_calibrations(console, setting["calibration"])
    for control, figures in setting["controls"].items():
        console.print(
            f"  control {control}: KL {figures['kl_mean']:.3f} against {figures['reposition_kl_mean']:.3f} when only moved: "
            f"{'far worse, as it must be' if figures['passed'] else 'NOT far worse, the measurement is broken'}"
        )


def show_calibrations(console: Console, fitted: dict[str, dict[str, Any]]) -> None:
    """One line per template: verdict, gate, and how well each signal tells good turns from bad ones."""
    for agent, found in fitted.items():
        rates = ", ".join(f"{signal} {value:.2f}" for signal, value in sorted(found["auc"].items()))
        console.print(
            f"  calibration of {agent}: {'reuse' if found['usable'] else 'no reuse'}, gate {found['signal']}, "
            f"{found['accepted']:.0%} of {found['audits']} audits accepted, KL p95 {found['kl_p95']:.4f}, "
            f"top-1 {found['top1']:.3f}; AUC {rates}"
        )


def draw(path: Path, settings: dict[str, Any]) -> None:
    """Mean KL with its interval against the share of freshly computed tokens, one panel per setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(settings), figsize=(4.6 * len(settings), 4.2), layout="constrained", squeeze=False)
    for axis, (name, setting) in zip(axes[0], settings.items(), strict=True):
        for index, (policy, figures) in enumerate(setting["policies"].items()):
            low, high = figures["kl_mean_interval"]
            mean = max(figures["kl_mean"], 1e-5)
            error = [[max(0.0, mean - max(low, 1e-5))], [max(0.0, high - mean)]]
            axis.errorbar(1 - figures["token_reuse"], mean, yerr=error, marker="o", capsize=3, color=f"C{index}", label=policy)
        axis.set_yscale("log")
        axis.set_xlabel("share of prompt tokens computed")
        axis.set_title(f"{name} (n = {next(iter(setting['policies'].values()))['n']})")
    axes[0][0].set_ylabel("mean KL to dense (nats)")
    axes[0][-1].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
