"""The tables of the guides in Chinese: those of guide_tables.py, with their words replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import guide_tables
import translations

WORDS = {
    "Measured on": "测量环境",
    "cores": "核",
    "median, worker steps/s": "中位数，工作节点步数/秒",
    "median, examples/s": "中位数，样本数/秒",
    "median, ms": "中位数，毫秒",
    "median, s": "中位数，秒",
    "of two loops": "相对于两个循环",
    "of sync, four equal": "相对于 sync（四个同速）",
    "of Trireme tcp": "相对于 Trireme tcp",
    "two loops": "两个循环",
    "four equal": "四个同速",
    "one of four 5x slower": "其中一个速度为 1/5",
    "backup": "备份工作节点",
    "way": "方式",
    "bytes pushed a step": "每步推送的字节数",
    "bytes a push": "每次推送的字节数",
    "test loss": "测试损失",
    "test accuracy": "测试准确率",
    "workers": "工作节点",
    "no communication": "无通信",
    "CIFAR network on": "CIFAR 网络",
    "LeNet-5 on": "LeNet-5",
    "1 copy": "1 个副本",
    "2 copies": "2 个副本",
    "keeps nothing": "什么都不记录",
    "metrics every 10 steps": "每 10 步记录指标",
    "all summaries every 10 steps": "每 10 步记录全部摘要",
    "cipher, one core": "只做加密，单核",
    "model, ms a step": "模型，每步毫秒数",
    "all on one": "全在一个任务上",
    "expert's": "手工放置",
    "automatic": "自动放置",
    "two-tower": "双塔",
    "translator": "翻译模型",
    "mixture": "混合专家",
    "transformer of 6 blocks": "6 层 transformer",
    "width 128": "宽度 128",
    "64 tokens": "64 个 token",
    "the pipeline's split": "按流水线的切法",
    "torch's pipelining": "torch 的 pipelining",
    "examples/s": "样本数/秒",
    "features": "个特征",
    "MNIST replica program": "MNIST 副本程序",
}
"""English words of the tables, and what they are in Chinese; the longest that fits is replaced."""
PUNCTUATION = ((", ", "，"), (": [", "：["), (".md).", ".md)。"), ("测量环境 ", "测量环境："))
LONGEST_FIRST = sorted(WORDS, key=len, reverse=True)
WORD = re.compile(rf"\b(?:{'|'.join(map(re.escape, LONGEST_FIRST))})(?!\w)")


def chinese(write: Callable[[], str]) -> Callable[[], str]:
    """Returns what writes a table in Chinese, for a page that is one folder deeper."""

    def written() -> str:
        table = WORD.sub(lambda found: WORDS[found[0]], write())
        for english, ours in PUNCTUATION:
            table = table.replace(english, ours)
        return table.replace("](../../", "](../../../")

    return written


def regions() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yields page, region, and what writes it, as in build.py; an older page may lack some."""
    for name, region, write in guide_tables.REGIONS:
        page = translations.ROOT / "docs" / "zh" / Path(name).relative_to("docs")
        if page.is_file() and f"<!-- generated: {region} -->" in page.read_text(encoding="utf-8"):
            yield page.relative_to(translations.ROOT).as_posix(), region, chinese(write)
