"""The command `completion`, as its entry point declares it."""

from __future__ import annotations

from trireme.cli.command import Command, Parser


def _parser() -> Parser:
    parser = Parser(
        "completion",
        "SHELL",
        "Prints the script by which SHELL completes commands, options, their values, directories "
        'and files. bash: eval "$(trireme completion bash)" in ~/.bashrc; zsh: eval "$(trireme '
        'completion zsh)" in ~/.zshrc, after compinit; fish: trireme completion fish > '
        "~/.config/fish/completions/trireme.fish.",
    )
    parser.add("SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish"))
    return parser


COMPLETION = Command(
    "print the script by which a shell completes commands",
    _parser,
    "trireme.completion.command:main",
)
