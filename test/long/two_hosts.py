#!/usr/bin/env python3
"""Runs scripts/launch_two_hosts.sh on two network namespaces that a pair of interfaces joins, as if they were two
hosts: a run to its end, with the bits of a run on one host; a run whose rank on the other host is killed, and which
ends by itself; a run that SIGTERM to the script makes save; a run whose network is cut; a run in which each rank listens
at a port that a rank on the other host has too. Exit status 77 where namespaces can't be made."""
import functools
import os
import shutil
import signal
import subprocess
import sys
import time

from job import PEER_SECONDS, PROGRAM, ROOT, Difference, Folder, run_checks, wait

ADDRESSES = ("10.213.77.1", "10.213.77.2")
OPTIONS = ["--precision", "bf16", "--zero-stage", "2", "--micro-batch-size", "1", "--global-batch-size", "8", "--bucket-mib", "0.01",
           "--train-steps", "20", "--checkpoint-every", "5", "--collective-timeout", "5"]


class Hosts:
    """Two processes that hold a network namespace each; at the end they end, and the namespaces with them."""
    def __enter__(self):
        self.holders = [subprocess.Popen(["unshare", "--net", "sleep", "3600"], stdin=subprocess.DEVNULL) for _ in range(2)]
        time.sleep(0.3)
        pids = [str(holder.pid) for holder in self.holders]
        self.ip("link", "add", "long0", "netns", pids[0], "type", "veth", "peer", "name", "long0", "netns", pids[1])
        for host, address in enumerate(ADDRESSES):
            for command in (["addr", "add", address + "/24", "dev", "long0"], ["link", "set", "long0", "up"], ["link", "set", "lo", "up"]):
                subprocess.run([*self.inside(host), "ip", *command], check=True)
        return self

    def __exit__(self, *_):
        for holder in self.holders:
            holder.kill()
            holder.wait()

    def ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)

    def inside(self, host):
        return ["nsenter", "--net=/proc/%d/ns/net" % self.holders[host].pid]

    def leave_two_ports(self):
        """Leaves each host two ports of the parity that the kernel gives to listeners first, and many to connections."""
        for host in range(2):
            for name, value in ("port_range", "40000 40063"), ("reserved_ports", ",".join(map(str, range(40005, 40064, 2)))):
                setting = "echo %s >/proc/sys/net/ipv4/ip_local_%s" % (value, name)
                subprocess.run([*self.inside(host), "sh", "-c", setting], check=True)

    def start(self, folder, name, options):
        """Starts the script on the first host. RSH names what runs a command on the second one, and keeps the command
        one word."""
        shell = folder.path + "/rsh"
        with open(shell, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\nexec %s env TRAIN_GPT='%s' sh -c \"$1\"\n" % (" ".join(self.inside(1)), PROGRAM))
        os.chmod(shell, 0o755)
        environment = {**os.environ, "GPUS": "2", "ADDRESS": ADDRESSES[0], "PORT": "29411", "RSH": shell, "TRAIN_GPT": PROGRAM}
        with open(folder.out(name) + ".0.log", "wb") as log:
            return subprocess.Popen([*self.inside(0), ROOT + "/scripts/launch_two_hosts.sh", "other", *folder.command(name, "llama", options)[1:]],
                                    env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def expect(folder, name, process, statuses):
    """Waits for the script, which must end with its worst rank's status."""
    status = wait([process], PEER_SECONDS)[0]
    if status not in statuses:
        raise Difference("%s: status %d, not %s\n%s" % (name, status, statuses, folder.said(name, 1)))


def wait_for_step(folder, name, step):
    end = time.monotonic() + PEER_SECONDS
    while time.monotonic() < end:
        try:
            if max(folder.log(name), default=0) >= step:
                return
        except (FileNotFoundError, ValueError):
            pass
        time.sleep(0.02)
    raise Difference("%s: step %d did not come\n%s" % (name, step, folder.said(name, 1)))


def ranks_on(hosts, host):
    """Returns the programs that run in a host's namespace."""
    namespace = os.readlink("/proc/%d/ns/net" % hosts.holders[host].pid)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink("/proc/%s/ns/net" % pid) == namespace and os.readlink("/proc/%s/exe" % pid) == os.path.realpath(PROGRAM):
                found.append(int(pid))
        except OSError:
            pass
    return found


def a_run_to_its_end(hosts, folder):
    expect(folder, "two", hosts.start(folder, "two", OPTIONS), [0])
    processes = folder.start("one", 4, "llama", OPTIONS)
    wait(processes, PEER_SECONDS)
    folder.same_end("one", "two", 20)


def a_killed_rank(hosts, folder):
    endless = [*OPTIONS, "--train-steps", "1000000", "--checkpoint-every", "0"]
    process = hosts.start(folder, "killed", endless)
    wait_for_step(folder, "killed", 3)
    os.kill(ranks_on(hosts, 1)[0], signal.SIGKILL)
    expect(folder, "killed", process, [1, 137])
    if ranks_on(hosts, 0) or ranks_on(hosts, 1):
        raise Difference("ranks live on")
    if "ended during" not in folder.said("killed", 1) and "ended" not in folder.said("killed", 1):
        raise Difference("nobody says which rank ended\n" + folder.said("killed", 1))


def a_signal_saves(hosts, folder):
    process = hosts.start(folder, "stopped", [*OPTIONS, "--train-steps", "1000000", "--checkpoint-every", "0"])
    wait_for_step(folder, "stopped", 3)
    process.terminate()
    expect(folder, "stopped", process, [3])
    if len(folder.steps("stopped")) != 1:
        raise Difference("no checkpoint was saved: %s" % folder.steps("stopped"))


def a_cut_network(hosts, folder):
    process = hosts.start(folder, "cut", [*OPTIONS, "--train-steps", "1000000", "--checkpoint-every", "0"])
    wait_for_step(folder, "cut", 3)
    subprocess.run([*hosts.inside(1), "ip", "link", "set", "long0", "down"], check=True)
    expect(folder, "cut", process, [1])
    if "cut off" not in folder.said("cut", 1):
        raise Difference("nobody says that a rank is cut off\n" + folder.said("cut", 1))
    subprocess.run([*hosts.inside(1), "ip", "link", "set", "long0", "up"], check=True)


def a_port_on_both_hosts(hosts, folder):
    """The two hosts have one name, so a rank looks for the others' ports on its own host first."""
    hosts.leave_two_ports()
    expect(folder, "ports", hosts.start(folder, "ports", [*OPTIONS, "--train-steps", "3"]), [0])


def and_no_rank_is_left(check, hosts, folder):
    try:
        check(hosts, folder)
    finally:
        for pid in ranks_on(hosts, 0) + ranks_on(hosts, 1):
            os.kill(pid, signal.SIGKILL)


def main():
    for command in ("unshare", "nsenter", "ip"):
        if not shutil.which(command):
            print("missing: %s, of Debian's util-linux and iproute2" % command)
            return 77
    if subprocess.run(["unshare", "--net", "ip", "link", "add", "long0", "type", "veth", "peer", "name", "long1"], check=False,
                      capture_output=True).returncode != 0:
        print("missing: the right to a network namespace with a pair of interfaces, which root has")
        return 77
    with Hosts() as hosts, Folder() as folder:
        checks = (a_run_to_its_end, a_killed_rank, a_signal_saves, a_cut_network, a_port_on_both_hosts)
        return run_checks([(check.__name__, functools.partial(and_no_rank_is_left, check, hosts, folder)) for check in checks])


if __name__ == "__main__":
    sys.exit(main())
