"""Draws the figures of the guides into docs/images/guides; `make docs` calls it.

    python docs/guide_figures.py            draws those that are out of date

Each figure says from what it was drawn: a digest of this file and of the results of the benchmarks
that it shows. `docs/build.py --check` compares the digests, which needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from guide_tables import RESULTS, result
from update_timelines import Span, timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / "images" / "guides"
BLUE, ORANGE, GREEN, GREY, RED = "#3b6fb6", "#e08a2e", "#3f9c5a", "#c9ced6", "#c0392b"
SOURCES = (__file__, Path(__file__).with_name("update_timelines.py"))


def updates(figure: Figure) -> None:
    """Who waits for whom under four strategies, one worker of four being slower."""
    panels = timelines()
    for axes, (title, spans) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for span in spans:
            draw_span(axes, span)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_yticks(range(4), [f"worker {index}" for index in range(4)], fontsize=7)
        axes.set_xlim(0, 20)
        axes.set_ylim(3.5, -0.5)
        axes.set_xticks([])
        bare(axes)
    figure.legend(
        handles=[
            patch(BLUE, "computes"),
            patch(GREY, "waits"),
            patch(RED, "late: dropped, its examples are dealt again"),
        ],
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    figure.subplots_adjust(left=0.09, right=0.99, top=0.93, bottom=0.1, wspace=0.18, hspace=0.3)


def draw_span(axes: Axes, span: Span) -> None:
    """Draws one stretch of a worker's time."""
    colour = {"computes": BLUE, "waits": GREY, "late": RED}[span.doing]
    place = (span.worker - 0.32, 0.64)
    width = span.end - span.start
    axes.broken_barh([(span.start, width)], place, color=colour, edgecolor="white", linewidth=0.8)


def collectives(figure: Figure) -> None:
    """What servers, all-reduce and DDP make of three models, against loops that never talk."""
    names = ("Trireme async", "Trireme sync", "Trireme allreduce", "DDP over gloo")
    groups = (("MLP 784-100-10", "replica", ""), ("LeNet-5", "networks", "LeNet-5 on 28x28"))
    groups += (("CIFAR network", "networks", "CIFAR network on 24x24"),)
    axes = figure.subplots()
    for place, (_, name, condition) in enumerate(groups):
        entries = {
            e["contender"]: e for e in result(name)["entries"] if e["condition"] == condition
        }
        for index, contender in enumerate(names):
            ratio = entries[contender]["ratios"]["two loops"]
            colour = (BLUE, GREEN, ORANGE, GREY)[index]
            axes.bar(place + 0.2 * (index - 1.5), ratio, 0.18, color=colour)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(3), [title for title, *_ in groups])
    axes.set_ylabel("steps a second, of two loops\nthat never talk")
    colours = (BLUE, GREEN, ORANGE, GREY)
    handles = [patch(colour, name) for colour, name in zip(colours, names, strict=True)]
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=4, loc="upper center",
                bbox_to_anchor=(0.5, 1.14))  # fmt: skip
    bare(axes)


