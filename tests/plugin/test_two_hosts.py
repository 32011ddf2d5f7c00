"""Two hosts: two network namespaces of this machine, with names and addresses of their own, one process on the CPU
each, started as users start them, by scripts/pretrain.sh.

Four starts of four interpreters. Needs root; skips where namespaces are not allowed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import PLUGIN, load, pretrain_arguments, train

from tupe.run.record import STALLED, read, state_of

pytestmark = pytest.mark.slow

HOSTS = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}
TIMEOUT = 60  # seconds without progress
QUIET = ["--dropout=0", "--attention-dropout=0", "--max-update=60", "--total-num-update=60", "--disable-validation"]
QUIET += ["--save-interval-updates=5", "--keep-interval-updates=1", "--num-workers=0"]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


class Network:
    """Hosts alpha and beta, connected by a link."""

    def __init__(self):
        self.name = {host: f"{host}-{os.getpid()}" for host in HOSTS}

    def begin(self):
        """Returns why it is not possible, None if it is."""
        for host in HOSTS:
            done = ip("netns", "add", self.name[host])
            if done.returncode:
                return done.stderr.strip()
            folder = Path("/etc/netns", self.name[host])  # what `ip netns exec` puts in the place of /etc/hosts
            folder.mkdir(parents=True)
            lines = [f"{address} {other}\n" for other, address in HOSTS.items()]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        ends = [["alpha", "netns", self.name["alpha"]], ["beta", "netns", self.name["beta"]]]
        done = ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host, address in HOSTS.items():
            ip("-n", self.name[host], "address", "add", f"{address}/24", "dev", host)
            ip("-n", self.name[host], "link", "set", "lo", "up")
            self.link(host, "up")
        return done.stderr.strip() or None

    def end(self):
        for name in self.name.values():
            ip("netns", "delete", name)
            (Path("/etc/netns", name) / "hosts").unlink(missing_ok=True)
            if Path("/etc/netns", name).exists():
                Path("/etc/netns", name).rmdir()

    def link(self, host, state):
        ip("-n", self.name[host], "link", "set", host, state)

    def start(self, host, words, log):
        """A process on a host."""
        become = ["ip", "netns", "exec", self.name[host], "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"']
        environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            command = [*become, "sh", *map(str, words)]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def kill(self, host):
        for pid in ip("netns", "pids", self.name[host]).stdout.split():
            os.kill(int(pid), 9)


@pytest.fixture(scope="module")
def network():
    network = Network()
    reason = network.begin()
    try:
        if reason:
            pytest.skip(f"no network namespaces here: {reason}")
        yield network
    finally:
        for host in HOSTS:
            network.kill(host)
        network.end()


def start(network, data, folder, logs, *more):
    """{host: process}"""
    words = ["bash", PLUGIN.parent / "scripts/pretrain.sh", f"--data={data}", f"--output={folder}"]
    words += ["--gpus=0", "--nodes=2", "--master-addr=alpha", "--arch=tupe_r_tiny"]
    words += ["--tokens-per-sample=24", "--lr=0.01", "--warmup-updates=2"]
    words += [*QUIET, "--batch-size=4", "--update-freq=1", "--log-interval=1"]
    words += [f"distributed_training.heartbeat_timeout={TIMEOUT}", *more]
    logs.mkdir(exist_ok=True)
    return {host: network.start(host, [*words, f"--node-rank={rank}"], logs / host) for rank, host in enumerate(HOSTS)}


def wait_for_update(number, processes, run):
    log = run / "train.log"
    while not (log.is_file() and any(f"num_updates={n}," in log.read_text() for n in range(number, number + 10))):
        assert processes["alpha"].poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)


def weights(folder):
    return load(folder / "checkpoint_last.pt")["model"]


@pytest.fixture(scope="module")
def whole(network, data, tmp_path_factory):
    """Folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    processes = start(network, data, folder, folder / "logs")
    for host, process in processes.items():
        assert process.wait() == 0, (folder / "logs" / host).read_text()[-3000:]
    return folder


def test_two_hosts_equal_one_process_with_twice_the_accumulation(data, whole, tmp_path):
    train(pretrain_arguments(data, tmp_path, *QUIET, "--update-freq=2"))
    one, two = weights(tmp_path), weights(whole)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)


def test_one_host_is_killed_and_later_the_link_is_cut(network, data, whole, tmp_path):
    """The other host ends; both started again, the run goes on exactly, also over 20 s without a link;
    and so does one process with twice the accumulation."""
    run, logs = tmp_path / "run", tmp_path / "logs"
    processes = start(network, data, run, logs)
    wait_for_update(10, processes, run)
    network.kill("beta")
    began = time.monotonic()
    assert processes["alpha"].wait() not in (0, None) and time.monotonic() - began < TIMEOUT + 60
    assert 10 <= load(run / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] < 60

    on_one = tmp_path / "one"
    on_one.mkdir()
    (on_one / "checkpoint_last.pt").write_bytes((run / "checkpoint_last.pt").read_bytes())
    train(pretrain_arguments(data, on_one, *QUIET, "--update-freq=2"))
    for key, value in weights(whole).items():
        torch.testing.assert_close(weights(on_one)[key], value, rtol=1e-3, atol=1e-4)

    processes = start(network, data, run, logs)
    wait_for_update(30, processes, run)
    network.link("beta", "down")
    time.sleep(20)
    network.link("beta", "up")
    assert [process.wait() for process in processes.values()] == [0, 0]
    assert all(torch.equal(weights(run)[key], value) for key, value in weights(whole).items())


def test_one_host_loses_its_power(network, data, tmp_path):
    """Nothing tells the other host: it ends after the time that was asked for."""
    run, logs = tmp_path / "run", tmp_path / "logs"
    processes = start(network, data, run, logs)
    wait_for_update(10, processes, run)
    network.link("beta", "down")
    network.kill("beta")
    assert processes["alpha"].wait() == STALLED and state_of(run) == "failed"
    network.link("beta", "up")
    reason = read(run).failure["reason"]
    assert f"no progress for {TIMEOUT} s" in reason
