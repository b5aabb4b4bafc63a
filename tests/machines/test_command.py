"""`dualform serve --ray`: the command, a real client, an end that leaves nothing running."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import warm

from dualform.client import Client
from dualform.engine import Index
from dualform.serve import ConfigError, RayActors, ServerConfig


@pytest.mark.slow
def test_the_command_serves_from_processes_and_ends_them(
    sharded_index: Path, ray_folder: Path
) -> None:
    arguments = [sharded_index, "--ray", "local", "--actors", 2, "--port", 0]
    process = warm.start("dualform", "serve", *arguments)
    try:
        listening = process.stdout.readline()
        assert listening.startswith("listening on "), process.communicate(timeout=60)[1]
        children = psutil.Process(process.pid).children(recursive=True)
        assert sum("Machine" in " ".join(child.cmdline()) for child in children) == 2
        queries = np.random.default_rng(0).standard_normal((2, 48)).astype(np.float32)
        with Client(listening.split()[-1]) as client, Index.open(sharded_index) as index:
            hits = client.top_k("2", queries, k=5, where="label = 6", partial=True)
            expected = index.top_k("2", queries, 5)
            np.testing.assert_array_equal(client.top_k("2", queries, k=5).rows, expected.rows)
            assert set(hits["label"].ravel().tolist()) == {6}
            assert hits.coverage.missing == 0
            profile = client.profile("2", queries, bins=6)
            assert profile.counts.sum() == index.layer("2").rows
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "drained" in errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.parametrize(
    "address",
    [
        pytest.param("127.0.0.1:1", marks=pytest.mark.slow),
        pytest.param("127.0.0.1:" + "9" * 20, marks=pytest.mark.slow),
        "127.0.0.1:²",
    ],
)
def test_a_cluster_that_is_not_there(sharded_index: Path, ray_folder: Path, address: str) -> None:
    arguments = [sharded_index, "--ray", address, "--port", "0"]
    found = warm.run("dualform", "serve", *arguments)
    assert found.returncode == 2, found.stderr
    assert "ray: " in found.stderr
    assert "ray start --head" in found.stderr
    assert "Traceback" not in found.stderr


def test_actors_need_ray(sharded_index: Path) -> None:
    found = warm.run("dualform", "serve", sharded_index, "--actors", "3")
    assert found.returncode == 2
    assert "--actors goes with --ray ADDRESS, or --ray local" in found.stderr


def test_configuration(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("ray: {address: auto, actors: 4}\n")
    assert ServerConfig.load(path).ray == RayActors("auto", 4)
    path.write_text("ray: {address: 10.0.0.1:6379}\n")
    assert ServerConfig.load(path).ray == RayActors("10.0.0.1:6379", None)
    for text, says in (
        ("ray: local", "ray must hold"),
        ("ray: {nodes: 2}", "unknown key 'nodes' in ray"),
        ("ray: {actors: 0}", "ray.actors is 0"),
        ("ray: {address: 7}", "ray.address is 7"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(ConfigError, match=says):
            ServerConfig.load(path)