def averaging(figure: Figure) -> None:
    """Test loss against the bytes that a worker pushes, for each way to average."""
    axes = figure.subplots()
    ways: dict[str, list[dict[str, float]]] = {}
    read = result("averaging")
    for run in read["trained"]:
        if run["model"] == "mlp":
            ways.setdefault(run["way"], []).append(run)
    for way, runs in ways.items():
        pushed = fmean(run["pushed"] for run in runs) / read["steps"]
        loss = fmean(run["loss"] for run in runs)
        colour = GREEN if way.startswith("diloco") else ORANGE if way == "sync" else BLUE
        axes.scatter(pushed, loss, s=45, color=colour, zorder=3)
        axes.annotate(way, (pushed, loss), xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(500, 1_500_000)
    axes.set_xlabel("bytes that a worker pushes a step")
    axes.set_ylabel("test loss of the MLP")
    bare(axes)


def checkpoints(figure: Figure) -> None:
    """A job that is interrupted and resumed, with another number of tasks."""
    axes = figure.subplots()
    rows = (("first run\n--ps 1 --workers 2", 0, 7.2), ("resumed\n--ps 2 --workers 3", 6, 12))
    for row, (_, start, end) in enumerate(rows):
        axes.broken_barh([(start, end - start)], (row - 0.25, 0.5), color=BLUE)
    for step in (2, 4, 6):
        axes.plot([step], [0], marker="o", color="white", markersize=9, markeredgecolor="black")
    for step in (8, 10, 12):
        axes.plot([step], [1], marker="o", color="white", markersize=9, markeredgecolor="black")
    axes.broken_barh([(6, 1.2)], (-0.25, 0.5), color=RED)
    axes.annotate("", (6, 0.75), (6, 0.25), arrowprops={"arrowstyle": "-|>", "color": "black"})
    axes.text(6.6, -0.55, "lost when all servers die here", ha="center", fontsize=8, color=RED)
    axes.text(0, -0.55, "circles: checkpoints", fontsize=8)
    axes.text(5.8, 0.5, "newest good checkpoint", ha="right", va="center", fontsize=8)
    axes.set_yticks((0, 1), [title for title, *_ in rows], fontsize=8)
    axes.set_ylim(1.5, -0.8)
    axes.set_xticks(range(0, 13, 2), [str(1000 * step) for step in range(0, 13, 2)])
    axes.set_xlabel("global step")
    bare(axes)


def failures(figure: Figure) -> None:
    """A push with two copies: the answer comes when both have it; then the primary dies."""
    axes = figure.subplots()
    lanes = {"worker": 0.0, "primary": 1.0, "backup": 2.0}
    for lane, height in lanes.items():
        end = 6.3 if lane == "primary" else 12.3
        axes.plot([0, end], [height, height], color=GREY, linewidth=6, solid_capstyle="butt")
    arrow(axes, (0.6, 0), (1.4, 1), "push 7")
    arrow(axes, (1.5, 1), (2.3, 2), "log entry")
    arrow(axes, (3.1, 2), (3.9, 1), "confirmed")
    arrow(axes, (4.0, 1), (4.8, 0), "applied")
    arrow(axes, (5.6, 0), (6.3, 1), "push 8")
    axes.plot([6.3], [1], marker="X", markersize=14, color=RED)
    axes.text(6.5, 1.25, "dies", color=RED, fontsize=9)
    arrow(axes, (7.8, 0), (8.6, 2), "push 8, again")
    axes.text(7.6, 2.32, "takes over as primary", fontsize=8, ha="center")
    arrow(axes, (9.8, 2), (10.6, 0), "applied, once")
    axes.set_yticks(list(lanes.values()), list(lanes), fontsize=9)
    axes.set_ylim(2.6, -0.45)
    axes.set_xticks([])
    axes.set_xlabel("time")
    bare(axes)


def clusters(figure: Figure) -> None:
    """The processes of a job on three hosts, and what they say to each other."""
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 12)
    axes.set_ylim(0, 6)
    for left, title in ((0.2, "host a"), (4.3, "host b"), (8.4, "host c")):
        axes.add_patch(rectangle((left, 0.2), 3.4, 5.5, "#f4f6f9", GREY))
        axes.text(left + 0.15, 5.3, title, fontsize=9, color="#555")
    box(axes, (0.6, 3.5), "ps:0\nand coordinator", ORANGE)
    box(axes, (4.7, 3.5), "ps:1", ORANGE)
    box(axes, (4.7, 0.8), "worker:0 (chief)", BLUE)
    box(axes, (8.8, 0.8), "worker:1", BLUE)
    for start, end in (((5.5, 1.9), (2.2, 3.45)), ((6.0, 1.9), (6.0, 3.45))):
        double_arrow(axes, start, end)
    for start, end in (((9.6, 1.9), (3.0, 3.6)), ((10.1, 1.9), (6.9, 3.45))):
        double_arrow(axes, start, end)
    axes.text(8.75, 4.2, "gradients are pushed,\nvalues are pulled;\nbetween hosts by TLS",
              fontsize=8, va="center")  # fmt: skip


def security(figure: Figure) -> None:
    """Which connections are encrypted: those that leave a host."""
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 12)
    axes.set_ylim(0, 4.2)
    for left, title in ((0.2, "host a"), (6.6, "host b")):
        axes.add_patch(rectangle((left, 0.2), 5.2, 3.8, "#f4f6f9", GREY))
        axes.text(left + 0.15, 3.6, title, fontsize=9, color="#555")
    box(axes, (0.5, 1.9), "ps:0", ORANGE)
    box(axes, (0.5, 0.4), "worker:0", BLUE)
    box(axes, (8.8, 1.2), "worker:1", BLUE)
    double_arrow(axes, (1.3, 1.45), (1.3, 1.9))
    axes.text(3.35, 0.95, "shared memory,\nof this user only", fontsize=8, va="center")
    double_arrow(axes, (3.25, 2.5), (8.75, 1.8), GREEN)
    axes.text(7.0, 3.1, "TLS 1.3, a certificate for each task", fontsize=8, color=GREEN)


def performance(figure: Figure) -> None:
    """What a push of LeNet-5 carries with each codec, and what the model learns with it."""
    axes = figure.subplots()
    runs = result("convergence")["trained"]
    for place, run in enumerate(runs):
        size = run["pushed"] / 1000
        axes.barh(place, size, 0.6, color=GREY if run["codec"] == "none" else BLUE)
        text = f"{size:.0f} kB, test accuracy {run['accuracy']:.4f}"
        axes.text(size + 3, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(runs)), [run["codec"] for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(run["pushed"] for run in runs) / 1000)
    axes.set_xlabel("kB a push, LeNet-5")
    bare(axes)


