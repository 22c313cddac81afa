from __future__ import annotations

import pytest

from trireme.fork.template import sets_environment_early


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n",
        "import os\nos.environ.setdefault('TORCH_LOGS', 'all')\nfrom torch import nn\n",
        "from os import environ as e\ne['A'] = '1'\nimport trireme\n",
        "import os\nif True:\n    os.putenv('A', '1')\nimport torch.nn\n",
        "import os\nos.environ['A'] = '1'\n",
    ],
)
def test_a_program_may_set_variables_before_torch_reads_them(source: str) -> None:
    assert sets_environment_early(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nimport os\nos.environ['A'] = '1'\n",
        "import os\nfrom trireme.data import digits\nprint(os.environ)\n",
        "import os, torch\nprint(os.environ['HOME'])\n",
        "import numpy\n",
        "no program",
        "null \0",
        "",
    ],
)
def test_other_programs_do_not(source: str) -> None:
    assert not sets_environment_early(source)
