"""What the attacks share: a shell, of whose commands nothing may be left."""

from tests.integration.conftest import shell as shell
