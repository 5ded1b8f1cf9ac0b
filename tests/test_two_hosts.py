"""Two hosts under torchrun, joined by a cable that can be cut.

Each host is a network namespace of this machine, with an interface and an address of its own, and
nothing but the cable leads out of it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from two_hosts_cases import network, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

HERE = Path(__file__).parent
# Addresses set aside for examples (RFC 5737).
ADDRESSES = ("192.0.2.1", "192.0.2.2")
RANKS_PER_HOST = 2
WORLD_SIZE = RANKS_PER_HOST * len(ADDRESSES)


def ip(*arguments: str) -> str:
    """Runs iproute2's command; returns what it prints."""
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout


class Hosts:
    """Two hosts, and torchrun's agents that were started on them."""

    def __init__(self) -> None:
        self.names = [f"syncbn-triton-{os.getpid()}-{n}" for n in range(len(ADDRESSES))]
        self._agents: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        """Makes the hosts, and ``eth0`` on each, the two ends of a cable."""
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        veth = ("type", "veth", "peer", "name", "eth0", "netns", second)
        ip("link", "add", "eth0", "netns", first, *veth)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", "eth0", "down")

    def start(self, folder: Path, steps: int, timeout: float) -> None:
        """Starts `two_hosts_cases` by torchrun on each host; its output goes to the folder."""
        left_out = ("TRITON_INTERPRET", "SYNCBN_TRITON_BACKEND")
        environment = {n: value for n, value in os.environ.items() if n not in left_out}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        case = (str(HERE / "two_hosts_cases.py"), str(folder), str(steps), str(timeout))
        for node, name in enumerate(self.names):
            torchrun = (
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", f"{len(ADDRESSES)}", "--nproc-per-node", f"{RANKS_PER_HOST}"),
                *("--node-rank", f"{node}", "--master-addr", ADDRESSES[0]),
                *("--master-port", "29500", "--local-addr", ADDRESSES[node]),
            )
            with (folder / f"{name}.log").open("wb") as log:
                self._agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *torchrun, *case],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self, seconds: float) -> list[int]:
        """The agents' exit codes."""
        deadline = time.monotonic() + seconds
        return [agent.wait(max(0, deadline - time.monotonic())) for agent in self._agents]

    def running(self) -> list[int]:
        """Processes on either host."""
        return [int(pid) for name in self.names for pid in ip("netns", "pids", name).split()]

    def received(self) -> list[int]:
        """Bytes that each host received over the cable."""
        shown = [ip("-n", name, "-json", "-stats", "link", "show", "eth0") for name in self.names]
        return [json.loads(text)[0]["stats64"]["rx"]["bytes"] for text in shown]

    def close(self) -> None:
        """Ends all that runs on the hosts, and the hosts."""
        made = [name for name in self.names if name in ip("netns", "list").split()]
        for name in made:
            for pid in ip("netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
        for agent in self._agents:
            agent.wait()
        for name in made:
            ip("netns", "delete", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made by ip, of iproute2, which is not here")
    hosts = Hosts()
    try:
        try:
            hosts.connect()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield hosts
    finally:
        hosts.close()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def test_two_hosts_train_as_one_process(hosts: Hosts, tmp_path: Path) -> None:
    """The demo's network, against torch's layers on all images of a step in this process."""
    steps = 5
    before = hosts.received()
    hosts.start(tmp_path, steps, timeout=60)
    assert hosts.wait(90) == [0, 0], logs(tmp_path)
    assert not hosts.running()

    alone = network()
    losses, state = train(alone, steps), alone.state_dict()
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD_SIZE)]
    of_ranks = torch.tensor([result[0] for result in results], dtype=torch.float64)
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(of_ranks.mean(0), torch.tensor(losses, dtype=torch.float64), **close)
    for _, of_rank in results:
        torch.testing.assert_close(of_rank, state, **close)
    # All of the gradients came over the cable, in every step.
    gradients = steps * sum(p.nbytes for p in alone.parameters())
    for then, now in zip(before, hosts.received(), strict=True):
        assert now - then > gradients


def test_a_cut_cable_ends_every_rank_in_time(hosts: Hosts, tmp_path: Path) -> None:
    timeout, slack = 10, 20
    hosts.start(tmp_path, 10**9, timeout)
    step_files = [tmp_path / f"{rank}.step" for rank in range(WORLD_SIZE)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() not in "012" for file in step_files):
        assert time.monotonic() < deadline, logs(tmp_path)
        time.sleep(0.1)
    hosts.cut()
    cut = time.time()
    exit_codes = hosts.wait(timeout + slack)
    assert exit_codes == [1, 1], logs(tmp_path)
    assert not hosts.running()
    for rank in range(WORLD_SIZE):
        error = tmp_path / f"{rank}.error"
        assert "RuntimeError" in error.read_text(), logs(tmp_path)
        assert error.stat().st_mtime - cut < timeout + slack
