"""Degrees of parallelism: read, refused with what to say instead, and who stands where."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigurationError
from trireme.mesh import AXES, Mesh

degrees = st.integers(1, 4)
meshes = st.builds(Mesh, pp=degrees, dp=degrees, fsdp=degrees, tp=degrees)


@given(meshes)
def test_what_is_written_is_read_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.size == mesh.pp * mesh.dp * mesh.fsdp * mesh.tp


@given(meshes)
def test_every_rank_has_a_place_of_its_own(mesh: Mesh) -> None:
    places = [tuple(mesh.coordinates(rank)[axis] for axis in AXES) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert places == sorted(places), "the last axis runs fastest: its processes are neighbours"
    replicas = [mesh.replica(rank) for rank in range(mesh.size)]
    assert set(replicas) == set(range(mesh.replicas))
    assert all(replicas.count(r) == mesh.pp * mesh.tp for r in range(mesh.replicas))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "write axis=degree"),
        ("dp=x", "write axis=degree"),
        ("fspd=2", "there is no axis 'fspd' (did you mean fsdp?); there are"),
        ("dp=2,dp=2", "dp is named twice"),
        ("dp=0", "a degree is a whole number from 1"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Mesh.parse(text)


def test_too_many_or_too_few_processes_name_the_nearest_mesh() -> None:
    with pytest.raises(ConfigurationError, match=r"start 4, or use --mesh dp=4,tp=2"):
        Mesh(dp=2, tp=2).check_processes(8)
    with pytest.raises(ConfigurationError, match=r"start 4, or use --mesh dp=3"):
        Mesh(dp=2, tp=2).check_processes(3)