def sparse(figure: Figure) -> None:
    """A batch's ids, each once, and the servers on which their rows lie."""
    axes = figure.subplots()
    batch, keys = (7, -3, 7, 12, 7, -3, 90), (-3, 7, 12, 90)
    homes = {-3: 0, 90: 0, 7: 1, 12: 1}
    axes.text(0, 4.45, "ids of a batch", fontsize=9)
    for place, key in enumerate(batch):
        axes.add_patch(rectangle((0.62 * place, 3.6), 0.56, 0.6, GREY, GREY))
        axes.text(0.62 * place + 0.28, 3.9, str(key), ha="center", va="center", fontsize=8)
    axes.text(0, 2.75, "each key once", fontsize=9)
    for place, key in enumerate(keys):
        colour = (BLUE, ORANGE)[homes[key]]
        axes.add_patch(rectangle((0.62 * place, 1.9), 0.56, 0.6, colour, colour))
        axes.text(0.62 * place + 0.28, 2.2, str(key), ha="center", va="center", fontsize=8,
                  color="white")  # fmt: skip
    axes.annotate("", (2.2, 2.6), (2.2, 3.5), arrowprops={"arrowstyle": "-|>", "color": "#555"})
    axes.text(0, 0.95, "worker: computes with four rows,\nand pushes four gradients", fontsize=9)
    for server, colour in enumerate((BLUE, ORANGE)):
        bottom = 2.75 - 2.3 * server
        axes.add_patch(rectangle((8.2, bottom), 3.6, 1.7, "white", colour))
        axes.text(8.4, bottom + 1.4, f"ps:{server}", fontsize=9, color=colour)
        mine = [key for key, home in homes.items() if home == server]
        for row, key in enumerate((*mine, "...")):
            height = bottom + 0.95 - 0.36 * row
            axes.text(8.75, height, str(key), fontsize=8, ha="right", va="center")
            if key != "...":
                axes.add_patch(rectangle((8.95, height - 0.13), 2.6, 0.26, colour, colour))
        double_arrow(axes, (2.7, 2.2), (8.1, bottom + 0.85), colour)
    axes.text(8.2, 4.6, "half of all rows each, by a hash of the key", fontsize=9)
    axes.set_xlim(-0.1, 12)
    axes.set_ylim(0.3, 4.9)
    axes.axis("off")


# What figures are made of ------------------------------------------------------------------------


def bare(axes: Axes) -> None:
    """Takes two sides of the frame away."""
    axes.spines[["top", "right"]].set_visible(False)


def patch(colour: str, label: str) -> object:
    """Returns an entry of a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def rectangle(
    corner: tuple[float, float], width: float, height: float, fill: str, edge: str
) -> Any:
    """Returns a rectangle with round corners."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.12"
    return FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=fill, edgecolor=edge)


def box(axes: Axes, corner: tuple[float, float], text: str, colour: str) -> None:
    """Draws a process."""
    axes.add_patch(rectangle(corner, 2.7, 1.05, colour, colour))
    axes.text(corner[0] + 1.35, corner[1] + 0.52, text, ha="center", va="center", color="white",
              fontsize=9)  # fmt: skip


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """Draws a message."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": BLUE, "lw": 1.4})
    middle = ((start[0] + end[0]) / 2 + 0.12, (start[1] + end[1]) / 2)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    axes.text(*middle, text, fontsize=8, va="center", bbox=behind)


def double_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = "#555"
) -> None:
    """Draws a connection."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "<|-|>", "color": colour, "lw": 1.3})


FIGURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float], tuple[str, ...]]] = {
    "updates": (updates, (8, 4.2), ()),
    "collectives": (collectives, (7.5, 3.2), ("replica", "networks")),
    "averaging": (averaging, (7.5, 3.2), ("averaging",)),
    "checkpoints": (checkpoints, (7.5, 2.4), ()),
    "failures": (failures, (7.5, 2.6), ()),
    "clusters": (clusters, (7.5, 3.4), ()),
    "security": (security, (7.5, 2.6), ()),
    "sparse": (sparse, (7.5, 3), ()),
    "performance": (performance, (7.5, 3), ("convergence",)),
}
"""Name: what draws it, its size in inches, the benchmarks whose results it shows."""


def digest(name: str) -> str:
    """Returns what a figure is made from, as a number."""
    _, _, results = FIGURES[name]
    inputs = [Path(source) for source in SOURCES]
    inputs += [RESULTS / f"{result}.json" for result in results]
    return hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]


def stale() -> list[str]:
    """Returns the names of the figures that were drawn from something else than is there now."""
    return [
        name
        for name in FIGURES
        if not (file := FOLDER / f"{name}.svg").exists()
        or f"drawn from {digest(name)}" not in file.read_text(encoding="utf-8")
    ]


def draw(name: str) -> None:
    """Draws one figure."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "trireme", "font.size": 9})
    from matplotlib import pyplot

    write, size, _ = FIGURES[name]
    figure = pyplot.figure(figsize=size, layout="none" if name == "updates" else "tight")
    write(figure)
    FOLDER.mkdir(parents=True, exist_ok=True)
    about = {"Date": None, "Description": f"drawn from {digest(name)} by docs/guide_figures.py"}
    figure.savefig(FOLDER / f"{name}.svg", metadata=about)
    pyplot.close(figure)


def main() -> int:
    """Draws what is out of date, or all."""
    for name in FIGURES if "--all" in sys.argv[1:] else stale():
        draw(name)
        print(f"docs/images/guides/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
